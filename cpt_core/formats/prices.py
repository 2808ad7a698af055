"""Prices of a training step by the formats of its operands: the cost of a schedule on a ladder.  Beyond the paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpt_core.formats.costs import Operands, cost_named
from cpt_core.formats.ladder import FormatLadder, ladder_of


def ladder_by_role(ladder: Any) -> tuple[FormatLadder, ...]:
    """Return the ladder of every role, given one for all, a tuple of four, or None for the paper's."""
    if not isinstance(ladder, tuple):
        return (ladder_of(ladder),) * 4
    if len(ladder) != 4:
        raise ValueError(f"ladder must be one, or a tuple of four, in the order of Levels; got {ladder!r}")
    return tuple(map(ladder_of, ladder))


def step_price(levels: Sequence[int], cost: str | None, ladder: Any) -> float:
    """Return the price of a step.

    Args:
        levels: of the four roles, in the order of ``Levels``.
        cost: a name of ``COSTS``; None for "bitops".
        ladder: on which they are levels, or that of every role; None for the paper's.
    """
    formats = (rungs.priced(level) for rungs, level in zip(ladder_by_role(ladder), levels, strict=True))
    return cost_named("bitops" if cost is None else cost).step(Operands(*formats))
