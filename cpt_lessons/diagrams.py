"""Drawings that explain an idea: the slope of a staircase, rounding at random, the three matmuls of a layer."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

from cpt_lab.analysis.style import COLORS, legend_below, subplots

RAMP = "#777777"


def slopes() -> Figure:
    """Draw why rounding has no useful slope, and which one stands in for it: on a grid of 3 bits from -1 to 1."""
    q, narrow, wide = (
        3,
        0.001,
        0.5,
    )  # distances to both sides, below a step of the grid and of several ones
    s = 2 / (2**q - 1)
    alt = (
        f"left: a staircase of {q} bits, the straight line through it, and a line over several stairs that is nearly "
        f"as steep; right: the slope of the staircase at every place, 0 with a narrow difference but for the jumps, "
        f"near 1 with a wide one"
    )

    def stairs(x: np.ndarray) -> np.ndarray:
        return np.rint((x + 1) / s) * s - 1

    x, v = np.linspace(-1, 1, 2001), 0.95 * np.linspace(wide - 1, 1 - wide, 2001)
    center = (
        s * (0.8 + np.floor((1 - s) / s)) - 1
    )  # inside a stair, near the middle of the range
    with subplots(1, 2, alt, figsize=(8, 3.3)) as (figure, ((left, right),)):
        left.plot(x, x, color=RAMP, linewidth=1, label="the values themselves")
        left.plot(
            x, stairs(x), color=COLORS["small"], linewidth=1.6, label="rounded values"
        )
        for h, color, mark, width in (
            (wide, "large", "o--", 1.8),
            (narrow, "static", "D-", 1),
        ):
            ends, look = (
                np.array([center - h, center + h]),
                {"color": COLORS[color], "linewidth": width},
            )
            left.plot(
                ends,
                stairs(ends),
                mark,
                markersize=5,
                label=f"slope over x ± {h:g}",
                **look,
            )
            right.plot(v, (stairs(v + h) - stairs(v - h)) / (2 * h), mark[1:], **look)
        right.axhline(1, color=RAMP, linewidth=1)
        figure.suptitle(
            "A stair is flat; several stairs climb like a straight line", fontsize=11
        )
        left.set(xlabel="value x", ylabel="rounded value q(x)", title="the staircase")
        right.set(
            xlabel="value x",
            ylabel="slope",
            ylim=(-0.2, 2),
            title="its slope at every place",
        )
        legend_below(figure, left)
    return figure


def random_rounding() -> Figure:
    """Draw what values become, rounded to nearest and at random, and what that is on average, on a grid of 2 bits."""
    levels, draws = 4, 1000
    alt = (
        "left: values rounded to the nearest level lie on one stair each, and so does their mean; right: values "
        "rounded at random lie on the level below or above, more often on the nearer one, and their mean lies on the "
        "straight line"
    )
    x, some = np.linspace(0, levels - 1, 60 * (levels - 1) + 1), slice(None, None, 5)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (draws, len(x)))
    with subplots(1, 2, alt, figsize=(8, 3.2), sharey=True) as (figure, axes):
        for ax, rule, u in zip(
            axes[0], ("to nearest", "at random"), (0 * noise, noise), strict=True
        ):
            rounded = np.clip(np.rint(x + u), 0, levels - 1)
            ax.plot(x, x, color=RAMP, linewidth=1, label="the value itself")
            for level in range(levels):
                share, name = (
                    (rounded == level).mean(0)[some],
                    None if level else "results, the larger the more often",
                )
                ax.scatter(
                    x[some],
                    np.full(len(share), level),
                    34 * share,
                    color=COLORS["large"],
                    label=name,
                )
            ax.plot(
                x,
                rounded.mean(0),
                color=COLORS["small"],
                linewidth=1.8,
                label="mean of the results",
            )
            ax.set_title(rule, fontsize=10)
            ax.set(xlabel="value, in steps", xticks=range(levels), yticks=range(levels))
        axes[0][0].set_ylabel("level")
        figure.suptitle("Rounded at random, a value is right on average", fontsize=11)
        legend_below(figure, axes[0][1])
    return figure


# operand -> colour and line of its box, so that they differ also in grey
OPERANDS = {
    "inputs": ("small", "-", 1.2),
    "weights": ("medium", "-", 2.8),
    "output gradients": ("large", "--", 1.6),
}
LETTERS = {"inputs": "X", "weights": "W", "output gradients": "E"}
INK = COLORS["static"]


def three_matmuls(q: int, q_grad: int) -> Figure:
    """Draw the three matmuls of a layer in a training step, with the bits of every operand and what they cost."""
    bits = {"inputs": q, "weights": q, "output gradients": q_grad}
    matmuls = (
        ("forward", "inputs", "weights", "outputs", "$Y = X\\,W$"),
        (
            "input gradient",
            "output gradients",
            "weights",
            "input gradients",
            "$E\\,W^T$",
        ),
        (
            "weight gradient",
            "inputs",
            "output gradients",
            "weight gradients",
            "$X^T E$",
        ),
    )
    costs = [bits[a] * bits[b] for _, a, b, *_ in matmuls]
    alt = "; ".join(
        f"{name} matmul: {a} of {bits[a]} bits times {b} of {bits[b]} bits, cost {cost}, gives {result} in float32"
        for (name, a, b, result, _), cost in zip(matmuls, costs, strict=True)
    )
    with subplots(1, 3, alt, figsize=(8.4, 3.9)) as (figure, axes):
        for ax, (name, a, b, result, formula), cost in zip(
            axes[0], matmuls, costs, strict=True
        ):
            ax.set(xlim=(0, 10), ylim=(0, 12), xticks=[], yticks=[], frame_on=False)
            ax.set_title(f"{name} matmul", fontsize=11)
            for x, operand in ((2.4, a), (7.6, b)):
                color, line, width = OPERANDS[operand]
                words = f"{operand.replace(' ', chr(10))}\n${LETTERS[operand]}$"
                _box(
                    ax,
                    x,
                    10.6,
                    words,
                    2.1,
                    edgecolor=COLORS[color],
                    linestyle=line,
                    linewidth=width,
                )
                _arrow(ax, (x, 9.4), (5 + 0.24 * (x - 5), 5.9))
                symbol = (
                    r"$q_\mathrm{grad}$" if operand == "output gradients" else "$q$"
                )
                _words(
                    ax, x + 0.3 * np.sign(x - 5), 7.0, f"{symbol}\n{bits[operand]} bits"
                )
            ax.add_patch(
                Circle((5, 5.3), 0.75, facecolor="white", edgecolor=INK, linewidth=1.2)
            )
            _words(ax, 5, 5.25, "×", fontsize=13)
            _arrow(ax, (5, 4.5), (5, 3.1))
            _words(ax, 6.5, 3.85, "float32")
            _box(ax, 5, 2.0, f"{result}\n{formula}", 3.0, edgecolor=INK, linewidth=0.8)
            ax.set_xlabel(f"cost {bits[a]} · {bits[b]} = {cost}", fontsize=10)
        backward = sum(costs[1:]) / sum(costs)
        figure.suptitle(
            f"The two backward matmuls take {backward:.0%} of the step", fontsize=11
        )
        figure.supxlabel(
            f"one step: {' + '.join(map(str, costs))} = {sum(costs)}", fontsize=10
        )
    return figure


def _box(ax: Any, x: float, y: float, words: str, wide: float, **look: Any) -> None:
    """Draw words in a box around a place, ``wide`` to both sides."""
    style = "round,pad=0.1,rounding_size=0.3"
    ax.add_patch(
        FancyBboxPatch(
            (x - wide, y - 1.1),
            2 * wide,
            2.2,
            boxstyle=style,
            facecolor="white",
            **look,
        )
    )
    _words(ax, x, y, words)


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK})


def _words(ax: Any, x: float, y: float, words: str, fontsize: int = 9) -> None:
    ax.text(x, y, words, ha="center", va="center", fontsize=fontsize)
