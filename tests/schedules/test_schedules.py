"""Hand-checked schedules: rejected settings, end values, copies, deficits, delays, layer groups, costs."""

import copy
import json
import pickle
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from helpers import NAN, make, quietly, refused, written_and_read

from cpt_core.schedules import cost
from cpt_core.schedules.deficit import DeficitSchedule
from cpt_core.schedules.make import make_schedule, schedule_from_dict
from cpt_core.schedules.profiles import SUITE, Cosine, Exponential, Linear, Profile, Rex
from cpt_core.schedules.schedule import (
    CYCLE_RULES,
    CyclicSchedule,
    ShortCycleWarning,
    StaticSchedule,
)
from cpt_extras.search.custom_schedules import FunctionSchedule, TableSchedule
from cpt_extras.search.layered import LayeredSchedule
from cpt_extras.search.role_schedules import RoleSchedules
from cpt_extras.search.solved_schedules import (
    AdjustedSchedule,
    DelayedSchedule,
    Warped,
    delay_steps,
)
from cpt_lab.sweeps.forecast import total_bitops

TEN = ["LR", "LT", "CR", "CT", "RR", "RTV", "RTH", "ER", "ETV", "ETH"]
GROUPS = (
    (("conv*",), StaticSchedule(4, 10), 30),
    (("fc", "head.*"), TableSchedule(((4, 5), (8, 5))), 10),
)


# --- what is refused ------------------------------------------------------------------------------


def deficit(*windows, **changes):
    return partial(
        DeficitSchedule,
        **{"q_low": 3, "q_high": 8, "windows": windows, "total_steps": 10} | changes,
    )


def changed(change):
    return partial(AdjustedSchedule, make(), ((0, 4), change))


def grouped(*parts):
    return partial(LayeredSchedule, parts)


STATIC = StaticSchedule(8, 9)
ONE_OF_TWO = "schedule must be CyclicSchedule or AdjustedSchedule"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(make, q_min=9), "q_min=9, q_max=8"),
        (partial(make, q_min=None), "needs q_min"),
        (partial(make, q_max=33), "<= 32"),
        (
            partial(make, n_cycles=1601),
            "n_cycles must lie in 1..total_steps = 1..1600, got 1601",
        ),
        (partial(make, "LT", n_cycles=7), "even n_cycles"),
        (partial(make, profile=Rex()), "CR has a cosine profile"),
        (partial(make, "cr"), "unknown schedule 'cr'; choose from LR"),
        *(
            (
                partial(
                    make_schedule, "STATIC", **{"q_max": 6, "total_steps": 10} | changes
                ),
                "STATIC has one precision",
            )
            for changes in ({"q_min": 3}, {"profile": Rex(0.5)})
        ),
        *((partial(make(), step), f"step {step} is outside") for step in (-1, 1600)),
        (partial(Exponential, 0.0), "rate must be positive"),
        (partial(schedule_from_dict, {}), "description must be what to_dict"),
        (partial(Rex, 1.0), "d must satisfy 0 <= d < 1"),
        (
            partial(schedule_from_dict, {"kind": "spiral"}),
            "unknown kind 'spiral'; choose from static, cyclic, deficit",
        ),
        (
            partial(
                schedule_from_dict, {"kind": "cyclic", "profile": {"name": "sine"}}
            ),
            "unknown profile 'sine'; choose from linear, cosine",
        ),
        *(
            (partial(TableSchedule, runs), "must")
            for runs in ((), ((3, 0),), ((33, 1),), ((3.5, 2),), ((3, True),))
        ),
        (deficit((3, 6), (0, 4)), r"windows \(0, 4\) and \(3, 6\) overlap"),
        (deficit((0, 8), (2, 3)), r"windows \(0, 8\) and \(2, 3\) overlap"),
        (
            deficit((4, 2)),
            r"window \(4, 2\) must satisfy 0 <= start < stop <= total_steps = 10",
        ),
        (deficit((4, 4)), r"window \(4, 4\) must satisfy"),
        (deficit((0, 4), (8, 11)), r"window \(8, 11\) must satisfy"),
        (deficit(0, 4), r"windows must be pairs \(start, stop\), got \(0, 4\)"),
        (deficit((0, 4, 6)), r"windows must be pairs .* got \(\(0, 4, 6\),\)"),
        (deficit((0.0, 4)), r"start of windows must be an integer, got 0\.0"),
        (deficit(q_low=9), "q_min=9, q_max=8"),
        (
            partial(delay_steps, 1, 100),
            "delay is a share of the training, 0 <= delay < 1; got 1",
        ),
        (
            partial(delay_steps, NAN, 100),
            "delay is a share of the training, 0 <= delay < 1; got nan",
        ),
        (partial(DelayedSchedule, STATIC, 1), f"{ONE_OF_TWO}, got StaticSchedule"),
        (partial(DelayedSchedule, DelayedSchedule(make(), 3), 1), ONE_OF_TWO),
        (
            partial(
                schedule_from_dict,
                {"kind": "delayed", "schedule": STATIC.to_dict(), "hold": 3},
            ),
            ONE_OF_TWO,
        ),
        (partial(AdjustedSchedule, STATIC, ()), "schedule must be CyclicSchedule"),
        (changed((-1, 5)), "step -1 is outside the schedule; steps run from 0 to 1599"),
        (changed((1600, 5)), "step 1600 is outside the schedule"),
        (
            changed((1, 9)),
            "bits must be a whole number of at least 3 and at most 8, got 9",
        ),
        (
            changed((1, 4.5)),
            "bits must be a whole number of at least 3 and at most 8, got 4.5",
        ),
        (changed((0, 6)), "a step is changed once"),
        (
            partial(StaticSchedule, 40, 100),
            "^q_max must be an integer from 1 to 32, got 40$",
        ),
        (
            partial(TableSchedule, ((40, 9),)),
            "^bits of runs must be a whole .* at most 32, got 40$",
        ),
        (grouped(), "needs groups of layers"),
        (grouped(((), StaticSchedule(4, 10), 1)), "each with a pattern"),
        (grouped(GROUPS[0], GROUPS[0]), "'conv\\*' is in two groups"),
        (
            grouped(GROUPS[0], (("fc",), StaticSchedule(4, 9), 1)),
            r"one length, got \[9, 10\]",
        ),
        (
            grouped((("fc",), STATIC, 0)),
            "MACs of a group must be a whole number of at least 1, got 0",
        ),
        (grouped((("fc",), LayeredSchedule(GROUPS), 1)), "not layered itself"),
        (grouped((("fc",), 4, 1)), "not layered itself, got 4"),
    ],
)
def test_schedules_reject_invalid_settings(call, message):
    refused(message, call)


# --- short cycles ---------------------------------------------------------------------------------

# The shortest cycles that still end at q_max = 8, by q_max - q_min = 1..5. With one step less those of REX
# would end on a tie, decided by the last binary digit.
SHORTEST = {
    "LR": (2, 4, 6, 8, 10),
    "CR": (2, 3, 4, 5, 5),
    "RR": (12, 32, 52, 72, 92),
    "ER": (2, 2, 2, 3, 3),
}


@pytest.mark.parametrize("name", SHORTEST)
def test_make_schedule_warns_of_short_cycles(name):
    def last(width, length, n_cycles=4):
        steps = length * n_cycles
        return make(name, q_min=8 - width, total_steps=steps, n_cycles=n_cycles)(
            steps - 1
        )

    for width, length in enumerate(SHORTEST[name], start=1):
        assert last(width, length) == 8  # a warning would be an error
        with pytest.warns(ShortCycleWarning, match=f"{name}.*not at q_max = 8"):
            assert last(width, length - 1 - (name == "RR")) < 8


# Bits at the last step that differ from q_max, by rule; the settings are those of the paper's experiments.
ENDS = [
    ("CIFAR", 3, 64_000, 8, {}, {}, {}),
    ("ImageNet", 4, 450_450, 8, {}, dict.fromkeys(["LR", "CR", "RR", "ER"], 4), {}),
    ("VOC", 5, 171_600, 8, {}, {}, {}),
    ("Arxiv", 3, 1000, 8, {}, {}, {"RR": 6, "RTV": 6, "RTH": 6}),
    (
        "Arxiv, 500 epochs",
        3,
        500,
        8,
        {"RR": 7, "RTV": 7, "RTH": 7},
        {"LR": 3, "CR": 3, "RR": 3, "ER": 4, "RTH": 6, "ETV": 7},
        {"RR": 6, "RTV": 6, "RTH": 6},
    ),
    ("Products", 3, 15_440, 8, {}, {}, {}),
    ("PTB", 5, 53_120, 8, {}, {}, {}),
    ("PTB", 5, 53_120, 2, {}, {}, {}),
    ("XNLI", 5, 12_272, 2, {}, {}, {}),
]
END_CASES = [
    (*run[:4], *rule) for run in ENDS for rule in zip(CYCLE_RULES, run[4:], strict=True)
]


@pytest.mark.parametrize(
    ("run", "q_min", "steps", "n_cycles", "cycle_rule", "not_eight"), END_CASES
)
def test_schedule_ends_of_paper_runs(
    run, q_min, steps, n_cycles, cycle_rule, not_eight
):
    """End at 8 bits, except in the listed runs of the paper."""
    args = {
        "q_min": q_min,
        "total_steps": steps,
        "n_cycles": n_cycles,
        "cycle_rule": cycle_rule,
    }
    found = {name: quietly(make, name, **args)(steps - 1) for name in TEN}
    assert found == dict.fromkeys(TEN, 8) | not_eight


# --- the suite ------------------------------------------------------------------------------------


def test_schedule_suite_has_ten_in_savings_groups():
    groups = {name: make(name).savings for name in SUITE}
    assert sorted(groups) == sorted(TEN)
    assert {n for n, g in groups.items() if g == "large"} == {"RR", "RTH"}
    assert {n for n, g in groups.items() if g == "small"} == {"ER", "ETH"}
    assert sum(g == "medium" for g in groups.values()) == 6


def test_schedule_with_custom_profile_has_no_name():
    schedule = make("RR", total_steps=64_000, profile=Rex(d=0.5))
    assert schedule.relative_cost() == pytest.approx(0.547, abs=5e-4)
    assert (schedule.name, schedule.savings) == ("", None)
    assert make("RR", profile=Rex(0.9)) == make("RR")
    assert CyclicSchedule(Linear(), 3, 8, 1600, name="mine").savings is None


def test_static_schedule_ignores_cycle_settings():
    schedule = make_schedule("STATIC", q_max=6, total_steps=10)
    assert (
        schedule
        == make_schedule("STATIC", q_max=6, q_min=6, total_steps=10, n_cycles=3)
        == StaticSchedule(6, 10)
    )
    assert (schedule.savings, schedule.name) == ("none", "STATIC")


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        make("RTV"),
        *(
            CyclicSchedule(profile, 6, 8, 1600, 2, True, "vertical")
            for profile in (
                Linear(),
                Cosine(),
                Exponential(2.0),
                Rex(0.3),
                Warped("cosine", 0.75),
            )
        ),
        StaticSchedule(6, 10),
        TableSchedule(((3, 2), (8, 3))),
        DeficitSchedule(3, 8, (), 10),
        DeficitSchedule(3, 8, ((7, 9), (0, 4), (4, 5)), 10),
        AdjustedSchedule(make("RTV"), ((3, 4), (1000, 5))),
        DelayedSchedule(make("ETH"), 17),
        DelayedSchedule(AdjustedSchedule(make(), [[3, 4]]), 17, 32),
        LayeredSchedule((*GROUPS, (("x",), DeficitSchedule(3, 8, ((2, 4),), 10), 5))),
        RoleSchedules(weight=make(), activation=8, gradient="float32"),
    ],
)
def test_schedule_copies_are_equal_and_frozen(schedule):
    bits = schedule.bits()
    for twin in (
        written_and_read(schedule),
        copy.deepcopy(schedule),
        pickle.loads(pickle.dumps(schedule)),
    ):
        assert twin == schedule
        assert hash(twin) == hash(schedule)
        assert json.dumps(twin.to_dict()) == json.dumps(schedule.to_dict())
        assert twin.bits().tolist() == bits.tolist()
        with pytest.raises(AttributeError):
            twin.q_max = 9
        with pytest.raises(ValueError, match="read-only"):
            twin.bits()[0] = 9


def test_schedule_accepts_numpy_numbers():
    schedule = make(
        q_min=np.int64(3),
        q_max=np.int32(8),
        total_steps=np.int64(1600),
        n_cycles=np.uint8(8),
    )
    assert schedule == make()
    assert json.dumps(schedule.to_dict()) == json.dumps(make().to_dict())
    assert schedule(np.int64(3)) == make()(3)
    for profile in (
        Rex(np.float64(0.5)),
        Exponential(np.float32(0.5)),
        Warped("rex", np.int64(2)),
    ):
        assert {type(value) for value in vars(profile).values()} <= {
            str,
            float,
        }  # torch.load takes no others
    schedule = DeficitSchedule(
        np.int64(3), np.int8(8), np.array([[4, 5], [0, 2]]), np.int64(6)
    )
    assert (
        written_and_read(schedule)
        == schedule
        == DeficitSchedule(3, 8, ((0, 2), (4, 5)), 6)
    )


def test_schedule_rejects_writing_unregistered_profile():
    class Square(Profile):
        def growth(self, x):
            return x**2

    schedule = CyclicSchedule(Square(), 3, 8, 1600)
    assert schedule(1599) == 8
    refused("Square is not in PROFILES", schedule.to_dict)


# --- functions, delays, changed steps, groups of layers -------------------------------------------


def test_function_schedule_reads_progress_zero_to_one():
    seen = []
    schedule = FunctionSchedule(lambda u: seen.append(u) or 3 + 5 * u, total_steps=6)
    assert seen == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert schedule.values().tolist() == pytest.approx([3, 4, 5, 6, 7, 8])
    assert (schedule.q_min, schedule.q_max, schedule(5)) == (3, 8, 8)
    assert FunctionSchedule(lambda u: 4 + u, total_steps=1).bits().tolist() == [4]


def moq(step):
    """Return 16 bits, and one less after 20, 60, 140, ... steps, but not below 8."""
    bits, period = 16, 20
    while bits > 8 and step >= period:
        step, bits, period = step - period, bits - 1, 2 * period
    return bits


class Halving:
    """Callable object with an outdated name for its argument."""

    def __call__(self, iteration):
        return moq(iteration)


STEP_FUNCTIONS = {
    "step": moq,
    "iteration": Halving(),
    "global_step": lambda global_step, period=20: 8 - global_step // period,
    "lastEpoch": lambda lastEpoch: 8 - lastEpoch,  # noqa: N803
    "num_updates": partial(lambda scale, num_updates: scale * num_updates, 2),
}


@pytest.mark.parametrize("name", list(STEP_FUNCTIONS))
def test_function_schedule_rejects_step_names_without_argument(name):
    refused(
        f"function takes '{name}', .* argument=\"step\"",
        FunctionSchedule,
        STEP_FUNCTIONS[name],
        6000,
    )


def test_function_schedule_passes_steps():
    schedule = FunctionSchedule(moq, total_steps=6000, argument="step")
    assert [schedule(t) for t in range(0, 6000, 7)] == [
        moq(t) for t in range(0, 6000, 7)
    ]
    assert (schedule.q_min, schedule.q_max) == (8, 16)
    refused(
        "unknown argument 'steps'; choose from progress, step",
        FunctionSchedule,
        moq,
        10,
        argument="steps",
    )


def test_function_schedule_progress_accepts_any_name():
    schedule = FunctionSchedule(
        lambda epoch_share: 3 + 5 * epoch_share, 6, argument="progress"
    )
    assert schedule.bits().tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "function",
    [lambda t: moq(t), lambda u: 5, lambda x: 4.2 + 0.2 * x, lambda *n: moq(*n)],
)
def test_function_schedule_warns_if_constant(function):
    with pytest.warns(
        UserWarning,
        match=r'every step.*argument="step".*StaticSchedule\(\d+, total_steps=60\)',
    ):
        FunctionSchedule(function, total_steps=60)
    for argument in ("progress", "step"):
        FunctionSchedule(
            lambda u: 5, total_steps=60, argument=argument
        )  # as it is asked for


@dataclass(frozen=True)
class StepCurve(Profile):
    """Profile that mistakes a position in a cycle for a step."""

    curve: object

    def growth(self, x):
        return self.curve(x)


@pytest.mark.parametrize(
    ("curve", "values"),
    [
        (lambda x: np.minimum(x // 100, 1), "0 to 0"),
        (lambda x: np.where(x < 500, 1.0, 0.0), "1 to 1"),
        (lambda x: 8 - 5 * x, "3 to 8"),
        (lambda x: x - 0.5, "-0.5 to 0.5"),
        (lambda x: x / 0.0, "nan to nan"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value|divide by zero")
def test_cyclic_schedule_rejects_profile_without_growth(curve, values):
    refused(
        rf"growth\(x\) of StepCurve must rise within 0..1.*from {values}",
        CyclicSchedule,
        StepCurve(curve),
        3,
        8,
        1600,
    )


@pytest.mark.parametrize("name", ["CR", "LR", "LT"])
def test_make_schedule_accepts_positional_arguments(name):
    expected = make_schedule(name, q_min=3, q_max=8, total_steps=100, n_cycles=4)
    assert (
        make_schedule(name, 3, 8, 100, 4)
        == make_schedule(name, 3, 8, 100, n_cycles=4)
        == expected
    )
    assert make_schedule("STATIC", None, 8, 100) == StaticSchedule(8, 100)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("CR", 8, 3, 100), "got q_min=8, q_max=3"),
        (("CR", 100, 3, 8), "got q_min=100, q_max=3"),
        (
            ("CR", 3, 8),
            "needs total_steps; the order is name, q_min, q_max, total_steps, n_cycles",
        ),
        (("STATIC", 8, 100), "needs total_steps"),
        (("CR",), "needs q_max and total_steps"),
        (("CR", 3, 8, 4, 100), "n_cycles must lie in 1..total_steps = 1..4, got 100"),
    ],
)
def test_make_schedule_names_wrong_positional_arguments(values, message):
    refused(message, make_schedule, *values, error=(ValueError, TypeError))


def test_function_schedule_is_stored_as_table():
    schedule = FunctionSchedule(lambda u: np.sin(9 * u) * 2 + 5, total_steps=100)
    table = written_and_read(schedule)
    assert isinstance(table, TableSchedule)
    np.testing.assert_array_equal(table.bits(), schedule.bits())
    layered = written_and_read(LayeredSchedule(((("*",), schedule, 1),)))
    np.testing.assert_array_equal(layered.bits(), schedule.bits())


@pytest.mark.parametrize("bad", [NAN, 0.4, 33])
def test_function_schedule_bits_round_within_limits(bad):
    assert FunctionSchedule(
        lambda u: 0.6 if u < 0.5 else 32.4, total_steps=4
    ).bits().tolist() == [1, 1, 32, 32]
    refused(
        r"at step 5; bits lie in 1\.\.32",
        FunctionSchedule,
        lambda u: 4 if u < 0.5 else bad,
        total_steps=10,
    )


@pytest.mark.parametrize(
    ("delay", "total", "steps"),
    [
        (0, 100, 0),
        (0.0003, 1600, 0),
        (0.26, 10, 3),
        (0.29, 100, 29),
        (0.999, 1000, 999),
    ],
)
def test_delay_steps_are_rounded(delay, total, steps):
    assert delay_steps(delay, total) == steps


def test_adjusted_schedule_changes_listed_steps_only():
    schedule = AdjustedSchedule(
        make("LR"), ((0, 5), (1599, 3), (np.int64(7), np.int8(8)))
    )
    expected, values = make("LR").bits().tolist(), make("LR").values().tolist()
    for step, bits in ((0, 5), (1599, 3), (7, 8)):
        expected[step] = values[step] = bits
    assert schedule.bits().tolist() == expected
    assert schedule.values().tolist() == values
    assert (schedule.q_min, schedule.q_max, schedule.total_steps) == (3, 8, 1600)
    assert make("LR").bits()[0] == 3
    assert AdjustedSchedule(make(), ((9, 4), (5, 4))) == AdjustedSchedule(
        make(), ((5, 4), (9, 4))
    )


def test_layered_schedule_bits_per_group_and_highest():
    s = LayeredSchedule(GROUPS)
    assert s.bits().tolist() == [4] * 5 + [8] * 5
    assert s.at(7) == {"conv*": 4, "fc": 8, "head.*": 8}
    assert s.by_group().tolist() == [[4] * 10, [4] * 5 + [8] * 5]
    assert (s.q_min, s.q_max, s.total_steps) == (4, 8, 10)


# --- cost -----------------------------------------------------------------------------------------


def test_step_cost_of_hand_computed_cases():
    assert cost.step_cost(8, 8) == 192
    assert cost.step_cost([3, 8.0], 6).tolist() == [9 + 36, 64 + 96]
    assert total_bitops(10, [32, 32], 32) == 10 * 2 * 3
    assert cost.relative_cost([3, 8], q_max=8) == pytest.approx(
        (9 + 48 + 192) / 2 / 192
    )
    assert cost.relative_cost([4], q_max=8, q_grad=6) == pytest.approx((16 + 48) / 192)
    six, eight, four = (StaticSchedule(q, 4) for q in (6, 8, 4))
    roles = RoleSchedules(weight=six, activation=six, error=eight, weight_gradient=four)
    assert roles.relative_cost(q_max=8) == pytest.approx((36 + 48 + 24) / 192)
    apart = RoleSchedules(weight=four, activation=eight, gradient=eight)
    assert apart.noise_exposure() == pytest.approx((256 + 1) / 2)


@pytest.mark.parametrize("bits", ["3", [3, 4.5], True])
def test_step_cost_rejects_invalid_bits(bits):
    refused("bits must be whole numbers", cost.step_cost, bits, 8)
    refused("q_grad must be whole numbers", cost.step_cost, 8, bits)


def test_layered_schedule_cost_is_weighted_by_macs():
    s, spent = LayeredSchedule(GROUPS), 30 * 80 + 10 * (80 + 192) / 2
    assert s.relative_cost(8) == pytest.approx(spent / (40 * 192))
    assert s.relative_cost(8, q_max=4) == pytest.approx(
        spent / (40 * 48)
    )  # gradients of the baseline: 4 bits
    assert s.relative_cost() == pytest.approx(
        (30 * 48 + 10 * (80 + 192) / 2) / (40 * 192)
    )  # each group's own q_max
    assert s.noise_exposure() == pytest.approx((30 * 256 + 10 * (256 + 1) / 2) / 40)
    assert s.share_at(4) == pytest.approx(30 / 40 + 10 / 40 / 2)
