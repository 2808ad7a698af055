"""Training steps in every backend: equal losses and weights, bit for bit."""

from contextlib import nullcontext

import pytest
import torch
from helpers import losses_of, make, pictures, quantize_gradient
from torch import nn

from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.roles import Quantizer
from cpt_extras.kernels.backend import reference
from cpt_extras.kernels.operators import has_gradient_node

STEPS = 12
BACKENDS = {"reference": reference, "cpp": nullcontext}


class Network(nn.Module):
    """Convolutions with a residual, normalisation, a shared linear layer and an LSTM."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm, self.shared = nn.BatchNorm2d(8), nn.Linear(48, 48)
        self.lstm, self.head = nn.LSTM(48, 5, bidirectional=True), nn.Linear(10, 4)

    def forward(self, x):
        x = self.conv1(x).relu()
        x = (x + self.norm(self.conv2(x))).relu()
        steps = x.permute(1, 2, 3, 0).reshape(-1, len(x), 48)
        return self.head(self.lstm(self.shared(self.shared(steps).tanh()))[0])


def train(backend, config, memory_format):
    """Return losses, and weights, running ranges and noise keys after a run."""
    with BACKENDS[backend]():
        network = Network().to(memory_format=memory_format)
        model = quantize_(network, config)
        schedule = make(q_max=6, total_steps=STEPS, n_cycles=2)

        def loss(step):
            batch = pictures(step).contiguous(memory_format=memory_format)
            return (model(batch) - 0.3).square().mean()

        losses = losses_of(model, schedule, loss, STEPS, lr=0.05, momentum=0.9)
    states = [p.get_running() for p in layer_precisions(model).values()]
    ranges = [value for state in states for value in state.values()]
    return losses, [*model.parameters(), *ranges]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounding", "memory_format"),
    [("nearest", torch.contiguous_format), ("stochastic", torch.channels_last)],
)
def test_cpp_training_is_bit_identical(cpp_kernels, rounding, memory_format):
    config = QuantConfig(seed=3).with_gradient_rounding(rounding)
    losses, state = train("cpp", config, memory_format)
    expected_losses, expected_state = train("reference", config, memory_format)
    assert losses == expected_losses
    assert all(map(torch.equal, state, expected_state))
    assert losses[-1] < losses[0]


# --- gradients are rounded in place only where nobody else holds them ----------------------------


def round_gradient(y):
    quantizer = Quantizer("per_tensor", rounding="stochastic")
    return quantize_gradient(y, torch.tensor(3.0), quantizer, torch.tensor(5))


def plain(x, gradients):
    return round_gradient(x * 2) * 3


def with_hook(x, gradients):
    y = round_gradient(x * 2)
    y.register_hook(gradients.append)
    return y * 3


def retained(x, gradients):
    y = round_gradient(x * 2)
    y.retain_grad()
    (y * 3).sum().backward(retain_graph=True)
    x.grad = None
    gradients.append(y.grad)
    return y * 3


def shared_with_sum(x, gradients):
    other = x.sin()
    other.register_hook(gradients.append)
    return round_gradient(x * 2) + other  # both are given one gradient


def shared_with_view(x, gradients):
    other = x.sin().view(-1)
    other.register_hook(gradients.append)
    return round_gradient(x * 2) + other.view(x.shape)


def expanded(x, gradients):
    return round_gradient(x * 2).sum(0, keepdim=True)


USES = plain, with_hook, retained, shared_with_sum, shared_with_view, expanded


@pytest.mark.parametrize("use", USES)
def test_gradient_rounding_preserves_shared_gradients(cpp_kernels, use):
    results = []
    for name, backend in BACKENDS.items():
        x, gradients = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(), []
        with backend():
            assert has_gradient_node(x) == (name == "cpp")
            y = use(x, gradients)
            upstream = torch.arange(float(y.numel())).view(y.shape)
            before = upstream.clone()
            y.backward(upstream)
        assert torch.equal(upstream, before)
        results.append([x.grad, *gradients])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("use", "is_copied"), [(plain, False), (with_hook, True)])
def test_gradient_rounding_reuses_unshared_memory(cpp_kernels, use, is_copied):
    y = use(torch.randn(64, requires_grad=True), [])
    with torch.profiler.profile() as profile:
        y.sum().backward()
    names = [event.name for event in profile.events()]
    assert "RoundGradient" in names
    assert ("cpt::fake_quantize" in names) == is_copied
