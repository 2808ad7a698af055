"""Figure of lesson 09: two arms seed by seed."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.metrics import metric_named, metric_of
from cpt_lab.analysis.quality_cost import paired_difference, runs_of
from cpt_lab.analysis.statistics import by_seed, interval
from cpt_lab.analysis.style import COLORS, SMALL_FONT_SIZE, subplots


def seed_by_seed(runs: pd.DataFrame, a: str, b: str) -> Figure:
    """Draw the quality of two arms by seed, and their differences with 95 % interval.

    ``a`` is an arm, or a savings group ("large", "medium", "small"), and so is ``b``, which is subtracted from it.
    """
    metric = metric_named(metric_of(runs))
    sides = [
        metric.factor * by_seed(runs_of(runs, name), metric.name)[metric.name]
        for name in (a, b)
    ]
    differences = metric.factor * paired_difference(runs, a, b)
    mean, low, high = interval(differences)
    alt = f"{metric.label} of {a} and {b}, a line per seed; beside it the {len(differences)} differences and their mean"
    with subplots(1, 2, alt, figsize=(8, 3.4), width_ratios=(3, 2)) as (
        figure,
        ((left, right),),
    ):
        for seed in differences.index:
            left.plot(
                [0, 1],
                [side[seed] for side in sides],
                "o-",
                color=COLORS["medium"],
                linewidth=1,
                markersize=4,
            )
        left.set_xticks([0, 1], [a, b])
        left.set(xlim=(-0.3, 1.3), ylabel=metric.label)
        left.set_title("a line per seed", fontsize=10)
        right.axhline(0, color="#888888", linewidth=0.8)
        right.plot(
            np.zeros(len(differences)),
            differences,
            "o",
            color=COLORS["medium"],
            markersize=4,
        )
        right.errorbar(
            [0.5],
            [mean],
            [[mean - low], [high - mean]],
            fmt="s",
            color=COLORS["static"],
            capsize=4,
        )
        right.set_xticks(
            [0, 0.5], ["each seed", "mean, 95 %"], fontsize=SMALL_FONT_SIZE
        )
        right.set(
            xlim=(-0.4, 0.9), ylabel="points" if metric.factor == 100 else metric.label
        )
        right.set_title(f"{a} minus {b}", fontsize=10)
        deviation = max(side.max() - side.min() for side in sides)
        seeds = f"{len(differences)} seeds differ by up to {deviation:.0f} points"
        figure.suptitle(
            f"{seeds}, {a} and {b} by {abs(mean):.1f} in the mean", fontsize=11
        )
    return figure
