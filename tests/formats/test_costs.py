"""Costs of operations: by hand, against bit operations, on ladders and by name."""

from itertools import pairwise

import numpy as np
import pytest
from helpers import make, quietly, refused

from cpt_core.schedules import cost
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.formats.costs import COSTS, OPERANDS_BY_PASS, Operands, cost_named
from cpt_extras.formats.format import FORMATS, Format
from cpt_extras.formats.ladder import AFFINE, LADDERS, FormatLadder
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.layered import LayeredSchedule
from cpt_extras.search.role_schedules import RoleSchedules
from cpt_extras.search.solved_schedules import DelayedSchedule
from cpt_extras.search.solver import solve_schedule

LADDER = LADDERS["minifloat"]

FLOATS = np.log(3.7 / 1.1) / np.log(576 / 121)
# bits of both; their product; full adders; bytes of two elements in and one float32 out; picojoules
BY_HAND = {
    ("affine8", "affine8"): (64, 64 + 32, 1 + 1 + 4, 0.2 + 0.1),
    ("affine4", "affine8"): (
        32,
        32 + 32,
        0.5 + 1 + 4,
        0.2 * 0.5 ** (np.log(15.5) / np.log(16)) + 0.1,
    ),
    ("float32", "float32"): (1024, 24 * 24 + 8 + 32, 12, 3.7 + 0.9),
    ("fp16", "fp16"): (256, 11 * 11 + 5 + 32, 8, 1.1 + 0.9),
    ("e4m3", "e5m2"): (64, 4 * 3 + 5 + 32, 6, 1.1 * (12 / 121) ** FLOATS + 0.9),
    # 8 bits of scale for 32 elements and for 16
    ("mxfp4", "nvfp4"): (
        16,
        2 * 2 + 2 + 32,
        4.25 / 8 + 4.5 / 8 + 4,
        1.1 * (4 / 121) ** FLOATS + 0.9,
    ),
    ("mxint8", "symmetric8"): (64, 64 + 32, 8.25 / 8 + 1 + 4, 0.3),
    ("log2_4", "affine4"): (16, 4 + 3 + 32, 5, 1.1 * (4 / 121) ** FLOATS + 0.9),
}


@pytest.mark.parametrize("pair", BY_HAND, ids="-".join)
def test_costs_match_hand_values(pair):
    a, b = map(Format.of, pair)
    bits, adders, moved, energy = BY_HAND[pair]
    for first, second in ((a, b), (b, a)):
        found = {name: one.product(first, second) for name, one in COSTS.items()}
        assert found["bitops"] == bits / 1024
        assert found["ace"] == bits
        assert found["multiplier"] == adders
        assert found["traffic"] == moved
        assert found["energy"] == pytest.approx(energy, rel=1e-12)


def test_costs_use_macs_or_elements():
    a, b = Format.affine(4), Format.affine(8)
    assert COSTS["ace"].product(a, b, 10, (2, 3, 5)) == 320
    assert COSTS["traffic"].product(a, b, 10, (2, 3, 5)) == 2 * 0.5 + 3 + 5 * 4


def test_step_cost_accepts_two_gradient_formats():
    found = Operands(*map(Format.of, ("affine2", "affine3", "affine5", "affine7")))
    assert COSTS["ace"].step(found) == 2 * 3 + 5 * 3 + 7 * 2
    assert set(OPERANDS_BY_PASS) == {"forward", "error", "weight"}


def test_costs_have_unit_and_source():
    assert list(COSTS) == ["bitops", "ace", "multiplier", "traffic", "energy"]
    for name, one in COSTS.items():
        assert one.name == name
        assert one.unit
        assert len(one.about) > 40
        assert one.source.startswith("ours: ") or any(
            word in one.source for word in ("arXiv", "ISSCC")
        )


@pytest.mark.parametrize("name", COSTS)
def test_costs_increase_with_bits(name):
    chains = [
        [Format.affine(q) for q in range(1, 24)],
        [Format.symmetric(q) for q in range(2, 24)],
        [Format.minifloat(4, m) for m in range(12)],
        [FORMATS["mxfp4"], FORMATS["mxfp6_e2m3"], FORMATS["bf16"], FORMATS["float32"]],
    ]
    for chain in chains:
        for other in (FORMATS["affine8"], FORMATS["e4m3"]):
            prices = [COSTS[name].product(f, other) for f in chain]
            assert prices[0] > 0
            assert all(low < high for low, high in pairwise(prices))


def test_ladder_bitops_equal_step_cost():
    for g in range(1, 33):
        of = AFFINE.cost("bitops", gradients=g)
        assert [of(q) * 1024 for q in range(1, 33)] == cost.step_cost(
            np.arange(1, 33), g
        ).tolist()
    assert AFFINE.cost()(4) * 1024 == cost.step_cost(
        4, 32
    )  # gradients at the highest level


@pytest.mark.parametrize("arm", ["CR", "RTH", "ETV"])
def test_relative_cost_by_bitops_equals_default(arm):
    schedule = make(arm, total_steps=12_345)
    plain = schedule.relative_cost()
    assert (
        schedule.relative_cost(cost="bitops")
        == schedule.relative_cost(cost="bitops", ladder=AFFINE)
        == plain
    )
    assert schedule.relative_cost(cost="ace") == plain
    assert schedule.relative_cost(6, 16, cost="bitops") == schedule.relative_cost(6, 16)


def test_relative_cost_on_ladder_matches_hand_values():
    schedule = quietly(make, "CR", q_min=4, total_steps=800)
    shares = {q: schedule.share_at(q) for q in range(4, 9)}
    significands = {4: 2, 5: 3, 6: 3, 7: 4, 8: 4}
    exponents = {4: 2, 5: 2, 6: 3, 7: 3, 8: 4}
    adders = {
        q: p * p + exponents[q] + 32 + 2 * (4 * p + 4 + 32)
        for q, p in significands.items()
    }
    expected = sum(shares[q] * adders[q] for q in shares) / adders[8]
    assert schedule.relative_cost(cost="multiplier", ladder=LADDER) == pytest.approx(
        expected
    )
    by_function = cost.relative_cost(schedule.bits(), 8, cost=LADDER.cost("multiplier"))
    assert by_function == schedule.relative_cost(cost="multiplier", ladder=LADDER)
    # bits, not levels, of the formats: a ladder alone is priced by BitOps
    mx = LADDERS["mx"]
    assert StaticSchedule(1, 10).relative_cost(q_max=4, ladder=mx) == (
        4 * 4 + 2 * 4 * 16
    ) / (3 * 16 * 16)


def test_ladder_cost_accepts_gradient_format():
    levels = (
        LADDER.cost("ace", gradients=6),
        LADDER.cost("ace", gradients="e3m2"),
        LADDER.cost("ace"),
    )
    assert [of(4) for of in levels] == [4 * 4 + 2 * 4 * 6] * 2 + [4 * 4 + 2 * 4 * 8]
    assert LADDER.cost("ace", gradients=FORMATS["bf16"])(4) == 4 * 4 + 2 * 4 * 16


def test_layered_schedule_cost_weights_groups():
    parts = (
        (("conv*",), StaticSchedule(4, 10), 30),
        (("fc",), StaticSchedule(8, 10), 10),
    )
    found = LayeredSchedule(parts).relative_cost(cost="traffic")
    assert found == pytest.approx(
        (30 * StaticSchedule(4, 10).relative_cost(4, 8, cost="traffic") + 10) / 40
    )
    assert 0.75 < found < 1


def test_role_schedules_cost_prices_operands():
    cycle = TableSchedule(((4, 3), (8, 1)))
    roles = RoleSchedules(
        weight=cycle, activation=StaticSchedule(8, 4), error=6, weight_gradient=8
    )
    # significands: 2 then 4, 4, 3, 4; exponents: 2 then 4, 4, 3, 4
    first = (4 * 2 + 4 + 32) + (3 * 2 + 3 + 32) + (4 * 4 + 4 + 32)
    last = (4 * 4 + 4 + 32) + (3 * 4 + 4 + 32) + (4 * 4 + 4 + 32)
    found = roles.relative_cost(cost="multiplier", ladder=LADDER)
    assert found == pytest.approx((3 * first + last) / 4 / (3 * (4 * 4 + 4 + 32)))
    assert roles.relative_cost(cost="ace") == pytest.approx(
        roles.relative_cost(), rel=1e-15
    )
    assert RoleSchedules(weight=cycle, activation=cycle, gradient=8).relative_cost(
        cost="energy"
    ) == pytest.approx(cycle.relative_cost(cost="energy"))
    refused("a function knows one level", roles.relative_cost, cost=lambda q: 1.0)


@pytest.mark.parametrize("spent", [{}, {"cost": "ace"}, {"ladder": AFFINE}])
def test_role_schedules_baseline_uses_q_max(spent):
    """Give the baseline gradients of q_max bits."""
    roles = RoleSchedules(
        weight=TableSchedule(((4, 3), (8, 1))), activation=8, error=6, weight_gradient=5
    )
    steps = [8 * w + 6 * w + 5 * 8 for w in (4, 4, 4, 8)]
    for q_max, q_grad in ((None, 4), (6, 4), (6, None)):
        top = q_max or 8
        assert roles.relative_cost(q_grad, q_max, **spent) == pytest.approx(
            sum(steps) / 4 / (3 * top * top)
        )


def test_delayed_schedule_prices_float32_phase():
    held = DelayedSchedule(quietly(make, "CR", total_steps=600), 200, 32)
    # 200 steps of float32 in all three products, then the cycle
    rest = quietly(make, "CR", total_steps=600).relative_cost(cost="energy")
    assert held.relative_cost(cost="energy") == pytest.approx(
        (200 * 4.6 * 3 / 0.9 + 600 * rest) / 800
    )
    assert held.relative_cost(cost="ace") == pytest.approx(
        held.relative_cost(), rel=1e-15
    )


@pytest.mark.parametrize("name", ["ace", "multiplier", "energy", "traffic"])
def test_solve_schedule_meets_named_budget(name):
    for ladder, q_min in ((None, 3), (LADDER, 4)):
        solved = quietly(
            solve_schedule, 0.95, q_min, 8, 6_400, cost=name, ladder=ladder
        )
        assert solved.relative_cost(cost=name, ladder=ladder) == pytest.approx(
            0.95, rel=1e-3
        )
    assert solve_schedule(0.7, 3, 8, 6_400, cost="ace") == solve_schedule(
        0.7, 3, 8, 6_400
    )


def test_costs_reject_unknown_names():
    listed = ", ".join(COSTS)
    schedule = StaticSchedule(8, 10)
    for call in (
        lambda: schedule.relative_cost(cost="flops"),
        lambda: solve_schedule(0.7, 3, 8, 640, cost="flops"),
        lambda: LADDER.cost("flops"),
        lambda: cost_named("flops"),
    ):
        refused(f"^unknown cost 'flops'; choose from {listed}$", call)
    for call in (
        lambda: schedule.relative_cost(cost="seconds"),
        lambda: solve_schedule(1, 3, 8, 9, cost="seconds"),
    ):
        refused(
            rf"choose from {listed}; for seconds give a function from bits to", call
        )
    refused(
        "cost must be a function, .*, or a name of COSTS; got 2",
        schedule.relative_cost,
        cost=2,
    )
    refused("unknown format 'e9'", LADDER.cost, "ace", gradients="e9")


def test_relative_cost_rejects_bad_ladders():
    with pytest.raises(
        ValueError,
        match="the ladder has a hole at level 3: its levels are 4, 5, 6, 7, 8",
    ):
        quietly(make, "CR", total_steps=800).relative_cost(cost="ace", ladder=LADDER)
    holed = FormatLadder({6: "e3m2", 8: "e4m3"})
    refused("hole at level 7", solve_schedule, 0.9, 6, 8, 640, cost="ace", ladder=holed)
    refused("hole at level 16", LADDER.cost, "ace", gradients=16)
    static = StaticSchedule(8, 10)
    refused(
        "a cost that is a function knows its formats",
        static.relative_cost,
        cost=lambda q: 1.0,
        ladder=LADDER,
    )
