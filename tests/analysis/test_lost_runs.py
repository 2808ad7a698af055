"""Diverged and failed runs: counted and shown in every analysis, on synthetic rows of both signs."""

import numpy as np
import pytest

from cpt_lab.analysis import (
    aggregation,
    critical_periods,
    equal_cost,
    paper_comparison,
    predictors,
    quality_cost,
    run_groups,
)
from cpt_lab.analysis.claims import CONFIRMED, CONTRADICTED, OPEN
from cpt_lab.analysis.metrics import METRICS
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs
from cpt_lab.experiments.registry import DATASETS, EXPERIMENTS, recipe
from tests.analysis.test_claims import by_arm, entry, rows_of
from tests.helpers import row_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


# the evaluation in which a run was seen to have diverged
NOT_FINITE = {
    "step": 9,
    "test": dict.fromkeys(METRICS),
    "valid": dict.fromkeys(METRICS),
    "not_finite": ["test.loss"],
}


def lost(rows, which, status="diverged", error=""):
    """Return the rows with a selection turned into runs without a result."""
    return [
        {
            **r,
            "status": status,
            "metrics": [],
            "error": error,
            "evaluations": [*r["evaluations"], NOT_FINITE],
        }
        if which(r["spec"]["arm"], r["spec"]["seed"])
        else r
        for r in rows
    ]


def test_claim_counts_diverged_arm_as_lost():
    rows = by_arm(designs.quality_cost("demo", seeds=range(4)), {})
    for arm, word in (("CR", CONTRADICTED), ("static 8", CONFIRMED)):
        e = entry(lost(rows, lambda a, seed, arm=arm: a == arm), "cpt_improves")
        assert e.verdict(False) == word
        effect = e.effects[0][0]
        assert effect.n == 4
        assert effect.interval[0] == pytest.approx(
            70 if arm == "static 8" else -70, abs=0.1
        )  # 80 %, and chance
        assert e.evidence()[0].endswith("n = 4, 4 of 8 runs diverged")


def test_claim_counts_diverged_seeds():
    """Leave a claim open if the better arm diverges in half of its runs."""
    rows = by_arm(designs.quality_cost("demo", seeds=range(6)), {"CR": 0.85})
    assert entry(rows, "cpt_improves").verdict(False) == CONFIRMED
    e = entry(lost(rows, lambda arm, seed: arm == "CR" and seed < 3), "cpt_improves")
    assert e.verdict(False) == OPEN
    assert (e.effects[0][0].n, e.effects[0][0].diverged) == (6, 3)
    group = entry(lost(rows, lambda arm, seed: arm == "RR"), "schedule_controls")
    assert (
        group.verdict(False) == CONFIRMED
    )  # the group of large savings has not gone with RR
    assert group.effects[0][0].interval[0] == pytest.approx(35, abs=0.1)


def test_correlation_includes_diverged_arms():
    rows = rows_of(
        designs.quality_cost("demo", seeds=range(3)),
        lambda s: 0.5 + 0.1 * float(s.schedule.bits().mean()),
    )
    cheap = entry(lost(rows, lambda arm, seed: arm == "RR"), "cost_decides")
    assert "over 11 arms" in cheap.evidence()[0]
    dear = entry(lost(rows, lambda arm, seed: arm == "static 8"), "cost_decides")
    assert (
        dear.effects[0][0].interval[0] < cheap.effects[0][0].interval[0] - 0.4
    )  # the dearest is now the worst


def test_claim_skips_seeds_diverged_in_both_arms():
    specs = designs.aggregation("demo", "digits-graph", "sage", seeds=range(5))
    rows = rows_of(specs, lambda s: 0.8)
    e = entry(lost(rows, lambda arm, seed: seed < 3), "sage_aggregation")
    assert (e.effects[0][0].n, e.verdict(False)) == (2, OPEN)
    e = entry(lost(rows, lambda arm, seed: True), "sage_aggregation")
    assert e.verdict(False) == OPEN
    assert "no seed to compare" in e.evidence()[0]


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        ("Traceback\n  File ...\nValueError: found NaN in the boxes", True),
        (
            "Traceback\n  File ...\nRuntimeError: expected scalar type Float but found Double",
            True,
        ),
        ("Traceback\n  File ...\ntorch.OutOfMemoryError: CUDA out of memory", False),
        (
            "Traceback\n  File ...\nRuntimeError: [enforce fail] DefaultCPUAllocator: not enough memory",
            False,
        ),
        (
            "Traceback\n  File ...\ncpt_core.data.files.DataNotFoundError: CIFAR-10 is not in data",
            False,
        ),
        (
            "Traceback\n  File ...\ncpt_core.sweeps.stores.StoreError: cannot write rows.jsonl",
            False,
        ),
        ("Traceback\n  File ...\nModuleNotFoundError: No module named 'dgl'", False),
        (
            "Traceback\n  File ...\nurllib.error.URLError: <urlopen error timed out>",
            False,
        ),
        ("took longer than 60 s\n", False),
        ("the process of the run was ended by SIGKILL\n", False),
        (
            "the process of the run ended with status 1 and no result\nImportError: no kernels",
            False,
        ),
    ],
)
def test_run_table_counts_training_errors_as_diverged(error, counts):
    """Count errors raised by the training as divergence, and skip failures of the machine."""
    rows = by_arm(
        designs.quality_cost("demo", schedules=["CR"], static_bits=[8], seeds=range(3)),
        {},
    )
    failed = lost(rows, lambda arm, seed: arm == "CR", "failed", error)
    assert table(failed).query("arm == 'CR'")["diverged"].tolist() == [counts] * 3
    e = entry(failed, "cpt_improves")
    assert e.effects[0][0].n == (3 if counts else 0)
    assert e.verdict(False) == (CONTRADICTED if counts else OPEN)


# --- what such a run counts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "changes", "name", "worst"),
    [
        ("digits", {}, "accuracy", 0.1),
        ("cifar100", {}, "accuracy", 0.01),
        ("templates", {}, "accuracy", 1 / 3),
        ("my/pictures", {}, "accuracy", 0.0),  # how many classes is not known here
        ("ptb", {}, "perplexity", 10_000),
        ("ptb", {"vocabulary": 2_000}, "perplexity", 2_000),
        ("pydoc", {}, "perplexity", 100),
        ("digit-scenes", {}, "map50", 0.0),
    ],
)
def test_task_worst_metric_is_chance_level(dataset, changes, name, worst):
    scale = "paper" if dataset in ("cifar100", "ptb") else "demo"
    found = recipe(scale, dataset).to_dict() | changes
    assert EXPERIMENTS[found["task"]].worst(METRICS[name], found) == pytest.approx(
        worst
    )
    assert np.isnan(EXPERIMENTS[found["task"]].worst(METRICS["loss"], found))


def test_datasets_declare_number_of_classes():
    for name, data in DATASETS.items():
        assert "classes" in data.sizes or name in ("ptb", "pydoc"), name
    for experiment in EXPERIMENTS.values():
        assert all(metric.worst is not None for metric in experiment.metrics)


def test_diverged_runs_get_chance_metrics():
    """Fill in the chance level for every metric that the data set has."""
    specs = designs.quality_cost(
        "demo", "templates", schedules=["CR"], static_bits=[8], seeds=[0]
    )
    rows = [row_of(s, 0.8) for s in specs]
    more = [
        {**rows[0]["metrics"][0], "name": "accuracy_es"},
        {**rows[0]["metrics"][0], "when": "best_valid"},
    ]
    rows[0]["metrics"] += more
    other = [
        row_of(s, 0.8)
        for s in designs.quality_cost(
            "demo", schedules=["CR"], static_bits=[], seeds=[0]
        )
    ]
    line = table(
        [
            *lost(rows, lambda arm, seed: arm == "static 8"),
            *lost(other, lambda arm, seed: True),
        ]
    )
    runs = line.set_index(["dataset", "arm"])
    for name in ("accuracy", "accuracy_es", "accuracy_best_valid", "valid"):
        assert runs.loc[("templates", "static 8"), name] == pytest.approx(1 / 3)
    assert runs.loc[("digits", "CR"), "accuracy"] == pytest.approx(0.1)
    assert np.isnan(runs.loc[("digits", "CR"), "accuracy_es"])  # no such test set
    assert np.isnan(runs.loc[("templates", "static 8"), "perplexity"])


# --- tables and figures ---------------------------------------------------------------------------


def test_equal_cost_includes_diverged_arms():
    specs = designs.equal_cost("demo", "digits", seeds=range(3))
    rows = lost(
        [row_of(s, 0.8) for s in specs],
        lambda arm, seed: arm.startswith("static 4") or (arm, seed) == ("RR", 0),
    )
    found = equal_cost.equal_cost(table(rows)).set_index("arm")
    four = found.loc["static 4, 571 of 600 steps"]
    assert four.spent == pytest.approx(1, abs=0.01)
    assert (four.n, four.diverged, four.pairs, four["mean"]) == (
        3,
        3,
        2,
        pytest.approx(0.1),
    )  # of seed 0 both
    assert four.difference == pytest.approx(-0.7)
    assert found.loc["RR delayed 10 %", "difference"] == pytest.approx(0.7 / 3)
    assert equal_cost.summary(table(rows)).diverged.tolist() == found.diverged.tolist()


def test_aggregation_figure_labels_diverged_runs():
    specs = designs.aggregation(
        "demo", "digits-graph", static_bits=(8,), seeds=range(3)
    )
    rows = [
        {
            **row_of(s, 0.8),
            **(
                {"status": "diverged", "metrics": []}
                if s.recipe.aggregation == "quantized"
                else {}
            ),
        }
        for s in specs
    ]
    (group,) = run_groups.aggregation_groups(table(rows))
    assert aggregation.aggregation_difference(
        group
    ).difference.tolist() == pytest.approx([-0.7] * 3)
    shown = aggregation.summary(group)
    assert shown[["seeds", "diverged"]].to_numpy().tolist() == [[3, 3]]
    labels = [line.get_label() for line in aggregation.figure_5(group).axes[0].lines]
    assert "Q-Agg, static 8 bits (3 of 3 diverged)" in labels
    assert "FP-Agg, static 8 bits" in labels


def test_result_tables_count_diverged_runs():
    specs = designs.quality_cost("demo", seeds=range(3))
    runs = table(
        lost(
            rows_of(specs, lambda s: s.schedule.relative_cost()),
            lambda arm, seed: (arm, seed) == ("RR", 1),
        )
    )
    assert quality_cost.summary(runs).set_index("arm").diverged["RR"] == 1
    assert predictors.summary(
        predictors.predictors_by_title(runs)
    ).diverged.tolist() == [1, 1, 1]
    deficits = [
        row_of(s, 0.9) for s in designs.deficit_scan("demo", "digits", seeds=range(3))
    ]
    found = critical_periods.summary(
        table(lost(deficits, lambda arm, seed: arm == "[0, 200) of 600" and seed == 1))
    )
    assert found.diverged.sum() == 2  # a deficit of both experiments
    costs = designs.quality_cost(
        "paper", "ptb", q_max=[8], schedules=["CR"], static_bits=[], seeds=[0, 1]
    )
    rows = [row_of(s, 90.0, "perplexity") | {"bitops": {"paper": 7e13}} for s in costs]
    said = paper_comparison.summary(table(lost(rows, lambda arm, seed: seed == 1)))[
        "ours (+- std, or [95 %])"
    ]
    assert "7.00 +- 0.00 (n = 2), 1 diverged" in set(said)


def test_quality_cost_handles_all_diverged_runs():
    rows = lost(
        by_arm(designs.quality_cost("demo", seeds=[0, 1]), {}), lambda arm, seed: True
    )
    (section,) = quality_cost.sections(table(rows))
    assert (section.table.diverged == 2).all()
    assert section.notes == ()
