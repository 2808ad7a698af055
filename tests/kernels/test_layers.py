"""Layers fused into one C++ operator, against the plain path: equal bits, and fallback."""

from contextlib import contextmanager

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
        projected = (
            rows @ self.weight
            if self.bias is None
            else torch.addmm(self.bias, rows, self.weight)
        )
        q = projected.view(x.shape)
        return (
            nn.functional.scaled_dot_product_attention(q, x, x)
            + (q @ x.mT / 3).softmax(-1) @ q
        )


LAYERS = {
    "attention": (Attention, (3, 4, 6)),
    "linear": (lambda bias: nn.Linear(6, 5, bias=bias), (7, 6)),
    "linear of sequences": (lambda bias: nn.Linear(6, 5, bias=bias), (3, 4, 6)),
    "linear of a vector": (lambda bias: nn.Linear(6, 5, bias=bias), (6,)),
    "conv2d": (lambda bias: nn.Conv2d(4, 6, 3, bias=bias), (3, 4, 7, 6)),
    "conv2d with all": (
        lambda bias: nn.Conv2d(
            4, 6, (3, 2), stride=2, padding=(1, 2), dilation=(1, 2), groups=2, bias=bias
        ),
        (3, 4, 7, 6),
    ),
    "conv2d without batch": (lambda bias: nn.Conv2d(4, 6, 3, bias=bias), (4, 7, 6)),
    "conv2d reflecting": (
        lambda bias: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", bias=bias),
        (3, 4, 7, 6),
    ),
    "conv2d same": (
        lambda bias: nn.Conv2d(4, 6, 3, padding="same", bias=bias),
        (3, 4, 7, 6),
    ),
}
POSITIONS = {
    k: Quantizer("per_position", q.rounding)
    for k, q in QUANTIZERS.items()
    if k.endswith("_grad")
}
RUNNING_WEIGHTS = {
    k: Quantizer("per_tensor", running=True) for k in ("linear_weight", "conv_weight")
}
SAMPLE_MEANS = {k: Quantizer("per_sample_mean") for k in ("linear_input", "conv_input")}
CONFIGS = {
    "authors": QuantConfig(seed=3),
    "nearest": QuantConfig().with_gradient_rounding("nearest"),
    "shared steps": QuantConfig(running_start="zero").with_shared_steps(),
    "positions": QuantConfig(quantizers={**QUANTIZERS, **POSITIONS}),
    "running weights": QuantConfig(quantizers={**QUANTIZERS, **RUNNING_WEIGHTS}),
    "sample means": QuantConfig(quantizers={**QUANTIZERS, **SAMPLE_MEANS}),
}


EXECUTED = [("simulated", name) for name in ("linear", "conv2d", "matmul")]


@contextmanager
def plain_path():
    """Disable fused layers inside a block."""
    fused = {key: OP_EXECUTORS.pop(key) for key in EXECUTED}
    try:
        yield
    finally:
        OP_EXECUTORS.update(fused)


@pytest.fixture
def fused(monkeypatch):
    """Return a list that collects the results of fused layers."""
    results = []

    def recording(executor):
        def run(*args):
            y = executor(*args)
            if y is not None:
                results.append(y)
            return y

        return run

    for key in EXECUTED:
        monkeypatch.setitem(OP_EXECUTORS, key, recording(OP_EXECUTORS[key]))
    return results


def trained(make, shape, config, needs=(True, True, True), bits=(4, 6), use=None):
    """Return outputs and gradients of three steps, and the running ranges of the layer."""
    torch.manual_seed(0)
    layer = quantize_(nn.Sequential(make), config)
    parameters = list(layer.parameters())
    for parameter, need in zip(parameters, needs[1:], strict=False):
        parameter.requires_grad_(need)
    x = torch.randn(shape).requires_grad_(needs[0])
    held = [t for t in (x, *parameters) if t.requires_grad]
    found = []
    with precision(layer, *bits):
        for _ in range(3):
            y = layer(x) if use is None else use(layer, x)
            found.append(y.detach())
            if y.requires_grad:
                weights = torch.linspace(-1, 2, y.numel()).view(y.shape)
                (y.square() * weights).sum().backward()
                found += [t.grad for t in held]
                x.grad = None
                layer.zero_grad()
    return found + [
        v for p in layer_precisions(layer).values() for v in p.get_running().values()
    ]


def equal(make, *args, **kwargs):
    """Return whether the layer of ``make`` trains alike on the plain path."""
    torch.manual_seed(1)
    ours = trained(make(), *args, **kwargs)
    torch.manual_seed(1)
    with plain_path():
        plain = trained(make(), *args, **kwargs)
    return len(ours) == len(plain) and all(
        torch.equal(a, b) for a, b in zip(ours, plain, strict=True)
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("bias", [True, False])
def test_fused_layers_match_plain_path(name, config, bias, fused):
    make, shape = LAYERS[name]
    assert equal(lambda: make(bias), shape, CONFIGS[config])
    assert (not fused) == (
        name == "conv2d same"
        or (name != "attention" and config in ("running weights", "sample means"))
    )


@pytest.mark.parametrize(
    "needs",
    [(False, True, True), (True, False, False), (True, True, False), (False,) * 3],
)
@pytest.mark.parametrize("bits", [(4, 6), (4, None), (32, 6), (2, 32)])
@pytest.mark.parametrize("name", ["linear", "conv2d", "attention"])
def test_fused_layers_match_for_needed_gradients(name, bits, needs, fused):
    make, shape = LAYERS[name]
    assert equal(lambda: make(True), shape, QuantConfig(), needs, bits)
    assert (not fused) == (bits[0] == 32)


def checkpointed(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def checkpointed_reentrantly(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def channels_last(layer, x):
    return layer(x.contiguous(memory_format=torch.channels_last))


def with_gaps(layer, x):
    return layer(torch.stack([x, x], -1)[..., 0])


def without_gradient(layer, x):
    with torch.no_grad():
        return layer(x)


def for_inference(layer, x):
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


def written_to(layer, x):
    return layer(x).mul_(2).relu_()


def viewed_and_written_to(layer, x):
    y = layer(x)
    y[..., :2].mul_(3)
    return y


def watched(layer, x):
    y, seen = layer(x), []
    y.register_hook(lambda gradient: seen.append(gradient.clone()))
    y.retain_grad()
    (y * 3).sum().backward(retain_graph=True)
    x.grad = None
    return y + sum(seen) + y.grad


def differentiated_by_output(layer, x):
    y = layer(x)
    gradients = torch.autograd.grad(y.square().sum(), (y, x), retain_graph=True)
    return y + sum(g.sum() for g in gradients)


def with_two_backward_passes(layer, x):
    y = layer(x)
    y.sum().backward(retain_graph=True)
    return y


def of_half_numbers(layer, x):
    return layer(x.half()).float()


USES = [
    written_to,
    viewed_and_written_to,
    watched,
    differentiated_by_output,
    with_two_backward_passes,
    of_half_numbers,
    checkpointed,
    checkpointed_reentrantly,
    channels_last,
    with_gaps,
    without_gradient,
    for_inference,
    differentiated_twice,
    under_autocast,
    counted,
    evaluated,
    shared,
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["linear", "conv2d", "attention"])
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_fused_layers_match_for_every_use(name, use, fused):
    make, shape = LAYERS[
        "linear of sequences" if name == "linear" and use is with_gaps else name
    ]
    if use is channels_last and name != "conv2d":
        pytest.skip("pictures only")
    assert equal(lambda: make(True), shape, QuantConfig(), use=use)
    assert (not fused) == (use in (evaluated, counted))


def test_observer_receives_every_operand(fused):
    layer, seen = quantize_(nn.Sequential(nn.Linear(6, 5))), []
    layer[0].precision.observer = lambda role, x, rows: seen.append(role)
    with precision(layer, 4, 6):
        layer(torch.randn(7, 6, requires_grad=True)).sum().backward()
    assert seen == ["bias", "input", "weight", "grad"]
    assert not fused


def test_fused_layers_skip_forward_mode_gradients(fused):
    layer = quantize_(nn.Sequential(nn.Linear(6, 5)))
    with precision(layer, 4, 6), forward_ad.dual_level():
        layer(torch.randn(7, 6))
    assert not fused


def test_fused_layers_wait_for_first_gradient(fused):
    """Take the plain path in a scheduled layer until a gradient has arrived."""
    layer = quantize_(nn.Sequential(nn.Linear(6, 5)))
    layer[0].precision.set_bits(4, 6)
    counts = []
    for _ in range(3):
        layer(torch.randn(7, 6)).sum().backward()
        counts.append(len(fused))
    assert counts == [0, 1, 2]
