"""The numbers printed in the paper, beside the nearest values that were measured."""

from typing import Any

import numpy as np
import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import critical_periods, quality_cost, run_groups, statistics
from cpt_lab.analysis.aggregation import aggregation_difference
from cpt_lab.analysis.figure_data import experiments
from cpt_lab.analysis.metrics import interval_text, metric_named, metric_of, spread_text
from cpt_lab.analysis.paper_numbers import UNITS, number_text, numbers
from cpt_lab.experiments.grids import GRIDS, grid_specs
from cpt_lab.experiments.registry import recipe, task_of_dataset
from cpt_lab.experiments.schema import Metric

PRINTED = Metric("", "", digits=2)
NOT_RUN = "not run"
COLUMNS = [
    "what",
    "arm",
    "metric",
    "paper",
    "ours (+- std, or [95 %])",
    "data and scale",
    "ours, best epoch on test",
    "where it stands",
]


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's numbers with their places, each beside the nearest value that was measured.

    The nearest value is that of the same thing at paper scale, at the end of training, with the best epoch on the test
    set, which the authors keep, beside it. Where that was not run it is the same comparison on stand-in data at the
    best scale there is, and "data and scale" says which; a deficit of table 1 is compared with the deficit of nearest
    length or start, as shares of the normal training. What a schedule saves is computed.

    Args:
        runs: the typed table of ``runs.table``.
    """
    at_paper = runs[runs["scale"] == "paper"]
    lines = []
    for p in numbers().itertuples():
        what = ", ".join(
            filter(None, (f"{p.artefact.replace('_', ' ')}: {p.dataset}", p.model))
        )
        arm = f"{p.arm} minus {p.minus}" if p.minus and p.metric != "saved" else p.arm
        printed = number_text(p.value, p.to, p.std, p.unit)
        lines.append(
            (what, arm, p.metric, printed, *_nearest(p, at_paper, runs), p.place)
        )
    return pd.DataFrame(lines, columns=COLUMNS)


def _nearest(
    p: Any, at_paper: pd.DataFrame, runs: pd.DataFrame
) -> tuple[str, str, str]:
    """Return our value, its data and scale, and the value of the best epoch ("" where there is none)."""
    if p.metric == "saved":
        return _saved(p), "the paper's setting", ""
    same = at_paper[
        (at_paper["dataset"] == p.dataset)
        & ((at_paper["model"] == p.model) | (p.model == ""))
    ]
    if p.minus:
        found = _differences(same, p)
        if found:
            return "; ".join(found), "paper scale", ""
    else:
        of_arm = _of_arm(same, p)
        ours = _spread(of_arm, p, p.metric)
        if ours:
            return ours, "paper scale", _spread(of_arm, p, f"{p.metric}_best_test")
    return *_on_stand_ins(p, runs[runs["scale"] != "paper"]), ""


def _on_stand_ins(p: Any, runs: pd.DataFrame) -> tuple[str, str]:
    """Return the same comparison on the stand-in data that show most, and what they are."""
    task = task_of_dataset(p.dataset) or ""
    runs = runs[runs["task"] == task]
    if p.artefact == "table_1":
        return _nearest_deficit(p, runs)
    if p.minus:
        figure = f"{p.artefact}/{task}" if p.artefact == "figure_7" else p.artefact
        model = p.model if task == "graph" else ""
        for part in experiments(figure, runs, model):
            found = _differences(part, p)
            if found:
                return found[0].partition(": ")[2], _described(part)
    return NOT_RUN, _needs(p)


def _described(part: pd.DataFrame) -> str:
    first = part.iloc[0]
    return f"stand-in: {run_groups.title_of(part)}, {first['total_steps']:,} steps, {first['scale']} scale"


def _needs(p: Any) -> str:
    """Return which grid holds a number that was not measured, and its runs."""
    named = [
        name
        for name, grid in GRIDS.items()
        if name.startswith(f"{p.dataset}/") and "paper" in grid.scales
    ]
    grids = [name for name in named if GRIDS[name].artefact == p.artefact] or named
    return (
        f"needs `{grids[0]}` ({len(grid_specs(grids[0], 'paper'))} runs at paper scale)"
    )


def _nearest_deficit(p: Any, runs: pd.DataFrame) -> tuple[str, str]:
    """Return the accuracy of the arm whose deficit is nearest to one of table 1, as shares of the normal training."""
    for part in experiments("table_1", runs):
        found = critical_periods.deficits(part)
        arm, _ = critical_periods.nearest_arm(found, p.arm, p.dataset)
        if len(arm):
            normal = found[
                (found["experiment"] == "length") & (found["place"] == "none")
            ]["total"].min()
            factor = metric_named(metric_of(part)).factor
            first = arm.iloc[0]
            shown = spread_text(
                PRINTED, factor * first["mean"], factor * first["std"], first["n"]
            )
            return f"{shown} with {first['arm']}", _described(part).replace(
                f"{part.iloc[0]['total_steps']:,} steps", f"{normal:,} normal steps"
            )
    return NOT_RUN, _needs(p)


def _of_arm(runs: pd.DataFrame, p: Any) -> pd.DataFrame:
    """Pick the runs of an arm, of table 1 by the name it has there."""
    if p.artefact != "table_1":
        return runs[(runs["arm"] == p.arm) & (runs["q_max"] == p.q_max)]
    found = [
        r
        for part in run_groups.deficit_groups(runs)
        for r in critical_periods.deficits(part).itertuples()
    ]
    arms = {(r.arm, r.recipe) for r in found if r.paper_arm == p.arm}
    same = np.array(
        [pair in arms for pair in zip(runs["arm"], runs["recipe"], strict=True)],
        dtype=bool,
    )
    return runs[same & (runs["q_max"] == p.q_max)]


def _spread(runs: pd.DataFrame, p: Any, metric: str) -> str:
    """Mean and spread of a column in the paper's unit, "" where there are no numbers."""
    values = (
        UNITS[p.unit] * runs[metric].dropna()
        if metric in runs
        else runs["relative_cost"].iloc[:0]
    )
    lost = f", {runs['diverged'].sum()} diverged" if runs["diverged"].any() else ""
    return (
        spread_text(PRINTED, values.mean(), values.std(), len(values)) + lost
        if len(values)
        else ""
    )


def _differences(runs: pd.DataFrame, p: Any) -> list[str]:
    """Our paired differences of what the paper compares, of every experiment that has both."""
    found = []
    if p.artefact == "figure_5":
        for part in run_groups.aggregation_groups(runs[runs["q_max"] == p.q_max]):
            found.append(
                (
                    run_groups.title_of(part),
                    -aggregation_difference(part, p.metric)["difference"],
                )
            )
    else:
        for part in run_groups.quality_cost_groups(
            runs[(runs["q_max"] == p.q_max) | (p.q_max != p.q_max)]
        ):
            q_max, names = part["q_max"].iloc[0], {*part["arm"], *part["savings"]}
            if {p.arm, static := f"static {q_max}"} <= names:
                values = quality_cost.paired_difference(part, p.arm, static, p.metric)
                found.append((f"{run_groups.title_of(part)}, q_max {q_max}", values))
    return [
        f"{name}: {interval_text(*statistics.interval(UNITS[p.unit] * values))} (n = {len(values)})"
        for name, values in found
        if len(values)
    ]


def _saved(p: Any) -> str:
    """What an arm, or every arm of a group, saves at the paper's setting: computed, not measured."""
    r = recipe("paper", p.dataset, p.model)
    arms = [name for name, entry in SUITE.items() if p.arm in (name, entry.savings)]
    schedules = [
        make_schedule(
            a,
            q_min=r.q_min,
            q_max=int(p.q_max),
            total_steps=r.steps,
            n_cycles=r.n_cycles,
        )
        for a in arms
    ]
    saved = sorted(
        {f"{100 - 100 * schedule.relative_cost():.1f}" for schedule in schedules}
    )
    return f"{' to '.join(dict.fromkeys((saved[0], saved[-1])))} {p.unit}, computed"
