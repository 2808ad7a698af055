"""Experiments: the groups of runs that may be compared, one function per kind.  Paper: sections 4 and 5.

Every function splits a table of runs into one table per experiment; experiments at paper scale come first.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

import pandas as pd

from cpt_lab.analysis.metrics import plural
from cpt_lab.experiments.grids import QUESTIONS, grid_specs
from cpt_lab.experiments.spec import NotMeasuredError

AGGREGATION_NAMES = {"fp": "FP-Agg", "quantized": "Q-Agg"}


def quality_cost_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Split runs into experiments of quality against cost: one recipe, one preset, one q_max.

    Runs of critical periods and arms that only exist for equal-cost comparisons are left out.
    """
    return _split(
        runs[(runs["kind"] != "deficit") & ~runs["equal_cost"]],
        "recipe",
        "preset",
        "q_max",
        "scale",
    )


def aggregation_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of static q_max with an accuracy, by recipe, for recipes with runs of both aggregations."""
    top = runs[runs["accuracy"].notna() & (runs["aggregation"] != "") & at_top(runs)]
    parts = _split(top, "recipe_but_aggregation", "q_max", "scale")
    return [part for part in parts if part["aggregation"].nunique() == 2]


def top_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of static q_max, by recipe: one experiment has several q_max."""
    parts = [part[at_top(part)] for part in quality_cost_groups(runs)]
    if not parts:
        return []
    return _split(pd.concat(parts), "recipe", "preset", "scale")


def gradient_groups(runs: pd.DataFrame, arm: str) -> list[pd.DataFrame]:
    """Return the runs of a static precision, by recipe, for recipes with gradients of 8 bits and of fewer."""
    parts = _split(runs[runs["arm"] == arm], "recipe", "preset", "scale")
    return [part for part in parts if part["q_grad"].nunique() == 2]


def cycle_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of the suite's schedules, by recipe without the number of cycles."""
    cyclic = runs[runs["savings"].isin(["large", "medium", "small"])]
    return _split(cyclic, "recipe_but_cycles", "q_max", "scale")


def fanout_groups(runs: pd.DataFrame, aggregations: bool = False) -> list[pd.DataFrame]:
    """Return the runs of static q_max on sampled neighbours, by recipe without their number and the aggregation.

    With ``aggregations`` an experiment has both aggregations; otherwise they are split.
    """
    sampled = runs[runs["fanout"].notna() & at_top(runs)]
    return _split(
        sampled,
        "recipe_but_fanout",
        "q_max",
        "scale",
        *([] if aggregations else ["aggregation"]),
    )


def deficit_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the deficit runs, one table per recipe (any number of steps), preset, q_max and scale."""
    return _split(
        runs[runs["kind"] == "deficit"], "recipe_but_length", "preset", "q_max", "scale"
    )


def equal_cost_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of equal-cost experiments: all arms of a recipe, at any length of training."""
    parts = _split(
        runs[runs["kind"] != "deficit"], "recipe_but_length", "preset", "q_max", "scale"
    )
    return [part for part in parts if part["equal_cost"].any()]


@cache
def preregistered() -> frozenset[str]:
    """Return the keys of the preregistered runs (``QUESTIONS``), with which no other runs are pooled.

    Runs of H5 are included only if the sensitivities that define its schedules are stored.
    """
    keys: set[str] = set()
    for name in QUESTIONS:
        with suppress(NotMeasuredError):
            keys.update(spec.key for spec in grid_specs(name))
    return frozenset(keys)


def _split(runs: pd.DataFrame, *columns: str) -> list[pd.DataFrame]:
    runs = runs[~runs["key"].isin(preregistered())]
    parts = [part for _, part in runs.groupby(list(columns), sort=False)]
    return sorted(parts, key=lambda part: part["scale"].iloc[0] != "paper")


def at_top(runs: pd.DataFrame) -> pd.Series:
    """Return which runs train at static q_max."""
    return runs["arm"] == "static " + runs["q_max"].astype("string")


def at_q_max(runs: pd.DataFrame, q_max: int | None) -> pd.DataFrame:
    """Return the runs of one q_max, None for the largest; a schedule at another q_max is another schedule."""
    return runs[runs["q_max"] == (runs["q_max"].max() if q_max is None else q_max)]


def title_of(runs: pd.DataFrame) -> str:
    """Return the title of the training; for runs of two aggregations without the aggregation."""
    first = runs.iloc[0]
    title = f"{first['model']} on {first['dataset']}"
    titles = [title for title in runs["title"] if title]
    if titles:
        title = titles[0]
    if runs["aggregation"].nunique() > 1:
        return re.sub(r" \((FP|Q)-Agg\)", "", title)
    return title


def experiment_name(runs: pd.DataFrame) -> str:
    """Return the title of an experiment with the settings that all its runs share: steps, cycles, bits, scale."""
    first, parts = runs.iloc[0], [title_of(runs)]
    if runs["total_steps"].nunique() == 1:
        parts.append(f"{first['total_steps']:,} steps")
    if (runs["kind"] == "cyclic").any() and runs["n_cycles"].nunique() == 1:
        parts.append(plural(first["n_cycles"], "cycle"))
    q_max = sorted(runs["q_max"].unique(), reverse=True)
    parts.append(f"q_min {first['q_min']}, q_max {' and '.join(map(str, q_max))}")
    parts.append(f"{first['scale']} scale")
    if first["preset"] != "ours":
        parts.append(f"{first['preset']}' preset")
    return ", ".join(parts)


def with_unique_names(parts: Iterable[pd.DataFrame]) -> list[tuple[str, pd.DataFrame]]:
    """Return experiments with their names; equal names are extended by the key of the recipe."""
    parts = list(parts)
    names = [experiment_name(part) for part in parts]
    named_parts = []
    for name, part in zip(names, parts, strict=True):
        if names.count(name) > 1:
            name = f"{name}, recipe {part['recipe'].iloc[0]}"
        named_parts.append((name, part))
    return named_parts
