"""Autograd beyond one backward pass: double backward, recomputation, ``torch.func``."""

import pytest
import torch
from helpers import (
    NEAREST,
    FunctionModule,
    OnRing,
    identical,
    pictures,
    quantize_gradient,
    small,
)
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization import fake_quantize
from cpt_core.quantization.convert import (
    QuantConfig,
    layer_precisions,
    quantize_,
    restore_,
)
from cpt_core.quantization.roles import Quantizer
from cpt_core.quantization.rounding import num_steps
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import RoleLevels
from cpt_extras.formats.tensor_rounding import quantize

MODELS = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        (5, 4),
    ),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 3, 3)),
        (2, 2, 9),
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2)
        ),
        (2, 2, 7, 7),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.Tanh(), nn.Conv3d(3, 1, 2)),
        (2, 2, 4, 4, 4),
    ),
    "graph": (
        lambda: nn.Sequential(
            OnRing(GraphConv(4, 3)), nn.Tanh(), OnRing(SAGEConv(3, 2))
        ),
        (6, 4),
    ),
}


def penalty_gradients(model, x, *weights):
    """Return gradients, by input and weights, of a penalty on the input's gradient."""
    first = torch.autograd.grad((model(x) ** 3).sum(), [x, *weights], create_graph=True)
    penalty = sum(g.square().sum() for g in first)
    return torch.autograd.grad(penalty, [x, *model.parameters()], allow_unused=True)


@pytest.mark.parametrize(
    "config",
    [QuantConfig(aggregation="quantized"), NEAREST],
    ids=["stochastic", "nearest"],
)
@pytest.mark.parametrize(
    ("kind", "apart"),
    [*((kind, False) for kind in MODELS), ("linear", True), ("conv2d", True)],
)
def test_double_backward_at_many_bits_equals_float32(kind, apart, config):
    """Cover split input and weight gradients too."""
    torch.manual_seed(0)
    make, shape = MODELS[kind]
    model, x = quantize_(make(), config), torch.randn(shape, requires_grad=True)
    for p in layer_precisions(model).values():
        p.set_levels(RoleLevels(20, 20, 20, 21 if apart else 20))
    weight = next(model.parameters())
    found = penalty_gradients(model, x, weight)
    expected = penalty_gradients(restore_(model), x, weight)
    assert sum(g is not None for g in expected) > 2
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(
                a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max())
            )


def test_double_backward_treats_rounding_as_identity():
    torch.manual_seed(0)
    layer, x = (
        quantize_(nn.Linear(4, 6, bias=False), NEAREST),
        torch.randn(5, 4, requires_grad=True),
    )

    def rounded(gradient):
        y = torch.zeros_like(gradient, requires_grad=True)
        quantize_gradient(
            y, torch.tensor(num_steps(5)), NEAREST.quantizers["linear_grad"]
        ).backward(gradient)
        return y.grad

    with precision(layer, 3, q_grad=5):
        of_x, of_weight = penalty_gradients(layer, x)
    x_q, w_q = (
        quantize(x.detach(), 3, "linear_input"),
        quantize(layer.weight.detach(), 3, "linear_weight"),
    )
    y = x_q @ w_q.T
    g = rounded(3 * y**2)  # of the loss, sum of y**3
    first = g @ w_q
    back = rounded(
        2 * first @ w_q.T * 6 * y
    )  # of the penalty: first.square().sum(), through y
    torch.testing.assert_close(of_weight, g.T @ (2 * first) + back.T @ x_q)
    torch.testing.assert_close(of_x, back @ w_q)


@pytest.mark.parametrize("call", ["quantize", "round_in_range"])
def test_double_backward_of_quantize_passes_straight_through(call):
    x = torch.tensor([0.2, 0.9, 0.0, 1.0], requires_grad=True)
    if call == "quantize":
        y = quantize(x, 2, Quantizer("per_tensor"))
    else:
        y = fake_quantize.operators.round_in_range(
            x,
            torch.tensor(0.0),
            torch.tensor(1.0),
            torch.tensor(3.0),
            "per_tensor",
            clip=True,
        )
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 3 * y**2)
    torch.testing.assert_close(second, 6 * y)


# --- recomputation: nothing may notice that forward passes run a second time ----------------------


def language():
    """Return a bidirectional LSTM with attention that takes the inputs of ``small``."""

    def forward(m, x):
        y = m.lstm(x.flatten(0, 1))[0]
        return m.head(m.attention(y, y, y)[0])

    parts = {
        "lstm": nn.LSTM(6, 4, bidirectional=True),
        "attention": nn.MultiheadAttention(8, 2),
    }
    return FunctionModule(forward, **parts, head=nn.Linear(8, 3))


def nested(model, x, **how):
    return checkpoint(lambda x: checkpoint(model, x, **how).mul(1), x, **how)


WAYS = {
    "whole": checkpoint,
    "nested": nested,
    "segments": lambda model, x, **how: checkpoint_sequential(model, 3, x, **how),
}


@pytest.mark.parametrize(
    "use_reentrant", [True, False], ids=["reentrant", "not reentrant"]
)
@pytest.mark.parametrize(
    ("make", "way", "execution"),
    [
        (small, "whole", "simulated"),
        (small, "nested", "simulated"),
        (small, "segments", "simulated"),
        (small, "whole", "integer"),
        (language, "whole", "simulated"),
        (language, "nested", "integer"),
    ],
)
def test_checkpoint_recomputation_equals_plain_training(
    make, way, execution, use_reentrant
):
    found = []
    for call in (lambda model, x, **_: model(x), WAYS[way]):
        torch.manual_seed(0)
        model, seen = quantize_(make(), QuantConfig(execution=execution)), []
        layers = layer_precisions(model)
        first = model.get_submodule(next(iter(layers)))
        first.register_forward_pre_hook(
            lambda m, _, seen=seen: seen.append(m.precision.bits)
        )
        results = []
        with precision(model, 3, q_grad=4):
            for seed in range(
                3
            ):  # the noise of later steps depends on how much was drawn before
                model.zero_grad()
                x = pictures(seed).requires_grad_()
                y = call(model, x, use_reentrant=use_reentrant)
                y.square().sum().backward()
                results += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        results += [
            getattr(layer, n) for layer in layers.values() for n in layer.get_running()
        ]
        found.append((results, seen))
    (plain, once), (again, twice) = found
    assert once == [3] * 3
    assert len(twice) >= 6
    assert set(twice) == {3}
    assert identical(plain, again)


# --- torch.func -----------------------------------------------------------------------------------


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "convolution": (lambda: nn.Conv2d(4, 3, 2), (5, 4, 3, 3)),
    "lstm": (lambda: nn.LSTM(4, 3), (5, 2, 4)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 1, 8, batch_first=True),
        (2, 3, 4),
    ),
}


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script. is deprecated",
    "ignore:There is a performance drop because",
)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: grad(f)(x),
        lambda f, x: vjp(f, x),
        lambda f, x: grad(lambda x: vmap(f)(x[None]).sum())(x),
        lambda f, x: jvp(f, (x,), (x,)),
        lambda f, x: vmap(f)(x[None]),
    ],
    ids=["grad", "vjp", "grad of vmap", "jvp", "vmap"],
)
def test_torch_func_transforms_are_rejected_with_remedy(name, transform):
    make, shape = LAYERS[name]
    model = quantize_(nn.ModuleDict({"layer": make()}))["layer"]
    with (
        precision(model, 4, 8),
        pytest.raises(
            RuntimeError, match=r"torch.func \(grad, jvp, vmap\) cannot .*loss.backward"
        ),
    ):
        transform(
            lambda x: (y[0] if isinstance(y := model(x), tuple) else y).sum(),
            torch.randn(shape),
        )
    if name == "linear":
        with precision(model, "float"):
            transform(lambda x: model(x).sum(), torch.randn(shape))


def test_functional_call_quantizes_replaced_weights():
    torch.manual_seed(0)
    tied = FunctionModule(
        lambda m, x: m.encoder(x) @ m.encoder.weight, encoder=nn.Linear(6, 4)
    )
    model, x = quantize_(tied, NEAREST), torch.randn(5, 6)
    values = {
        name: p.detach().clone().requires_grad_()
        for name, p in model.named_parameters()
    }
    with precision(model, 3, 3):
        plain, called = model(x), functional_call(model, values, (x,))
        plain.square().sum().backward()
        called.square().sum().backward()
    assert torch.equal(plain, called)
    assert all(
        torch.equal(p.grad, values[name].grad) for name, p in model.named_parameters()
    )
