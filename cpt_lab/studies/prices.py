"""Prices of static bits and of switches, in three ways to price a matmul by the bits of its operands.  No torch.

BitOps, the count of the paper, price a matmul of a and b bits at a * b. No hardware is asked whether it does. A unit
that works at the wider operand takes max(a, b)**2; a tensor core has few rates.

>>> PRICES[TENSOR_CORES](np.array([4, 4, 6]), np.array([4, 6, 8])).tolist()
[0.5, 1.0, 1.0]
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cpt_extras.formats.ladder import LADDERS
from cpt_lab.studies.case import Case
from cpt_lab.studies.tuned import Tuned

BITOPS, WIDER_OPERAND = "a * b (the paper)", "wider operand: max(a, b)^2"
TENSOR_CORES = "tensor cores: 4 bits twice as fast as 6 or 8"
Bits = NDArray[np.int64]


def _tensor_core_time(a: Bits, b: Bits) -> NDArray[np.float64]:
    """Return the time of matmuls on units that multiply 4 bits at twice the rate of 5 to 8 bits, which run alike."""
    return np.where(np.maximum(a, b) <= 4, 0.5, 1.0)


# name of a price -> the price of a matmul by the bits of its operands, one a step
PRICES: Mapping[str, Callable[[Bits, Bits], NDArray[np.float64]]] = {
    BITOPS: lambda a, b: (a * b).astype(float),
    WIDER_OPERAND: lambda a, b: np.maximum(a, b).astype(float) ** 2,
    TENSOR_CORES: _tensor_core_time,
}


def prices(study: Tuned, case: str, only: Iterable[str] = ()) -> pd.DataFrame:
    """Return what the arms of a task cost by each of ``PRICES``, as shares of static 8 bits with gradients of 8 bits.

    A training step has three matmuls of one size: forward, for the input gradient, and for the weight gradient.

    Args:
        study: with its arms.
        case: a task of the study.
        only: arms, None of them for all.

    Returns:
        A line per arm: columns "arm" and the names of ``PRICES``.
    """
    chosen, found = list(only), study.case(case)
    lines = []
    for arm, (schedule, q_grad) in study.arms(found).items():
        if chosen and arm not in chosen:
            continue
        levels = schedule.levels(q_grad)
        activation, weight, error, weight_gradient = (
            _bits(found, role) for role in levels
        )
        line: dict[str, str | float] = {"arm": arm}
        for name, price in PRICES.items():
            step = (
                price(activation, weight)
                + price(error, weight)
                + price(weight_gradient, activation)
            )
            top = 3 * price(np.array([8]), np.array([8]))
            line[name] = float(step.mean() / top[0])
        lines.append(line)
    return pd.DataFrame(lines)


def price_table(study: Tuned, case: str, only: Iterable[str] = ()) -> pd.DataFrame:
    """Return ``prices`` for people, with three digits."""
    found = prices(study, case, only)
    return pd.DataFrame(
        {
            "arm": found["arm"],
            **{name: [f"{x:.3f}" for x in found[name]] for name in PRICES},
        }
    )


def _bits(case: Case, levels: Bits) -> Bits:
    """Return the bits of the formats of levels: a ladder of other formats counts from 1."""
    ladder = case.recipe.ladder
    if ladder == "affine":
        return np.asarray(levels)
    return np.array([LADDERS[ladder].bits(int(level)) for level in levels])
