"""Recipes of the field: blocks of several rows, operands rounded for every matmul, layers that stay wide, prices."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import refused
from torch import nn
from torch.nn import functional as F

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions
from cpt_extras.formats.format import FORMATS, Format
from cpt_extras.formats.format_rounding import (
    BLOCK_SCALE_FORMAT,
    rotate,
    round_elements,
)
from cpt_extras.formats.ladder import FormatLadder, MatmulLadders
from cpt_extras.formats.recipes import Recipe, recipes
from cpt_lab.paths import ROOT

PAGE = (ROOT / "docs/formats.md").read_text(encoding="utf-8")

# --- blocks of several rows -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(48, 64), (40, 64), (3, 16, 32)])
def test_tiles_of_nvfp4_equal_formula(shape):
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.rand((*shape[:-1], 1))
    found = cpt.quantize(x, format="nvfp4:rows=16")
    low, width = x.min(), x.max() - x.min()
    tensor_scale = torch.maximum(-low, low + width) / (6 * 448)
    for matrix, rounded in zip(
        x.flatten(0, -3) if x.dim() > 2 else [x],
        found.flatten(0, -3) if x.dim() > 2 else [found],
        strict=True,
    ):
        for rows, rounded_rows in zip(matrix.split(16), rounded.split(16), strict=True):
            for tile, result in zip(
                rows.split(16, 1), rounded_rows.split(16, 1), strict=True
            ):
                relative = (tile.abs().max() / 6 / tensor_scale).reshape(1)
                scale = (
                    round_elements(relative, None, BLOCK_SCALE_FORMAT) * tensor_scale
                )
                expected = round_elements(tile.contiguous(), scale, FORMATS["e2m1"])
                assert torch.equal(result, expected)


def test_square_tiles_commute_with_transposition():
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    for name in ("nvfp4:rows=16", "mx(symmetric4,32):rows=32"):
        rounded = cpt.quantize(weight, format=name)
        assert torch.equal(
            cpt.quantize(weight.t().contiguous(), format=name).t(), rounded
        )
        assert str(Format.of(name)) == name
    assert not torch.equal(rounded, cpt.quantize(weight, format="mx(symmetric4,32)"))
    assert Format.of("nvfp4:rows=16").bits_per_element == 4 + 8 / 256


def test_tiles_reject_wrong_values():
    refused("rows of a block: expected .* got 0|rows", Format.nvfp4, rows=0)
    refused("rows=2 needs a format with blocks", Format.minifloat, 2, 1, rows=2)
    refused("option 'rows' .* cannot be 'x'", Format.of, "nvfp4:rows=x")
    refused("need a matrix", cpt.quantize, torch.ones(16), format="nvfp4:rows=16")


# --- three matmuls --------------------------------------------------------------------------------


def nearest(recipe):
    """Return the ladders of a recipe, all rounded to nearest."""

    def rounded(ladder):
        levels = {level: ladder.quantizer(level) for level in ladder}
        return FormatLadder(
            {level: replace(q, rounding="nearest") for level, q in levels.items()}
        )

    return MatmulLadders(*map(rounded, recipe.ladders))


def expected_pass(recipe, key, x, weight, dy):
    """Return output and gradients of a linear layer from single tensors that are rounded along their sums."""

    def rounded(x, role):
        level = getattr(nearest(recipe), role).quantizer(4)
        return cpt.quantize(x.contiguous(), format=level.format)

    def rotated(role, *operands):
        size = getattr(recipe.ladders, role).quantizer(4).hadamard
        return [rotate(x.contiguous(), size, key) if size else x for x in operands]

    y = rounded(x, "activation") @ rounded(weight, "weight").t()
    dy_rows, weight_rows = rotated("error", dy, weight.t())
    dx = rounded(dy_rows, "error") @ rounded(weight_rows, "weight").t()
    padding = (0, -len(x) % 64)
    dy_rows, x_rows = rotated(
        "weight_gradient", F.pad(dy.t(), padding), F.pad(x.t(), padding)
    )
    dw = rounded(dy_rows, "weight_gradient") @ rounded(x_rows, "activation").t()
    return y, dx, dw


@pytest.mark.parametrize("name", recipes)
@pytest.mark.parametrize("tokens", [64, 10])
def test_recipe_rounds_operands_of_every_matmul(name, tokens):
    recipe = recipes[name]
    torch.manual_seed(0)
    x = torch.randn(tokens, 128, requires_grad=True)
    dy = torch.randn(tokens, 64) * torch.rand(tokens, 1)
    layer = nn.Linear(128, 64, bias=False)
    cpt.quantize_(layer, cpt.QuantConfig(ladder=nearest(recipe)))
    with cpt.precision(layer, 4, q_grad=4):
        y = layer(x)
        y.backward(dy)
    expected = expected_pass(
        recipe, layer.precision.key, x.detach(), layer.weight.detach(), dy
    )
    for found, right in zip((y, x.grad, layer.weight.grad), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_recipe_rotations_of_both_operands_cancel():
    fine = FormatLadder({4: "affine20"})
    rotated = FormatLadder({4: "affine20:hadamard=16"})
    ladders = MatmulLadders(fine, fine, rotated, rotated)
    torch.manual_seed(0)
    layers = [nn.Linear(32, 48), nn.Linear(32, 48)]
    layers[1].load_state_dict(layers[0].state_dict())
    cpt.quantize_(layers[0], cpt.QuantConfig(ladder=ladders))
    x, dy = torch.randn(3, 7, 32), torch.randn(3, 7, 48)
    grads = []
    with cpt.precision(layers[0], 4, q_grad=4):
        for layer in layers:
            inputs = x.clone().requires_grad_()
            layer(inputs).backward(dy)
            grads.append([inputs.grad, layer.weight.grad, layer.bias.grad])
    for found, right in zip(*grads, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)


def test_recipe_gradients_are_unbiased():
    torch.manual_seed(0)
    layer = recipes["fp4-all-the-way"].quantize_(nn.Sequential(nn.Linear(32, 32)))
    x, dy = torch.randn(64, 32), torch.randn(64, 32)
    inputs = x.clone().requires_grad_()
    errors = []
    with cpt.precision(layer, 4, q_grad=4):
        for _ in range(200):
            layer.zero_grad()
            layer(inputs).backward(dy)
            x_rounded = cpt.quantize(x.t().contiguous(), format="nvfp4")
            errors.append(layer[0].weight.grad - dy.t() @ x_rounded.t())
    single = torch.stack([e.norm() for e in errors]).mean()
    assert torch.stack(errors).mean(0).norm() < 0.15 * single


def test_recipe_levels_switch_matmuls_apart():
    torch.manual_seed(0)
    layer = recipes["nvfp4"].quantize_(nn.Linear(32, 32), wide=[])
    x = torch.randn(64, 32)
    gradients = {}
    for forward, backward in ((8, 4), (4, 4), (8, 8), (16, 16)):
        layer.zero_grad()
        torch.manual_seed(1)
        layer.precision.noise_key.fill_(7)
        with cpt.precision(layer, forward, q_grad=backward):
            y = layer(x)
            y.backward(torch.ones_like(y))
        gradients[forward, backward] = y.detach(), layer.weight.grad.clone()
    outputs, weights = zip(*gradients.values(), strict=True)
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    # the backward matmuls do not see the level of the forward pass
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_recipe_refuses_second_derivatives():
    layer = recipes["mxfp8"].quantize_(nn.Linear(32, 32))
    x = torch.randn(4, 32, requires_grad=True)
    with cpt.precision(layer, 8):
        (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# --- models ---------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(7))
        )

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.layers(x)


def test_recipe_keeps_last_layers_wide():
    recipe, model = recipes["nvfp4"], Net()
    assert recipe.wide_layers(model) == ["layers.5.0", "layers.6.0"]
    recipe.quantize_(model)
    x = torch.randn(2, 16, 32)
    with cpt.precision(model, 4, q_grad=4):
        summary = str(cpt.summary(model))
        formats = {
            name: str(p.grids.describe(p.active_bits))
            for name, p in layer_precisions(model).items()
        }
        found = cpt.check(model, (x,))
    assert formats["layers.4.0"].startswith("activation=nvfp4, weight=nvfp4:rows=16")
    assert formats["layers.5.0"] == (
        "activation=bf16:rounding=nearest, weight=bf16:rounding=nearest, "
        "error=bf16:rounding=nearest, weight_gradient=bf16:rounding=nearest"
    )
    assert "BROKEN" not in str(found)
    assert {row.layer for row in found.float32} == {"conv", "attention"}
    assert "float32 (not selected by quantize_)" in summary


def test_recipe_leaves_one_layer_narrow():
    assert recipes["nvfp4"].wide_layers(nn.Sequential(nn.Linear(32, 32))) == []


def test_recipe_warns_where_little_is_linear():
    model = nn.Sequential(nn.Conv1d(32, 64, 9), nn.Linear(32, 32))
    with pytest.warns(cpt.QuantizationWarning, match="hold 5% of the weights"):
        recipes["mxfp8"].quantize_(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 3, 4, 32)])
def test_recipe_takes_inputs_of_any_shape_and_type(shape, dtype):
    torch.manual_seed(0)
    layer = recipes["nvfp4"].quantize_(nn.Linear(32, 64).to(dtype))
    x = torch.randn(shape).to(dtype).requires_grad_()
    with cpt.precision(layer, 4, q_grad=4):
        layer(x).sum().backward()
    assert (x.grad.dtype, x.grad.shape) == (dtype, x.shape)
    assert layer.weight.grad.dtype == dtype
    assert layer.weight.grad.isfinite().all()


def test_recipe_backward_ignores_autocast():
    torch.manual_seed(0)
    layer = recipes["mxfp8"].quantize_(nn.Linear(32, 32))
    x, gradients = torch.randn(16, 32), []
    for enabled in (False, True):
        layer.zero_grad()
        with cpt.precision(layer, 8, q_grad=8):
            y = layer(x).square().sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                y.backward()
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(*gradients)


def test_recipe_rejects_wrong_models_and_names():
    refused("has no linear layer", recipes["nvfp4"].quantize_, nn.Conv1d(4, 4, 1))
    refused("unknown wide 'x'", recipes["nvfp4"].quantize_, Net(), wide=["x"])
    refused("expected a list", recipes["nvfp4"].quantize_, Net(), wide="layers.5.0")
    for name, match in (("mxfp4", "blocks of 64"), ("nvfp4", "blocks of 16")):
        narrow = recipes[name].quantize_(nn.Linear(64, 40), wide=[])
        with pytest.raises(ValueError, match=f"{match} .*error. do not divide its 40"):
            cpt.PrecisionScheduler(narrow, cpt.StaticSchedule(4, 10), q_grad=4)
    odd = recipes["nvfp4"].quantize_(nn.Linear(20, 32), wide=[])
    with pytest.raises(
        ValueError, match=r"blocks of 16 .* do not divide its 20 features"
    ):
        cpt.PrecisionScheduler(odd, cpt.StaticSchedule(4, 10), q_grad=4)


def test_recipes_have_levels_sources_and_names():
    for name, recipe in recipes.items():
        assert isinstance(recipe, Recipe)
        assert recipe.name == name
        assert "arXiv" in recipe.source or recipe.source.startswith("ours")
        assert len(recipe.about) > 40
        for ladder in recipe.ladders:
            assert ladder.levels == tuple(range(4, 17))
            assert ladder.quantizer(7) == ladder.quantizer(4)
            assert {ladder.quantizer(q).rounding for q in (8, 16)} == {"nearest"}
        assert f"| `{name}` | {recipe.source} |" in PAGE
        assert recipe.about in " ".join(PAGE.split())


@pytest.mark.parametrize("name", recipes)
def test_recipe_trains_copies_and_resumes(name):
    torch.manual_seed(0)
    model = recipes[name].quantize_(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    )
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    schedule = cpt.RoleSchedules(
        weight=cpt.StaticSchedule(8, 6),
        activation=cpt.StaticSchedule(8, 6),
        gradient=cpt.StaticSchedule(4, 6),
    )

    def train(model, precision, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(steps):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            precision.step()
            losses.append(loss.item())
        return losses

    precision = cpt.PrecisionScheduler(model, schedule)
    first = train(model, precision, 3)
    twin = copy.deepcopy(model)
    twin_precision = cpt.PrecisionScheduler(twin, schedule)
    twin_precision.load_state_dict(precision.state_dict())
    rest = train(model, precision, 3)
    assert train(twin, twin_precision, 3) == rest
    assert rest[-1] < first[0]


# --- prices ---------------------------------------------------------------------------------------


def test_recipe_prices_backward_matmuls_at_gradient_level():
    torch.manual_seed(0)
    model = recipes["nvfp4"].quantize_(nn.Sequential(nn.Linear(32, 32)), wide=[])
    x = torch.randn(16, 32, requires_grad=True)
    schedule = cpt.StaticSchedule(8, 5)
    ladders = recipes["nvfp4"].ladders
    late = (8 * 8 + 4 * 4 + 4 * 4) / (3 * 8 * 8)
    assert schedule.relative_cost(4, 8, ladder=ladders) == pytest.approx(late)
    roles = cpt.RoleSchedules(
        weight=schedule, activation=schedule, gradient=cpt.StaticSchedule(4, 5)
    )
    assert roles.relative_cost(q_max=8, ladder=ladders) == pytest.approx(late)
    rate = schedule.relative_cost(4, 8, cost="tensor_core", ladder=ladders)
    assert rate == pytest.approx((1 + 0.5 + 0.5) / 3)
    macs = 16 * 32 * 32
    plan = cpt.count_bitops(model, (x,), schedule, q_grad=4)
    assert plan.total == pytest.approx(5 * macs * (64 + 16 + 16) / 32**2)
    precision = cpt.PrecisionScheduler(model, schedule, q_grad=4)
    with cpt.BitOpsLedger(model) as ledger:
        model(x).sum().backward()
        precision.step()
    assert ledger.total() == pytest.approx(plan.total / 5)
