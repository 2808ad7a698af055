"""Which runs make an experiment: a list of tables for every kind.  Paper: sections 4 and 5.

An experiment is what may be compared; those at paper scale come first.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

import pandas as pd

from cpt_lab.analysis.metrics import plural
from cpt_lab.experiments.grids import QUESTIONS, grid_specs
from cpt_lab.experiments.spec import NotMeasuredError

AGGREGATIONS = {"fp": "FP-Agg", "quantized": "Q-Agg"}


def quality_cost_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Split runs into experiments of quality against cost: one recipe, one preset, one q_max.

    Runs of critical periods and those that only equal cost needs are left out.
    """
    return _split(
        runs[(runs["kind"] != "deficit") & ~runs["equal_cost"]],
        "recipe",
        "preset",
        "q_max",
        "scale",
    )


def aggregation_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Pick the runs of static q_max that count, by recipe, where there are some of both aggregations."""
    top = runs[runs["accuracy"].notna() & (runs["aggregation"] != "") & at_top(runs)]
    parts = _split(top, "recipe_but_aggregation", "q_max", "scale")
    return [part for part in parts if part["aggregation"].nunique() == 2]


def top_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Pick the runs of static q_max, by recipe: one experiment has several q_max."""
    parts = quality_cost_groups(runs)
    return (
        _split(
            pd.concat([part[at_top(part)] for part in parts]),
            "recipe",
            "preset",
            "scale",
        )
        if parts
        else []
    )


def gradient_groups(runs: pd.DataFrame, arm: str) -> list[pd.DataFrame]:
    """Pick the runs of a static precision, by recipe, where there are gradients of 8 bits and of fewer."""
    parts = _split(runs[runs["arm"] == arm], "recipe", "preset", "scale")
    return [part for part in parts if part["q_grad"].nunique() == 2]


def cycle_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Pick the runs of the suite's schedules, by recipe but for the number of cycles."""
    cyclic = runs[runs["savings"].isin(["large", "medium", "small"])]
    return _split(cyclic, "recipe_but_cycles", "q_max", "scale")


def fanout_groups(runs: pd.DataFrame, aggregations: bool = False) -> list[pd.DataFrame]:
    """Pick the runs of static q_max on sampled neighbours, by recipe but for their number, and for the aggregation."""
    sampled = runs[runs["fanout"].notna() & at_top(runs)]
    return _split(
        sampled,
        "recipe_but_fanout",
        "q_max",
        "scale",
        *([] if aggregations else ["aggregation"]),
    )


def deficit_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Pick the runs of critical-period experiments: one recipe but for its length."""
    return _split(
        runs[runs["kind"] == "deficit"], "recipe_but_length", "preset", "q_max", "scale"
    )


def equal_cost_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Pick the runs of equal-cost experiments: all arms of a recipe, at any length of training."""
    parts = _split(
        runs[runs["kind"] != "deficit"], "recipe_but_length", "preset", "q_max", "scale"
    )
    return [part for part in parts if part["equal_cost"].any()]


@cache
def preregistered() -> frozenset[str]:
    """Return the keys of the runs of ``QUESTIONS``, as of ``docs/preregistration.md``: nothing is pooled with them.

    Runs of H5 can be there only when what their schedules are made of is stored.
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
    """Return the runs of one q_max, None for the largest: schedules of a name at another one are other schedules."""
    return runs[runs["q_max"] == (runs["q_max"].max() if q_max is None else q_max)]


def title_of(runs: pd.DataFrame) -> str:
    """Return what was trained, in words; of two aggregations it names none."""
    first = runs.iloc[0]
    title = next(
        (title for title in runs["title"] if title),
        f"{first['model']} on {first['dataset']}",
    )
    return (
        re.sub(r" \((FP|Q)-Agg\)", "", title)
        if runs["aggregation"].nunique() > 1
        else title
    )


def experiment_name(runs: pd.DataFrame) -> str:
    """Return what was trained, and how long, in how many cycles and between which bits where all runs share that."""
    first, parts = runs.iloc[0], [title_of(runs)]
    if runs["total_steps"].nunique() == 1:
        parts.append(f"{first['total_steps']:,} steps")
    if (runs["kind"] == "cyclic").any() and runs["n_cycles"].nunique() == 1:
        parts.append(plural(first["n_cycles"], "cycle"))
    tops = " and ".join(
        str(top) for top in sorted(runs["q_max"].unique(), reverse=True)
    )
    parts += [f"q_min {first['q_min']}, q_max {tops}", f"{first['scale']} scale"]
    return ", ".join(
        parts if first["preset"] == "ours" else [*parts, f"{first['preset']}' preset"]
    )


def with_unique_names(parts: Iterable[pd.DataFrame]) -> list[tuple[str, pd.DataFrame]]:
    """Return experiments with their names; where two are called alike, the key of the recipe tells them apart."""
    parts = list(parts)
    names = [experiment_name(part) for part in parts]
    recipes = [f", recipe {part['recipe'].iloc[0]}" for part in parts]
    ends = [
        "" if names.count(name) == 1 else recipe
        for name, recipe in zip(names, recipes, strict=True)
    ]
    return [
        (name + end, part) for name, end, part in zip(names, ends, parts, strict=True)
    ]
