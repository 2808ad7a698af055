"""Bit operations beside seconds and bytes: what a training step takes on this machine, by bits."""

from __future__ import annotations

from matplotlib.figure import Figure

from cpt_core.inspecting.measured import MeasuredCost
from cpt_core.schedules import cost
from cpt_lab.analysis.style import COLORS, drawing, whole

HEADING = "fewer bits: fewer bit operations, the same seconds and memory"


def promise_and_machine(measured: MeasuredCost, base: int = 8, heading: str = HEADING) -> Figure:
    """Draw what a step takes over its bits, relative to ``base`` bits: bit operations, seconds, memory kept."""
    q_grad, at = measured.q_grad, measured.steps
    of = {
        "bit operations": ({q: cost.relative_cost([q], base, q_grad) for q in at}, "static", "--"),
        "seconds": ({q: at[q].seconds / at[base].seconds for q in at}, "large", "o-"),
        "memory for the backward pass": ({q: at[q].saved_bytes / at[base].saved_bytes for q in at}, "small", "^-"),
    }
    with drawing(figsize=(7, 3.4)) as (figure, ((ax,),)):
        for name, (values, hue, style) in of.items():
            ax.plot(list(values), list(values.values()), style, color=COLORS[hue], markersize=5, label=name)
        whole(ax.xaxis)
        ax.set(ylim=0, xlabel="bits", ylabel=f"of a step at {base} bits", title=heading)
        ax.legend()
    return figure
