"""Bit allocation: budgets are met, equal sensitivities give static precision, no exchange of bits improves it."""

import itertools
import json

import numpy as np
import pytest
from helpers import INF, NAN, refused
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from cpt_core.schedules import cost
from cpt_core.schedules.schedule import RoleLevels
from cpt_extras.formats.ladder import LADDERS
from cpt_extras.search.allocation import (
    BUDGET_TOLERANCE,
    allocate,
    spread_bits,
    static_of_cost,
)
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.layered import LayeredSchedule
from cpt_extras.search.role_schedules import RoleSchedules
from cpt_extras.search.sensitivity_result import FLOOR, Sensitivity

WINDOWS, GROUPS = 8, 3
MACS = (100, 50, 3)


def measured(
    time=(1.0,) * WINDOWS,
    layers=MACS,
    steps=320,
    noise=0.0,
    seeds=1,
    macs=MACS,
    **changes,
):
    """Return a sensitivity with known responses and noise of alternating sign per seed."""
    n = len(time)
    spans = tuple((steps * i // n, steps * (i + 1) // n) for i in range(n))
    signs = [(-1) ** s * noise for s in range(seeds)]
    time, layers = np.array(time, dtype=float), np.array(layers, dtype=float)
    values = dict(
        title="made up",
        quality="accuracy",
        base=4,
        steps=steps,
        windows=spans,
        groups=tuple((f"layer{i}",) for i in range(len(layers))),
        macs=tuple(macs),
        seeds=tuple(range(seeds)),
        reference=(0.8,) * seeds,
        in_windows=tuple(tuple(time + e) for e in signs),
        in_groups=tuple(tuple(layers + e) for e in signs),
    )
    return Sensitivity(**{**values, **changes})


problems = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.01, 100), min_size=n, max_size=n).map(np.array),
        st.lists(st.integers(1, 50), min_size=n, max_size=n).map(
            lambda m: np.array(m, dtype=float)
        ),
        st.lists(st.integers(20, 60), min_size=n, max_size=n).map(np.array),
        st.floats(0.0, 1.0),
    )
)


def exchange_sums(counts, layer_weights, bit_weights, up, down):
    """Return a weighted sum over steps, and that after every exchange of a step up and one down."""
    gain = np.outer(layer_weights, np.diff(bit_weights))
    total = float(layer_weights @ counts @ bit_weights)
    return total, total + gain[tuple(up.T)][:, None] - gain[tuple(down.T)]


@given(problems)
@settings(max_examples=20)
def test_spread_bits_meets_budget_without_better_exchange(problem):
    """Find no exchange of one bit that lowers the noise within the budget."""
    weights, macs, steps, share = problem
    bits = np.arange(2, 9)
    prices, noises = (bits**2 + 2 * bits * 8) / (8**2 + 2 * 8 * 8), 4.0**-bits
    budget = prices[0] + share * (1 - prices[0])
    try:
        counts = spread_bits(weights, macs, steps, budget, prices, noises)
    except ValueError as problem:  # of all work in a few steps, one in a hundred
        if "steps are too few" not in str(problem):
            raise
        reject()
    assert (counts.sum(1) == steps).all()
    assert (counts >= 0).all()
    # a step may leave q upwards, and q + 1 downwards
    up, down = np.argwhere(counts[:, :-1]), np.argwhere(counts[:, 1:])
    layer_costs = macs / (macs * steps).sum()
    spent, costs = exchange_sums(counts, layer_costs, prices, up, down)
    noise, noises = exchange_sums(counts, weights, noises, up, down)
    assert budget * (1 - BUDGET_TOLERANCE) - 1e-12 <= spent <= budget + 1e-12
    is_only_step = counts[tuple(up.T)] == 1
    is_same_step = (up[:, None] == down + np.array([0, 1])).all(-1)
    is_possible = ~(is_same_step & is_only_step[:, None])
    is_met = (budget * (1 - BUDGET_TOLERANCE) <= costs) & (costs <= budget)
    assert (noises[is_met & is_possible] >= noise * (1 - 1e-9)).all()


@given(
    st.integers(2, 8),
    st.integers(16, 3000),
    st.sampled_from(["time", "layers", "both"]),
    st.integers(1, 8),
)
@settings(max_examples=20)
def test_allocate_equal_responses_gives_static_precision(bits, steps, over, q_grad):
    level = cost.relative_cost([bits], 8, q_grad)
    found = allocate(measured(steps=steps), level, 2, 8, over, q_grad=q_grad)
    assert (found.bits() == bits).all()
    if over != "time":
        assert (found.by_group() == bits).all()


@given(st.lists(st.floats(0.05, 20), min_size=3, max_size=3), st.floats(0.2, 1.0))
@settings(max_examples=20)
def test_allocate_over_roles_beats_fixed_role_bits(lost, budget):
    s = measured(in_roles=(tuple(lost),))
    found = allocate(s, budget, 2, 8, "roles")
    assert (
        budget * (1 - BUDGET_TOLERANCE) - 1e-12
        <= found.relative_cost(q_max=8)
        <= budget + 1e-12
    )
    every = np.array(list(itertools.product(range(2, 9), repeat=3)))
    w, a, g = every.T
    affordable = (a * w + g * w + g * a) / 192 <= found.relative_cost(q_max=8) + 1e-12
    loss = s.steps * (4.0**-every @ s.weights("roles"))
    assert s.predicted_quality_loss(found) <= loss[affordable].min() * (1 + 1e-9)


def test_allocate_gives_sensitive_roles_more_bits():
    s = measured(in_roles=((4.0, 1.0, 16.0),))
    fixed = allocate(s, 0.3, 2, 8, "roles")
    assert isinstance(fixed, RoleSchedules)
    mean = RoleLevels(*(x.mean() for x in fixed.levels()))
    assert mean.weight_gradient == mean.error > mean.weight > mean.activation
    everywhere = allocate(
        s, 0.3, 2, 8, "all"
    )  # layers and windows are alike: as over roles
    assert everywhere.relative_cost(q_max=8) == pytest.approx(0.3, rel=BUDGET_TOLERANCE)
    for _, schedule, _ in everywhere.parts:
        assert [x.mean() for x in schedule.levels()] == pytest.approx(
            list(mean), abs=0.1
        )
    later = allocate(
        measured(time=[1] * 7 + [16.0], in_roles=s.in_roles), 0.3, 2, 8, "all"
    ).parts[0][1]
    assert all(bits[280:].mean() > bits[:280].mean() for bits in later.levels())


def test_allocate_gives_sensitive_steps_more_bits():
    """Give more bits to sensitive steps, to sensitive layers, and to both at once."""
    s = measured(
        time=[1] * 7 + [16.0],
        layers=[m * r for m, r in zip(MACS, (1, 1, 16), strict=True)],
        steps=3_200,
    )
    over_time = allocate(s, 80 / 192, 2, 8, "time").bits()
    early, late = over_time[:2_800].mean(), over_time[2_800:].mean()
    assert 1.0 < late - early <= 2.0  # log4(16) = 2, less as higher bits cost more
    layers = allocate(s, 80 / 192, 2, 8, "layers").by_group().mean(1)
    assert layers[0] == pytest.approx(layers[1], abs=1e-2)
    assert 1.0 < layers[2] - layers[0] <= 2.0
    both = allocate(s, 80 / 192, 2, 8, "both").by_group()
    assert both[2, 2_800:].mean() > both[0, 2_800:].mean() > both[0, :2_800].mean()
    assert (both.min(), both.max()) == (3, 7)


def test_static_of_cost_interleaves_two_precisions_evenly():
    bits = static_of_cost(
        92.5 / 192, 8, 200
    ).bits()  # half way between 4 (80) and 5 (105)
    assert sorted(np.bincount(bits)[4:].tolist()) == [100, 100]
    assert np.abs(np.convolve(bits - 4.5, np.ones(10), "valid")).max() <= 1
    schedule = static_of_cost(0.45, 8, 64)
    assert (
        0.45 <= schedule.relative_cost(8, 8) <= 0.45 + 25 / 192 / 64
    )  # never less than the budget
    assert static_of_cost(80 / 192, 8, 64).to_dict() == {
        "kind": "static",
        "q_max": 4,
        "total_steps": 64,
    }


def test_sensitivity_weights_shrink_noise_toward_the_mean():
    """Allocate static precision if noise alone explains the spread of responses."""
    time = np.array([1.0, 4.0, 0.5, 2.0, 1.0, 0.5, 2.0, 1.0])
    exact, noisy = measured(time=time, seeds=2), measured(time=time, seeds=2, noise=2.0)
    assert np.ptp(exact.weights("time")) == pytest.approx(
        np.ptp(exact.estimates("time")[0])
    )
    assert np.ptp(noisy.weights("time")) == pytest.approx(0, abs=1e-9)
    between = measured(time=time, seeds=2, noise=0.5)  # a standard error of 0.5 in each
    spread = np.var(time) - 0.5**2
    expected = time.mean() + spread / (spread + 0.5**2) * (time - time.mean())
    assert between.weights("time") == pytest.approx(expected / (40 * between.added))
    assert (allocate(noisy, 80 / 192, 2, 8, "time").bits() == 4).all()
    assert not (allocate(exact, 80 / 192, 2, 8, "time").bits() == 4).all()


def test_sensitivity_weights_bound_negative_and_diverged_responses():
    s = measured(time=[-3.0] + [1.0] * 7, layers=(NAN, 50, 9))
    time, layers = s.weights("time"), s.weights("layers")
    assert time[0] == pytest.approx(FLOOR * s.uniform_response("time")[0])
    assert time[1] > time[0] > 0
    per_mac = 3 / (320 * s.added)  # of the third, the largest; the second has 1
    assert layers / MACS == pytest.approx([per_mac, per_mac / 3, per_mac])
    assert measured(layers=(INF, 50, 9)).weights("layers").tolist() == layers.tolist()
    shown = str(s).splitlines()
    assert shown[2].startswith("steps 0 to 39")
    assert shown[2].endswith("floor")
    assert any(
        line.startswith("layer0") and line.endswith("diverged") for line in shown
    )


@pytest.mark.parametrize(
    ("layers", "finding"),
    [
        ((1, 500, 9), "A bit less costs most in layer1"),
        (MACS, "No layer stands out"),
        ((NAN, 500, 9), "Training diverges with a bit less in layer0"),
        ((-1, -90, -9), "No layer stands out"),  # nothing is lost in all together
    ],
)
def test_sensitivity_figure_title_states_finding(layers, finding):
    figure = measured(layers=layers, seeds=2, noise=0.1).figure()
    assert figure.get_suptitle().startswith(f"{finding}\n")


def test_sensitivity_json_round_trip():
    s = measured(
        time=[1.0] * 7 + [NAN],
        estimated=((1.0, 2.0, 3.0),) * WINDOWS,
        in_roles=((1.0, 2.0, NAN),),
    )
    text = json.dumps(s.to_dict(), allow_nan=False)
    again = Sensitivity.from_dict(json.loads(text))
    assert np.isnan(again.in_windows[0][-1])
    assert again.to_dict() == s.to_dict()
    assert len(s.figure().axes) == 3
    shown = str(measured(in_roles=s.in_roles)).splitlines()[-3:]
    assert [line[:15].strip() for line in shown] == s.places("roles")
    older = {name: value for name, value in s.to_dict().items() if name != "in_roles"}
    assert Sensitivity.from_dict(older).in_roles == ()


BITS = np.array(
    [[3, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6, 7], [8, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 5]]
)
TABLES = [TableSchedule(tuple((int(q), 1) for q in row)) for row in BITS]


def test_sensitivity_promised_loss_sums_steps_and_layers():
    s = measured(time=(1, 2, 5), layers=(100, 20), macs=(100, 10), steps=12)
    over_time = np.repeat([1, 2, 5], 4) / (8 / 3)  # relative to their mean
    by_layer = np.array([100, 20]) / (12 * s.added)
    lost = by_layer * (4.0**-BITS @ over_time)
    parts = tuple(zip(s.groups, TABLES, s.macs, strict=True))
    layered = LayeredSchedule(parts)
    assert s.predicted_quality_loss(layered) == pytest.approx(lost.sum())
    # the same bits in both layers, of which the second one is a fifth
    assert s.predicted_quality_loss(TABLES[0]) == pytest.approx(lost[0] * 1.2)


def test_sensitivity_promised_loss_sums_roles():
    s = measured(steps=12, time=(1, 2, 5), in_roles=((1.0, 2.0, 3.0),))
    weight = TABLES[0]
    roles = RoleSchedules(weight=weight, activation=4, gradient=5)
    noise = np.array([(4.0 ** -BITS[0]).sum(), 12 * 4.0**-4, 12 * 4.0**-5])
    expected = noise @ [1, 2, 3] / (12 * s.added)
    assert s.predicted_quality_loss(roles) == pytest.approx(expected)
    apart = RoleSchedules(weight=weight, activation=4, error=5, weight_gradient=6)
    message = "both gradients were measured together"
    refused(message, s.predicted_quality_loss, apart)
    message = "what layers and roles lose together is not known"
    layered = LayeredSchedule(((("*",), roles, 1),))
    refused(message, s.predicted_quality_loss, layered)


def test_sensitivity_agreement_with_estimate():
    rising, falling = (tuple((x * m,) * 1 for x in range(1, 9)) for m in (1, -1))
    one = dict(layers=(5.0,), macs=(10,), time=range(1, 9))
    assert measured(**one, estimated=rising).agreement("time") == pytest.approx(1)
    assert measured(**one, estimated=falling).agreement("time") == pytest.approx(-1)
    assert np.isnan(measured(**one).agreement("time"))
    # by layers both are per MAC: 1, 4 and 9 measured, 0.5, 4 and 2 estimated
    layers = measured(layers=(100, 200, 27), estimated=((50.0, 200.0, 6.0),) * WINDOWS)
    assert layers.agreement("layers") == pytest.approx(0.5)


DIVERGED = "diverged with one bit less than 4 in every place.*measure at a higher base"


@pytest.mark.parametrize(
    ("change", "responses", "said"),
    [
        (dict(budget=0.05), {}, "budgets lie between 0.1875 and 1"),
        (
            dict(budget=0.9, q_min=8, q_max=8),
            {},
            "budget 0.9 cannot be met: q_min and q_max are both 8, and static",
        ),
        (dict(q_min=9), {}, "1 <= q_min <= q_max"),
        (
            dict(over="roles", q_grad=6),
            {},
            "gradients have bits of their own; leave q_grad out, got 6",
        ),
        (dict(total_steps=4), {}, "4 steps are too few for 8 windows"),
        (
            dict(total_steps=9, budget=0.451),
            {},
            "9 steps are too few to cost 0.451 to 0.1 %",
        ),
        (
            dict(over="all"),
            {},
            r"a role was not measured; ask for it: sensitivity\(\.\.\., roles=True\)",
        ),
        (
            dict(
                budget=0.9, q_min=3, q_max=5, cost={3: 2.0, 4: 1.0, 5: 3.0}.__getitem__
            ),
            {},
            "more bits must cost more",
        ),
        (
            {},
            dict(time=[-1.0] * WINDOWS),
            "one bit less than 4 costs no accuracy over time",
        ),
        ({}, dict(time=[NAN, INF] * 4), DIVERGED),
        (dict(over="layers"), dict(layers=[NAN] * 3), DIVERGED),
    ],
)
def test_allocate_rejects_invalid_arguments(change, responses, said):
    given = {**dict(budget=0.5, q_min=2, q_max=8, over="time"), **change}
    refused(said, allocate, measured(**responses), **given)


def test_sensitivity_rejects_invalid_places():
    """Reject non-sensitivities in allocate and lengths below 1 in static_of_cost."""
    message = r"cpt.search.sensitivity returned, or Sensitivity.from_dict\(...\)"
    refused(message, allocate, {}, 0.5, 2, 8)
    message = "unknown over 'both'; choose from time, layers, roles$"
    refused(message, measured().response, "both")
    message = "total_steps must be .* at least 1, got 0"
    refused(message, static_of_cost, budget=0.5, q_max=8, total_steps=0)


@pytest.mark.parametrize("over", ["time", "layers", "both", "roles", "all"])
@pytest.mark.parametrize(
    ("spent", "q_min", "q_max", "steps"),
    [
        ({}, 2, 8, 64),
        ({"cost": "energy"}, 3, 8, 6_400),
        ({"cost": {q: 2.0**q for q in range(3, 9)}.__getitem__}, 3, 8, None),
        ({"ladder": LADDERS["minifloat"]}, 4, 8, None),
        ({"ladder": LADDERS["mx"], "cost": "ace"}, 1, 4, None),
    ],
)
def test_allocate_meets_budget_in_any_cost(over, spent, q_min, q_max, steps):
    lowest = cost.relative_cost([q_min], q_max, **spent)
    budget = lowest + 0.4 * (1 - lowest)
    s = measured(time=range(1, WINDOWS + 1), in_roles=((1.0, 2.0, 3.0),))
    given = s, budget, q_min, q_max, over
    if over in ("roles", "all") and callable(spent.get("cost")):
        refused("roles .* are priced by the name of a cost", allocate, *given, **spent)
        return
    schedule = allocate(*given, total_steps=steps, **spent)
    assert schedule.total_steps == (steps or 320)
    assert (
        budget * (1 - BUDGET_TOLERANCE)
        <= schedule.relative_cost(q_max, q_max, **spent)
        <= budget + 1e-12
    )
    even = static_of_cost(budget, q_max, 320, q_min, **spent)
    assert even.relative_cost(q_max, q_max, **spent) == pytest.approx(budget, rel=0.01)
