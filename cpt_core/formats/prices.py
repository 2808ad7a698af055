"""Prices by the formats of operands: of counted operations, and of a training step on a ladder.  Beyond the paper.

Importing it registers all of ``COSTS`` in ``bitops.tally.PRICES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpt_core.bitops.tally import PRICES, Price
from cpt_core.formats.costs import COSTS, Cost, Operands, cost_named
from cpt_core.formats.format import Format
from cpt_core.formats.ladder import AFFINE, FormatLadder, ladder_of


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


def _format_of(priced: Format | int) -> Format:
    """Return a format, given one or the bits of a uniform grid."""
    return AFFINE.priced(priced) if isinstance(priced, int) else priced


def _price(cost: Cost) -> Price:
    def of_operation(a: Any, b: Any, macs: float, elements: tuple[float, float, float]) -> float:
        return cost.product(_format_of(a), _format_of(b), macs, elements)

    return Price(cost.unit, of_operation)


PRICES.update({name: _price(cost) for name, cost in COSTS.items()})
