"""Grids of formats in every backend, in autograd, in compiled code, in the recurrence."""

import pytest
import torch
from helpers import INF, NAN, identical, normal

import cpt_core.kernels.lstm  # noqa: F401 - brings the operators of the recurrence
from cpt_core.formats.format import FORMATS, Format
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels import grids, operators, reference
from cpt_core.kernels.elements import round_elements
from cpt_core.quantization.fake_quantize import quantize_gradient

N = torch.tensor(15.0)
GRIDS = ["per_row|e4m3", "per_tensor|e5m2", "per_channel|symmetric4", "per_position|log2_4", "per_row|bf16"]
GRIDS += ["per_tensor|mxfp8_e4m3:partial=1", "per_row|nvfp4:partial=1", "per_sample_mean|e2m1", "per_row|float32"]
GRIDS += ["per_row|affine3:clipping=rms", "per_row|e2m1:clipping=rms", "per_channel|e2m1:clipping=percentile"]
LAYOUTS = {
    "(n, l, f)": normal(5, 7, 33),
    "(n, f)": normal(40, 48),
    "(n)": normal(77),
    "0-d": normal(),
    "channels_last": normal(4, 6, 8, 10).contiguous(memory_format=torch.channels_last),
    "transposed": normal(40, 32).t(),
    "gaps": normal(40, 96)[:, ::3],
    "bfloat16": normal(40, 64).bfloat16(),
    "float16": normal(40, 64).half(),
    "float64": normal(40, 64).double(),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_backends_round_alike(cpp_kernels, layout, grid):
    x = LAYOUTS[layout]
    if x.dim() == 0 and ("partial" in grid or grid.startswith(("per_row", "per_sample_mean"))):
        pytest.skip("no rows, no blocks, no samples")
    for key in (None, torch.tensor(7)):
        expected = grids.quantize_to(x, grid, N, key)
        assert expected[0].dtype == x.dtype
        assert expected[0].shape == x.shape
        for ops in (torch.ops.cpt, torch.ops.cpt_reference):
            found = ops.fake_quantize(x, N, grid, key)
            assert identical(found, expected)
            assert identical(found[1:], reference.range_of(x, grid.partition("|")[0]))
            again = ops.round_in_range(x, *found[1:], N, grid, key, False)
            assert identical([again], [expected[0]])
    if x.dtype != torch.float32:
        assert identical([expected[0]], [grids.quantize_to(x.float(), grid, N, key)[0].to(x.dtype)])


def test_a_grid_without_a_format_is_the_one_of_levels():
    x = normal(6, 9)
    assert Quantizer("per_row", format=Format.affine(4)).grid == "per_row"
    assert grids.parts_of("per_row") == ("per_row", None)
    assert Quantizer("per_row").on(Quantizer("per_tensor", format=Format.affine(4))).grid == "per_tensor"
    expected = reference.fake_quantize(x, N, "per_row", None)
    assert identical(torch.ops.cpt.fake_quantize(x, N, "per_row", None), expected)
    assert identical(grids.quantize_to(x, "per_row", N, None), expected)
    stored = operators.round_in_range(x, *expected[1:], N, "per_row", clip=True)
    assert identical([stored], [operators.round_to_grid(x, *expected[1:], N, clip=True)])
    named = torch.ops.cpt.fake_quantize(x, torch.tensor(1.0), "per_row|affine4", None)
    assert identical(named, expected)  # its own n


@pytest.mark.parametrize("name", ["e4m3", "mxfp4", "nvfp4", "symmetric4", "affine4", "e2m1"])
def test_large_tensors_are_those_of_their_parts(name):
    x = normal(1100, 512)
    assert reference.in_parts(x)
    for granularity in ("per_row", "per_tensor"):
        for key in (None, torch.tensor(4)):
            grid = f"{granularity}|{name}"
            found, low, width = grids.quantize_to(x, grid, N, key)
            some = slice(600, 603)
            if granularity == "per_row":
                low, width = low[some], width[some]
            if key is None and name != "nvfp4":
                part = grids.round_in_range(x[some], low, width, N, grid, key, False)
                assert torch.equal(found[some], part)
            near = float(Format.of(name).values().diff().max() / Format.of(name).values().max())
            near *= 1.5 if name == "mxfp4" else 1  # the largest of a block may stand for less than it is
            near *= 2 if name == "affine4" else 1  # the range is twice the largest
            assert float((found - x).abs().max()) <= near * float(x.abs().max()) * 1.01
    if name != "affine4":
        noise = reference.hash_noise(torch.tensor(4), 0, x.numel()).view(x.shape)
        with_noise = round_elements(x.repeat(2, 1), None, FORMATS[name], torch.tensor(4))[: len(x)]
        steps = with_noise - round_elements(x, None, FORMATS[name])
        assert bool((steps * noise >= 0).all())
        assert bool(steps.any())


@pytest.mark.parametrize("family", ["cpt", "cpt_reference"])
@pytest.mark.parametrize("grid", GRIDS)
def test_gradients_pass_unchanged(cpp_kernels, family, grid):
    ops = getattr(torch.ops, family)
    x, g = normal(4, 6, 8).requires_grad_(), normal(4, 6, 8) * 3
    y, low, width = ops.fake_quantize(x, N, grid, None)
    assert not low.requires_grad
    assert not width.requires_grad
    stored = ops.round_in_range(x, low / 4, width / 4, N, grid, None, True)
    for result in (y, stored):
        assert torch.equal(torch.autograd.grad(result, x, g, retain_graph=True)[0], g)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_gradients_are_rounded_to_formats(cpp_kernels, rounding):
    """By the node in C++, which knows no formats itself, and by the one in Python."""
    x, g = normal(6, 8), normal(6, 8)
    expected = grids.quantize_to(g, "per_row|e5m2", N, torch.tensor(5) if rounding == "stochastic" else None)[0]
    y = x.clone().requires_grad_()
    key = torch.tensor(5)
    out = torch.ops.cpt.quantize_gradient(y * 1, N, key if rounding == "stochastic" else None, "per_row|e5m2")
    out.backward(g.clone())
    assert torch.equal(y.grad, expected)
    assert int(key) == (6 if rounding == "stochastic" else 5)
    y.grad, key = None, torch.tensor(5)
    quantize_gradient(y * 1, N, Quantizer("per_row", rounding), key)  # the plain grid still has a node


def test_compiled_code_rounds_alike(cpp_kernels):
    torch._dynamo.reset()

    def step(x, key):
        a = torch.ops.cpt.fake_quantize(x, N, "per_row|e4m3", None)[0]
        b = torch.ops.cpt.fake_quantize(x, N, "per_tensor|mxfp4", key)[0]
        c = torch.ops.cpt.round_in_range(x, x[2, 0], x[2, 1], N, "unscaled|e5m2", None, True)
        return a, b, c

    x, key = normal(9, 32), torch.tensor(11)
    x[0, 3], x[1, 2] = INF, NAN
    x.requires_grad_()
    compiled = torch.compile(step, fullgraph=True)(x, key)
    for found, expected in zip(compiled, step(x, key), strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.allclose(found, expected, rtol=1e-6, atol=0, equal_nan=True)
    compiled[0].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_graph_operators_take_grids(cpp_kernels):
    from cpt_core.kernels.graph import scale_round_add

    x, scale, bias = normal(9, 32), torch.rand(9, 1) + 0.5, normal(32)
    expected = grids.quantize_to(x * scale, "per_row|e4m3", N, None)[0] + bias
    for ops in (torch.ops.cpt, torch.ops.cpt_reference):
        assert torch.equal(ops.scale_round_add(x, scale, bias, N, "per_row|e4m3"), expected)
    assert scale_round_add(x, None, bias, N, "per_row|mxfp4").shape == x.shape


def lstm(ops, grid, stored, filled=None, grad=None, key=None):
    T, B, H = 4, 3, 32
    x, weight, bias = normal(T * B, 4 * H), normal(4 * H, H) / 6, normal(4 * H)
    low, width = stored or (None, None)
    state = normal(B, H), normal(B, H)
    rest = (None, "per_row", None) if grad is None else (N, grad, key)
    out = ops.lstm_forward(x, weight, bias, *state, T, [], False, N, grid, low, width, filled, True, *rest, False)
    back = None
    if grad is not None:
        gates, _, before, tanh_c = out[4:]
        zeros = torch.zeros(B, H)
        back = ops.lstm_backward(normal(T * B, H), zeros, zeros, weight, gates, before, tanh_c, T, [], False, *rest)
    return out, back


@pytest.mark.parametrize("grid", ["per_tensor|e4m3", "per_row|mxfp4", "per_tensor|e2m1:clipping=rms"])
@pytest.mark.parametrize("stored", [None, (torch.tensor(-0.25), torch.tensor(0.5))])
def test_the_recurrence_takes_grids(cpp_kernels, grid, stored):
    key = torch.tensor(2)
    found, back = lstm(torch.ops.cpt, grid, stored, grad="per_row|e5m2", key=key)
    expected, plain = lstm(torch.ops.cpt_reference, grid, stored, grad="per_row|e5m2", key=key)
    assert identical(found, expected)
    assert identical(back, plain)
    ranges, gates, operands = found[3], found[4], found[5]
    assert ranges.shape == (2, 4 if grid.startswith("per_tensor") and stored is None else 0)
    hidden = torch.cat([normal(3, 32), found[0]])[: len(operands)]  # what every step took in
    for step, operand in zip(hidden.split(3), operands.split(3), strict=True):
        if stored is None:
            rounded = grids.quantize_to(step, grid, N, None)[0]
        else:
            rounded = grids.round_in_range(step, *stored, N, grid, None, True)
        assert torch.equal(operand, rounded)
    if stored is not None and "mx" not in grid:
        assert float(operands.abs().max()) <= 0.25
    later = lstm(torch.ops.cpt, grid, (torch.tensor(-9.0), torch.tensor(18.0)), filled=torch.tensor(0.0))[0]
    assert torch.equal(later[5], lstm(torch.ops.cpt, grid, None)[0][5])  # not filled: own ranges
    last = back[1][-3:]
    assert torch.equal(last, grids.quantize_to(back[0][-3:], "per_row|e5m2", N, key)[0])
    assert gates.shape == (12, 128)
