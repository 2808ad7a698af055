"""Half precision, by autocast or by model dtype: operands stay on their quantisation grid."""

import copy
from contextlib import nullcontext

import pytest
import torch
from helpers import FunctionModule, OpRecorder
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.precision import HALF
from cpt_core.quantization.scheduler import precision
from cpt_extras.kernels import operators

HALF_MODELS = {
    "linear": (lambda: nn.Linear(300, 1, bias=False), lambda: torch.rand(64, 300) + 10),
    "conv": (
        lambda: nn.Conv2d(3, 1, 3, bias=False),
        lambda: torch.rand(4, 3, 20, 20) + 10,
    ),
    "lstm": (lambda: nn.LSTM(300, 1, bias=False), lambda: torch.rand(1, 64, 300) + 10),
}


@pytest.mark.parametrize("kind", HALF_MODELS)
@pytest.mark.parametrize("way", ["autocast", "model"])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_keeps_operands_on_grid(kind, way, dtype):
    """Keep all 256 values of 8 bits for inputs of 10 to 11, of which bfloat16 has 17 values."""
    if kind == "lstm" and dtype == torch.float16 and way == "model":
        pytest.skip("torch has no such LSTM on the CPU")
    torch.manual_seed(0)
    make, inputs = HALF_MODELS[kind]
    model, x = quantize_(make()), inputs()
    exact = x if way == "autocast" else x.to(dtype).float()
    if way == "model":
        model, x = model.to(dtype), x.to(dtype)

    with OpRecorder() as ran:
        with (
            torch.autocast("cpu", dtype, enabled=way == "autocast"),
            precision(model, 8),
        ):
            y, *state = model(x) if kind == "lstm" else (model(x), ())
            types = {t.dtype for t in (y, *state[0])}
            assert types == {
                torch.float32 if kind == "lstm" and way == "autocast" else dtype
            }
        y.float().square().sum().backward()
    names = ("mm", "bmm", "convolution", "addmm")
    products = [
        [t for t in operands if t.dim() > 1]
        for name, operands in ran.calls
        if name in names
    ]
    assert all(t.dtype == torch.float32 for operands in products for t in operands)
    assert max(t.unique().numel() for t in products[0]) > 0.9 * min(
        256, exact.unique().numel()
    )
    assert all(
        p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters()
    )


RECURRENT = {
    "gru": lambda: nn.GRU(8, 6, num_layers=2, bidirectional=True),
    "rnn": lambda: nn.RNN(8, 6, batch_first=True),
    "lstm with a projection": lambda: nn.LSTM(8, 6, proj_size=4),
    "gru cell": lambda: nn.GRUCell(8, 6),
    "rnn cell": lambda: nn.RNNCell(8, 6, nonlinearity="relu", bias=False),
    "lstm cell": lambda: nn.LSTMCell(8, 6),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_half_precision_recurrence_has_grids_of_float32(name):
    """Find the owner of a weight before it is cast: one range per row, and no running range."""
    torch.manual_seed(0)
    half = quantize_(RECURRENT[name]()).bfloat16()
    whole = copy.deepcopy(half).float()
    shape = (3, 8) if "cell" in name else (5, 3, 8)
    x = torch.randn(shape, dtype=torch.bfloat16)
    outputs = []
    for model in (half, whole):
        with precision(model, 4):
            outputs.append(tree_leaves(model(x.to(next(model.parameters()).dtype))))
        assert not model.precision.running_masked_input.any()
    for actual, expected in zip(*outputs, strict=True):
        assert torch.equal(actual, expected.bfloat16())


AUTOCAST = {  # name -> layer, shape of its input
    **{
        name: (make, (3, 8) if "cell" in name else (5, 3, 8))
        for name, make in RECURRENT.items()
    },
    "rnn with relu": (lambda: nn.RNN(8, 6, 2, nonlinearity="relu"), (5, 3, 8)),
    "gru without batch": (lambda: nn.GRU(8, 6), (5, 8)),
    "lstm of two directions with a projection": (
        lambda: nn.LSTM(8, 6, 2, bidirectional=True, proj_size=4),
        (5, 3, 8),
    ),
    "bilinear": (
        lambda: FunctionModule(lambda m, x: m.layer(x, x), layer=nn.Bilinear(8, 8, 6)),
        (3, 8),
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # of torch
@pytest.mark.parametrize("name", AUTOCAST)
@pytest.mark.parametrize("dtype", HALF)
def test_autocast_dtypes_equal_torch(name, dtype):
    """Compare with torch on the CPU, which has no LSTM without a projection under autocast on every machine."""
    make, shape = AUTOCAST[name]
    model, x, dtypes = make(), torch.randn(shape), []
    inputs = [x]
    if len(shape) == 3:
        inputs.append(nn.utils.rnn.pack_sequence([*x.unbind(1), x[:2, 0]], False))
    for converts in (False, True):
        model = quantize_(model) if converts else model
        for bits in (8, "float") if converts else (None,):
            with precision(model, bits) if converts else nullcontext():
                with torch.autocast("cpu", dtype):
                    leaves = tree_leaves([model(x) for x in inputs])
            dtypes.append([y.dtype for y in leaves if isinstance(y, torch.Tensor)])
    assert dtypes[0] == dtypes[1] == dtypes[2]


def test_autocast_of_float32_layers_equals_torch():
    """Match torch's autocast; test_int8_combinations covers quantised layers."""
    model, x = (
        quantize_(nn.Sequential(nn.Linear(30, 20, bias=False))),
        torch.rand(64, 30) + 10,
    )
    with precision(model, "float"), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), F.linear(x, model[0].weight))


@pytest.mark.parametrize("family", ["cpt", "cpt_reference"])
def test_autocast_warns_in_backward_pass(family, monkeypatch):
    monkeypatch.setattr(operators, "active", getattr(torch.ops, family))
    model = quantize_(nn.Linear(4, 4))
    with precision(model, 4, 8), torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(2, 4)).float().sum()
        with pytest.warns(
            UserWarning,
            match="under autocast, which rounds the results of quantised matmuls once more",
        ):
            loss.backward()
