"""Figures of schedules: their bits, their cost and noise.  Paper: figure 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_core.analysis.style import COLORS, TEXT, drawing, name_points, whole
from cpt_core.schedules import cost
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import Schedule


def figure_2(
    q_min: int = 3, q_max: int = 8, n_cycles: int = 8, total_steps: int = 64_000, names: Sequence[str] = tuple(SUITE)
) -> Figure:
    """Draw the schedules of the suite: precision before and after rounding at every step.

    Paper: figure 2.
    """
    made = {
        name: make_schedule(name, q_min=q_min, q_max=q_max, total_steps=total_steps, n_cycles=n_cycles)
        for name in names
    }
    titles = {f"{n}   {s.savings} savings, cost {s.relative_cost():.2f}": s for n, s in made.items()}
    return schedules(titles, f"Precision schedules between {q_min} and {q_max} bits, {n_cycles} cycles")


def schedules(found: Mapping[str, Schedule], title: str = "") -> Figure:
    """Draw schedules by name: precision before and after rounding at every step."""
    columns = 2
    rows = -(-len(found) // columns)
    with drawing(rows, columns, figsize=(9, 1.55 * rows), sharex=True, sharey=True) as (figure, axes):
        for ax, (name, schedule) in zip(axes.flat, found.items(), strict=False):
            draw_schedule(ax, schedule)
            ax.set_title(name, fontsize=9)
        for ax in axes.flat[len(found) :]:
            ax.set_visible(False)
        for ax in axes[-1]:
            ax.set_xlabel("training step")
        for ax in axes[:, 0]:
            ax.set_ylabel("bits")
        figure.suptitle(title, fontsize=11)
    return figure


def draw_schedule(ax: Axes, schedule: Schedule) -> None:
    """Draw one schedule on given axes: a thin line before rounding, a thick one after."""
    steps = np.arange(schedule.total_steps)
    color = COLORS.get(schedule.savings or "", COLORS["static"])
    ax.plot(steps, schedule.values(), color=color, alpha=0.4, linewidth=1)
    ax.step(steps, schedule.bits(), color=color, where="post", linewidth=1.6)
    ax.set_ylim(schedule.q_min - 0.6, schedule.q_max + 0.6)
    whole(ax.yaxis)


def jensen_figure(q_min: int = 3, q_max: int = 8, total_steps: int = 64_000) -> Figure:
    """Draw why no schedule beats static precision where all work is alike: noise is a convex function of cost.

    The line joins the static precisions; whatever changes its bits lies at the mean of the points that it visits, which
    is on the line or above it.
    """
    bits = np.arange(q_min, q_max + 1)
    static = [(cost.relative_cost([q], q_max), cost.noise_exposure([q], q_max)) for q in bits]
    between = np.linspace(static[0][0], 1, 400)  # two precisions, interleaved: straight, but for the scale of the axis
    with drawing(figsize=(6.4, 3.8)) as (figure, axes):
        ax = axes[0, 0]
        costs, noises = zip(*static, strict=True)
        ax.plot(
            between,
            np.interp(between, costs, noises),
            color=COLORS["static"],
            linewidth=1,
            label="static, or two interleaved",
        )
        ax.plot(costs, noises, "o", color=COLORS["static"], markersize=5)
        labels = set()
        for name in SUITE:
            s = make_schedule(name, q_min=q_min, q_max=q_max, total_steps=total_steps)
            group = s.savings or ""
            label = "" if group in labels else f"schedules, {group} savings"
            labels.add(group)
            ax.plot(s.relative_cost(), s.noise_exposure(), "D", color=COLORS[group], markersize=5, label=label or None)
        ax.set(yscale="log", xlabel="cost relative to static q_max (BitOps)", ylabel="noise: mean 4^-q, relative")
        ax.legend(fontsize=8)
        figure.suptitle("At equal cost, static precision has the least noise", fontsize=10)
        name_points(ax, [str(q) for q in bits], costs, noises, [TEXT["static"]] * len(bits))
    return figure
