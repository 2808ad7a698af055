"""Training steps in every backend: equal losses and weights, bit for bit."""

from contextlib import nullcontext

import pytest
import torch
from helpers import losses_of, make, pictures, quantize_gradient, refused
from torch import nn

from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.roles import Quantizer
from cpt_extras.kernels.backend import reference
from cpt_extras.kernels.operators import has_gradient_node


class Network(nn.Module):
    """Convolutions with a residual, normalisation, a shared linear layer and an LSTM."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
        )
        self.norm, self.shared = nn.BatchNorm2d(8), nn.Linear(48, 48)
        self.lstm, self.head = nn.LSTM(48, 5, bidirectional=True), nn.Linear(10, 4)

    def forward(self, x):
        x = self.conv1(x).relu()
        x = (
            (x + self.norm(self.conv2(x)))
            .relu()
            .transpose(0, 1)
            .flatten(2)
            .transpose(1, 2)
            .reshape(-1, len(x), 48)
        )
        return self.head(self.lstm(self.shared(self.shared(x).tanh()))[0])


def trained(how, config, steps, memory_format=torch.contiguous_format):
    """Return losses, weights, running ranges and keys after a run."""
    with reference() if how == "reference" else nullcontext():
        model = quantize_(Network().to(memory_format=memory_format), config)
        batches = [
            pictures(step).contiguous(memory_format=memory_format)
            for step in range(steps)
        ]
        schedule = make(q_max=6, total_steps=steps, n_cycles=4)
        losses = losses_of(
            model,
            schedule,
            lambda step: (model(batches[step]) - 0.3).square().mean(),
            steps,
            lr=0.05,
            momentum=0.9,
        )
    state = [
        b
        for layer in layer_precisions(model).values()
        for b in layer.get_running().values()
    ]
    return losses, [*(p.detach() for p in model.parameters()), *state]


@pytest.mark.parametrize(
    ("rounding", "memory_format"),
    [("nearest", torch.contiguous_format), ("stochastic", torch.channels_last)],
)
def test_cpp_training_is_bit_identical(cpp_kernels, rounding, memory_format):
    config = QuantConfig(seed=3).with_gradient_rounding(rounding)
    (a, first), (b, second) = (
        trained(how, config, 32, memory_format) for how in ("reference", "cpp")
    )
    assert a == b
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert a[-1] < a[0]


# --- gradients are rounded in place only where nobody else holds them -------------------------------------------------

LEVELS, STOCHASTIC = torch.tensor(3.0), Quantizer("per_tensor", rounding="stochastic")


def rounded(y):
    return quantize_gradient(y, LEVELS, STOCHASTIC, torch.tensor(5))


def hooked(x, seen):
    y = rounded(x * 2)
    y.register_hook(seen.append)
    return y * 3


def retained(x, seen):
    y = rounded(x * 2)
    y.retain_grad()
    (y * 3).sum().backward(retain_graph=True)
    x.grad = None
    seen.append(y.grad)
    return y * 3


def added(x, seen):
    other = x.sin()
    other.register_hook(seen.append)
    return rounded(x * 2) + other  # both are given one gradient


def reshaped(x, seen):
    other = x.sin().view(-1)
    other.register_hook(seen.append)
    return rounded(x * 2) + other.view(x.shape)


def expanded(x, seen):
    return rounded(x * 2).sum(0, keepdim=True)


def plain(x, seen):
    return rounded(x * 2) * 3


@pytest.mark.parametrize("use", [hooked, retained, added, reshaped, expanded, plain])
def test_gradient_rounding_preserves_shared_gradients(cpp_kernels, use):
    found = []
    for how in ("reference", "cpp"):
        with reference() if how == "reference" else nullcontext():
            x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
            assert has_gradient_node(x) == (how == "cpp")
            seen = []
            y = use(x, seen)
            upstream = torch.arange(float(y.numel())).view(y.shape)
            y.backward(upstream)
            assert torch.equal(upstream, torch.arange(float(y.numel())).view(y.shape))
            found.append([x.grad, *seen])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("use", [plain, hooked])
def test_gradient_rounding_reuses_unshared_memory(cpp_kernels, use):
    x = torch.randn(64, requires_grad=True)
    y = use(x, [])
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        y.sum().backward()
    names = [event.name for event in profile.events()]
    assert "RoundGradient" in names
    assert ("cpt::fake_quantize" in names) == (
        use is hooked
    )  # which would write to a new tensor


@pytest.mark.parametrize("bad", [torch.tensor(3.0, dtype=torch.float64), torch.ones(2)])
def test_fake_quantize_rejects_invalid_levels(cpp_kernels, bad):
    with pytest.raises(RuntimeError, match="levels must be one float32"):
        torch.ops.cpt.fake_quantize(torch.ones(3), bad, "per_tensor", None)


def test_fake_quantize_rejects_unknown_granularity():
    refused(
        "rows",
        torch.ops.cpt.fake_quantize,
        torch.ones(3),
        LEVELS,
        "rows",
        None,
        error=(KeyError, RuntimeError),
    )
