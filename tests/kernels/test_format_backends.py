"""Grids of formats in every backend, in autograd, in compiled code, in the recurrence."""

import pytest
import torch
from helpers import INF, NAN, identical, normal
from kernels.test_backends import LAYOUTS

import cpt_core.kernels.lstm  # noqa: F401 - brings the operators of the recurrence
from cpt_core.formats.format import Format
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels import grids, operators, reference

N = torch.tensor(15.0)
GRIDS = ["per_row|e4m3", "per_tensor|e5m2", "per_channel|symmetric4", "per_position|log2_4", "per_row|bf16"]
GRIDS += ["per_tensor|mxfp8_e4m3:partial=1", "per_row|nvfp4:partial=1", "per_sample_mean|e2m1", "per_row|float32"]
GRIDS += ["per_row|affine3:clipping=rms", "per_row|e2m1:clipping=rms", "per_channel|e2m1:clipping=percentile"]
NAMES = ["(n, l, f)", "(n, f)", "(n)", "0-d", "channels_last", "transposed", "gaps", "bfloat16", "float16", "float64"]


def fits(layout, grid):
    """Whether there are rows, blocks and samples."""
    return layout != "0-d" or not ("partial" in grid or grid.startswith(("per_row", "per_sample_mean")))


@pytest.mark.parametrize(("layout", "grid"), [(n, g) for n in NAMES for g in GRIDS if fits(n, g)])
def test_all_backends_round_alike(cpp_kernels, layout, grid):
    x = LAYOUTS[layout]
    for key in (None, torch.tensor(7)):
        expected = grids.fake_quantize(x, N, grid, key)
        assert expected[0].dtype == x.dtype
        assert expected[0].shape == x.shape
        for ops in (torch.ops.cpt, torch.ops.cpt_reference):
            found = ops.fake_quantize(x, N, grid, key)
            assert identical(found, expected)
            assert identical(found[1:], reference.range_of(x, grid.partition("|")[0]))
            again = ops.round_in_range(x, *found[1:], N, grid, key, False)
            assert identical([again], [expected[0]])
    if x.dtype != torch.float32:
        assert identical([expected[0]], [grids.fake_quantize(x.float(), N, grid, key)[0].to(x.dtype)])


def test_a_grid_without_a_format_is_the_one_of_levels():
    x = normal(6, 9)
    assert Quantizer("per_row", format=Format.affine(4)).grid == "per_row"
    assert Quantizer("per_row").on(Quantizer("per_tensor", format=Format.affine(4))).grid == "per_tensor"
    low, width = reference.range_of(x, "per_row")
    expected = reference.round_to_grid(x, low, width, N, None, False), low, width
    assert identical(torch.ops.cpt.fake_quantize(x, N, "per_row", None), expected)
    assert identical(grids.fake_quantize(x, N, "per_row", None), expected)
    stored = operators.round_in_range(x, *expected[1:], N, "per_row", clip=True)
    assert identical([stored], [operators.active.round_to_grid(x, *expected[1:], N, None, True)])
    named = torch.ops.cpt.fake_quantize(x, torch.tensor(1.0), "per_row|affine4", None)
    assert identical(named, expected)  # its own n


@pytest.mark.parametrize("family", operators.FAMILIES)
@pytest.mark.parametrize("key", [None, torch.tensor(4)])
def test_gradients_pass_unchanged(cpp_kernels, family, key):
    ops = getattr(torch.ops, family)
    x, g = normal(4, 6, 8).requires_grad_(), normal(4, 6, 8) * 3
    for grid in ("per_row", *GRIDS):
        y, low, width = ops.fake_quantize(x, N, grid, key)
        assert not low.requires_grad
        assert not width.requires_grad
        results = [y, ops.round_in_range(x, low / 4, width / 4, N, grid, key, True)]
        results += [] if "|" in grid else [ops.round_to_grid(x, low, width, N, key, True)]
        for result in results:
            assert torch.equal(torch.autograd.grad(result, x, g, retain_graph=True)[0], g)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_gradients_are_rounded_to_formats(cpp_kernels, rounding):
    """By the node in C++, which knows no formats itself."""
    y, g = normal(6, 8).requires_grad_(), normal(6, 8)
    key = torch.tensor(5) if rounding == "stochastic" else None
    expected = grids.fake_quantize(g, N, "per_row|e5m2", key)[0]
    torch.ops.cpt.quantize_gradient(y * 1, N, key, "per_row|e5m2").backward(g.clone())
    assert torch.equal(y.grad, expected)
    assert key is None or int(key) == 6


@pytest.mark.slow
def test_compiled_code_rounds_alike(cpp_kernels):
    """The parts that compilers see, in Inductor's code one of them: a compilation takes seconds."""
    torch._dynamo.reset()

    def one(x, key):
        return (torch.ops.cpt.fake_quantize(x, N, "per_row|e4m3", None)[0],)

    def others(x, key):
        a = torch.ops.cpt.fake_quantize(x, N, "per_tensor|mxfp4", key)[0]
        return a, torch.ops.cpt.round_in_range(x, x[2, 0], x[2, 1], N, "unscaled|e5m2", None, True)

    key = torch.tensor(11)
    for step, backend in ((one, "inductor"), (others, "aot_eager_decomp_partition")):
        x = normal(9, 32)
        x[0, 3], x[1, 2] = INF, NAN
        x.requires_grad_()
        compiled = torch.compile(step, fullgraph=True, backend=backend)(x, key)
        for found, expected in zip(compiled, step(x, key), strict=True):
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.allclose(found, expected, rtol=1e-6, atol=0, equal_nan=True)
        compiled[0].sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))


def test_graph_operators_take_grids(cpp_kernels):
    import cpt_core.kernels.graph  # noqa: F401 - brings them

    x, scale, bias = normal(9, 32), torch.rand(9, 1) + 0.5, normal(32)
    expected = grids.fake_quantize(x * scale, N, "per_row|e4m3", None)[0] + bias
    for ops in (torch.ops.cpt, torch.ops.cpt_reference):
        assert torch.equal(ops.scale_round_add(x, scale, bias, N, "per_row|e4m3"), expected)


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
            rounded = grids.fake_quantize(step, N, grid, None)[0]
        else:
            rounded = grids.round_in_range(step, *stored, N, grid, None, True)
        assert torch.equal(operand, rounded)
    if stored is not None and "mx" not in grid:
        assert float(operands.abs().max()) <= 0.25
    later = lstm(torch.ops.cpt, grid, (torch.tensor(-9.0), torch.tensor(18.0)), filled=torch.tensor(0.0))[0]
    assert torch.equal(later[5], lstm(torch.ops.cpt, grid, None)[0][5])  # not filled: own ranges
    last = back[1][-3:]
    assert torch.equal(last, grids.fake_quantize(back[0][-3:], N, "per_row|e5m2", key)[0])
    assert gates.shape == (12, 128)
