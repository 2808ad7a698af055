"""Deficits, delays, and schedules with some steps changed."""

import numpy as np
import pytest
from helpers import make, written_and_read

from cpt_core.schedules.deficit import AdjustedSchedule, DeficitSchedule, DelayedSchedule
from cpt_core.schedules.make import delay_steps, schedule_from_dict
from cpt_core.schedules.profiles import Rex
from cpt_core.schedules.schedule import StaticSchedule

# --- deficits -------------------------------------------------------------------------------------


def test_numpy_integers_make_the_same_deficit():
    schedule = DeficitSchedule(np.int64(3), np.int8(8), np.array([[4, 5], [0, 2]]), np.int64(6))
    assert schedule == DeficitSchedule(3, 8, ((0, 2), (4, 5)), 6)
    assert written_and_read(schedule) == schedule


def deficit(*windows, **changes):
    return DeficitSchedule(**{"q_low": 3, "q_high": 8, "windows": windows, "total_steps": 10} | changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: deficit((3, 6), (0, 4)), r"windows \(0, 4\) and \(3, 6\) overlap"),
        (lambda: deficit((0, 8), (2, 3)), r"windows \(0, 8\) and \(2, 3\) overlap"),
        (lambda: deficit((4, 2)), r"window \(4, 2\) must satisfy 0 <= start < stop <= total_steps = 10"),
        (lambda: deficit((4, 4)), r"window \(4, 4\) must satisfy"),
        (lambda: deficit((0, 4), (8, 11)), r"window \(8, 11\) must satisfy"),
        (lambda: deficit(0, 4), r"a window is a pair \(start, stop\) of steps, got 0"),
        (lambda: deficit((0, 4, 6)), r"a window is a pair .* got \(0, 4, 6\)"),
        (lambda: deficit((0.0, 4)), r"start of a window must be an integer, got 0\.0"),
        (lambda: deficit(q_low=9), "q_min=9, q_max=8"),
    ],
)
def test_impossible_deficits(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- delays ---------------------------------------------------------------------------------------


def test_arguments_reach_a_delayed_schedule():
    delayed = make("RTV", delay=0.1, q_min=4, n_cycles=4, cycle_rule="floor", profile=Rex(0.5))
    assert delayed.schedule == make("RTV", total_steps=1440, q_min=4, n_cycles=4, cycle_rule="floor", profile=Rex(0.5))


@pytest.mark.parametrize(
    ("delay", "total", "steps"),
    [(0, 100, 0), (0.0003, 1600, 0), (0.26, 10, 3), (0.29, 100, 29), (0.999, 1000, 999)],
)
def test_steps_of_a_delay_are_rounded(delay, total, steps):
    assert delay_steps(delay, total) == steps


ONE_OF_TWO = "schedule must be CyclicSchedule or AdjustedSchedule"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make(delay=1), "delay is a share of the training, 0 <= delay < 1; got 1"),
        (lambda: make(total_steps=100, delay=0.95), r"n_cycles must lie in 1..total_steps = 1..5, got 8"),
        (lambda: DelayedSchedule(StaticSchedule(8, 10), 1), f"{ONE_OF_TWO}, got StaticSchedule"),
        (lambda: DelayedSchedule(DelayedSchedule(make(), 3), 1), ONE_OF_TWO),
        (lambda: AdjustedSchedule(StaticSchedule(8, 9), ()), "schedule must be CyclicSchedule"),
        (
            lambda: schedule_from_dict({"kind": "delayed", "schedule": StaticSchedule(8, 9).to_dict(), "hold": 3}),
            ONE_OF_TWO,
        ),
    ],
)
def test_impossible_delays(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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
        ((1, 9), "bits must be a whole number of at least 3 and at most 8, got 9"),
        ((1, 4.5), "bits must be a whole number of at least 3 and at most 8, got 4.5"),
        ((0, 6), "a step is changed once"),
    ],
)
def test_impossible_changes(change, message):
    with pytest.raises(ValueError, match=message):
        AdjustedSchedule(make(), ((0, 4), change))
