"""Layers fused into one C++ operator, against the plain path: equal bits, and fallback."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.op_interception import OP_EXECUTORS
from cpt_core.quantization.roles import QUANTIZERS, Quantizer
from cpt_core.quantization.scheduler import precision

pytestmark = pytest.mark.usefixtures("cpp_kernels")


class Attention(nn.Module):
    """Self-attention with transposed projection weights, as in GPT-2."""

    def __init__(self, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6)) if bias else None

    def forward(self, x):
        rows = x.flatten(0, 1)
        if self.bias is None:
            projected = rows @ self.weight
        else:
            projected = torch.addmm(self.bias, rows, self.weight)
        q = projected.view(x.shape)
        scores = (q @ x.mT / 3).softmax(-1)
        return nn.functional.scaled_dot_product_attention(q, x, x) + scores @ q


LINEAR, CONV = partial(nn.Linear, 6, 5), partial(nn.Conv2d, 4, 6, 3)
ALL_OPTIONS = {"stride": 2, "padding": (1, 2), "dilation": (1, 2), "groups": 2}
LAYERS = {
    "attention": (Attention, (3, 4, 6)),
    "linear": (LINEAR, (7, 6)),
    "linear of sequences": (LINEAR, (3, 4, 6)),
    "linear of a vector": (LINEAR, (6,)),
    "conv2d": (CONV, (3, 4, 7, 6)),
    "conv2d with all": (partial(nn.Conv2d, 4, 6, (3, 2), **ALL_OPTIONS), (3, 4, 7, 6)),
    "conv2d without batch": (CONV, (4, 7, 6)),
    "conv2d reflecting": (
        partial(CONV, padding=1, padding_mode="reflect"),
        (3, 4, 7, 6),
    ),
    "conv2d same": (partial(CONV, padding="same"), (3, 4, 7, 6)),
}
TYPICAL_LAYERS = "linear", "conv2d", "attention"


def with_quantizers(quantizer, *roles):
    return QuantConfig(quantizers=QUANTIZERS | dict.fromkeys(roles, quantizer))


POSITIONS = {
    role: Quantizer("per_position", quantizer.rounding)
    for role, quantizer in QUANTIZERS.items()
    if role.endswith("_grad")
}
RUNNING = Quantizer("per_tensor", running=True)
SAMPLE_MEAN = Quantizer("per_sample_mean")
CONFIGS = {
    "authors": QuantConfig(seed=3),
    "nearest": QuantConfig().with_gradient_rounding("nearest"),
    "shared steps": QuantConfig(running_start="zero").with_shared_steps(),
    "positions": QuantConfig(quantizers=QUANTIZERS | POSITIONS),
    "running weights": with_quantizers(RUNNING, "linear_weight", "conv_weight"),
    "sample means": with_quantizers(SAMPLE_MEAN, "linear_input", "conv_input"),
}
EXECUTORS = [("simulated", name) for name in ("linear", "conv2d", "matmul")]


@contextmanager
def plain_path():
    """Disable fused layers inside a block."""
    fused_executors = {key: OP_EXECUTORS.pop(key) for key in EXECUTORS}
    try:
        yield
    finally:
        OP_EXECUTORS.update(fused_executors)


@pytest.fixture
def fused(monkeypatch):
    """Return a list that collects the results of fused layers."""
    results = []

    def record(executor, *args):
        y = executor(*args)
        if y is not None:
            results.append(y)
        return y

    for key in EXECUTORS:
        monkeypatch.setitem(OP_EXECUTORS, key, partial(record, OP_EXECUTORS[key]))
    return results


def plainly(layer, x):
    return layer(x)


def train(make, shape, config, needs, bits, use):
    """Return outputs and gradients of three steps, and the running ranges of the layer.

    Args:
        make: function that returns a layer.
        shape: shape of its input.
        config: how to quantise it.
        needs: whether input, weight and bias require gradients.
        bits: bits of operands and gradients.
        use: function that calls the layer.
    """
    torch.manual_seed(0)
    layer = quantize_(nn.Sequential(make()), config)
    leaves = [torch.randn(shape), *layer.parameters()]
    for leaf, needs_gradient in zip(leaves, needs, strict=False):
        leaf.requires_grad_(needs_gradient)
    results = []
    with precision(layer, *bits):
        for _ in range(3):
            y = use(layer, leaves[0])
            results.append(y.detach())
            if y.requires_grad:
                weights = torch.linspace(-1, 2, y.numel()).view(y.shape)
                (y.square() * weights).sum().backward()
                results += [t.grad for t in leaves if t.requires_grad]
                leaves[0].grad = None
                layer.zero_grad()
    states = [p.get_running() for p in layer_precisions(layer).values()]
    return results + [value for state in states for value in state.values()]


def check_layer(make, shape, config=None, needs=(True,) * 3, bits=(4, 6), use=plainly):
    """Check that a layer trains alike on the plain path."""
    args = make, shape, config or QuantConfig(), needs, bits, use
    results = train(*args)
    with plain_path():
        expected = train(*args)
    for found, plain in zip(results, expected, strict=True):
        assert torch.equal(found, plain)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("bias", [True, False])
def test_fused_layers_match_plain_path(name, config, bias, fused):
    make, shape = LAYERS[name]
    check_layer(partial(make, bias=bias), shape, CONFIGS[config])
    has_other_ranges = config in ("running weights", "sample means")
    is_plain = name == "conv2d same" or (has_other_ranges and name != "attention")
    assert bool(fused) != is_plain


@pytest.mark.parametrize(
    "needs",
    [(False, True, True), (True, False, False), (True, True, False), (False,) * 3],
)
@pytest.mark.parametrize("bits", [(4, 6), (4, None), (32, 6), (2, 32)])
@pytest.mark.parametrize("name", TYPICAL_LAYERS)
def test_fused_layers_match_for_needed_gradients(name, bits, needs, fused):
    make, shape = LAYERS[name]
    check_layer(partial(make, bias=True), shape, needs=needs, bits=bits)
    assert bool(fused) == (bits[0] != 32)


def checkpointed(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def checkpointed_reentrantly(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def on_channels_last(layer, x):
    return layer(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x)


def on_gaps(layer, x):
    return layer(torch.stack([x, x], -1)[..., 0])


def without_gradient(layer, x):
    with torch.no_grad():
        return layer(x)


def in_inference_mode(layer, x):
    with torch.inference_mode():
        return layer(x).clone()


def differentiated_twice(layer, x):
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return gradient


def under_autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


def counted(layer, x):
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
    return y + counter.get_total_flops()


def evaluated(layer, x):
    return layer.eval()(x)


def shared(layer, x):
    return layer(x).sum() + layer(x * 2).sum()


def changed_in_place(layer, x):
    return layer(x).mul_(2).relu_()


def changed_by_view(layer, x):
    y = layer(x)
    y[..., :2].mul_(3)
    return y


def with_hooks(layer, x):
    y, gradients = layer(x), []
    y.register_hook(lambda gradient: gradients.append(gradient.clone()))
    y.retain_grad()
    (y * 3).sum().backward(retain_graph=True)
    x.grad = None
    return y + sum(gradients) + y.grad


def differentiated_by_output(layer, x):
    y = layer(x)
    gradients = torch.autograd.grad(y.square().sum(), (y, x), retain_graph=True)
    return y + sum(g.sum() for g in gradients)


def with_two_backward_passes(layer, x):
    y = layer(x)
    y.sum().backward(retain_graph=True)
    return y


def on_half_precision(layer, x):
    return layer(x.half()).float()


USES = [
    checkpointed,
    checkpointed_reentrantly,
    on_channels_last,
    on_gaps,
    without_gradient,
    in_inference_mode,
    differentiated_twice,
    under_autocast,
    counted,
    evaluated,
    shared,
    changed_in_place,
    changed_by_view,
    with_hooks,
    differentiated_by_output,
    with_two_backward_passes,
    on_half_precision,
]


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", [*TYPICAL_LAYERS, "linear of sequences"])
def test_fused_layers_match_for_every_use(name, use, fused):
    make, shape = LAYERS[name]
    check_layer(partial(make, bias=True), shape, use=use)
    assert bool(fused) != (use in (evaluated, counted))


def test_observer_receives_every_operand(fused):
    layer, roles = quantize_(nn.Sequential(nn.Linear(6, 5))), []
    layer[0].precision.observer = lambda role, x, rows: roles.append(role)
    with precision(layer, 4, 6):
        layer(torch.randn(7, 6, requires_grad=True)).sum().backward()
    assert roles == ["bias", "input", "weight", "grad"]
    assert not fused


def test_fused_layers_skip_forward_mode_gradients(fused):
    layer = quantize_(nn.Sequential(nn.Linear(6, 5)))
    with precision(layer, 4, 6), forward_ad.dual_level():
        layer(torch.randn(7, 6))
    assert not fused
