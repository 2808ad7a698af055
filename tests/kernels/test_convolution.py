"""Int8 convolutions and their gradients against float64, by every method."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers import identical
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization.test_int8 import SOME_KIND, drawn, values64
from torch.nn.functional import conv2d, pad
from torch.nn.grad import conv2d_input, conv2d_weight

from cpt_extras.int8 import convolution
from cpt_extras.int8.convolution import Geometry
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels.backend import backend, reference
from cpt_extras.kernels.gemm_backend import MAX_INT8_TERMS

NEAR = 1e-6
METHODS = {"fastest": nullcontext, "plain": reference}
UNIT = Geometry((1, 1), (0, 0), (1, 1))
SAME = Geometry((1, 1), (1, 1), (1, 1))
normal = partial(drawn, "two-sided")


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Load the available kernels."""
    backend()


def random_int8(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def quantized(x, bits, granularity="per_tensor"):
    """Return a quantised tensor, with its channels last if it has one scale."""
    q = QuantizedTensor.quantize(x, bits, granularity)
    if granularity != "per_tensor":
        return q
    return q._replace(codes=q.codes.contiguous(memory_format=torch.channels_last))


def output_size(sizes, kernel, stride, padding, dilation):
    axes = zip(sizes, kernel, stride, padding, dilation, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]


def convolve(a, w, g, bias, geometry, channels_last=False):
    """Return the output, the input gradient where there is one, and the weight gradient."""
    inputs, kernel = a.codes.shape, w.codes.shape[2:]
    results = [convolution.conv2d(a, w, bias, geometry, channels_last)]
    if w.has_one_scale:
        results.append(convolution.conv2d_input(g, w, inputs, geometry, channels_last))
    return [*results, convolution.conv2d_weight(g, a, kernel, geometry)]


def convolve64(a, w, g, bias, geometry):
    """Return output, input gradient and weight gradient of float64 tensors."""
    return (
        conv2d(a, w, bias, *geometry),
        conv2d_input(a.shape, w, g, *geometry),
        conv2d_weight(a, w.shape, g, *geometry),
    )


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)),
    image=pairs(1, 12),
    kernel=pairs(1, 4),
    geometry=st.builds(Geometry, pairs(1, 3), pairs(0, 3), pairs(1, 2)),
    bits=st.tuples(*[st.integers(1, 8)] * 3),
    kinds=st.tuples(*[SOME_KIND] * 3),
    granularity=st.sampled_from(["per_tensor", "per_channel"]),
    with_bias=st.booleans(),
)
def test_int8_conv_matches_float64(
    method, sizes, image, kernel, geometry, bits, kinds, granularity, with_bias
):
    batch, channels, outputs = sizes
    _, padding, dilation = geometry
    axes = zip(image, kernel, padding, dilation, strict=True)
    image = [max(n, d * (k - 1) + 1 - 2 * p) for n, k, p, d in axes]
    shapes = (
        (batch, channels, *image),
        (outputs, channels, *kernel),
        (batch, outputs, *output_size(image, kernel, *geometry)),
    )
    x, weight, gradient = (
        drawn(kinds[i], *shape, seed=i) for i, shape in enumerate(shapes)
    )
    bias = normal(outputs, seed=3) if with_bias else torch.zeros(outputs)
    with METHODS[method]():
        a, g = quantized(x, bits[0]), quantized(gradient, bits[2])
        w = quantized(weight, bits[1], granularity)
        results = convolve(a, w, g, bias if with_bias else None, geometry)
    exact = [values64(operand) for operand in (a, w, g)]
    expected = convolve64(*exact, bias.double(), geometry)
    # where a sum cancels, its terms say how exact it can be
    magnitudes = (t.abs() for t in (*exact, bias.double()))
    terms = convolve64(*magnitudes, geometry)
    kept = [0, 1, 2] if w.has_one_scale else [0, 2]
    for y, i in zip(results, kept, strict=True):
        assert y.dtype == torch.float32
        error = (y - expected[i]).abs().max() / terms[i].max().clamp_min(1e-30)
        assert float(error) < NEAR


def test_int8_conv_methods_are_bit_identical(monkeypatch):
    a, w = quantized(normal(3, 20, 9, 11), 8), quantized(normal(17, 20, 3, 3), 8)
    g, geometry = quantized(normal(3, 17, 5, 6), 8), Geometry((2, 2), (1, 1), (1, 1))
    expected = convolve(a, w, g, None, geometry)
    with reference():
        assert identical(convolve(a, w, g, None, geometry), expected)
    monkeypatch.setattr(convolution, "has_onednn_convolution", lambda device: False)
    assert identical(convolve(a, w, g, None, geometry), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("channels", "image"),  # 72 and 320 pixels: whole blocks, and parts of one
    [(1, (16, 20)), (3, (9, 8)), (16, (9, 8)), (21, (16, 20)), (64, (16, 20))],
)
def test_int8_conv_layouts_are_bit_identical(method, channels, image):
    g = quantized(normal(2, channels, *image), 8)
    w = quantized(normal(channels, channels, 3, 3), 8)
    a = quantized(drawn("far from 0", 2, channels, *image), 8)
    with METHODS[method]():
        first, last = (
            convolve(a, w, g, normal(channels), SAME, layout)[:2]
            for layout in (False, True)
        )
    assert all(map(torch.equal, first, last))
    assert all(y.is_contiguous() for y in first)
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in last)


@pytest.mark.parametrize(
    ("image", "kernel", "geometry"),
    [
        ((18, 4), (3, 3), Geometry((1, 2), (0, 0), (1, 1))),  # a single column
        ((5, 17), (1, 7), Geometry((2, 3), (1, 1), (1, 3))),
        ((2, 1), (4, 2), Geometry((1, 1), (1, 1), (1, 2))),  # a window of padding
    ],
)
def test_int8_conv_handles_difficult_geometries(image, kernel, geometry):
    """Compute geometries that some library gets wrong."""
    images, weight = random_int8(2, 16, *image), random_int8(8, 16, *kernel, seed=1)
    codes = images.contiguous(memory_format=torch.channels_last)
    results = []
    for method in METHODS.values():
        with method():
            sums, zero = convolution.window_products(codes, 5, weight, geometry)
        results.append(sums.int() - zero * weight.int().flatten(1).sum(1))
    assert torch.equal(*results)


@pytest.mark.parametrize("zero", [-128, 0, 127])
@pytest.mark.parametrize("channels", [57, 58, 300])  # 514 products are below 2**24
def test_int8_conv_sums_exactly_beyond_float32(zero, channels):
    codes = torch.zeros(2, channels, 4, 4, dtype=torch.int8)
    codes[random_int8(*codes.shape) < 100] = 127 if zero < 0 else -128
    codes = codes.contiguous(memory_format=torch.channels_last)
    weight = torch.ones(3, channels, 3, 3, dtype=torch.int8)
    weight[random_int8(*weight.shape, seed=1) < 120] = -128
    sums, least = convolution.window_products(codes, zero, weight, SAME)
    around = pad(codes.double() - zero, (1, 1, 1, 1)) + least  # zero, or zero + 128
    exact = conv2d(around, weight.double()).permute(0, 2, 3, 1).reshape(-1, 3)
    assert torch.equal(sums.double(), exact)
    fits_float32 = float(exact.abs().max()) < convolution.MAX_EXACT_FLOAT32
    assert sums.dtype == torch.int32 or fits_float32


def test_int8_conv_splits_sums_beyond_int32():
    channels = MAX_INT8_TERMS // 9 + 100
    x, weight = torch.ones(1, channels, 3, 3), torch.ones(2, channels, 3, 3)
    x[0, 0], weight[:, 0] = 0, 0  # all codes but a few at the end of their range
    bias = torch.tensor([0.0, 1e4])
    y = convolution.conv2d(quantized(x, 8), quantized(weight, 8), bias, UNIT)
    exact = (channels - 1) * 9 + bias
    torch.testing.assert_close(y.flatten(), exact, rtol=NEAR, atol=0)
    large = quantized(normal(1, 1, 182, 182), 8)
    message = "kernel of 182 x 182: its sums may overflow, at most 32768 codes"
    with pytest.raises(ValueError, match=message):
        convolution.conv2d(large, large, None, UNIT)


LARGEST = "more pixels than int32 holds"
SIZES = {  # shape of the input, outputs, kernel, geometry
    "16 channels": ((2, 8, 8, 16), 16, (3, 3), SAME),
    "32 channels, stride 2": (
        (2, 9, 7, 32),
        32,
        (3, 3),
        Geometry((2, 2), (1, 1), (1, 1)),
    ),
    "uneven": ((3, 7, 10, 5), 19, (2, 3), Geometry((1, 3), (0, 2), (2, 1))),
    "more taps than registers": (
        (2, 6, 6, 3),
        33,
        (5, 5),
        Geometry((1, 1), (2, 2), (1, 1)),
    ),
    LARGEST: ((2, 270, 260, 1), 1, (1, 1), UNIT),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_int8_conv_weight_gradient_is_exact(threaded, name, threads):
    shape, outputs, kernel, geometry = SIZES[name]
    batch, *image, channels = shape
    out = output_size(image, kernel, *geometry)
    x, g = random_int8(*shape), random_int8(batch, *out, outputs, seed=1)
    zero = torch.tensor(-77, dtype=torch.int8)
    if name == LARGEST:
        x, g, zero = torch.full_like(x, 127), torch.full_like(g, 127), zero - 51
    away = (x.double() - zero).permute(0, 3, 1, 2)
    gradient = torch.cat([g.double(), torch.ones(batch, *out, 1).double()], -1)
    filters = outputs + 1, channels, *kernel  # the last one sums what a window sees
    exact = conv2d_weight(away, filters, gradient.permute(0, 3, 1, 2), *geometry)
    ones = torch.ones(1, channels, *kernel).double()
    window_sums = conv2d(away, ones, None, *geometry)[:, 0]
    threaded(threads)
    for ops in (torch.ops.cpt, torch.ops.cpt_reference):
        products = ops.pixel_products(g, x, zero, kernel, *geometry)
        assert products.dtype == torch.int64
        assert torch.equal(products.double(), exact.permute(0, 2, 3, 1).flatten(1))
        sums = ops.window_sums(x, zero, kernel, *geometry)
        assert torch.equal(sums.double(), window_sums)


def test_int8_conv_rejects_mismatched_shapes(cpp_kernels):
    x, g = random_int8(2, 5, 5, 4), random_int8(2, 3, 3, 6)
    zero, ops = torch.tensor(0, dtype=torch.int8), torch.ops.cpt
    with pytest.raises(RuntimeError, match="gradient of another shape than the output"):
        ops.pixel_products(g, x, zero, [3, 3], *SAME)
    with pytest.raises(RuntimeError, match="a kernel that does not fit"):
        ops.window_sums(x, zero, [6, 6], *UNIT)
    with pytest.raises(RuntimeError, match="codes are int8, channels last"):
        ops.window_sums(x.permute(0, 3, 1, 2), zero, [3, 3], *UNIT)
