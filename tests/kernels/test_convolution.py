"""Int8 convolutions and their gradients against float64, by every method."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers import identical
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization.test_int8 import SOME_KIND, drawn, values64
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input, conv2d_weight

from cpt_extras.int8 import convolution
from cpt_extras.int8.convolution import Geometry
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import operators
from cpt_extras.kernels.backend import backend, reference
from cpt_extras.kernels.gemm_backend import MAX_INT8_TERMS

NEAR = 1e-6
normal = partial(drawn, "two-sided")


def bytes_of(*shape, seed=0):
    return torch.randint(
        -128,
        128,
        shape,
        dtype=torch.int8,
        generator=torch.Generator().manual_seed(seed),
    )


def last(codes):
    return codes.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def quantized(x, bits, granularity="per_tensor"):
    q = QuantizedTensor.quantize(x, bits, granularity)
    return q._replace(codes=last(q.codes)) if granularity == "per_tensor" else q


def near(y, exact, terms):
    """Return whether y is exact to ``NEAR``, relative to the sum of absolute terms."""
    return (
        y.dtype == torch.float32
        and float((y - exact).abs().max() / terms.max().clamp_min(1e-30)) < NEAR
    )


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Load the available kernels."""
    backend()


def three_products(a, w, g, bias, geometry, channels_last=False):
    """Yield output and both gradients: int8 result, float64 result and sum of absolute terms."""
    shapes = a.codes.shape, w.codes.shape
    by_output = convolution.conv2d(a, w, bias, geometry, channels_last)
    pairs = ((by_output, lambda a, w, g: conv2d(a, w, None, *geometry)),)
    if w.has_one_scale:
        by_input = convolution.conv2d_input(g, w, shapes[0], geometry, channels_last)
        pairs += ((by_input, lambda a, w, g: conv2d_input(shapes[0], w, g, *geometry)),)
    by_weight = convolution.conv2d_weight(g, a, shapes[1][2:], geometry)
    pairs += ((by_weight, lambda a, w, g: conv2d_weight(a, shapes[1], g, *geometry)),)
    exact = [values64(x) for x in (a, w, g)]
    for i, (y, product) in enumerate(pairs):
        plus = (
            bias.double().view(-1, 1, 1)
            if i == 0 and bias is not None
            else torch.zeros(())
        )
        yield y, product(*exact) + plus, product(*(x.abs() for x in exact)) + plus.abs()


@pytest.mark.parametrize("how", [nullcontext, reference], ids=["as it runs", "plain"])
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)),
    image=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    bits=st.tuples(*[st.integers(1, 8)] * 3),
    kinds=st.tuples(*[SOME_KIND] * 3),
    by_channel=st.booleans(),
    with_bias=st.booleans(),
)
def test_int8_conv_matches_float64(
    how,
    sizes,
    image,
    kernel,
    stride,
    padding,
    dilation,
    bits,
    kinds,
    by_channel,
    with_bias,
):
    (N, C, outputs), geometry = sizes, Geometry(stride, padding, dilation)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    image = [max(n, r - 2 * p) for n, r, p in zip(image, reach, padding, strict=True)]
    out = [
        (n + 2 * p - r) // s + 1
        for n, p, r, s in zip(image, padding, reach, stride, strict=True)
    ]
    shapes = (N, C, *image), (outputs, C, *kernel), (N, outputs, *out)
    x, weight, gradient = (
        drawn(k, *s, seed=i) for i, k, s in zip(range(3), kinds, shapes, strict=True)
    )
    bias = normal(outputs, seed=3) if with_bias else None
    with how():
        a, g = quantized(x, bits[0]), quantized(gradient, bits[2])
        w = quantized(weight, bits[1], "per_channel" if by_channel else "per_tensor")
        for y, exact, terms in three_products(a, w, g, bias, geometry):
            assert near(y, exact, terms)


def test_int8_conv_methods_are_bit_identical(monkeypatch):
    a, w, g = (
        quantized(normal(3, 20, 9, 11), 8),
        quantized(normal(17, 20, 3, 3), 8),
        quantized(normal(3, 17, 5, 6), 8),
    )
    runs = []
    for library in (convolution.has_onednn_convolution, lambda device: False):
        monkeypatch.setattr(convolution, "has_onednn_convolution", library)
        runs.append(
            [
                y
                for y, *_ in three_products(
                    a, w, g, None, Geometry((2, 2), (1, 1), (1, 1))
                )
            ]
        )
    with reference():
        runs.append(
            [
                y
                for y, *_ in three_products(
                    a, w, g, None, Geometry((2, 2), (1, 1), (1, 1))
                )
            ]
        )
    assert all(identical(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("how", [nullcontext, reference], ids=["as it runs", "plain"])
@pytest.mark.parametrize("C", [1, 3, 16, 21, 64])
def test_int8_conv_layouts_are_bit_identical(how, C):
    image = (
        (9, 8) if C in (3, 16) else (16, 20)
    )  # 72 and 320 pixels: whole blocks, and parts of one
    g, w = quantized(normal(2, C, *image), 8), quantized(normal(C, C, 3, 3), 8)
    a = quantized(drawn("far from 0", 2, C, *image), 8)
    with how():
        first, last = (
            [
                y
                for y, *_ in three_products(
                    a, w, g, normal(C), Geometry((1, 1), (1, 1), (1, 1)), layout
                )
            ][:2]
            for layout in (False, True)
        )
    for y, z in zip(first, last, strict=True):
        assert y.is_contiguous()
        assert z.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(y, z)


TENSORS = {
    "first": lambda x: x,
    "last": lambda x: x.to(memory_format=torch.channels_last),
    "turned": lambda x: x.transpose(2, 3),
    "with gaps": lambda x: x[:, :, ::2],
    "of one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("key", [None, 7])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_encode_writes_channels_last(name, key, granularity):
    """Write equal codes in either layout, since the noise counts elements row by row."""
    key = None if key is None else torch.tensor(key)
    for shape in (
        (2, 3, 5, 7),
        (3, 16, 16, 16),
        (1, 37, 9, 63),
        (2, 1, 4, 4),
        (4, 20, 1, 1),
    ):
        x, levels = TENSORS[name](normal(*shape)), torch.tensor(255.0)
        low, width = operators.range_of(x, granularity)
        given = x, low, width * 0.9, levels, key, True  # beyond the range, too
        expected = torch.ops.cpt_reference.encode(*given)
        for ops in (torch.ops.cpt, torch.ops.cpt_reference):
            codes = ops.encode(*given, channels_last=True)
            assert codes.permute(0, 2, 3, 1).is_contiguous()
            assert torch.equal(codes, expected)


@pytest.mark.parametrize(
    ("image", "kernel", "geometry"),
    [
        (
            (18, 4),
            (3, 3),
            Geometry((1, 2), (0, 0), (1, 1)),
        ),  # a stride to a single column
        ((5, 17), (1, 7), Geometry((2, 3), (1, 1), (1, 3))),
        (
            (2, 1),
            (4, 2),
            Geometry((1, 1), (1, 1), (1, 2)),
        ),  # a window that sees nothing but padding
    ],
)
def test_int8_conv_handles_difficult_geometries(image, kernel, geometry):
    """Compute geometries that some library gets wrong."""
    codes, weight = last(bytes_of(2, 16, *image)), bytes_of(8, 16, *kernel, seed=1)
    with reference():
        expected, zero = convolution.window_products(codes, 5, weight, geometry)
        expected = expected - zero * weight.int().flatten(1).sum(1)
    sums, zero = convolution.window_products(codes, 5, weight, geometry)
    assert torch.equal(sums.int() - zero * weight.int().flatten(1).sum(1), expected)


@pytest.mark.parametrize("zero", [-128, 0, 127])
@pytest.mark.parametrize("C", [57, 58, 300])  # 514 products are below 2**24
def test_int8_conv_sums_exactly_beyond_float32(zero, C):
    codes = last(
        torch.where(
            bytes_of(2, C, 4, 4) < 100,
            torch.tensor(127 if zero < 0 else -128, dtype=torch.int8),
            0,
        )
    )
    weight = torch.where(
        bytes_of(3, C, 3, 3, seed=1) < 120, torch.tensor(-128, dtype=torch.int8), 1
    )
    geometry = Geometry((1, 1), (1, 1), (1, 1))
    sums, least = convolution.window_products(codes, zero, weight, geometry)
    around = (
        torch.nn.functional.pad(codes.double() - zero, (1, 1, 1, 1)) + least
    )  # least: zero, or zero + 128
    exact = conv2d(around, weight.double()).permute(0, 2, 3, 1).reshape(-1, 3)
    assert torch.equal(sums.double(), exact)
    assert (
        sums.dtype == torch.int32
        or float(exact.abs().max()) < convolution.MAX_EXACT_FLOAT32
    )


def test_int8_conv_splits_sums_beyond_int32():
    C = MAX_INT8_TERMS // 9 + 100
    x, weight = torch.ones(1, C, 3, 3), torch.ones(2, C, 3, 3)
    x[0, 0], weight[:, 0] = 0, 0  # all codes but a few at the end of their range
    a, w = quantized(x, 8), quantized(weight, 8)
    y = convolution.conv2d(
        a, w, torch.tensor([0.0, 1e4]), Geometry((1, 1), (0, 0), (1, 1))
    )
    assert y.flatten().tolist() == pytest.approx(
        [(C - 1) * 9, (C - 1) * 9 + 1e4], rel=NEAR
    )
    large = quantized(normal(1, 1, 182, 182), 8)
    with pytest.raises(
        ValueError,
        match="a kernel of 182 x 182: its sums may overflow, at most 32768 codes",
    ):
        convolution.conv2d(large, large, None, Geometry((1, 1), (0, 0), (1, 1)))


SIZES = {
    "16 channels": ((2, 8, 8, 16), 16, (3, 3), (1, 1), (1, 1), (1, 1)),
    "32 channels, stride 2": ((2, 9, 7, 32), 32, (3, 3), (2, 2), (1, 1), (1, 1)),
    "uneven": ((3, 7, 10, 5), 19, (2, 3), (1, 3), (0, 2), (2, 1)),
    "more taps than registers": ((2, 6, 6, 3), 33, (5, 5), (1, 1), (2, 2), (1, 1)),
    "more pixels than int32 holds": (
        (2, 270, 260, 1),
        1,
        (1, 1),
        (1, 1),
        (0, 0),
        (1, 1),
    ),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_int8_conv_weight_gradient_is_exact(threaded, name, threads):
    shape, outputs, *sizes = SIZES[name]
    kernel, stride, padding, dilation = sizes
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(shape[1:3], *sizes, strict=True)
    ]
    x, g, zero = (
        bytes_of(*shape),
        bytes_of(shape[0], *out, outputs, seed=1),
        torch.tensor(-77, dtype=torch.int8),
    )
    if name.startswith("more pixels"):
        x, g, zero = (
            torch.full_like(x, 127),
            torch.full_like(g, 127),
            torch.tensor(-128, dtype=torch.int8),
        )
    threaded(threads)
    ways = torch.ops.cpt, torch.ops.cpt_reference
    found = [
        (ops.pixel_products(g, x, zero, *sizes), ops.window_sums(x, zero, *sizes))
        for ops in ways
    ]
    away = (x.double() - zero).permute(0, 3, 1, 2)
    exact = conv2d_weight(
        away,
        (outputs, shape[3], *kernel),
        g.double().permute(0, 3, 1, 2),
        stride,
        padding,
        dilation,
    )
    ones = torch.ones(shape[0], 1, *out, dtype=torch.float64)
    seen = conv2d_weight(away, (1, shape[3], *kernel), ones, stride, padding, dilation)
    exact = torch.cat([exact, seen]).permute(0, 2, 3, 1).flatten(1)
    window = conv2d(
        away.sum(1, keepdim=True),
        torch.ones(1, 1, *kernel).double(),
        None,
        stride,
        padding,
        dilation,
    )
    for products, sums in found:
        assert products.dtype == torch.int64
        assert torch.equal(products.double(), exact)
        assert torch.equal(sums.double(), window[:, 0])


def test_int8_conv_rejects_mismatched_shapes(cpp_kernels):
    x, g, zero = (
        bytes_of(2, 5, 5, 4),
        bytes_of(2, 3, 3, 6),
        torch.tensor(0, dtype=torch.int8),
    )
    with pytest.raises(
        RuntimeError, match="a gradient of another shape than the output"
    ):
        torch.ops.cpt.pixel_products(g, x, zero, [3, 3], [1, 1], [1, 1], [1, 1])
    with pytest.raises(RuntimeError, match="a kernel that does not fit"):
        torch.ops.cpt.window_sums(x, zero, [6, 6], [1, 1], [0, 0], [1, 1])
    with pytest.raises(RuntimeError, match="codes are int8, channels last"):
        torch.ops.cpt.window_sums(
            x.permute(0, 3, 1, 2), zero, [3, 3], [1, 1], [0, 0], [1, 1]
        )
