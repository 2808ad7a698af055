"""Metrics: how each is read, printed and compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cpt_core.sweeps.stores import Row


@dataclass(frozen=True)
class Measure:
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


MEASURES = {
    "accuracy": Measure("test accuracy (%)", "%", 100.0),
    "map50": Measure("test mAP at IoU 0.5 (%)", "%", 100.0),
    "map": Measure("test mAP, COCO (%)", "%", 100.0),
    "perplexity": Measure("test perplexity (axis turned: up is better)", better=-1),
    "loss": Measure("test loss in nats (axis turned: up is better)", better=-1, digits=3),
}

METRICS = {"detection": "map50", "language_model": "perplexity"}  # of a task; of the others it is accuracy


def metric_of(rows: Iterable[Row]) -> str:
    """Return the main metric of the task that rows belong to."""
    tasks = {row["spec"]["recipe"]["task"] for row in rows}
    found = {METRICS.get(task, "accuracy") for task in tasks} or {"accuracy"}
    if len(found) > 1:
        raise ValueError(f"rows mix tasks: {', '.join(sorted(tasks))}; choose one")
    return found.pop()


def measure_of(metric: str) -> Measure:
    """Return how a metric is read, also one of a further test set such as "accuracy_es"."""
    return MEASURES.get(metric.split("_")[0], Measure(metric))
