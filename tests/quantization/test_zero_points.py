"""Quantisation grids with a zero point: exact zeros stay zero, by default outside the paper's layers."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.fake_quantize import PlainOperators
from cpt_core.quantization.roles import Quantizer
from cpt_core.quantization.rounding import num_steps
from cpt_extras.formats.tensor_rounding import quantize

KINDS = {
    "both signs": lambda x: x,
    "symmetric": torch.sign,
    "positive": lambda x: x.abs() + 0.5,
    "negative": lambda x: -x.abs() - 0.5,
    "constant": lambda x: torch.full_like(x, 3.0),
    "zeros": torch.zeros_like,
}


def drawn(name, *shape):
    """Return random numbers of a kind, a third of them 0."""
    generator = torch.Generator().manual_seed(0)
    x = KINDS[name](torch.randn(shape, generator=generator))
    return x * (torch.rand(shape, generator=generator) > 1 / 3)


@contextmanager
def active_bits(model, bits):
    """Set the bits of a model for evaluation without gradients; warnings are errors."""
    with (
        cpt.precision(model, bits),
        torch.no_grad(),
        warnings.catch_warnings(action="error"),
    ):
        yield


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 23])
@pytest.mark.parametrize("key", [None, 7])
def test_zero_point_keeps_zeros_and_rounds_nearest(name, bits, key):
    x, steps = drawn(name, 50, 40), num_steps(bits)
    key = None if key is None else torch.tensor(key)
    y, low, width = PlainOperators.fake_quantize(
        x, torch.tensor(steps), "per_row+zero", key
    )
    assert (y[x == 0] == 0).all()
    step = ((low + width).clamp_min(0) - low.clamp_max(0)) / steps
    limit = step * (1.001 if key is None else 1.5) + 1e-6 * x.abs().max()
    assert ((y - x).abs() <= limit).all()
    assert bits > 8 or max(len(row.unique()) for row in y) <= steps + 1


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_zero_point_ignores_padding_zeros(name, bits):
    """Keep all other numbers when padding is added, also if they have one sign."""
    x = drawn(name, 6, 5) + (0 if name == "zeros" else 0.01)
    padded, quantizer = F.pad(x, (2, 3)), Quantizer("per_row", zero_point=True)
    found = quantize(padded, bits, quantizer)[:, 2:7]
    assert torch.equal(found, quantize(x, bits, quantizer))
    grid = torch.tensor(num_steps(bits)), quantizer.grid
    plain = PlainOperators.fake_quantize(padded, *grid)[0][:, 2:7]
    assert torch.equal(plain, PlainOperators.fake_quantize(x, *grid)[0])


# --- masked and pruned weights ------------------------------------------------------------------

# output d depends on the inputs before d
MASK = torch.ones(8, 8).tril(-1)


class MaskedLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * MASK, self.bias)


class MaskedConv(nn.Conv1d):
    def forward(self, x):
        return F.conv1d(x, self.weight * MASK[:, :, None], self.bias)


class MaskedTransposedConv(nn.ConvTranspose1d):
    def forward(self, x):
        return F.conv_transpose1d(x, self.weight * MASK.mT[:, :, None], self.bias)


class WithWeight(nn.Module):
    """Function of an input and a weight, which is no layer of torch."""

    def __init__(self, function, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


def masked_linear(x, weight):
    return F.linear(x, weight * MASK)


def masked_conv(x, weight):
    return F.conv1d(x, (weight * MASK)[:, :, None])


MASKED = {  # layer, shape of its input, dimension of the features
    "linear": (lambda: MaskedLinear(8, 8), (5, 8), -1),
    "convolution": (lambda: MaskedConv(8, 8, 3), (5, 8, 7), 1),
    "transposed convolution": (lambda: MaskedTransposedConv(8, 8, 3), (5, 8, 7), 1),
    "linear function": (lambda: WithWeight(masked_linear, 8, 8), (5, 8), -1),
    "convolution function": (lambda: WithWeight(masked_conv, 8, 8), (5, 8, 7), 1),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_masked_weight_hides_its_inputs(name, bits):
    torch.manual_seed(0)
    make, shape, dim = MASKED[name]
    model, x = cpt.quantize_(nn.Sequential(make())), torch.randn(shape)
    changed = x.clone()
    changed.narrow(dim, 5, 3).neg_()
    with active_bits(model, bits):
        model(x)
        model.eval()
        y, z = model(x), model(changed)
    assert torch.equal(y.narrow(dim, 0, 6), z.narrow(dim, 0, 6))
    assert not torch.equal(y, z)


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.5)


def parametrized(layer):
    parametrizations.weight_norm(layer)
    with torch.no_grad():
        layer.parametrizations.weight.original1[:, ::2] = 0  # the direction
    return layer


@pytest.mark.parametrize("change", [pruned, parametrized])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [((nn.Linear, 8, 8), (2, 8)), ((nn.Conv2d, 8, 8, 3), (2, 8, 3, 3))],
)
def test_computed_weight_keeps_its_zeros(change, kind, shape):
    torch.manual_seed(0)
    make, *sizes = kind
    layer, roles = change(make(*sizes)), []
    model = cpt.quantize_(nn.Sequential(layer))
    zeros = layer.weight == 0
    assert 0.4 < float(zeros.float().mean()) < 0.6
    with active_bits(model, 3):
        model(torch.randn(shape))
        precision = layer_precisions(model)["0"]
        precision.observer = lambda role, x, rows: roles.append(role)
        model(torch.randn(shape))
        rounded = precision.quantize_operand("computed_weight", layer.weight)
    assert "computed_weight" in roles
    assert (rounded[zeros] == 0).all()


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(8, 8), lambda: nn.Conv1d(8, 8, 3), lambda: nn.LSTM(8, 8)]
)
def test_pruned_weight_warns_once_and_names_remedy(make):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(3, 8, 8)
    weights = [p for p in layer.parameters() if p.dim() > 1]
    with torch.no_grad():
        for weight in weights:
            weight[torch.rand_like(weight) < 0.3] = 0
    model = cpt.quantize_(nn.Sequential(layer))
    message = r"of the weights of layer '0' are exactly 0 .*\.with_zero_points\(\)"
    with cpt.precision(model, 4), pytest.warns(UserWarning, match=message):
        model(x)
    with active_bits(model, 4):
        model(x)
    cpt.restore_(model)
    cpt.quantize_(model, cpt.QuantConfig().with_zero_points())
    with active_bits(model, 4):
        model(x)
        precision = layer_precisions(model)["0"]
        rounded = precision.quantize_operand("weight", weights[0])
    assert (rounded[weights[0] == 0] == 0).all()


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(6, 8), nn.LSTM(6, 8, bidirectional=True), nn.GRU(6, 8), nn.RNN(6, 8)],
    ids=["lstm", "bidirectional", "gru", "rnn"],
)
def test_zero_state_stays_zero_in_evaluation(layer, bits):
    """Compare with three times the hidden weights: they multiply a state of zeros in the first step."""
    torch.manual_seed(0)
    model = cpt.quantize_(
        nn.Sequential(copy.deepcopy(layer)), cpt.QuantConfig().with_zero_points()
    )
    x = torch.randn(5, 3, 6)
    with active_bits(model, bits):
        for _ in range(3):
            model(x)
    model.eval()
    with active_bits(model, bits):
        first = model(x[:1])[0]
        for name, weight in model[0].named_parameters():
            if name.startswith("weight_hh"):
                weight.mul_(3)
        assert torch.equal(model(x[:1])[0], first)


def test_pruned_weight_warns_at_later_evaluation():
    torch.manual_seed(0)
    model, x = cpt.quantize_(nn.Sequential(nn.Linear(8, 8))), torch.randn(3, 8)
    with active_bits(model, 4):
        model(x)
        model[0].weight[:, ::2] = 0
    model.eval()
    with cpt.precision(model, 4), pytest.warns(UserWarning, match="are exactly 0"):
        model(x)


@pytest.mark.parametrize(
    "weight", [torch.zeros(4, 4), torch.eye(4), torch.randn(4, 4) + 9]
)
def test_zero_weights_at_conversion_do_not_warn(weight):
    """Give no warning for weights that are all zero, the identity, or far from zero."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.data.copy_(weight)
    with warnings.catch_warnings(action="error"):
        cpt.quantize_(model)
    with active_bits(model, 4):
        model(torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("make", "sizes", "shape"),
    [
        (nn.Linear, (0, 4), (3, 0)),
        (nn.Linear, (4, 0), (3, 4)),
        (nn.Conv1d, (0, 4, 3), (2, 0, 8)),
    ],
)
def test_layer_with_empty_weight_runs(make, sizes, shape):
    layer, x = make(*sizes), torch.zeros(shape)
    expected = layer(x).detach()
    model = cpt.quantize_(nn.Sequential(layer))
    for is_training in (True, False):
        with cpt.precision(model.train(is_training), 8):
            assert torch.allclose(model(x), expected, atol=1e-2)


# --- sums over one element ----------------------------------------------------------------------

SINGLE_TERMS = {
    "linear": WithWeight(lambda x, w: F.linear(x[..., None], w), 16, 1),
    "matmul": WithWeight(lambda x, w: x[..., None] @ w, 1, 16),
    "bmm": WithWeight(lambda x, w: torch.bmm(x.T[..., None], w), 3, 1, 16),
    "einsum": WithWeight(
        lambda x, w: torch.einsum("bfk,kd->bfd", x[..., None], w), 1, 16
    ),
    "one channel": WithWeight(lambda x, w: F.conv1d(x[:, None], w), 4, 1, 2),
    "outer product": WithWeight(lambda x, w: x[..., None] @ x[:, None] * w, 3, 3),
    "values": WithWeight(lambda x, w: x.mT.softmax(-1) @ x[:, :1] * w, 1, 1),
    "values by bmm": WithWeight(
        lambda x, w: torch.bmm(x.mT.softmax(-1)[None], x[None, :, :1]) * w, 1, 1
    ),
    "values by einsum": WithWeight(
        lambda x, w: torch.einsum("tq,td->qd", x.softmax(0), x[:, :1]) * w, 1, 1
    ),
    "transposed values": WithWeight(
        lambda x, w: x[:, :1].mT @ x.mT.softmax(-1).mT * w, 1, 1
    ),
    "state": WithWeight(lambda x, w: x.mT @ x[:, :1] * w, 1, 1),
    "fixed column": WithWeight(lambda x, w: x @ torch.full((3, 1), 0.3) * w, 1, 1),
    "stacked column": WithWeight(
        lambda x, w: x @ torch.stack(x[0].split(1), 0) * w, 1, 1
    ),
    "attention of one feature": WithWeight(
        lambda x, w: F.scaled_dot_product_attention(*3 * (x[None, :, :1],)) * w, 1, 1
    ),
}


@pytest.mark.parametrize("name", SINGLE_TERMS)
def test_single_number_ranges_run_in_float32(name):
    x, layer = torch.randn(8, 3), copy.deepcopy(SINGLE_TERMS[name])
    model = cpt.quantize_(nn.Sequential(layer))
    with active_bits(model, "float"):
        expected = model(x)
    with active_bits(model, 1):
        torch.testing.assert_close(model(x), expected)
    report = cpt.check(model, (x,))
    assert (report.quantized_share, len(report.float32)) == (0, 1)
    plan = cpt.count_bitops(model, (x,), cpt.StaticSchedule(4, 1))
    assert plan.relative_to_float32 == 1


def test_linear_layer_of_one_feature_is_quantized():
    x, model = torch.randn(8, 1), cpt.quantize_(nn.Sequential(nn.Linear(1, 4)))
    outputs = []
    for bits in (1, "float"):
        with active_bits(model, bits):
            outputs.append(model(x))
    assert not torch.equal(*outputs)
    assert cpt.check(model, (x,)).quantized_share == 1


class Copy(nn.Module):
    def forward(self, weight):
        return weight.clone()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(64, 32), (2, 64)), (nn.Conv2d(64, 32, 3), (2, 64, 3, 3))],
)
def test_computed_weight_has_blocks_of_a_parameter(layer, shape):
    """Lay the blocks of a format along the sum for parameters and computed weights."""
    config, x = cpt.QuantConfig(ladder={8: "mxfp8_e4m3"}), torch.randn(shape)
    plain, computed = copy.deepcopy(layer), copy.deepcopy(layer)
    parametrize.register_parametrization(computed, "weight", Copy())
    outputs = []
    for module in (plain, computed):
        model = cpt.quantize_(nn.Sequential(module), config)
        with active_bits(model, 8):
            outputs.append(model(x))
    assert torch.equal(*outputs)
