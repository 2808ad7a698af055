"""Gradients of gradients: every rounding counts as the identity, or a clear error."""

import pytest
import torch
from helpers import OnRing
from torch import nn

from cpt_core.formats.quantizer import Quantizer
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.kernels.operators import round_in_range
from cpt_core.quantization.convert import QuantConfig, quantize_, restore_
from cpt_core.quantization.fake_quantize import levels_of, quantize, quantize_gradient
from cpt_core.quantization.scheduler import precision

NEAREST = QuantConfig().with_gradient_rounding("nearest")


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (5, 4)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 3, 3)), (2, 2, 9)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2)), (2, 2, 7, 7)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.Tanh(), nn.Conv3d(3, 1, 2)), (2, 2, 4, 4, 4)),
    "graph": (lambda: nn.Sequential(OnRing(GraphConv(4, 3)), nn.Tanh(), OnRing(SAGEConv(3, 2))), (6, 4)),
}


def penalty_gradients(model, x):
    """Return the gradients of a gradient penalty."""
    (first,) = torch.autograd.grad((model(x) ** 3).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), [x, *model.parameters()], allow_unused=True)


@pytest.mark.parametrize("config", [QuantConfig(aggregation="quantized"), NEAREST], ids=["stochastic", "nearest"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_many_bits_give_the_gradients_of_float32(kind, config):
    torch.manual_seed(0)
    make, shape = MODELS[kind]
    model, x = quantize_(make(), config), torch.randn(shape, requires_grad=True)
    with precision(model, 20, q_grad=20):
        found = penalty_gradients(model, x)
    expected = penalty_gradients(restore_(model), x)
    assert sum(g is not None for g in expected) > 2
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def test_few_bits_take_every_rounding_as_the_identity():
    torch.manual_seed(0)
    layer, x = quantize_(nn.Linear(4, 6, bias=False), NEAREST), torch.randn(5, 4, requires_grad=True)

    def rounded(gradient):
        y = torch.zeros_like(gradient, requires_grad=True)
        quantize_gradient(y, torch.tensor(levels_of(5)), NEAREST.quantizers["linear_grad"]).backward(gradient)
        return y.grad

    with precision(layer, 3, q_grad=5):
        of_x, of_weight = penalty_gradients(layer, x)
    x_q, w_q = quantize(x.detach(), 3, "linear_input"), quantize(layer.weight.detach(), 3, "linear_weight")
    y = x_q @ w_q.T
    g = rounded(3 * y**2)  # of the loss, sum of y**3
    first = g @ w_q
    back = rounded(2 * first @ w_q.T * 6 * y)  # of the penalty: first.square().sum(), through y
    torch.testing.assert_close(of_weight, g.T @ (2 * first) + back.T @ x_q)
    torch.testing.assert_close(of_x, back @ w_q)


@pytest.mark.parametrize("call", ["quantize", "round_in_range"])
def test_gradients_of_gradients_pass_straight_through(call):
    x = torch.tensor([0.2, 0.9, 0.0, 1.0], requires_grad=True)
    if call == "quantize":
        y = quantize(x, 2, Quantizer("per_tensor"))
    else:
        y = round_in_range(x, torch.tensor(0.0), torch.tensor(1.0), torch.tensor(3.0), "per_tensor", clip=True)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 3 * y**2)
    torch.testing.assert_close(second, 6 * y)


def test_the_lstm_refuses():
    model, x = quantize_(nn.LSTM(4, 3)), torch.randn(5, 2, 4, requires_grad=True)
    with precision(model, 4):
        (first,) = torch.autograd.grad((model(x)[0] ** 3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            first.square().sum().backward()
