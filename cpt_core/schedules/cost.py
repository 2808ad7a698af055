"""Cost of training in bit operations (BitOps): the price of a step and of a whole run.  Paper: section 4.1.

One multiply-accumulate (MAC) of a ``b_a``-bit with a ``b_b``-bit operand costs ``b_a * b_b / 32**2`` full-precision
MACs.  A training step of a layer does three matmuls of (nearly) the same size: the forward pass (q x q), the input
gradient and the weight gradient (both q x q_grad).  Nothing here needs torch; the extension "prices" has other costs.

>>> int(step_cost(8, 8)) == 3 * 64
True
>>> round(relative_cost([3, 8], q_max=8), 3)
0.648
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpt_core import extensions
from cpt_core.validation import MAX_BITS, check_bits, short_repr

FULL_PRECISION = 32  # bits of an unquantised operand
Ladders = (
    Any  # a FormatLadder, or a tuple with one per role, in the order of ``RoleLevels``
)
# bits -> cost of a step at these bits in another unit, such as seconds
StepCost = Callable[[int], float]


def step_cost(bits: ArrayLike, q_grad: ArrayLike) -> NDArray[np.int64]:
    """Return ``q**2 + 2 q q_grad`` per step, in squared bits per forward MAC (integers, exact).

    Args:
        bits: forward bits q of each step, any shape.
        q_grad: gradient bits, a scalar or one per step.

    Paper: section 4.1 gives the price of one matmul.
    Differs: the paper leaves the share of the backward pass open; this counts one forward and two backward matmuls, as
        the authors' cost scripts do.
    """
    q, g = whole_bits("bits", bits), whole_bits("q_grad", q_grad)
    return q * q + 2 * q * g


def relative_cost(
    bits: ArrayLike,
    q_max: int,
    q_grad: int | None = None,
    cost: StepCost | str | None = None,
    ladder: Ladders | None = None,
) -> float:
    """Return the mean cost of the steps, divided by the cost of a static step at ``q_max`` bits.

    The static baseline has its gradients at ``q_max``, too.

    Args:
        bits: forward bits of every step, or levels of a ladder, shape (steps,).
        q_max: bits of the static baseline, and of its gradients.
        q_grad: gradient bits of the steps; ``q_max`` when None.
        cost: function from bits to the cost of a step, or a name of ``COSTS``, which prices the formats of a ladder;
            ``step_cost`` when None.
        ladder: the ladder of which ``bits`` are levels, or one per role, as ``QuantConfig.ladder``; the paper's grids
            when None. A cost function needs none.

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
    if cost is not None or ladder is not None:
        return float(
            extensions.load("prices").relative_cost(bits, q_max, q_grad, cost, ladder)
        )
    return float(step_cost(bits, q_grad).mean() / step_cost(q_max, q_max))


def noise_exposure(bits: ArrayLike, q_max: int) -> float:
    """Return the mean of ``4**-q`` over the steps, relative to training at static ``q_max``.

    The variance of rounding to a q-bit grid is proportional to ``4**-q``: this is the mean noise a run is exposed
    to, as a multiple of the baseline's. Whether it predicts the quality of a schedule better than its cost does is a
    claim that is tested, not known (``noise_decides`` in ``data/paper/claims.csv``).
    """
    q = np.asarray(bits, dtype=np.float64)
    return float(np.mean(4.0 ** (check_bits("q_max", q_max) - q)))


def whole_bits(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return ``values`` as integers; ValueError unless all are whole numbers from 1 to 32."""
    array = np.asarray(values)
    if array.dtype.kind not in "iuf" or (array != np.rint(array)).any():
        raise ValueError(f"{name} must be whole numbers, got {short_repr(values)}")
    if array.size and not (array.min() >= 1 and array.max() <= MAX_BITS):
        raise ValueError(
            f"{name} must lie between 1 and {MAX_BITS}, got {short_repr(values)}"
        )
    return array.astype(np.int64)
