"""Figures of rounding: tensors before and after, and errors over a training.  Beyond the paper.

``error_over_training`` draws the recording of ``cpt_extras.diagnostics.record``, ``histograms`` any tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_core.validation import check_choice
from cpt_lab.analysis.style import COLORS, integer_ticks, legend_below, subplots

NUM_BINS = 80
ROLE_COLORS = (
    COLORS["small"],
    COLORS["large"],
    COLORS["medium"],
    COLORS["own"],
    COLORS["static"],
    "#8C510A",
)
ROLE_MARKERS = "osD^vX"  # roles differ also without colours
STATISTIC_LABELS = {
    "relative_error": "||q(x) - x|| / ||x||",
    "snr_db": "signal to noise, dB",
    "gradient_to_noise": "gradient to noise",
    "clipped": "share clipped",
    "underflow": "share that became 0",
    "levels_used": "share of levels used",
}
# rule of thumb for gradients: smallest value of a statistic, and its label
MIN_FOR_GRADIENTS = {
    "gradient_to_noise": (np.sqrt(3), r"$\sqrt{3}$"),
    "snr_db": (10 * np.log10(3), "4.8 dB"),
}


def error_over_training(recording: Any, statistic: str = "relative_error") -> Figure:
    """Draw a statistic of every role over the steps of a training, and below it the active bits.

    Args:
        recording: the result of ``cpt_extras.diagnostics.record``, or its ``table()``.
        statistic: a column of the table, such as "relative_error" or "snr_db"; the line of a role is the median over
            its layers, the shade their range.

    Raises:
        ValueError: for an unknown statistic, or when nothing is recorded.
    """
    table = recording if isinstance(recording, pd.DataFrame) else recording.table()
    check_choice("statistic", statistic, STATISTIC_LABELS)
    recorded = table[table[statistic].notna()]
    if recorded.empty:
        raise ValueError(f"no step has a {statistic}: nothing is recorded")

    # The layers of an LSTM share a line.
    roles = recorded["role"].str.replace(r"_l\d+.*", "", regex=True)
    with subplots(2, figsize=(8, 4.6), sharex=True, height_ratios=(2, 1)) as (
        figure,
        ((upper,), (lower,)),
    ):
        styles = zip(ROLE_COLORS * 2, ROLE_MARKERS * 2, strict=True)
        for (role, rows), (color, marker) in zip(
            recorded.groupby(roles, sort=True), styles, strict=False
        ):
            by_step = rows.groupby("step")[statistic]
            middle = by_step.median()
            steps = middle.index
            look = {"linewidth": 1.4, "marker": marker, "markersize": 3.5}
            upper.plot(steps, middle, color=color, label=role, **look)
            upper.fill_between(
                steps,
                by_step.min(),
                by_step.max(),
                color=color,
                alpha=0.15,
                linewidth=0,
            )
            levels = rows.groupby("step")["level"].median()
            lower.step(steps, levels, where="post", color=color, linewidth=1.6)
        if statistic in MIN_FOR_GRADIENTS:
            _draw_gradient_limit(upper, *MIN_FOR_GRADIENTS[statistic])
        if statistic in ("relative_error", "gradient_to_noise"):
            upper.set_yscale("log")
        upper.set_ylabel(STATISTIC_LABELS[statistic])
        lower.set(xlabel="optimizer step", ylabel="level (bits)")
        integer_ticks(lower.yaxis)
        lower.set_ylim(recorded["level"].min() - 0.5, recorded["level"].max() + 0.5)
        legend_below(figure, upper)
    return figure


def _draw_gradient_limit(ax: Axes, limit: float, label: str) -> None:
    """Draw the rule-of-thumb limit for gradients as a dashed line with its label."""
    ax.axhline(limit, color="#666666", linewidth=1, linestyle="--")
    ax.annotate(
        f"{label}, for gradients",
        (1, limit),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
        color="#444444",
    )


def histograms(
    x: Any, bits: Sequence[int | str] = (2, 4, 8), quantizer: str = "bias"
) -> Figure:
    """Draw histograms of tensors before and after rounding.

    Gradients are drawn rounded to nearest; training rounds them stochastically.

    Args:
        x: a tensor, or name -> tensor, with a row for each.
        bits: bits of the grids, or names of formats such as "e4m3".
        quantizer: the role whose range is used, see ``QUANTIZERS``; that of a bias has one range for the whole tensor.
    """
    from cpt_extras.formats.tensor_rounding import (
        quantize,
    )  # figures of rows need no torch

    tensors = x if isinstance(x, Mapping) else {"": x}
    with subplots(
        len(tensors), len(bits), figsize=(3.1 * len(bits), 2.5 * len(tensors))
    ) as (figure, axes):
        figure.get_layout_engine().set(
            h_pad=0.1
        )  # titles keep away from the numbers of the row above
        for line, (name, tensor) in zip(axes, tensors.items(), strict=True):
            before = tensor.detach().float().cpu()
            ends = np.linspace(float(before.min()), float(before.max()), NUM_BINS + 1)
            for ax, q in zip(line, bits, strict=True):
                how = {"format": q} if isinstance(q, str) else {"bits": q}
                after = quantize(before, quantizer=quantizer, **how)
                error = float((after - before).norm() / before.norm())
                ax.hist(before.flatten().numpy(), ends, color="#B0B0B0", label="before")
                rounded, style = (
                    after.flatten().numpy(),
                    {"histtype": "step", "linewidth": 1.2},
                )
                ax.hist(rounded, ends, color=COLORS["small"], label="after", **style)
                ax.set_yscale("log")
                ax.set_title(
                    f"{q}{'' if isinstance(q, str) else ' bits'}, error {error:.1%}",
                    fontsize=10,
                )
            line[0].set_ylabel(f"{name}\nhow many" if name else "how many")
        for ax in axes[-1]:
            ax.set_xlabel("value")
        axes[0][-1].legend(fontsize=8)
    return figure
