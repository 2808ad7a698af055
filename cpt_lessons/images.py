"""What notebook 03 draws: pictures at a few bits, and two arms of an experiment seed by seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.metrics import metric_named, metric_of
from cpt_lab.analysis.quality_cost import of_arms, paired_difference
from cpt_lab.analysis.statistics import interval
from cpt_lab.analysis.style import COLORS, SMALL, drawing


def as_seen(bits: Sequence[int] = (8, 4, 3, 2), digits: Sequence[int] = (3, 8)) -> Figure:
    """Draw one picture of each of some digits as a layer gets it at some bits: quantised over its own range."""
    import torch
    from sklearn.datasets import load_digits

    from cpt_core.quantization.fake_quantize import quantize

    data = load_digits()
    chosen = [data.images[np.flatnonzero(data.target == digit)[0]] for digit in digits]
    said = ", ".join(map(str, bits))
    alt = f"pictures of the digits {', '.join(map(str, digits))}, 8 x 8 pixels, at {said} bits: greys become fewer"
    with drawing(len(digits), len(bits), alt, figsize=(1.7 * len(bits), 1.7 * len(digits) + 0.3)) as (figure, axes):
        for line, picture in zip(axes, chosen, strict=True):
            for ax, q in zip(line, bits, strict=True):
                shown = quantize(torch.tensor(picture, dtype=torch.float32), q).numpy()
                ax.imshow(shown, cmap="gray", vmin=0, vmax=16)
                ax.set(xticks=[], yticks=[], frame_on=False)
                ax.grid(visible=False)
        for ax, q in zip(axes[0], bits, strict=True):
            ax.set_title(f"{q} bits", fontsize=10)
    return figure


def seed_by_seed(runs: pd.DataFrame, a: str, b: str) -> Figure:
    """Draw the quality of two arms, a line per seed, and beside it their differences with mean and 95 % interval.

    Args:
        runs: of one experiment.
        a: an arm, or a savings group ("large", "medium", "small").
        b: what is subtracted from it.
    """
    metric = metric_named(metric_of(runs))
    sides = [metric.factor * of_arms(runs, name, metric_of(runs)) for name in (a, b)]
    differences = metric.factor * paired_difference(runs, a, b)
    mean, low, high = interval(differences)
    alt = f"{metric.label} of {a} and {b}, a line per seed; beside it the {len(differences)} differences and their mean"
    with drawing(1, 2, alt, figsize=(8, 3.4), width_ratios=(3, 2)) as (figure, axes):
        left, right = axes[0]
        for seed in differences.index:
            left.plot([0, 1], [side[seed] for side in sides], "o-", color=COLORS["medium"], linewidth=1, markersize=4)
        left.set_xticks([0, 1], [a, b])
        left.set(xlim=(-0.3, 1.3), ylabel=metric.label)
        left.set_title("a line per seed", fontsize=10)
        right.axhline(0, color="#888888", linewidth=0.8)
        right.plot(np.zeros(len(differences)), differences, "o", color=COLORS["medium"], markersize=4)
        right.errorbar([0.5], [mean], [[mean - low], [high - mean]], fmt="s", color=COLORS["static"], capsize=4)
        right.set_xticks([0, 0.5], ["each seed", "mean, 95 %"], fontsize=SMALL)
        right.set(xlim=(-0.4, 0.9), ylabel="points" if metric.factor == 100 else metric.label)
        right.set_title(f"{a} minus {b}", fontsize=10)
    return figure
