"""What notebook 09 prints and draws, on costs that are known."""

import pytest
from torch import nn

from cpt_core.inspecting.measured import MeasuredCost, Spent
from cpt_core.schedules.make import make_schedule
from cpt_lessons import seconds


def two_speeds(fast=1.0, slow=2.0):
    steps = {q: Spent(fast if q <= 8 else slow, 1, 1.0) for q in range(3, 17)}
    return MeasuredCost("a machine", 8, "paper", steps, {"0": steps, "2": steps})


def test_a_budget_is_spent_where_fewer_bits_take_fewer_seconds(capsys):
    seconds.spend(two_speeds(), 0.8, ((3, 8), (4, 16)), total_steps=6_400)
    low, high = capsys.readouterr().out.splitlines()
    assert low == "3 to 8 bits: budget 0.8 cannot be met: a step at 3 bits costs 1.0000 of one at 8"
    assert high.startswith("4 to 16 bits: 0.800 of the seconds of static 16, 0.")
    assert high.endswith(" of its BitOps; 60 % of the steps above 8 bits")


def test_the_suite_has_both_costs():
    found = seconds.suite_in_seconds(two_speeds(), ((3, 8), (4, 16)), total_steps=6_400)
    assert len(found) == 10
    row = found.set_index("schedule").loc["RR"]
    wide = make_schedule("RR", q_min=4, q_max=16, total_steps=6_400)
    assert row["seconds, 3 to 8"] == "1.000"
    assert row["seconds, 4 to 16"] == f"{(1 + (wide.bits() > 8).mean()) / 2:.3f}"
    assert row["4 to 16 bits: BitOps"] == f"{wide.relative_cost(8):.3f}"


@pytest.mark.parametrize(("codes", "operand"), [(True, 1), (False, 4)])
def test_a_layer_s_intensity_by_hand(codes, operand):
    points = seconds._points("linear", "smoke", two_speeds(fast=0.5), 8, codes)
    rows = seconds.SIZES["smoke"][0]
    x, w, y = rows * 384, 384 * 1536, rows * 1536  # of the first layer: no error product
    moved = operand * (x + w) + 4 * y + operand * (x + y) + 4 * w
    assert points["0"] == pytest.approx((4 * rows * w / moved, 4 * rows * w / 0.5))
    moved = operand * 2 * (y + w + x) + 4 * (y + w + x)  # of the second, whose inputs are y and outputs x
    assert points["2"] == pytest.approx((6 * rows * w / moved, 6 * rows * w / 0.5))


def test_the_fastest_of_several_measurements_counts_for_every_width():
    busy, quiet = two_speeds(fast=1.0, slow=5.0), two_speeds(fast=1.5, slow=2.0)
    found = seconds.fastest([busy, quiet])
    assert (found.seconds(8), found.seconds(9)) == (1.0, 2.0)
    assert found.layers["2"][9] == quiet.layers["2"][9]
    assert found.bits == busy.bits


def test_every_way_has_its_line(monkeypatch):
    monkeypatch.setitem(seconds.SIZES, "smoke", (4, 2))
    monkeypatch.setitem(seconds.REPEATS, "smoke", 1)
    table = seconds.ways("linear", "smoke", bits=(3, 8))
    assert table.iloc[:, 0].tolist() == ["float32", "bfloat16 autocast", *(w for w in seconds.WAYS for _ in (3, 8))]
    saved = table.set_index([table.columns[0], "bits"])["saved MiB"].astype(float)
    assert saved["on codes, shared steps", "3"] == saved["on codes, shared steps", "8"] < saved["simulated", "8"]
    assert (table["of float32"].iloc[0], table["saved of float32"].iloc[0]) == ("1.00", "1.00")
    ms, ratios = table["ms"].astype(float), table["of float32"].astype(float)
    assert ratios.to_numpy() == pytest.approx(ms / ms[0], abs=0.05 / ms[0] * (1 + ratios.max()) + 0.005)


@pytest.mark.parametrize("kind", seconds.KINDS)
def test_networks_are_the_same_every_time(kind):
    first, again = (seconds.network(kind, "smoke") for _ in range(2))
    assert first[1][0].equal(again[1][0])
    assert all(a.equal(b) for a, b in zip(first[0].parameters(), again[0].parameters(), strict=True))
    assert isinstance(first[0], nn.Sequential)


@pytest.mark.parametrize(("each", "expected"), [(0, 7), (6, 3), (100, 1)])
def test_no_round_begins_when_enough_seconds_are_over(monkeypatch, each, expected):
    now = iter(range(0, 10_000, each)) if each else iter(lambda: 0, 1)
    monkeypatch.setattr(seconds.time, "monotonic", lambda: next(now))
    monkeypatch.setitem(seconds.ENOUGH, "smoke", 15)
    assert list(seconds.rounds("smoke")) == list(range(expected))
