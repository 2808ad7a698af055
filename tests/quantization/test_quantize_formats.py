"""``quantize`` with number formats, and random Hadamard rotations."""

import pytest
import torch
from helpers import INF, NAN, normal, refused

from cpt_core.quantization.roles import QUANTIZERS
from cpt_extras.formats.format import FORMATS, Format
from cpt_extras.formats.format_rounding import rotate, round_elements
from cpt_extras.formats.ladder_rounding import on_level
from cpt_extras.formats.quantizer import FormatQuantizer
from cpt_extras.formats.tensor_rounding import quantize
from cpt_extras.kernels import grids

N = torch.tensor(15.0)


def test_quantize_accepts_bits_and_equal_formats():
    x = normal(5, 6)
    expected = grids.fake_quantize(x, N, "per_tensor", None)[0]
    for found in (
        quantize(x, 4),
        quantize(x, bits=4, quantizer="conv_input"),
        quantize(x, 4, "conv_input"),
    ):
        assert torch.equal(found, expected)
    assert torch.equal(quantize(x, format="affine4"), expected)
    assert quantize(x, 24) is x
    assert quantize(x, format="float32") is x
    assert torch.equal(
        quantize(x, 4, "linear_weight"), grids.fake_quantize(x, N, "per_row", None)[0]
    )
    assert torch.equal(quantize(x, format="affine12"), quantize(x, 12))


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "float32"])
def test_quantize_rounds_to_every_format(name):
    x, format = normal(6, 64) * 3, FORMATS[name]
    y = quantize(x, format=name)
    if format.kind in ("minifloat", "log2") and not format.block:
        expected = round_elements(x, None, format)  # no scale
        assert format.bits > 8 or set(y.flatten().tolist()) <= set(
            format.values().tolist()
        )
    else:
        expected = grids.fake_quantize(
            x, torch.tensor(2.0**format.bits - 1), f"per_tensor|{name}", None
        )[0]
        if format.plain_affine:
            expected = quantize(x, format.bits)
    assert torch.equal(y, expected)
    for role in ("linear_weight", "conv_weight"):
        grid = on_level(QUANTIZERS[role], FormatQuantizer(format=format)).grid
        n = torch.tensor(2.0**format.bits - 1)
        assert torch.equal(
            quantize(x, format=format, quantizer=role),
            torch.ops.cpt_reference.fake_quantize(x, n, grid, None)[0],
        )
    own = quantize(x, format=FormatQuantizer("per_row", format=format))
    assert torch.equal(own, quantize(x, format=f"{name}:granularity=per_row"))
    if not format.plain_affine:
        assert torch.equal(own, grids.fake_quantize(x, N, f"per_row|{name}", None)[0])


def test_quantize_wide_minifloat_without_infinities():
    x = torch.tensor([69771.1, -131008.0, 1e9, 6e-8, 3e-8])
    found = quantize(x, format=Format.minifloat(5, 10, "none"))
    assert found.tolist() == [69760.0, -131008.0, 131008.0, 2.0**-24, 2.0**-24]


def test_quantize_passes_gradients_and_keeps_dtype():
    for name in ("e4m3", "mxfp4", "nvfp4", "symmetric4", "log2_3"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            x = normal(4, 32).to(dtype).requires_grad_()
            y = quantize(x, format=name)
            y.backward(torch.full_like(y, 2.0))
            assert y.dtype == dtype
            assert x.grad.unique().tolist() == [2.0]
    assert quantize(torch.empty(0, 32), format="mxfp4").shape == (0, 32)


def test_quantize_stochastic_rounding_repeats_by_seed():
    x, level = normal(100, 30), FormatQuantizer.of("e4m3:rounding=stochastic")
    found = [quantize(x, format=level, seed=s) for s in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert set(found[0].flatten().tolist()) <= set(FORMATS["e4m3"].values().tolist())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: quantize(x),
            "either bits or a format, got bits=None and format=None",
        ),
        (
            lambda x: quantize(x, 8, format="e4m3"),
            "either bits or a format, got bits=8",
        ),
        (
            lambda x: quantize(x.int(), format="e4m3"),
            r"only floating tensors.*torch.int32",
        ),
        *(
            (
                lambda x, how=how: quantize(x.to_sparse(), **how),
                r"only dense tensors can .*sparse_coo; .*to_dense",
            )
            for how in ({"bits": 4}, {"format": "e4m3"})
        ),
        (
            lambda x: quantize(x, format="e4m99"),
            "mantissa must be a whole number of at least 0 and at most 32, got 99",
        ),
        (lambda x: quantize(x, format="int8"), "unknown format 'int8'"),
        (
            lambda x: quantize(x, format="e4m3", quantizer="weights"),
            "unknown quantizer 'weights'",
        ),
        (lambda x: quantize(x, format="e4m3:rounding=stochastic"), "needs a seed"),
        (
            lambda x: quantize(x, format="e4m3", seed=1),
            "nothing else takes one; got seed=1 for format e4m3",
        ),
        (lambda x: quantize(x, 8, seed=1), "nothing else takes one"),
        (
            lambda x: quantize(x, format="e4m3:rounding=stochastic", seed=1.5),
            "seed must be a whole .* got 1.5",
        ),
        (
            lambda x: quantize(x.bfloat16(), format="fp16"),
            r"fp16 is wider than the tensor's type, torch.bfloat16",
        ),
        (lambda x: quantize(x.bfloat16(), format="e8m10"), "e8m10 is wider"),
        (lambda x: quantize(x.half(), format="bf16"), r"bf16 is wider.*torch.float16"),
        (lambda x: quantize(x.bfloat16(), format="affine12"), "affine12 is wider"),
        (lambda x: quantize(x.half(), format="symmetric14"), "symmetric14 is wider"),
        (lambda x: quantize(x.half(), format="log2_8"), "log2_8 is wider"),
        (
            lambda x: quantize(x[:, :30], format="mxfp4"),
            r"blocks of 32 .* shape \(4, 30\); with partial=True",
        ),
        (
            lambda x: quantize(x.index_fill(1, torch.tensor([5]), NAN), format="mxfp4"),
            r"nan, which stands at \(0, 5\)",
        ),
        (
            lambda x: quantize(
                -x.index_fill(0, torch.tensor([2]), INF), format="nvfp4"
            ),
            r"-inf, which .* at \(2, 0\)",
        ),
        (lambda x: rotate(x, 128, 0), r"do not divide .*\(4, 32\)"),
    ],
)
def test_quantize_and_rotate_reject_invalid_arguments(call, words):
    refused(words, call, normal(4, 32))


# --- rotation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 16, 32])
def test_rotate_preserves_norms_and_inner_products(size):
    a, b = normal(3, 5, 64), normal(7, 64)
    turned = rotate(a, size, 3)
    assert turned.shape == a.shape
    assert torch.allclose(turned.norm(dim=-1), a.norm(dim=-1), rtol=1e-5)
    assert torch.allclose(rotate(turned, size, 3, inverse=True), a, atol=1e-5)
    assert torch.allclose(turned @ rotate(b, size, 3).t(), a @ b.t(), atol=1e-4)
    matrix = rotate(torch.eye(64), size, 3)
    assert torch.allclose(matrix @ matrix.t(), torch.eye(64), atol=1e-6)
    assert torch.allclose(matrix.abs().amax(1), torch.full((64,), size**-0.5))
    if size > 2:
        assert not torch.equal(turned, rotate(a, size, 4))
    assert torch.autograd.gradcheck(
        lambda v: rotate(v, size, 3), (a[0, 0].double().requires_grad_(),)
    )


def test_rotate_spreads_outliers():
    x = normal(4, 64)
    x[:, 3] = 100.0
    assert float(rotate(x, 64, 0).abs().max()) < 30
    assert rotate(x.bfloat16(), 16, 0).dtype == torch.bfloat16
    compiled = torch.compile(
        lambda v: rotate(v, 16, 5), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(x), rotate(x, 16, 5))
