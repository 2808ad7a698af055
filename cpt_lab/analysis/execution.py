"""Products on codes beside simulated ones, whose runs differ as two seeds of rounding noise.  Beyond the paper."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from cpt_lab.analysis.groups import experiment_name
from cpt_lab.analysis.metrics import intervals, metric_named, metric_of
from cpt_lab.analysis.pages import Section
from cpt_lab.analysis.statistics import interval, paired
from cpt_lab.experiments.grids import find_grids
from cpt_lab.experiments.recipe import LOSS

# what is compared -> (execution, shared steps) of both sides
COMPARISONS = {
    "integer minus simulated": (("integer", False), ("simulated", False)),
    "integer minus simulated, shared steps": (("integer", True), ("simulated", True)),
    "shared steps minus the paper's, simulated": (("simulated", True), ("simulated", False)),
}
WAYS = [(how, shared) for shared in (False, True) for how in ("simulated", "integer")]


def executions(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of every grid of ``designs.execution`` of which there are some of both kinds.

    With columns ``execution`` and ``shared_steps`` as in their recipes.
    """
    parts = []
    for grid in find_grids("execution").values():
        recipes = {spec.key: spec.recipe for spec in grid.make(grid.scales[0])}
        part = runs[runs["key"].isin(recipes)]
        ways = {name: [getattr(recipes[key], name) for key in part["key"]] for name in ("execution", "shared_steps")}
        parts.append(part.assign(**ways))
    return [part for part in parts if part["execution"].nunique() > 1]


def execution_difference(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Compare how products are computed, by seed.

    Args:
        runs: one of ``executions``.
        metric: a column.

    Returns:
        For each of ``COMPARISONS`` that both sides have: difference (as stored, positive when the first is larger) with
        low and high (95 %, paired over seeds), std of the second side, pairs, and how many of both diverged.
    """
    lines = []
    for name, sides in COMPARISONS.items():
        first, second = (_side(runs, *side) for side in sides)
        pairs = paired(first, second, metric)
        if len(pairs):
            diverged = int(first["diverged"].sum() + second["diverged"].sum())
            lines.append((name, *interval(pairs), second[metric].std(), len(pairs), diverged))
    return pd.DataFrame(lines, columns="comparison difference low high std pairs diverged".split())


def _side(runs: pd.DataFrame, execution: str, shared: bool) -> pd.DataFrame:
    return runs[(runs["execution"] == execution) & (runs["shared_steps"] == shared)]


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return ``execution_difference`` for people, of the main metric and of the test loss; runs as there."""
    parts = []
    for metric in (metric_named(metric_of(runs)), LOSS):
        found = execution_difference(runs, metric.name)
        cells = {
            "comparison": found["comparison"],
            "of": f"{metric.name} {metric.unit}".rstrip(),
            "difference [95 %]": intervals(metric, found),
            "std over seeds": metric.text(found["std"]),
            "pairs": found["pairs"],
            "diverged": found["diverged"],
        }
        parts.append(pd.DataFrame(cells))
    return pd.concat(parts, ignore_index=True)


def _name(how: str, shared: bool) -> str:
    return f"{how}, {'shared steps' if shared else 'steps of the paper'}"


def seconds_summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return what the ways to compute products gave and took, for people; runs as for ``execution_difference``.

    Seconds are the median of whole runs, evaluations and all; their ratio is to those of simulated products with the
    same steps.
    """
    metric = metric_named(metric_of(runs))
    parts = {way: _side(runs, *way) for way in WAYS}
    seconds = {way: part.loc[part["status"] == "ok", "seconds"].median() for way, part in parts.items()}
    return pd.DataFrame(
        {
            "products": [_name(*way) for way in WAYS],
            f"{metric.name} {metric.unit}".rstrip(): metric.text(part[metric.name].mean() for part in parts.values()),
            "std": metric.text(part[metric.name].std() for part in parts.values()),
            "n": [part[metric.name].count() for part in parts.values()],
            "diverged": [part["diverged"].sum() for part in parts.values()],
            "seconds of a run": [f"{seconds[way]:.1f}" for way in WAYS],
            "times simulated": [f"{seconds[way] / seconds['simulated', way[1]]:.2f}" for way in WAYS],
        }
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what computing on codes changes, for every model that was run in both ways."""
    for part in executions(runs):
        name, note = experiment_name(part), "Several runs shared the machine: seconds are only near."
        yield Section(f"Products on codes: {name}", table=summary(part), style="left")
        yield Section(
            f"Products on codes, in seconds: {name}", (note,), table=seconds_summary(part), style="left folded"
        )
