"""Metrics: how each is read, printed and compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class Metric:
    """How a metric is read.

    Attributes:
        label: for axes.
        unit: for tables.
        factor: from stored to printed numbers.
        better: +1 when a larger value is better, -1 when a smaller one is.
        digits: behind the point in tables.
    """

    label: str
    unit: str = ""
    factor: float = 1.0
    better: int = 1
    digits: int = 1

    def text(self, values: Iterable[float]) -> list[str]:
        """Return stored values as they are printed, "–" for NaN."""
        return [f"{self.factor * v:.{self.digits}f}" if v == v else "–" for v in values]

    def intervals(self, lines: pd.DataFrame) -> list[str]:
        """Return the stored differences of lines with their intervals, such as "-0.6 [-0.8, -0.3]"; "" for NaN."""
        scaled = self.factor * lines[["difference", "low", "high"]]
        return [interval_text(r.difference, r.low, r.high, self.digits) for r in scaled.itertuples()]


METRICS = {
    "accuracy": Metric("test accuracy (%)", "%", 100.0),
    "map50": Metric("test mAP at IoU 0.5 (%)", "%", 100.0),
    "map": Metric("test mAP, COCO (%)", "%", 100.0),
    "perplexity": Metric("test perplexity (axis turned: up is better)", better=-1),
    "loss": Metric("test loss in nats (axis turned: up is better)", better=-1, digits=3),
}

MAIN = {"detection": "map50", "language_model": "perplexity"}  # of a task; of the others it is accuracy


def metric_of(runs: pd.DataFrame) -> str:
    """Return the name of the main metric of the task that runs belong to; ValueError when they mix metrics."""
    tasks = set(runs["task"])
    found = {MAIN.get(task, "accuracy") for task in tasks} or {"accuracy"}
    if len(found) > 1:
        raise ValueError(f"rows mix tasks: {', '.join(sorted(tasks))}; choose one")
    return found.pop()


def metric_named(name: str) -> Metric:
    """Return how a metric is read, also one of a further test set such as "accuracy_es"."""
    return METRICS.get(name.split("_")[0], Metric(name))


def interval_text(mean: float, low: float, high: float, digits: int = 2) -> str:
    """Return a number with its interval, such as "-0.6 [-0.8, -0.3]", alone where it has none; "" for NaN."""
    if mean != mean:
        return ""
    return f"{mean:+.{digits}f}" + (f" [{low:+.{digits}f}, {high:+.{digits}f}]" if low == low else "")
