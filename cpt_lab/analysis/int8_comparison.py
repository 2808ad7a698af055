"""Int8 matmuls compared with simulated ones.  Beyond the paper.

The runs of both differ as two seeds of rounding noise do.
"""

from collections.abc import Iterator

import pandas as pd

from cpt_lab.analysis.metrics import intervals, metric_named, metric_of
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.run_groups import experiment_name
from cpt_lab.analysis.statistics import interval, paired
from cpt_lab.experiments.grids import find_grids
from cpt_lab.experiments.schema import LOSS

# name of a comparison -> (execution, shared steps) of both sides
COMPARISONS = {
    "integer minus simulated": (("integer", False), ("simulated", False)),
    "integer minus simulated, shared steps": (("integer", True), ("simulated", True)),
    "shared steps minus the paper's, simulated": (
        ("simulated", True),
        ("simulated", False),
    ),
}


def executions(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of every grid of ``designs.execution`` that has both kinds of execution.

    The tables have the columns ``execution`` and ``shared_steps`` of the recipes.
    """
    parts = []
    for grid in find_grids("execution").values():
        recipes = {spec.key: spec.recipe for spec in grid.make(grid.scales[0])}
        part = runs[runs["key"].isin(recipes)]
        columns = {}
        for name in ("execution", "shared_steps"):
            columns[name] = [getattr(recipes[key], name) for key in part["key"]]
        part = part.assign(**columns)
        if part["execution"].nunique() > 1:
            parts.append(part)
    return parts


def execution_difference(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Compare int8 with simulated matmuls, by seed.

    Args:
        runs: one of the tables of ``executions``.
        metric: the compared column.

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
    """Return a printable table of ``execution_difference`` for the main metric and the test loss."""
    parts = []
    for metric in (metric_named(metric_of(runs)), LOSS):
        differences = execution_difference(runs, metric.name)
        cells = {
            "comparison": differences["comparison"],
            "of": f"{metric.name} {metric.unit}".rstrip(),
            "difference [95 %]": intervals(metric, differences),
            "std over seeds": metric.text(differences["std"]),
            "pairs": differences["pairs"],
            "diverged": differences["diverged"],
        }
        parts.append(pd.DataFrame(cells))
    return pd.concat(parts, ignore_index=True)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the comparison of int8 with simulated matmuls for every model that was run in both ways."""
    for part in executions(runs):
        yield Section(
            f"Int8 matmuls compared with simulated ones: {experiment_name(part)}",
            table=summary(part),
            style="left",
        )
