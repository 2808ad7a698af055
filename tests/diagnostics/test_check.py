"""Reports of ``check`` on models of all kinds, and agreement with other ways to run a model."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from helpers import FunctionModule, refused
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torchvision.ops import deform_conv2d

from cpt_core.bitops.plan import count_bitops
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.diagnostics.check import check

torch.manual_seed(0)
X = torch.randn(4, 4)
SPARSE = torch.eye(4).to_sparse()


@dataclass
class Output:
    loss: torch.Tensor


class Opaque:
    def __init__(self, loss):
        self.loss = loss


class Recurrent(nn.LSTM):
    """Recurrent network that runs step by step in a custom forward method."""


class LinearFunction(torch.autograd.Function):
    """Linear layer as a custom autograd function, as in torch's documentation."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.mm(w.t())

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient.mm(w), gradient.t().mm(x)


class Sample(NamedTuple):
    model: nn.Module
    inputs: tuple[Any, ...] = (X,)
    config: QuantConfig | None = None


def after_layer(function):
    """Return a model that calls ``function`` with itself and the output of a layer."""
    return FunctionModule(
        lambda m, x: function(m, m.layer(x)),
        layer=nn.Linear(4, 4),
        w=nn.Parameter(torch.randn(4, 4)),
    )


def passed_weight(read):
    """Return a model whose second part uses the weight of one of its layers itself."""
    part = FunctionModule(
        lambda m, x: F.linear(m.called(x), read(m.passed.weight)),
        called=nn.Linear(4, 4),
        passed=nn.Linear(4, 4, bias=False),
    )
    return nn.Sequential(nn.Linear(4, 4), part)


def with_hook():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_pre_hook(lambda module, inputs: inputs[0] @ torch.eye(4))
    return model


def complex_weight():
    model = FunctionModule(
        lambda m, x: torch.einsum("nd,de->ne", m.layer(x) + 0j, m.w).real,
        layer=nn.Linear(4, 4),
    )
    model.w = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
    return model


@torch.no_grad()
def attend(m, x):
    """Attend without a backward pass, which flex_attention has in compiled code alone."""
    heads = [y.unflatten(-1, (2, 4)).transpose(1, 2) for y in m.qkv(x).chunk(3, -1)]
    return m.out(flex_attention(*heads).transpose(1, 2).flatten(2))


def deform(m, y):
    return deform_conv2d(
        y[None, None], y.new_zeros(1, 2, 4, 4), m.w[None, None, :1, :1]
    )


MIXED = Sample(
    FunctionModule(
        lambda m, x: m.head(torch.cdist(h := m.layer(x), m.layer.weight) + h @ h.T @ h),
        layer=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
    ),
    config=QuantConfig(float32=("head",)),
)
SAMPLES = {
    "chain": Sample(
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
        config=QuantConfig(float32=("1",)),
    ),
    # who owns a weight that another module uses
    "passed_weight": Sample(passed_weight(lambda w: w)),
    "passed_transposed_weight": Sample(passed_weight(lambda w: w.T)),
    "computed_weight": Sample(passed_weight(lambda w: w - w.mean())),
    "cloned_weight": Sample(passed_weight(lambda w: w.clone())),
    "bypassed_layer": Sample(
        FunctionModule(
            lambda m, x: torch.cdist(m.called(x), m.passed.weight),
            called=nn.Linear(4, 4),
            passed=nn.Linear(4, 4, bias=False),
        )
    ),
    "unused_layer": Sample(
        FunctionModule(
            lambda m, x: m.first(x), first=nn.Linear(4, 4), other=nn.Linear(4, 4)
        )
    ),
    "parameter_as_input": Sample(
        FunctionModule(lambda m, x, w: m.layer(x) @ w, layer=nn.Linear(4, 4)),
        (X, nn.Parameter(torch.randn(4, 4))),
    ),
    "matmul_in_hook": Sample(with_hook()),
    # operations that nothing intercepts, with their MACs
    "complex_einsum": Sample(complex_weight()),
    "cdist": Sample(after_layer(lambda m, y: torch.cdist(y, m.w))),
    "cdist_of_many_rows": Sample(
        after_layer(lambda m, y: torch.cdist(y.repeat(10, 1), m.w))
    ),
    "cdist_of_absolute_values": Sample(
        after_layer(lambda m, y: torch.cdist(y, m.w, 1.0))
    ),
    "conv_tbc": Sample(
        after_layer(lambda m, y: torch.conv_tbc(y[:, None], m.w[None], y.new_zeros(4)))
    ),
    "matrix_exp": Sample(after_layer(lambda m, y: y + torch.matrix_exp(m.w)[0])),
    "cov": Sample(after_layer(lambda m, y: torch.cov(y))),
    "corrcoef": Sample(after_layer(lambda m, y: torch.corrcoef(y))),
    "matrix_power": Sample(after_layer(lambda m, y: torch.linalg.matrix_power(y, 2))),
    "sparse_matmul": Sample(after_layer(lambda m, y: SPARSE @ y)),
    "sparse_addmm": Sample(after_layer(lambda m, y: torch.sparse.addmm(y, SPARSE, y))),
    "deform_conv2d": Sample(after_layer(deform)),
    "flex_attention": Sample(
        nn.Sequential(
            FunctionModule(attend, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)),
            nn.Linear(8, 4),
        ),
        (torch.randn(2, 5, 8),),
    ),
    "autograd_function": Sample(after_layer(lambda m, y: LinearFunction.apply(y, m.w))),
    # outputs from which a backward pass starts, or does not
    "dataclass_output": Sample(after_layer(lambda m, y: Output(y))),
    "dict_output": Sample(after_layer(lambda m, y: {"y": [y]})),
    "complex_output": Sample(after_layer(lambda m, y: y + 0j)),
    "opaque_output": Sample(after_layer(lambda m, y: Opaque(y))),
    "detached_output": Sample(after_layer(lambda m, y: y.detach())),
    # gradients that are needed
    "detached_encoder": Sample(
        FunctionModule(
            lambda m, x: m.head(m.encoder(x).detach()),
            encoder=nn.Linear(4, 4),
            head=nn.Linear(4, 2),
        )
    ),
    "input_with_gradient": Sample(nn.Linear(4, 4), (X.clone().requires_grad_(),)),
    "frozen_layer": Sample(
        nn.Linear(4, 4).requires_grad_(False), (X.clone().requires_grad_(),)
    ),
    # matmuls without rows, and the gradient of a first state, are left out
    "expert_without_token": Sample(
        FunctionModule(
            lambda m, x: torch.cat([m.first(x[:0]), m.second(x)]),
            first=nn.Linear(4, 4),
            second=nn.Linear(4, 4),
        )
    ),
    "lstm": Sample(nn.LSTM(4, 3), (torch.ones(5, 2, 4),)),
    "lstm_subclass": Sample(Recurrent(4, 3), (torch.ones(5, 4),)),
    "lstm_of_empty_batch": Sample(nn.LSTM(4, 3), (torch.ones(5, 0, 4),)),
    "mixed": MIXED,
}


def check_sample(sample, **options):
    model = quantize_(copy.deepcopy(sample.model), sample.config)
    return check(model, sample.inputs, invariances=False, **options)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", SAMPLES)
def test_check_report(name, golden):
    """List every operation with its layer, MACs and precision, and name silent layers."""
    result = check_sample(SAMPLES[name], details=True)
    golden(f"check/{name}.txt", f"ok: {result.ok}\n{result}\n")


def test_check_report_has_line_per_layer(golden):
    golden("check/layers_of_mixed.txt", f"{check_sample(MIXED)}\n")


def test_check_runs_backward_outside_autocast():
    plain = check_sample(SAMPLES["chain"])
    with torch.autocast("cpu", torch.bfloat16):
        assert check_sample(SAMPLES["chain"]).operations == plain.operations


def test_check_counts_matmuls_recomputed_by_checkpoint():
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = FunctionModule(
        lambda m, x: checkpoint(m.block, m.first(x), use_reentrant=m.reentrant),
        first=nn.Linear(4, 4),
        block=block,
        reentrant=False,
    )
    quantize_(model)
    assert check(model, (X,)).ok
    plan = count_bitops(model, (X,), convention="paper")
    assert plan.forward_macs == 3 * 64  # the paper counts no second forward pass
    assert plan.unpriced == {"block.0": 64}
    assert count_bitops(model, (X,)).macs == {
        "first": 64,
        "block.0": 128,
        "block.2": 64,
    }
    model.reentrant = True
    refused("set use_reentrant=False", check, model, (X,), error=RuntimeError)


def test_count_bitops_omits_backward_of_detached_layer():
    model = copy.deepcopy(SAMPLES["detached_encoder"].model)
    assert count_bitops(model, (X,)).bitops["encoder"] == {"forward": 64 * 32**2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.GRU], ids=lambda k: k.__name__)
def test_check_follows_direct_forward_calls(kind):
    x = torch.randn(4, 3, 8)
    called = quantize_(FunctionModule(lambda m, x: m.inner(x), inner=kind(8, 8)))
    direct = quantize_(
        FunctionModule(lambda m, x: m.inner.forward(x), inner=kind(8, 8))
    )
    # torch does not call it either
    hook = direct.inner.register_forward_hook(lambda *_: 1 / 0)
    schedule = StaticSchedule(2, 1)
    results = [check(model, (x,)) for model in (called, direct)]
    plans = [count_bitops(model, (x,), schedule) for model in (called, direct)]
    assert results[0].ok
    assert results[0].quantized_share == 1
    assert results[0].operations == results[1].operations
    assert plans[0].bitops == plans[1].bitops
    assert "forward" not in vars(direct.inner)

    hook.remove()
    direct.forward = own = partial(type(direct).forward, direct)
    assert check(direct, (x,)).ok
    assert direct.forward is own


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 5)),
            torch.randn(2, 3, 6, 6),
        ),
        (nn.LSTM(4, 3), torch.randn(5, 2, 4)),
    ],
)
def test_check_treats_int8_like_simulation(model, x):
    expected = check(quantize_(copy.deepcopy(model)), (x,))
    config = QuantConfig(execution="integer").with_shared_steps()
    model = quantize_(copy.deepcopy(model), config)
    with precision(model, 5, 8):
        result = check(model, (x,))
    assert result.ok
    assert (result.operations, result.quantized_share) == (expected.operations, 1)
    assert {p.execution for p in layer_precisions(model).values()} == {"integer"}
