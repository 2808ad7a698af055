"""Products on codes beside simulated ones, whose runs differ as two seeds of rounding noise.  Beyond the paper."""

from collections.abc import Iterator

import pandas as pd

from cpt_lab.analysis.metrics import intervals, metric_named, metric_of
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.run_groups import experiment_name
from cpt_lab.analysis.statistics import interval, paired
from cpt_lab.experiments.grids import find_grids
from cpt_lab.experiments.schema import LOSS

# what is compared -> (execution, shared steps) of both sides
COMPARISONS = {
    "integer minus simulated": (("integer", False), ("simulated", False)),
    "integer minus simulated, shared steps": (("integer", True), ("simulated", True)),
    "shared steps minus the paper's, simulated": (
        ("simulated", True),
        ("simulated", False),
    ),
}


def executions(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of every grid of ``designs.execution`` of which there are some of both kinds.

    With columns ``execution`` and ``shared_steps`` as in their recipes.
    """
    parts = []
    for grid in find_grids("execution").values():
        recipes = {spec.key: spec.recipe for spec in grid.make(grid.scales[0])}
        part = runs[runs["key"].isin(recipes)]
        ways = {
            name: [getattr(recipes[key], name) for key in part["key"]]
            for name in ("execution", "shared_steps")
        }
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
        first, second = (
            runs[(runs["execution"] == way) & (runs["shared_steps"] == shared)]
            for way, shared in sides
        )
        pairs = paired(first, second, metric)
        if len(pairs):
            diverged = int(first["diverged"].sum() + second["diverged"].sum())
            lines.append(
                (name, *interval(pairs), second[metric].std(), len(pairs), diverged)
            )
    return pd.DataFrame(
        lines, columns="comparison difference low high std pairs diverged".split()
    )


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


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what computing on codes changes, for every model that was run in both ways."""
    for part in executions(runs):
        yield Section(
            f"Products on codes: {experiment_name(part)}",
            table=summary(part),
            style="left",
        )
