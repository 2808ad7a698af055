"""Comparison of arms at equal BitOps: numbers and table.  Beyond the paper."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from cpt_lab.analysis.metrics import intervals, metric_named, metric_of
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.run_groups import equal_cost_groups, with_unique_names
from cpt_lab.analysis.statistics import check_one_run_per_seed, interval, paired

# largest relative difference in BitOps to RR of an arm that is compared with it
COST_TOLERANCE = 0.05


def equal_cost(runs: pd.DataFrame) -> pd.DataFrame:
    """Compare arms of equal BitOps, within ``COST_TOLERANCE``, by seed.

    Args:
        runs: of one recipe, some of them stopped early (``designs.equal_cost``).

    Returns:
        For each budget (RR, or RR bent to a budget) one line per arm: base, arm, spent (BitOps as a share of those of
        the base), mean, std, n, diverged; difference to the base, positive when better, with low and high (95 %, paired
        over seeds), better (seeds above the base), pairs. A diverged run has the worst value and all BitOps.
    """
    metric = metric_of(runs)
    runs = runs[runs[metric].notna()]
    planned = runs["relative_cost"] * runs["total_steps"]
    unit = (runs["bitops"] / planned)[~runs["diverged"]].median()
    runs = runs.assign(bitops=runs["bitops"].where(~runs["diverged"], unit * planned))

    rows = []
    bases = [
        arm for arm in runs["arm"].unique() if re.fullmatch(r"RR( at [\d.]+)?", arm)
    ]
    for base in bases:
        reference = runs[runs["arm"] == base]
        # RR of another budget, delayed or not, belongs to that budget even if its cost is near.
        own_variants = rf"{re.escape(base)}( delayed|$)"
        is_rr = runs["arm"].str.startswith("RR")
        is_other_budget = is_rr & ~runs["arm"].str.match(own_variants)
        for arm, part in runs[~is_other_budget].groupby("arm", sort=False):
            cost_ratio = float(part["bitops"].mean() / reference["bitops"].mean())
            if abs(cost_ratio - 1) <= COST_TOLERANCE:
                numbers = _compare_with_base(part, reference, metric)
                rows.append({"base": base, "arm": arm, "spent": cost_ratio, **numbers})
    if not rows:
        raise ValueError(
            "no rows of RR that others could be compared with; run designs.equal_cost"
        )
    return pd.DataFrame(rows)


def _compare_with_base(
    part: pd.DataFrame, reference: pd.DataFrame, metric: str
) -> dict[str, float | int]:
    """Return mean and spread of an arm, and its gain on the base by seed; the base itself has no gain."""
    values = part[metric]
    gains = metric_named(metric).better * paired(part, reference, metric)
    if part["arm"].iloc[0] == reference["arm"].iloc[0]:
        gains = gains.iloc[:0]
    mean, low, high = interval(gains)
    return {
        "mean": values.mean(),
        "std": values.std(),
        "n": int(values.count()),
        "diverged": int(part["diverged"].sum()),
        "difference": mean,
        "low": low,
        "high": high,
        "better": int((gains > 0).sum()),
        "pairs": len(gains),
    }


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a printable form of ``equal_cost``, with the base of every comparison."""
    name = metric_of(runs)
    metric, arms = metric_named(name), equal_cost(runs)
    cells = {
        "base": arms.base,
        "arm": arms.arm,
        "BitOps / those of the base": arms.spent.map("{:.3f}".format),
        f"{name} {metric.unit}".rstrip(): metric.text(arms["mean"]),
        "std": metric.text(arms["std"]),
        "n": arms.n,
        "better than the base by [95 %]": intervals(
            replace(metric, digits=metric.digits + 1), arms
        ),
        "better": [
            f"{r.better} of {r.pairs}" if r.arm != r.base else ""
            for r in arms.itertuples()
        ],
        "diverged": arms.diverged,
    }
    return pd.DataFrame(cells)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the comparison at equal BitOps of every recipe that has one."""
    for name, group in with_unique_names(equal_cost_groups(runs)):
        check_one_run_per_seed(group)
        try:
            arms = equal_cost(group)
        except ValueError:  # RR itself is missing
            continue
        if (arms.arm != arms.base).any():
            yield Section(f"Equal cost: {name}", table=summary(group))
