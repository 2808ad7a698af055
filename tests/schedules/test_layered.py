"""A schedule for every group of layers: its costs are weighted by work."""

import pytest

from cpt_core.schedules.layered import LayeredSchedule
from cpt_core.schedules.schedule import StaticSchedule, TableSchedule

PARTS = (
    (("conv*",), StaticSchedule(4, 10), 30),
    (("fc", "head.*"), TableSchedule(((4, 5), (8, 5))), 10),
)


def test_costs_are_weighted_by_work():
    s = LayeredSchedule(PARTS)
    assert s.relative_cost(8) == pytest.approx((30 * 80 + 10 * (80 + 192) / 2) / (40 * 192))
    assert s.relative_cost(8, q_max=4) == pytest.approx(
        (30 * 80 + 10 * (80 + 192) / 2) / (40 * 48)
    )  # gradients of the baseline: 4 bits
    assert s.noise_exposure() == pytest.approx((30 * 256 + 10 * (256 + 1) / 2) / 40)
    assert s.share_at(4) == pytest.approx(30 / 40 + 10 / 40 / 2)
    assert (s.q_min, s.q_max, s.total_steps) == (4, 8, 10)


def test_bits_are_the_highest_and_at_those_of_each():
    s = LayeredSchedule(PARTS)
    assert s.bits().tolist() == [4] * 5 + [8] * 5
    assert s.at(7) == {"conv*": 4, "fc": 8, "head.*": 8}
    assert s.by_group().tolist() == [[4] * 10, [4] * 5 + [8] * 5]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((), "needs groups of layers"),
        ((((), StaticSchedule(4, 10), 1),), "each with a pattern"),
        ((PARTS[0], PARTS[0]), "'conv\\*' is in two groups"),
        ((PARTS[0], (("fc",), StaticSchedule(4, 9), 1)), r"one length, got \[9, 10\]"),
        (((("fc",), StaticSchedule(4, 9), 0),), "MACs of a group must be a whole number of at least 1, got 0"),
        (((("fc",), LayeredSchedule(PARTS), 1),), "not layered itself"),
        (((("fc",), 4, 1),), "not layered itself, got 4"),
    ],
)
def test_groups_that_make_no_schedule_are_refused(parts, said):
    with pytest.raises(ValueError, match=said):
        LayeredSchedule(parts)
