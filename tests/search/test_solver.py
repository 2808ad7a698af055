"""Schedules solved for a budget."""

import numpy as np
import pytest
import torch
from helpers import INF, NAN, price, quietly, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt_core.schedules.schedule import (
    StaticSchedule,
)
from cpt_extras.search.solved_schedules import AdjustedSchedule
from cpt_extras.search.solver import solve_schedule


@pytest.mark.parametrize(
    ("budget", "q_min", "delay"),
    [(1, 3, 0), (np.float64(1), 3, 0.2), (0.9995, 3, 0.2), (1, 8, 0)],
)
def test_solve_schedule_budget_of_one_is_static(budget, q_min, delay):
    schedule = solve_schedule(budget, q_min, 8, 6_400, delay=delay)
    assert schedule == StaticSchedule(8, 6_400)


def test_solve_schedule_delay_raises_lowest_budget():
    lowest = 0.1 + 0.9 * 57 / 192
    schedule = quietly(solve_schedule, lowest, 3, 8, 6_400, delay=0.1)
    assert schedule.bits().tolist() == [8] * 640 + [3] * 5_760


def test_solve_schedule_adjusts_nearest_steps_if_coarse():
    found = quietly(solve_schedule, 0.6, 3, 8, 200, 4, "rex")
    assert isinstance(found, AdjustedSchedule)
    before, after, values = found.schedule.bits(), found.bits(), found.schedule.values()
    assert abs(price(before.tolist()) - 0.6) > 0.6e-3
    assert abs(price(after.tolist()) - 0.6) <= 0.6e-3
    moved = np.flatnonzero(before != after)
    assert moved.tolist() == [step for step, _ in found.changes]
    assert 1 <= len(moved) <= 3
    for step in moved:
        way = after[step] - before[step]
        assert abs(way) == 1
        stayed = (before == before[step]) & (before == after)
        assert (way * values[stayed] <= way * values[step]).all()


def test_solve_schedule_rejects_budget_between_few_steps():
    sums = {0}  # of the prices of 16 steps
    for _ in range(16):
        sums = {s + q * q + 2 * q * 9 for s in sums for q in (7, 8, 9)}
    nearest = min((s / (16 * 3 * 81) for s in sums), key=lambda c: abs(c - 0.9084))
    assert abs(nearest - 0.9084) > 0.9084e-3
    said = r"no schedule of 16 steps was found to cost 0\.9084 to 0\.1 %; the nearest is 0\.9"
    refused(said, quietly, solve_schedule, 0.9084, 7, 9, 16, 1)


# --- budgets in other units -----------------------------------------------------------------------


def spent(schedule, cost):
    """Return the mean cost of all steps relative to static q_max."""
    bits = schedule.bits().tolist()
    return sum(cost(q) for q in bits) / len(bits) / cost(schedule.q_max)


@pytest.mark.parametrize(
    ("budget", "delay", "q_grad"),
    [(0.45, 0, 6), (0.6, 0.1, None), (0.6, 0.1, 6), (0.9995, 0, None), (1, 0.1, 6)],
)
def test_solve_schedule_custom_bitops_cost_equals_default(budget, delay, q_grad):
    def bitops(q):
        return 1e-9 * (q * q + 2 * q * (q_grad or 8))

    top = bitops(8) / (
        1e-9 * 192
    )  # a function knows nothing of gradients: its baseline has the same
    known = quietly(
        solve_schedule, budget * top, 3, 8, 6_400, delay=delay, q_grad=q_grad
    )
    found = quietly(solve_schedule, budget, 3, 8, 6_400, delay=delay, cost=bitops)
    assert found.bits().tolist() == known.bits().tolist()


@pytest.mark.slow
@settings(max_examples=15)
@given(
    steps=st.lists(st.floats(0, 1), min_size=5, max_size=5).filter(
        lambda s: sum(s) > 0.05
    ),
    share=st.floats(0.01, 0.99),
    family=st.sampled_from(["linear", "cosine", "rex", "exponential"]),
    delay=st.sampled_from([0, 0.2]),
)
def test_solve_schedule_meets_any_rising_cost(steps, share, family, delay):
    of = dict(zip(range(3, 9), np.cumsum([1.0, *steps]).tolist(), strict=True))
    hold = 0.2 if delay else 0.0
    lowest = hold + (1 - hold) * of[3] / of[8]
    budget = lowest + share * (1 - lowest)
    schedule = quietly(
        solve_schedule,
        budget,
        3,
        8,
        6_400,
        family=family,
        delay=delay,
        cost=of.__getitem__,
    )
    assert (
        schedule.q_min if budget < 0.999 else 3,
        schedule.q_max,
        schedule.total_steps,
    ) == (3, 8, 6_400)
    assert spent(schedule, of.__getitem__) == pytest.approx(budget, rel=1e-3)


def test_solve_schedule_with_two_speed_cost():
    """Charge twice as much above 8 bits: the budget sets the share of these steps."""
    schedule = solve_schedule(0.7, 4, 16, 6_400, cost=lambda q: 1.0 if q <= 8 else 2.0)
    assert np.mean(schedule.bits() > 8) == pytest.approx(0.4, abs=2e-3)
    assert (schedule(0), schedule(6_399)) == (4, 16)


@pytest.mark.parametrize("kind", [np.array, np.float32, torch.tensor])
def test_solve_schedule_accepts_numpy_and_torch_costs(kind):
    plain, odd = (
        solve_schedule(0.75, 4, 16, 1_600, cost=lambda q, k=k: k(40 if q > 8 else 20))
        for k in (int, kind)
    )
    assert odd == plain


# --- errors -----------------------------------------------------------------------------------------------------------

REACHABLE = r"met between 3 and 8 bits; budgets lie between 0\.2969 and 1$"
WRONG_PRICES = {
    "nan at 6 bits": NAN,
    "0": 0,
    "'6'": "6",
    "False": np.array(False),
    "array": np.ones(1),
}
ERRORS = [  # changed arguments, and the sentence of the error
    *(({"budget": budget}, REACHABLE) for budget in (0, -0.5, 1.002, INF, 0.2962)),
    (
        {"budget": 0.36, "delay": 0.1},
        r"budget 0\.36 cannot be met between 3 and 8 bits with 640 of 6400 steps held at 8 bits; "
        "budgets lie between 0.3672 and 1",
    ),
    *(
        (
            {"budget": budget, "q_min": 8},
            f"{budget} cannot be met: q_min and q_max are both 8, and static",
        )
        for budget in (0.9, 1.5)
    ),
    *(
        ({"budget": budget, **changes}, message)
        for budget in (0.7, 1)
        for changes, message in (
            (
                {"family": "warped"},
                "unknown family 'warped'; choose from linear, cosine, exponential, rex$",
            ),
            ({"q_min": 9}, "q_min=9, q_max=8"),
            ({"n_cycles": 3, "triangular": True}, "even n_cycles"),
        )
    ),
    (
        {"cost": {3: 0.97, 4: 1.0, 5: 1.0, 6: 1.0, 7: 1.0, 8: 1.0}.get},
        r"between 3 and 8 bits; budgets lie between 0\.9700 and 1",
    ),
    (
        {"cost": dict.fromkeys(range(3, 9), 2.0).get},
        r"0\.7 cannot be met: training at 3 bits costs 1\.0000 of that at 8",
    ),
    ({"cost": {q: q for q in range(3, 8)}.get}, "cost gives None at 8 bits"),
    *(
        (
            {"cost": {**{q: q for q in range(3, 9)}, 6: price}.get},
            f"a step must cost a positive number; cost gives {shown}",
        )
        for shown, price in WRONG_PRICES.items()
    ),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_solve_schedule_rejects_invalid_arguments(changes, message):
    arguments = {"budget": 0.7, "q_min": 3, "q_max": 8, "total_steps": 6_400, **changes}
    refused(message, solve_schedule, **arguments)
