"""Non-finite values in quantised layers: all execution modes agree on them, layer by layer.

A cell is a layer, its steps (the authors' or shared ones) and a place: numbers of the input, the weight or the gradient
that are huge, infinite or NaN. Every cell is evaluated, and trained for a step, in every way of running.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from helpers import INF, NAN, normal
from quantization.test_int8 import attention
from torch import nn

import cpt_core as cpt
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization.convert import layer_precisions
from cpt_extras.kernels.backend import reference

GRAPH = Graph.from_edges(torch.arange(30) * 7 % 10, torch.arange(30) * 3 % 10, 10)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(12, 8), (10, 12)),
    "sequence": (lambda: nn.Linear(12, 8), (4, 5, 12)),
    "convolution": (lambda: nn.Conv2d(3, 5, 3, padding=1), (2, 3, 6, 7)),
    "strided": (lambda: nn.Conv2d(3, 5, 3, padding=1, stride=2), (2, 3, 7, 7)),
    "LSTM": (lambda: nn.LSTM(6, 5), (4, 3, 6)),
    "attention": (attention, (2, 5, 12)),
    "GCN": (lambda: GraphConv(6, 9), (10, 6)),
    "SAGE": (lambda: SAGEConv(9, 6), (10, 9)),
}
SIZES = 1e20, 1e30, 3e38, INF, -INF, NAN
PLACES = [
    ((where,), size) for where in ("input", "weight", "gradient") for size in SIZES
] + [
    (pair, size)
    for pair in (("input", "weight"), ("gradient", "weight"))
    for size in (1e20, 1e30)
]
# Sums that are beyond float32 in both directions: inf - inf, or one of them, as the order of the terms has it.
OVERFLOW = "a gate is a sum of terms beyond float32 of both signs: NaN, or saturated as the first of them says"
UNDECIDED = {("LSTM", ("input", "weight"), size): OVERFLOW for size in (1e20, 1e30)}
# Positive numbers, and whether codes may give up earlier: there, where the sum of an operand alone is beyond float32.
POSITIVE = [
    ((where, "positive"), size)
    for where in ("input", "gradient")
    for size in (1e35, 1e38, 3e38)
]
NEAR_THE_END = 1e38
WAYS = [
    (products, kernels)
    for products in ("simulated", "integer")
    for kernels in ("active", "reference")
]


def disturbed(x, size):
    """Return numbers of both signs up to a size, or one non-finite number among them."""
    x = x.clone()
    if math.isfinite(size):
        return x.mul_(size / float(x.abs().max()))
    x.view(-1)[3] = size
    return x


def call(model, x):
    layer = model[0]
    y = layer(GRAPH, x) if isinstance(layer, (GraphConv, SAGEConv)) else layer(x)
    return y[0] if isinstance(y, tuple) else y


def cells(name, products, shared, places):
    """Yield named results of every place: of evaluation with stored ranges, and of a training step."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    config = cpt.QuantConfig(execution=products, aggregation="quantized")
    config = config.with_shared_steps() if shared else config
    model = cpt.quantize_(
        nn.Sequential(make()), config, filter_fn=lambda module, name: name == "0"
    )  # no part of it
    precisions = layer_precisions(model).values()
    weight = next(p for p in model.parameters() if p.dim() > 1)
    sound, x = weight.detach().clone(), normal(*shape)
    with cpt.precision(model, 8, q_grad=8):
        upstream = normal(*call(model, x).shape)
        kept = [p.get_running() for p in precisions]
        for where, size in places:
            given, w, g = (
                disturbed(v.abs() if "positive" in where else v, size)
                if part in where
                else v.clone()
                for part, v in (("input", x), ("weight", sound), ("gradient", upstream))
            )
            for p, running in zip(precisions, kept, strict=True):
                p.set_running(running)
            with torch.no_grad():
                weight.copy_(w)
                evaluated = call(model.eval(), given)
            model.zero_grad()
            y = call(model.train(), given.requires_grad_())
            y.backward(g)
            grads = {
                n: p.grad for n, p in model.named_parameters() if p.grad is not None
            }
            yield {"evaluation": evaluated, "output": y, "input": given.grad, **grads}


def losses(name, products, kernels, shared, places=PLACES):
    """Return masks of non-finite values by place and name."""
    with reference() if kernels == "reference" else nullcontext():
        found = cells(name, products, shared, places)
        return {
            place: {part: ~x.isfinite() for part, x in of.items()}
            for place, of in zip(places, found, strict=True)
        }


def lost(masks):
    return {part for part, mask in masks.items() if mask.any()}


@pytest.mark.filterwarnings("ignore:this device")
@pytest.mark.parametrize(
    "shared", [True, False], ids=["shared steps", "authors' steps"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_non_finite_values_agree_across_execution_modes(name, shared):
    expected = losses(name, *WAYS[0], shared)
    assert (
        4 < sum(bool(lost(masks)) for masks in expected.values()) < len(PLACES)
    )  # both verdicts are there
    for way in (
        WAYS[1:] if shared else (("integer", "active"),)
    ):  # whose kernels differ, their steps do not tell
        found = losses(name, *way, shared)
        for where, size in PLACES:
            there, here = expected[where, size], found[where, size]
            if (name, where, size) not in UNDECIDED:
                assert lost(here) == lost(there), (way, where, size)
            if not math.isfinite(
                size
            ):  # then no number may stand where the simulation has none; large sums may cancel
                made = [
                    part for part, mask in there.items() if (mask & ~here[part]).any()
                ]
                assert made == [], (way, where, size)


@pytest.mark.filterwarnings("ignore:this device")
@pytest.mark.parametrize(
    "shared", [True, False], ids=["shared steps", "authors' steps"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_int8_overflows_earlier_only_near_float32_max(name, shared):
    """Overflow to non-finite values no later than the simulation does."""
    expected, found = (
        losses(name, p, "active", shared, POSITIVE) for p in ("simulated", "integer")
    )
    for place in POSITIVE:
        there, here = lost(expected[place]), lost(found[place])
        assert there <= here if place[1] >= NEAR_THE_END else there == here, place


@pytest.mark.filterwarnings("ignore:this device")
@pytest.mark.parametrize(("products", "kernels"), WAYS)
def test_lstm_nan_hidden_state_reaches_outputs(products, kernels):
    """Propagate NaN in a hidden state that the caller passes."""
    model = cpt.quantize_(
        nn.Sequential(nn.LSTM(6, 5)),
        cpt.QuantConfig(execution=products).with_shared_steps(),
    )
    x, hidden, cell = normal(4, 3, 6), normal(1, 3, 5).tanh(), normal(1, 3, 5)
    with (
        reference() if kernels == "reference" else nullcontext(),
        cpt.precision(model, 8),
    ):
        model[0](x, (hidden, cell))
        model.eval()
        assert model[0](x, (hidden, cell))[0].isfinite().all()
        hidden[0, 1, 2] = math.nan
        assert model[0](x, (hidden, cell))[0][:, 1].isnan().all()


@pytest.mark.filterwarnings("ignore:this device")
@pytest.mark.parametrize("execution", ["simulated", "integer"])
def test_infinity_becomes_nan_or_clips_to_range(execution):
    """Return NaN with a dynamic range and the range's end with a stored one."""
    x = torch.tensor([[0.5, 1.0, 2.0]])
    for size in (INF, -INF, NAN):
        bad = torch.tensor([[0.5, 1.0, size]])
        assert cpt.quantize(bad, 8).isnan().all()
        layer = cpt.quantize_(
            nn.Sequential(nn.Linear(3, 2)), cpt.QuantConfig(execution=execution)
        )
        with cpt.precision(layer, 8):
            layer(x)
            y = layer.eval()(bad)
            assert (
                y.isnan().all()
                if math.isnan(size)
                else torch.equal(y, layer(bad.clamp(-9, 9)))
            )
