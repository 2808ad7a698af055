"""Every schedule against formulas written down a second time, for random lengths, ranges and cycles."""

import json
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cpt_core.schedules import CYCLE_RULES, SUITE, ShortCycleWarning, make_schedule, schedule_from_dict

CURVES = {
    "L": lambda x: x,
    "C": lambda x: math.sin(math.pi * x / 2) ** 2,
    "E": lambda x: -math.expm1(-4 * x),
    "R": lambda x: 0.1 * x / (1 - 0.9 * x),
}
# By curve and q_max - q_min = 1..5: cycles longer than this end at q_max.
LONG_ENOUGH = {"L": (2, 4, 6, 8, 10), "C": (2, 3, 4, 5, 5), "E": (2, 2, 2, 3, 3), "R": (11, 31, 51, 71, 91)}


def quietly(call, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShortCycleWarning)
        return call(*args, **kwargs)


@st.composite
def settings_of(draw, names, rules=CYCLE_RULES, max_width=31):
    name = draw(st.sampled_from(sorted(names)))
    q_max = draw(st.integers(1, 32))
    q_min = q_max if name == "STATIC" else draw(st.integers(max(1, q_max - max_width), q_max))
    if name in SUITE and SUITE[name].triangular:
        n_cycles = 2 * draw(st.integers(1, 8))
    else:
        n_cycles = draw(st.integers(1, 16))
    total_steps = draw(st.integers(n_cycles, 2000))
    args = {"q_min": q_min, "q_max": q_max, "total_steps": total_steps, "n_cycles": n_cycles}
    return name, args | {"cycle_rule": draw(st.sampled_from(rules))}


EVERY = settings_of([*SUITE, "STATIC"])
CYCLIC = settings_of(SUITE)


def cycles_and_positions(args):
    """Yield (cycle index, position within the cycle) of every step, exactly."""
    total, n, rule = args["total_steps"], args["n_cycles"], args["cycle_rule"]
    length = {"exact": Fraction(total, n), "floor": total // n, "floor_plus_one": total // n + 1}[rule]
    for t in range(total):
        cycle = t // Fraction(length)
        yield cycle, Fraction(t - cycle * length) / length


@given(EVERY)
def test_length_and_bounds(case):
    name, args = case
    schedule = quietly(make_schedule, name, **args)
    bits, values = schedule.bits(), schedule.values()
    assert bits.shape == values.shape == (args["total_steps"],)
    assert np.issubdtype(bits.dtype, np.integer)
    assert args["q_min"] <= bits.min() <= bits.max() <= args["q_max"]
    assert args["q_min"] - 1e-9 <= values.min() <= values.max() <= args["q_max"] + 1e-9
    assert np.abs(bits - values).max() <= 0.5
    assert (schedule.q_min, schedule.q_max, schedule.total_steps) == tuple(args.values())[:3]


@given(CYCLIC)
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
        falls = name[1] == "T" and cycle % 2 == 0
        assert (steps <= 0).all() if falls else (steps >= 0).all()


@given(settings_of(SUITE, rules=["exact"], max_width=5))
def test_long_cycles_end_at_q_max(case):
    name, args = case
    width = args["q_max"] - args["q_min"]
    if width:
        assume(args["total_steps"] > args["n_cycles"] * LONG_ENOUGH[name[0]][width - 1])
    schedule = make_schedule(name, **args)  # a warning would be an error
    assert schedule(args["total_steps"] - 1) == args["q_max"]


@given(EVERY)
def test_json_round_trip(case):
    name, args = case
    schedule = quietly(make_schedule, name, **args)
    text = json.dumps(schedule.to_dict())
    twin = quietly(schedule_from_dict, json.loads(text))
    assert twin == schedule
    assert hash(twin) == hash(schedule)
    assert json.dumps(twin.to_dict()) == text
    assert twin.bits().tolist() == schedule.bits().tolist()


@given(EVERY, st.one_of(st.none(), st.integers(1, 32)))
def test_cost_is_the_plain_sum(case, q_grad):
    name, args = case
    schedule = quietly(make_schedule, name, **args)
    q_max = args["q_max"]
    grad = q_max if q_grad is None else q_grad
    spent = sum(q * q + 2 * q * grad for q in schedule.bits().tolist())
    full = args["total_steps"] * (q_max * q_max + 2 * q_max * grad)
    assert schedule.relative_cost(q_grad=q_grad) == pytest.approx(spent / full, rel=1e-12)
    assert schedule.relative_cost(q_grad=q_grad) <= 1


@given(EVERY)
def test_shares_and_noise(case):
    name, args = case
    schedule = quietly(make_schedule, name, **args)
    q_min, q_max = args["q_min"], args["q_max"]
    bits = schedule.bits().tolist()
    shares = {q: schedule.share_at(q) for q in range(q_min, q_max + 1)}
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share == pytest.approx(bits.count(q) / len(bits)) for q, share in shares.items())
    exposure = schedule.noise_exposure()
    assert exposure == pytest.approx(sum(4.0 ** (q_max - q) for q in bits) / len(bits))
    assert exposure == 1 if set(bits) == {q_max} else exposure > 1
