"""Blocks against torchao's, where it is installed (``pip install --target FOLDER torchao``); nothing here needs it."""

import warnings

import pytest
import torch
from helpers import NAN, normal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2

N = torch.tensor(15.0)
WIDE = normal(64, 8, 64) * 2.0 ** torch.randint(-40, 40, (64, 8, 1), generator=torch.Generator().manual_seed(0))
ELEMENTS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": DTYPE_FP6_E2M3,
    "mxfp6_e3m2": DTYPE_FP6_E3M2,
    "mxfp4": torch.float4_e2m1fn_x2,
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_mx_is_torchao_s_bit_for_bit(name):
    for x in (normal(512, 256), WIDE.flatten(0, 1), torch.zeros(2, 32)):
        scale, codes = mx.to_mx(x.contiguous(), ELEMENTS[name], 32)
        theirs = mx.to_dtype(codes, scale, ELEMENTS[name], 32, torch.float32)
        assert torch.equal(torch.ops.cpt_reference.fake_quantize(x, N, f"per_row|{name}", None)[0], theirs)


def test_nan_makes_the_block_nan_in_both():
    x = normal(2, 64)
    x[0, 40] = NAN
    scale, codes = mx.to_mx(x, torch.float8_e4m3fn, 32)
    theirs = mx.to_dtype(codes, scale, torch.float8_e4m3fn, 32, torch.float32)
    ours = torch.ops.cpt_reference.fake_quantize(x, N, "per_row|mxfp8_e4m3", None)[0]
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert int(ours.isnan().sum()) == 32


def test_nvfp4_is_torchao_s_but_for_roundings_of_the_scale():
    """They multiply by a reciprocal: a few ties may fall otherwise. And their scales never fall below 2**-6."""
    x = normal(512, 256)
    t = nv.per_tensor_amax_to_scale(x.abs().max())
    scales, codes = nv.nvfp4_quantize(x, 16, t)
    elements = mx.f4_unpacked_to_f32(mx.unpack_uint4(codes)).view(512, 16, 16)
    theirs = (elements * (scales.float() * t).unsqueeze(-1)).view_as(x)
    ours = torch.ops.cpt_reference.fake_quantize(x, N, "per_tensor|nvfp4", None)[0]
    close = torch.isclose(ours, theirs, rtol=1e-6, atol=0)
    assert float(close.float().mean()) > 0.9999
