"""Pictures that only the notebooks draw."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from cpt_core.schedules import cost
from cpt_extras.formats.format import Format
from cpt_lab.analysis.style import COLORS, TEXT, integer_ticks, subplots


def by_cost(
    costs: Mapping[str, float], accuracies: Mapping[str, Sequence[float]]
) -> Figure:
    """Draw the accuracy of every arm against its cost: a point per training, a bar at their mean."""
    alt = f"Test accuracy against relative cost of {', '.join(accuracies)}: a point per training, a bar at their mean"
    with subplots(alt=alt, figsize=(7, 3.4)) as (figure, ((ax,),)):
        for name, values in accuracies.items():
            group, side = (
                ("static", "right") if name.startswith("static") else ("medium", "left")
            )
            percent, x, color = 100 * np.asarray(values), costs[name], COLORS[group]
            ax.plot([x] * len(percent), percent, "o", color=color, ms=4, alpha=0.4)
            ax.plot(x, percent.mean(), "_", color=color, ms=22, markeredgewidth=2)
            ax.text(
                x,
                1.02,
                name,
                color=TEXT[group],
                ha=side,
                transform=ax.get_xaxis_transform(),
            )
        ax.set(
            xlabel="cost relative to static 8 bits",
            ylabel="test accuracy (%)",
            xlim=(0, 1.15),
        )
        means = {
            name: 100 * float(np.asarray(values).mean())
            for name, values in accuracies.items()
        }
        trained_arm, *static = sorted(
            means, key=lambda name: (name.startswith("static"), name)
        )
        near = min(static, key=lambda name: abs(costs[name] - costs[trained_arm]))
        figure.suptitle(
            f"{trained_arm}: {means[trained_arm] - means[near]:+.1f} points beside {near}, which costs nearly the same"
        )
    return figure


def number_lines() -> Figure:
    """Draw the values of number formats between -1 and 1, each scaled so that its largest value is 1."""
    names = ("affine4", "symmetric4", "log2_4", "e2m1", "e3m2", "e4m3")
    alt = f"lines with a mark at every value of {', '.join(names)}, from -1 to 1"
    with subplots(1, 1, alt, figsize=(8, 0.45 * len(names) + 0.6)) as (
        figure,
        ((ax,),),
    ):
        for line, name in enumerate(names):
            format = Format.of(name)
            values = format.values().numpy() / format.largest
            values = 2 * values - 1 if format.kind == "affine" else values
            ax.plot(
                values,
                np.full(len(values), -line),
                "|",
                color=COLORS["small"],
                markersize=11,
                markeredgewidth=0.9,
            )
        labels = [f"{name}, {len(Format.of(name).values())} values" for name in names]
        ax.set_yticks([-line for line in range(len(names))], labels)
        ax.set(
            xlim=(-1.03, 1.03),
            ylim=(0.6 - len(names), 0.6),
            xlabel="value, relative to the largest",
        )
        figure.suptitle(
            "Values of integer grids lie evenly, those of floating point crowd around 0",
            fontsize=11,
        )
    return figure


def promise_and_machine(
    seconds: Mapping[int, float], saved_bytes: Mapping[int, int], q_grad: int
) -> Figure:
    """Draw bit operations, seconds and memory of a step over its bits, relative to 8 bits.

    Args:
        seconds: bits -> seconds of a training step; 8 bits must be among them.
        saved_bytes: bits -> bytes kept for the backward pass, for the same bits.
        q_grad: gradient bits of all steps.
    """
    base = 8
    bits = list(seconds)
    relative_bitops = [cost.relative_cost([q], base, q_grad) for q in bits]
    relative_seconds = [seconds[q] / seconds[base] for q in bits]
    relative_memory = [saved_bytes[q] / saved_bytes[base] for q in bits]

    heading = "fewer bits: fewer bit operations, the same seconds and memory"
    with subplots(figsize=(7, 3.4)) as (figure, ((ax,),)):
        ax.plot(
            bits, relative_bitops, "--", color=COLORS["static"], label="bit operations"
        )
        ax.plot(
            bits,
            relative_seconds,
            "o-",
            color=COLORS["large"],
            markersize=5,
            label="seconds",
        )
        ax.plot(
            bits,
            relative_memory,
            "^-",
            color=COLORS["small"],
            markersize=5,
            label="memory for the backward pass",
        )
        integer_ticks(ax.xaxis)
        ax.set(ylim=0, xlabel="bits", ylabel=f"relative to {base} bits", title=heading)
        ax.legend()
    return figure
