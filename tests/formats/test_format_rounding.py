"""Rounding to formats, against all values of a format, casts of ml_dtypes and block specifications."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from formats.test_formats import ML_DTYPES
from helpers import INF, NAN, identical, normal, refused

from cpt_core.quantization.roles import QUANTIZERS
from cpt_core.quantization.rounding import RANGE_FUNCTIONS, range_of
from cpt_extras.formats.format import FORMATS, Format
from cpt_extras.formats.format_rounding import rotate, round_elements
from cpt_extras.formats.ladder_rounding import on_level
from cpt_extras.formats.quantizer import FormatQuantizer
from cpt_extras.formats.tensor_rounding import quantize
from cpt_extras.kernels import grids

UNCOMMON = "e2m2 e3m3 e3m0 e4m0 e5m1 e4m3:specials=infinity e3m4 e8m0 e6m1 e5m10"
SMALL_FORMATS = [
    *(n for n, f in FORMATS.items() if f.kind != "affine" and f.bits <= 8),
    *UNCOMMON.split(),
]
SMALL_FORMATS = [name for name in SMALL_FORMATS if not Format.of(name).block]
N = torch.tensor(15.0)  # number of steps, ignored by number formats


def hard_numbers(format):
    """Return values of a format, midpoints, their neighbours, and overflowing, tiny and random numbers."""
    values = format.values()
    midpoints = (values[1:].double() + values[:-1].double()).div(2).float()
    near = torch.cat([values, midpoints])
    neighbours = [torch.nextafter(near, torch.tensor(side)) for side in (-INF, INF)]
    largest = torch.tensor([1.0, 1.01, 1.06, 1.2, 1.5, 2.0, 7.3]) * format.largest
    tiny = torch.tensor([0.0, 1e-45, 1e-38, 2e-38])
    random = normal(500, 4).flatten() * torch.logspace(-12, 12, 500, 2).repeat(4)
    limit = torch.tensor([torch.finfo().max])
    numbers = [near, *neighbours, largest, -largest, limit, tiny, -tiny, random]
    return torch.cat([part[part.isfinite()] for part in numbers])


def round_in_numpy(x, format):
    """Return the nearest format value of float64 numbers, with ties to even codes, by search."""
    values = format.values().numpy().astype(np.float64)
    values = values[values >= 0]
    above = np.clip(np.searchsorted(values, np.abs(x)), 1, len(values) - 1)
    down, up = np.abs(x) - values[above - 1], values[above] - np.abs(x)
    goes_up = (down > up) | ((down == up) & (above % 2 == 0))
    return np.where(goes_up, values[above], values[above - 1]) * np.sign(x)


def nearest(x, format):
    return torch.from_numpy(round_in_numpy(x.double().numpy(), format)).float()


def rounded(x, grid):
    """Return a tensor rounded to nearest on a grid."""
    return torch.ops.cpt_reference.fake_quantize(x, N, grid, None)[0]


# --- elements -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL_FORMATS)
def test_round_elements_returns_nearest_value(name):
    format = Format.of(name)
    x, values = hard_numbers(format), format.values()
    assert torch.equal(round_elements(x, None, format), nearest(x, format))
    assert torch.equal(round_elements(values, None, format), values)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_round_elements_matches_ml_dtypes_casts(name):
    """Match casts of ml_dtypes without saturation, except for formats without special values."""
    format = Format.of(name)
    x, saturates = hard_numbers(format), format.specials == "none"
    with np.errstate(over="ignore"):
        cast = torch.from_numpy(x.numpy().astype(ML_DTYPES[name]).astype(np.float32))
    found = round_elements(x, None, replace(format, saturate=saturates))
    assert identical([found], [cast])
    assert saturates or not found.isfinite().all()  # some did overflow


WIDE_FORMATS = "bf16 fp16 e8m10 e5m21 e8m22 e5m23 e8m7:saturate=0".split()


@pytest.mark.parametrize("name", WIDE_FORMATS)
def test_round_elements_rounds_wide_formats(name):
    format = Format.of(name)
    x = normal(4000) * 2.0 ** torch.arange(-140, 60).repeat(20)
    x = torch.cat([x, torch.tensor([3.4e38, -3.4e38, 0.0, 65520])])
    exponent = (torch.frexp(x.double()).exponent - 1).clamp(min=format.min_exponent)
    step = 2.0 ** (exponent.double() - format.mantissa)
    expected = (x.double() / step).round() * step
    if format.saturate:
        expected = expected.clamp(-format.largest, format.largest)
    else:
        expected[expected.abs() > format.largest] *= INF
    assert torch.equal(round_elements(x, None, format), expected.float())
    with_noise = round_elements(x, None, format, torch.tensor(3)).double()
    inside = with_noise.isfinite() & (x.abs() < format.largest)
    assert ((with_noise - x.double()).abs() < step)[inside].all()


@pytest.mark.parametrize("name", [*SMALL_FORMATS, "bf16", "fp16"])
@pytest.mark.parametrize("key", [None, 5])
def test_round_elements_propagates_nonfinite_values(name, key):
    format, key = Format.of(name), None if key is None else torch.tensor(key)
    x = torch.tensor([INF, -INF, NAN, 1.0])
    found = round_elements(x, None, format, key)
    has_infinity = format.specials == "infinity"
    infinities = torch.tensor([INF, -INF] if has_infinity else [NAN, NAN])
    assert identical([found[:2]], [infinities])
    assert found[2].isnan()
    assert found[3] == 1 or format.kind == "minifloat"


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "symmetric4", "log2_4", "e5m2"])
def test_round_elements_overflows_without_saturation(name):
    format = Format.of(f"{name}:saturate=0")
    last_step = format.values()[-1] - format.values()[-2]
    beyond = torch.tensor([0.0, 0.4, 30.0]) * last_step
    found = round_elements(format.largest + beyond, None, format)
    overflow = INF if format.specials == "infinity" else NAN
    assert identical([found], [torch.tensor([format.largest] * 2 + [overflow])])


@pytest.mark.parametrize("name", [n for n in SMALL_FORMATS if n != "e8m0"])
def test_stochastic_rounding_is_unbiased_between_neighbours(name):
    draws, format = 400, Format.of(name)
    values = format.values()
    some = values[:: max(1, 2**format.bits // 64)]
    smallest = torch.tensor([0.3, -0.7]) * values.diff().min()
    x = torch.cat([some, some[:-1].lerp(some[1:], 0.3), smallest])
    above = torch.bucketize(x, values).clamp(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    found = round_elements(x.repeat(draws, 1), None, format, torch.tensor(0))
    is_value = (values == x[:, None]).any(1)
    assert torch.equal(found[:, is_value], x[is_value].expand(draws, -1))
    assert ((found == low) | (found == high) | is_value).all()
    bias = ((found.double().mean(0) - x) / (high - low))[~is_value]
    limit = 5 * 0.5 / math.sqrt(draws)  # standard deviations of a mean
    assert float(bias.abs().max()) < limit
    assert float(bias.mean().abs()) < limit / math.sqrt(len(bias))


# --- blocks and ranges --------------------------------------------------------------------------


def mx_in_numpy(x, element, block):
    """Round as OCP MX 1.0, section 6.3: shared exponents, saturating elements."""
    result = np.empty_like(x)
    # the integers of MXINT8 are fractions with 6 bits behind the point
    unit = 2.0 ** (2 - element.bits) if element.kind == "symmetric" else 1.0
    max_exponent = math.floor(math.log2(element.largest * unit))
    for row in np.ndindex(*x.shape[:-1]):
        for start in range(0, x.shape[-1], block):
            part = x[row][start : start + block].astype(np.float64)
            largest = np.abs(part).max()
            if not np.isfinite(largest):
                result[row][start : start + block] = np.nan
                continue
            exponent = math.floor(math.log2(largest)) if largest else -999
            scale = 2.0 ** np.clip(exponent - max_exponent, -127, 127)
            elements = round_in_numpy(part / scale / unit, element)
            result[row][start : start + block] = elements * scale * unit
    return result


HARD_BLOCKS = [
    normal(3, 4, 64) * 2.0 ** torch.arange(-30, 34),
    torch.zeros(2, 32),
    normal(2, 64) * 1e-38,
    normal(2, 64) * 1e-44,
    normal(2, 64).clamp(-3, 3) * 1e38,
    normal(5, 32).index_fill(1, torch.tensor([3]), NAN),
    torch.cat([normal(1, 32), torch.full((1, 32), INF)]),
    2.0 ** torch.arange(-16, 16.0)[None],
]


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.scale == "e8m0"])
def test_mx_blocks_match_ocp_specification(name):
    element = replace(FORMATS[name], block=0, scale="")
    for x in HARD_BLOCKS:
        expected = torch.from_numpy(mx_in_numpy(x.numpy(), element, 32))
        assert identical([rounded(x, f"per_tensor|{name}")], [expected])


def test_mx_last_block_may_be_shorter():
    x, element = normal(3, 70), Format.minifloat(2, 1)
    expected = torch.from_numpy(mx_in_numpy(x.numpy(), element, 32))
    assert torch.equal(rounded(x, "per_row|mxfp4:partial=1"), expected)
    for ops in (torch.ops.cpt, torch.ops.cpt_reference):
        quantize = ops.fake_quantize
        message = r"blocks of 32 do not divide .*\(3, 70\); with partial=True"
        refused(message, quantize, x, N, "per_row|mxfp4", None)
        number, grid = x[0, 0], "per_tensor|mxfp4:partial=1"
        refused("blocks of 32 do not divide", quantize, number, N, grid, None)


def nvfp4_in_numpy(x, block):
    tensor_scale = np.float32(np.abs(x).max()) / np.float32(6 * 448)
    blocks = x.reshape(-1, block)
    largest = np.abs(blocks).max(1, keepdims=True) / np.float32(6) / tensor_scale
    in_e4m3 = np.minimum(largest, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    scale = in_e4m3.astype(np.float32) * tensor_scale
    with np.errstate(invalid="ignore", divide="ignore"):
        elements = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    values = elements.astype(np.float32) * scale
    return np.where(scale == 0, 0, values).reshape(x.shape)


@pytest.mark.parametrize("spread", [0, 1, 3])
def test_nvfp4_rounding_matches_numpy(spread):
    scales = 10.0 ** (spread * normal(6, 5, 4)).repeat_interleave(16, -1)
    x = normal(6, 5, 64) * scales
    found = rounded(x, "per_tensor|nvfp4")
    expected = torch.from_numpy(nvfp4_in_numpy(x.numpy(), 16))
    assert float((found - expected).abs().max()) <= float(x.abs().max()) * 1e-6
    assert (found != x).any()
    by_row = [rounded(row, "per_tensor|nvfp4") for row in x.flatten(0, 1)]
    assert torch.equal(rounded(x, "per_row|nvfp4"), torch.stack(by_row).view_as(x))


@pytest.mark.parametrize("granularity", RANGE_FUNCTIONS)
@pytest.mark.parametrize("name", ["e4m3", "symmetric4", "log2_4", "e2m1", "affine4"])
def test_format_scale_maps_range_to_largest_value(granularity, name):
    format, quantize = Format.of(name), torch.ops.cpt_reference.fake_quantize
    for magnitude in (1.0, 1e30, 1e-20):
        x = normal(4, 5, 6) * magnitude
        y, low, width = quantize(x, N, f"{granularity}|{name}", None)
        assert all(map(torch.equal, (low, width), range_of(x, granularity)))
        if name == "affine4":
            plain = grids.fake_quantize(x, N, granularity, None)[0]
            torch.testing.assert_close(y, plain.clamp(low, low + width))
            assert granularity == "per_sample_mean" or torch.equal(y, plain)
        else:
            scale = torch.maximum(-low, low + width) / format.largest
            expected = nearest(x / scale, format) * scale
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["e4m3", "symmetric8", "nvfp4", "mxfp4", "log2_3"])
def test_format_rounding_handles_tiny_ranges(name):
    assert torch.equal(
        rounded(torch.zeros(2, 32), f"per_row|{name}"), torch.zeros(2, 32)
    )
    assert rounded(normal(2, 32) * 1e-44, f"per_row|{name}").isfinite().all()


@pytest.mark.parametrize("name", ["e4m3", "mxfp8_e4m3", "mxint8", "symmetric4"])
def test_format_rounding_limits_nan_to_range(name):
    for bad in (NAN, INF, -INF):
        x = normal(2, 32)
        x[0, 7] = bad
        y = rounded(x, f"per_row|{name}")
        assert y[0].isnan().all()
        assert y[1].isfinite().all()


# --- quantize -----------------------------------------------------------------------------------


def test_quantize_accepts_bits_and_equal_formats():
    x = normal(5, 6)
    by_tensor = grids.fake_quantize(x, N, "per_tensor", None)[0]
    by_row = grids.fake_quantize(x, N, "per_row", None)[0]
    for found in (quantize(x, 4), quantize(x, bits=4, quantizer="conv_input")):
        assert torch.equal(found, by_tensor)
    assert torch.equal(quantize(x, format="affine4"), by_tensor)
    assert torch.equal(quantize(x, 4, "linear_weight"), by_row)
    assert torch.equal(quantize(x, format="affine12"), quantize(x, 12))
    assert quantize(x, 24) is x
    assert quantize(x, format="float32") is x


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "float32"])
def test_quantize_rounds_to_every_format(name):
    x, format = normal(6, 64) * 3, FORMATS[name]
    steps = torch.tensor(2.0**format.bits - 1)

    def on_grid(grid):
        return grids.fake_quantize(x, steps, grid, None)[0]

    y = quantize(x, format=name)
    if format.plain_affine:
        assert torch.equal(y, quantize(x, format.bits))
    elif format.kind in ("minifloat", "log2") and not format.block:  # no scale
        assert torch.equal(y, round_elements(x, None, format))
    else:
        assert torch.equal(y, on_grid(f"per_tensor|{name}"))
    level = FormatQuantizer(format=format)
    for role in ("linear_weight", "conv_weight"):
        grid = on_level(QUANTIZERS[role], level).grid
        assert torch.equal(quantize(x, format=format, quantizer=role), on_grid(grid))
    by_row = quantize(x, format=FormatQuantizer("per_row", format=format))
    assert torch.equal(by_row, quantize(x, format=f"{name}:granularity=per_row"))
    assert torch.equal(by_row, on_grid(f"per_row|{name}"))


def test_quantize_wide_minifloat_without_infinities():
    x = torch.tensor([69771.1, -131008.0, 1e9, 6e-8, 3e-8])
    found = quantize(x, format=Format.minifloat(5, 10, "none"))
    assert found.tolist() == [69760.0, -131008.0, 131008.0, 2.0**-24, 2.0**-24]


@pytest.mark.parametrize("name", ["e4m3", "mxfp4", "nvfp4", "symmetric4", "log2_3"])
def test_quantize_passes_gradients_and_keeps_dtype(name):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = normal(4, 32).to(dtype).requires_grad_()
        y = quantize(x, format=name)
        y.backward(torch.full_like(y, 2.0))
        assert y.dtype == dtype
        assert x.grad.unique().tolist() == [2.0]
    assert quantize(torch.empty(0, 32), format=name).shape == (0, 32)


def test_quantize_stochastic_rounding_repeats_by_seed():
    x, level = normal(100, 30), FormatQuantizer.of("e4m3:rounding=stochastic")
    first, again, other = (quantize(x, format=level, seed=s) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.isin(first, FORMATS["e4m3"].values()).all()


X = normal(4, 32)
WITH_NAN = X.index_fill(1, torch.tensor([5]), NAN)
WITH_INFINITY = -X.index_fill(0, torch.tensor([2]), INF)
STOCHASTIC = "e4m3:rounding=stochastic"


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X, {}, "either bits or a format, got bits=None and format=None"),
        (X, {"bits": 8, "format": "e4m3"}, "either bits or a format, got bits=8"),
        (X, {"format": "e4m99"}, "mantissa must be .* and at most 32, got 99"),
        (X, {"format": "int8"}, "unknown format 'int8'"),
        (X, {"format": "e4m3", "quantizer": "weights"}, "unknown quantizer 'weights'"),
        (X, {"format": STOCHASTIC}, "needs a seed"),
        (X, {"format": STOCHASTIC, "seed": 1.5}, "seed must be a whole .* got 1.5"),
        (X, {"format": "e4m3", "seed": 1}, "takes one; got seed=1 for format e4m3"),
        (X, {"bits": 8, "seed": 1}, "nothing else takes one"),
        (X.int(), {"format": "e4m3"}, r"only floating tensors.*torch.int32"),
        (X.to_sparse(), {"bits": 4}, r"only dense tensors can .*_coo; .*to_dense"),
        (X.to_sparse(), {"format": "e4m3"}, "only dense tensors can .*sparse_coo"),
        (X.bfloat16(), {"format": "fp16"}, "fp16 is wider than .* torch.bfloat16"),
        (X.bfloat16(), {"format": "e8m10"}, "e8m10 is wider"),
        (X.bfloat16(), {"format": "affine12"}, "affine12 is wider"),
        (X.half(), {"format": "bf16"}, r"bf16 is wider.*torch.float16"),
        (X.half(), {"format": "symmetric14"}, "symmetric14 is wider"),
        (X.half(), {"format": "log2_8"}, "log2_8 is wider"),
        (X[:, :30], {"format": "mxfp4"}, r"blocks of 32 .* \(4, 30\); with partial"),
        (WITH_NAN, {"format": "mxfp4"}, r"nan, which stands at \(0, 5\)"),
        (WITH_INFINITY, {"format": "nvfp4"}, r"-inf, which .* at \(2, 0\)"),
    ],
)
def test_quantize_rejects_invalid_arguments(x, options, message):
    refused(message, quantize, x, **options)


# --- rotation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 16, 32])
def test_rotate_preserves_norms_and_inner_products(size):
    a, b = normal(3, 5, 64), normal(7, 64)
    turned, matrix = rotate(a, size, 3), rotate(torch.eye(64), size, 3)
    assert turned.shape == a.shape
    assert torch.allclose(turned.norm(dim=-1), a.norm(dim=-1), rtol=1e-5)
    assert torch.allclose(rotate(turned, size, 3, inverse=True), a, atol=1e-5)
    assert torch.allclose(turned @ rotate(b, size, 3).t(), a @ b.t(), atol=1e-4)
    assert torch.allclose(matrix @ matrix.t(), torch.eye(64), atol=1e-6)
    assert torch.allclose(matrix.abs().amax(1), torch.full((64,), size**-0.5))
    assert size <= 2 or not torch.equal(turned, rotate(a, size, 4))
    x = a[0, 0].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: rotate(v, size, 3), x)


def test_rotate_trains_after_a_first_call_in_inference_mode():
    x = normal(4, 32)
    with torch.inference_mode():
        expected = rotate(x, 32, seed=6)
    y = x.clone().requires_grad_()
    found = rotate(y, 32, seed=6)
    found.sum().backward()
    assert torch.equal(found, expected)
    assert torch.allclose(y.grad, rotate(torch.ones(4, 32), 32, 6, inverse=True))


@pytest.mark.slow
def test_rotate_spreads_outliers():
    x = normal(4, 64)
    x[:, 3] = 100.0
    assert float(rotate(x, 64, 0).abs().max()) < 30
    assert rotate(x.bfloat16(), 16, 0).dtype == torch.bfloat16
    refused(r"do not divide .*\(4, 64\)", rotate, x, 128, 0)
    turn = torch.compile(
        lambda v: rotate(v, 16, 5), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(turn(x), rotate(x, 16, 5))
