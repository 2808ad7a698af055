"""A schedule for a budget: the profile is bent until the training costs what it may.  Beyond the paper.

The ten schedules of the paper have three cost levels; a budget lies between them. Any profile f can be read at
x**power, which moves its rise and with it the cost, continuously.

>>> schedule = solve_schedule(0.65, q_min=3, q_max=8, total_steps=64_000)
>>> round(schedule.relative_cost(), 3), schedule(0), schedule(63_999)
(0.65, 3, 8)
"""

import itertools
import math
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import bisect

from cpt_core.schedules.cost import Ladders, StepCost
from cpt_core.schedules.profiles import PROFILES
from cpt_core.schedules.schedule import (
    CyclicSchedule,
    Schedule,
    ShortCycleWarning,
    StaticSchedule,
)
from cpt_core.validation import check_bits, check_choice, check_types
from cpt_extras.formats.prices import costs_of, function_of, static_cost
from cpt_extras.search.solved_schedules import (
    AdjustedSchedule,
    DelayedSchedule,
    Warped,
    delay_steps,
)

TOLERANCE = 1e-3  # of the budget
POWERS = (-12.0, 12.0)  # powers of two between which the power of the profile is sought


def solve_schedule(
    budget: float,
    q_min: int,
    q_max: int,
    total_steps: int,
    n_cycles: int = 8,
    family: str = "rex",
    *,
    triangular: bool = False,
    mirror: str = "horizontal",
    delay: float = 0.0,
    q_grad: int | None = None,
    cost: StepCost | str | None = None,
    ladder: Ladders | None = None,
) -> Schedule:
    """Return a schedule whose ``relative_cost(q_grad)``, or that by another cost, is the budget, to 0.1 % of it.

    Args:
        budget: cost relative to training at static ``q_max``, gradients too. What static ``q_max`` costs (1, with
            ``q_grad`` less) gives it.
        q_min, q_max: lowest and highest bits.
        total_steps: length of training in optimizer steps.
        family: the profile that is bent: "linear", "cosine", "exponential" or "rex". At the cost of one of the paper's
            schedules its own family gives that schedule again.
        n_cycles, triangular, mirror: see ``CyclicSchedule``.
        delay: share of the steps that are held at ``q_max`` first. The rest is made cheaper by what that costs.
        q_grad: gradient bits; ``q_max`` when None. A cost of your own knows its gradient bits itself.
        cost: what is spent instead of BitOps: a name of ``COSTS``, or a function, bits -> cost of a step, such as
            its seconds.
        ladder: on which all bits are levels, for a cost by name; the paper's when None.

    Returns:
        A ``CyclicSchedule`` of a ``Warped`` profile; one with a few steps moved by a bit (``AdjustedSchedule``) where
        rounding is too coarse for the budget; a ``DelayedSchedule`` of either with ``delay``.

    Raises:
        ValueError: for a budget that is no number or that these bits and this delay cannot meet, naming those that
            they can; for values that make no schedule; for a cost that is no positive number at some bits between
            q_min and q_max.
    """
    check_types(solve_schedule, {"triangular": triangular})
    check_choice(
        "family",
        family,
        (name for name, kind in PROFILES.items() if kind is not Warped),
    )
    hold = delay_steps(delay, total_steps)
    steps = total_steps - hold
    q_grad = (
        check_bits("q_max", q_max) if q_grad is None else check_bits("q_grad", q_grad)
    )
    priced, cost = cost, function_of(cost, q_grad, ladder)

    def spends(bits: ArrayLike) -> float:
        return float(costs_of(bits, q_grad, cost).mean() / unit)

    def bent(power: float) -> CyclicSchedule:
        return CyclicSchedule(
            Warped(family, power), q_min, q_max, steps, n_cycles, triangular, mirror
        )

    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        bent(1.0)  # checks the values
        for q in range(q_min, q_max + 1):
            value: Any = 1.0 if cost is None else cost(q)
            value = (
                value.item() if getattr(value, "ndim", None) == 0 else value
            )  # numpy's and torch's numbers
            if (
                isinstance(value, bool)
                or not isinstance(value, Real)
                or not 0 < float(value) < math.inf
            ):
                raise ValueError(
                    f"a step must cost a positive number; cost gives {value!r} at {q} bits"
                )
        unit = static_cost(q_max, priced, ladder)
        dearest = spends([q_max])
        lowest = (hold * dearest + steps * spends([q_min])) / total_steps
        held = (
            f" with {hold} of {total_steps} steps held at {q_max} bits" if hold else ""
        )
        check_budget(budget, lowest, dearest, q_min, q_max, held, TOLERANCE)
        if abs(budget - dearest) <= TOLERANCE * dearest:
            return StaticSchedule(q_max, total_steps)
        # what the cycles may cost; without a delay the budget to the last digit, which a named schedule meets exactly
        share = (budget * total_steps - hold * dearest) / steps if hold else budget

        def excess(exponent: float) -> float:
            return spends(bent(2.0**exponent).bits()) - share

        low, high = POWERS
        if excess(low) <= 0:
            exponent = low
        elif excess(high) >= 0:
            exponent = high
        else:
            exponent = bisect(
                excess, low, high, xtol=1e-9
            )  # a staircase: ends at the step that holds the budget
    solved = bent(2.0**exponent)  # warns when it does not end at q_max
    costs = {q: float(costs_of(q, q_grad, cost)) for q in range(q_min, q_max + 1)}
    wanted = (budget * total_steps - hold * dearest) * unit
    schedule = _adjusted(solved, wanted, TOLERANCE * budget * total_steps * unit, costs)
    whole: Schedule = DelayedSchedule(schedule, hold) if hold else schedule
    spent = spends(whole.bits())
    if abs(spent - budget) > TOLERANCE * budget:
        raise ValueError(
            f"no schedule of {total_steps} steps was found to cost {budget!r} to {100 * TOLERANCE:g} %; "
            f"the nearest is {spent:.4f}"
        )
    return whole


def _adjusted(
    schedule: CyclicSchedule,
    wanted: float,
    tolerance: float,
    costs: Mapping[int, float],
) -> CyclicSchedule | AdjustedSchedule:
    """Move single steps by a bit, those nearest to it first, until they cost ``wanted``.

    Each round makes the one or two moves that bring the cost nearest to what is wanted. ``costs``: of a step, by bits.
    """
    values, bits = schedule.values(), schedule.bits().copy()
    missing = wanted - sum(c * np.count_nonzero(bits == q) for q, c in costs.items())
    changes: dict[int, int] = {}
    while abs(missing) > tolerance:
        moves: list[tuple[float, int, int]] = []  # (change of the cost, step, new bits)
        for q, way in itertools.product(
            range(schedule.q_min, schedule.q_max + 1), (1, -1)
        ):
            steps = np.flatnonzero(bits == q)
            if len(steps) and schedule.q_min <= q + way <= schedule.q_max:
                near = int(steps[np.argmax(way * values[steps])])
                moves.append((costs[q + way] - costs[q], near, q + way))
        pairs: list[Any] = [(m,) for m in moves]
        pairs += [(a, b) for a, b in itertools.combinations(moves, 2) if a[1] != b[1]]
        best = min(
            pairs,
            key=lambda chosen: abs(missing - sum(m[0] for m in chosen)),
            default=(),
        )
        left = missing - sum(m[0] for m in best)
        if abs(left) >= abs(missing):
            break
        missing = left
        for _, step, new in best:
            bits[step] = changes[step] = new
    return (
        AdjustedSchedule(schedule, tuple(sorted(changes.items())))
        if changes
        else schedule
    )


def check_budget(
    budget: float,
    lowest: float,
    highest: float,
    q_min: int,
    q_max: int,
    held: str = "",
    slack: float = 1e-9,
) -> None:
    """Raise ValueError unless a budget is a number from ``lowest`` to ``highest``, to a share ``slack`` of them.

    They are the costs of training at ``q_min`` and at ``q_max``; ``held`` says what else is asked of the schedule.
    """
    if isinstance(budget, bool) or not isinstance(budget, Real) or math.isnan(budget):
        raise ValueError(
            f"budget must be a number, the cost relative to static q_max; got {budget!r}"
        )
    if lowest * (1 - slack) <= budget <= highest * (1 + slack):
        return
    if q_min == q_max:
        why = f": q_min and q_max are both {q_max}, and static bits cost 1"
    elif lowest >= highest:
        why = f": training at {q_min} bits costs {lowest / highest:.4f} of that at {q_max}"
    else:
        why = f" between {q_min} and {q_max} bits{held}; budgets lie between {lowest:.4f} and {highest:.5g}"
    raise ValueError(f"budget {budget!r} cannot be met{why}")
