"""Comparison of int8 and simulated runs on synthetic rows: selection, pairing and wording."""

import numpy as np
import pytest

from cpt_lab.analysis import int8_comparison, report, run_groups
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.session import Session
from tests.helpers import row_of, smoke_spec

WAYS = {
    ("simulated", False): 0.80,
    ("integer", False): 0.81,
    ("simulated", True): 0.70,
    ("integer", True): 0.70,
}


def rows(seeds=range(6), **changes):
    """Return rows with accuracies by execution, noise by seed and a test loss of twice the error."""
    made = []
    for spec in designs.execution("demo", "digits", seeds=seeds, **changes):
        noise = np.random.default_rng(spec.seed).normal(0, 0.02)
        value = WAYS[spec.recipe.execution, spec.recipe.shared_steps] + noise
        evaluations = [
            {"step": step, "test": {"loss": 2 * (1 - value) + 1 / step}}
            for step in (10, 20)
        ]
        row = row_of(spec, value)
        loss = {**row["metrics"][0], "name": "loss", "value": 2 * (1 - value)}
        seconds = (
            1.0
            + spec.recipe.shared_steps
            + 0.5 * (spec.recipe.execution == "integer")
            + 0.01 * spec.seed
        )
        made.append(
            {
                **row,
                "metrics": [*row["metrics"], loss],
                "evaluations": evaluations,
                "seconds": seconds,
            }
        )
    return made


def of(made):
    """Return the runs of the only experiment in the rows."""
    (part,) = int8_comparison.executions(table(made))
    return part


@pytest.mark.parametrize(("how", "shared"), [("simulated", True), ("integer", False)])
def test_recipe_execution_selects_int8_matmuls(how, shared):
    spec = smoke_spec("digits", execution=how, shared_steps=shared)
    layers = [
        m.precision
        for m in Session(load_task_class(spec), spec).model.modules()
        if hasattr(m, "precision")
    ]
    assert layers
    for precision in layers:
        assert precision.execution == how
        own = [
            q.granularity for role, q in precision.quantizers.items() if "_" not in role
        ]  # without other operations
        assert (set(own) == {"per_tensor"}) is shared


def test_execution_difference_pairs_by_seed():
    found = int8_comparison.execution_difference(of(rows()), "accuracy").set_index(
        "comparison"
    )
    assert found["difference"].tolist() == pytest.approx([0.01, 0, -0.1])
    assert (found["high"] - found["low"]).tolist() == pytest.approx([0, 0, 0], abs=1e-9)
    assert found["pairs"].tolist() == [6, 6, 6]
    some = [r for r in rows() if not r["spec"]["recipe"].get("shared_steps")]
    assert int8_comparison.execution_difference(of(some), "accuracy")[
        "comparison"
    ].tolist() == ["integer minus simulated"]
    said = int8_comparison.summary(of(rows()))
    assert said["of"].tolist() == ["accuracy %"] * 3 + ["loss"] * 3
    assert said["difference [95 %]"].tolist()[::3] == [
        "+1.0 [+1.0, +1.0]",
        "-0.020 [-0.020, -0.020]",
    ]


def test_execution_difference_counts_diverged_runs():
    ended = {"status": "diverged", "metrics": [], "evaluations": []}
    lost = [
        r["spec"]["seed"] == 2 and "execution" in r["spec"]["recipe"] for r in rows()
    ]
    made = [{**r, **ended} if gone else r for r, gone in zip(rows(), lost, strict=True)]
    found = int8_comparison.execution_difference(of(made), "accuracy").set_index(
        "comparison"
    )
    assert found["diverged"].tolist() == [1, 1, 0]
    assert found["pairs"].tolist() == [6, 6, 6]
    assert found["difference"].tolist() == pytest.approx(
        [0.01 * 5 / 6 - 0.7 / 6, -0.1, -0.1], abs=0.005
    )


def test_execution_runs_form_separate_experiment():
    runs = table(
        [
            *rows(),
            *(row_of(s, 0.8) for s in designs.quality_cost("demo", seeds=range(2))),
        ]
    )
    assert [len(part) for part in int8_comparison.executions(runs)] == [24]
    (rest,) = run_groups.quality_cost_groups(runs)
    assert len(rest) == 34
    assert int8_comparison in report.RESULT_MODULES
    assert [s.title.split(":")[0] for s in int8_comparison.sections(runs)] == [
        "Int8 matmuls compared with simulated ones"
    ]
    assert int8_comparison.executions(rest) == []
