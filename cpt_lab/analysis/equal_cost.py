"""What equal BitOps buy: numbers, table, figure.  Beyond the paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_lab.analysis.groups import equal_cost_groups, named
from cpt_lab.analysis.metrics import intervals, metric_named, metric_of
from cpt_lab.analysis.pages import Section
from cpt_lab.analysis.statistics import interval, paired
from cpt_lab.analysis.style import COLORS, drawing, interval_bar, title
from cpt_lab.experiments.recipe import Metric

WITHIN = 0.05  # how much dearer or cheaper than RR an arm may be to be compared with it


def equal_cost(runs: pd.DataFrame) -> pd.DataFrame:
    """Compare arms that spent the same number of BitOps, give or take ``WITHIN``, by seed.

    Args:
        runs: of one recipe, at any length of training (``designs.equal_cost``).

    Returns:
        For each budget (RR, or RR bent to a budget) one line per arm: base, arm, spent (BitOps as a share of those of
        the base), mean, std, n and how many of them diverged; difference to the base in quality, positive when better,
        with low and high (95 %, paired over seeds), better (seeds above the base), pairs. A run that diverged counts
        with the worst value of the task and the BitOps that it would have spent.
    """
    metric = metric_of(runs)
    runs = runs[runs[metric].notna()]
    planned = runs["relative_cost"] * runs["total_steps"]
    unit = (runs["bitops"] / planned)[~runs["diverged"]].median()
    runs = runs.assign(bitops=runs["bitops"].where(~runs["diverged"], unit * planned))
    lines = []
    for base in [a for a in runs["arm"].unique() if re.fullmatch(r"RR( at [\d.]+)?", a)]:
        reference = runs[runs["arm"] == base]
        # RR of other budgets, delayed or not, belongs to them even where its cost is near
        other = runs["arm"].str.startswith("RR") & ~runs["arm"].str.match(rf"{re.escape(base)}( delayed|$)")
        for arm, part in runs[~other].groupby("arm", sort=False):
            spent = float(part["bitops"].mean() / reference["bitops"].mean())
            if abs(spent - 1) <= WITHIN:
                values, gains = part[metric], metric_named(metric).better * paired(part, reference, metric)
                gains = gains if arm != base else gains.iloc[:0]
                mean, low, high = interval(gains)
                lines.append(
                    {
                        "base": base, "arm": arm, "spent": spent, "mean": values.mean(), "std": values.std(),
                        "n": int(values.count()), "diverged": int(part["diverged"].sum()),
                        "difference": mean, "low": low, "high": high,
                        "better": int((gains > 0).sum()), "pairs": len(gains),
                    }
                )  # fmt: skip
    if not lines:
        raise ValueError("no rows of RR that others could be compared with; run designs.equal_cost")
    return pd.DataFrame(lines)


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return ``equal_cost`` for people; runs as there."""
    name = metric_of(runs)
    metric, found = metric_named(name), equal_cost(runs)
    return pd.DataFrame(
        {
            "arm": found.arm,
            "BitOps / those of RR": found.spent.map("{:.3f}".format),
            f"{name} {metric.unit}".rstrip(): metric.text(found["mean"]),
            "std": metric.text(found["std"]),
            "n": found.n,
            "better than RR by [95 %]": intervals(replace(metric, digits=metric.digits + 1), found),
            "better": [f"{r.better} of {r.pairs}" if r.arm != r.base else "" for r in found.itertuples()],
            "diverged": found.diverged,
        }
    )


def equal_cost_figure(runs: pd.DataFrame) -> Figure:
    """Draw what every way to spend the same BitOps gains or loses against RR: a dot per seed, mean and 95 % interval.

    One panel per budget; right of the line is better. Runs as for ``equal_cost``.
    """
    name = metric_of(runs)
    drawn, found = metric_named(name), equal_cost(runs)
    counted = runs[runs[name].notna()]
    bases = list(found.base.unique())
    size = (7.5, 0.6 + 1.9 * len(bases))
    with drawing(len(bases), figsize=size, sharex=True) as (figure, axes):
        for ax, base in zip(axes[:, 0], bases, strict=True):
            _gains(ax, found[(found.base == base) & (found.arm != base)].reset_index(drop=True), counted, drawn)
            ax.set_title(f"at the cost of {base}", fontsize=9, loc="left")
        what = f"{drawn.label.split(' (')[0]} {drawn.unit}".rstrip()
        axes[-1, 0].set_xlabel(f"difference to RR at the same BitOps in {what}; right is better")
        lost = int(counted["diverged"].sum())
        figure.suptitle(title(counted) + (f"; {lost} runs diverged" if lost else ""), fontsize=10)
    return figure


def _gains(ax: Axes, arms: pd.DataFrame, runs: pd.DataFrame, metric: Metric) -> None:
    """Draw the arms of one budget from the top down."""
    for y, r in zip(range(len(arms))[::-1], arms.itertuples(), strict=True):
        pairs = paired(runs[runs["arm"] == r.arm], runs[runs["arm"] == r.base], metric.name)
        gains = metric.better * metric.factor * pairs
        group = "static" if r.arm.startswith("static") else "large" if "RR" in r.arm else "small"
        ax.plot(gains, np.full(len(gains), y), "o", color=COLORS[group], alpha=0.3, markersize=4)
        ends = (metric.factor * x for x in (r.difference, r.low, r.high))
        interval_bar(ax, y - 0.22, ends, fmt="D", color=COLORS[group], markersize=4, capsize=3)
    ax.axvline(0, color="#888888", linewidth=0.8)
    ax.set_yticks(range(len(arms))[::-1], arms.arm, fontsize=8)
    ax.set_ylim(-0.6, len(arms) - 0.5)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what the same BitOps buy, for every recipe where that was tried."""
    for name, group in named(equal_cost_groups(runs)):
        try:
            found = equal_cost(group)
        except ValueError:  # RR itself is missing
            continue
        if (found.arm != found.base).any():
            drawn, alt = equal_cost_figure(group), "differences to RR at the same cost"
            yield Section(f"Equal cost: {name}", (), drawn, alt, summary(group))
