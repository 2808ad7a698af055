"""Reports of notebooks on their runs: summaries, comparisons with static precision and the paper, verdicts."""

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


def test_print_runs_summarises_runs_in_one_line(capsys):
    runs = pd.DataFrame(
        {
            "arm": ["CR", "CR", "RR"],
            "seed": [0, 1, 0],
            "diverged": False,
            "seconds": 0.8,
        }
    )
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
    """Return the figures and tables that a notebook would display."""
    found = []
    monkeypatch.setattr(run_reports, "display", found.append)
    return found


@pytest.mark.slow
def test_compare_with_paper_pairs_equal_cost_baselines(capsys, shown):
    rows = committed("image_digits").query("model == 'mlp6' and q_min == 3")
    compare_with_paper(
        rows[
            rows.arm.isin(["RR", "CR", "static 3", "static 4", "static 5", "static 8"])
        ]
    )
    ran_, rr, cr = capsys.readouterr().out.splitlines()
    assert ran_.startswith("60 runs, 6 arms, 10 seeds, none diverged")
    assert (
        rr
        == "RR (cost 0.40) minus static 4 (0.42): +0.00 [-1.74, +1.74] points, n = 10: cannot be told from 0"
    )
    assert cr == "CR (cost 0.63): no static precision ran within 10 % of its cost"
    figure, table = shown
    assert "static 8 reaches" in " ".join(text.get_text() for text in figure.texts)
    assert "the paper says" in table.html()
    compare_with_paper(rows[rows.arm == "RR"])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "RR (cost 0.40): no static precision ran within 10 % of its cost"
    ]


def test_paper_runs_have_static_baselines_at_demo(capsys):
    def of(task, dataset, schedules=tuple(cpt.SUITE), **more):
        given = {
            "dataset": dataset,
            "schedules": list(schedules),
            "q_max": [8],
            "seeds": [0],
            **more,
        }
        return check_parameters(task, scale="demo", **given)

    experiments = [
        paper_runs.figure_3(of("image", "digits")),
        paper_runs.figure_4(of("detection", "digit-scenes", ["RR"])),
        paper_runs.figure_6(of("graph", "digits-graph")),
        paper_runs.figure_7(of("language_model", "pydoc")),
        paper_runs.figure_7(of("language_model", "", ["CR", "RR"], pairs="templates")),
    ]
    capsys.readouterr()
    for specs in experiments:
        runs = pd.DataFrame(
            {"arm": s.arm, "q_max": s.q_max, "relative_cost": s.relative_cost}
            for s in specs
        )
        recipe = specs[0].recipe
        runs["aggregation"] = [getattr(s.recipe, "aggregation", "") for s in specs]
        beside_static(
            at_q_max(
                runs.assign(
                    task=recipe.task,
                    seed=0,
                    diverged=False,
                    **{main_metric(recipe.task).name: 0.5},
                ),
                None,
            )
        )
    told = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert len(told) == 3 + 1 + 2 * 3 + 3 + 2
    assert all(" minus static " in line for line in told), told


def test_compare_with_paper_covers_experiments_and_aggregations(capsys, shown):
    gcn = committed("graph_facebook").query(
        "model == 'gcn' and arm in ['RR', 'CR', 'static 2', 'static 3', 'static 5']"
    )
    text = committed("language_pydoc").query("arm in ['RR', 'static 3', 'static 8']")
    compare_with_paper(
        gcn.assign(scale="demo"), text[text.q_max.isin([8, 6])].assign(scale="demo")
    )
    told = [
        line.split(":")[0]
        for line in capsys.readouterr().out.splitlines()
        if " minus " in line
    ]
    assert told == [
        "FP-Agg, RR (cost 0.28) minus static 3 (0.30)",
        "FP-Agg, CR (cost 0.55) minus static 5 (0.55)",
        "RR (cost 0.30) minus static 3 (0.30)",
    ]
    assert len(shown) >= 4


def test_compare_with_paper_checks_smoke_bands(capsys):
    rows = committed("image_digits").query(
        "model == 'mlp6' and q_min == 3 and seed == 0 and arm in ('ER', 'CR')"
    )
    smoke = rows.assign(scale="smoke")
    compare_with_paper(smoke.assign(accuracy=0.88))
    _, reason, inside = capsys.readouterr().out.splitlines()
    assert (
        reason
        == 'smoke runs are too short to compare; scale = "demo" draws the figure of your runs'
    )
    assert inside == "smoke accuracy of ER: within the range of 12 earlier seeds"
    with pytest.raises(AssertionError, match="outside its band"):
        compare_with_paper(smoke.assign(accuracy=0.1))
    compare_with_paper(smoke.assign(accuracy=0.1, dataset="my-images/"))


def test_predicted_cycle_runs_mostly_at_2_bits():
    cycle = cpt.solve_schedule(
        cpt.StaticSchedule(3, 160).relative_cost(8, 8),
        2,
        8,
        160,
        n_cycles=2,
        family="cosine",
    )
    assert PREDICTIONS["steps at 2 bits"][0] == "c"
    assert cycle.share_at(2) > 2 / 3


def test_in_margins_applies_holm_correction():
    rng = np.random.default_rng(0)
    near = Estimate(
        "near", "points", 0.1 * (x := rng.normal(size=9)) - 0.1 * x.mean(), 0.2
    )
    far, wide = (
        Estimate("far", "points", near.values - 1, 0.2),
        Estimate("wide", "points", 99 * near.values, 0.2),
    )
    words = [
        line[-1]
        for line in evidence_figures.margin_lines(
            [near, far, wide], "abc", below="lost"
        )
    ]
    assert [word.split(" ")[0] for word in words] == ["alike", "lost", "open"]
    assert evidence_figures.margin_lines([far], "a", above="won")[0][
        1
    ] == pytest.approx(-5)
