"""Sensitivity analysis: measured effect of one bit less, on a model that stays unchanged."""

import json
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from helpers import INF, FunctionModule, refused
from torch import nn
from torch.utils.checkpoint import checkpoint

from cpt_core.bitops.plan import count_bitops
from cpt_core.quantization import convert
from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.scheduler import precision
from cpt_extras.search.sensitivity_analysis import sensitivity
from cpt_extras.search.sensitivity_estimate import gradients_recorded
from cpt_extras.search.sensitivity_result import Sensitivity
from cpt_lab.experiments.registry import recipe
from cpt_lab.training.recipe_search import recipe_range_test, recipe_sensitivity
from tests.search.test_restartable import problem

SHORT = dict(base=3, windows=2, steps=8, seeds=(0, 1))


def test_sensitivity_lowers_one_bit_per_place(monkeypatch):
    """Run base, windows, groups and estimate in order; take the loss after them at q_max."""
    model, train_step, optimizer, seen = problem()
    names, used = ["0", "4"], []

    def watched(step):
        layers = layer_precisions(model)
        used.append(tuple(layers[n].bits for n in names))
        assert {layers[n].q_grad for n in names} == {8}
        return train_step(step)

    found = sensitivity(model, watched, optimizer, **{**SHORT, "seeds": (2,)})
    assert used.pop(0) == (8, 8)  # one step counts the work
    runs = [used[i * 9 : i * 9 + 9] for i in range(5)]
    low, base, top = (2, 2), (3, 3), [(8, 8)]
    assert runs == [
        [base] * 8 + top,
        [low] * 4 + [base] * 4 + top,
        [base] * 4 + [low] * 4 + top,
        [(2, 3)] * 8 + top,
        [(3, 2)] * 8 + top,
    ]
    assert used[45:] == [base] * 8  # the estimate
    assert seen[1:10] == list(
        range(18, 27)
    )  # batches from seed * (steps + tail) on, the same for all
    assert found.windows == ((0, 4), (4, 8))
    assert found.groups == (("0",), ("4",))


def test_sensitivity_lowers_one_bit_per_role():
    """Run all roles at the base after the groups, then one bit less in each role."""
    model, train_step, optimizer, _ = problem()
    used, answers = [], iter([0.9] * 5 + [0.5, 0.4, 0.3, 0.2])

    def watched(step):
        used.append({tuple(p.active_levels) for p in layer_precisions(model).values()})
        return train_step(step)

    options = {**SHORT, "seeds": (0,), "estimate": False, "roles": True}
    options["quality"] = lambda: next(answers)
    found = sensitivity(model, watched, optimizer, **options)
    runs = [used[1 + i * 8 : 9 + i * 8] for i in range(9)]
    assert runs[0] == [{(3, 3, 8, 8)}] * 8
    wanted = [
        (3, 3, 3, 3),
        (3, 2, 3, 3),
        (2, 3, 3, 3),
        (3, 3, 2, 2),
    ]  # as ``RoleLevels``: activation first
    assert runs[5:] == [[{levels}] * 8 for levels in wanted]
    assert found.in_roles == (pytest.approx((0.1, 0.2, 0.3)),)


def test_sensitivity_response_is_difference_to_base():
    model, train_step, optimizer, _ = problem()
    answers = iter([0.9, 0.7, 0.8, 0.85, 1.0, 0.5, 0.5, 0.4, 0.5, 0.6])
    options = {"quality": lambda: next(answers), "estimate": False, **SHORT}
    found = sensitivity(model, train_step, optimizer, **options)
    assert found.reference == (0.9, 0.5)
    assert found.in_windows == (pytest.approx((0.2, 0.1)), pytest.approx((0.0, 0.1)))
    assert found.in_groups == (pytest.approx((0.05, -0.1)), pytest.approx((0.0, -0.1)))
    assert found.quality == "quality"
    added = 4.0**-2 - 4.0**-3
    assert found.response("time")[0] == pytest.approx(
        np.array([0.2, 0.1]) / (4 * added)
    )
    assert found.response("layers")[0] == pytest.approx(
        np.array([0.05, -0.1]) / (8 * added)
    )
    mean, low, high = found.estimates("time")
    assert mean == pytest.approx(np.array([0.1, 0.1]) / (4 * added))
    assert high - mean == pytest.approx(
        np.array([12.706 * 0.1, 0]) / (4 * added), rel=1e-3, abs=1e-9
    )
    assert mean - low == pytest.approx(high - mean)


def test_sensitivity_counts_higher_loss_as_lost_quality():
    """Add 1 to the later loss per low step in layer "0", and 2 in layer "4"."""
    model, train_step, optimizer, _ = problem()
    harm = 0.0

    def harmed(step):
        nonlocal harm
        layers = layer_precisions(model)
        harm *= (
            step % 9 > 0
        )  # a training is 8 steps and one at q_max bits, whose loss counts
        harm += (layers["0"].bits == 2) + 2 * (layers["4"].bits == 2)
        train_step(step)
        return 1 + harm

    found = sensitivity(model, harmed, optimizer, estimate=False, **SHORT)
    assert (found.quality, found.reference) == ("loss", (1, 1))
    assert found.in_windows == ((4 * 3, 4 * 3),) * 2
    assert found.in_groups == ((8 * 1, 8 * 2),) * 2
    plan = count_bitops(model, (torch.zeros(32, 8),))
    assert found.macs == (plan.macs["0"], plan.macs["4"])


def test_sensitivity_keeps_training_mode_of_first_run():
    model, train_step, optimizer, _ = problem()
    modes = set()

    def watched(step):
        modes.add((model.training, model[1].training, model[3].training))
        return train_step(step)

    model[1].eval()  # statistics that stay
    before = [m.training for m in model.modules()]
    sensitivity(
        model, watched, optimizer, quality=lambda: float(model.eval().training), **SHORT
    )
    assert modes == {(True, False, True)}
    assert [m.training for m in model.modules()] == before


def test_sensitivity_groups_layers_by_count_or_patterns():
    model, train_step, optimizer, _ = problem()
    few = {
        "steps": 1,
        "windows": 1,
        "seeds": (0,),
        "estimate": False,
        "quality": lambda: 1.0,
    }
    cut = partial(sensitivity, model, train_step, optimizer, **few)
    for layers, groups in (
        (1, (("0", "4"),)),
        (("4", "*"), (("4",), ("0",))),
        ([("4", "0")], (("0", "4"),)),
    ):
        assert cut(layers=layers).groups == groups
    refused("layer '4' is in none of the groups; layers: 0, 4", cut, layers=("0",))
    refused(r"group \('0',\) has no layer that is left", cut, layers=("*", "0"))


@pytest.mark.slow
def test_recipe_sensitivity_uses_recipe_rate_and_validation():
    r = recipe("smoke", "digits")
    few = {"windows": 1, "layers": 2, "steps": 10, "seeds": (0,)}
    again = [recipe_sensitivity(r, estimate=e, **few) for e in (True, False)]
    assert (again[0].quality, again[0].steps, len(again[0].groups)) == (
        "accuracy",
        10,
        2,
    )
    assert again[0].in_windows == again[1].in_windows  # the same run is the same number
    assert 0 < again[0].reference[0] <= 1
    assert np.shape(again[0].estimated) == (1, 2)
    assert again[1].estimated == ()
    assert Sensitivity.from_dict(json.loads(json.dumps(again[0].to_dict()))) == again[0]
    other = recipe_sensitivity(r, estimate=False, metric="loss", **few)
    assert other.quality == "loss"
    assert other.reference[0] != again[0].reference[0]


def test_sensitivity_marks_diverged_trainings_but_needs_base():
    model, train_step, optimizer, _ = problem()
    layer = model[0]

    def breaks(step):
        return train_step(step) * (float("nan") if layer.precision.bits == bad else 1)

    bad = 2
    found = sensitivity(
        model, breaks, optimizer, estimate=False, **{**SHORT, "seeds": (0,)}
    )
    assert np.isnan(found.in_windows).all()
    assert np.isnan(found.in_groups[0]).tolist() == [True, False]
    bad = 3
    refused(
        "training diverges at 3 bits; take a higher base",
        sensitivity,
        model,
        breaks,
        optimizer,
        **SHORT,
    )


def test_sensitivity_estimate_of_hand_computed_layer():
    """Compute g**2 range**2 / 12 times the learning rate, over weights and inputs."""
    layer = nn.Linear(2, 1, bias=False)
    model = convert.quantize_(nn.Sequential(layer))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 3.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recorded = defaultdict(float)
    x = torch.tensor([[0.0, 4.0], [2.0, 1.0]], requires_grad=True)
    for layer_precision in layer_precisions(model).values():
        layer_precision.set_bits(None, None)
    with gradients_recorded(model, optimizer, recorded):
        model(x).sum().backward()
    weights = (2.0**2 + 5.0**2) * 2.0**2  # gradients 2 and 5, range 1..3 of the row
    inputs = (
        2 * (1.0**2 + 3.0**2) * 4.0**2
    )  # gradients 1 and 3 in both rows, range 0..4
    assert recorded["0"] == pytest.approx(0.5 * (weights + inputs) / 12)
    model(x).sum().backward()  # outside nothing is recorded
    assert recorded["0"] == pytest.approx(0.5 * (weights + inputs) / 12)


def training_step(model, optimizer, x):
    """Return a function that trains one step on the same input."""

    def step(_):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_sensitivity_covers_intercepted_matmuls():
    torch.manual_seed(0)
    parts = {
        "attention": nn.MultiheadAttention(8, 2, batch_first=True),
        "out": nn.Linear(8, 2),
    }
    model = FunctionModule(
        lambda m, x: m.out(m.attention(x, x, x, need_weights=False)[0]), **parts
    )
    x = torch.randn(3, 5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    found = sensitivity(
        model,
        training_step(model, optimizer, x),
        optimizer,
        base=4,
        windows=1,
        steps=4,
        seeds=(0,),
        estimate=True,
    )
    assert found.groups == (("attention",), ("attention.out_proj",), ("out",))
    assert found.macs == (15 * 8 * 24 + 2 * 3 * 5 * 5 * 8, 15 * 8 * 8, 15 * 8 * 2)
    assert found.estimated[0][0] > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("block", ["linear", "attention"])
def test_sensitivity_counts_checkpointed_macs_once(block, use_reentrant):
    def measured(run):
        torch.manual_seed(0)
        parts = {"first": nn.Linear(8, 8), "last": nn.Linear(8, 8)}
        if block == "linear":
            parts["block"] = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        else:
            parts["block"] = FunctionModule(lambda _, x: (x @ x.mT).softmax(-1) @ x)
        model = FunctionModule(lambda m, x: m.last(run(m.block, m.first(x))), **parts)
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 5, 8)

        step = training_step(model, optimizer, x)
        return sensitivity(
            model, step, optimizer, windows=1, steps=4, seeds=(0,), estimate=False
        )

    plain = measured(lambda block, x: block(x))
    checkpointed = measured(partial(checkpoint, use_reentrant=use_reentrant))
    assert checkpointed.groups == plain.groups
    assert checkpointed.macs == plain.macs


def estimated(model, rates, x):
    groups = [
        {"params": list(m.parameters()), "lr": rate}
        for m, rate in zip(model, rates, strict=True)
    ]
    recorded = defaultdict(float)
    with (
        precision(model, 8, 8),
        gradients_recorded(model, torch.optim.SGD(groups), recorded),
    ):
        (
            model[1](model[0](x))[0] if len(model) == 2 else model(x)
        ).square().sum().backward()
    return recorded


def test_sensitivity_estimate_uses_rates_of_parameter_groups():
    torch.manual_seed(0)
    model = convert.quantize_(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    )
    x = torch.randn(8, 4)
    even, last = estimated(model, (1, 1, 1), x), estimated(model, (1, 1, 5), x)
    assert [last[n] / even[n] for n in "012"] == pytest.approx(
        [1, 1, 5], rel=0.05
    )  # the rounding noise differs


def test_sensitivity_estimate_has_lstm_ranges_per_step():
    torch.manual_seed(0)
    model, x = (
        convert.quantize_(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 3))),
        torch.randn(5, 6, 4),
    )
    inputs, gradients = [], []

    def seen(module, given):
        inputs.append(given[0].detach())
        given[0].register_hook(gradients.append)

    model[1].register_forward_pre_hook(seen)
    found = estimated(model, (1, 1), x)["1"]
    pairs = [
        (inputs[0], gradients[0], (1, 2)),
        *((w.detach(), w.grad, (1,)) for w in model[1].all_weights[0][:2]),
    ]
    expected = (
        sum(
            (g * (x.amax(dims, True) - x.amin(dims, True))).square().sum()
            for x, g, dims in pairs
        )
        / 12
    )
    assert found == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"base": 9},
            "base, up to q_max, must be a whole number of at least 2 and at most 8, got 9",
        ),
        ({"windows": 9}, "windows, at most one a step, must be .* at most 8, got 9"),
        ({"seeds": 3}, "seeds must name at least one, as .* does; got 3"),
        ({"seeds": (1, 0, 1)}, "seeds must differ"),
        ({"seeds": (-1,)}, "each of seeds must be a whole number of at least 0"),
        ({"layers": [0, 4]}, "layers must be a whole number, or patterns"),
        ({"quality": "accuracy"}, "quality must be a function without arguments"),
    ],
)
def test_sensitivity_rejects_invalid_arguments_before_training(changes, message):
    model, train_step, optimizer, seen = problem()
    refused(message, sensitivity, model, train_step, optimizer, **{**SHORT, **changes})
    assert not seen


@pytest.mark.parametrize("value", [None, "half", torch.ones(2)])
def test_sensitivity_rejects_non_numeric_loss_and_quality(value):
    model, train_step, optimizer, _ = problem()
    measure = partial(sensitivity, model, optimizer=optimizer, **SHORT)
    message = "train_step must return the loss, one number; got"
    refused(message, measure, lambda step: (train_step(step), value)[1])
    message = "what is larger when better, one number; got"
    refused(message, measure, train_step, quality=lambda: value)


def test_sensitivity_rejects_infinite_quality():
    model, train_step, optimizer, _ = problem()
    message = "diverges at 3 bits.* or quality= gave no finite number"
    given = model, train_step, optimizer
    refused(message, sensitivity, *given, quality=lambda: INF, **SHORT)


def test_recipe_sensitivity_rejects_unsupported_recipes():
    digits = recipe("smoke", "digits")
    plateau = recipe("paper", "ptb", task="language_model")
    refused("waits for evaluations", recipe_sensitivity, plateau, **SHORT)
    measure = partial(recipe_sensitivity, digits, **SHORT)
    refused("quality", measure, quality=lambda: 1.0, error=TypeError)
    message = "unknown metric 'perplexity'; choose from accuracy, loss"
    refused(message, measure, metric="perplexity")
    for measure in (recipe_sensitivity, recipe_range_test):
        refused("recipe must be Recipe, got 'digits'", measure, "digits")
