"""What equal BitOps buy: numbers, figure and table.  Beyond the paper."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_core.analysis import metrics
from cpt_core.analysis.groups import EQUAL_COST_ARM, experiment_name, without_length
from cpt_core.analysis.metrics import measure_of, metric_of
from cpt_core.analysis.runs import table
from cpt_core.analysis.statistics import interval
from cpt_core.analysis.style import COLORS, STYLE, image_tag
from cpt_core.sweeps.stores import Row


def equal_cost_experiments(rows: Iterable[Row]) -> list[list[Row]]:
    """Pick the rows of equal-cost experiments, one list for each: all arms of its recipe, at any length of training."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["spec"]["schedule"]["kind"] != "deficit":
            groups.setdefault(without_length(row), []).append(row)
    return [g for g in groups.values() if any(EQUAL_COST_ARM.search(row["spec"]["arm"]) for row in g)]


def equal_cost(rows: Iterable[Row], metric: str | None = None, within: float = 0.05) -> pd.DataFrame:
    """Compare arms that spent the same number of BitOps, by seed.

    Args:
        rows: of one recipe, at any length of training (``designs.equal_cost``).
        metric: None takes the main one of the task.
        within: how much dearer or cheaper than RR an arm may be to be compared with it.

    Returns:
        For each budget (RR, or RR bent to a budget) one line per arm: base, arm, spent (BitOps as a share of those of
        the base), mean, std, n; difference to the base in quality, positive when better, with low and high (95 %,
        paired over seeds), better (seeds above the base).
    """
    rows = [row for row in rows if row["status"] == "ok"]
    metric = metric or metric_of(rows)
    runs = table(rows)
    better = measure_of(metric).better
    lines = []
    bases = [a for a in runs["arm"].unique() if re.fullmatch(r"RR( at [\d.]+)?", a)]
    for base in bases:
        reference = runs[runs["arm"] == base].set_index("seed")
        other = runs["arm"].str.startswith("RR") & ~runs["arm"].str.match(rf"{re.escape(base)}( delayed|$)")
        for arm, part in runs[~other].groupby("arm", sort=False):
            part = part.set_index("seed")
            spent = float(part["bitops"].mean() / reference["bitops"].mean())
            if abs(spent - 1) > within:
                continue
            values = part[metric]
            difference = (better * (values - reference[metric])).dropna() if arm != base else values.iloc[:0]
            mean, low, high = interval(difference)
            lines.append(
                {
                    "base": base, "arm": arm, "spent": spent, "mean": values.mean(), "std": values.std(),
                    "n": int(values.count()), "difference": mean, "low": low, "high": high,
                    "better": int((difference > 0).sum()),
                }
            )  # fmt: skip
    if not lines:
        raise ValueError("no rows of RR that others could be compared with; run designs.equal_cost")
    return pd.DataFrame(lines)


def equal_cost_figure(rows: Iterable[Row], metric: str | None = None) -> Figure:
    """Draw what every way to spend the same BitOps gains or loses against RR: a dot per seed, mean and 95 % interval.

    One panel per budget; right of the line is better. Arguments as for ``equal_cost``.
    """
    rows = [row for row in rows if row["status"] == "ok"]
    metric = metric or metric_of(rows)
    measure = measure_of(metric)
    found = equal_cost(rows, metric)
    runs = table(rows)
    wide = (
        measure.better * measure.factor * runs.pivot_table(index="seed", columns="arm", values=metric, aggfunc="first")
    )
    bases = list(found.base.unique())
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(len(bases), 1, figsize=(7.5, 0.6 + 1.9 * len(bases)), sharex=True, squeeze=False)
        for ax, base in zip(axes[:, 0], bases, strict=True):
            arms = found[(found.base == base) & (found.arm != base)].reset_index(drop=True)
            for y, r in zip(range(len(arms))[::-1], arms.itertuples(), strict=True):
                gains = (wide[r.arm] - wide[base]).dropna()
                color = (
                    COLORS["static"] if r.arm.startswith("static") else COLORS["large" if "RR" in r.arm else "small"]
                )
                ax.plot(gains, np.full(len(gains), y), "o", color=color, alpha=0.3, markersize=4)
                ax.errorbar(
                    measure.factor * r.difference, y - 0.22,
                    xerr=[[measure.factor * (r.difference - r.low)], [measure.factor * (r.high - r.difference)]],
                    fmt="D", color=color, markersize=4, capsize=3,
                )  # fmt: skip
            ax.axvline(0, color="#888888", linewidth=0.8)
            ax.set_yticks(range(len(arms))[::-1], arms.arm, fontsize=8)
            ax.set_ylim(-0.6, len(arms) - 0.5)
            ax.set_title(f"at the cost of {base}", fontsize=9, loc="left")
        axes[-1, 0].set_xlabel(
            f"difference to RR at the same BitOps in {measure.label.split(' (')[0]} {measure.unit}; right is better"
        )
        warning = "smoke scale: not a result. " if runs["scale"].iloc[0] == "smoke" else ""
        title = next((t for t in runs["title"] if t), runs["model"].iloc[0])
        figure.suptitle(f"{warning}{title}", fontsize=10)
        figure.tight_layout()
    plt.close(figure)
    return figure


def interval_text(line: Any, factor: float, digits: int) -> str:
    """Such as "-0.6 [-0.8, -0.3]": the difference of a line, with its interval."""
    return "{0:+.{3}f} [{1:+.{3}f}, {2:+.{3}f}]".format(
        factor * line.difference, factor * line.low, factor * line.high, digits
    )


def equal_cost_section(rows: list[Row]) -> list[str]:
    """What the same BitOps buy, for every recipe where that was tried."""
    parts = []
    for group in equal_cost_experiments(rows):
        try:
            found = equal_cost(group)
        except ValueError:  # RR itself is missing or failed
            continue
        if (found.arm == found.base).all():
            continue
        measure = metrics.measure_of(metrics.metric_of(group))
        number = f"{{:.{measure.digits}f}}".format
        interval = [
            interval_text(r, measure.factor, measure.digits) if r.arm != r.base else "" for r in found.itertuples()
        ]
        shown = pd.DataFrame(
            {
                "arm": found.arm,
                "BitOps / those of RR": found.spent.map("{:.3f}".format),
                f"{metrics.metric_of(group)} {measure.unit}".rstrip(): (measure.factor * found["mean"]).map(number),
                "std": (measure.factor * found["std"]).map(number).replace("nan", "–"),
                "n": found.n,
                "better than RR by [95 %]": interval,
                "better": [f"{r.better} of {r.n}" if r.arm != r.base else "" for r in found.itertuples()],
            }
        )
        parts += [
            f"<h2>Equal cost: {html.escape(experiment_name(group))}</h2>",
            image_tag(equal_cost_figure(group), "differences to RR at the same cost"),
            shown.to_html(index=False, border=0),
        ]
    return parts


def show_equal_cost(rows: Sequence[Row]) -> None:
    """Print what the same BitOps buy, and the difference to RR."""
    found = equal_cost(rows)
    measure = metrics.measure_of(metrics.metric_of(rows))
    f, d = measure.factor, measure.digits
    print(f"{'':<29}BitOps   {metrics.metric_of(rows)}, seeds   better than RR at this cost by")
    for r in found.itertuples():
        line = f"{r.arm:<28} x{r.spent:.3f}   {f * r.mean:5.{d}f} +- {f * r.std:.{d}f}, {r.n:2d}"
        if r.arm != r.base:
            line += (
                f"   {f * r.difference:+6.{d + 1}f} [{f * r.low:+.{d + 1}f}, {f * r.high:+.{d + 1}f}], in {r.better}"
            )
        print(line)
