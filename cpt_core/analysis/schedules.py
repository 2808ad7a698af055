"""Figures of schedules.  Paper: figure 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cpt_core.analysis.style import COLORS, drawing
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
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
