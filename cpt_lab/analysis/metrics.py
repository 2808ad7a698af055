"""Metrics: how each is read, printed and compared.  Tasks declare them in ``cpt_lab.experiments``."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.schema import ACCURACY, LOSS, Metric

METRICS: dict[str, Metric] = {
    m.name: m for e in EXPERIMENTS.values() for m in e.metrics
} | {LOSS.name: LOSS}


def main_metric(task: str) -> Metric:
    """Return the main metric of a task; accuracy for a task that no longer exists."""
    return EXPERIMENTS[task].metric if task in EXPERIMENTS else ACCURACY


def worst_value(task: str, metric: Metric, recipe: Mapping[str, Any]) -> float:
    """Return the value that counts for a run that diverged; NaN if the task states none or no longer exists."""
    return (
        EXPERIMENTS[task].worst(metric, recipe) if task in EXPERIMENTS else float("nan")
    )


def metric_of(runs: pd.DataFrame) -> str:
    """Return the name of the main metric of the runs' task; ValueError when they mix metrics."""
    tasks = set(runs["task"])
    metric_names = {main_metric(task).name for task in tasks} or {ACCURACY.name}
    if len(metric_names) > 1:
        raise ValueError(f"rows mix tasks: {', '.join(sorted(tasks))}; choose one")
    return metric_names.pop()


def metric_named(name: str) -> Metric:
    """Return the declaration of a metric, also of one on another test set such as "accuracy_es"."""
    return METRICS.get(name.split("_")[0], Metric(name, name))


def intervals(metric: Metric, lines: pd.DataFrame) -> list[str]:
    """Return stored differences with their intervals, such as "-0.6 [-0.8, -0.3]"; "" for NaN."""
    scaled = metric.factor * lines[["difference", "low", "high"]]
    return [
        interval_text(r.difference, r.low, r.high, metric.digits)
        for r in scaled.itertuples()
    ]


def interval_text(mean: float, low: float, high: float, digits: int = 2) -> str:
    """Return a number with its interval, such as "-0.6 [-0.8, -0.3]"; "" for a NaN mean, no bracket for NaN bounds."""
    if math.isnan(mean):
        return ""
    text = f"{mean:+.{digits}f}"
    if math.isnan(low):
        return text
    return f"{text} [{low:+.{digits}f}, {high:+.{digits}f}]"


def spread_text(metric: Metric, mean: float, std: float, n: int) -> str:
    """Return a stored mean with its standard deviation, such as "82.4 +- 3.2 (n = 5)"; one seed has no deviation."""
    mean_text, std_text = metric.text([mean, std])
    return f"{mean_text} +- {std_text} (n = {n})" if n > 1 else f"{mean_text} (n = {n})"


def plural(n: int, word: str) -> str:
    """Return a number and a word, in the plural unless the number is 1."""
    return f"{n} {word}{'' if n == 1 else 's'}"
