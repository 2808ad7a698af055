"""Cost of training in bit operations (BitOps): the price of a step and of a whole run.  Paper: section 4.1.

One multiply-accumulate (MAC) of a ``b_a``-bit with a ``b_b``-bit operand costs ``b_a * b_b / 32**2`` full-precision
MACs.  A training step of a layer does three products of (nearly) the same size: the forward product (q x q), the
error product and the weight-gradient product (both q x q_grad).  Nothing here needs torch.
Other costs, and formats other than the paper's, have their prices from ``cpt_core.formats``.

>>> int(step_cost(8, 8)) == 3 * 64
True
>>> round(relative_cost([3, 8], q_max=8), 3)
0.648
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpt_core import extensions
from cpt_core.checks import MOST_BITS, check_bits, number, shown

FULL_PRECISION = 32  # bits of an unquantised operand
Ladders = Any  # a FormatLadder, or a tuple of that of every role, in the order of ``Levels``
StepCost = Callable[[int], float]  # bits -> what a step at them costs in another unit, such as seconds


def step_cost(bits: ArrayLike, q_grad: ArrayLike) -> NDArray[np.int64]:
    """Return ``q**2 + 2 q q_grad`` per step, in squared bits per forward MAC (integers, exact).

    Args:
        bits: forward bits q of each step, any shape.
        q_grad: gradient bits, a scalar or one per step.

    Paper: section 4.1 gives the price of one product.
    Differs: the paper leaves the share of the backward pass open; one forward and two backward products, as the
        authors' cost scripts count them.
    """
    q, g = _integers("bits", bits), _integers("q_grad", q_grad)
    return q * q + 2 * q * g


def relative_cost(
    bits: ArrayLike,
    q_max: int,
    q_grad: int | None = None,
    cost: StepCost | str | None = None,
    ladder: Ladders | None = None,
) -> float:
    """Return the mean cost of the steps divided by that of training at static ``q_max``, gradients at ``q_max``, too.

    Args:
        bits: forward bits of every step, or levels of a ladder, shape (steps,).
        q_max: bits of the static baseline, and of its gradients.
        q_grad: gradient bits of the steps; ``q_max`` when None.
        cost: of a step by its bits; a name of ``COSTS`` prices the formats of a ladder; ``step_cost`` when None.
        ladder: on which bits are levels, or the ladder of every role, as ``QuantConfig.ladder``; the paper's when None.
            A function knows its own.

    Paper: section 4.1 (cost relative to the static baseline).

    >>> relative_cost([4, 8], q_max=8, cost={4: 1.0, 8: 2.0}.__getitem__)
    0.75
    >>> round(relative_cost([8], q_max=8, q_grad=6), 4)
    0.8333
    >>> relative_cost([4, 8], q_max=8), round(relative_cost([4, 8], q_max=8, cost="traffic"), 3)
    (0.7083333333333334, 0.944)
    """
    q_max = check_bits("q_max", q_max)
    q_grad = q_max if q_grad is None else check_bits("q_grad", q_grad)
    top = static_cost(q_max, cost, ladder)
    return float(costs_of(bits, q_grad, function_of(cost, q_grad, ladder)).mean() / top)


def static_cost(q_max: int, cost: StepCost | str | None = None, ladder: Ladders | None = None) -> float:
    """Return what a step of the baseline costs: static ``q_max``, gradients too; see ``relative_cost``."""
    return float(costs_of(q_max, q_max, function_of(cost, q_max, ladder)))


def role_prices(
    levels: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike],
    q_max: int,
    cost: StepCost | str | None = None,
    ladder: Ladders | None = None,
) -> tuple[NDArray[Any], float]:
    """Return what every step costs whose roles have ``Levels`` apart, shape (steps,), and what one of the baseline.

    By the name of a cost, ``step_cost`` when None. Where roles have ladders of their own, the baseline is static at the
    highest level of every role.

    Raises:
        ValueError: as ``function_of``; for a function, which knows one level of a step.
    """
    q_max = check_bits("q_max", q_max)
    found = np.stack([_integers("levels", v) for v in levels])
    if cost is None and ladder is None:
        a, w, e, g = found  # each product costs by its own operands
        return a * w + e * w + g * a, int(step_cost(q_max, q_max))
    if callable(cost):
        raise ValueError("roles with levels of their own are priced by the name of a cost; a function knows one level")
    prices_of_formats = extensions.load("prices")
    own = len(set(prices_of_formats.ladder_by_role(ladder))) > 1
    baseline = found.max(1).tolist() if own else [q_max] * 4
    combinations, where = np.unique(np.column_stack([found, baseline]), axis=1, return_inverse=True)
    prices = np.array([prices_of_formats.step_price(c, cost, ladder) for c in combinations.T.tolist()])[where.ravel()]
    return prices[:-1], float(prices[-1])


def function_of(cost: StepCost | str | None, q_grad: int, ladder: Ladders | None = None) -> StepCost | None:
    """Return the function that a cost is, or that a name of ``COSTS`` means on a ladder; None stays without one.

    Raises:
        ValueError: for another name, and for what is neither; for a ladder beside a function; for gradient bits that
            are no level of it.
    """
    if isinstance(cost, str) or (cost is None and ladder is not None):
        prices = extensions.load("prices")
        by_role = prices.ladder_by_role(ladder)
        return cache(lambda level: prices.step_price([level, level, q_grad, q_grad], cost, by_role))
    if cost is not None and not callable(cost):
        raise ValueError(
            f"cost must be a function, bits -> cost of a step, such as its seconds, or a name of COSTS; got {cost!r}"
        )
    if ladder is not None:
        raise ValueError("a cost that is a function knows its formats; give a ladder with the name of a cost")
    return cost


def costs_of(bits: ArrayLike, q_grad: int, cost: StepCost | None = None) -> NDArray[Any]:
    """Return what every step costs, in the shape of ``bits``: by ``cost``, or ``step_cost`` when that is None."""
    if cost is None:
        return step_cost(bits, q_grad)
    widths, where = np.unique(_integers("bits", bits), return_inverse=True)
    prices = [number("cost must return what a step costs", cost(int(q))) for q in widths]
    return np.array(prices)[where].reshape(np.shape(bits))


def noise_exposure(bits: ArrayLike, q_max: int) -> float:
    """Return the mean of ``4**-q`` over the steps, relative to training at static ``q_max``.

    The variance of rounding to a q-bit grid is proportional to ``4**-q``: this is the mean noise a run is exposed
    to, as a multiple of the baseline's. Whether it predicts the quality of a schedule better than its cost does is a
    claim that is tested, not known (``noise_decides`` in ``data/paper/claims.csv``).
    """
    q = np.asarray(bits, dtype=np.float64)
    return float(np.mean(4.0 ** (check_bits("q_max", q_max) - q)))


def _integers(what: str, values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.dtype.kind not in "iuf" or (array != np.rint(array)).any():
        raise ValueError(f"{what} must be whole numbers, got {shown(values)}")
    if array.size and not (array.min() >= 1 and array.max() <= MOST_BITS):
        raise ValueError(f"{what} must lie between 1 and {MOST_BITS}, got {shown(values)}")
    return array.astype(np.int64)
