"""What rounding did to tensors: before and after, and over a training.  Beyond the paper.

Drawn from what ``cpt_extras.diagnostics.record`` found, or from tensors at hand.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_core.validation import check_choice
from cpt_lab.analysis.style import COLORS, integer_ticks, legend_below, subplots

BINS = 80
ROLE_COLORS = (
    COLORS["small"],
    COLORS["large"],
    COLORS["medium"],
    COLORS["own"],
    COLORS["static"],
    "#8C510A",
)
MARKERS = "osD^vX"  # roles differ also without colours
LABELS = {
    "relative_error": "||q(x) - x|| / ||x||",
    "snr_db": "signal to noise, dB",
    "gradient_to_noise": "gradient to noise",
    "clipped": "share clipped",
    "underflow": "share that became 0",
    "levels_used": "share of levels used",
}
LEAST = {
    "gradient_to_noise": np.sqrt(3),
    "snr_db": 10 * np.log10(3),
}  # the rule of thumb for gradients


def error_over_training(recording: Any, statistic: str = "relative_error") -> Figure:
    """Draw a statistic of every role over the steps of a training, and below it the levels in force.

    Args:
        recording: what ``cpt_extras.diagnostics.record`` returned, or its ``table()``.
        statistic: a column of the table, such as "relative_error" or "snr_db"; of a role the median over its layers,
            and in its shade all of them.

    Raises:
        ValueError: for another statistic, or when nothing is recorded.
    """
    table = recording if isinstance(recording, pd.DataFrame) else recording.table()
    known = table[table[check_choice("statistic", statistic, LABELS)].notna()]
    if known.empty:
        raise ValueError(f"no step has a {statistic}: nothing is recorded")
    roles = known["role"].str.replace(
        r"_l\d+.*", "", regex=True
    )  # those of an LSTM's layers together
    with subplots(2, figsize=(8, 4.6), sharex=True, height_ratios=(2, 1)) as (
        figure,
        ((upper,), (lower,)),
    ):
        looks = zip(ROLE_COLORS * 2, MARKERS * 2, strict=True)
        for (role, rows), (color, marker) in zip(
            known.groupby(roles, sort=True), looks, strict=False
        ):
            of_steps = rows.groupby("step")[statistic]
            middle = of_steps.median()
            upper.plot(
                middle.index,
                middle,
                color=color,
                linewidth=1.4,
                marker=marker,
                markersize=3.5,
                label=role,
            )
            upper.fill_between(
                middle.index,
                of_steps.min(),
                of_steps.max(),
                color=color,
                alpha=0.15,
                linewidth=0,
            )
            lower.step(
                middle.index,
                rows.groupby("step")["level"].median(),
                where="post",
                color=color,
                linewidth=1.6,
            )
        if statistic in LEAST:
            upper.axhline(
                LEAST[statistic], color="#666666", linewidth=1, linestyle="--"
            )
            upper.annotate(
                r"$\sqrt{3}$, for gradients",
                (1, LEAST[statistic]),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=8,
                color="#444444",
            )
        if statistic in ("relative_error", "gradient_to_noise"):
            upper.set_yscale("log")
        upper.set_ylabel(LABELS[statistic])
        lower.set(xlabel="optimizer step", ylabel="level (bits)")
        integer_ticks(lower.yaxis)
        lower.set_ylim(known["level"].min() - 0.5, known["level"].max() + 0.5)
        legend_below(figure, upper)
    return figure


def histograms(
    x: Any, bits: Sequence[int | str] = (2, 4, 8), quantizer: str = "bias"
) -> Figure:
    """Draw how often the values of tensors occur, before and after rounding.

    Args:
        x: a tensor, or name -> tensor, a row each.
        bits: of the grids; a name is that of a format, such as "e4m3".
        quantizer: the role whose ranges are taken, see ``QUANTIZERS``; that of a bias has one for the whole tensor.

    Gradients are drawn rounded to nearest; training rounds them stochastically.
    """
    from cpt_extras.formats.tensor_rounding import (
        quantize,
    )  # figures of rows need no torch

    given = x if isinstance(x, Mapping) else {"": x}
    with subplots(
        len(given), len(bits), figsize=(3.1 * len(bits), 2.5 * len(given))
    ) as (figure, axes):
        figure.get_layout_engine().set(
            h_pad=0.1
        )  # titles keep away from the numbers of the row above
        for line, (name, tensor) in zip(axes, given.items(), strict=True):
            before = tensor.detach().float().cpu()
            ends = np.linspace(float(before.min()), float(before.max()), BINS + 1)
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
