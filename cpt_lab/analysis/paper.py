"""The numbers printed in the paper, beside ours."""

from typing import Any

import numpy as np
import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import critical_periods, groups, quality_cost, statistics
from cpt_lab.analysis.aggregation import aggregation_difference
from cpt_lab.analysis.metrics import interval_text, spread_text
from cpt_lab.analysis.printed import UNITS, number_text, numbers
from cpt_lab.experiments.recipe import Metric
from cpt_lab.experiments.recipes import recipe

PRINTED = Metric("", "", digits=2)
NOT_RUN = "not run"


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's numbers with their places, and ours where the same thing was measured at paper scale.

    Ours are those at the end of training, with the best epoch on the test set, which the authors keep, beside them.
    What a schedule saves is computed.
    """
    runs = runs[runs["scale"] == "paper"]
    lines = []
    for p in numbers().itertuples():
        mine = runs[(runs["dataset"] == p.dataset) & ((runs["model"] == p.model) | (p.model == ""))]
        best = ""
        if p.metric == "saved":
            ours = _saved(p)
        elif p.minus:
            ours = "; ".join(_differences(mine, p)) or NOT_RUN
        else:
            mine = _of_arm(mine, p)
            ours, best = _spread(mine, p, p.metric) or NOT_RUN, _spread(mine, p, f"{p.metric}_best_test")
        what = ", ".join(filter(None, (f"{p.artefact.replace('_', ' ')}: {p.dataset}", p.model)))
        arm = f"{p.arm} minus {p.minus}" if p.minus and p.metric != "saved" else p.arm
        lines.append((what, arm, p.metric, number_text(p.value, p.to, p.std, p.unit), ours, best, p.place))
    columns = ["what", "arm", "metric", "paper", "ours +- std", "ours, best epoch on test", "where it stands"]
    return pd.DataFrame(lines, columns=columns)


def _of_arm(runs: pd.DataFrame, p: Any) -> pd.DataFrame:
    """Pick the runs of an arm, of table 1 by the name it has there."""
    if p.artefact != "table_1":
        return runs[(runs["arm"] == p.arm) & (runs["q_max"] == p.q_max)]
    found = [r for part in groups.deficit_groups(runs) for r in critical_periods.deficits(part).itertuples()]
    arms = {(r.arm, r.recipe) for r in found if r.paper_arm == p.arm}
    same = np.array([pair in arms for pair in zip(runs["arm"], runs["recipe"], strict=True)], dtype=bool)
    return runs[same & (runs["q_max"] == p.q_max)]


def _spread(runs: pd.DataFrame, p: Any, metric: str) -> str:
    """Mean and spread of a column in the paper's unit, "" where there are no numbers."""
    values = UNITS[p.unit] * runs[metric].dropna() if metric in runs else runs["relative_cost"].iloc[:0]
    lost = f", {runs['diverged'].sum()} diverged" if runs["diverged"].any() else ""
    return spread_text(PRINTED, values.mean(), values.std(), len(values)) + lost if len(values) else ""


def _differences(runs: pd.DataFrame, p: Any) -> list[str]:
    """Our paired differences of what the paper compares, of every experiment that has both."""
    found = []
    if p.artefact == "figure_5":
        for part in groups.aggregation_groups(runs[runs["q_max"] == p.q_max]):
            found.append((groups.title_of(part), -aggregation_difference(part, p.metric)["difference"]))
    else:
        for part in groups.quality_cost_groups(runs[(runs["q_max"] == p.q_max) | (p.q_max != p.q_max)]):
            q_max, names = part["q_max"].iloc[0], {*part["arm"], *part["savings"]}
            if {p.arm, static := f"static {q_max}"} <= names:
                values = quality_cost.paired_difference(part, p.arm, static, p.metric)
                found.append((f"{groups.title_of(part)}, q_max {q_max}", values))
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
        make_schedule(a, q_min=r.q_min, q_max=int(p.q_max), total_steps=r.steps, n_cycles=r.n_cycles) for a in arms
    ]
    saved = sorted({f"{100 - 100 * schedule.relative_cost():.1f}" for schedule in schedules})
    return f"{' to '.join(dict.fromkeys((saved[0], saved[-1])))} {p.unit}, computed"
