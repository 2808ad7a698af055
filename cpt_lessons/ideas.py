"""Pictures of what the notebooks 06 and 11 are about: an LSTM step, and the search for a budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from cpt_lab.analysis.style import COLORS, QUIET, SMALL, TEXT, drawing

# boxes and arrows of an LSTM step: centre, and words; the rounded ones are drawn in colour
_ROUNDED = {(1.6, 3.2): "q", (1.6, 1.0): "q", (3.0, 3.9): "q(W)", (3.0, 0.3): "q(U)", (4.4, 3.9): "q(b)"}
_EXACT = {
    (0.4, 3.2): "input\n$x_t$",
    (0.4, 1.0): "state\n$h_{t-1}$",
    (3.0, 3.2): "product",
    (3.0, 1.0): "product",
    (4.4, 2.1): "sum:\ngates",
    (6.0, 2.1): "sigmoid,\ntanh",
    (7.5, 2.1): "cell $c_t$,\nstate $h_t$",
}
_ARROWS = [
    ((0.4, 3.2), (1.6, 3.2)), ((1.6, 3.2), (3.0, 3.2)), ((3.0, 3.9), (3.0, 3.2)), ((3.0, 3.2), (4.4, 2.1)),
    ((0.4, 1.0), (1.6, 1.0)), ((1.6, 1.0), (3.0, 1.0)), ((3.0, 0.3), (3.0, 1.0)), ((3.0, 1.0), (4.4, 2.1)),
    ((4.4, 3.9), (4.4, 2.1)), ((4.4, 2.1), (6.0, 2.1)), ((6.0, 2.1), (7.5, 2.1)),
]  # fmt: skip


def lstm_step() -> Figure:
    """Draw one step of an LSTM: what is rounded in colour, what stays in float32 in grey."""
    alt = (
        "One step of an LSTM. Input, state, both weights and the bias are rounded to q bits; the two products are "
        "added to the gates. Sigmoids, tanh, cell and new state stay in float32."
    )
    with drawing(1, 1, alt, figsize=(8, 3.1)) as (figure, axes):
        ax = axes[0, 0]
        drawn = {}
        for boxes, group in ((_ROUNDED, "large"), (_EXACT, "static")):
            edge = COLORS[group] if boxes is _ROUNDED else "#999999"
            for (x, y), words in boxes.items():
                box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": edge, "linewidth": 1.4}
                text = ax.text(x, y, words, color=TEXT[group], fontsize=9, ha="center", va="center", bbox=box)
                drawn[x, y] = text.get_bbox_patch()
        for start, stop in _ARROWS:
            ends = {"patchA": drawn[start], "patchB": drawn[stop], "shrinkA": 1, "shrinkB": 1}
            ax.annotate("", stop, start, arrowprops={"arrowstyle": "->", "color": QUIET, **ends})
        ax.text(5.4, 0.55, "orange: rounded to $q_t$ bits", color=TEXT["large"], fontsize=9)
        ax.text(5.4, 0.2, "grey: float32", color=QUIET, fontsize=9)
        ax.set(xlim=(-0.2, 8.2), ylim=(0, 4.2))
        ax.set_title("A step rounds what it multiplies, and the bias; the rest stays in float32", fontsize=10)
        ax.axis("off")
    return figure


def bisection(powers: Sequence[float], costs: Sequence[float], tried: Sequence[float], budget: float) -> Figure:
    """Draw the cost of a bent profile over its power, the budget, and the powers that a bisection tried, in order."""
    with drawing(1, 1, figsize=(7, 3)) as (figure, axes):
        ax = axes[0, 0]
        ax.plot(powers, costs, color=COLORS["static"], linewidth=1.4, label="cost of a schedule of this power")
        ax.axhline(budget, color=COLORS["large"], linestyle="--", linewidth=1, label=f"budget {budget:g}")
        at = np.interp(np.log(tried), np.log(powers), costs)
        ax.plot(tried, at, "o", color=COLORS["small"], markersize=5, label="tried")
        for i, (x, y) in enumerate(zip(tried[:4], at[:4], strict=True), 1):
            ax.annotate(str(i), (x, y), (5, 5), textcoords="offset points", fontsize=SMALL, color=TEXT["small"])
        ax.set_xscale("log", base=2)
        ax.set(xlabel="power of the profile", ylabel="relative cost", ylim=(0, 1.05))
        ax.legend(fontsize=SMALL)
        figure.suptitle("A larger power costs less, so that halving finds the budget", fontsize=11)
    return figure
