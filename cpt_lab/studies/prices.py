"""Costs of static bits and of switches under three price models of a matmul by its operand bits.  No torch.

BitOps, the count of the paper, price a matmul of a and b bits at a * b; no hardware has confirmed that. A unit that
works at the wider operand costs max(a, b)**2; a tensor core has few rates.

>>> PRICES[TENSOR_CORES](np.array([4, 4, 6]), np.array([4, 6, 8])).tolist()
[0.5, 1.0, 1.0]
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cpt_extras.formats.ladder import LADDERS
from cpt_lab.studies.case import Case
from cpt_lab.studies.tuned import TunedStudy

BITOPS, WIDER_OPERAND = "a * b (the paper)", "wider operand: max(a, b)^2"
TENSOR_CORES = "tensor cores: 4 bits twice as fast as 6 or 8"
Bits = NDArray[np.int64]


def _bitops(a: Bits, b: Bits) -> NDArray[np.float64]:
    """Return the BitOps of matmuls by the bits of their operands."""
    return (a * b).astype(float)


def _wider_operand(a: Bits, b: Bits) -> NDArray[np.float64]:
    """Return the cost of matmuls on units that work at the wider operand."""
    return np.maximum(a, b).astype(float) ** 2


def _tensor_core_time(a: Bits, b: Bits) -> NDArray[np.float64]:
    """Return the time of matmuls on units that multiply 4 bits at twice the rate of 5 to 8 bits."""
    return np.where(np.maximum(a, b) <= 4, 0.5, 1.0)


# name of a price model -> price of a matmul at every step, from the bits of its operands
PRICES: Mapping[str, Callable[[Bits, Bits], NDArray[np.float64]]] = {
    BITOPS: _bitops,
    WIDER_OPERAND: _wider_operand,
    TENSOR_CORES: _tensor_core_time,
}


def prices(study: TunedStudy, case: str, only: Iterable[str] = ()) -> pd.DataFrame:
    """Return the cost of the arms of a task by each of ``PRICES``, relative to static 8 bits with 8-bit gradients.

    A training step has three matmuls of one size: forward, for the input gradient, and for the weight gradient.

    Args:
        study: with its arms.
        case: a task of the study.
        only: names of arms; empty for all arms.

    Returns:
        A line per arm: columns "arm" and the names of ``PRICES``.
    """
    wanted_arms, task = list(only), study.case(case)
    eight_bits = np.array([8])
    rows = []
    for arm, (schedule, q_grad) in study.arms(task).items():
        if wanted_arms and arm not in wanted_arms:
            continue
        activation, weight, input_grad, weight_grad = (
            _bits(task, levels) for levels in schedule.levels(q_grad)
        )
        row: dict[str, str | float] = {"arm": arm}
        for name, price in PRICES.items():
            forward = price(activation, weight)
            step = forward + price(input_grad, weight) + price(weight_grad, activation)
            full_step = 3 * price(eight_bits, eight_bits)
            row[name] = float(step.mean() / full_step[0])
        rows.append(row)
    return pd.DataFrame(rows)


def price_table(study: TunedStudy, case: str, only: Iterable[str] = ()) -> pd.DataFrame:
    """Return a printable form of ``prices``, with three digits."""
    arm_prices = prices(study, case, only)
    cells = {"arm": arm_prices["arm"]}
    for name in PRICES:
        cells[name] = arm_prices[name].map("{:.3f}".format)
    return pd.DataFrame(cells)


def _bits(case: Case, levels: Bits) -> Bits:
    """Return the bits of the formats at levels, as ladders of other formats count their levels from 1."""
    ladder = case.recipe.ladder
    if ladder == "affine":
        return np.asarray(levels)
    return np.array([LADDERS[ladder].bits(int(level)) for level in levels])
