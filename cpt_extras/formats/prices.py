"""Prices by the formats of operands: of counted passes, and of training steps on a ladder.  Beyond the paper.

``cpt_core`` counts operations and prices them in BitOps. This module prices them by all of ``COSTS``: for the plan and
the ledger from their ``Tally``, for ``relative_cost`` from the levels of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpt_core.bitops.tally import Tally
from cpt_core.schedules.cost import Ladders, StepCost, step_cost, whole_bits
from cpt_core.validation import check_bits
from cpt_extras.formats.costs import COSTS, Operands, cost_named
from cpt_extras.formats.format import Format
from cpt_extras.formats.ladder import AFFINE, FormatLadder, ladder_of
from cpt_extras.optional_libraries import import_optional
from cpt_extras.validation import check_float

if TYPE_CHECKING:
    import pandas as pd

# --- counted passes ---------------------------------------------------------------------------------------------------


def layer_prices(tally: Tally) -> dict[str, dict[str, float]]:
    """Return layer -> name of a cost -> total, in its unit."""
    prices: dict[str, dict[str, float]] = {}
    for counted, macs in tally.macs.items():
        first, second = _format_of(counted.first), _format_of(counted.second)
        elements = _moved_elements(counted.name, *tally.elements[counted])
        totals = prices.setdefault(counted.layer, dict.fromkeys(COSTS, 0.0))
        for name, cost in COSTS.items():
            totals[name] += cost.product(first, second, macs, elements)
    return prices


def _moved_elements(name: str, x: int, w: int, y: int) -> tuple[int, int, int]:
    """Return the elements that a pass moves: of its operands, in the order of ``PASSES``, and of its result."""
    return {"forward": (x, w, y), "error": (y, w, x), "weight": (y, x, w)}[name]


def total_prices(tally: Tally) -> dict[str, float]:
    """Return name of a cost -> total over layers, in its unit."""
    prices = layer_prices(tally).values()
    totals = {name: float(sum(layer[name] for layer in prices)) for name in COSTS}
    return totals | {"bitops": tally.total()}


def price_table(tally: Tally) -> pd.DataFrame:
    """Return a row per layer and one of totals, a column per cost, with its unit."""
    rows = {**layer_prices(tally), "total": total_prices(tally)}
    pandas = import_optional("pandas", "lab")
    frame = pandas.DataFrame(
        list(rows.values()), index=pandas.Index(rows, name="layer"), columns=list(COSTS)
    )
    return frame.rename(
        columns={name: f"{name} ({cost.unit})" for name, cost in COSTS.items()}
    )


def _format_of(priced: Format | int) -> Format:
    """Return a format, given one or the bits of a uniform grid."""
    return AFFINE.priced(priced) if isinstance(priced, int) else priced


# --- training steps ---------------------------------------------------------------------------------------------------


def ladder_by_role(ladder: Any) -> tuple[FormatLadder, ...]:
    """Return the ladder of every role, given one for all, a tuple of four, or None for the paper's."""
    if not isinstance(ladder, tuple):
        return (ladder_of(ladder),) * 4
    if len(ladder) != 4:
        raise ValueError(
            f"ladder must be one, or a tuple of four, in the order of RoleLevels; got {ladder!r}"
        )
    return tuple(map(ladder_of, ladder))


def step_price(levels: Sequence[int], cost: str | None, ladder: Any) -> float:
    """Return the price of a step.

    Args:
        levels: of the four roles, in the order of ``RoleLevels``.
        cost: a name of ``COSTS``; None for "bitops".
        ladder: on which they are levels, or that of every role; None for the paper's.
    """
    formats = (
        rungs.priced(level)
        for rungs, level in zip(ladder_by_role(ladder), levels, strict=True)
    )
    return cost_named("bitops" if cost is None else cost).step(Operands(*formats))


def relative_cost(
    bits: ArrayLike,
    q_max: int,
    q_grad: int,
    cost: StepCost | str | None,
    ladder: Ladders | None,
) -> float:
    """Return the mean cost of the steps divided by that of static ``q_max``, see ``schedules.cost.relative_cost``."""
    spent = costs_of(bits, q_grad, function_of(cost, q_grad, ladder))
    return float(spent.mean() / static_cost(q_max, cost, ladder))


def static_cost(
    q_max: int, cost: StepCost | str | None = None, ladder: Ladders | None = None
) -> float:
    """Return what a step of the baseline costs: static ``q_max``, gradients too."""
    return float(costs_of(q_max, q_max, function_of(cost, q_max, ladder)))


def function_of(
    cost: StepCost | str | None, q_grad: int, ladder: Ladders | None = None
) -> StepCost | None:
    """Return the function that a cost is, or that a name of ``COSTS`` means on a ladder; None stays without one.

    Raises:
        ValueError: for another name, and for what is neither; for a ladder beside a function; for gradient bits that
            are no level of it.
    """
    if isinstance(cost, str) or (cost is None and ladder is not None):
        by_role = ladder_by_role(ladder)
        return cache(
            lambda level: step_price([level, level, q_grad, q_grad], cost, by_role)
        )
    if cost is not None and not callable(cost):
        raise ValueError(
            f"cost must be a function, bits -> cost of a step, such as its seconds, or a name of COSTS; got {cost!r}"
        )
    if ladder is not None:
        raise ValueError(
            "a cost that is a function knows its formats; give a ladder with the name of a cost"
        )
    return cost


def costs_of(
    bits: ArrayLike, q_grad: int, cost: StepCost | None = None
) -> NDArray[Any]:
    """Return what every step costs, in the shape of ``bits``: by ``cost``, or ``step_cost`` when that is None."""
    if cost is None:
        return step_cost(bits, q_grad)
    distinct, where = np.unique(whole_bits("bits", bits), return_inverse=True)
    prices = [
        check_float("cost must return what a step costs", cost(int(q)))
        for q in distinct
    ]
    return np.array(prices)[where].reshape(np.shape(bits))


def role_prices(
    levels: Sequence[ArrayLike],
    q_max: int,
    cost: StepCost | str | None = None,
    ladder: Ladders | None = None,
) -> tuple[NDArray[Any], float]:
    """Return the cost of every step, shape (steps,), and of one at static ``q_max``, where roles have levels apart.

    Where roles have ladders of their own, the baseline is static at the highest level of every role.

    Args:
        levels: of every step, for the four roles in the order of ``RoleLevels``.
        q_max: bits of the static baseline, and of its gradients.
        cost: a name of ``COSTS``; BitOps when None.
        ladder: as for ``relative_cost``.

    Raises:
        ValueError: for a cost that is a function, which knows one level of a step; for another name.
    """
    q_max = check_bits("q_max", q_max)
    if cost is None and ladder is None:
        activation, weight, error, weight_gradient = (
            whole_bits("levels", each) for each in levels
        )
        spent = activation * weight + error * weight + weight_gradient * activation
        return spent, int(step_cost(q_max, q_max))
    if callable(cost):
        raise ValueError(
            "roles with levels of their own are priced by the name of a cost; a function knows one level"
        )
    by_role = np.stack([whole_bits("levels", each) for each in levels])
    has_own_ladders = len(set(ladder_by_role(ladder))) > 1
    baseline = by_role.max(1).tolist() if has_own_ladders else [q_max] * 4
    combinations, where = np.unique(
        np.column_stack([by_role, baseline]), axis=1, return_inverse=True
    )
    prices = np.array([step_price(c, cost, ladder) for c in combinations.T.tolist()])[
        where.ravel()
    ]
    return prices[:-1], float(prices[-1])
