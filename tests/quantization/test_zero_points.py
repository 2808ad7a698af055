"""Quantisation grids with a zero point: exact zeros stay zero, by default outside the paper's layers."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import cpt_core as cpt
from cpt_core.quantization.convert import QUANT_PRESETS, layer_precisions
from cpt_core.quantization.fake_quantize import PlainOperators
from cpt_core.quantization.roles import QUANTIZERS, Quantizer
from cpt_core.quantization.rounding import num_steps
from cpt_extras.formats.tensor_rounding import quantize

DRAWS = {
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
    x = DRAWS[name](torch.randn(shape, generator=generator))
    return x * (torch.rand(shape, generator=generator) > 1 / 3)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 23])
@pytest.mark.parametrize("key", [None, 7])
def test_zero_point_keeps_zeros_and_rounds_nearest(name, bits, key):
    x, n = drawn(name, 50, 40), num_steps(bits)
    noise_key = None if key is None else torch.tensor(key)
    y, low, width = PlainOperators.fake_quantize(
        x, torch.tensor(n), "per_row+zero", noise_key
    )
    assert bool((y[x == 0] == 0).all())
    step = ((low + width).clamp_min(0) - low.clamp_max(0)) / n
    assert bool(
        (
            (y - x).abs()
            <= step * (1.001 if key is None else 1.5) + 1e-6 * x.abs().max()
        ).all()
    )
    if bits <= 8:
        assert max(len(row.unique()) for row in y) <= n + 1


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_zero_point_ignores_padding_zeros(name, bits):
    """Keep all other numbers when padding is added, also if they have one sign."""
    x = drawn(name, 6, 5) + (0 if name == "zeros" else 0.01)
    padded = F.pad(x, (2, 3))
    how, steps = Quantizer("per_row", zero_point=True), torch.tensor(num_steps(bits))
    assert torch.equal(quantize(padded, bits, how)[:, 2:7], quantize(x, bits, how))
    plain = PlainOperators.fake_quantize(padded, steps, how.grid)[0][:, 2:7]
    assert torch.equal(plain, PlainOperators.fake_quantize(x, steps, how.grid)[0])


def test_stochastic_zero_point_keeps_zeros_and_is_unbiased():
    x = drawn("both signs", 4000) / 4
    x[0], x[1] = -1.0, 1.0
    mean = torch.zeros_like(x)
    for key in range(200):
        y = PlainOperators.fake_quantize(
            x, torch.tensor(7.0), "per_tensor+zero", torch.tensor(key)
        )[0]
        assert bool((y[x == 0] == 0).all())
        mean += y / 200
    inside = x.abs() < 0.8
    # a grid of 7 steps on [-1, 1]: rounding has a standard deviation of half a step at most
    deviation = (2 / 7) / 2
    standard_error = deviation / 200**0.5  # of a mean over 200 keys
    assert float((mean - x)[inside].abs().max()) < 6 * standard_error


class Products(nn.Module):
    """Module outside the paper's layers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.layer(x), self.weight) @ x.mT


def test_zero_point_is_default_outside_paper_layers():
    model = cpt.quantize_(Products())
    with cpt.precision(model, 8):
        model(torch.randn(3, 4))
    precisions = layer_precisions(model)
    assert all(quantizer.zero_point for quantizer in precisions[""].quantizers.values())
    own = {
        role: q
        for role, q in precisions["layer"].quantizers.items()
        if not role.startswith(("conv_", "attention_"))
    }
    assert [role for role, quantizer in own.items() if quantizer.zero_point] == [
        "computed_weight"
    ]
    assert not any(quantizer.zero_point for quantizer in QUANTIZERS.values())


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.Conv2d(4, 4, 3), nn.LSTM(4, 4), nn.GRU(4, 4)]
)
def test_zero_point_is_absent_in_paper_layers(layer):
    (precision,) = layer_precisions(cpt.quantize_(nn.Sequential(layer))).values()
    is_paper_layer = not isinstance(layer, nn.GRU)
    own = (
        {"input", "input_l0", "weight", "grad"}
        if is_paper_layer
        else {"linear_weight", "attention_query"}
    )
    zero_points = {
        q.zero_point for role, q in precision.quantizers.items() if role in own
    }
    assert zero_points == {not is_paper_layer}


# --- masked and pruned weights ----------------------------------------------------------------------------------------


class MaskedLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * MASK, self.bias)


class MaskedConv(nn.Conv1d):
    def forward(self, x):
        return F.conv1d(x, self.weight * MASK[:, :, None], self.bias)


class MaskedTransposedConv(nn.ConvTranspose1d):
    def forward(self, x):
        return F.conv_transpose1d(x, self.weight * MASK.mT[:, :, None], self.bias)


class MaskedFunctions(nn.Module):
    """Module with masked weights that is no layer of torch."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight * MASK)


MASK = (
    torch.arange(8)[:, None] > torch.arange(8)[None]
).float()  # output d depends on the inputs before d
MASKED = {
    "linear": (lambda: MaskedLinear(8, 8), (5, 8), -1),
    "convolution": (lambda: MaskedConv(8, 8, 3), (5, 8, 7), 1),
    "transposed convolution": (lambda: MaskedTransposedConv(8, 8, 3), (5, 8, 7), 1),
    "linear function": (lambda: MaskedFunctions(F.linear), (5, 8), -1),
    "convolution function": (
        lambda: MaskedFunctions(lambda x, w: F.conv1d(x, w[:, :, None])),
        (5, 8, 7),
        1,
    ),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_masked_weight_hides_its_inputs(name, bits):
    torch.manual_seed(0)
    make, shape, dim = MASKED[name]
    model, x = cpt.quantize_(nn.Sequential(make())), torch.randn(shape)
    with cpt.precision(model, bits), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        model.eval()
        changed = x.clone()
        changed.narrow(dim, 5, 3).neg_()
        y, z = model(x), model(changed)
    assert torch.equal(y.narrow(dim, 0, 6), z.narrow(dim, 0, 6))
    assert not torch.equal(y, z)


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


def parametrized(layer):
    parametrizations.weight_norm(layer)
    with torch.no_grad():
        layer.parametrizations.weight.original1[:, ::2] = 0  # the direction
    return layer


@pytest.mark.parametrize("make", [pruned, parametrized])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(8, 8), lambda: nn.Conv2d(8, 8, 3)])
def test_computed_weight_keeps_its_zeros(make, layer):
    torch.manual_seed(0)
    layer = make(layer())
    model = cpt.quantize_(nn.Sequential(layer))
    with cpt.precision(model, 3), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        x = (
            torch.randn(2, 8, 3, 3)
            if isinstance(layer, nn.Conv2d)
            else torch.randn(2, 8)
        )
        zeros = layer.weight == 0
        assert 0.4 < float(zeros.float().mean()) < 0.6
        model(x)
        operands = []
        layer_precisions(model)["0"].observer = lambda role, x, rows: operands.append(
            role
        )
        model(x)
        assert "computed_weight" in operands
        rounded = layer_precisions(model)["0"].quantize_operand(
            "computed_weight", layer.weight
        )
        assert bool((rounded[zeros] == 0).all())


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(8, 8), nn.Conv1d(8, 8, 3), nn.LSTM(8, 8)],
    ids=["linear", "convolution", "lstm"],
)
def test_pruned_weight_warns_once_and_names_remedy(layer):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter[torch.rand_like(parameter) < 0.3] = 0
    x = torch.randn(3, 8, 8)
    model = cpt.quantize_(nn.Sequential(layer))
    with cpt.precision(model, 4):
        with pytest.warns(
            UserWarning,
            match=r"of the weights of layer '0' are exactly 0 .*\.with_zero_points\(\)",
        ):
            model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)
    cpt.restore_(model)
    cpt.quantize_(model, cpt.QuantConfig().with_zero_points())
    with cpt.precision(model, 4), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        weight = next(p for p in layer.parameters() if p.dim() > 1)
        assert bool(
            (
                layer_precisions(model)["0"].quantize_operand("weight", weight)[
                    weight == 0
                ]
                == 0
            ).all()
        )


def test_pruned_weight_warns_at_later_evaluation():
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(nn.Linear(8, 8)))
    with cpt.precision(model, 4), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(3, 8))
    with torch.no_grad():
        model[0].weight[:, ::2] = 0
    model.eval()
    with cpt.precision(model, 4), pytest.warns(UserWarning, match="are exactly 0"):
        model(torch.randn(3, 8))


@pytest.mark.parametrize(
    "weight", [torch.zeros(4, 4), torch.eye(4), torch.randn(4, 4) + 9]
)
def test_zero_weights_at_conversion_do_not_warn(weight):
    """Give no warning for weights that are all zero, the identity, or far from zero."""
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpt.quantize_(model)
        with cpt.precision(model, 4):
            model(torch.randn(3, 4))


# --- sums over one element --------------------------------------------------------------------------------------------


class OneElement(nn.Module):
    def __init__(self, function, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


ONE_ELEMENT = {
    "linear": OneElement(lambda x, w: F.linear(x[..., None], w), 16, 1),
    "matmul": OneElement(lambda x, w: x[..., None] @ w, 1, 16),
    "bmm": OneElement(lambda x, w: torch.bmm(x.T[..., None], w), 3, 1, 16),
    "einsum": OneElement(
        lambda x, w: torch.einsum("bfk,kd->bfd", x[..., None], w), 1, 16
    ),
    "convolution of one channel": OneElement(
        lambda x, w: F.conv1d(x[:, None], w), 4, 1, 2
    ),
    "outer product of activations": OneElement(
        lambda x, w: x[..., None] @ x[:, None] * w, 3, 3
    ),
}


@pytest.mark.parametrize("name", ONE_ELEMENT)
def test_single_number_ranges_run_in_float32(name):
    x, model = torch.randn(8, 3), cpt.quantize_(nn.Sequential(ONE_ELEMENT[name]))
    with cpt.precision(model, "float"), torch.no_grad():
        expected = model(x)
    with cpt.precision(model, 1), torch.no_grad():
        assert torch.equal(model(x), expected)
    found = cpt.check(model, (x,))
    assert found.quantized_share == 0
    assert len(found.float32) == 1
    plan = cpt.count_bitops(model, (x,), cpt.StaticSchedule(4, 1))
    assert plan.relative_to_float32 == 1


def test_linear_layer_of_one_feature_is_quantized():
    x, model = torch.randn(8, 1), cpt.quantize_(nn.Sequential(nn.Linear(1, 4)))
    with cpt.precision(model, 1), torch.no_grad():
        low = model(x)
    with cpt.precision(model, "float"), torch.no_grad():
        assert not torch.equal(model(x), low)
    assert cpt.check(model, (x,)).quantized_share == 1


def test_bert_preset_uses_paper_attention():
    assert QUANT_PRESETS["bert"].attention == "paper"
    with pytest.raises(ValueError, match="attention"):
        cpt.QuantConfig(attention="per_word")


class Copy(nn.Module):
    def forward(self, weight):
        return weight.clone()


@pytest.mark.parametrize("layer", [nn.Linear(64, 32), nn.Conv2d(64, 32, 3)])
def test_computed_weight_has_blocks_of_a_parameter(layer):
    """Lay the blocks of a format along the sum for parameters and computed weights."""
    config = cpt.QuantConfig(ladder={8: "mxfp8_e4m3"})
    x = torch.randn(2, 64) if isinstance(layer, nn.Linear) else torch.randn(2, 64, 3, 3)
    plain, computed = copy.deepcopy(layer), copy.deepcopy(layer)
    parametrize.register_parametrization(computed, "weight", Copy())
    found = []
    for module in (plain, computed):
        model = cpt.quantize_(nn.Sequential(module), config)
        with cpt.precision(model, 8), torch.no_grad():
            found.append(model(x))
    assert torch.equal(*found)
