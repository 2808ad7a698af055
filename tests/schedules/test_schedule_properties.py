"""Every schedule against formulas written down a second time, for random lengths, ranges and cycles."""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from helpers import quietly, written_and_read
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cpt_core.choosing.solver import solve_schedule
from cpt_core.schedules.deficit import DeficitSchedule, DelayedSchedule
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SCHEDULES, SUITE
from cpt_core.schedules.schedule import CYCLE_RULES, CyclicSchedule

CURVES = {
    "L": lambda x: x,
    "C": lambda x: math.sin(math.pi * x / 2) ** 2,
    "E": lambda x: -math.expm1(-4 * x),
    "R": lambda x: 0.1 * x / (1 - 0.9 * x),
}
# By curve and q_max - q_min = 1..5: cycles longer than this end at q_max.
LONG_ENOUGH = {"L": (2, 4, 6, 8, 10), "C": (2, 3, 4, 5, 5), "E": (2, 2, 2, 3, 3), "R": (11, 31, 51, 71, 91)}


@st.composite
def settings_of(draw, names, rules=CYCLE_RULES, max_width=31, most=400):
    name = draw(st.sampled_from(sorted(names)))
    q_max = draw(st.integers(1, 32))
    q_min = q_max if name == "STATIC" else draw(st.integers(max(1, q_max - max_width), q_max))
    if name in SCHEDULES and SCHEDULES[name].triangular:
        n_cycles = 2 * draw(st.integers(1, 8))
    else:
        n_cycles = draw(st.integers(1, 16))
    total_steps = draw(st.integers(n_cycles, most))
    args = {"q_min": q_min, "q_max": q_max, "total_steps": total_steps, "n_cycles": n_cycles}
    return name, args | {"cycle_rule": draw(st.sampled_from(rules))}


EVERY = settings_of([*SCHEDULES, "STATIC"])
CYCLIC, PAPER = settings_of(SCHEDULES), settings_of(SUITE)


def cycles_and_positions(args):
    """Yield (cycle index, position within the cycle) of every step, exactly."""
    total, n, rule = args["total_steps"], args["n_cycles"], args["cycle_rule"]
    length = {"exact": Fraction(total, n), "floor": total // n, "floor_plus_one": total // n + 1}[rule]
    for t in range(total):
        cycle = t // Fraction(length)
        yield cycle, Fraction(t - cycle * length) / length


@given(EVERY)
def test_length_bounds_and_json(case):
    name, args = case
    schedule = quietly(make_schedule, name, **args)
    bits, values = schedule.bits(), schedule.values()
    assert bits.shape == values.shape == (args["total_steps"],)
    assert np.issubdtype(bits.dtype, np.integer)
    assert args["q_min"] <= bits.min() <= bits.max() <= args["q_max"]
    assert args["q_min"] - 1e-9 <= values.min() <= values.max() <= args["q_max"] + 1e-9
    assert np.abs(bits - values).max() <= 0.5
    assert (schedule.q_min, schedule.q_max, schedule.total_steps) == tuple(args.values())[:3]
    came_back(schedule)


def came_back(schedule):
    """JSON gives an equal schedule with the same hash, description and bits."""
    twin = written_and_read(schedule)
    assert twin == schedule
    assert hash(twin) == hash(schedule)
    assert json.dumps(twin.to_dict()) == json.dumps(schedule.to_dict())
    assert twin.bits().tolist() == schedule.bits().tolist()


@given(PAPER)
def test_values_follow_the_formula(case):
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
        assert schedule.value(step) == schedule.values()[step]


@given(CYCLIC)
def test_bits_rise_and_fall_by_whole_cycles(case):
    name, args = case
    bits = quietly(make_schedule, name, **args).bits()
    cycles = np.array([cycle for cycle, _ in cycles_and_positions(args)])
    for cycle in range(cycles.max() + 1):
        steps = np.diff(bits[cycles == cycle])
        falls = SCHEDULES[name].triangular and cycle % 2 == 0
        assert (steps <= 0).all() if falls else (steps >= 0).all()


@given(settings_of(SUITE, rules=["exact"], max_width=5, most=2000))
def test_long_cycles_end_at_q_max(case):
    name, args = case
    width = args["q_max"] - args["q_min"]
    if width:
        assume(args["total_steps"] > args["n_cycles"] * LONG_ENOUGH[name[0]][width - 1])
    schedule = make_schedule(name, **args)  # a warning would be an error
    assert schedule(args["total_steps"] - 1) == args["q_max"]


@given(EVERY, st.one_of(st.none(), st.integers(1, 32)))
def test_costs_shares_and_noise(case, q_grad):
    name, args = case
    schedule = quietly(make_schedule, name, **args)
    q_min, q_max, bits = args["q_min"], args["q_max"], schedule.bits().tolist()
    grad = q_max if q_grad is None else q_grad
    spent = sum(q * q + 2 * q * grad for q in bits)
    full = args["total_steps"] * 3 * q_max * q_max
    assert schedule.relative_cost(q_grad=q_grad) == pytest.approx(spent / full, rel=1e-12)
    assert grad > q_max or schedule.relative_cost(q_grad=q_grad) <= 1

    shares = {q: schedule.share_at(q) for q in range(q_min, q_max + 1)}
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share == pytest.approx(bits.count(q) / len(bits)) for q, share in shares.items())
    exposure = schedule.noise_exposure()
    assert exposure == pytest.approx(sum(4.0 ** (q_max - q) for q in bits) / len(bits))
    assert exposure == 1 if set(bits) == {q_max} else exposure > 1


# --- deficits and budgets -------------------------------------------------------------------------


@given(st.data(), st.integers(1, 60))
def test_deficits_are_what_a_loop_gives(data, total):
    pairs = st.lists(st.integers(0, total), min_size=2, max_size=2, unique=True).map(sorted).map(tuple)
    windows = data.draw(st.lists(pairs, max_size=4))
    inside = [sum(start <= t < stop for start, stop in windows) for t in range(total)]
    if max(inside) > 1:
        with pytest.raises(ValueError, match="overlap"):
            DeficitSchedule(2, 9, windows, total)
        return
    schedule = DeficitSchedule(2, 9, windows, total)
    assert schedule.bits().tolist() == [2 if i else 9 for i in inside]
    assert [schedule(t) for t in range(total)] == schedule.bits().tolist()
    assert schedule == DeficitSchedule(2, 9, windows[::-1], total)
    came_back(schedule)


def spent(bits, q_max):
    return sum(q * q + 2 * q * q_max for q in bits) / (3 * q_max * q_max)


@st.composite
def problems(draw):
    """Settings, the lowest budget of all, and a budget that 0.1 % is fine enough for."""
    triangular = draw(st.booleans())
    n_cycles = 2 * draw(st.integers(1, 8)) if triangular else draw(st.integers(1, 16))
    q_max = draw(st.integers(3, 12))
    q_min = draw(st.integers(1, q_max - 2))
    # A budget cannot always be met where 0.1 % of it is less than half the price of the dearest bit of one step.
    half_a_bit = (spent([q_max], q_max) - spent([q_max - 1], q_max)) / 2
    total = draw(st.integers(max(16 * n_cycles, math.ceil(1000 * half_a_bit)), 2000))
    delay = draw(st.sampled_from([0.0, 0.1]) | st.floats(0, 0.3))
    hold = round(delay * total)
    lowest = spent([q_max] * hold + [q_min] * (total - hold), q_max) / total
    fine = max(lowest, min(1.0, 1000 * half_a_bit / total))
    budget = min(1.0, fine + draw(st.floats(0, 1)) * (1 - fine))
    args = {"q_min": q_min, "q_max": q_max, "total_steps": total, "n_cycles": n_cycles, "triangular": triangular}
    args |= {"family": draw(st.sampled_from(["linear", "cosine", "exponential", "rex"])), "delay": delay}
    return args, lowest, budget


@settings(max_examples=100)
@given(problems())
def test_every_budget_is_met(case):
    args, _, budget = case
    schedule = quietly(solve_schedule, budget, **args)
    total, q_max = args["total_steps"], args["q_max"]
    bits = schedule.bits().tolist()
    assert len(bits) == schedule.total_steps == total
    assert args["q_min"] <= min(bits) <= max(bits) <= schedule.q_max == q_max
    assert spent(bits, q_max) / total == pytest.approx(budget, rel=1.001e-3, abs=0)
    hold = round(args["delay"] * total)
    assert bits[:hold] == [q_max] * hold
    solved = schedule.schedule if schedule.kind == "delayed" else schedule
    assert len(getattr(solved, "changes", ())) <= 2 * args["n_cycles"]
    assert quietly(solve_schedule, budget, **args).to_dict() == schedule.to_dict()
    came_back(schedule)


@settings(max_examples=50)
@given(problems(), st.floats(0.003, 0.5))
def test_a_larger_budget_costs_more_and_bends_less(case, more):
    args, _, budget = case
    cheap, dear = (quietly(solve_schedule, b, **args) for b in (budget, min(1.0, budget * (1 + more))))
    if budget * (1 + more) <= 1:
        assert cheap.relative_cost() < dear.relative_cost()
    assert cheap.relative_cost() <= dear.relative_cost()
    powers = [profile_of(schedule).power for schedule in (cheap, dear) if schedule.kind != "static"]
    assert all(a >= b * (1 - 1e-6) for a, b in itertools.pairwise(powers))


def profile_of(schedule):
    while not isinstance(schedule, CyclicSchedule):
        schedule = schedule.schedule
    return schedule.profile


@settings(max_examples=30)
@given(problems(), st.floats(0.002, 3), st.booleans())
def test_budgets_outside_the_interval_are_refused_with_it(case, far, below):
    args, lowest, _ = case
    budget = lowest * (1 - far) if below else 1 + far
    with pytest.raises(ValueError, match="cannot be met") as caught:
        quietly(solve_schedule, budget, **args)
    assert str(caught.value).endswith(f"budgets lie between {lowest:.4f} and 1")


@settings(max_examples=30)
@given(settings_of(SUITE, rules=["exact"], max_width=5), st.floats(0, 0.5))
def test_a_delay_is_q_max_and_then_the_schedule_of_the_rest(case, delay):
    name, args = case
    hold = round(delay * args["total_steps"])
    assume(args["total_steps"] - hold >= args["n_cycles"])
    schedule = quietly(make_schedule, name, delay=delay, **args)
    rest = quietly(make_schedule, name, **args | {"total_steps": args["total_steps"] - hold})
    assert schedule.bits().tolist() == [args["q_max"]] * hold + rest.bits().tolist()
    assert (schedule == rest) == (hold == 0)
    assert hold == 0 or schedule == DelayedSchedule(rest, hold)
    mean = (hold + rest.total_steps * rest.relative_cost()) / args["total_steps"]
    assert schedule.relative_cost() == pytest.approx(mean, rel=1e-12)


FAMILIES = {"LR": "linear", "CR": "cosine", "RR": "rex", "ER": "exponential"}


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(FAMILIES)), st.integers(1, 5), st.integers(6, 12), st.integers(1, 16), st.integers(100, 1250)
)
def test_the_cost_of_a_known_schedule_gives_it_again(name, width, q_max, n_cycles, length):
    total = n_cycles * length + length // 7
    known = make_schedule(name, q_min=q_max - width, q_max=q_max, total_steps=total, n_cycles=n_cycles)
    budget = known.relative_cost()
    found = solve_schedule(budget, q_max - width, q_max, total, n_cycles, FAMILIES[name])
    assert np.array_equal(found.bits(), known.bits())
