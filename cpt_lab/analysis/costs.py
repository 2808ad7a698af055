"""Costs beside BitOps: what the schedules cost by each.  Beyond the paper."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from cpt_core.formats.costs import COSTS
from cpt_core.formats.ladder import AFFINE, LADDERS, FormatLadder
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import Schedule
from cpt_lab.analysis.pages import Section

LEVELS = {"affine": (3, 8)}  # between which schedules run on a ladder of ``LADDERS``; from end to end of the others


def relative_costs(q_min: int = 3, q_max: int = 8, ladder: FormatLadder = AFFINE) -> pd.DataFrame:
    """Return the cost of the paper's ten schedules and of static levels relative to static ``q_max``.

    Args:
        q_min: lowest level; the static ones are from there up.
        q_max: level of the baseline, and of all gradients.
        ladder: of formats; "traffic" is that of products whose operands and results have as many elements each.

    Returns:
        A line per arm, a column per cost of ``COSTS``.
    """
    arms: dict[str, Schedule] = {
        name: make_schedule(name, q_min=q_min, q_max=q_max, total_steps=64_000, n_cycles=8) for name in SUITE
    }
    arms |= {f"static {q}": make_schedule("STATIC", q_max=q, total_steps=64_000) for q in range(q_min, q_max + 1)}
    found = {arm: [s.relative_cost(q_max, q_max, cost, ladder) for cost in COSTS] for arm, s in arms.items()}
    return pd.DataFrame.from_dict(found, orient="index", columns=list(COSTS))


def table() -> pd.DataFrame:
    """Return ``relative_costs`` of the paper's arms on all ladders: by ladder, with its levels, and arm."""
    found = {}
    for name, ladder in LADDERS.items():
        q_min, q_max = LEVELS.get(name, (ladder.levels[0], ladder.levels[-1]))
        found[f"{name}, levels {q_min} to {q_max}"] = relative_costs(q_min, q_max, ladder)
    return pd.concat(found, names=["ladder", "arm"])


def sections() -> Iterator[Section]:
    """The costs of the paper's schedules."""
    costs = table()
    formats = "; ".join(
        f"{name}: " + ", ".join(f"{q} {ladder[q]}" for q in ladder.levels)
        for name, ladder in LADDERS.items()
        if ladder != AFFINE
    )
    notes = (
        "Every schedule relative to static training at the highest level, at which all gradients are; computed, not "
        "measured. Scales of ranges, rotations and rounding are not counted.",
        f"The levels of the ladders: affine: q bits; {formats}.",
        *(f"{cost.name} ({cost.unit}; {cost.source}): {cost.about}" for cost in COSTS.values()),
    )
    yield Section("Costs beside BitOps", notes, table=costs.map("{:.3f}".format).reset_index(), style="left")
