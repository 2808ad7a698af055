"""Costs beside BitOps: what the schedules cost by each, and which of them two costs rank differently.

Beyond the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pandas as pd

from cpt_core.formats.costs import COSTS
from cpt_core.formats.ladder import AFFINE, LADDERS, FormatLadder
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import Schedule
from cpt_lab.analysis.pages import Section

LEVELS = {"affine": (3, 8)}  # between which schedules run on a ladder of ``LADDERS``; from end to end of the others
TIE = 1e-3  # relative: nearer than this, two arms cost the same; a budget is met as nearly


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


def ranked_differently(costs: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs of arms of which one is cheaper by one cost and dearer by another, from ``relative_costs``.

    Returns:
        Columns: cheaper and dearer, names of arms; by, the cost that says so; but_by, the one that has it the other
        way round; gap and other_gap, how much dearer the second is by either, as a share (the latter is negative).
    """
    lines = []
    for by, but_by in combinations(costs.columns, 2):
        for a, b in combinations(costs.index, 2):
            gap, other = (costs.at[b, name] / costs.at[a, name] - 1 for name in (by, but_by))
            if min(abs(gap), abs(other)) > TIE and (gap > 0) != (other > 0):
                first, second = (a, b) if gap > 0 else (b, a)
                gaps = (costs.at[second, name] / costs.at[first, name] - 1 for name in (by, but_by))
                lines.append((first, second, by, but_by, *gaps))
    return pd.DataFrame(lines, columns=["cheaper", "dearer", "by", "but_by", "gap", "other_gap"])


def table() -> pd.DataFrame:
    """Return ``relative_costs`` of the paper's arms on all ladders: by ladder, with its levels, and arm."""
    found = {}
    for name, ladder in LADDERS.items():
        q_min, q_max = LEVELS.get(name, (ladder.levels[0], ladder.levels[-1]))
        found[f"{name}, levels {q_min} to {q_max}"] = relative_costs(q_min, q_max, ladder)
    return pd.concat(found, names=["ladder", "arm"])


def sections() -> Iterator[Section]:
    """The costs of the paper's schedules, and the pairs that two of them rank differently."""
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
    by_ladder = costs.drop(columns="ace").groupby(level=0)  # ACE is BitOps times a number
    pairs = {ladder: ranked_differently(part.droplevel(0)) for ladder, part in by_ladder}
    none = [ladder for ladder, found in pairs.items() if found.empty]
    shown = pd.concat(pairs, names=["ladder", None]).droplevel(1).reset_index()
    for gap in ("gap", "other_gap"):
        shown[gap] = shown[gap].map("{:+.1%}".format)
    said = [f"Arms within {TIE:.1%} cost the same."]
    said += [f"No pair on: {'; '.join(none)}."] if none else []
    shown = shown.rename(columns={"but_by": "but by", "gap": "dearer by that", "other_gap": "by the other"})
    yield Section("Costs beside BitOps: ranked differently", (" ".join(said),), table=shown, style="left folded")
