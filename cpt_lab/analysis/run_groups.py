"""Experiments: the groups of runs that may be compared, one function per kind.  Paper: sections 4 and 5.

Every function splits a table of runs into one table per experiment; experiments at paper scale come first. All runs of
an experiment have one preset and one scale. Gradients have q_max bits, or other bits that all its runs share.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache

import pandas as pd

from cpt_lab.analysis.metrics import plural
from cpt_lab.experiments.grids import QUESTIONS, grid_specs
from cpt_lab.experiments.spec import NotMeasuredError

AGGREGATION_NAMES = {"fp": "FP-Agg", "quantized": "Q-Agg"}


def quality_cost_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Split runs into experiments of quality against cost: one recipe, one q_max.

    Runs of critical periods and arms that only exist for equal-cost comparisons are left out.
    """
    return _split(
        runs[(runs["kind"] != "deficit") & ~runs["equal_cost"]], "recipe", "q_max"
    )


def aggregation_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of static q_max with an accuracy, by recipe, for recipes with runs of both aggregations."""
    top = runs[runs["accuracy"].notna() & (runs["aggregation"] != "") & at_top(runs)]
    parts = _split(top, "recipe_but_aggregation", "q_max")
    return [part for part in parts if part["aggregation"].nunique() == 2]


def top_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of static q_max, by recipe: one experiment has several q_max."""
    parts = [part[at_top(part)] for part in quality_cost_groups(runs)]
    if not parts:
        return []
    return _split(pd.concat(parts), "recipe")


def gradient_groups(runs: pd.DataFrame, arm: str) -> list[pd.DataFrame]:
    """Return the runs of a static precision, by recipe, for recipes with gradients of 8 bits and of fewer.

    Gradients have q_max bits, at which the runs are evaluated.
    """
    has_q_max_gradients = (runs["q_grad"] == runs["q_max"]).fillna(False)
    parts = _split(runs[(runs["arm"] == arm) & has_q_max_gradients], "recipe")
    return [part for part in parts if part["q_grad"].nunique() == 2]


def cycle_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of the suite's schedules, by recipe without the number of cycles."""
    cyclic = runs[runs["savings"].isin(["large", "medium", "small"])]
    return _split(cyclic, "recipe_but_cycles", "q_max")


def fanout_groups(runs: pd.DataFrame, aggregations: bool = False) -> list[pd.DataFrame]:
    """Return the runs of static q_max on sampled neighbours, by recipe without their number and the aggregation.

    With ``aggregations`` an experiment has both aggregations; otherwise they are split.
    """
    sampled = runs[runs["fanout"].notna() & at_top(runs)]
    split_columns = [] if aggregations else ["aggregation"]
    return _split(sampled, "recipe_but_fanout", "q_max", *split_columns)


def deficit_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the deficit runs, one table per recipe (any number of steps) and q_max."""
    return _split(runs[runs["kind"] == "deficit"], "recipe_but_length", "q_max")


def equal_cost_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of equal-cost experiments: all arms of a recipe, some of them with fewer steps."""
    parts = _split(
        runs[runs["kind"] != "deficit"], "recipe_but_steps", _planned_steps, "q_max"
    )
    return [part for part in parts if part["equal_cost"].any()]


def _planned_steps(runs: pd.DataFrame) -> pd.Series:
    """Return the steps of the recipe; arms that stop early name them, as in "static 8, 328 of 600 steps"."""
    named_steps = runs["arm"].str.extract(r", \d+ of (\d+) steps$")[0]
    return named_steps.astype("Int64").fillna(runs["total_steps"])


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


def _split(
    runs: pd.DataFrame, *columns: str | Callable[[pd.DataFrame], pd.Series]
) -> list[pd.DataFrame]:
    """Split runs by columns, preset, scale and bits of the gradients; a column may be computed from the runs."""
    runs = runs[~runs["key"].isin(preregistered())]
    keys = [runs[name] if isinstance(name, str) else name(runs) for name in columns]
    keys += [runs["preset"], runs["scale"], reduced_gradient_bits(runs)]
    parts = [part for _, part in runs.groupby(keys, sort=False)]
    return sorted(parts, key=lambda part: part["scale"].iloc[0] != "paper")


def reduced_gradient_bits(runs: pd.DataFrame) -> pd.Series:
    """Return the bits of the gradients where they differ from q_max, else 0.

    Runs with gradients of q_max bits are one experiment at several q_max. Schedules of roles have no bits of the
    gradients of their own.
    """
    is_reduced = (runs["q_grad"] != runs["q_max"]).fillna(False)
    return runs["q_grad"].where(is_reduced, 0)


def gradients_text(runs: pd.DataFrame) -> str:
    """Return the bits of gradients that differ from q_max, such as "gradients of 4 bits"; "" if none do."""
    bits = sorted(set(reduced_gradient_bits(runs)) - {0})
    return f"gradients of {' and '.join(map(str, bits))} bits" if bits else ""


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
    if gradients_text(runs):
        parts.append(gradients_text(runs))
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
