"""Bits where they matter: the schedule of a budget that loses least, by measured sensitivities.  Beyond the paper.

If the quality lost is sum w(t, l) * 4**-q(t, l) over steps and layers, and a step of a layer costs its MACs times
q**2 + 2 q q_grad, then at the optimum no bit can be moved to where it saves more: w * 4**-q / (MACs * (q + q_grad)) is
level, so q is about log4(w / MACs) plus a constant, rounded and bounded. ``allocate`` solves the problem in whole bits.

With w / MACs the same everywhere no schedule beats static precision. In two lines, for the work of one MAC: 4**-q is
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpt_core.schedules.cost import StepCost
from cpt_core.schedules.profiles import Array
from cpt_core.schedules.schedule import (
    MAX_STEPS,
    Schedule,
    StaticSchedule,
    check_range,
)
from cpt_core.validation import MAX_BITS, check_choice, check_int
from cpt_extras.formats.ladder import FormatLadder
from cpt_extras.formats.prices import costs_of, function_of, role_prices, static_cost
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.layered import LayeredSchedule
from cpt_extras.search.role_schedules import RoleSchedules
from cpt_extras.search.sensitivity_result import FLOOR, OVER, ROLES, Sensitivity
from cpt_extras.search.solver import check_budget

TOLERANCE = 1e-3  # of the budget, from below
EXACT = 1e-12  # what is left of the budget, and of a gain, by the arithmetic alone
MOST = 1_000  # places
ALIKE = 1e-9  # relative difference of two gains below which they are one
Counts = NDArray[
    np.int64
]  # (places, precisions): how many steps of a place run at each


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
        sensitivity: where a bit matters how much, from ``cpt.search.sensitivity``.
        budget: BitOps of the quantised layers relative to training them at static ``q_max``, gradients too. What
            runs in float32 beside them does the same work whatever the bits are, and is not in it.
        q_min, q_max: lowest and highest bits.
        over: "time" gives all layers the same bits, "layers" each group its own throughout (of two neighbouring
            precisions where the budget asks for it), "both" each group its own in every window. "roles" gives weights,
            activations and gradients bits of their own throughout, "all" does so in every group and window.
        total_steps: length of the training; None takes that of the sensitivity, others stretch its windows.
        q_grad: gradient bits; ``q_max`` when None. Give the same to ``PrecisionScheduler``, which else takes the
            highest bits of each schedule. Over roles gradients have bits of their own, and it must be None.
        floor: smallest response of a place, see ``Sensitivity.weights``.
        cost: what is spent instead of BitOps, see ``relative_cost``: a name of ``COSTS``, or bits -> cost of a step.
        ladder: on which bits are levels; the sensitivity was measured there, and a level is taken to quarter the noise,
            as a bit does.

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
    total = check_int(
        "total_steps",
        sensitivity.steps if total_steps is None else total_steps,
        1,
        MAX_STEPS,
    )
    edges = [round(stop * total / sensitivity.steps) for _, stop in sensitivity.windows]
    steps = np.diff([0, *edges])
    if over in ("layers", "roles"):
        steps = np.array([total])
    elif steps.min() < 1:
        raise ValueError(f"{total} steps are too few for {len(steps)} windows")
    prices = _prices(q_min, q_max, q_grad, cost, ladder)
    levels = np.arange(q_min, q_max + 1)
    noise: Array = np.power(4.0, -levels)
    if over in ("roles", "all"):
        if q_grad is not None:
            raise ValueError(
                f"over {over!r} gradients have bits of their own; leave q_grad out, got {q_grad!r}"
            )
        levels, noise, prices = _worth_having(
            sensitivity.weights("roles", floor), levels, q_max, cost, ladder
        )
    check_budget(budget, prices[0], prices[-1], q_min, q_max)
    time = (
        np.ones(1)
        if over in ("layers", "roles")
        else sensitivity.weights("time", floor)
    )
    alike = over in ("time", "roles")  # in all layers
    layers = np.ones(1) if alike else sensitivity.weights("layers", floor)
    macs = np.ones(1) if alike else np.array(sensitivity.macs, dtype=float)
    weights = time[:, None] / time.mean() * layers[None]
    work, length = (
        np.broadcast_to(x, weights.shape).ravel() for x in (macs[None], steps[:, None])
    )
    counts = spread_bits(weights.ravel(), work, length, float(budget), prices, noise)
    schedules = [
        _schedule(levels[_order(places)])
        for places in counts.reshape(*weights.shape, -1).transpose(1, 0, 2)
    ]
    if alike:
        return schedules[0]
    return LayeredSchedule(
        tuple(zip(sensitivity.groups, schedules, sensitivity.macs, strict=True))
    )


def static_of_cost(
    budget: float,
    q_max: int,
    total_steps: int,
    q_min: int = 2,
    q_grad: int | None = None,
    cost: StepCost | str | None = None,
    ladder: FormatLadder | None = None,
) -> StaticSchedule | TableSchedule:
    """Return static precision at a relative cost: one precision, or the two next to it interleaved step by step.

    It costs the budget or up to a step more. Arguments and errors are those of ``allocate``.
    """
    prices = _prices(q_min, q_max, q_grad, cost, ladder)
    total_steps = check_int("total_steps", total_steps, 1)
    check_budget(budget, float(prices[0]), float(prices[-1]), q_min, q_max)
    low = int(np.flatnonzero(prices <= budget * (1 + 1e-9))[-1])
    if low == len(prices) - 1 or math.isclose(prices[low], budget):
        return StaticSchedule(q_min + low, total_steps)
    counts = np.zeros((1, len(prices)), dtype=np.int64)
    counts[0, low + 1] = math.ceil(
        (budget - prices[low]) / (prices[low + 1] - prices[low]) * total_steps
    )
    counts[0, low] = total_steps - counts[0, low + 1]
    return _table(np.arange(q_min, q_max + 1)[_order(counts)])


def _order(counts: Counts) -> list[int]:
    """Return which precision every step has: places one after the other, its precisions spread evenly within each."""
    order: list[int] = []
    for of_place in counts:
        when = np.concatenate([(np.arange(n) + 0.5) / n for n in of_place if n])
        order += np.repeat(np.arange(len(of_place)), of_place)[
            np.argsort(when, kind="stable")
        ].tolist()
    return order


def _table(bits: NDArray[np.int64]) -> TableSchedule:
    return TableSchedule(
        tuple((q, len(list(run))) for q, run in itertools.groupby(bits.tolist()))
    )


def _schedule(bits: NDArray[np.int64]) -> Schedule:
    """Make a schedule of the bits of every step, (steps,) or (steps, 3) by role."""
    if bits.ndim == 1:
        return _table(bits)
    return RoleSchedules(
        **{role: _table(of_role) for role, of_role in zip(ROLES, bits.T, strict=True)}
    )


def _worth_having(
    weights: Array,
    levels: NDArray[np.int64],
    q_max: int,
    cost: StepCost | str | None,
    ladder: FormatLadder | None,
) -> tuple[NDArray[np.int64], Array, Array]:
    """Return the bits by role, (n, 3), that lose less than all others of their price, their noise and their prices.

    Prices rise, noise falls, and each further one saves less for what it costs: the corners of a convex hull.
    ``weights`` are the responses of roles, (3,), of which the mean counts as 1.
    """
    every = np.array(list(itertools.product(levels.tolist(), repeat=3)))
    weight, activation, gradient = every.T
    prices, unit = role_prices(
        (activation, weight, gradient, gradient), q_max, cost, ladder
    )
    noise = 4.0**-every @ (weights / weights.mean())
    found: list[int] = []
    for i in np.lexsort((noise, prices)).tolist():
        while len(found) > 1:
            a, b = found[-2:]
            if (noise[a] - noise[b]) * (prices[i] - prices[b]) > (
                noise[b] - noise[i]
            ) * (prices[b] - prices[a]):
                break
            found.pop()
        found.append(i)
    return every[found], noise[found], prices[found] / unit


def spread_bits(
    weights: Array,
    macs: Array,
    steps: NDArray[np.int64],
    budget: float,
    prices: Array,
    noise: Array,
) -> Counts:
    """Return how many steps of every place run at each precision, (places, precisions).

    It minimises sum w * noise at cost MACs * price per step: precisions are raised one at a time where that saves most
    noise for its cost, which is optimal where each further one saves less and costs more, as BitOps do; places with the
    same gain share what is left alike. Single steps are then exchanged, to meet the budget and as long as that helps.
    ``weights`` (> 0), ``macs`` and ``steps`` are (places,); ``prices`` of a step, relative to the baseline's, and its
    ``noise`` (precisions,). ValueError for a budget that so few steps cannot meet.
    """
    if len(weights) > MOST:
        raise ValueError(
            f"bits are given to at most {MOST} places, windows times groups; got {len(weights)}"
        )
    cost = (macs / (macs * steps).sum())[:, None] * prices[
        None
    ]  # of a step, (places, precisions)
    loss = weights[:, None] * noise[None]
    return _exchanged(_given_out(cost, loss, steps, budget), cost, loss, budget)


def _prices(
    q_min: Any,
    q_max: Any,
    q_grad: Any,
    cost: StepCost | str | None,
    ladder: FormatLadder | None,
) -> Array:
    """Return what a step costs at every precision, relative to one of the baseline.

    ValueError unless bits are whole numbers from 1 to 32, in order, and where more bits do not cost more.
    """
    q_min, q_max = check_int("q_min", q_min), check_int("q_max", q_max)
    check_range(q_min, q_max, 1)
    grade = q_max if q_grad is None else check_int("q_grad", q_grad, 1, MAX_BITS)
    prices = costs_of(
        np.arange(q_min, q_max + 1), grade, function_of(cost, grade, ladder)
    )
    if not (
        np.isfinite(prices).all() and prices[0] > 0 and (np.diff(prices) > 0).all()
    ):
        shown = ", ".join(
            f"{q}: {price:g}" for q, price in enumerate(prices.tolist(), q_min)
        )
        raise ValueError(
            f"more bits must cost more for a budget to be spread over them; a step costs {shown}"
        )
    return prices / static_cost(q_max, cost, ladder)


def _given_out(
    cost: Array, loss: Array, steps: NDArray[np.int64], budget: float
) -> Counts:
    """Give bits out by what they save for their cost, a place's steps at a time, until the budget is spent."""
    level = np.zeros(len(steps), dtype=int)
    counts = np.zeros(cost.shape, dtype=np.int64)
    counts[:, 0] = steps
    left = budget - float((cost[:, 0] * steps).sum())
    price, gain = np.diff(cost, axis=1), -np.diff(loss, axis=1)
    while (open_ := np.flatnonzero(level < price.shape[1])).size:
        rates = gain[open_, level[open_]] / price[open_, level[open_]]
        best = open_[rates >= rates.max() * (1 - ALIKE)]
        prices = price[best, level[best]]
        wanted = float((prices * steps[best]).sum())
        raised = (
            steps[best] * (1.0 if wanted <= left + 1e-12 else max(left, 0.0) / wanted)
        ).astype(int)
        left -= float((prices * raised).sum())
        for i in np.argsort(
            raised - steps[best] * 1.0, kind="stable"
        ):  # of what is left, one step more where it fits
            if raised[i] < steps[best[i]] and prices[i] <= left + EXACT:
                raised[i] += 1
                left -= float(prices[i])
        counts[best, level[best]] -= raised
        counts[best, level[best] + 1] += raised
        if (raised < steps[best]).any():
            break
        level[best] += 1
    return counts


def _exchanged(counts: Counts, cost: Array, loss: Array, budget: float) -> Counts:
    """Move single steps by a bit, one or two at a time: to meet the budget first, then as long as less is lost."""
    slack = TOLERANCE * budget
    while True:
        missing = budget - float((counts * cost).sum())
        moves, held, prices, losses = _moves(counts, cost, loss)
        a, b = np.triu_indices(len(moves))
        source = np.array([p * counts.shape[1] + q for p, q, _ in moves])
        possible = (source[a] != source[b]) | (
            held[a] > 1
        )  # each moves a step of its own
        a, b = a[possible], b[possible]
        left, lost = missing - prices[a] - prices[b], losses[a] + losses[b]
        fits = (left >= -EXACT) & (left <= slack)
        off = np.maximum(-left, left - slack)  # how far beside what the budget allows
        if fits.any():
            best = int(np.argmin(np.where(fits, lost, np.inf)))
            if -EXACT <= missing <= slack and lost[best] >= -EXACT * float(
                (counts * loss).sum()
            ):
                return counts
            chosen = [a[best], b[best]]
        elif (
            four := _two_pairs(
                left, missing, lost, (held[a] > 3) & (held[b] > 3), slack
            )
        ) is not None:
            chosen = [*a[four], *b[four]]
        elif off.min() < max(-missing, missing - slack) * (1 - 1e-9):
            chosen = [a[np.argmin(off)], b[np.argmin(off)]]
        else:
            raise ValueError(
                f"{int(counts.sum())} steps are too few to cost {budget!r} to {100 * TOLERANCE:g} %; "
                f"the nearest that was found is {budget - missing:.4f}"
            )
        for p, q, way in (moves[i] for i in chosen if i):
            counts[p, q] -= 1
            counts[p, q + way] += 1


def _two_pairs(
    left: Array, missing: float, lost: Array, usable: NDArray[np.bool_], slack: float
) -> Any:
    """Return which two pairs of moves, of the thousand of least price, meet the budget and lose least; None: no two."""
    near = np.flatnonzero(usable)
    near = near[np.argsort(np.abs(left[near] - missing), kind="stable")[:1000]]
    both = left[near][:, None] + left[near] - missing
    losses = np.where(
        (both >= -EXACT) & (both <= slack), lost[near][:, None] + lost[near], np.inf
    )
    return (
        near[list(np.unravel_index(np.argmin(losses), losses.shape))]
        if np.isfinite(losses).any()
        else None
    )


def _moves(
    counts: Counts, cost: Array, loss: Array
) -> tuple[list[tuple[int, int, int]], NDArray[np.int64], Array, Array]:
    """List (place, precision, +1 or -1) of every possible move of a step; how many steps could make it, price, loss.

    The first move does nothing.
    """
    moves = [
        (int(p), int(q), way)
        for p, q in zip(*np.nonzero(counts), strict=True)
        for way in (1, -1)
        if 0 <= q + way < counts.shape[1]
    ]
    p, q, way = np.array(moves, dtype=int).reshape(-1, 3).T
    prices, losses = (np.append(0.0, x[p, q + way] - x[p, q]) for x in (cost, loss))
    return [(-1, 0, 0), *moves], np.append(4, counts[p, q]), prices, losses
