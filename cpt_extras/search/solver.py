"""Solver for schedules of a given cost.  Beyond the paper.

``solve_schedule`` warps the profile of a cyclic schedule until the training costs a budget. The ten schedules of the
paper have three cost levels; a budget lies between them. Any profile f can be read at x**power, which moves its rise
and with it the cost, continuously.

>>> schedule = solve_schedule(0.65, q_min=3, q_max=8, total_steps=64_000)
>>> round(schedule.relative_cost(), 3), schedule(0), schedule(63_999)
(0.65, 3, 8)
"""

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import bisect

from cpt_core.schedules.cost import Ladders, StepCost
from cpt_core.schedules.profiles import PROFILES, Array
from cpt_core.schedules.schedule import (
    CyclicSchedule,
    Schedule,
    ShortCycleWarning,
    StaticSchedule,
)
from cpt_core.validation import check_bits, check_choice, check_types
from cpt_extras.formats.prices import cost_function, static_cost, step_costs
from cpt_extras.search.solved_schedules import (
    AdjustedSchedule,
    DelayedSchedule,
    Warped,
    delay_steps,
)

BUDGET_TOLERANCE = 1e-3  # relative to the budget
EXPONENT_RANGE = (-12.0, 12.0)  # the power of the warped profile is 2**exponent


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
    """Return a schedule whose relative cost equals a budget, to 0.1 % of it.

    Its ``relative_cost(q_grad)`` is the budget, or with ``cost`` its relative cost by that.

    Args:
        budget: cost relative to training at static ``q_max``, gradients too. What static ``q_max`` costs (1, with
            ``q_grad`` less) gives it.
        q_min: lowest bits.
        q_max: highest bits.
        total_steps: length of training in optimizer steps.
        n_cycles: see ``CyclicSchedule``.
        family: the profile that is warped: "linear", "cosine", "exponential" or "rex". At the cost of one of the
            paper's schedules its own family gives that schedule again.
        triangular: see ``CyclicSchedule``.
        mirror: see ``CyclicSchedule``.
        delay: share of the steps that are held at ``q_max`` first. The rest is made cheaper by what that costs.
        q_grad: gradient bits; ``q_max`` when None. A cost function has its own gradient bits.
        cost: of a step, instead of BitOps: a name of ``COSTS``, or a function of bits, such as the seconds of a step.
        ladder: formats of the levels, for a cost by name; the paper's formats when None.

    Returns:
        A ``CyclicSchedule`` of a ``Warped`` profile; one with a few steps moved by a bit (``AdjustedSchedule``) where
        rounding is too coarse for the budget; a ``DelayedSchedule`` of either with ``delay``.

    Raises:
        ValueError: for a budget that is no number, or that these bits and this delay cannot meet, naming the budgets
            that they can meet; for values that make no schedule; for a cost that is not a positive number at some bits
            between q_min and q_max.
    """
    check_types(solve_schedule, {"triangular": triangular})
    families = [name for name, kind in PROFILES.items() if kind is not Warped]
    check_choice("family", family, families)
    hold = delay_steps(delay, total_steps)
    steps = total_steps - hold
    if q_grad is None:
        q_grad = check_bits("q_max", q_max)
    else:
        q_grad = check_bits("q_grad", q_grad)
    step_cost = cost_function(cost, q_grad, ladder)

    def warp(power: float) -> CyclicSchedule:
        return CyclicSchedule(
            Warped(family, power), q_min, q_max, steps, n_cycles, triangular, mirror
        )

    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        warp(1.0)  # checks the values
        _check_step_cost(step_cost, q_min, q_max)
        baseline_cost = static_cost(q_max, cost, ladder)

        def mean_cost(bits: ArrayLike) -> float:
            return float(step_costs(bits, q_grad, step_cost).mean() / baseline_cost)

        highest_cost = mean_cost([q_max])
        delay_cost = hold * highest_cost
        lowest_cost = (delay_cost + steps * mean_cost([q_min])) / total_steps
        delay_text = ""
        if hold:
            delay_text = f" with {hold} of {total_steps} steps held at {q_max} bits"
        check_budget(
            budget,
            lowest_cost,
            highest_cost,
            q_min,
            q_max,
            delay_text,
            BUDGET_TOLERANCE,
        )
        if abs(budget - highest_cost) <= BUDGET_TOLERANCE * highest_cost:
            return StaticSchedule(q_max, total_steps)

        # without a delay this is the budget to the last digit, which a schedule of the paper meets exactly
        cycles_budget = budget
        if hold:
            cycles_budget = (budget * total_steps - delay_cost) / steps
        exponent = _solve_exponent(
            lambda power: mean_cost(warp(power).bits()), cycles_budget
        )

    solved = warp(2.0**exponent)  # warns when it does not end at q_max
    costs = {
        q: float(step_costs(q, q_grad, step_cost)) for q in range(q_min, q_max + 1)
    }
    schedule = _adjust_steps(
        solved,
        (budget * total_steps - delay_cost) * baseline_cost,
        BUDGET_TOLERANCE * budget * total_steps * baseline_cost,
        costs,
    )
    delayed: Schedule = DelayedSchedule(schedule, hold) if hold else schedule
    cost_reached = mean_cost(delayed.bits())
    if abs(cost_reached - budget) > BUDGET_TOLERANCE * budget:
        raise ValueError(
            f"no schedule of {total_steps} steps was found to cost {budget!r} to {100 * BUDGET_TOLERANCE:g} %; "
            f"the nearest is {cost_reached:.4f}"
        )
    return delayed


def _check_step_cost(step_cost: Any, q_min: int, q_max: int) -> None:
    """Raise ValueError unless a step costs a positive number at all bits."""
    for q in range(q_min, q_max + 1):
        price: Any = 1.0 if step_cost is None else step_cost(q)
        if getattr(price, "ndim", None) == 0:  # numbers of numpy and torch
            price = price.item()
        is_number = isinstance(price, Real) and not isinstance(price, bool)
        if not is_number or not 0 < float(price) < math.inf:
            raise ValueError(
                f"a step must cost a positive number; cost gives {price!r} at {q} bits"
            )


def _solve_exponent(cost: Callable[[float], float], budget: float) -> float:
    """Return the exponent of the power 2**exponent at which a falling ``cost(power)`` meets a budget.

    The cost is a staircase: the search ends at the step that holds the budget, or at an end of the range.
    """

    def excess(exponent: float) -> float:
        return cost(2.0**exponent) - budget

    low, high = EXPONENT_RANGE
    if excess(low) <= 0:
        return low
    if excess(high) >= 0:
        return high
    return bisect(excess, low, high, xtol=1e-9)


class _BitChange(NamedTuple):
    """Change of the bits of one step.

    Attributes:
        cost: change of the cost.
        step: index of the step.
        bits: new bits of the step.
    """

    cost: float
    step: int
    bits: int


def _adjust_steps(
    schedule: CyclicSchedule,
    budget: float,
    tolerance: float,
    costs: Mapping[int, float],
) -> CyclicSchedule | AdjustedSchedule:
    """Change single steps by a bit until a schedule meets a budget, to a tolerance.

    Each round makes the one or two changes that bring the cost nearest to the budget; of all steps at some bits, the
    step whose value is nearest to rounding otherwise changes first.

    Args:
        schedule: to be adjusted.
        budget: cost of all steps, in units of ``costs``.
        tolerance: of the budget.
        costs: of a step, by bits.
    """
    values, bits = schedule.values(), schedule.bits().copy()
    missing = budget - sum(c * np.count_nonzero(bits == q) for q, c in costs.items())
    changes: dict[int, int] = {}
    while abs(missing) > tolerance:
        candidates = _bit_changes(values, bits, schedule.q_min, schedule.q_max, costs)
        choices: list[tuple[_BitChange, ...]] = [(c,) for c in candidates]
        for first, second in itertools.combinations(candidates, 2):
            if first.step != second.step:
                choices.append((first, second))

        remainders = [missing - sum(c.cost for c in choice) for choice in choices]
        if not choices:
            break
        nearest = min(range(len(choices)), key=lambda i: abs(remainders[i]))
        if abs(remainders[nearest]) >= abs(missing):
            break
        missing = remainders[nearest]
        for change in choices[nearest]:
            bits[change.step] = changes[change.step] = change.bits
    if not changes:
        return schedule
    return AdjustedSchedule(schedule, tuple(sorted(changes.items())))


def _bit_changes(
    values: Array,
    bits: NDArray[np.int64],
    q_min: int,
    q_max: int,
    costs: Mapping[int, float],
) -> list[_BitChange]:
    """List one change to more bits and one to fewer for the steps at every precision."""
    changes = []
    for q in range(q_min, q_max + 1):
        steps = np.flatnonzero(bits == q)
        for direction in (1, -1):
            new_bits = q + direction
            if len(steps) and q_min <= new_bits <= q_max:
                nearest = int(steps[np.argmax(direction * values[steps])])
                changes.append(
                    _BitChange(costs[new_bits] - costs[q], nearest, new_bits)
                )
    return changes


def check_budget(
    budget: float,
    lowest: float,
    highest: float,
    q_min: int,
    q_max: int,
    delay_text: str = "",
    slack: float = 1e-9,
) -> None:
    """Raise ValueError unless a budget is a number from ``lowest`` to ``highest``, with a relative ``slack``.

    Args:
        budget: cost relative to static ``q_max``.
        lowest: cost of training at ``q_min``.
        highest: cost of training at ``q_max``.
        q_min: lowest bits.
        q_max: highest bits.
        delay_text: delay of the schedule in words, for the message.
        slack: relative to the lowest and the highest cost.
    """
    if isinstance(budget, bool) or not isinstance(budget, Real) or math.isnan(budget):
        raise ValueError(
            f"budget must be a number, the cost relative to static q_max; got {budget!r}"
        )
    if lowest * (1 - slack) <= budget <= highest * (1 + slack):
        return
    if q_min == q_max:
        reason = f": q_min and q_max are both {q_max}, and static bits cost 1"
    elif lowest >= highest:
        reason = f": training at {q_min} bits costs {lowest / highest:.4f} of that at {q_max}"
    else:
        reason = f" between {q_min} and {q_max} bits{delay_text}; budgets lie between {lowest:.4f} and {highest:.5g}"
    raise ValueError(f"budget {budget!r} cannot be met{reason}")
