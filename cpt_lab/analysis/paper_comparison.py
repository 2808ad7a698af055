"""Numbers printed in the paper, each with the nearest measured value."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import critical_periods, quality_cost, run_groups, statistics
from cpt_lab.analysis.aggregation import aggregation_difference
from cpt_lab.analysis.estimates import NOT_RUN
from cpt_lab.analysis.figure_data import experiments
from cpt_lab.analysis.metrics import interval_text, metric_named, metric_of, spread_text
from cpt_lab.analysis.paper_numbers import UNITS, number_text, numbers
from cpt_lab.experiments.grids import GRIDS, grid_specs
from cpt_lab.experiments.registry import recipe, task_of_dataset
from cpt_lab.experiments.schema import Metric

TWO_DIGITS = Metric("", "", digits=2)
COMPARISON_COLUMNS = [
    "what",
    "arm",
    "metric",
    "paper",
    "ours (+- std, or [95 %])",
    "data and scale",
    "ours, best epoch on test",
    "where it stands",
]


def summary(
    runs: pd.DataFrame, printed_numbers: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Return the paper's numbers with their places, each with the nearest measured value.

    The nearest value is that of the same arm at paper scale, at the end of training, and with it the best epoch on the
    test set, which the authors report. If that was not run it is the same comparison on stand-in data at the best scale
    there is, and "data and scale" says which; a deficit of table 1 is compared with the deficit of nearest length or
    start, as shares of the normal training. The savings of a schedule are computed.

    Recipes are not pooled: at paper scale each has a value, on stand-ins the largest q_max and FP-Agg come first. Runs
    of the authors' preset, or with gradients of other bits than q_max, are left out.

    Args:
        runs: the typed table of ``run_table.table``.
        printed_numbers: some lines of ``paper_numbers.numbers``; None uses all.
    """
    has_q_max_gradients = run_groups.reduced_gradient_bits(runs) == 0
    runs = runs[(runs["preset"] == "ours") & has_q_max_gradients]
    at_paper = runs[runs["scale"] == "paper"]
    selected = numbers() if printed_numbers is None else printed_numbers
    lines = []
    for p in selected.itertuples():
        subject = ", ".join(
            filter(None, (f"{p.artefact.replace('_', ' ')}: {p.dataset}", p.model))
        )
        arm = f"{p.arm} minus {p.minus}" if p.minus and p.metric != "saved" else p.arm
        printed = number_text(p.value, p.to, p.std, p.unit)
        lines.append(
            (subject, arm, p.metric, printed, *_nearest(p, at_paper, runs), p.place)
        )
    return pd.DataFrame(lines, columns=COMPARISON_COLUMNS, index=selected.index)


class _NearestValue(NamedTuple):
    """A measured value nearest to a printed one."""

    measured: str
    data_and_scale: str
    best_epoch: str = ""  # value at the best epoch on the test set, "" for none


def _nearest(p: Any, at_paper: pd.DataFrame, runs: pd.DataFrame) -> _NearestValue:
    """Return the measured value nearest to the printed number ``p``, a line of ``numbers``."""
    if p.metric == "saved":
        return _NearestValue(_saved(p), "the paper's setting")
    same_setting = at_paper[
        (at_paper["dataset"] == p.dataset)
        & ((at_paper["model"] == p.model) | (p.model == ""))
    ]
    if p.minus:
        differences = _differences(same_setting, p)
        if differences:
            texts = [f"{name}: {text}" for name, text in differences.items()]
            return _NearestValue("; ".join(texts), "paper scale")
    else:
        arm_runs = _arm_runs(same_setting, p)
        measured = _means_by_recipe(arm_runs, p, p.metric)
        if measured:
            best_epoch = _means_by_recipe(arm_runs, p, f"{p.metric}_best_test")
            return _NearestValue(measured, "paper scale", best_epoch)
    return _on_stand_ins(p, runs[runs["scale"] != "paper"])


def _on_stand_ins(p: Any, runs: pd.DataFrame) -> _NearestValue:
    """Return the same comparison on the most informative stand-in data."""
    task = task_of_dataset(p.dataset) or ""
    runs = runs[runs["task"] == task]
    if p.artefact == "table_1":
        return _nearest_deficit(p, runs)
    if p.minus:
        figure = f"{p.artefact}/{task}" if p.artefact == "figure_7" else p.artefact
        model = p.model if task == "graph" else ""
        for part in experiments(figure, runs, model):
            differences = _differences(part, p)
            if differences:
                name, text = next(iter(differences.items()))
                return _NearestValue(text, _stand_in_text(name, part))
    return _NearestValue(NOT_RUN, _needs(p))


def _stand_in_text(name: str, part: pd.DataFrame) -> str:
    first = part.iloc[0]
    return f"stand-in: {name}, {first['total_steps']:,} steps, {first['scale']} scale"


def _needs(p: Any) -> str:
    """Return the grid that has a number that was not measured, with its number of runs."""
    dataset_grids = [
        name
        for name, grid in GRIDS.items()
        if name.startswith(f"{p.dataset}/") and "paper" in grid.scales
    ]
    grids = [
        name for name in dataset_grids if GRIDS[name].artefact == p.artefact
    ] or dataset_grids
    return (
        f"needs `{grids[0]}` ({len(grid_specs(grids[0], 'paper'))} runs at paper scale)"
    )


def _nearest_deficit(p: Any, runs: pd.DataFrame) -> _NearestValue:
    """Return the accuracy of the arm with the nearest deficit to one of table 1, as shares of the normal training."""
    for part in experiments("table_1", runs):
        arms = critical_periods.deficits(part)
        nearest, _ = critical_periods.nearest_arm(arms, p.arm, p.dataset)
        if nearest.empty:
            continue
        is_control = (arms["experiment"] == "length") & (arms["place"] == "none")
        normal = arms[is_control]["total"].min()
        factor = metric_named(metric_of(part)).factor
        first = nearest.iloc[0]
        measured = spread_text(
            TWO_DIGITS, factor * first["mean"], factor * first["std"], first["n"]
        )
        steps = f"{part.iloc[0]['total_steps']:,} steps"
        stand_in = _stand_in_text(run_groups.title_of(part), part)
        stand_in = stand_in.replace(steps, f"{normal:,} normal steps")
        return _NearestValue(f"{measured} with {first['arm']}", stand_in)
    return _NearestValue(NOT_RUN, _needs(p))


def _arm_runs(runs: pd.DataFrame, p: Any) -> pd.DataFrame:
    """Return the runs of a printed arm; an arm of table 1 is found by its name there."""
    is_q_max = runs["q_max"] == p.q_max
    if p.artefact != "table_1":
        return runs[(runs["arm"] == p.arm) & is_q_max]
    arms = set()
    for part in run_groups.deficit_groups(runs):
        for r in critical_periods.deficits(part).itertuples():
            if r.paper_arm == p.arm:
                arms.add((r.arm, r.recipe))
    pairs = zip(runs["arm"], runs["recipe"], strict=True)
    is_arm = np.array([pair in arms for pair in pairs], dtype=bool)
    return runs[is_arm & is_q_max]


def _means_by_recipe(runs: pd.DataFrame, p: Any, metric: str) -> str:
    """Return mean and standard deviation of a column in the paper's unit, "" without any number.

    Of several recipes each has its own, with the name of the experiment.
    """
    if metric not in runs:
        return ""
    parts = [part for _, part in runs.groupby("recipe") if part[metric].notna().any()]
    texts = []
    for name, part in run_groups.with_unique_names(parts):
        text = _mean_and_std(part, p, metric)
        texts.append(f"{name}: {text}" if len(parts) > 1 else text)
    return "; ".join(sorted(texts))


def _mean_and_std(runs: pd.DataFrame, p: Any, metric: str) -> str:
    """Return mean and standard deviation of a column of one recipe in the paper's unit."""
    values = UNITS[p.unit] * runs[metric].dropna()
    text = spread_text(TWO_DIGITS, values.mean(), values.std(), len(values))
    if runs["diverged"].any():
        text += f", {runs['diverged'].sum()} diverged"
    return text


def _differences(runs: pd.DataFrame, p: Any) -> dict[str, str]:
    """Return the paired difference that the paper prints, as a text by name of every experiment that has both sides.

    The order is by q_max, the largest first, then by aggregation, FP-Agg first.
    """
    differences = []
    if p.artefact == "figure_5":
        for part in run_groups.aggregation_groups(runs[runs["q_max"] == p.q_max]):
            values = -aggregation_difference(part, p.metric)["difference"]
            differences.append((part, values))
    else:
        is_any_q_max = bool(np.isnan(p.q_max))
        same_q_max = runs[(runs["q_max"] == p.q_max) | is_any_q_max]
        for part in run_groups.quality_cost_groups(same_q_max):
            static = f"static {part['q_max'].iloc[0]}"
            if {p.arm, static} <= {*part["arm"], *part["savings"]}:
                values = quality_cost.paired_difference(part, p.arm, static, p.metric)
                differences.append((part, values))

    differences = [(part, values) for part, values in differences if len(values)]
    differences.sort(key=lambda difference: _sort_key(difference[0]))
    names = [
        f"{run_groups.title_of(part)}, q_max {part['q_max'].iloc[0]}"
        for part, _ in differences
    ]
    texts = {}
    for name, (part, values) in zip(names, differences, strict=True):
        if names.count(name) > 1:
            name = f"{name}, recipe {part['recipe'].iloc[0]}"
        effect = interval_text(*statistics.interval(UNITS[p.unit] * values))
        texts[name] = f"{effect} (n = {len(values)})"
    return texts


def _sort_key(part: pd.DataFrame) -> tuple[int, str, str]:
    """Return q_max, aggregation and recipe, which do not depend on the order of rows."""
    return -part["q_max"].iloc[0], min(part["aggregation"]), min(part["recipe"])


def _saved(p: Any) -> str:
    """Return the computed savings of an arm, or of all arms of a group, at the paper's setting."""
    r = recipe("paper", p.dataset, p.model)
    saved = set()
    for name, entry in SUITE.items():
        if p.arm in (name, entry.savings):
            schedule = make_schedule(
                name,
                q_min=r.q_min,
                q_max=int(p.q_max),
                total_steps=r.steps,
                n_cycles=r.n_cycles,
            )
            saved.add(f"{100 - 100 * schedule.relative_cost():.1f}")
    ends = dict.fromkeys((min(saved), max(saved)))
    return f"{' to '.join(ends)} {p.unit}, computed"
