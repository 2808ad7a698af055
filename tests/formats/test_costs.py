"""Costs of operations: by hand, against bit operations, on ladders and by name."""

import math
from unittest.mock import ANY

import numpy as np
import pytest
from helpers import make, quietly, refused

from cpt_core.schedules import cost
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.formats.costs import COSTS, cost_named
from cpt_extras.formats.format import FORMATS, Format
from cpt_extras.formats.ladder import AFFINE, LADDERS, FormatLadder
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.role_schedules import RoleSchedules
from cpt_extras.search.solved_schedules import DelayedSchedule
from cpt_extras.search.solver import solve_schedule

LADDER = LADDERS["minifloat"]
CYCLE = TableSchedule(((4, 3), (8, 1)))
CR = quietly(make, "CR", q_min=4, total_steps=800)
CR_FROM_3 = quietly(make, "CR", total_steps=800)

# exponents of the energy by size, through both points of the table
FLOATS = np.log(3.7 / 1.1) / np.log(576 / 121)
INTEGERS = np.log(15.5) / np.log(16)


@pytest.mark.parametrize(
    # bits of both; time on tensor cores; full adders; bytes of two elements in and one float32 out; picojoules
    ("a", "b", "bits", "time", "adders", "traffic", "energy"),
    [
        ("affine8", "affine8", (8, 8), 1, 64 + 32, 1 + 1 + 4, 0.2 + 0.1),
        (
            "affine4",
            "affine8",
            (4, 8),
            1,
            32 + 32,
            0.5 + 5,
            0.2 * 0.5**INTEGERS + 0.1,
        ),
        ("float32", "float32", (32, 32), 4, 24 * 24 + 8 + 32, 12, 3.7 + 0.9),
        ("fp16", "fp16", (16, 16), 2, 11 * 11 + 5 + 32, 8, 1.1 + 0.9),
        (
            "e4m3",
            "e5m2",
            (8, 8),
            1,
            4 * 3 + 5 + 32,
            6,
            1.1 * (12 / 121) ** FLOATS + 0.9,
        ),
        # 8 bits of scale for 32 elements and for 16
        (
            "mxfp4",
            "nvfp4",
            (4, 4),
            0.5,
            2 * 2 + 2 + 32,
            4.25 / 8 + 4.5 / 8 + 4,
            1.1 * (4 / 121) ** FLOATS + 0.9,
        ),
        ("mxint8", "symmetric8", (8, 8), 1, 64 + 32, 8.25 / 8 + 1 + 4, 0.3),
        (
            "log2_4",
            "affine4",
            (4, 4),
            0.5,
            4 + 3 + 32,
            5,
            1.1 * (4 / 121) ** FLOATS + 0.9,
        ),
        ("affine4", "affine5", (4, 5), 1, 20 + 32, 9 / 8 + 4, ANY),
        ("affine9", "affine4", (9, 4), 2, 36 + 32, 13 / 8 + 4, ANY),
    ],
)
def test_costs_match_hand_values(a, b, bits, time, adders, traffic, energy):
    expected = {
        "bitops": math.prod(bits) / 1024,
        "ace": math.prod(bits),
        "wider_operand": max(bits) ** 2 / 1024,
        "tensor_core": time,
        "multiplier": adders,
        "traffic": traffic,
        "energy": energy if energy is ANY else pytest.approx(energy, rel=1e-12),
    }
    for first, second in ((a, b), (b, a)):
        operands = Format.of(first), Format.of(second)
        prices = {name: price.product(*operands) for name, price in COSTS.items()}
        assert prices == expected


def test_costs_have_unit_and_source():
    assert list(COSTS) == (
        "bitops ace wider_operand tensor_core multiplier traffic energy".split()
    )
    for name, price in COSTS.items():
        assert price.name == name
        assert price.unit
        assert len(price.about) > 40
        is_published = any(
            word in price.source for word in ("arXiv", "ISSCC", "data sheet")
        )
        assert is_published or price.source.startswith("ours: ")


# --- schedules ----------------------------------------------------------------------------------


def test_ladder_bitops_equal_step_cost():
    levels = np.arange(1, 33)
    for gradients in range(1, 33):
        price = AFFINE.cost("bitops", gradients=gradients)
        expected = cost.step_cost(levels, gradients)
        assert [price(q) * 1024 for q in levels.tolist()] == expected.tolist()
    # by default, gradients are at the highest level
    assert AFFINE.cost()(4) * 1024 == cost.step_cost(4, 32)


@pytest.mark.parametrize("arm", ["CR", "RTH", "ETV"])
@pytest.mark.parametrize(
    "options",
    [{"cost": "bitops"}, {"cost": "bitops", "ladder": AFFINE}, {"cost": "ace"}],
)
def test_relative_cost_by_bitops_equals_default(arm, options):
    schedule = make(arm, total_steps=12_345)
    assert schedule.relative_cost(**options) == schedule.relative_cost()
    with_bounds = schedule.relative_cost(6, 16, **options)
    assert with_bounds == schedule.relative_cost(6, 16)


def test_relative_cost_on_ladder_matches_hand_values():
    significands = {4: 2, 5: 3, 6: 3, 7: 4, 8: 4}
    exponents = {4: 2, 5: 2, 6: 3, 7: 3, 8: 4}
    adders = {
        q: p * p + exponents[q] + 32 + 2 * (4 * p + 4 + 32)
        for q, p in significands.items()
    }
    expected = sum(CR.share_at(q) * adders[q] for q in adders) / adders[8]
    found = CR.relative_cost(cost="multiplier", ladder=LADDER)
    assert found == pytest.approx(expected)
    assert found == cost.relative_cost(CR.bits(), 8, cost=LADDER.cost("multiplier"))
    # a ladder alone is priced by BitOps: bits, not levels, of the formats
    mx = StaticSchedule(1, 10).relative_cost(q_max=4, ladder=LADDERS["mx"])
    assert mx == (4 * 4 + 2 * 4 * 16) / (3 * 16 * 16)


@pytest.mark.parametrize(
    ("options", "gradient_bits"),
    [
        ({"gradients": 6}, 6),
        ({"gradients": "e3m2"}, 6),
        ({"gradients": FORMATS["bf16"]}, 16),
        ({}, 8),
    ],
)
def test_ladder_cost_accepts_gradient_format(options, gradient_bits):
    assert LADDER.cost("ace", **options)(4) == 4 * 4 + 2 * 4 * gradient_bits


def test_role_schedules_cost_prices_operands():
    eight = StaticSchedule(8, 4)
    roles = RoleSchedules(weight=CYCLE, activation=eight, error=6, weight_gradient=8)
    # significands: 2 then 4, 4, 3, 4; exponents: 2 then 4, 4, 3, 4
    first = (4 * 2 + 4 + 32) + (3 * 2 + 3 + 32) + (4 * 4 + 4 + 32)
    last = (4 * 4 + 4 + 32) + (3 * 4 + 4 + 32) + (4 * 4 + 4 + 32)
    found = roles.relative_cost(cost="multiplier", ladder=LADDER)
    assert found == pytest.approx((3 * first + last) / 4 / (3 * (4 * 4 + 4 + 32)))
    by_default = pytest.approx(roles.relative_cost(), rel=1e-15)
    assert roles.relative_cost(cost="ace") == by_default
    same = RoleSchedules(weight=CYCLE, activation=CYCLE, gradient=8)
    expected = CYCLE.relative_cost(cost="energy")
    assert same.relative_cost(cost="energy") == pytest.approx(expected)


@pytest.mark.parametrize("options", [{}, {"cost": "ace"}, {"ladder": AFFINE}])
@pytest.mark.parametrize(("q_max", "q_grad"), [(None, 4), (6, 4), (6, None)])
def test_role_schedules_baseline_uses_q_max(options, q_max, q_grad):
    """Give the baseline gradients of q_max bits."""
    roles = RoleSchedules(weight=CYCLE, activation=8, error=6, weight_gradient=5)
    step_costs = [8 * w + 6 * w + 5 * 8 for w in (4, 4, 4, 8)]
    baseline = 3 * (q_max or 8) ** 2
    found = roles.relative_cost(q_grad, q_max, **options)
    assert found == pytest.approx(sum(step_costs) / 4 / baseline)


def test_delayed_schedule_prices_float32_phase():
    cycle = quietly(make, "CR", total_steps=600)
    delayed = DelayedSchedule(cycle, 200, 32)
    float32, affine8 = 3.7 + 0.9, 0.2 + 0.1  # all three matmuls of 200 steps
    held = 200 * float32 / affine8
    expected = (held + 600 * cycle.relative_cost(cost="energy")) / 800
    assert delayed.relative_cost(cost="energy") == pytest.approx(expected)
    by_default = pytest.approx(delayed.relative_cost(), rel=1e-15)
    assert delayed.relative_cost(cost="ace") == by_default


@pytest.mark.parametrize("name", ["ace", "multiplier", "energy", "traffic"])
@pytest.mark.parametrize(("ladder", "q_min"), [(None, 3), (LADDER, 4)])
def test_solve_schedule_meets_named_budget(name, ladder, q_min):
    prices = {"cost": name, "ladder": ladder}
    solved = quietly(solve_schedule, 0.95, q_min, 8, 6_400, **prices)
    assert solved.relative_cost(**prices) == pytest.approx(0.95, rel=1e-3)


STATIC = StaticSchedule(8, 10)
ROLES = RoleSchedules(weight=CYCLE, activation=CYCLE, gradient=8)
HOLED = FormatLadder({6: "e3m2", 8: "e4m3"})
UNKNOWN = f"^unknown cost 'flops'; choose from {', '.join(COSTS)}$"
SECONDS = f"{', '.join(COSTS)}; for seconds give a function from bits to"
HOLE = "the ladder has a hole at level 3: its levels are 4, 5, 6, 7, 8"


def free(bits):
    return 1.0


@pytest.mark.parametrize(
    ("call", "arguments", "options", "message"),
    [
        (STATIC.relative_cost, (), {"cost": "flops"}, UNKNOWN),
        (solve_schedule, (0.7, 3, 8, 640), {"cost": "flops"}, UNKNOWN),
        (LADDER.cost, ("flops",), {}, UNKNOWN),
        (cost_named, ("flops",), {}, UNKNOWN),
        (STATIC.relative_cost, (), {"cost": "seconds"}, SECONDS),
        (solve_schedule, (1, 3, 8, 9), {"cost": "seconds"}, SECONDS),
        (STATIC.relative_cost, (), {"cost": 2}, "or a name of COSTS; got 2"),
        (ROLES.relative_cost, (), {"cost": free}, "a function knows one level"),
        (
            STATIC.relative_cost,
            (),
            {"cost": free, "ladder": LADDER},
            "a cost that is a function knows its formats",
        ),
        (LADDER.cost, ("ace",), {"gradients": "e9"}, "unknown format 'e9'"),
        (LADDER.cost, ("ace",), {"gradients": 16}, "hole at level 16"),
        (CR_FROM_3.relative_cost, (), {"cost": "ace", "ladder": LADDER}, HOLE),
        (
            solve_schedule,
            (0.9, 6, 8, 640),
            {"cost": "ace", "ladder": HOLED},
            "hole at level 7",
        ),
    ],
)
def test_costs_reject_unknown_names_and_levels(call, arguments, options, message):
    refused(message, call, *arguments, **options)
