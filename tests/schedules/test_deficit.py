"""Deficits, delays, and schedules with some steps changed."""

import json
import pickle

import numpy as np
import pytest
from helpers import INF, NAN, make, price, written_and_read

from cpt_core.choosing.solver import solve_schedule
from cpt_core.schedules.deficit import AdjustedSchedule, DeficitSchedule, DelayedSchedule
from cpt_core.schedules.make import delay_steps, make_schedule, schedule_from_dict
from cpt_core.schedules.profiles import Rex, Warped
from cpt_core.schedules.schedule import CyclicSchedule, StaticSchedule

# --- deficits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "bits"),
    [
        ([], [8, 8, 8, 8, 8, 8]),
        ([(0, 1)], [3, 8, 8, 8, 8, 8]),
        ([(5, 6)], [8, 8, 8, 8, 8, 3]),
        ([(0, 6)], [3, 3, 3, 3, 3, 3]),
        ([(5, 6), (0, 2), (3, 4)], [3, 3, 8, 3, 8, 3]),
        ([(1, 3), (3, 5)], [8, 3, 3, 3, 3, 8]),
    ],
)
def test_windows_are_half_open(windows, bits):
    schedule = DeficitSchedule(3, 8, windows, 6)
    assert schedule.bits().tolist() == bits
    assert [schedule(t) for t in range(6)] == [schedule.value(t) for t in range(6)] == bits
    assert (schedule.q_min, schedule.q_max, schedule.total_steps) == (3, 8, 6)
    assert schedule.relative_cost() == pytest.approx(price(bits))


def test_numpy_integers_make_the_same_deficit():
    schedule = DeficitSchedule(np.int64(3), np.int8(8), np.array([[4, 5], [0, 2]]), np.int64(6))
    assert schedule == DeficitSchedule(3, 8, ((0, 2), (4, 5)), 6)
    assert written_and_read(schedule) == schedule


def test_deficits_in_epochs():
    schedule = DeficitSchedule.in_epochs(3, 8, [(0, 1), (2, 4)], epochs=5, steps_per_epoch=3)
    assert schedule.bits().tolist() == [3] * 3 + [8] * 3 + [3] * 6 + [8] * 3
    assert schedule == DeficitSchedule(3, 8, ((0, 3), (6, 12)), 15)


def deficit(*windows, **changes):
    return DeficitSchedule(**{"q_low": 3, "q_high": 8, "windows": windows, "total_steps": 10} | changes)


def in_epochs(*windows):
    return DeficitSchedule.in_epochs(3, 8, windows, epochs=5, steps_per_epoch=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: deficit((3, 6), (0, 4)), r"windows \(0, 4\) and \(3, 6\) overlap"),
        (lambda: deficit((0, 8), (2, 3)), r"windows \(0, 8\) and \(2, 3\) overlap"),
        (lambda: deficit((1, 2), (1, 2)), r"windows \(1, 2\) and \(1, 2\) overlap"),
        (lambda: deficit((4, 2)), r"window \(4, 2\) must satisfy 0 <= start < stop <= total_steps = 10"),
        (lambda: deficit((4, 4)), r"window \(4, 4\) must satisfy"),
        (lambda: deficit((-1, 4)), r"window \(-1, 4\) must satisfy"),
        (lambda: deficit((0, 4), (8, 11)), r"window \(8, 11\) must satisfy"),
        (lambda: deficit(0, 4), r"a window is a pair \(start, stop\) of steps, got 0"),
        (lambda: deficit((0, 4, 6)), r"a window is a pair .* got \(0, 4, 6\)"),
        (lambda: deficit((0.0, 4)), r"start of a window must be an integer, got 0\.0"),
        (lambda: deficit(q_low=9), "q_min=9, q_max=8"),
        (lambda: deficit(q_low=0), "1 <= q_min"),
        (lambda: deficit(q_high=33), "<= 32"),
        (lambda: in_epochs((0, 6)), r"window \(0, 18\) must satisfy .* total_steps = 15"),
        (lambda: in_epochs((0.5, 2)), "start of a window must be an integer"),
        (lambda: in_epochs(4), "a window is a pair"),
    ],
)
def test_impossible_deficits(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- delays ---------------------------------------------------------------------------------------


def test_a_delay_goes_before_the_schedule_of_the_other_steps():
    delayed, rest = make("RTV", delay=0.25), make("RTV", total_steps=1200)
    assert delayed.values().tolist() == [8.0] * 400 + rest.values().tolist()
    assert (delayed.q_min, delayed.q_max, delayed.total_steps) == (3, 8, 1600)
    assert [delayed(t) for t in (0, 399, 400, 1599)] == [8, 8, rest(0), 8]
    mean = 0.25 * StaticSchedule(8, 1).relative_cost(5) + 0.75 * rest.relative_cost(5)
    assert delayed.relative_cost(5) == pytest.approx(mean, rel=1e-12)


def test_arguments_reach_a_delayed_schedule():
    delayed = make("RTV", delay=0.1, q_min=4, n_cycles=4, cycle_rule="floor", profile=Rex(0.5))
    assert delayed.schedule == make("RTV", total_steps=1440, q_min=4, n_cycles=4, cycle_rule="floor", profile=Rex(0.5))


@pytest.mark.parametrize(
    ("delay", "total", "steps"),
    [(0, 100, 0), (0.0003, 1600, 0), (0.26, 10, 3), (0.24, 10, 2), (0.29, 100, 29), (0.999, 1000, 999)],
)
def test_steps_of_a_delay_are_rounded(delay, total, steps):
    assert delay_steps(delay, total) == steps


@pytest.mark.parametrize("delay", [1, -0.1, NAN, INF])
def test_delays_that_are_no_share(delay):
    for call in (
        lambda: make(delay=delay),
        lambda: delay_steps(delay, 100),
        lambda: solve_schedule(0.7, 3, 8, 1600, delay=delay),
    ):
        with pytest.raises(ValueError, match="delay is a share of the training, 0 <= delay < 1; got"):
            call()


ONE_OF_TWO = "schedule must be CyclicSchedule or AdjustedSchedule"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_schedule("STATIC", q_max=8, total_steps=9, delay=NAN), "STATIC has nothing to delay, got delay="),
        (lambda: make(total_steps=100, delay=0.95), r"n_cycles must lie in 1..total_steps = 1..5, got 8"),
        (lambda: DelayedSchedule(StaticSchedule(8, 10), 1), f"{ONE_OF_TWO}, got StaticSchedule"),
        (lambda: DelayedSchedule(DelayedSchedule(make(), 3), 1), ONE_OF_TWO),
        (lambda: AdjustedSchedule(StaticSchedule(8, 9), ()), "schedule must be CyclicSchedule"),
        (lambda: schedule_from_dict(delay_of({"kind": "static", "q_max": 8, "total_steps": 9})), ONE_OF_TWO),
        (lambda: schedule_from_dict(delay_of({"kind": "spiral"})), "unknown kind 'spiral'"),
    ],
)
def test_impossible_delays(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def delay_of(description):
    return {"kind": "delayed", "schedule": description, "hold": 3}


# --- changed steps --------------------------------------------------------------------------------


def test_only_the_changed_steps_change():
    schedule = AdjustedSchedule(make("LR"), ((0, 5), (1599, 3), (np.int64(7), np.int8(8))))
    expected, values = make("LR").bits().tolist(), make("LR").values().tolist()
    for step, bits in ((0, 5), (1599, 3), (7, 8)):
        expected[step] = values[step] = bits
    assert schedule.bits().tolist() == expected
    assert schedule.values().tolist() == values
    assert (schedule.q_min, schedule.q_max, schedule.total_steps) == (3, 8, 1600)
    assert make("LR").bits()[0] == 3
    assert AdjustedSchedule(make(), ((9, 4), (5, 4))) == AdjustedSchedule(make(), ((5, 4), (9, 4)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((-1, 5), "step -1 is outside the schedule; steps run from 0 to 1599"),
        ((1600, 5), "step 1600 is outside the schedule"),
        ((1, 2), "bits must be a whole number of at least 3 and at most 8, got 2"),
        ((1, 9), "bits must be a whole number of at least 3 and at most 8, got 9"),
        ((1, 4.5), "bits must be a whole number of at least 3 and at most 8, got 4.5"),
        ((0, 6), "a step is changed once"),
    ],
)
def test_impossible_changes(change, message):
    with pytest.raises(ValueError, match=message):
        AdjustedSchedule(make(), ((0, 4), change))


@pytest.mark.parametrize(
    "schedule",
    [
        DeficitSchedule(3, 8, (), 10),
        DeficitSchedule(3, 8, ((7, 9), (0, 4), (4, 5)), 10),
        AdjustedSchedule(make("RTV"), ((3, 4), (1000, 5))),
        DelayedSchedule(make("ETH"), 17),
        DelayedSchedule(AdjustedSchedule(make(), [[3, 4]]), 17),
        CyclicSchedule(Warped("cosine", 0.75), 3, 8, 1600, 4, True, "vertical"),
    ],
)
def test_schedules_can_be_written_and_copied(schedule):
    bits = schedule.bits()
    for twin in (written_and_read(schedule), pickle.loads(pickle.dumps(schedule))):
        assert twin == schedule
        assert hash(twin) == hash(schedule)
        assert json.dumps(twin.to_dict()) == json.dumps(schedule.to_dict())
        assert twin.bits().tolist() == bits.tolist()
        assert not twin.bits().flags.writeable
