"""Autograd beyond one backward pass: double backward and ``torch.func``."""

import pytest
import torch
from helpers import (
    NEAREST,
    FunctionModule,
    OnRing,
    identical,
    quantize_gradient,
    refused,
)
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap

from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization.convert import (
    QuantConfig,
    layer_precisions,
    quantize_,
    restore_,
)
from cpt_core.quantization.rounding import num_steps
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import RoleLevels
from cpt_extras.formats.tensor_rounding import quantize

STOCHASTIC = QuantConfig(aggregation="quantized")
MODELS = {  # name -> two layers, shape of their input
    "linear": (lambda: (nn.Linear(4, 6), nn.Linear(6, 3)), (5, 4)),
    "conv1d": (lambda: (nn.Conv1d(2, 3, 3), nn.Conv1d(3, 3, 3)), (2, 2, 9)),
    "conv2d": (
        lambda: (nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2)),
        (2, 2, 7, 7),
    ),
    "conv3d": (lambda: (nn.Conv3d(2, 3, 2), nn.Conv3d(3, 1, 2)), (2, 2, 4, 4, 4)),
    "graph": (lambda: (OnRing(GraphConv(4, 3)), OnRing(SAGEConv(3, 2))), (6, 4)),
}


def penalty_gradients(model, x, *weights):
    """Return gradients, by input and weights, of a penalty on the input's gradient."""
    first = torch.autograd.grad((model(x) ** 3).sum(), [x, *weights], create_graph=True)
    penalty = sum(g.square().sum() for g in first)
    return torch.autograd.grad(penalty, [x, *model.parameters()], allow_unused=True)


@pytest.mark.parametrize(
    ("name", "config", "weight_gradient_bits"),
    [
        *((name, NEAREST, 20) for name in MODELS),
        ("linear", STOCHASTIC, 20),
        ("graph", STOCHASTIC, 20),
        ("linear", NEAREST, 21),
        ("conv2d", STOCHASTIC, 21),
    ],
)
def test_double_backward_at_many_bits_equals_float32(
    name, config, weight_gradient_bits
):
    """Cover split input and weight gradients too."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    first, second = make()
    model = quantize_(nn.Sequential(first, nn.Tanh(), second), config)
    x = torch.randn(shape, requires_grad=True)
    for p in layer_precisions(model).values():
        p.set_levels(RoleLevels(20, 20, 20, weight_gradient_bits))
    weight = next(model.parameters())
    found = penalty_gradients(model, x, weight)
    expected = penalty_gradients(restore_(model), x, weight)
    assert sum(g is not None for g in expected) > 2
    for actual, value in zip(found, expected, strict=True):
        assert (actual is None) == (value is None)
        if actual is not None:
            tolerance = 1e-3 * float(value.abs().max())
            torch.testing.assert_close(actual, value, rtol=1e-3, atol=tolerance)


def test_double_backward_treats_rounding_as_identity():
    torch.manual_seed(0)
    layer = quantize_(nn.Linear(4, 6, bias=False), NEAREST)
    x = torch.randn(5, 4, requires_grad=True)

    def rounded(gradient):
        y = torch.zeros_like(gradient, requires_grad=True)
        quantizer = NEAREST.quantizers["linear_grad"]
        steps = torch.tensor(num_steps(5))
        quantize_gradient(y, steps, quantizer).backward(gradient)
        return y.grad

    with precision(layer, 3, q_grad=5):
        dx, dw = penalty_gradients(layer, x)
    x_q = quantize(x.detach(), 3, "linear_input")
    w_q = quantize(layer.weight.detach(), 3, "linear_weight")
    y = x_q @ w_q.T
    dy = rounded(3 * y**2)  # of the loss, sum of y**3
    first = dy @ w_q
    # of the penalty, first.square().sum(), through y
    dy_of_penalty = rounded(2 * first @ w_q.T * 6 * y)
    torch.testing.assert_close(dw, dy.T @ (2 * first) + dy_of_penalty.T @ x_q)
    torch.testing.assert_close(dx, dy_of_penalty @ w_q)


# --- torch.func ---------------------------------------------------------------------

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "convolution": (lambda: nn.Conv2d(4, 3, 2), (5, 4, 3, 3)),
    "lstm": (lambda: nn.LSTM(4, 3), (5, 2, 4)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 1, 8, batch_first=True),
        (2, 3, 4),
    ),
}
TRANSFORMS = {
    "grad": lambda f, x: grad(f)(x),
    "vjp": lambda f, x: vjp(f, x),
    "grad of vmap": lambda f, x: grad(lambda x: vmap(f)(x[None]).sum())(x),
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "vmap": lambda f, x: vmap(f)(x[None]),
}


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script. is deprecated",
    "ignore:There is a performance drop because",
)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_transform_is_rejected_with_remedy(name, transform):
    make, shape = LAYERS[name]
    model, x = quantize_(nn.ModuleDict({"layer": make()}))["layer"], torch.randn(shape)

    def loss(x):
        y = model(x)
        return (y[0] if isinstance(y, tuple) else y).sum()

    message = r"torch.func \(grad, jvp, vmap\) cannot .*loss.backward"
    with precision(model, 4, 8):
        refused(message, TRANSFORMS[transform], loss, x, error=RuntimeError)
    if name == "linear":
        with precision(model, "float"):
            TRANSFORMS[transform](loss, x)


def test_functional_call_quantizes_replaced_weights():
    torch.manual_seed(0)
    tied = FunctionModule(
        lambda m, x: m.encoder(x) @ m.encoder.weight, encoder=nn.Linear(6, 4)
    )
    model, x = quantize_(tied, NEAREST), torch.randn(5, 6)
    parameters = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in parameters.items()}
    for value in values.values():
        value.requires_grad_()
    with precision(model, 3, 3):
        expected, y = model(x), functional_call(model, values, (x,))
        expected.square().sum().backward()
        y.square().sum().backward()
    assert torch.equal(y, expected)
    gradients = ([p.grad for p in group.values()] for group in (parameters, values))
    assert identical(*gradients)
