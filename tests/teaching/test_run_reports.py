"""Reports of notebooks on their runs: summaries, comparisons with static precision and the paper, verdicts."""

import re

import numpy as np
import pandas as pd
import pytest

import cpt_core as cpt
from cpt_lab.analysis.estimates import Estimate
from cpt_lab.analysis.metrics import main_metric
from cpt_lab.analysis.run_groups import at_q_max
from cpt_lab.analysis.run_table import committed
from cpt_lessons import evidence_figures, paper_runs, run_reports
from cpt_lessons.parameters import check_parameters
from cpt_lessons.predictions import PREDICTIONS
from cpt_lessons.run_reports import beside_static, compare_with_paper, print_runs
from tests.analysis.synthetic import runs_of


def test_print_runs_summarises_runs_in_one_line(capsys):
    arms, seeds = ["CR", "CR", "RR"], [0, 1, 0]
    runs = pd.DataFrame({"arm": arms, "seed": seeds, "diverged": False, "seconds": 0.8})
    print_runs(runs)
    print_runs(runs[:1].assign(diverged=True))
    print_runs(runs[:0])
    assert capsys.readouterr().out.splitlines() == [
        "3 runs, 2 arms, 2 seeds, none diverged: 2 s of training",
        "1 run, 1 arm, 1 seed, 1 diverged: 1 s of training",
        "nothing to run",
    ]


@pytest.fixture
def shown(monkeypatch):
    """Return the figures and tables that a notebook would display, of two made-up claims."""
    displayed = []
    monkeypatch.setattr(run_reports, "display", displayed.append)
    texts = ["cycles are better", "cycles are worse"]
    claims = pd.DataFrame({"the paper says": texts, "verdict": ["holds", "not run"]})
    monkeypatch.setattr(
        run_reports.reproduction, "claims_table", lambda topic, runs: claims
    )
    return displayed


def report_lines(capsys):
    """Return the printed lines, without seconds."""
    text = re.sub(r": \d+ s of training", "", capsys.readouterr().out)
    return text.splitlines()


@pytest.mark.slow
def test_compare_with_paper_pairs_equal_cost_baselines(capsys, shown):
    rows = committed("image_digits").query("model == 'mlp6' and q_min == 3")
    arms = ["RR", "CR", "static 3", "static 4", "static 5", "static 8"]
    compare_with_paper(rows[rows.arm.isin(arms)])
    assert report_lines(capsys) == [
        "60 runs, 6 arms, 10 seeds, none diverged",
        "95 % intervals, not corrected for several comparisons:",
        "RR (cost 0.40) minus static 4 (0.42): +0.00 [-1.74, +1.74] points, n = 10: cannot be told from 0",
        "CR (cost 0.63): no static precision ran within 10 % of its cost",
    ]
    figure, table = shown
    assert "static 8 reaches" in " ".join(text.get_text() for text in figure.texts)
    assert "cycles are better" in table.html()
    assert "cycles are worse" not in table.html()
    compare_with_paper(rows[rows.arm == "RR"])
    line = "RR (cost 0.40): no static precision ran within 10 % of its cost"
    assert report_lines(capsys)[2:] == [line]


FIGURES = [  # figure, task, data set, and further parameters; with the number of its comparisons
    (paper_runs.figure_3, "image", "digits", {}, 3),
    (paper_runs.figure_4, "detection", "digit-scenes", {"schedules": ["RR"]}, 1),
    (paper_runs.figure_6, "graph", "digits-graph", {}, 2 * 3),
    (paper_runs.figure_7, "language_model", "pydoc", {}, 3),
    (
        paper_runs.figure_7,
        "language_model",
        "",
        {"schedules": ["CR", "RR"], "pairs": "templates"},
        2,
    ),
]


@pytest.mark.parametrize(("figure", "task", "dataset", "changes", "count"), FIGURES)
def test_paper_runs_have_static_baselines_at_demo(
    figure, task, dataset, changes, count, capsys
):
    """Train static precision at about the cost of every schedule."""
    values = {"schedules": list(cpt.SUITE), "q_max": [8], "seeds": [0], **changes}
    specs = figure(check_parameters(task, scale="demo", dataset=dataset, **values))
    metric = main_metric(specs[0].recipe.task).name
    runs = pd.DataFrame(
        {
            "arm": s.arm,
            "q_max": s.q_max,
            "relative_cost": s.relative_cost,
            "aggregation": getattr(s.recipe, "aggregation", ""),
        }
        for s in specs
    ).assign(task=specs[0].recipe.task, seed=0, diverged=False, **{metric: 0.5})
    capsys.readouterr()
    beside_static(at_q_max(runs, None))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == count
    assert all(" minus static " in line.split(":")[0] for line in lines), lines


@pytest.mark.slow
def test_compare_with_paper_covers_experiments_and_aggregations(capsys, shown):
    arms = "arm in ['RR', 'CR', 'static 2', 'static 3', 'static 5', 'static 8']"
    gcn = committed("graph_facebook").query(f"model == 'gcn' and {arms}")
    text = committed("language_pydoc").query(f"{arms} and q_max in [8, 6]")
    text = text[text.arm.isin(["RR", "static 3", "static 8"])]
    compare_with_paper(gcn.assign(scale="demo"), text.assign(scale="demo"))
    lines = [line.split(":")[0] for line in report_lines(capsys)]
    assert [line for line in lines if " minus " in line] == [
        "FP-Agg, RR (cost 0.28) minus static 3 (0.30)",
        "FP-Agg, CR (cost 0.55) minus static 5 (0.55)",
        "RR (cost 0.30) minus static 3 (0.30)",
    ]
    assert len(shown) >= 4


SMOKE_LINE = (
    'smoke runs are too short to compare; scale = "demo" draws the figure of your runs'
)
SMOKE_FIGURES = {
    "digits": ("image", paper_runs.figure_3),
    "digit-scenes": ("detection", paper_runs.figure_4),
}


def smoke_runs(dataset, value, **changes):
    """Return runs of a notebook at smoke scale, all of one accuracy and loss."""
    task, figure = SMOKE_FIGURES[dataset]
    parameters = {"schedules": ["ER"], "static_bits": [8], "q_max": [8], "seeds": [0]}
    parameters |= {"model": "", "dataset": dataset, **changes}
    specs = figure(check_parameters(task, scale="smoke", **parameters))
    runs = runs_of(specs, lambda spec: value)
    return runs.assign(accuracy=value, loss=value, seconds=1.0)


@pytest.mark.parametrize(
    ("dataset", "good", "bad", "name"),
    [
        ("digits", 0.88, 0.1, "smoke accuracy of"),
        ("digit-scenes", 1.7, 2.2, "smoke loss of the detector with"),
    ],
)
def test_compare_with_paper_checks_smoke_bands(dataset, good, bad, name, capsys):
    compare_with_paper(smoke_runs(dataset, good))
    assert report_lines(capsys)[1:] == [
        SMOKE_LINE,
        f"{name} ER: within four standard deviations of 12 earlier seeds",
        f"{name} static 8: within four standard deviations of 12 earlier seeds",
    ]
    with pytest.raises(AssertionError, match="outside its band"):
        compare_with_paper(smoke_runs(dataset, bad))
    compare_with_paper(smoke_runs(dataset, bad).assign(dataset="my-images/"))


@pytest.mark.parametrize("dataset", SMOKE_FIGURES)
@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 40},
        {"learning_rate": 0.5},
        {"q_min": 2},
        {"n_cycles": 4},
        {"q_grad": 4},
        {"q_max": [6], "static_bits": [6]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_compare_with_paper_has_no_band_for_changes(dataset, changes, capsys):
    """A band was measured with the default parameters; others train to other results."""
    compare_with_paper(smoke_runs(dataset, 0.1, **changes))
    line = "ER: no range was measured for these parameters"
    assert any(text.endswith(line) for text in report_lines(capsys))


def test_predicted_cycle_runs_mostly_at_2_bits():
    cost = cpt.StaticSchedule(3, 160).relative_cost(8, 8)
    cycle = cpt.solve_schedule(cost, 2, 8, 160, n_cycles=2, family="cosine")
    assert PREDICTIONS["steps at 2 bits"][0] == "c"
    assert cycle.share_at(2) > 2 / 3


def test_margin_lines_apply_holm_correction():
    x = np.random.default_rng(0).normal(size=9)
    x = 0.1 * (x - x.mean())
    near, far, wide = (
        Estimate(name, "points", values, 0.2)
        for name, values in (("near", x), ("far", x - 1), ("wide", 99 * x))
    )
    lines = evidence_figures.margin_lines([near, far, wide], "abc", below="lost")
    words = [line[-1].partition(" (")[0] for line in lines]
    assert words == ["within the margin", "lost", "inconclusive"]
    (line,) = evidence_figures.margin_lines([far], "a", above="won")
    assert line[1] == pytest.approx(-5)
