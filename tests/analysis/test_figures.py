"""Data and texts of figures on synthetic runs, as golden files, and figures of rounding errors."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import quietly, refused, row_of
from torch import nn

import cpt_core as cpt
from cpt_extras.diagnostics.recording import COLUMNS
from cpt_extras.search.custom_schedules import FunctionSchedule
from cpt_lab.analysis import aggregation, critical_periods, figures, quality_cost
from cpt_lab.analysis.rounding import STATISTIC_LABELS
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs
from tests.analysis.synthetic import changed, figure_text, lost, rows_of, runs_of
from tests.analysis.test_tables import both_aggregations, harm, uncontrolled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("few_preregistered"),
    pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning"),
]

BOTH = ("relative_cost", "noise_exposure")
demo = partial(designs.quality_cost, "demo", static_bits=[2, 8], seeds=range(3))
paper = partial(designs.quality_cost, "paper", seeds=[0])


def with_an_own_arm(specs):
    """Return the specs, and for every seed a user schedule called "mine"."""
    own = {}
    for spec in specs:
        curve = FunctionSchedule(lambda u: 3 + 5 * u, total_steps=spec.recipe.steps)
        own[spec.recipe, spec.seed] = replace(spec, schedule=curve, arm="mine")
    return [*specs, *own.values()]


def rising(spec):
    return 0.5 + 0.1 * spec.relative_cost + 0.1 * spec.seed


def quality_cost_figures():
    specs = demo(static_bits=[], seeds=[0], q_max=[6, 8])
    yield "two q_max, one seed", quality_cost.figure_3(runs_of(specs))
    runs = runs_of(demo(), lambda s: 0.1 if s.arm == "static 2" else rising(s))
    front = quality_cost.figure_3(
        runs.assign(bitops=3e9 * runs.relative_cost), front=True
    )
    yield "three seeds, front, static 2 fails", front
    two = runs[runs["seed"] < 2].assign(bitops=float("nan"))
    yield "two seeds, no BitOps", quality_cost.figure_3(two, front=True)
    smoke = changed(rows_of(demo(seeds=[0]), rising, noise=0), scale="smoke")
    yield "smoke scale", quality_cost.figure_3(table(smoke))
    level = runs_of(demo(), lambda s: 0.8 if s.arm == "static 8" else 0.6)
    yield "schedules at 60 %", quality_cost.figure_3(level)
    small = level[level["savings"] != "large"]
    yield "no large savings", quality_cost.figure_3(small)
    rows = rows_of(demo(), rising, noise=0)
    rows = lost(rows, lambda arm, seed: (arm, seed) == ("CR", 1))
    yield "a run diverges", quality_cost.figure_3(table(rows))
    own = runs_of(with_an_own_arm(demo(seeds=[0, 1])), rising)
    yield "an own schedule", figures.figure_3(own, xs=BOTH, front=True)
    uneven = [s for s in demo(seeds=range(4)) if s.seed < 2 or s.arm != "static 8"]
    yield (
        "static 8 has two of four seeds",
        quality_cost.figure_3(runs_of(uneven, rising)),
    )


def paper_figures():
    specs = paper("ptb", schedules=["CR", "RR"], static_bits=[8], q_max=[8])
    runs = runs_of(specs, lambda s: 90.0, "perplexity")
    runs = runs.assign(bitops=9.16e13 * runs["relative_cost"])
    yield "PTB with printed costs", quality_cost.figure_3(runs)

    def perplexity(spec):
        if spec.arm == "static 2":
            return 9e3
        return 100 - 10 * spec.relative_cost + spec.seed

    text = runs_of(demo("pydoc"), perplexity, "perplexity")
    yield "perplexity", figures.figure_7(text, front=True)
    both = [*paper("ogbn-arxiv"), *designs.q_agg("paper", "ogbn-arxiv", seeds=[0])]
    quality = {"fp": 0.7, "quantized": 0.6}
    runs = runs_of(both, lambda s: quality[s.recipe.aggregation])
    yield "both aggregations", figures.figure_6(runs)
    yield "both axes", figures.figure_6(runs, xs=BOTH)
    yield "one aggregation", figures.figure_3(runs.iloc[:11])


def other_figures():
    yield "figure 5", aggregation.figure_5(both_aggregations())
    rows = []
    for spec in designs.aggregation(
        "demo", "digits-graph", static_bits=(8,), seeds=[0, 1]
    ):
        is_lost = spec.recipe.aggregation == "quantized"
        row = row_of(spec, 0.8, status="diverged" if is_lost else "ok")
        curve = [{"step": t, "test": {"accuracy": 0.5}} for t in (1, 2)]
        rows.append({**row, "evaluations": curve})
    yield "Q-Agg diverges", aggregation.figure_5(table(rows))
    specs = designs.deficit_scan("demo", "digits", seeds=[0, 1, 2])
    runs = runs_of(specs, harm)
    yield "figure 8", critical_periods.figure_8(runs)
    lengths = {s.key for s in designs.deficit_length("demo", "digits", seeds=[0, 1, 2])}
    only = runs[runs.key.isin(lengths)]
    yield "lengths alone", critical_periods.figure_8(only, heading="so")
    bare = uncontrolled(lambda start, length: 0.02 * length)
    yield "figure 8 without controls", critical_periods.figure_8(bare)
    text = designs.deficit_scan("demo", "pydoc", seeds=[0, 1])
    runs = runs_of(text, lambda s: 10 + len(s.schedule.windows), "perplexity")
    yield "figure 8, perplexity", critical_periods.figure_8(runs)
    own = runs_of(with_an_own_arm(designs.deficit_scan("demo", seeds=[0, 1])))
    yield "an own schedule", critical_periods.figure_8(own[own["kind"] == "deficit"])


@pytest.mark.parametrize("kind", [quality_cost_figures, paper_figures, other_figures])
def test_figures_draw_listed_data(kind, golden):
    parts = [f"=== {title}\n{figure_text(figure)}\n" for title, figure in kind()]
    golden(f"figures/{kind.__name__}.txt", "\n".join(parts))


def test_figures_reject_other_runs():
    graph = quietly(designs.quality_cost, "demo", "digits-graph", seeds=[0])
    runs = runs_of([*paper("ogbn-arxiv", schedules=["CR"], q_max=[8]), *graph])
    refused("rows mix datasets: digits-graph, ogbn-arxiv", figures.figure_6, runs)
    message = "no finished run of static 4 with FP-Agg"
    refused(message, aggregation.figure_5, both_aggregations(), bits=4)


def test_figure_3_top_axis_scales_relative_cost():
    runs = runs_of(demo(), rising)
    figure = quality_cost.figure_3(runs.assign(bitops=3e9 * runs.relative_cost))
    figure.draw_without_rendering()
    (ax,) = figure.axes
    (top,) = ax.child_axes
    assert np.array(top.get_xlim()) == pytest.approx(3 * np.array(ax.get_xlim()))


def test_figure_3_error_bars_need_two_seeds():
    def lengths(seeds):
        (ax,) = quality_cost.figure_3(runs_of(demo(seeds=seeds), rising)).axes
        bars = [bar for part in ax.collections for bar in part.get_segments()]
        return [np.ptp(bar[:, 1]) for bar in bars if len(bar)]

    one, two = lengths([0]), lengths([0, 1])
    assert set(one) == {0}  # of static precision: no length
    assert len(two) == 10 + 2
    assert min(two) > 0


# --- rounding errors ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def recording():
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with cpt.diagnostics.record(model, every=1) as recording:
        for bits in (2, 8, 8):
            with cpt.precision(model, bits, 8):
                model(torch.randn(6, 4)).square().sum().backward()
            optimizer.step()
    return recording


def lines_of(figure):
    return {line.get_label(): line for line in figure.axes[0].get_lines()}


def test_error_figure_draws_roles_over_steps(recording):
    frame = recording.table()
    weights = frame[frame["role"] == "weight"]
    medians = weights.groupby("step")["relative_error"].median().tolist()
    for source in (recording, frame):
        figure = figures.error_over_training(source)
        lines = lines_of(figure)
        assert set(lines) == {"input", "weight", "bias", "grad"}
        assert lines["weight"].get_ydata().tolist() == medians
        levels = [line.get_ydata().tolist() for line in figure.axes[1].get_lines()]
        assert sorted(levels) == [[2, 8, 8]] * 3 + [[8, 8, 8]]


@pytest.mark.parametrize("statistic", STATISTIC_LABELS)
def test_error_figure_draws_every_statistic(recording, statistic):
    figure = figures.error_over_training(recording, statistic)
    lines = lines_of(figure)
    rules = [line for line in lines.values() if line.get_linestyle() == "--"]
    assert len(rules) == (statistic in ("snr_db", "gradient_to_noise"))
    labels = [text.get_text() for text in figure.axes[0].texts]
    if statistic == "gradient_to_noise":
        assert rules[0].get_ydata()[0] == pytest.approx(3**0.5)
        assert labels == [r"$\sqrt{3}$, for gradients"]
        assert "weight" not in lines
    if statistic == "snr_db":
        assert rules[0].get_ydata()[0] == pytest.approx(4.77, abs=0.01)
        assert labels == ["4.8 dB, for gradients"]


def test_error_figure_rejects_missing_statistic(recording):
    message = "unknown statistic 'loss'; choose from relative_error, snr_db"
    refused(message, figures.error_over_training, recording, "loss")
    empty = pd.DataFrame(columns=list(COLUMNS))
    message = "no step has a snr_db: nothing is recorded"
    refused(message, figures.error_over_training, empty, "snr_db")


def test_histograms_compare_rounded_values():
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    figure = figures.histograms({"weights": x, "gradients": x**3}, bits=(2, "e4m3"))
    assert len(figure.axes) == 4
    rounded = cpt.quantize(x, 2)
    error = float((rounded - x).norm() / x.norm())
    assert figure.axes[0].get_title() == f"2 bits, error {error:.1%}"
    assert figure.axes[1].get_title().startswith("e4m3, error ")
    (after,) = (p for p in figure.axes[0].patches if p.get_label() == "after")
    heights = set(after.get_xy()[:, 1].astype(int)) - {0}
    assert heights == set(rounded.unique(return_counts=True)[1].tolist())
    assert len(figures.histograms(x).axes) == 3
