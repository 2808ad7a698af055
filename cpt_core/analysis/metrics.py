"""Metrics: how each is read, printed and compared."""

from __future__ import annotations

from collections.abc import Iterable

from cpt_core.experiments.recipe import LOSS, Metric
from cpt_core.experiments.recipes import EXPERIMENTS
from cpt_core.sweeps.stores import Row

METRICS: dict[str, Metric] = {m.name: m for e in EXPERIMENTS.values() for m in e.metrics} | {LOSS.name: LOSS}


def metric_of(rows: Iterable[Row]) -> str:
    """Return the main metric of the task that rows belong to."""
    tasks = {row["spec"]["recipe"]["task"] for row in rows}
    found = {EXPERIMENTS[task].metric.name for task in tasks} or {"accuracy"}
    if len(found) > 1:
        raise ValueError(f"rows mix tasks: {', '.join(sorted(tasks))}; choose one")
    return found.pop()


def measure_of(metric: str) -> Metric:
    """Return how a metric is read, also one of a further test set such as "accuracy_es"."""
    return METRICS.get(metric.split("_")[0], Metric(metric, metric))
