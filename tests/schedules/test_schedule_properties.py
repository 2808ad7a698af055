"""Schedules against independently written formulas, for random lengths, ranges and cycles."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from helpers import price, quietly, refused, written_and_read
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cpt_core.schedules.deficit import DeficitSchedule
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SCHEDULES, SUITE
from cpt_core.schedules.schedule import CYCLE_RULES, MIRRORS, CyclicSchedule
from cpt_extras.search.solved_schedules import DelayedSchedule, Warped
from cpt_extras.search.solver import solve_schedule

CURVES = {
    "L": lambda x: x,
    "C": lambda x: np.sin(np.pi * x / 2) ** 2,
    "E": lambda x: -np.expm1(-4 * x),
    "R": lambda x: 0.1 * x / (1 - 0.9 * x),
}


@st.composite
def settings_of(draw, names, rules=CYCLE_RULES, max_width=31):
    name = draw(st.sampled_from(sorted(names)))
    q_max = draw(st.integers(1, 32))
    q_min = (
        q_max
        if name == "STATIC"
        else draw(st.integers(max(1, q_max - max_width), q_max))
    )
    if name in SCHEDULES and SCHEDULES[name].triangular:
        n_cycles = 2 * draw(st.integers(1, 8))
    else:
        n_cycles = draw(st.integers(1, 16))
    total_steps = draw(st.integers(n_cycles, 400))
    args = {
        "q_min": q_min,
        "q_max": q_max,
        "total_steps": total_steps,
        "n_cycles": n_cycles,
    }
    return name, args | {"cycle_rule": draw(st.sampled_from(rules))}


EVERY = settings_of([*SCHEDULES, "STATIC"])
PAPER = settings_of(SUITE)


def cycles_and_positions(args):
    """Yield (cycle index, position within the cycle) of every step, exactly."""
    total, n, rule = args["total_steps"], args["n_cycles"], args["cycle_rule"]
    length = {
        "exact": Fraction(total, n),
        "floor": total // n,
        "floor_plus_one": total // n + 1,
    }[rule]
    for t in range(total):
        cycle = t // Fraction(length)
        yield cycle, Fraction(t - cycle * length) / length


@given(EVERY)
def test_schedule_length_bounds_and_json(case):
    name, args = case
    schedule = quietly(make_schedule, name, **args)
    bits, values = schedule.bits(), schedule.values()
    assert bits.shape == values.shape == (args["total_steps"],)
    assert np.issubdtype(bits.dtype, np.integer)
    assert args["q_min"] <= bits.min() <= bits.max() <= args["q_max"]
    assert args["q_min"] - 1e-9 <= values.min() <= values.max() <= args["q_max"] + 1e-9
    assert np.abs(bits - values).max() <= 0.5
    assert (schedule.q_min, schedule.q_max, schedule.total_steps) == tuple(
        args.values()
    )[:3]
    assert written_and_read(schedule) == schedule


@given(PAPER)
def test_schedule_values_follow_formula(case):
    name, args = case
    schedule = quietly(make_schedule, name, **args)
    curve, triangular, mirror = CURVES[name[0]], name[1] == "T", name[2:]
    expected = []
    for cycle, x in cycles_and_positions(args):
        if triangular and cycle % 2 == 0:  # the 1st, 3rd, ... cycle
            shape = 1 - curve(float(x)) if mirror == "V" else curve(float(1 - x))
        else:
            shape = curve(float(x))
        expected.append(args["q_min"] + (args["q_max"] - args["q_min"]) * shape)
    np.testing.assert_allclose(schedule.values(), expected, rtol=0, atol=1e-9)
    for step in {0, args["total_steps"] // 3, args["total_steps"] - 1}:
        assert schedule(step) == schedule.bits()[step]


@given(EVERY, st.one_of(st.none(), st.integers(1, 32)))
def test_schedule_cost_shares_and_noise_exposure(case, q_grad):
    name, args = case
    schedule = quietly(make_schedule, name, **args)
    q_min, q_max, bits = args["q_min"], args["q_max"], schedule.bits().tolist()
    grad = q_max if q_grad is None else q_grad
    spent = sum(q * q + 2 * q * grad for q in bits)
    full = args["total_steps"] * 3 * q_max * q_max
    assert schedule.relative_cost(q_grad=q_grad) == pytest.approx(
        spent / full, rel=1e-12
    )
    assert grad > q_max or schedule.relative_cost(q_grad=q_grad) <= 1

    shares = {q: schedule.share_at(q) for q in range(q_min, q_max + 1)}
    assert sum(shares.values()) == pytest.approx(1)
    assert all(
        share == pytest.approx(bits.count(q) / len(bits)) for q, share in shares.items()
    )
    exposure = schedule.noise_exposure()
    assert exposure == pytest.approx(sum(4.0 ** (q_max - q) for q in bits) / len(bits))
    assert exposure == 1 if set(bits) == {q_max} else exposure > 1


@pytest.mark.parametrize("power", [0.25, 1, 3.7])
@pytest.mark.parametrize("base", ["linear", "cosine", "exponential", "rex"])
def test_warped_profile_equals_curve_at_power(base, power):
    x, profile, curve = (
        np.linspace(0, 1, 101),
        Warped(base, power),
        CURVES[base[0].upper()],
    )
    np.testing.assert_allclose(profile.growth(x), curve(x**power), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        profile.horizontal(x), curve((1 - x) ** power), rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(
        profile.vertical(x), 1 - curve(x ** (1 / power)), rtol=0, atol=1e-12
    )
    refused(
        r"unknown profile 'warped'; choose from linear, cosine, exponential, rex$",
        Warped,
        "warped",
        power,
    )


# --- deficits and budgets -------------------------------------------------------------------------


@given(st.data(), st.integers(1, 60))
def test_deficit_schedule_equals_loop(data, total):
    pairs = (
        st.lists(st.integers(0, total), min_size=2, max_size=2, unique=True)
        .map(sorted)
        .map(tuple)
    )
    windows = data.draw(st.lists(pairs, max_size=4))
    inside = [sum(start <= t < stop for start, stop in windows) for t in range(total)]
    if max(inside) > 1:
        refused("overlap", DeficitSchedule, 2, 9, windows, total)
        return
    schedule = DeficitSchedule(2, 9, windows, total)
    assert (schedule.q_min, schedule.q_max, schedule.total_steps) == (2, 9, total)
    assert (
        [schedule(t) for t in range(total)]
        == schedule.bits().tolist()
        == [2 if i else 9 for i in inside]
    )
    assert schedule == DeficitSchedule(2, 9, windows[::-1], total)


FAMILIES = ["linear", "cosine", "exponential", "rex"]


@st.composite
def problems(draw):
    """Draw settings, and a budget that 0.1 % tolerance can resolve."""
    triangular = draw(st.booleans())
    n_cycles = 2 * draw(st.integers(1, 8)) if triangular else draw(st.integers(1, 16))
    q_max = draw(st.integers(3, 12))
    q_min = draw(st.integers(1, q_max - 2))
    # A budget cannot always be met where 0.1 % of it is less than half the price of the dearest bit of one step.
    half_a_bit = (price([q_max], q_max) - price([q_max - 1], q_max)) / 2
    total = draw(st.integers(max(16 * n_cycles, math.ceil(1000 * half_a_bit)), 2000))
    delay = draw(st.sampled_from([0.0, 0.1]) | st.floats(0, 0.3))
    hold = round(delay * total)
    lowest = price([q_max] * hold + [q_min] * (total - hold), q_max)
    fine = max(lowest, min(1.0, 1000 * half_a_bit / total))
    budget = min(1.0, fine + draw(st.floats(0, 1)) * (1 - fine))
    args = {
        "q_min": q_min,
        "q_max": q_max,
        "total_steps": total,
        "n_cycles": n_cycles,
        "triangular": triangular,
    }
    args |= {
        "mirror": draw(st.sampled_from(MIRRORS)),
        "family": draw(st.sampled_from(FAMILIES)),
        "delay": delay,
    }
    return args, budget


@settings(max_examples=30)
@given(problems(), st.floats(0.003, 0.5))
def test_solve_schedule_meets_budgets_monotonically(case, more):
    """Give a less curved and more costly schedule for a larger budget."""
    args, budget = case
    budgets = budget, min(1.0, budget * (1 + more))
    found = [quietly(solve_schedule, b, **args) for b in budgets]
    total, q_max = args["total_steps"], args["q_max"]
    hold = round(args["delay"] * total)
    for schedule, wanted in zip(found, budgets, strict=True):
        bits = schedule.bits().tolist()
        assert len(bits) == schedule.total_steps == total
        assert args["q_min"] <= min(bits) <= max(bits) <= schedule.q_max == q_max
        assert price(bits, q_max) == pytest.approx(wanted, rel=1.001e-3, abs=0)
        assert bits[:hold] == [q_max] * hold
        solved = schedule.schedule if schedule.kind == "delayed" else schedule
        assert len(getattr(solved, "changes", ())) <= 2 * args["n_cycles"]
    assert found[0].relative_cost() < found[1].relative_cost() or budgets[1] == 1.0
    assert found[0].relative_cost() <= found[1].relative_cost()
    powers = [
        profile_of(schedule).power for schedule in found if schedule.kind != "static"
    ]
    assert all(a >= b * (1 - 1e-6) for a, b in itertools.pairwise(powers))


def profile_of(schedule):
    while not isinstance(schedule, CyclicSchedule):
        schedule = schedule.schedule
    return schedule.profile


@settings(max_examples=30)
@given(settings_of(SUITE, rules=["exact"], max_width=5), st.floats(0, 0.5))
def test_delayed_schedule_holds_q_max_then_continues(case, delay):
    name, args = case
    hold = round(delay * args["total_steps"])
    assume(args["total_steps"] - hold >= args["n_cycles"])
    rest = quietly(
        make_schedule, name, **args | {"total_steps": args["total_steps"] - hold}
    )
    schedule = DelayedSchedule(rest, hold)
    assert schedule.bits().tolist() == [args["q_max"]] * hold + rest.bits().tolist()
    static = make_schedule("STATIC", q_max=args["q_max"], total_steps=1).relative_cost(
        5
    )
    mean = (hold * static + rest.total_steps * rest.relative_cost(5)) / args[
        "total_steps"
    ]
    assert schedule.relative_cost(5) == pytest.approx(mean, rel=1e-12)


# of which the bits are those of the paper's schedule at its cost
NAMED = {
    "LR": {"family": "linear"},
    "CR": {"family": "cosine"},
    "RR": {"family": "rex"},
    "ER": {"family": "exponential"},
    "LT": {"family": "linear", "triangular": True, "mirror": "vertical"},
    "CT": {"family": "cosine", "triangular": True},
    "RTV": {"family": "rex", "triangular": True, "mirror": "vertical"},
    "ETV": {"family": "exponential", "triangular": True, "mirror": "vertical"},
}


@settings(max_examples=10)
@given(st.integers(1, 5), st.integers(6, 12), st.integers(1, 8), st.integers(100, 1250))
@example(5, 8, 4, 7_991)  # as long as the paper's: 8 cycles in more than 64,000 steps,
@example(4, 8, 4, 56_306)  # in 450,448 and more,
@example(3, 8, 1, 26_560)  # and 2 in some 53,120
@pytest.mark.parametrize("name", NAMED)
def test_solve_schedule_recovers_known_schedule(name, width, q_max, half, length):
    n_cycles = 2 * half
    total = n_cycles * length + length // 7
    known = make_schedule(
        name, q_min=q_max - width, q_max=q_max, total_steps=total, n_cycles=n_cycles
    )
    found = solve_schedule(
        known.relative_cost(), q_max - width, q_max, total, n_cycles, **NAMED[name]
    )
    assert np.array_equal(found.bits(), known.bits())
