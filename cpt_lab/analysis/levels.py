"""Levels: the quality that training at full bits reaches, beside which a difference has to be read.

"Full bits" is static q_max with gradients of q_max bits; among deficits it is training without one. A difference of a
point means something else at 35 % accuracy than at 90 %.

>>> stated("static 8", ["82.1 %"])
'static 8 reaches 82.1 %'
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from cpt_lab.analysis.metrics import metric_named, metric_of
from cpt_lab.experiments.schema import Recipe

FULL_COST = 1 - 1e-9  # relative cost from which on a run counts as one at full bits
# runs that share them share a level; at full bits the number of cycles changes nothing
LEVEL_COLUMNS = ["recipe", "recipe_but_cycles", "preset", "scale", "q_max"]


def value_text(metric: str, value: float) -> str:
    """Return a stored metric with its unit, such as "82.1 %" or "perplexity 8.31"."""
    found = metric_named(metric)
    if found.unit:
        return f"{found.factor * value:.1f} {found.unit}"
    return f"{metric} {found.factor * value:.{max(found.digits, 2)}f}"


def full_bits(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs at full bits: static q_max with gradients of q_max bits, or without a deficit."""
    static = (runs["arm"] == "static " + runs["q_max"].astype("string")) & (
        runs["q_grad"] == runs["q_max"]
    )
    no_deficit = (runs["kind"] == "deficit") & (runs["stop"] == 0)
    return runs[(static | no_deficit).fillna(False)]


def reached(runs: pd.DataFrame) -> str:
    """Return the mean quality of runs of one task over seeds, from the lowest to the highest recipe; "" of no runs.

    Such as "82.1 %", or "79.2 to 82.1 %" where recipes differ.
    """
    if runs.empty or runs[metric_of(runs)].isna().all():
        return ""
    metric = metric_of(runs)
    means = runs.groupby("recipe")[metric].mean().dropna()
    low, high = (value_text(metric, value) for value in (means.min(), means.max()))
    if low == high:
        return low
    unit = metric_named(metric).unit
    return f"{low.removesuffix(unit).strip()} to {high.removeprefix(metric).strip()}"


def stated(name: str, texts: Sequence[str]) -> str:
    """Return a level in words; "" where nothing is known."""
    return f"{name} reaches {', '.join(texts)}" if any(texts) else ""


def level_of(full: pd.DataFrame, compared: Iterable[tuple[Any, ...]]) -> str:
    """Return what full bits reach in the experiments that compared runs belong to, such as "static 8 reaches 82.1 %".

    Args:
        full: all runs at full bits that are known, see ``full_bits``.
        compared: values of ``LEVEL_COLUMNS`` of the runs that were compared. The highest q_max counts.
    """
    wanted = set(compared)
    if not wanted:
        return ""
    highest = max(q_max for *_, q_max in wanted)
    places = list(full[LEVEL_COLUMNS].itertuples(index=False, name=None))
    mine = full[[place in wanted and place[-1] == highest for place in places]]
    if mine.empty:
        but_cycles = {place[1:] for place in wanted if place[-1] == highest}
        mine = full[[place[1:] in but_cycles for place in places]]
    if mine.empty:
        return ""
    name = "no deficit" if (mine["kind"] == "deficit").all() else f"static {highest}"
    return stated(name, [reached(mine)])


def of_experiment(runs: pd.DataFrame) -> str:
    """Return the level of the runs of one task, also where none has full bits: that of the best arm then."""
    top = runs[runs["relative_cost"] >= FULL_COST]
    if len(top):
        name = "no deficit" if (runs["kind"] == "deficit").all() else "8/8"
        return stated(name, [reached(top)])
    metric = metric_of(runs)
    means = metric_named(metric).better * runs.groupby("arm")[metric].mean()
    best = str(means.idxmax())
    return f"no run at 8/8; the best arm ({best}) reaches {reached(runs[runs['arm'] == best])}"


def training_text(recipe: Recipe) -> str:
    """Return how long a recipe trains, and on how much where the recipe says so, such as "1.4 epochs of 10,000 images".

    Graphs train on all nodes at once: a step is an epoch.
    """
    images, size = getattr(recipe, "train_images", None), getattr(recipe, "size", None)
    if images:
        epochs = recipe.steps * recipe.batch / images
        shown = f"{epochs:.0f}" if epochs >= 10 else f"{epochs:.2g}"
        return f"{shown} epochs of {images:,} images of {size} x {size}"
    tokens, length = (
        getattr(recipe, "train_tokens", None),
        getattr(recipe, "length", None),
    )
    if recipe.task == "language_model" and tokens and length:
        unit = getattr(recipe, "unit", "tokens")
        return f"{recipe.steps * recipe.batch * length / tokens:.2g} passes over {tokens:,} {unit}"
    if recipe.task == "graph" and not recipe.batch:
        return f"{recipe.steps} epochs of the whole graph"
    return f"{recipe.steps:,} steps"
