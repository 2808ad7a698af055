"""Figures of schedules: their bits, cost and noise.  Paper: figure 2."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_core.schedules import cost
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import PROFILES, SUITE
from cpt_core.schedules.schedule import Schedule
from cpt_lab.analysis.style import (
    COLORS,
    PROFILE_COLORS,
    TEXT,
    integer_ticks,
    legend_below,
    name_points,
    subplots,
)


def figure_2(
    q_min: int = 3, q_max: int = 8, n_cycles: int = 8, total_steps: int = 64_000
) -> Figure:
    """Draw the schedules of the suite: precision before and after rounding at every step.

    Paper: figure 2.
    """
    schedules_by_title = {}
    savings = set()
    for name in SUITE:
        schedule = make_schedule(
            name, q_min=q_min, q_max=q_max, total_steps=total_steps, n_cycles=n_cycles
        )
        cost_text = f"{schedule.savings} savings, cost {schedule.relative_cost():.2f}"
        schedules_by_title[f"{name}   {cost_text}"] = schedule
        savings.add(schedule.savings)
    title = (
        f"{len(SUITE)} ways from {q_min} to {q_max} bits in {n_cycles} cycles, "
        f"{len(savings)} levels of cost"
    )
    return schedules(schedules_by_title, title)


def schedules(schedules_by_name: Mapping[str, Schedule], title: str = "") -> Figure:
    """Draw schedules by name: precision before and after rounding at every step."""
    columns = 2
    rows = -(-len(schedules_by_name) // columns)
    with subplots(
        rows, columns, figsize=(9, 1.55 * rows), sharex=True, sharey=True
    ) as (
        figure,
        axes,
    ):
        for ax, (name, schedule) in zip(
            axes.flat, schedules_by_name.items(), strict=False
        ):
            draw_schedule(ax, schedule)
            ax.set_title(name, fontsize=9)
        for ax in axes.flat[len(schedules_by_name) :]:
            ax.set_visible(False)
        for ax in axes[-1]:
            ax.set_xlabel("training step")
        for ax in axes[:, 0]:
            ax.set_ylabel("bits")
        figure.suptitle(title, fontsize=11)
    return figure


def draw_schedule(ax: Axes, schedule: Schedule) -> None:
    """Draw one schedule on axes: a thin line before rounding, a thick one after."""
    steps = np.arange(schedule.total_steps)
    color = COLORS.get(schedule.savings or "", COLORS["static"])
    ax.plot(steps, schedule.values(), color=color, alpha=0.4, linewidth=1)
    ax.step(steps, schedule.bits(), color=color, where="post", linewidth=1.6)
    ax.set_ylim(schedule.q_min - 0.6, schedule.q_max + 0.6)
    integer_ticks(ax.yaxis)


def profiles_figure() -> Figure:
    """Draw the four profiles of the paper and their two mirror images.  Paper: section 3.1."""
    x = np.linspace(0, 1, 201)
    styles = {"linear": ":", "cosine": "-", "exponential": "--", "rex": "-."}
    turned = {
        "growth": "$f(x)$",
        "horizontal": "$f(1 - x)$, horizontal mirror",
        "vertical": "$1 - f(x)$, vertical mirror",
    }
    alt = (
        "Linear, cosine, exponential and REX profiles from 0 to 1: the linear one rises evenly, the cosine gently at "
        "both ends, the exponential at once, REX at the very end. Beside them both mirror images, which fall to 0: "
        "mirrored horizontally, REX falls at once and the exponential at the very end, vertically the other way round."
    )
    with subplots(1, 3, alt, figsize=(9, 2.9), sharey=True) as (figure, axes):
        for ax, (way, formula) in zip(axes[0], turned.items(), strict=True):
            for name, line in styles.items():
                curve = getattr(PROFILES[name](), way)(x)
                ax.plot(
                    x,
                    curve,
                    line,
                    color=PROFILE_COLORS[name],
                    label="REX" if name == "rex" else name,
                )
            ax.set_title(formula, fontsize=10)
            ax.set_xlabel("x, place in the cycle")
        axes[0][0].set_ylabel("part of the way\nfrom q_min to q_max")
        legend_below(figure, axes[0][0])
        figure.suptitle(
            "REX has few bits for longest, unless it is mirrored vertically",
            fontsize=11,
        )
    return figure


def price_figure(schedule: Schedule) -> Figure:
    """Draw the bits of a schedule, and below them the cost of each step, as a share of a step at ``q_max`` bits."""
    bits, steps = schedule.bits(), np.arange(schedule.total_steps)
    prices = cost.step_cost(bits, schedule.q_max) / cost.step_cost(
        schedule.q_max, schedule.q_max
    )
    alt = (
        f"Above, bits against training step, from {schedule.q_min} to {schedule.q_max}; below, the cost of each step, "
        f"{prices.min():.2f} at the fewest bits and {prices.max():.2f} at the most, the area under it filled."
    )
    with subplots(2, 1, alt, figsize=(8, 4), sharex=True) as (
        figure,
        ((upper,), (lower,)),
    ):
        draw_schedule(upper, schedule)
        upper.set_ylabel("bits")
        color = COLORS.get(schedule.savings or "", COLORS["static"])
        lower.step(steps, prices, where="post", color=color, linewidth=1.6)
        lower.fill_between(steps, prices, step="post", color=color, alpha=0.25)
        throughout = f"every step at {schedule.q_max} bits"
        lower.axhline(
            1, color=COLORS["static"], linestyle="--", linewidth=1, label=throughout
        )
        lower.set(
            xlabel="training step",
            ylabel="cost of the step",
            ylim=(0, 1.3),
            yticks=(0, 0.25, 0.5, 0.75, 1),
        )
        lower.legend(fontsize=8, loc="upper right")
        figure.suptitle(
            f"This schedule costs {prices.mean():.2f} of {schedule.q_max} bits throughout",
            fontsize=11,
        )
    return figure


def jensen_figure(q_min: int = 3, q_max: int = 8, total_steps: int = 64_000) -> Figure:
    """Draw noise over cost, a convex function: no schedule beats static precision if all work is equal.

    The line joins the static precisions; a schedule lies at the mean of the points that it visits, which is on the line
    or above it.
    """
    bits = np.arange(q_min, q_max + 1)
    static = [
        (cost.relative_cost([q], q_max), cost.noise_exposure([q], q_max)) for q in bits
    ]
    between = np.linspace(
        static[0][0], 1, 400
    )  # two precisions, interleaved: straight, but for the scale of the axis
    with subplots(figsize=(6.4, 3.8)) as (figure, axes):
        ax = axes[0, 0]
        costs, noises = zip(*static, strict=True)
        joined = np.interp(between, costs, noises)
        ax.plot(
            between,
            joined,
            color=COLORS["static"],
            linewidth=1,
            label="static, or a mix of two neighbours",
        )
        ax.plot(costs, noises, "o", color=COLORS["static"], markersize=5)
        labels = {
            entry.savings: f"schedules, {entry.savings} savings"
            for entry in SUITE.values()
        }
        for name, entry in SUITE.items():
            s = make_schedule(name, q_min=q_min, q_max=q_max, total_steps=total_steps)
            look = {
                "color": COLORS[entry.savings],
                "label": labels.pop(entry.savings, None),
            }
            ax.plot(s.relative_cost(), s.noise_exposure(), "D", markersize=5, **look)
        ax.set(
            yscale="log",
            xlabel="cost relative to static q_max (BitOps)",
            ylabel="noise: mean 4^-q, relative",
        )
        ax.legend(fontsize=8)
        figure.suptitle(
            "At equal cost, static precision has the least noise", fontsize=10
        )
        name_points(
            ax, [str(q) for q in bits], costs, noises, [TEXT["static"]] * len(bits)
        )
    return figure
