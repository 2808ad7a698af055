"""Rounding to formats, against all values of a format, casts of ml_dtypes and block specifications."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from formats.test_formats import THEIRS
from helpers import INF, NAN, normal, refused

from cpt_core.quantization import rounding as reference
from cpt_extras.formats.format import FORMATS, Format
from cpt_extras.formats.format_rounding import round_elements
from cpt_extras.kernels import grids

SMALL = [
    n for n, f in FORMATS.items() if f.kind != "affine" and not f.block and f.bits <= 8
]
SMALL += [
    "e2m2",
    "e3m3",
    "e3m0",
    "e4m0",
    "e5m1",
    "e4m3:specials=infinity",
    "e3m4",
    "e8m0",
    "e6m1",
    "e5m10",
]
NINE = torch.tensor(511.0)  # levels, ignored by number formats


def numbers(format):
    """Return values of a format, midpoints, their neighbours, and overflowing, tiny and random numbers."""
    values = format.values()
    middles = (values[1:].double() + values[:-1].double()).div(2).float()
    near = torch.cat([values, middles])
    beside = [torch.nextafter(near, torch.tensor(side)) for side in (-INF, INF)]
    most = torch.tensor([1.0, 1.01, 1.06, 1.2, 1.5, 2.0, 7.3]) * format.largest
    tiny = torch.tensor([0.0, 1e-45, 1e-38, 2e-38])
    rest = normal(500, 4).flatten() * torch.logspace(-12, 12, 500, 2).repeat(4)
    last = torch.tensor([torch.finfo().max])
    found = torch.cat([near, *beside, most, -most, last, tiny, -tiny, rest])
    return found[found.isfinite()]


def rounded(x, grid):
    """Round a tensor to nearest on a grid."""
    return torch.ops.cpt_reference.fake_quantize(x, NINE, grid, None)[0]


def nearest(x, format):
    """Return the nearest format value of float64 numbers, with ties to even codes, by search."""
    half = format.values().numpy().astype(np.float64)
    half = half[half >= 0]
    above = np.clip(np.searchsorted(half, np.abs(x)), 1, len(half) - 1)
    low, high = np.abs(x) - half[above - 1], half[above] - np.abs(x)
    up = (low > high) | ((low == high) & (above % 2 == 0))
    return np.where(up, half[above], half[above - 1]) * np.sign(x)


def oracle(x, format):
    return torch.from_numpy(nearest(x.double().numpy(), format)).float()


@pytest.mark.parametrize("name", SMALL)
def test_round_elements_returns_nearest_value(name):
    format = Format.of(name)
    x = numbers(format)
    assert torch.equal(round_elements(x, None, format), oracle(x, format))
    values = format.values()
    assert torch.equal(round_elements(values, None, format), values)


@pytest.mark.parametrize("name", THEIRS)
def test_round_elements_matches_ml_dtypes_casts(name):
    """Match casts of ml_dtypes without saturation, except for formats without special values."""
    format = Format.of(name)
    x = numbers(format)
    with np.errstate(over="ignore"):
        theirs = torch.from_numpy(x.numpy().astype(THEIRS[name]).astype(np.float32))
    saturates = format.specials == "none"
    found = round_elements(
        x, None, format if saturates else Format.of(f"{name}:saturate=0")
    )
    assert torch.equal(found.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert torch.equal(found.isnan(), theirs.isnan())
    assert saturates or not bool(found.isfinite().all())  # some did overflow


@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "e8m10", "e5m21", "e8m22", "e5m23", "e8m7:saturate=0"]
)
def test_round_elements_rounds_wide_formats(name):
    format = Format.of(name)
    x = torch.cat(
        [
            normal(4000) * 2.0 ** torch.arange(-140, 60).repeat(20),
            torch.tensor([3.4e38, -3.4e38, 0.0, 65520]),
        ]
    )
    e = torch.frexp(x.double()).exponent - 1
    step = 2.0 ** (e.clamp(min=format.min_exponent).double() - format.mantissa)
    expected = (x.double() / step).round() * step
    if format.saturate:
        expected = expected.clamp(-format.largest, format.largest)
    else:
        expected[expected.abs() > format.largest] *= INF
    assert torch.equal(round_elements(x, None, format), expected.float())
    with_noise = round_elements(x, None, format, torch.tensor(3)).double()
    finite = expected.isfinite() & with_noise.isfinite() & (x.abs() < format.largest)
    assert bool(((with_noise - x.double()).abs() < step)[finite].all())


@pytest.mark.parametrize("name", [*SMALL, "bf16", "fp16"])
def test_round_elements_propagates_nonfinite_values(name):
    format = Format.of(name)
    x = torch.tensor([INF, -INF, NAN, 1.0])
    for key in (None, torch.tensor(5)):
        found = round_elements(x, None, format, key).tolist()
        if format.specials == "infinity":
            assert found[:2] == [INF, -INF]
        else:
            assert all(math.isnan(v) for v in found[:2])
        assert math.isnan(found[2])
        assert found[3] == 1 or format.kind == "minifloat"


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "symmetric4", "log2_4", "e5m2"])
def test_round_elements_overflows_without_saturation(name):
    format = Format.of(f"{name}:saturate=0")
    last = format.values()[-1] - format.values()[-2]
    x = torch.tensor([format.largest, format.largest + last * 0.4, format.largest * 4])
    found = round_elements(x, None, format)
    assert found[:2].tolist() == [format.largest] * 2
    assert found[2] == INF if format.specials == "infinity" else found[2].isnan()


@pytest.mark.parametrize("name", [n for n in SMALL if n != "e8m0"])
def test_stochastic_rounding_is_unbiased_between_neighbours(name):
    format = Format.of(name)
    values = format.values()[:: max(1, 2**format.bits // 64)]
    x = torch.cat(
        [
            values,
            values[:-1].lerp(values[1:], 0.3),
            torch.tensor([0.3, -0.7]) * format.values().diff().min(),
        ]
    )
    all_values = format.values()
    above = torch.bucketize(x, all_values).clamp(1, len(all_values) - 1)
    low, high = all_values[above - 1], all_values[above]
    draws = round_elements(x.repeat(400, 1), None, format, torch.tensor(0))
    at = (all_values == x[:, None]).any(1)
    assert torch.equal(draws[:, at], x[at].expand(400, -1))
    assert bool(((draws == low) | (draws == high) | at).all())
    bias = ((draws.double().mean(0) - x) / (high - low))[~at]
    assert (
        float(bias.abs().max()) < 5 * 0.5 / 20
    )  # standard deviations of a mean of 400
    assert float(bias.mean().abs()) < 5 * 0.5 / 20 / math.sqrt(len(bias))


def mx_by_specification(x, element, block):
    """Round in numpy as OCP MX 1.0, section 6.3: shared exponents, saturating elements."""
    out = np.empty_like(x)
    unit = (
        2.0 ** (2 - element.bits) if element.kind == "symmetric" else 1.0
    )  # MXINT8: fractions with 6 bits behind
    emax = math.floor(math.log2(element.largest * unit))
    for at in np.ndindex(*x.shape[:-1], -(-x.shape[-1] // block)):
        part = x[at[:-1]][at[-1] * block : (at[-1] + 1) * block].astype(np.float64)
        if not np.isfinite(part).all():
            found = np.full_like(part, np.nan)
        else:
            most = np.abs(part).max()
            scale = (
                2.0 ** np.clip(math.floor(math.log2(most)) - emax, -127, 127)
                if most
                else 2.0**-127
            )
            found = nearest(part / scale / unit, element) * scale * unit
        out[at[:-1]][at[-1] * block : (at[-1] + 1) * block] = found
    return out


HARD = [
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
    bare = replace(FORMATS[name], block=0, scale="")
    for x in HARD:
        found = rounded(x, f"per_tensor|{name}")
        assert np.array_equal(
            found.numpy(), mx_by_specification(x.numpy(), bare, 32), equal_nan=True
        )


def test_mx_last_block_may_be_shorter():
    x = normal(3, 70)
    found = rounded(x, "per_row|mxfp4:partial=1")
    assert np.array_equal(
        found.numpy(), mx_by_specification(x.numpy(), Format.minifloat(2, 1), 32)
    )
    for ops in (torch.ops.cpt, torch.ops.cpt_reference):
        with pytest.raises(
            ValueError,
            match=r"blocks of 32 do not divide .*\(3, 70\); with partial=True",
        ):
            ops.fake_quantize(x, NINE, "per_row|mxfp4", None)
        refused(
            "blocks of 32 do not divide",
            ops.fake_quantize,
            x[0, 0],
            NINE,
            "per_tensor|mxfp4:partial=1",
            None,
        )


def nvfp4_by_numpy(x, block):
    t = np.float32(np.abs(x).max()) / np.float32(6 * 448)
    parts = x.reshape(-1, block)
    most = np.abs(parts).max(1, keepdims=True) / np.float32(6) / t
    s = (
        np.minimum(most, np.float32(448))
        .astype(ml_dtypes.float8_e4m3fn)
        .astype(np.float32)
        * t
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = (
            np.clip(parts / s, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        )
    return np.where(s == 0, 0, ratio * s).reshape(x.shape)


@pytest.mark.parametrize("spread", [0, 1, 3])
def test_nvfp4_rounding_matches_numpy(spread):
    x = normal(6, 5, 64) * 10.0 ** (spread * normal(6, 5, 4)).repeat_interleave(16, -1)
    found = rounded(x, "per_tensor|nvfp4")
    expected = torch.from_numpy(nvfp4_by_numpy(x.numpy(), 16))
    assert float((found - expected).abs().max()) <= float(x.abs().max()) * 1e-6
    assert bool((found != x).any())
    by_row = [rounded(row, "per_tensor|nvfp4") for row in x.flatten(0, 1)]
    assert torch.equal(rounded(x, "per_row|nvfp4"), torch.stack(by_row).view_as(x))


@pytest.mark.parametrize("granularity", sorted(reference.RANGE_FUNCTIONS))
@pytest.mark.parametrize("name", ["e4m3", "symmetric4", "log2_4", "e2m1", "affine4"])
def test_format_scale_maps_range_to_largest_value(granularity, name):
    format = Format.of(name)
    for x in (normal(4, 5, 6), normal(4, 5, 6) * 1e30, normal(4, 5, 6) * 1e-20):
        y, low, width = torch.ops.cpt_reference.fake_quantize(
            x, NINE, f"{granularity}|{name}", None
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                (low, width), reference.range_of(x, granularity), strict=True
            )
        )
        if format.kind == "affine":
            expected = grids.fake_quantize(x, torch.tensor(15.0), granularity, None)[0]
            clipped = torch.minimum(torch.maximum(expected, low), low + width)
            assert torch.equal(y, expected if granularity != "per_sample_mean" else y)
            assert torch.allclose(y, clipped)
        else:
            s = torch.maximum(-low, low + width) / format.largest
            assert torch.allclose(y, oracle(x / s, format) * s, rtol=1e-6, atol=0)


def test_format_rounding_handles_tiny_ranges():
    for name in ("e4m3", "symmetric8", "nvfp4", "mxfp4", "log2_3"):
        assert rounded(torch.zeros(2, 32), f"per_row|{name}").abs().sum() == 0
        assert bool(rounded(normal(2, 32) * 1e-44, f"per_row|{name}").isfinite().all())


def test_format_rounding_limits_nan_to_range():
    for name in ("e4m3", "mxfp8_e4m3", "mxint8", "symmetric4"):
        for bad in (NAN, INF, -INF):
            x = normal(2, 32)
            x[0, 7] = bad
            y = rounded(x, f"per_row|{name}")
            assert bool(y[0].isnan().all())
            assert bool(y[1].isfinite().all())
