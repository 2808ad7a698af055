"""Non-finite values in quantised layers: all ways to execute agree, layer by layer.

A case is a layer, its steps (the authors' or shared ones) and places where numbers are
huge, infinite or NaN: input, weight or gradient. Every case is evaluated, and trained
for a step, in every way.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from helpers import INF, NAN, normal
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

import cpt_core as cpt
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization.convert import layer_precisions
from cpt_extras.kernels.backend import reference

GRAPH = Graph.from_edges(torch.arange(30) * 7 % 10, torch.arange(30) * 3 % 10, 10)
ATTENTION = BertConfig(
    hidden_size=12,
    num_attention_heads=3,
    attention_probs_dropout_prob=0.0,
    attn_implementation="eager",
)
LAYERS = {  # name -> layer, shape of its input
    "linear": (lambda: nn.Linear(12, 8), (10, 12)),
    "sequence": (lambda: nn.Linear(12, 8), (4, 5, 12)),
    "convolution": (lambda: nn.Conv2d(3, 5, 3, padding=1), (2, 3, 6, 7)),
    "strided": (lambda: nn.Conv2d(3, 5, 3, padding=1, stride=2), (2, 3, 7, 7)),
    "LSTM": (lambda: nn.LSTM(6, 5), (4, 3, 6)),
    "attention": (lambda: BertSelfAttention(ATTENTION), (2, 5, 12)),
    "GCN": (lambda: GraphConv(6, 9), (10, 6)),
    "SAGE": (lambda: SAGEConv(9, 6), (10, 9)),
}
OPERANDS = ("input", "weight", "gradient")
SIZES = (1e20, 1e30, 3e38, INF, -INF, NAN)
PLACES = [((operand,), size) for operand in OPERANDS for size in SIZES]
PLACES += [
    ((operand, "weight"), size)
    for operand in ("input", "gradient")
    for size in (1e20, 1e30)
]
# A gate is a sum of terms beyond float32 of both signs: NaN, or saturated, depending
# on their order.
UNDECIDED = [("LSTM", ("input", "weight"), size) for size in (1e20, 1e30)]
# int8 may overflow earlier where the sum of an operand alone is beyond float32
POSITIVE_PLACES = [
    ((operand, "positive"), size)
    for operand in ("input", "gradient")
    for size in (1e35, 1e38, 3e38)
]
NEAR_FLOAT32_MAX = 1e38


def disturb(x, size):
    """Return numbers of both signs up to a size, or one non-finite number in them."""
    x = x.clone()
    if math.isfinite(size):
        return x.mul_(size / float(x.abs().max()))
    x.view(-1)[3] = size
    return x


def call(model, x):
    layer = model[0]
    y = layer(GRAPH, x) if isinstance(layer, (GraphConv, SAGEConv)) else layer(x)
    return y[0] if isinstance(y, tuple) else y


def kernels(name):
    return reference() if name == "reference" else nullcontext()


def non_finite_masks(name, execution, has_shared_steps, places=PLACES):
    """Return {place: {result: mask of non-finite values}}.

    Results are those of evaluation with stored ranges, and of a training step.
    """
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    config = cpt.QuantConfig(execution=execution, aggregation="quantized")
    if has_shared_steps:
        config = config.with_shared_steps()
    layer_only = lambda module, name: name == "0"  # noqa: E731
    model = cpt.quantize_(nn.Sequential(make()), config, filter_fn=layer_only)
    layers = layer_precisions(model).values()
    weight = next(p for p in model.parameters() if p.dim() > 1)
    masks = {}
    with cpt.precision(model, 8, q_grad=8):
        x = normal(*shape)
        tensors = {"input": x, "weight": weight.detach().clone()}
        tensors["gradient"] = normal(*call(model, x).shape)
        states = [p.get_running() for p in layers]
        for operands, size in places:
            values = dict(tensors)
            for operand in {*operands} - {"positive"}:
                value = tensors[operand]
                is_positive = "positive" in operands
                values[operand] = disturb(value.abs() if is_positive else value, size)
            for p, state in zip(layers, states, strict=True):
                p.set_running(state)
            with torch.no_grad():
                weight.copy_(values["weight"])
                results = {"evaluation": call(model.eval(), values["input"])}
            model.zero_grad()
            x = values["input"].clone().requires_grad_()
            y = call(model.train(), x)
            y.backward(values["gradient"])
            results |= {"output": y, "input": x.grad}
            results |= {n: p.grad for n, p in model.named_parameters()}
            masks[operands, size] = {
                result: ~tensor.isfinite()
                for result, tensor in results.items()
                if tensor is not None
            }
    return masks


def lost_results(masks):
    """Return the names of results with any non-finite value."""
    return {name for name, mask in masks.items() if mask.any()}


steps = pytest.mark.parametrize(
    "has_shared_steps", [True, False], ids=["shared steps", "authors' steps"]
)


@pytest.mark.slow
@steps
@pytest.mark.parametrize("name", LAYERS)
def test_non_finite_values_agree_across_execution_modes(name, has_shared_steps):
    expected = non_finite_masks(name, "simulated", has_shared_steps)
    num_lost = sum(bool(lost_results(masks)) for masks in expected.values())
    assert 4 < num_lost < len(PLACES)
    ways = [("integer", "active")]
    if has_shared_steps:  # the authors' steps play no part in kernels
        ways += [("simulated", "reference"), ("integer", "reference")]
    for execution, backend in ways:
        with kernels(backend):
            found = non_finite_masks(name, execution, has_shared_steps)
        for (operands, size), masks in expected.items():
            case, other = (execution, backend, operands, size), found[operands, size]
            if (name, operands, size) not in UNDECIDED:
                assert lost_results(other) == lost_results(masks), case
            # large sums may cancel, but no number may stand for a non-finite one
            if not math.isfinite(size):
                for result, mask in masks.items():
                    assert not (mask & ~other[result]).any(), (case, result)


@steps
@pytest.mark.parametrize("name", LAYERS)
def test_int8_overflows_earlier_only_near_float32_max(name, has_shared_steps):
    """Overflow to non-finite values no later than the simulation does."""
    simulated, int8 = (
        non_finite_masks(name, execution, has_shared_steps, POSITIVE_PLACES)
        for execution in ("simulated", "integer")
    )
    for place in POSITIVE_PLACES:
        expected, found = lost_results(simulated[place]), lost_results(int8[place])
        if place[1] >= NEAR_FLOAT32_MAX:
            assert expected <= found, place
        else:
            assert expected == found, place


@pytest.mark.parametrize("execution", ["simulated", "integer"])
@pytest.mark.parametrize("backend", ["active", "reference"])
def test_lstm_nan_hidden_state_reaches_outputs(execution, backend):
    """Propagate NaN in a hidden state that the caller passes."""
    config = cpt.QuantConfig(execution=execution).with_shared_steps()
    model = cpt.quantize_(nn.Sequential(nn.LSTM(6, 5)), config)
    x, hidden, cell = normal(4, 3, 6), normal(1, 3, 5).tanh(), normal(1, 3, 5)
    with kernels(backend), cpt.precision(model, 8):
        model[0](x, (hidden, cell))
        model.eval()
        assert model[0](x, (hidden, cell))[0].isfinite().all()
        hidden[0, 1, 2] = NAN
        assert model[0](x, (hidden, cell))[0][:, 1].isnan().all()


@pytest.mark.parametrize("size", [INF, -INF, NAN])
@pytest.mark.parametrize("execution", ["simulated", "integer"])
def test_infinity_becomes_nan_or_clips_to_range(execution, size):
    """Return NaN with a dynamic range and the range's end with a stored one."""
    x, bad = torch.tensor([[0.5, 1.0, 2.0]]), torch.tensor([[0.5, 1.0, size]])
    assert cpt.quantize(bad, 8).isnan().all()
    layer = nn.Sequential(nn.Linear(3, 2))
    cpt.quantize_(layer, cpt.QuantConfig(execution=execution))
    with cpt.precision(layer, 8):
        layer(x)
        y = layer.eval()(bad)
        if math.isnan(size):
            assert y.isnan().all()
        else:
            assert torch.equal(y, layer(bad.clamp(-9, 9)))
