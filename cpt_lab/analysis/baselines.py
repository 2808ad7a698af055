"""Quality of the baseline, training at full bits, shown beside every difference.

"Full bits" is static q_max, for deficits training without one, with gradients of q_max bits. A difference of a point
means something else at 35 % accuracy than at 90 %.

>>> baseline_text("static 8", ["82.1 %"])
'static 8 reaches 82.1 %'
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from cpt_lab.analysis.metrics import metric_named, metric_of
from cpt_lab.experiments.schema import Recipe

MIN_FULL_COST = 1 - 1e-9  # smallest relative cost of a run at full bits
# Runs with equal values here share a baseline; at full bits the number of cycles has no effect.
BASELINE_COLUMNS = ["recipe", "recipe_but_cycles", "preset", "scale", "q_max"]


def value_text(metric: str, value: float) -> str:
    """Return a stored metric with its unit, such as "82.1 %" or "perplexity 8.31"."""
    declared = metric_named(metric)
    if declared.unit:
        return f"{declared.factor * value:.1f} {declared.unit}"
    return f"{metric} {declared.factor * value:.{max(declared.digits, 2)}f}"


def full_bits(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs at full bits: static q_max, or without a deficit, with gradients of q_max bits."""
    is_static = runs["arm"] == "static " + runs["q_max"].astype("string")
    has_full_gradients = runs["q_grad"] == runs["q_max"]
    has_no_deficit = (runs["kind"] == "deficit") & (runs["stop"] == 0)
    is_full = (is_static | has_no_deficit) & has_full_gradients
    return runs[is_full.fillna(False)]


def quality_text(runs: pd.DataFrame) -> str:
    """Return the mean quality over seeds of runs of one task, from the lowest to the highest recipe; "" for no runs.

    Such as "82.1 %", or "79.2 to 82.1 %" if recipes differ.
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


def baseline_text(name: str, texts: Sequence[str]) -> str:
    """Return the quality of a baseline in words; "" if no quality is known."""
    return f"{name} reaches {', '.join(texts)}" if any(texts) else ""


def baseline_of(full: pd.DataFrame, compared_keys: Iterable[tuple[Any, ...]]) -> str:
    """Return the quality of full bits in the experiments of compared runs, such as "static 8 reaches 82.1 %".

    Args:
        full: all known runs at full bits, see ``full_bits``.
        compared_keys: values of ``BASELINE_COLUMNS`` of the compared runs. The highest q_max counts.
    """
    baseline_keys = set(compared_keys)
    if not baseline_keys:
        return ""
    highest = max(q_max for *_, q_max in baseline_keys)
    run_keys = list(full[BASELINE_COLUMNS].itertuples(index=False, name=None))
    baseline_runs = full[
        [place in baseline_keys and place[-1] == highest for place in run_keys]
    ]
    if baseline_runs.empty:
        but_cycles = {place[1:] for place in baseline_keys if place[-1] == highest}
        baseline_runs = full[[place[1:] in but_cycles for place in run_keys]]
    if baseline_runs.empty:
        return ""
    name = (
        "no deficit"
        if (baseline_runs["kind"] == "deficit").all()
        else f"static {highest}"
    )
    return baseline_text(name, [quality_text(baseline_runs)])


def experiment_baseline(runs: pd.DataFrame) -> str:
    """Return the quality of full bits among runs of one task; without full bits the quality of the best arm."""
    top = runs[runs["relative_cost"] >= MIN_FULL_COST]
    if len(top):
        is_deficit = (runs["kind"] == "deficit").all()
        return baseline_text("no deficit" if is_deficit else "8/8", [quality_text(top)])

    metric = metric_of(runs)
    means = metric_named(metric).better * runs.groupby("arm")[metric].mean()
    best = str(means.idxmax())
    reached = quality_text(runs[runs["arm"] == best])
    return f"no run at 8/8; the best arm ({best}) reaches {reached}"


def training_text(recipe: Recipe) -> str:
    """Return the length of a recipe's training, with its amount of data if declared: "1.4 epochs of 10,000 images".

    Graphs train on all nodes at once, so a step is an epoch.
    """
    images, size = getattr(recipe, "train_images", None), getattr(recipe, "size", None)
    if images:
        epochs = recipe.steps * recipe.batch / images
        epochs_text = f"{epochs:.0f}" if epochs >= 10 else f"{epochs:.2g}"
        return f"{epochs_text} epochs of {images:,} images of {size} x {size}"
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
