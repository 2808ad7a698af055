"""What equal BitOps buy: numbers and table.  Beyond the paper."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from cpt_lab.analysis.metrics import intervals, metric_named, metric_of
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.run_groups import equal_cost_groups, with_unique_names
from cpt_lab.analysis.statistics import interval, paired

WITHIN = 0.05  # how much dearer or cheaper than RR an arm may be to be compared with it


def equal_cost(runs: pd.DataFrame) -> pd.DataFrame:
    """Compare arms that spent the same number of BitOps, give or take ``WITHIN``, by seed.

    Args:
        runs: of one recipe, at any length of training (``designs.equal_cost``).

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
    lines = []
    for base in [
        a for a in runs["arm"].unique() if re.fullmatch(r"RR( at [\d.]+)?", a)
    ]:
        reference = runs[runs["arm"] == base]
        # RR of other budgets, delayed or not, belongs to them even where its cost is near
        other = runs["arm"].str.startswith("RR") & ~runs["arm"].str.match(
            rf"{re.escape(base)}( delayed|$)"
        )
        for arm, part in runs[~other].groupby("arm", sort=False):
            spent = float(part["bitops"].mean() / reference["bitops"].mean())
            if abs(spent - 1) <= WITHIN:
                values, gains = (
                    part[metric],
                    metric_named(metric).better * paired(part, reference, metric),
                )
                gains = gains if arm != base else gains.iloc[:0]
                mean, low, high = interval(gains)
                lines.append(
                    {
                        "base": base,
                        "arm": arm,
                        "spent": spent,
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
                )
    if not lines:
        raise ValueError(
            "no rows of RR that others could be compared with; run designs.equal_cost"
        )
    return pd.DataFrame(lines)


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return ``equal_cost`` for people; runs as there."""
    name = metric_of(runs)
    metric, found = metric_named(name), equal_cost(runs)
    cells = {
        "arm": found.arm,
        "BitOps / those of RR": found.spent.map("{:.3f}".format),
        f"{name} {metric.unit}".rstrip(): metric.text(found["mean"]),
        "std": metric.text(found["std"]),
        "n": found.n,
        "better than RR by [95 %]": intervals(
            replace(metric, digits=metric.digits + 1), found
        ),
        "better": [
            f"{r.better} of {r.pairs}" if r.arm != r.base else ""
            for r in found.itertuples()
        ],
        "diverged": found.diverged,
    }
    return pd.DataFrame(cells)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what the same BitOps buy, for every recipe where that was tried."""
    for name, group in with_unique_names(equal_cost_groups(runs)):
        try:
            found = equal_cost(group)
        except ValueError:  # RR itself is missing
            continue
        if (found.arm != found.base).any():
            yield Section(f"Equal cost: {name}", table=summary(group))
