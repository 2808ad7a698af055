"""Allocation of bits: the schedule of a budget that loses least quality by a measured sensitivity.  Beyond the paper.

``allocate`` gives bits to places: windows of time, groups of layers, roles of tensors, or several of these at once.
``static_of_cost`` is its baseline of equal cost.

If the quality lost is sum w(t, l) * 4**-q(t, l) over steps and layers, and a step of a layer costs its MACs times
q**2 + 2 q q_grad, then at the optimum no bit can be moved to where it saves more: w * 4**-q / (MACs * (q + q_grad)) is
level, so q is about log4(w / MACs) plus a constant, rounded and bounded. ``allocate`` solves the problem in whole bits.

With equal w / MACs everywhere no schedule beats static precision. In two lines, for the work of one MAC: 4**-q is
convex and falls with q, and q grows with the cost c as a concave function (the cost is convex in q), so noise is a
convex function n(c) of what a step costs; by Jensen's inequality the mean of n(c_t) is at least n(mean of c_t), the
noise of static precision at the same cost. (In whole bits: of the two neighbouring precisions, interleaved, where the
budget lies between them.)

>>> bits = static_of_cost(0.5, q_max=8, total_steps=10).bits()
>>> sorted(set(bits.tolist()))
[4, 5]
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpt_core.schedules.cost import StepCost
from cpt_core.schedules.profiles import Array
from cpt_core.schedules.schedule import (
    MAX_TOTAL_STEPS,
    Schedule,
    StaticSchedule,
    check_range,
)
from cpt_core.validation import MAX_BITS, check_choice, check_int
from cpt_extras.formats.ladder import FormatLadder
from cpt_extras.formats.prices import (
    cost_function,
    role_prices,
    static_cost,
    step_costs,
)
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.layered import LayeredSchedule
from cpt_extras.search.role_schedules import RoleSchedules
from cpt_extras.search.sensitivity_result import FLOOR, OVER, ROLES, Sensitivity
from cpt_extras.search.solver import check_budget

BUDGET_TOLERANCE = 1e-3  # relative to the budget; costs may lie below it, not above
ARITHMETIC_ERROR = (
    1e-12  # smaller remainders of the budget, and gains, are rounding errors
)
MAX_COMBINED_MOVES = 4  # moves of two pairs: all may take a step of one place and bit
MAX_PLACES = 1_000
EQUAL_GAINS = 1e-9  # relative difference up to which two gains count as equal
MAX_PAIRS = 1_000  # of moves, of which two are combined

# (places, precisions): number of steps of a place at each precision
StepCounts = NDArray[np.int64]


def allocate(
    sensitivity: Sensitivity,
    budget: float,
    q_min: int,
    q_max: int,
    over: str = "both",
    *,
    total_steps: int | None = None,
    q_grad: int | None = None,
    floor: float = FLOOR,
    cost: StepCost | str | None = None,
    ladder: FormatLadder | None = None,
) -> Schedule:
    """Return the schedule of a BitOps budget that loses least by a measured sensitivity.

    Args:
        sensitivity: quality lost by one bit less, by place, from ``cpt.search.sensitivity``.
        budget: BitOps of the quantised layers relative to training them at static ``q_max``, gradients too. What
            runs in float32 beside them does the same work whatever the bits are, and is not in it.
        q_min: lowest bits.
        q_max: highest bits.
        over: "time" gives all layers the same bits, "layers" each group its own throughout (of two neighbouring
            precisions where the budget asks for it), "both" each group its own in every window. "roles" gives weights,
            activations and gradients bits of their own throughout, "all" does so in every group and window.
        total_steps: length of the training; None takes the length in the sensitivity, others stretch its windows.
        q_grad: gradient bits; ``q_max`` when None. Give the same to ``PrecisionScheduler``, which else takes the
            highest bits of each schedule. Over roles gradients have bits of their own, and it must be None.
        floor: smallest response of a place, see ``Sensitivity.weights``.
        cost: of a step, instead of BitOps, see ``relative_cost``: a name of ``COSTS``, or a function of bits.
        ladder: formats of the levels, for bits that are levels of a ladder; the sensitivity was measured there, and a
            level is taken to quarter the noise, as a bit does.

    Returns:
        A ``TableSchedule`` over time, ``RoleSchedules`` over roles, else a ``LayeredSchedule`` of one or the other;
        ``PrecisionScheduler`` takes them all. It costs at most the budget and at least 99.9 % of it. No exchange of one
        bit between two places, a step of a group each, that keeps to this would lose less (with a handful of steps in
        a place, many bits moved at once still may).
        Evaluate it at stated bits, such as ``precision(model, bits=q_max)``: its own highest bits, "q_max" for
        schedulers and callbacks, may be fewer than ``q_max``.

    Raises:
        ValueError: for a budget that these bits and steps cannot meet, also where the exchange of steps finds no way to
            meet it with a few steps; for bits out of 1 to 32; for a sensitivity without any response, or that was not
            measured by roles.
    """
    check_choice("over", over, (*OVER, "roles", "all"))
    if not isinstance(sensitivity, Sensitivity):
        raise ValueError(
            f"give what cpt.search.sensitivity returned, or Sensitivity.from_dict(...), got {sensitivity!r}"
        )
    steps = _window_steps(sensitivity, over, total_steps)
    prices = _prices(q_min, q_max, q_grad, cost, ladder)
    levels = np.arange(q_min, q_max + 1)
    noise: Array = np.power(4.0, -levels)
    if over in ("roles", "all"):
        if q_grad is not None:
            raise ValueError(
                f"over {over!r} gradients have bits of their own; leave q_grad out, got {q_grad!r}"
            )
        role_weights = sensitivity.weights("roles", floor)
        levels, noise, prices = _efficient_role_bits(
            role_weights, levels, q_max, cost, ladder
        )
    check_budget(budget, prices[0], prices[-1], q_min, q_max)

    time, layers, macs = np.ones(1), np.ones(1), np.ones(1)
    if over not in ("layers", "roles"):
        time = sensitivity.weights("time", floor)
    if over not in ("time", "roles"):
        layers = sensitivity.weights("layers", floor)
        macs = np.array(sensitivity.macs, dtype=float)
    weights = time[:, None] / time.mean() * layers[None]
    place_macs = np.broadcast_to(macs[None], weights.shape).ravel()
    place_steps = np.broadcast_to(steps[:, None], weights.shape).ravel()
    counts = spread_bits(
        weights.ravel(), place_macs, place_steps, float(budget), prices, noise
    )

    counts_by_group = counts.reshape(*weights.shape, -1).transpose(1, 0, 2)
    schedules = [_schedule(levels[_step_order(c)]) for c in counts_by_group]
    if over in ("time", "roles"):
        return schedules[0]
    return LayeredSchedule(
        tuple(zip(sensitivity.groups, schedules, sensitivity.macs, strict=True))
    )


def _window_steps(
    sensitivity: Sensitivity, over: str, total_steps: int | None
) -> NDArray[np.int64]:
    """Return the number of steps of every window; one window where bits do not change in time."""
    total = check_int(
        "total_steps",
        sensitivity.steps if total_steps is None else total_steps,
        1,
        MAX_TOTAL_STEPS,
    )
    if over in ("layers", "roles"):
        return np.array([total])

    edges = [round(stop * total / sensitivity.steps) for _, stop in sensitivity.windows]
    steps = np.diff([0, *edges])
    if steps.min() < 1:
        raise ValueError(f"{total} steps are too few for {len(steps)} windows")
    return steps


def static_of_cost(
    budget: float,
    q_max: int,
    total_steps: int,
    q_min: int = 2,
    q_grad: int | None = None,
    cost: StepCost | str | None = None,
    ladder: FormatLadder | None = None,
) -> StaticSchedule | TableSchedule:
    """Return static precision at a relative cost: one precision, or two neighbours interleaved step by step.

    It costs the budget or up to a step more. Arguments and errors are those of ``allocate``.
    """
    prices = _prices(q_min, q_max, q_grad, cost, ladder)
    total_steps = check_int("total_steps", total_steps, 1)
    check_budget(budget, float(prices[0]), float(prices[-1]), q_min, q_max)
    low = int(np.flatnonzero(prices <= budget * (1 + 1e-9))[-1])
    if low == len(prices) - 1 or math.isclose(prices[low], budget):
        return StaticSchedule(q_min + low, total_steps)

    share_above = (budget - prices[low]) / (prices[low + 1] - prices[low])
    steps_above = math.ceil(share_above * total_steps)
    counts = np.zeros((1, len(prices)), dtype=np.int64)
    counts[0, low + 1] = steps_above
    counts[0, low] = total_steps - steps_above
    return _table(np.arange(q_min, q_max + 1)[_step_order(counts)])


def _step_order(counts: StepCounts) -> list[int]:
    """Return the precision of every step, by index.

    Places follow one after the other; the precisions of a place are spread evenly within it.
    """
    order: list[int] = []
    for place_counts in counts:
        indices = np.repeat(np.arange(len(place_counts)), place_counts)
        times = [(np.arange(n) + 0.5) / n for n in place_counts if n]
        by_time = np.argsort(np.concatenate(times), kind="stable")
        order += indices[by_time].tolist()
    return order


def _table(bits: NDArray[np.int64]) -> TableSchedule:
    runs = [(q, len(list(run))) for q, run in itertools.groupby(bits.tolist())]
    return TableSchedule(tuple(runs))


def _schedule(bits: NDArray[np.int64]) -> Schedule:
    """Make a schedule of the bits of every step, (steps,) or (steps, 3) by role."""
    if bits.ndim == 1:
        return _table(bits)
    by_role = {role: _table(b) for role, b in zip(ROLES, bits.T, strict=True)}
    return RoleSchedules(**by_role)


class _RoleBits(NamedTuple):
    """Bits by role among which a step chooses.

    Attributes:
        levels: of weights, activations and gradients, (n, 3).
        noise: weighted sum of 4**-level over roles, (n,).
        prices: of a step, relative to the baseline's, (n,).
    """

    levels: NDArray[np.int64]
    noise: Array
    prices: Array


def _efficient_role_bits(
    weights: Array,
    levels: NDArray[np.int64],
    q_max: int,
    cost: StepCost | str | None,
    ladder: FormatLadder | None,
) -> _RoleBits:
    """Return the bits by role that lose least at their price.

    Prices rise, noise falls, and each further one saves less for what it costs: the corners of a convex hull.
    ``weights`` are the responses of roles, (3,), of which the mean counts as 1.
    """
    candidates = np.array(list(itertools.product(levels.tolist(), repeat=3)))
    weight, activation, gradient = candidates.T
    prices, baseline_price = role_prices(
        (activation, weight, gradient, gradient), q_max, cost, ladder
    )
    noise = 4.0**-candidates @ (weights / weights.mean())

    hull: list[int] = []
    for i in np.lexsort((noise, prices)).tolist():
        while len(hull) > 1:
            a, b = hull[-2:]
            saved_before = (noise[a] - noise[b]) * (prices[i] - prices[b])
            saved_after = (noise[b] - noise[i]) * (prices[b] - prices[a])
            if saved_before > saved_after:
                break
            hull.pop()
        hull.append(i)
    return _RoleBits(candidates[hull], noise[hull], prices[hull] / baseline_price)


def spread_bits(
    weights: Array,
    macs: Array,
    steps: NDArray[np.int64],
    budget: float,
    prices: Array,
    noise: Array,
) -> StepCounts:
    """Return the number of steps of every place at each precision, (places, precisions).

    It minimises sum w * noise at cost MACs * price per step: precisions are raised one at a time where that saves most
    noise for its cost, which is optimal where each further one saves less and costs more, as BitOps do; places with
    equal gains share the rest of the budget. Single steps are then exchanged, to meet the budget and as long as that
    helps.

    Args:
        weights: response of every place, positive, (places,).
        macs: of a step of every place, (places,).
        steps: of every place, (places,).
        budget: cost of all steps, relative to the baseline.
        prices: of a step at every precision, relative to the baseline, (precisions,).
        noise: of a step at every precision, (precisions,).

    Raises:
        ValueError: for a budget that so few steps cannot meet.
    """
    if len(weights) > MAX_PLACES:
        raise ValueError(
            f"bits are given to at most {MAX_PLACES} places, windows times groups; got {len(weights)}"
        )
    # of one step, (places, precisions)
    cost = (macs / (macs * steps).sum())[:, None] * prices[None]
    loss = weights[:, None] * noise[None]
    counts = _spend_greedily(cost, loss, steps, budget)
    return _exchange_steps(counts, cost, loss, budget)


def _prices(
    q_min: Any,
    q_max: Any,
    q_grad: Any,
    cost: StepCost | str | None,
    ladder: FormatLadder | None,
) -> Array:
    """Return the price of a step at every precision, relative to the baseline.

    Raises:
        ValueError: unless bits are whole numbers from 1 to 32, in order, and where more bits do not cost more.
    """
    q_min, q_max = check_int("q_min", q_min), check_int("q_max", q_max)
    check_range(q_min, q_max, 1)
    gradient_bits = q_max
    if q_grad is not None:
        gradient_bits = check_int("q_grad", q_grad, 1, MAX_BITS)

    step_cost = cost_function(cost, gradient_bits, ladder)
    prices = step_costs(np.arange(q_min, q_max + 1), gradient_bits, step_cost)
    is_rising = (np.diff(prices) > 0).all()
    if not (np.isfinite(prices).all() and prices[0] > 0 and is_rising):
        price_list = ", ".join(
            f"{q}: {price:g}" for q, price in enumerate(prices.tolist(), q_min)
        )
        raise ValueError(
            f"more bits must cost more for a budget to be spread over them; a step costs {price_list}"
        )
    return prices / static_cost(q_max, cost, ladder)


def _spend_greedily(
    cost: Array, loss: Array, steps: NDArray[np.int64], budget: float
) -> StepCounts:
    """Raise the places that save most for their cost, all steps of a place at a time, until the budget is spent.

    Args:
        cost: of a step, (places, precisions).
        loss: of a step, (places, precisions).
        steps: of every place, (places,).
        budget: cost of all steps.
    """
    level = np.zeros(len(steps), dtype=int)
    counts = np.zeros(cost.shape, dtype=np.int64)
    counts[:, 0] = steps
    remaining = budget - float((cost[:, 0] * steps).sum())
    price, gain = np.diff(cost, axis=1), -np.diff(loss, axis=1)

    while True:
        raisable = np.flatnonzero(level < price.shape[1])
        if not raisable.size:
            return counts

        rates = gain[raisable, level[raisable]] / price[raisable, level[raisable]]
        best = raisable[rates >= rates.max() * (1 - EQUAL_GAINS)]
        prices = price[best, level[best]]
        raised, remaining = _raise_steps(steps[best], prices, remaining)
        counts[best, level[best]] -= raised
        counts[best, level[best] + 1] += raised
        if (raised < steps[best]).any():
            return counts
        level[best] += 1


def _raise_steps(
    steps: NDArray[np.int64], prices: Array, remaining: float
) -> tuple[NDArray[np.int64], float]:
    """Return the number of steps of every place that a budget can raise, and the rest of the budget."""
    total_price = float((prices * steps).sum())
    share = 1.0
    if total_price > remaining + ARITHMETIC_ERROR:
        share = max(remaining, 0.0) / total_price
    raised = (steps * share).astype(int)
    remaining -= float((prices * raised).sum())

    # the rest raises one further step of a place, as long as it suffices
    for i in np.argsort(raised - steps * 1.0, kind="stable"):
        if raised[i] < steps[i] and prices[i] <= remaining + ARITHMETIC_ERROR:
            raised[i] += 1
            remaining -= float(prices[i])
    return raised, remaining


class _Moves(NamedTuple):
    """Moves of a step of a place to a neighbouring precision; the first one moves nothing.

    Attributes:
        place: whose step moves, by index.
        level: precision from which it moves, by index.
        direction: +1 to more bits, -1 to fewer; 0 for the first move.
        available: number of steps that could move so.
        price: change of the cost.
        loss: change of the quality lost.
    """

    place: NDArray[np.int64]
    level: NDArray[np.int64]
    direction: NDArray[np.int64]
    available: NDArray[np.int64]
    price: Array
    loss: Array


def _exchange_steps(
    counts: StepCounts, cost: Array, loss: Array, budget: float
) -> StepCounts:
    """Move steps to neighbouring bits until the budget is met and no move lowers the loss."""
    slack = BUDGET_TOLERANCE * budget
    while True:
        missing = budget - float((counts * cost).sum())
        moves = _possible_moves(counts, cost, loss)
        first, second = _combinable_pairs(moves)
        remainder = missing - moves.price[first] - moves.price[second]
        loss_change = moves.loss[first] + moves.loss[second]
        meets_budget = (remainder >= -ARITHMETIC_ERROR) & (remainder <= slack)

        if meets_budget.any():
            best = int(np.argmin(np.where(meets_budget, loss_change, np.inf)))
            gains_nothing = loss_change[best] >= -ARITHMETIC_ERROR * float(
                (counts * loss).sum()
            )
            if -ARITHMETIC_ERROR <= missing <= slack and gains_nothing:
                return counts
            move_indices = [first[best], second[best]]
        else:
            enough_first = moves.available[first] >= MAX_COMBINED_MOVES
            enough_second = moves.available[second] >= MAX_COMBINED_MOVES
            usable = enough_first & enough_second
            pairs = _best_two_pairs(remainder, missing, loss_change, usable, slack)
            if pairs is None:
                pairs = _nearest_pair(remainder, missing, slack)
            if pairs is None:
                raise ValueError(
                    f"{int(counts.sum())} steps are too few to cost {budget!r} to {100 * BUDGET_TOLERANCE:g} %; "
                    f"the nearest that was found is {budget - missing:.4f}"
                )
            move_indices = [*first[pairs], *second[pairs]]

        for i in move_indices:
            if moves.direction[i]:
                place, level = moves.place[i], moves.level[i]
                counts[place, level] -= 1
                counts[place, level + moves.direction[i]] += 1


def _possible_moves(counts: StepCounts, cost: Array, loss: Array) -> _Moves:
    precisions = counts.shape[1]
    moves = [
        (int(place), int(level), direction)
        for place, level in zip(*np.nonzero(counts), strict=True)
        for direction in (1, -1)
        if 0 <= level + direction < precisions
    ]
    place, level, direction = np.array(moves, dtype=int).reshape(-1, 3).T
    price = cost[place, level + direction] - cost[place, level]
    loss_change = loss[place, level + direction] - loss[place, level]
    any_number = (
        4  # of steps can move nothing: as many as two pairs of moves could need
    )
    return _Moves(
        np.append(-1, place),
        np.append(0, level),
        np.append(0, direction),
        np.append(any_number, counts[place, level]),
        np.append(0.0, price),
        np.append(0.0, loss_change),
    )


def _combinable_pairs(moves: _Moves) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all pairs of moves of which each has a step of its own to move, as two arrays of indices."""
    first, second = np.triu_indices(len(moves.place))
    same_place = moves.place[first] == moves.place[second]
    same_level = moves.level[first] == moves.level[second]
    possible = ~(same_place & same_level) | (moves.available[first] > 1)
    return first[possible], second[possible]


def _best_two_pairs(
    remainder: Array,
    missing: float,
    loss_change: Array,
    usable: NDArray[np.bool_],
    slack: float,
) -> NDArray[np.int64] | None:
    """Return the two pairs of moves, of the thousand of least price, that meet the budget and lose least.

    Args:
        remainder: of the budget after every pair, (pairs,).
        missing: remainder of the budget before.
        loss_change: of every pair, (pairs,).
        usable: whether so many steps are left that a pair can be combined with any other, (pairs,).
        slack: largest remainder that meets the budget.

    Returns:
        Indices of the two pairs; None when no two of them meet the budget.
    """
    candidates = np.flatnonzero(usable)
    price = np.abs(remainder[candidates] - missing)
    candidates = candidates[np.argsort(price, kind="stable")[:MAX_PAIRS]]

    rest = remainder[candidates][:, None] + remainder[candidates] - missing
    losses = loss_change[candidates][:, None] + loss_change[candidates]
    meets_budget = (rest >= -ARITHMETIC_ERROR) & (rest <= slack)
    losses = np.where(meets_budget, losses, np.inf)
    if not np.isfinite(losses).any():
        return None
    best = np.unravel_index(np.argmin(losses), losses.shape)
    return candidates[list(best)]


def _nearest_pair(
    remainder: Array, missing: float, slack: float
) -> NDArray[np.int64] | None:
    """Return the pair of moves that comes nearest to the budget; None when none comes nearer than no move."""
    excess = np.maximum(-remainder, remainder - slack)
    nearest = int(np.argmin(excess))
    if excess[nearest] < max(-missing, missing - slack) * (1 - 1e-9):
        return np.array([nearest])
    return None
