"""Prices of counted passes, and of training steps on a ladder, by the formats of operands.  Beyond the paper.

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
from cpt_extras.formats.ladder import AFFINE, FormatLadder, MatmulLadders, as_ladder
from cpt_extras.optional_libraries import import_optional
from cpt_extras.validation import check_float

if TYPE_CHECKING:
    import pandas as pd

# --- counted passes ---------------------------------------------------------------------------------------------------


def layer_prices(tally: Tally) -> dict[str, dict[str, float]]:
    """Return the totals of every cost, in its unit, by layer and name of the cost."""
    prices: dict[str, dict[str, float]] = {}
    for counted, macs in tally.macs.items():
        first, second = _as_format(counted.first), _as_format(counted.second)
        elements = _moved_elements(counted.name, *tally.elements[counted])
        totals = prices.setdefault(counted.layer, dict.fromkeys(COSTS, 0.0))
        for name, cost in COSTS.items():
            totals[name] += cost.product(first, second, macs, elements)
    return prices


def _moved_elements(name: str, x: int, w: int, y: int) -> tuple[int, int, int]:
    """Return the numbers of elements of a pass: of its operands, in the order of ``PASS_OPERANDS``, and its result.

    Args:
        name: of the pass.
        x: elements of the input.
        w: elements of the weight.
        y: elements of the output.
    """
    return {"forward": (x, w, y), "error": (y, w, x), "weight": (y, x, w)}[name]


def total_prices(tally: Tally) -> dict[str, float]:
    """Return the total over layers of every cost, in its unit, by name."""
    by_layer = layer_prices(tally).values()
    totals = {}
    for name in COSTS:
        totals[name] = float(sum(prices[name] for prices in by_layer))
    return totals | {"bitops": tally.total()}


def price_table(tally: Tally) -> pd.DataFrame:
    """Return a table of prices: a row per layer and one of totals, a column per cost."""
    rows = {**layer_prices(tally), "total": total_prices(tally)}
    pandas = import_optional("pandas", "lab")
    frame = pandas.DataFrame(
        list(rows.values()), index=pandas.Index(rows, name="layer"), columns=list(COSTS)
    )
    titles = {name: f"{name} ({cost.unit})" for name, cost in COSTS.items()}
    return frame.rename(columns=titles)


def _as_format(priced: Format | int) -> Format:
    """Return a format; bits become the paper's grid of so many bits."""
    return AFFINE.priced(priced) if isinstance(priced, int) else priced


# --- training steps ---------------------------------------------------------------------------------------------------


def ladder_by_role(ladder: Any) -> tuple[FormatLadder, ...]:
    """Return the ladder of every role: from one for all, a tuple of four, or None for the paper's."""
    if not isinstance(ladder, tuple):
        return (as_ladder(ladder),) * 4
    if len(ladder) != 4:
        raise ValueError(
            f"ladder must be one, or a tuple of four, in the order of RoleLevels; got {ladder!r}"
        )
    ladders = tuple(map(as_ladder, ladder))
    return MatmulLadders(*ladders) if isinstance(ladder, MatmulLadders) else ladders


def step_price(levels: Sequence[int], cost: str | None, ladder: Any) -> float:
    """Return the price of a step.

    Args:
        levels: of the four roles, in the order of ``RoleLevels``.
        cost: a name of ``COSTS``; None for "bitops".
        ladder: with these levels, one for all roles or a tuple of four; None for the paper's.
    """
    formats = []
    for role_ladder, level in zip(ladder_by_role(ladder), levels, strict=True):
        formats.append(role_ladder.priced(level))
    cost_model = cost_named("bitops" if cost is None else cost)
    return cost_model.step(Operands(*formats), isinstance(ladder, MatmulLadders))


def relative_cost(
    bits: ArrayLike,
    q_max: int,
    q_grad: int,
    cost: StepCost | str | None,
    ladder: Ladders | None,
) -> float:
    """Return the mean cost of a step, relative to static ``q_max``; see ``schedules.cost.relative_cost``."""
    costs = step_costs(bits, q_grad, cost_function(cost, q_grad, ladder))
    return float(costs.mean() / static_cost(q_max, cost, ladder))


def static_cost(
    q_max: int, cost: StepCost | str | None = None, ladder: Ladders | None = None
) -> float:
    """Return the cost of a step of the baseline: static ``q_max``, gradients too."""
    return float(step_costs(q_max, q_max, cost_function(cost, q_max, ladder)))


def cost_function(
    cost: StepCost | str | None, q_grad: int, ladder: Ladders | None = None
) -> StepCost | None:
    """Return the cost of a step as a function of bits; None for BitOps without a ladder.

    Args:
        cost: a function, which is returned, or a name of ``COSTS``.
        q_grad: gradient bits.
        ladder: with these bits as levels.

    Raises:
        ValueError: for another name or type; for a ladder with a function; for gradient bits that are no level.
    """
    if isinstance(cost, str) or (cost is None and ladder is not None):
        by_role = ladder_by_role(ladder)

        @cache
        def price(level: int) -> float:
            return step_price([level, level, q_grad, q_grad], cost, by_role)

        return price
    if cost is not None and not callable(cost):
        raise ValueError(
            f"cost must be a function, bits -> cost of a step, such as its seconds, or a name of COSTS; got {cost!r}"
        )
    if ladder is not None:
        raise ValueError(
            "a cost that is a function knows its formats; give a ladder with the name of a cost"
        )
    return cost


def step_costs(
    bits: ArrayLike, q_grad: int, cost: StepCost | None = None
) -> NDArray[Any]:
    """Return the cost of every step, in the shape of ``bits``: by ``cost``, or in BitOps when that is None."""
    if cost is None:
        return step_cost(bits, q_grad)

    distinct, indices = np.unique(whole_bits("bits", bits), return_inverse=True)
    prices = []
    for q in distinct:
        prices.append(check_float("cost must return what a step costs", cost(int(q))))
    return np.array(prices)[indices].reshape(np.shape(bits))


def role_prices(
    levels: Sequence[ArrayLike],
    q_max: int,
    cost: StepCost | str | None = None,
    ladder: Ladders | None = None,
) -> tuple[NDArray[Any], float]:
    """Return the cost of every step, (steps,), and of a step at static ``q_max``, for levels by role.

    Where roles have different ladders, the baseline is static at the highest level of every role.

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
            whole_bits("levels", role_levels) for role_levels in levels
        )
        costs = activation * weight + error * weight + weight_gradient * activation
        return costs, int(step_cost(q_max, q_max))
    if callable(cost):
        raise ValueError(
            "roles with levels of their own are priced by the name of a cost; a function knows one level"
        )

    by_role = np.stack([whole_bits("levels", role_levels) for role_levels in levels])
    # the ladders of a recipe have the same levels
    has_several_ladders = (
        not isinstance(ladder, MatmulLadders) and len(set(ladder_by_role(ladder))) > 1
    )
    baseline = by_role.max(1).tolist() if has_several_ladders else [q_max] * 4
    all_steps = np.column_stack([by_role, baseline])
    combinations, indices = np.unique(all_steps, axis=1, return_inverse=True)
    prices = [step_price(c, cost, ladder) for c in combinations.T.tolist()]
    costs = np.array(prices)[indices.ravel()]
    return costs[:-1], float(costs[-1])
