import json
import pickle
import warnings
from collections import Counter
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from cpt_core.experiments import designs, grids
from cpt_core.experiments.image import ImageRecipe
from cpt_core.experiments.recipes import DEFICITS, RECIPES, deficits, recipe
from cpt_core.experiments.spec import RunSpec
from cpt_core.schedules.deficit import AdjustedSchedule, DeficitSchedule, DelayedSchedule
from cpt_core.schedules.make import delay_steps, make_schedule, schedule_from_dict
from cpt_core.schedules.profiles import SUITE, Rex, Warped
from cpt_core.schedules.schedule import CyclicSchedule, ShortCycleWarning, StaticSchedule
from cpt_core.schedules.solver import solve_schedule
from cpt_core.tasks.image import ImageTask

NAN, INF = float("nan"), float("inf")
FAMILIES = {"linear": "LR", "cosine": "CR", "rex": "RR", "exponential": "ER"}


def make(name="CR", **changes):
    return make_schedule(name, **{"q_min": 3, "q_max": 8, "total_steps": 1600, "n_cycles": 8} | changes)


def quietly(call, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShortCycleWarning)
        return call(*args, **kwargs)


def price(bits, q_max=8):
    """The mean of q**2 + 2 q q_max, relative to that of static q_max."""
    return sum(q * q + 2 * q * q_max for q in bits) / len(bits) / (3 * q_max * q_max)


def written_and_read(schedule):
    return quietly(schedule_from_dict, json.loads(json.dumps(schedule.to_dict())))


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
        ([], 5.0, 3, "epochs must be an integer, got 5.0"),
        ([], True, 3, "epochs must be an integer, got True"),
        ([], 5, 3.0, "steps_per_epoch must be an integer, got 3.0"),
        ([], 5, True, "steps_per_epoch must be an integer, got True"),
        ([], 5, 0, "steps_per_epoch must be at least 1, got 0"),
        ([], 0, 3, "total_steps must be at least 1"),
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
    assert make("RR", delay=0.2).relative_cost(q_grad) == pytest.approx(0.2 + 0.8 * rest, rel=1e-12)


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
        (make(), -1, "hold must be at least 0 steps, got -1"),
        (make(), 1.0, "hold must be an integer, got 1.0"),
        (make(), True, "hold must be an integer, got True"),
        (StaticSchedule(8, 10), 1, "only a cyclic schedule can be delayed, got StaticSchedule"),
        (DeficitSchedule(3, 8, (), 10), 1, "only a cyclic schedule can be delayed"),
        (DelayedSchedule(make(), 3), 1, "only a cyclic schedule can be delayed"),
        ("CR", 1, "only a cyclic schedule can be delayed, got 'CR'"),
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
    with pytest.raises(ValueError, match=r"only a cyclic schedule can be delayed|unknown kind 'spiral'"):
        schedule_from_dict({"kind": "delayed", "schedule": inner, "hold": 3})


# --- warped profiles ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LR", "CR", "RR", "ER", "LT", "RTH", "RTV", "ETH", "ETV"])
@pytest.mark.parametrize(("q_min", "steps", "n_cycles"), [(3, 64_000, 8), (4, 45_045, 8), (5, 12_272, 2)])
def test_a_power_of_one_changes_nothing(name, q_min, steps, n_cycles):
    plain = make(name, q_min=q_min, total_steps=steps, n_cycles=n_cycles)
    entry = SUITE[name]
    bent = replace(plain, profile=Warped(entry.profile, 1.0), name="")
    if entry.triangular:  # REX turns itself over by a formula of its own
        np.testing.assert_allclose(bent.values(), plain.values(), rtol=0, atol=1e-12)
    else:
        assert bent.values().tolist() == plain.values().tolist()
        assert bent.bits().tolist() == plain.bits().tolist()


@pytest.mark.parametrize("power", [0.25, 0.5, 2, 3.7])
@pytest.mark.parametrize(
    ("base", "curve"),
    [
        ("linear", lambda x: x),
        ("cosine", lambda x: np.sin(np.pi * x / 2) ** 2),
        ("exponential", lambda x: 1 - np.exp(-4 * x)),
        ("rex", lambda x: 0.1 * x / (1 - 0.9 * x)),
    ],
)
def test_a_warped_profile_is_read_at_a_power(base, curve, power):
    x = np.linspace(0, 1, 101)
    profile = Warped(base, power)
    np.testing.assert_allclose(profile.growth(x), curve(x**power), rtol=0, atol=1e-12)
    np.testing.assert_allclose(profile.horizontal(x), curve((1 - x) ** power), rtol=0, atol=1e-12)
    np.testing.assert_allclose(profile.vertical(x), 1 - curve(x ** (1 / power)), rtol=0, atol=1e-12)


def test_later_is_cheaper():
    costs = [make_bent(power).relative_cost() for power in (0.001, 0.5, 1, 2, 4, 1000)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == pytest.approx(1, abs=0.02)
    assert costs[-1] == pytest.approx((9 + 48) / 192, abs=0.02)


def make_bent(power):
    return quietly(CyclicSchedule, Warped("linear", power), 3, 8, 1600)


def test_a_warped_line_by_hand():
    schedule = quietly(CyclicSchedule, Warped(power=2), 3, 8, 10, n_cycles=1)
    expected = [3 + 5 * t * t / 100 for t in range(10)]
    assert schedule.values().tolist() == pytest.approx(expected)
    assert schedule.profile.base == "linear"
    assert schedule(9) == 7


@pytest.mark.parametrize("base", ["sine", "warped", "", "Linear", None, ["rex"]])
def test_unknown_bases_list_the_choices(base):
    with pytest.raises(ValueError, match=r"unknown profile .*; choose from linear, cosine, exponential, rex$"):
        Warped(base, 1.0)


@pytest.mark.parametrize("power", [0, 0.0, -1, -0.5, INF, -INF, NAN])
def test_powers_without_a_curve(power):
    with pytest.raises(ValueError, match="power must be positive, got"):
        Warped("rex", power)


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 1.0, np.float64(1), 0.9995])
@pytest.mark.parametrize("delay", [0, 0.2])
def test_a_budget_of_one_is_static(budget, delay):
    assert solve_schedule(budget, 3, 8, 6_400, delay=delay) == StaticSchedule(8, 6_400)


@pytest.mark.parametrize("budget", [0, 0.0, -0.5, -1, 1.002, 2, 100, INF, -INF, 0.2962])
def test_budgets_that_cannot_be_met_name_those_that_can(budget):
    with pytest.raises(ValueError, match=r"cannot be met between 3 and 8 bits; budgets lie between 0\.2969 and 1$"):
        solve_schedule(budget, 3, 8, 6_400)


@pytest.mark.parametrize("budget", [NAN, True, False, "0.5", "", None, [0.5], 0.5j])
def test_budgets_that_are_no_number(budget):
    with pytest.raises(ValueError, match="budget must be a number, the cost relative to static q_max; got"):
        solve_schedule(budget, 3, 8, 6_400)


def test_a_delay_raises_the_lowest_budget():
    lowest = 0.1 + 0.9 * 57 / 192
    message = r"budget 0\.36 cannot be met between 3 and 8 bits with 640 of 6400 steps held at 8 bits; budgets lie"
    with pytest.raises(ValueError, match=f"{message} between {lowest:.4f} and 1"):
        solve_schedule(0.36, 3, 8, 6_400, delay=0.1)
    assert quietly(solve_schedule, lowest, 3, 8, 6_400, delay=0.1).bits().tolist() == [8] * 640 + [3] * 5_760


def test_one_precision_has_one_budget():
    assert solve_schedule(1, 8, 8, 100) == StaticSchedule(8, 100)
    with pytest.raises(ValueError, match=r"between 8 and 8 bits; budgets lie between 1\.0000 and 1"):
        solve_schedule(0.9, 8, 8, 100)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("q_min", "q_max", "steps", "n_cycles"),
    [
        (3, 8, 64_000, 8),
        (3, 6, 64_000, 8),
        (4, 8, 450_450, 8),
        (5, 8, 171_600, 8),
        (5, 8, 53_120, 2),
        (3, 8, 15_440, 8),
    ],
)
def test_the_cost_of_a_paper_s_schedule_gives_it_again(family, q_min, q_max, steps, n_cycles):
    known = make(FAMILIES[family], q_min=q_min, q_max=q_max, total_steps=steps, n_cycles=n_cycles)
    found = solve_schedule(known.relative_cost(), q_min, q_max, steps, n_cycles, family)
    assert np.array_equal(found.bits(), known.bits())


@pytest.mark.parametrize("budget", [0.5, 0.65, 0.8])
@pytest.mark.parametrize("q_grad", [3, 8, 12])
def test_budgets_count_gradients_of_other_bits(budget, q_grad):
    schedule = solve_schedule(budget, 2, 6, 6_400, q_grad=q_grad)
    assert isinstance(schedule, CyclicSchedule)
    spent = np.mean([q * q + 2 * q * q_grad for q in schedule.bits().tolist()]) / (36 + 12 * q_grad)
    assert spent == pytest.approx(budget, rel=1e-3)


def test_settings_reach_the_solved_schedule():
    schedule = solve_schedule(0.63, 3, 8, 64_000, 6, "cosine")
    assert (schedule.q_min, schedule.q_max, schedule.total_steps, schedule.n_cycles) == (3, 8, 64_000, 6)
    assert (schedule.triangular, schedule.mirror, schedule.profile.base) == (False, "horizontal", "cosine")
    assert (schedule.cycle_rule, schedule.name) == ("exact", "")
    delayed = solve_schedule(0.63, 3, 8, 64_000, 6, "linear", triangular=True, delay=0.1)
    assert (delayed.hold, delayed.schedule.total_steps, delayed.schedule.n_cycles) == (6_400, 57_600, 6)
    assert (delayed.schedule.triangular, delayed.schedule.mirror) == (True, "horizontal")
    assert delayed.bits()[6_400] == 8  # the first cycle falls


def test_coarse_schedules_have_the_nearest_steps_moved():
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


def test_budgets_that_no_bits_of_few_steps_meet():
    sums = {0}  # of the prices of 16 steps
    for _ in range(16):
        sums = {s + q * q + 2 * q * 9 for s in sums for q in (7, 8, 9)}
    nearest = min((s / (16 * 3 * 81) for s in sums), key=lambda c: abs(c - 0.9084))
    assert abs(nearest - 0.9084) > 0.9084e-3
    with pytest.raises(ValueError, match=r"16 steps are too few to cost 0\.9084 to 0\.1 %; the nearest is 0\.9"):
        quietly(solve_schedule, 0.9084, 7, 9, 16, 1)


def test_solved_schedules_warn_of_short_cycles():
    with pytest.warns(ShortCycleWarning, match=r"8 cycles in 6400 steps end at \d bits, not at q_max = 8"):
        solve_schedule(0.305, 3, 8, 6_400)
    assert solve_schedule(0.65, 3, 8, 6_400)(6_399) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "sine"}, "unknown family 'sine'; choose from linear, cosine, exponential, rex$"),
        ({"family": "warped"}, "unknown family 'warped'"),
        ({"q_min": 0}, "1 <= q_min"),
        ({"q_min": 9}, "q_min=9, q_max=8"),
        ({"q_min": 3.0}, "q_min must be an integer"),
        ({"total_steps": 6_400.0}, "total_steps must be an integer"),
        ({"n_cycles": 0}, "n_cycles must lie in"),
        ({"n_cycles": 3, "triangular": True}, "even n_cycles"),
        ({"mirror": "both"}, "unknown mirror 'both'"),
        ({"q_grad": 3.5}, "q_grad must be whole numbers, got 3.5"),
        ({"q_grad": True}, "q_grad must be whole numbers"),
    ],
)
@pytest.mark.parametrize("budget", [0.7, 1])
def test_what_cannot_be_solved(budget, changes, message):
    with pytest.raises(ValueError, match=message):
        solve_schedule(**{"budget": budget, "q_min": 3, "q_max": 8, "total_steps": 6_400} | changes)


# --- grids of deficits ----------------------------------------------------------------------------

SHIFTED = [("paper", "cifar10", "resnet74"), ("demo", "digits", "mlp6"), ("smoke", "digits", "mlp6")]


def windows_of(specs):
    return [(s.recipe.steps, s.schedule.windows) for s in specs]


def test_every_length_has_its_controls():
    specs = designs.deficit_scan(lengths=[0, 10, 30], windows=[(0, 20), (5, 25)], steps=100, seeds=[4])
    found = windows_of(specs)
    assert len(found) == len(set(found))
    assert set(found) == {
        (100, ()),
        (110, ()), (110, ((0, 10),)), (110, ((100, 110),)),
        (130, ()), (130, ((0, 30),)), (130, ((100, 130),)),
        (100, ((0, 20),)), (100, ((5, 25),)), (100, ((80, 100),)),
    }  # fmt: skip
    assert {s.seed for s in specs} == {4}


@pytest.mark.parametrize("name", [name for name in grids.GRIDS if "deficit" in name])
def test_controls_of_every_named_grid(name):
    for scale in grids.GRIDS[name].scales:
        specs = grids.grid_specs(name, scale)
        assert len({s.key for s in specs}) == len(specs)
        assert max(Counter((s.arm, s.seed) for s in specs).values()) == 1
        for family in {s.recipe: None for s in specs}:
            for seed in family.seeds:
                runs = [s.schedule.bits() for s in specs if s.recipe == family and s.seed == seed]
                counts = [int((bits == family.q_min).sum()) for bits in runs]
                for bits, low in zip(runs, counts, strict=True):
                    assert (bits == 8).sum() == family.steps - low
                ends = [low for bits, low in zip(runs, counts, strict=True) if (bits[family.steps - low :] < 8).all()]
                assert ends.count(0) == counts.count(0) == 1
                assert sorted(ends) == sorted(set(counts))


def test_lengths_and_windows_are_the_two_halves_of_a_scan():
    for scale, dataset in (("demo", "digits"), ("demo", "digits-graph"), ("paper", "cifar10")):
        task = "graph" if "graph" in dataset else "image"
        lengths = {s.key for s in designs.deficit_length(scale, dataset, task=task)}
        windows = {s.key for s in designs.deficit_window(scale, dataset, task=task)}
        assert lengths | windows == {s.key for s in designs.deficit_scan(scale, dataset, task=task)}
        assert lengths - windows
        assert windows - lengths


@pytest.mark.parametrize(("scale", "dataset", "model"), SHIFTED)
def test_learning_rates_fall_after_the_deficit(scale, dataset, model):
    after = DEFICITS[scale][f"{dataset}/{model}"].changes["steps"]
    specs = designs.deficit_length(scale, dataset, model, seeds=[0])
    lengths = set()
    for spec in specs:
        length = spec.recipe.steps - after
        lengths.add(length)
        assert drops_of(spec.recipe) == [length + after // 2, length + 3 * after // 4]
    assert lengths == set(DEFICITS[scale][f"{dataset}/{model}"].lengths)


@pytest.mark.parametrize("after", [4, 40, 396, 1_004, 64_000, 256_000])
def test_learning_rates_fall_after_any_deficit(after):
    for length in (1, 3, 7, 33, 101, 999, 16_000, 99_991):
        spec = designs.deficit_length(lengths=[length], steps=after, seeds=[0])[0]
        assert drops_of(spec.recipe) == [length + after // 2, length + 3 * after // 4]


@pytest.mark.parametrize(("scale", "dataset", "model"), SHIFTED)
def test_windows_do_not_move_the_learning_rate(scale, dataset, model):
    total = DEFICITS[scale][f"{dataset}/{model}"].window_steps
    for spec in designs.deficit_window(scale, dataset, model, seeds=[0]):
        assert drops_of(spec.recipe) == [total // 2, 3 * total // 4]


def drops_of(r):
    """Steps at which the image task lowers the learning rate, from the rates themselves."""
    assert isinstance(r, ImageRecipe)
    _, rate = ImageTask.optimizer(SimpleNamespace(recipe=r), nn.Linear(1, 1))
    near = sorted({t + near for m in r.milestones for t in [int(m * r.steps)] for near in range(-3, 4)})
    steps = [t for t in near if 1 <= t < r.steps]
    assert rate(0, ()) == pytest.approx(r.lr)
    assert rate(r.steps - 1, ()) == pytest.approx(r.lr * 0.01)
    return [t for t in steps if rate(t, ()) < 0.5 * rate(t - 1, ())]


def test_the_paper_s_deficits_on_cifar():
    lengths = grids.grid_specs("cifar10/deficit_length")
    assert {s.recipe.dataset for s in lengths} == {"cifar10"}
    assert {s.recipe.model for s in lengths} == {"resnet74"}
    starts = [0, 16_000, 32_000, 64_000, 128_000, 256_000]
    assert spans_and_totals(lengths) == (
        {(r + 256_000, ()) for r in starts}
        | {(r + 256_000, ((0, r),)) for r in starts[1:]}
        | {(r + 256_000, ((256_000, 256_000 + r),)) for r in starts[1:]}
    )
    windows = grids.grid_specs("cifar10/deficit_window")
    assert spans_and_totals(windows) == {(256_000, ()), (256_000, ((128_000, 256_000),))} | {
        (256_000, ((start, start + 128_000),)) for start in (0, 16_000, 32_000, 64_000)
    }
    for spec in (*lengths, *windows):
        assert (spec.recipe.weight_decay, spec.recipe.lr, spec.recipe.batch) == (0, 0.1, 128)
        assert (spec.schedule.q_low, spec.schedule.q_high, spec.q_max, spec.q_grad) == (3, 8, 8, 8)
    assert Counter(s.seed for s in lengths) == dict.fromkeys((0, 1, 2), 16)
    assert Counter(s.seed for s in windows) == dict.fromkeys((0, 1, 2), 6)


def test_the_paper_s_deficits_on_imagenet():
    specs = grids.grid_specs("imagenet/deficit_length")
    epochs = {
        (total // 5005, tuple(w // 5005 for window in windows for w in window))
        for total, windows in spans_and_totals(specs)
        if total % 5005 == 0
    }
    assert epochs == {
        (150, ()), (175, ()), (250, ()), (175, (0, 25)), (250, (0, 100)), (175, (150, 175)), (250, (150, 250))
    }  # fmt: skip
    assert len(specs) == 7 * 3
    assert {(s.recipe.model, s.recipe.weight_decay, s.schedule.q_low) for s in specs} == {("resnet18", 0, 4)}
    assert all(w % 5005 == 0 for s in specs for window in s.schedule.windows for w in window)


def test_the_paper_s_deficits_on_arxiv():
    lengths = range(0, 1_001, 100)
    specs = grids.grid_specs("ogbn-arxiv/deficit_length")
    assert spans_and_totals(specs) == (
        {(1_000 + r, ()) for r in lengths}
        | {(1_000 + r, ((0, r),)) for r in lengths[1:]}
        | {(1_000 + r, ((1_000, 1_000 + r),)) for r in lengths[1:]}
    )
    windows = grids.grid_specs("ogbn-arxiv/deficit_window")
    assert spans_and_totals(windows) == {(1_000, ()), (1_000, ((500, 1_000),))} | {
        (1_000, ((start, start + 500),)) for start in (0, 100, 200, 300, 400)
    }
    assert {(s.recipe.weight_decay, s.schedule.q_low, s.recipe.task) for s in (*specs, *windows)} == {(0, 3, "graph")}


def spans_and_totals(specs):
    assert all(s.recipe.steps == s.schedule.total_steps for s in specs)
    return set(windows_of(specs))


@pytest.mark.parametrize(
    ("grid", "arms"),
    [
        (
            "cifar10/deficit_length",
            ["no deficit, 256K", "no deficit, 272K", "[0, 16K) of 272K", "[256K, 272K) of 272K"],
        ),
        ("cifar10/deficit_window", ["no deficit, 256K", "[0, 128K) of 256K", "[128K, 256K) of 256K"]),
        ("imagenet/deficit_length", ["no deficit, 150", "no deficit, 175", "[0, 25) of 175", "[150, 175) of 175"]),
        ("ogbn-arxiv/deficit_window", ["no deficit, 1000", "[0, 500) of 1000", "[500, 1000) of 1000"]),
    ],
)
def test_arms_are_named_in_the_units_of_the_experiment(grid, arms):
    found = [arm for arm, _ in groupby(s.arm for s in grids.grid_specs(grid))]
    assert found[: len(arms)] == arms


def test_arms_of_other_lengths_are_named_in_steps():
    specs = designs.deficit_scan("paper", "cifar10", lengths=[16_001], windows=[], seeds=[0])
    assert [s.arm for s in specs] == [
        "no deficit, 272001", "[0, 16001) of 272001", "[256K, 272001) of 272001"
    ]  # fmt: skip


def test_units_may_be_epochs():
    given = {"steps": 100, "seeds": [0]}
    in_epochs = designs.deficit_scan(lengths=[0, 2], windows=[(1, 3)], steps_per_epoch=10, **given)
    assert in_epochs == designs.deficit_scan(lengths=[0, 20], windows=[(10, 30)], **given)
    assert designs.deficit_scan(steps_per_epoch=7) == designs.deficit_scan()  # the paper's lengths are steps already


def test_steps_are_those_after_a_deficit_and_all_of_a_window():
    assert {s.recipe.steps for s in designs.deficit_length(lengths=[0, 5], steps=50)} == {50, 55}
    assert {s.recipe.steps for s in designs.deficit_window(windows=[(0, 5)], steps=50)} == {50}
    assert {s.recipe.steps for s in designs.deficit_length(lengths=[0, 5])} == {400, 405}
    assert {s.recipe.steps for s in designs.deficit_window(windows=[(0, 5)])} == {600}


def test_changes_reach_the_deficits():
    specs = designs.deficit_scan(q_min=4, lr=0.5, seeds=[7, 8], q_max=6)
    assert {(s.schedule.q_low, s.schedule.q_high, s.q_max, s.q_grad) for s in specs} == {(4, 6, 6, 6)}
    assert {(s.recipe.q_min, s.recipe.lr) for s in specs} == {(4, 0.5)}
    assert {s.seed for s in specs} == {7, 8}
    assert {s.scale for s in designs.deficit_scan("smoke")} == {"smoke"}


@pytest.mark.parametrize("scale", RECIPES)
def test_every_recipe_has_deficits_without_weight_decay(scale):
    for key, plain in RECIPES[scale].items():
        dataset, model = key.split("/")
        if dataset.startswith("own-"):
            continue
        found, settings = deficits(scale, dataset, model, plain.task)
        assert (found.weight_decay, found.q_min > 0, found.evaluate_every > 0) == (0, True, True), key
        assert settings.lengths[0] == 0
        specs = designs.deficit_scan(scale, dataset, model, task=plain.task, seeds=[0])
        assert len({s.key for s in specs}) == len(specs)
        assert {s.recipe.weight_decay for s in specs} == {0}
        assert {s.schedule.q_low for s in specs} == {found.q_min}
        for spec in specs:
            again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
            assert (again, again.key) == (spec, spec.key)


def test_deficits_that_nobody_chose_are_shares_of_the_training():
    found, settings = deficits("paper", "cifar100", "resnet152")
    assert found == replace(recipe("paper", "cifar100", "resnet152"), weight_decay=0.0)
    assert settings.lengths == (0, 16_000, 32_000, 64_000)
    assert (settings.windows, settings.window_steps) == (((0, 32_000), (16_000, 48_000)), 64_000)
    assert (settings.lr_after, settings.unit, settings.suffix) == (True, 1, "")
    specs = designs.deficit_length("paper", "cifar100", "resnet152", seeds=[0])
    assert {(s.recipe.steps, *drops_of(s.recipe)) for s in specs} == {
        (r + 64_000, r + 32_000, r + 48_000) for r in (0, 16_000, 32_000, 64_000)
    }
    graph, settings = deficits("paper", "ogbn-products", task="graph")
    assert (graph.weight_decay, settings.lr_after) == (0, False)
    unseen = deficits("smoke", "templates", task="entailment")[0]
    assert unseen.evaluate_every == 4


def test_own_data_has_the_deficits_of_its_family():
    assert deficits("paper", "a.npz")[1] == DEFICITS["paper"]["cifar10/resnet74"]
    assert deficits("demo", "ogbn-arxiv", task="graph")[1] == DEFICITS["demo"]["own-graph/gcn"]
    assert deficits("paper", "a.npz")[0].dataset == "a.npz"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": "huge"}, "unknown scale 'huge'; choose from smoke, demo, paper"),
        ({"dataset": "mnist"}, "no demo recipe for dataset 'mnist'"),
        ({"model": "vgg"}, "unknown model 'vgg'"),
        ({"dataset": "digits-graph", "task": "image"}, "is for task 'graph', not 'image'"),
        ({"stepz": 3}, "a recipe has no stepz; it has task"),
        ({"lengths": [0, -1]}, "the length of a deficit must be a whole number of at least 0, got -1"),
        ({"lengths": [3.0]}, "length of a deficit must be a whole number .* got 3.0"),
        ({"lengths": [True]}, "length of a deficit must be a whole number .* got True"),
        ({"lengths": ["3"]}, "length of a deficit must be a whole number .* got '3'"),
        ({"windows": [(-1, 5)]}, r"window \(-1, 5\) must satisfy"),
        ({"windows": [(5, 5)]}, r"window \(5, 5\) must satisfy"),
        ({"windows": [(0, 5), (5, 2)]}, r"window \(5, 2\) must satisfy"),
        ({"windows": [(0, 601)]}, r"window \(0, 601\) must satisfy .* total_steps = 600"),
        ({"windows": [(0, 51)], "steps": 50}, r"window \(0, 51\) must satisfy .* total_steps = 50"),
        ({"windows": [(0, 2.5)]}, "stop of a window must be an integer, got 2.5"),
        ({"windows": [(0, 7)], "steps_per_epoch": 100}, r"window \(0, 700\) must satisfy"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be a whole number of at least 1, got 0"),
        ({"steps_per_epoch": 2.0}, "steps_per_epoch must be a whole number of at least 1, got 2.0"),
        ({"q_max": 1}, "q_min=2, q_max=1"),
        ({"q_max": 8.0}, "q_high must be an integer, got 8.0"),
        ({"steps": 100.5}, "steps must be a whole number of at least 1, got 100.5"),
    ],
)
def test_deficits_that_do_not_fit_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        designs.deficit_scan(**given)


# --- grids of equal cost --------------------------------------------------------------------------


def spent_by(spec):
    return price(spec.schedule.bits().tolist(), spec.q_max) * spec.recipe.steps


@pytest.mark.parametrize(
    ("scale", "dataset", "model", "arms"),
    [
        (
            "paper", "cifar10", "resnet74",
            ["RR", "RR delayed 10 %", "ER, 31046 of 64000 steps", "static 8, 25533 of 64000 steps",
             "static 4, 61280 of 64000 steps", "static 8"],
        ),
        (
            "demo", "cifar10", "resnet20",
            ["RR", "RR delayed 10 %", "ER, 968 of 2000 steps", "static 8, 796 of 2000 steps",
             "static 4, 1911 of 2000 steps", "static 8"],
        ),
        (
            "paper", "xnli", "bert",
            ["RR", "RR delayed 10 %", "ER, 8372 of 12272 steps", "static 8, 7493 of 12272 steps",
             "static 6, 10899 of 12272 steps", "static 8"],
        ),
    ],
)  # fmt: skip
def test_arms_of_equal_cost(scale, dataset, model, arms):
    task = recipe(scale, dataset, model).task
    specs = designs.equal_cost(scale, dataset, model, task=task, seeds=[5])
    assert [s.arm for s in specs] == arms
    plain, delayed, rising, *stopped, full = specs
    steps = plain.recipe.steps
    r = recipe(scale, dataset, model, task=task)
    settings = {"q_min": r.q_min, "q_max": 8, "n_cycles": r.n_cycles}
    assert plain.schedule == make_schedule("RR", total_steps=steps, **settings)
    money = spent_by(plain)
    assert spent_by(delayed) == pytest.approx(money, rel=2e-3)
    assert delayed.schedule.bits()[: round(0.1 * steps)].tolist() == [8] * round(0.1 * steps)
    assert delayed.schedule.total_steps == steps
    assert 0.95 * money <= spent_by(rising) <= money + 1e-6
    assert rising.schedule == make_schedule("ER", total_steps=rising.recipe.steps, **settings)
    for spec in stopped:
        bits = spec.schedule.q_max
        assert spec.schedule == StaticSchedule(bits, spec.recipe.steps)
        assert 0 <= money + 1e-6 - spent_by(spec) <= price([bits]) + 1e-6
        assert spec.arm == f"static {bits}, {spec.recipe.steps} of {steps} steps"
    assert full.schedule == StaticSchedule(8, steps)
    assert {(s.seed, s.q_max, s.q_grad, s.scale) for s in specs} == {(5, 8, 8, scale)}


# Static 4 5 6 7 bits cost 0.417 0.547 0.688 0.839; divided by 0.95: 0.439 0.576 0.724 0.883.
@pytest.mark.parametrize(
    ("budget", "static"),
    [
        (0.35, 4), (0.41, 4), (0.43, 4), (0.445, 5), (0.54, 5), (0.57, 5), (0.58, 6), (0.65, 6), (0.72, 6), (0.73, 7),
        (0.83, 7), (0.875, 7), (0.89, 8),
    ],
)  # fmt: skip
def test_the_static_precision_is_the_lowest_that_is_hardly_cheaper(budget, static):
    specs = quietly(designs.equal_cost, budget=budget, delay=0.02, seeds=[0], steps=4_000)
    money = spent_by(specs[0])
    assert money == pytest.approx(budget * 4_000, rel=1e-3)
    assert specs[0].arm == f"RR at {budget:.3f}"
    assert specs[1].arm == f"RR at {budget:.3f} delayed 2 %"
    assert spent_by(specs[1]) == pytest.approx(money, rel=2e-3)
    assert price([static]) * 4_000 >= 0.95 * money > price([static - 1]) * 4_000
    constant = [s for s in specs if isinstance(s.schedule, StaticSchedule)]
    assert [s.schedule.q_max for s in constant] == ([8, 8] if static == 8 else [8, static, 8])
    assert (constant[-1].arm, constant[-1].recipe.steps) == ("static 8", 4_000)
    for spec in constant[:-1]:
        bits, steps = spec.schedule.q_max, spec.recipe.steps
        if price([bits]) * 4_000 <= money:
            assert (spec.arm, steps) == (f"static {bits}", 4_000)
        else:
            assert spec.arm == f"static {bits}, {steps} of 4000 steps"
            assert 0 <= money + 1e-6 - spent_by(spec) <= price([bits]) + 1e-6


@pytest.mark.parametrize(("budget", "static"), [(0.56, 5), (0.57, 5), (0.7, 6)])
def test_a_static_precision_a_little_cheaper_is_run_in_full(budget, static):
    specs = quietly(designs.equal_cost, budget=budget, seeds=[0], steps=4_000)
    (arm,) = [s for s in specs if s.arm == f"static {static}"]
    assert arm.recipe.steps == 4_000
    assert 0.95 * spent_by(specs[0]) <= spent_by(arm) < spent_by(specs[0])
    assert not any(s.arm.startswith(f"static {static + 1}") for s in specs)


def test_a_schedule_cheaper_than_the_budget_is_run_in_full():
    specs = quietly(designs.equal_cost, budget=0.9, seeds=[0], steps=4_000)
    rising = next(s for s in specs if s.arm == "ER")
    assert rising.recipe.steps == 4_000
    assert spent_by(rising) < spent_by(specs[0])


@pytest.mark.parametrize(("dataset", "scale"), [("digits", "demo"), ("digits", "smoke"), ("cifar10", "paper")])
def test_the_cost_of_a_static_precision_gives_it_in_full(dataset, scale):
    specs = quietly(designs.equal_cost, scale, dataset, budget=105 / 192, seeds=[0])
    arm = next(s for s in specs if s.arm == "static 5")
    assert arm.schedule == StaticSchedule(5, specs[0].recipe.steps)
    assert spent_by(arm) == pytest.approx(spent_by(specs[0]), rel=2e-3)
    assert [s.arm for s in specs if s.arm.startswith("static 5")] == ["static 5"]


def test_every_arm_of_equal_cost_has_every_seed():
    specs = designs.equal_cost("demo", "cifar10", "resnet20")
    assert Counter(s.seed for s in specs) == {0: 6, 1: 6, 2: 6}
    assert len({s.key for s in specs}) == len(specs) == 18
    for spec in specs:
        again = quietly(RunSpec.from_dict, json.loads(json.dumps(spec.to_dict())))
        assert (again, again.key) == (spec, spec.key)


def test_changes_reach_the_arms_of_equal_cost():
    specs = quietly(designs.equal_cost, q_max=6, q_min=2, steps=2_000, lr=0.5, delay=0.1, seeds=[0])
    assert {(s.q_max, s.q_grad, s.recipe.q_min, s.recipe.lr) for s in specs} == {(6, 6, 2, 0.5)}
    assert specs[0].schedule == make("RR", q_min=2, q_max=6, total_steps=2_000, n_cycles=4)
    assert specs[1].arm == "RR delayed 10 %"
    assert specs[1].schedule.bits()[:200].tolist() == [6] * 200
    money = spent_by(specs[0])
    assert spent_by(specs[1]) == pytest.approx(money, rel=2e-3)
    assert specs[-1].arm == "static 6"
    assert all(spent_by(s) <= money + 1e-6 for s in specs[2:-1])


@pytest.mark.parametrize("name", [name for name in grids.GRIDS if "equal_cost" in name])
def test_named_grids_of_equal_cost(name):
    for scale in grids.GRIDS[name].scales:
        specs = quietly(grids.grid_specs, name, scale)
        assert len({s.key for s in specs}) == len(specs)
        assert max(Counter((s.arm, s.seed) for s in specs).values()) == 1
        money = spent_by(specs[0])
        for spec in specs:
            if spec.arm.startswith("RR"):
                assert spent_by(spec) == pytest.approx(money, rel=2e-3)
            elif " of " in spec.arm:
                assert spent_by(spec) <= money + 1e-6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"delay": 0.6}, r"cannot be met between 3 and 8 bits with 1200 of 2000 steps held at 8 bits; budgets lie"),
        ({"budget": 0.3}, r"cannot be met between 3 and 8 bits with 200 of 2000 steps held at 8 bits"),
        ({"budget": 0.2}, r"budget 0\.2 cannot be met between 3 and 8 bits; budgets lie between 0\.2969 and 1"),
        ({"budget": 0}, "budget 0 cannot be met"),
        ({"budget": 1.5}, "budget 1.5 cannot be met"),
        ({"budget": NAN}, "budget must be a number"),
        ({"delay": 1}, "delay is a share of the training"),
        ({"delay": -0.1}, "delay is a share of the training"),
        ({"delay": True}, "delay is a share of the training"),
        ({"stepz": 3}, "a recipe has no stepz"),
        ({"scale": "huge"}, "unknown scale 'huge'"),
        ({"task": "graph"}, "is for task 'image', not 'graph'"),
    ],
)
def test_costs_that_cannot_be_equal(given, message):
    with pytest.raises(ValueError, match=message):
        quietly(designs.equal_cost, **{"scale": "demo", "dataset": "cifar10", "model": "resnet20"} | given)


@pytest.mark.parametrize(
    ("name", "family"), [("LT", "linear"), ("CT", "cosine"), ("RTV", "rex"), ("ETV", "exponential")]
)
def test_vertical_triangles_are_solved_too(name, family):
    known = make_schedule(name, q_min=3, q_max=8, total_steps=6_400)
    mirror = "horizontal" if name == "CT" else "vertical"
    found = solve_schedule(known.relative_cost(), 3, 8, 6_400, family=family, triangular=True, mirror=mirror)
    assert found.bits().tolist() == known.bits().tolist()
    for budget in (0.35, 0.6, 0.9):
        found = quietly(solve_schedule, budget, 3, 8, 6_400, family=family, triangular=True, mirror="vertical")
        assert found.relative_cost() == pytest.approx(budget, rel=1e-3)
        assert len(getattr(found, "changes", ())) <= 16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": "0.5"}, "budget must be a number"),
        ({"delay": "0.1"}, "delay is a share of the training"),
        ({"delay": 0.9999}, "leaves none of 600 steps to cycle in"),
    ],
)
def test_equal_cost_of_no_numbers(given, message):
    with pytest.raises(ValueError, match=message):
        designs.equal_cost("demo", "digits", seeds=[0], **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": "3"}, "steps must be a whole number of at least 1, got '3'"),
        ({"windows": [3]}, "a window is a pair"),
        ({"windows": [(0, 5, 9)]}, "a window is a pair"),
        ({"windows": [(None, 5)]}, "start of a window must be an integer, got None"),
        ({"windows": [(True, 5)]}, "start of a window must be an integer, got True"),
        ({"steps_per_epoch": True}, "steps_per_epoch must be a whole number of at least 1, got True"),
    ],
)
def test_deficits_of_no_numbers(given, message):
    with pytest.raises(ValueError, match=message):
        designs.deficit_scan("demo", "digits", seeds=[0], **given)


def test_epochs_of_no_steps_and_steps_changed_twice():
    with pytest.raises(ValueError, match="steps_per_epoch must be at least 1, got -5"):
        DeficitSchedule.in_epochs(3, 8, [(0, 1)], 2, -5)
    with pytest.raises(ValueError, match="a window is a pair"):
        DeficitSchedule.in_epochs(3, 8, [4], 2, 5)
    cyclic = make_schedule("CR", q_min=3, q_max=8, total_steps=640)
    assert AdjustedSchedule(cyclic, ((9, 4), (5, 4))) == AdjustedSchedule(cyclic, ((5, 4), (9, 4)))
    with pytest.raises(ValueError, match="a step is changed once"):
        AdjustedSchedule(cyclic, ((5, 4), (5, 6)))
    with pytest.raises(ValueError, match="only a cyclic schedule can be adjusted"):
        AdjustedSchedule(make_schedule("STATIC", q_max=8, total_steps=9), ())


def test_numpy_numbers_are_numbers():
    specs = designs.deficit_scan("demo", "digits", lengths=np.arange(3), windows=(), seeds=[0])
    assert [s.recipe.steps for s in specs] == [400, 401, 401, 401, 402, 402, 402]
    assert solve_schedule(np.float32(0.5), 3, 8, 6_400).relative_cost() == pytest.approx(0.5, rel=1e-3)
