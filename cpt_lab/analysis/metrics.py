"""Metrics: how each is read, printed and compared.  They are declared beside the tasks, in ``cpt_lab.experiments``."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.schema import ACCURACY, LOSS, Metric

METRICS: dict[str, Metric] = {
    m.name: m for e in EXPERIMENTS.values() for m in e.metrics
} | {LOSS.name: LOSS}


def main_metric(task: str) -> Metric:
    """Return the main metric of a task; rows may be of a task that is not here any more."""
    return EXPERIMENTS[task].metric if task in EXPERIMENTS else ACCURACY


def worst_value(task: str, metric: Metric, recipe: Mapping[str, Any]) -> float:
    """Return what a run that diverged counts; NaN where nothing is stated, or the task is not here any more."""
    return (
        EXPERIMENTS[task].worst(metric, recipe) if task in EXPERIMENTS else float("nan")
    )


def metric_of(runs: pd.DataFrame) -> str:
    """Return the name of the main metric of the task that runs belong to; ValueError when they mix metrics."""
    tasks = set(runs["task"])
    found = {main_metric(task).name for task in tasks} or {ACCURACY.name}
    if len(found) > 1:
        raise ValueError(f"rows mix tasks: {', '.join(sorted(tasks))}; choose one")
    return found.pop()


def metric_named(name: str) -> Metric:
    """Return how a metric is read, also one of a further test set such as "accuracy_es"."""
    return METRICS.get(name.split("_")[0], Metric(name, name))


def intervals(metric: Metric, lines: pd.DataFrame) -> list[str]:
    """Return the stored differences of lines with their intervals, such as "-0.6 [-0.8, -0.3]"; "" for NaN."""
    scaled = metric.factor * lines[["difference", "low", "high"]]
    return [
        interval_text(r.difference, r.low, r.high, metric.digits)
        for r in scaled.itertuples()
    ]


def interval_text(mean: float, low: float, high: float, digits: int = 2) -> str:
    """Return a number with its interval, such as "-0.6 [-0.8, -0.3]", alone where it has none; "" for NaN."""
    if mean != mean:
        return ""
    return f"{mean:+.{digits}f}" + (
        f" [{low:+.{digits}f}, {high:+.{digits}f}]" if low == low else ""
    )


def spread_text(metric: Metric, mean: float, std: float, n: int) -> str:
    """Return a stored mean with its standard deviation over n seeds; one seed has none: "82.4 +- 3.2 (n = 5)"."""
    shown, spread = metric.text([mean, std])
    return f"{shown} +- {spread} (n = {n})" if n > 1 else f"{shown} (n = {n})"


def plural(n: int, word: str) -> str:
    """Return a number and a word, in the plural where it needs one."""
    return f"{n} {word}{'' if n == 1 else 's'}"
