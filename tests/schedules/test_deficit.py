"""Deficits, delays, and schedules with some steps changed."""

import json
import pickle

import numpy as np
import pytest
from helpers import INF, NAN, make, price, written_and_read

from cpt_core.choosing.solver import solve_schedule
from cpt_core.schedules.deficit import AdjustedSchedule, DeficitSchedule, DelayedSchedule
from cpt_core.schedules.make import delay_steps, make_schedule, schedule_from_dict
from cpt_core.schedules.profiles import SUITE, Rex, Warped
from cpt_core.schedules.schedule import CyclicSchedule, StaticSchedule

# --- deficits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "bits"),
    [
        ([], [8, 8, 8, 8, 8, 8]),
        ([(2, 4)], [8, 8, 3, 3, 8, 8]),
        ([(0, 1)], [3, 8, 8, 8, 8, 8]),
        ([(5, 6)], [8, 8, 8, 8, 8, 3]),
        ([(0, 6)], [3, 3, 3, 3, 3, 3]),
        ([(0, 2), (3, 4), (5, 6)], [3, 3, 8, 3, 8, 3]),
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


def test_the_order_of_windows_does_not_matter():
    there = DeficitSchedule(3, 8, ((0, 2), (4, 5)), 6)
    back = DeficitSchedule(3, 8, [[4, 5], [0, 2]], 6)
    assert there == back
    assert hash(there) == hash(back)
    assert there.to_dict() == back.to_dict()


def test_numpy_integers_make_the_same_deficit():
    schedule = DeficitSchedule(np.int64(3), np.int8(8), np.array([[0, 2], [4, 5]]), np.int64(6))
    assert schedule == DeficitSchedule(3, 8, ((0, 2), (4, 5)), 6)
    assert written_and_read(schedule) == schedule


@pytest.mark.parametrize("windows", [(), ((0, 4),), ((7, 9), (0, 4), (4, 5))])
def test_deficits_can_be_written_and_copied(windows):
    schedule = DeficitSchedule(3, 8, windows, 10)
    schedule.bits()
    for twin in (written_and_read(schedule), pickle.loads(pickle.dumps(schedule))):
        assert twin == schedule
        assert hash(twin) == hash(schedule)
        assert twin.bits().tolist() == schedule.bits().tolist()
    assert schedule.to_dict()["kind"] == "deficit"


@pytest.mark.parametrize(
    "changes", [{"q_low": 4}, {"q_high": 9}, {"windows": ((0, 3),)}, {"windows": ()}, {"total_steps": 11}]
)
def test_other_deficits_are_not_equal(changes):
    settings = {"q_low": 3, "q_high": 8, "windows": ((0, 4),), "total_steps": 10}
    assert DeficitSchedule(**settings | changes) != DeficitSchedule(**settings)
    assert DeficitSchedule(**settings | changes).to_dict() != DeficitSchedule(**settings).to_dict()


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([(0, 4), (3, 6)], r"windows \(0, 4\) and \(3, 6\) overlap"),
        ([(3, 6), (0, 4)], r"windows \(0, 4\) and \(3, 6\) overlap"),
        ([(0, 8), (2, 3)], r"windows \(0, 8\) and \(2, 3\) overlap"),
        ([(1, 2), (1, 2)], r"windows \(1, 2\) and \(1, 2\) overlap"),
        ([(4, 2)], r"window \(4, 2\) must satisfy 0 <= start < stop <= total_steps = 10"),
        ([(4, 4)], r"window \(4, 4\) must satisfy"),
        ([(0, 0)], r"window \(0, 0\) must satisfy"),
        ([(-1, 4)], r"window \(-1, 4\) must satisfy"),
        ([(8, 11)], r"window \(8, 11\) must satisfy"),
        ([(0, 4), (10, 12)], r"window \(10, 12\) must satisfy"),
        ([3], r"a window is a pair \(start, stop\) of steps, got 3"),
        ((0, 4), r"a window is a pair \(start, stop\) of steps, got 0"),
        ([(0, 4, 6)], r"a window is a pair .* got \(0, 4, 6\)"),
        ([(4,)], r"a window is a pair .* got \(4,\)"),
        ([None], r"a window is a pair .* got None"),
        ([(0.0, 4)], r"start of a window must be an integer, got 0\.0"),
        ([(0, 4.5)], r"stop of a window must be an integer, got 4\.5"),
        ([(0, "4")], r"stop of a window must be an integer, got '4'"),
        ([(False, 4)], r"start of a window must be an integer, got False"),
        ([(0, True)], r"stop of a window must be an integer, got True"),
        ([(0, None)], r"stop of a window must be an integer, got None"),
        ([(0, NAN)], r"stop of a window must be an integer, got nan"),
    ],
)
def test_impossible_windows(windows, message):
    with pytest.raises(ValueError, match=message):
        DeficitSchedule(3, 8, windows, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_low": 9}, "q_min=9, q_max=8"),
        ({"q_low": 0}, "1 <= q_min"),
        ({"q_high": 33}, "<= 32"),
        ({"q_low": 3.0}, "q_low must be an integer, got 3.0"),
        ({"q_high": True}, "q_high must be an integer, got True"),
        ({"total_steps": 0, "windows": ()}, "total_steps must be at least 1"),
        ({"total_steps": 10.0}, "total_steps must be an integer"),
    ],
)
def test_impossible_deficits(changes, message):
    with pytest.raises(ValueError, match=message):
        DeficitSchedule(**{"q_low": 3, "q_high": 8, "windows": ((0, 4),), "total_steps": 10} | changes)


def test_deficits_in_epochs():
    schedule = DeficitSchedule.in_epochs(3, 8, [(0, 1), (2, 4)], epochs=5, steps_per_epoch=3)
    assert schedule.bits().tolist() == [3] * 3 + [8] * 3 + [3] * 6 + [8] * 3
    assert schedule == DeficitSchedule(3, 8, ((0, 3), (6, 12)), 15)
    assert DeficitSchedule.in_epochs(4, 8, (), 2, 5) == DeficitSchedule(4, 8, (), 10)


@pytest.mark.parametrize(
    ("windows", "epochs", "steps", "message"),
    [
        ([(0, 6)], 5, 3, r"window \(0, 18\) must satisfy .* total_steps = 15"),
        ([(2, 1)], 5, 3, r"window \(6, 3\) must satisfy"),
        ([(0.5, 2)], 5, 3, "start of a window must be an integer"),
        ([], 5.0, 3, "epochs must be a whole number of at least 1 .* got 5.0"),
        ([], True, 3, "epochs must be an integer, got True"),
        ([], 5, 3.0, "steps_per_epoch must be a whole number of at least 1 .* got 3.0"),
        ([], 5, True, "steps_per_epoch must be an integer, got True"),
        ([], 5, 0, "steps_per_epoch must be a whole number of at least 1 .* got 0"),
        ([], 0, 3, "epochs must be a whole number of at least 1"),
    ],
)
def test_impossible_epochs(windows, epochs, steps, message):
    with pytest.raises(ValueError, match=message):
        DeficitSchedule.in_epochs(3, 8, windows, epochs, steps)


# --- delays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUITE)
def test_a_delay_goes_before_the_schedule_of_the_other_steps(name):
    delayed, rest = make(name, delay=0.25), make(name, total_steps=1200)
    assert delayed.bits().tolist() == [8] * 400 + rest.bits().tolist()
    assert delayed.values().tolist() == [8.0] * 400 + rest.values().tolist()
    assert (delayed.q_min, delayed.q_max, delayed.total_steps) == (3, 8, 1600)
    assert [delayed(t) for t in (0, 399, 400, 1599)] == [8, 8, rest(0), 8]
    assert (delayed.hold, delayed.schedule) == (400, rest)


@pytest.mark.parametrize("q_grad", [None, 5])
def test_the_cost_of_a_delay_is_the_weighted_mean(q_grad):
    rest = make("RR", total_steps=1280).relative_cost(q_grad)
    top = StaticSchedule(8, 1280).relative_cost(q_grad)
    assert make("RR", delay=0.2).relative_cost(q_grad) == pytest.approx(0.2 * top + 0.8 * rest, rel=1e-12)


def test_arguments_reach_a_delayed_schedule():
    delayed = make("RTV", delay=0.1, q_min=4, n_cycles=4, cycle_rule="floor", profile=Rex(0.5))
    assert delayed.schedule == make("RTV", total_steps=1440, q_min=4, n_cycles=4, cycle_rule="floor", profile=Rex(0.5))


@pytest.mark.parametrize("delay", [0, 0.0, 0.0003])
def test_no_step_of_delay_is_no_delay(delay):
    assert make("RTH", delay=delay) == make("RTH")
    assert make("RTH", delay=delay).to_dict() == make("RTH").to_dict()


@pytest.mark.parametrize(
    ("delay", "total", "steps"),
    [
        (0, 100, 0),
        (0.1, 64_000, 6_400),
        (0.3, 10, 3),
        (0.26, 10, 3),
        (0.24, 10, 2),
        (0.29, 100, 29),
        (0.999, 1000, 999),
    ],
)
def test_steps_of_a_delay_are_rounded(delay, total, steps):
    assert delay_steps(delay, total) == steps


@pytest.mark.parametrize("delay", [1, 1.0, 1.5, -0.1, -1, NAN, INF, -INF, True, False, None, "0.1", [0.1]])
def test_delays_that_are_no_share(delay):
    for call in (
        lambda: make(delay=delay),
        lambda: delay_steps(delay, 100),
        lambda: solve_schedule(0.7, 3, 8, 1600, delay=delay),
    ):
        with pytest.raises(ValueError, match="delay is a share of the training, 0 <= delay < 1; got"):
            call()


@pytest.mark.parametrize("delay", [0.1, 0.5, NAN])
def test_static_has_nothing_to_delay(delay):
    with pytest.raises(ValueError, match="STATIC has nothing to delay, got delay="):
        make_schedule("STATIC", q_max=8, total_steps=100, delay=delay)
    assert make_schedule("STATIC", q_max=8, total_steps=100, delay=0.0) == StaticSchedule(8, 100)


def test_delays_that_leave_too_few_steps():
    with pytest.raises(ValueError, match=r"n_cycles must lie in 1..total_steps = 1..5, got 8"):
        make(total_steps=100, delay=0.95)


@pytest.mark.parametrize(
    ("schedule", "hold", "message"),
    [
        (make(), -1, "hold must be a whole number of at least 0 .* got -1"),
        (make(), 1.0, "hold must be an integer, got 1.0"),
        (make(), True, "hold must be an integer, got True"),
        (StaticSchedule(8, 10), 1, "schedule must be CyclicSchedule or AdjustedSchedule, got StaticSchedule"),
        (DeficitSchedule(3, 8, (), 10), 1, "schedule must be CyclicSchedule or AdjustedSchedule"),
        (DelayedSchedule(make(), 3), 1, "schedule must be CyclicSchedule or AdjustedSchedule"),
        ("CR", 1, "schedule must be CyclicSchedule or AdjustedSchedule, got 'CR'"),
    ],
)
def test_impossible_delayed_schedules(schedule, hold, message):
    with pytest.raises(ValueError, match=message):
        DelayedSchedule(schedule, hold)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((-1, 5), "step -1 is outside the schedule; steps run from 0 to 1599"),
        ((1600, 5), "step 1600 is outside the schedule"),
        ((1.0, 5), "step must be an integer, got 1.0"),
        ((True, 5), "step must be an integer, got True"),
        (("1", 5), "step must be an integer, got '1'"),
        ((1, 2), "changed bits must lie in 3..8, got 2"),
        ((1, 9), "changed bits must lie in 3..8, got 9"),
        ((1, 4.5), "bits must be an integer, got 4.5"),
        ((1, True), "bits must be an integer, got True"),
    ],
)
def test_impossible_changes(change, message):
    with pytest.raises(ValueError, match=message):
        AdjustedSchedule(make(), ((0, 4), change))


@pytest.mark.parametrize(
    "schedule",
    [
        AdjustedSchedule(make("RTV"), ((3, 4), (1000, 5))),
        AdjustedSchedule(make(), ()),
        DelayedSchedule(make("ETH"), 17),
        DelayedSchedule(AdjustedSchedule(make(), [[3, 4]]), 17),
        CyclicSchedule(Warped("cosine", 0.75), 3, 8, 1600, 4, True, "vertical"),
    ],
)
def test_schedules_within_schedules_can_be_written_and_copied(schedule):
    bits = schedule.bits()
    for twin in (written_and_read(schedule), pickle.loads(pickle.dumps(schedule))):
        assert twin == schedule
        assert hash(twin) == hash(schedule)
        assert json.dumps(twin.to_dict()) == json.dumps(schedule.to_dict())
        assert twin.bits().tolist() == bits.tolist()
        assert not twin.bits().flags.writeable


@pytest.mark.parametrize("inner", [{"kind": "static", "q_max": 8, "total_steps": 9}, {"kind": "spiral"}])
def test_descriptions_of_a_delay_of_nothing(inner):
    with pytest.raises(ValueError, match=r"schedule must be CyclicSchedule or AdjustedSchedule|unknown kind 'spiral'"):
        schedule_from_dict({"kind": "delayed", "schedule": inner, "hold": 3})


def test_epochs_of_no_steps_and_steps_changed_twice():
    with pytest.raises(ValueError, match="steps_per_epoch must be a whole number"):
        DeficitSchedule.in_epochs(3, 8, [(0, 1)], 2, -5)
    with pytest.raises(ValueError, match="a window is a pair"):
        DeficitSchedule.in_epochs(3, 8, [4], 2, 5)
    cyclic = make_schedule("CR", q_min=3, q_max=8, total_steps=640)
    assert AdjustedSchedule(cyclic, ((9, 4), (5, 4))) == AdjustedSchedule(cyclic, ((5, 4), (9, 4)))
    with pytest.raises(ValueError, match="a step is changed once"):
        AdjustedSchedule(cyclic, ((5, 4), (5, 6)))
    with pytest.raises(ValueError, match="schedule must be CyclicSchedule"):
        AdjustedSchedule(make_schedule("STATIC", q_max=8, total_steps=9), ())
