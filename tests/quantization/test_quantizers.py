"""Quantisers against plain numpy: random tensors, edge cases, dtypes, noise, running ranges."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import identical, quantize_gradient, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import QUANTIZERS, Quantizer
from cpt_core.quantization.rounding import RANGE_FUNCTIONS, hash_noise, num_steps
from cpt_extras.formats.tensor_rounding import quantize

EVERY = sorted(RANGE_FUNCTIONS)
STOCHASTIC = Quantizer("per_tensor", rounding="stochastic")


def image(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 4, 4, generator=generator).to(dtype)


def gradient_of(upstream, bits=3, quantizer=QUANTIZERS["conv_grad"], key=0):
    """Return a rounded gradient; a tensor key is the noise key itself, which advances."""
    x = torch.zeros_like(upstream, requires_grad=True)
    levels = torch.tensor(num_steps(bits), dtype=torch.float32, device=upstream.device)
    key = torch.as_tensor(key, device=upstream.device)
    quantize_gradient(x, levels, quantizer, key).backward(upstream)
    return x.grad


# --- against plain numpy ---------------------------------------------------------------------------

BITS = st.integers(1, 12)
SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, max_side=5)


@st.composite
def tensors(draw):
    scale = draw(st.sampled_from([1e-7, 1e-3, 1.0, 1e4]))
    elements = st.floats(-1, 1, width=32)
    return draw(hnp.arrays(np.float32, SHAPES, elements=elements)) * np.float32(scale)


def numpy_range(x, granularity):
    """Return minimum and width, with the dimensions kept."""
    everything = tuple(range(x.ndim))
    axes = {
        "per_tensor": everything,
        "per_channel": everything[1:] or everything,
        "per_sample_mean": everything[1:] or everything,
        "per_row": (x.ndim - 1,),
        "per_position": everything if x.ndim < 3 else (0, x.ndim - 1),
    }[granularity]
    low, high = x.min(axis=axes, keepdims=True), x.max(axis=axes, keepdims=True)
    if granularity == "per_sample_mean":
        low, high = (
            end.mean(axis=0, keepdims=True, dtype=np.float32) for end in (low, high)
        )
    return low, high - low


def numpy_quantize(x, bits, low, width):
    step = step_of(width, bits)
    return np.rint(np.clip((x - low) / step, 0, 2**bits - 1)) * step + low


def step_of(width, bits):
    return np.maximum(width / (2**bits - 1), np.float32(1e-8))


def rounding_error(x):
    """Return a few units in the last place of the largest value, as float32 may lose them."""
    return 4 * np.spacing(np.abs(x).max(initial=np.float32(1e-30)))


@settings(max_examples=40)
@given(tensors(), BITS, st.sampled_from(EVERY))
def test_quantize_equals_numpy(x, bits, granularity):
    low, width = numpy_range(x, granularity)
    expected = numpy_quantize(x, bits, low, width)
    leaf = torch.from_numpy(x).requires_grad_()
    y = quantize(leaf, bits, Quantizer(granularity))
    upstream = torch.arange(1.0, x.size + 1).reshape(x.shape)
    y.backward(upstream)
    assert torch.equal(leaf.grad, upstream)  # straight through
    found = y.detach().numpy()
    if granularity != "per_sample_mean":
        np.testing.assert_array_equal(found, expected)
        return
    # a mean depends on the order of the sum, and with it the grid
    slack = rounding_error(x)
    assert (np.abs(found - expected) <= step_of(width, bits) * 1.001 + slack).all()
    ranges = fake_quantize.operators.range(leaf.detach(), granularity)
    for ours, theirs in zip(ranges, (low, width), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=slack)


@settings(max_examples=40)
@given(tensors(), BITS)
def test_quantize_passes_gradient_of_clipped_values(x, bits):
    leaf = torch.from_numpy(x).requires_grad_()
    low, width = torch.tensor(x.mean()), torch.tensor(np.ptp(x) / 4)  # much is outside
    steps = torch.tensor(num_steps(bits))
    y = fake_quantize.operators.round_in_range(
        leaf, low, width, steps, "per_tensor", clip=True
    )
    y.backward(torch.full_like(y, -3.0))
    assert torch.equal(leaf.grad, torch.full_like(leaf, -3.0))
    expected = numpy_quantize(x, bits, low.numpy(), width.numpy())
    np.testing.assert_array_equal(y.detach().numpy(), expected)


# --- stochastic rounding --------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=40)
@given(tensors(), BITS, st.integers(-(2**63), 2**63 - 1))
def test_stochastic_rounding_stays_on_neighbouring_grid_points(x, bits, seed):
    key = torch.tensor(seed)
    found = gradient_of(torch.from_numpy(x), bits, STOCHASTIC, key).numpy()
    low, width = numpy_range(x, "per_tensor")
    step, slack = step_of(width, bits), rounding_error(x)
    # the highest grid point is the maximum, or up to a step above it at the smallest step
    top = low + width + np.where(step == np.float32(1e-8), step, 0)
    assert (found >= low - slack).all()
    assert (found <= top + slack).all()
    assert (np.abs(found - x) <= step * (1 + 1e-5) + slack).all()
    index = (found - low) / step
    assert (np.abs(index - np.rint(index)) * step <= 2 * slack + 1e-4 * step).all()


@pytest.mark.parametrize("bits", [1, 4])
def test_stochastic_rounding_is_unbiased(bits):
    torch.manual_seed(0)
    x = torch.randn(500)
    key, draws = torch.tensor(1), 2000
    rounded = (gradient_of(x, bits, STOCHASTIC, key).double() for _ in range(draws))
    mean = sum(rounded) / draws
    step = (x.max() - x.min()) / (2**bits - 1)
    share = (x - x.min()) / step % 1
    deviation = step * (share * (1 - share) / draws).sqrt() + 1e-6
    z = ((mean - x) / deviation)[(share > 0.02) & (share < 0.98)]
    assert z.abs().max() < 5
    assert 0.9 < z.std() < 1.1  # the spread of fair coins: the draws are independent
    assert abs(z.mean()) < 5 / len(z) ** 0.5


# --- noise ----------------------------------------------------------------------------------------


def splitmix_and_finaliser(key, place):
    """Return the noise of one element, in Python's integers."""
    z = (key + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    pair = place >> 1
    h = pair % 2**32 ^ z % 2**32 ^ (pair >> 32) * 0x9E3779B1 % 2**32
    h = ((h ^ h >> 16) * 0x7FEB352D) % 2**32 ^ z >> 32
    h = (h ^ h >> 15) * 0x846CA68B % 2**32
    h ^= h >> 16
    return ((h >> 16 if place % 2 else h % 2**16) + 0.5) * 2.0**-16 - 0.5


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 20))
def test_hash_noise_depends_on_key_and_position(key, count):
    expected = [splitmix_and_finaliser(key, place) for place in range(count)]
    assert hash_noise(torch.tensor(key), count).tolist() == expected


def is_uniform(noise):
    """Return whether noise looks uniform on [-0.5, 0.5): bounds, mean, variance, 64 equal bins (chi square)."""
    noise = noise.flatten().double()
    n = noise.numel()
    count = torch.histc(noise, 64, -0.5, 0.5)
    chi_square = ((count - n / 64) ** 2 / (n / 64)).sum()
    return bool(
        noise.min() >= -0.5
        and noise.max() < 0.5
        and abs(noise.mean()) < 5 * (1 / 12 / n) ** 0.5
        and abs(noise.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
        and 10 < chi_square < 140  # 63 degrees of freedom
    )


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])


def drawn(calls, n):
    """Return noise of neighbouring keys of one layer, and of the first keys of neighbouring layers."""
    keys = [(1 << 40) + i for i in range(calls // 2)] + [
        (7 + i) << 20 for i in range(calls // 2)
    ]
    return [hash_noise(torch.tensor(key), n) for key in keys]


def test_hash_noise_is_uniform_and_uncorrelated():
    n = 1 << 16
    draws = drawn(6, n)
    assert all(is_uniform(noise) for noise in draws)
    limit = 5 / n**0.5
    for i, noise in enumerate(draws):
        for lag in (1, 2, 3, 64, 256, 4096):
            assert abs(correlation(noise[:-lag], noise[lag:])) < limit
        for other in draws[i + 1 :]:
            for shift in (0, 1, 2, 64, 256):
                assert abs(correlation(noise[: n - shift], other[shift:])) < limit
                assert abs(correlation(noise[shift:], other[: n - shift])) < limit


# --- edges of the grid ----------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", EVERY)
def test_quantize_keeps_constant_and_empty_tensors(granularity):
    stochastic = Quantizer(granularity, rounding="stochastic")
    constants = [torch.full((3, 4, 2), value) for value in (0.0, 0.1, -3e-9, 7e30)]
    shapes = (0,), (0, 3), (3, 0), (2, 0, 4, 4)
    for x, bits in itertools.product([*constants, *map(torch.empty, shapes)], (1, 4)):
        assert identical([quantize(x, bits, Quantizer(granularity))], [x])
        assert identical([gradient_of(x, bits, stochastic)], [x])


def test_quantize_rounds_ties_to_even():
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 7.0])
    assert quantize(x, 3, "bias").tolist() == [0, 0, 2, 2, 4, 7]


def test_quantize_rounds_up_to_23_bits():
    """Round at 23 bits, and return the tensor itself from 24 bits on."""
    x = image()
    for bits, granularity in itertools.product((24, 32), EVERY):
        assert quantize(x, bits, Quantizer(granularity)) is x
    y = quantize(image(), 23)
    assert torch.allclose(y, image(), rtol=0, atol=1e-6)
    assert not torch.equal(y, image())


def test_quantize_keeps_non_finite_values_within_channel():
    x = image()
    x[0, 0, 0, 0] = math.inf
    y = quantize(x, 4, "conv_weight")
    assert not y[0].isfinite().any()
    assert torch.equal(y[1], quantize(x[1:], 4, "conv_weight")[0])


# --- dtypes and memory formats --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("granularity", EVERY)
def test_quantize_computes_every_dtype_in_float32(dtype, granularity, device):
    x = image(dtype).to(device)
    y = quantize(x, 8, Quantizer(granularity))
    assert y.dtype == dtype
    low, width = fake_quantize.operators.range(x, granularity)
    assert low.dtype == width.dtype == torch.float32
    assert torch.equal(y, quantize(x.float(), 8, Quantizer(granularity)).to(dtype))
    upstream = gradient_of(x, 8, Quantizer(granularity))
    assert upstream.dtype == dtype
    assert torch.equal(upstream, y)


def test_layer_draws_new_noise_for_every_gradient():
    layer, x = quantize_(nn.Linear(16, 16)), torch.randn(8, 16, requires_grad=True)
    layer.precision.set_bits(None, q_grad=2)
    upstream = torch.randn(8, 16)
    first, second = (torch.autograd.grad(layer(x), x, upstream)[0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("bits", [2, 8, 16, 20])
def test_stochastic_rounding_keeps_range_ends(bits):
    x = torch.tensor([-1.0, 1.0]).repeat_interleave(2500)
    for seed in range(40):  # the largest of 100,000 numbers is 0.49999
        found = gradient_of(x, bits, STOCHASTIC, seed)
        assert torch.equal(found[:2500], x[:2500])
        assert found.max() <= 1 + 2.0**-22
        if bits <= 8:  # more steps are rounded so that the last of the noise counts
            assert (found[2500:] - 1).abs().le(2.0**-22).float().mean() > 0.999


# --- checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("bits", [2, 24])
def test_quantize_rejects_integer_and_complex_tensors(dtype, bits):
    x = torch.ones(2, 3, 4, dtype=dtype)
    message = f"only floating tensors can be quantised, got {dtype}"
    refused(message, quantize, x, bits)
    refused(message, quantize, x[:0], bits)
    refused(message, running_layer().quantize_operand, "input", x)


ROLES = {"quantizers": {**QUANTIZERS, "linear_inptu": Quantizer("per_row")}}
NO_BIAS = {"quantizers": {k: q for k, q in QUANTIZERS.items() if k != "bias"}}
NAMES = f"'weight'; the nearest of {len(QUANTIZERS)} are lstm_weight, "
STARTS = "unknown running_start 'one'; choose from corrected, zero"
EXECUTIONS = "unknown execution 'one'; choose from simulated, integer, auto"


def test_quantizer_rejects_unknown_names_and_running_ranges():
    """List the known names, and accept running ranges per tensor only."""
    refused(NAMES, quantize, image(), 4, "weight")
    for options, message in (
        ({"running_start": "one"}, STARTS),
        ({"execution": "one"}, EXECUTIONS),
        (ROLES, "unknown roles linear_inptu"),
        (NO_BIAS, "missing or unknown roles bias"),
    ):
        refused(message, QuantConfig, **options)
    for name in set(EVERY) - {"per_tensor"}:
        refused("needs granularity 'per_tensor'", Quantizer, name, running=True)


# --- running ranges -------------------------------------------------------------------------------


def running_layer(start="corrected"):
    quantizers = {"input": Quantizer("per_tensor", running=True)}
    layer = LayerPrecision(quantizers, running_start=start)
    layer.set_bits(4, 8)
    return layer


def expected_range(batches, corrected):
    low = width = weight = 0.0
    for x in batches:
        low = 0.9 * low + 0.1 * x.min().item()
        width = 0.9 * width + 0.1 * (x.max() - x.min()).item()
        weight = 0.9 * weight + 0.1
    return (low / weight, width / weight) if corrected else (low, width)


@pytest.mark.parametrize("start", ["corrected", "zero"])
def test_running_range_clips_at_evaluation(start):
    layer = running_layer(start)
    batches = [image(seed=s) for s in range(3)]
    for x in batches:
        own_range = quantize(x, 4, "conv_input")
        assert torch.equal(layer.quantize_operand("input", x), own_range)
    layer.eval()
    low, width = expected_range(batches, start == "corrected")
    x = image(seed=9) * 3
    expected = numpy_quantize(x.numpy(), 4, low, width)
    y = layer.quantize_operand("input", x)
    np.testing.assert_allclose(y.numpy(), expected, atol=1e-5)
    before = layer.running_input.clone()
    layer.quantize_operand("input", x * 100)
    assert torch.equal(layer.running_input, before)  # evaluation does not move it


def test_running_range_at_evaluation_before_training():
    x = image()
    layer = running_layer().eval()
    assert torch.equal(layer.quantize_operand("input", x), quantize(x, 4, "conv_input"))
    assert layer.running_input.count_nonzero() == 0
    y = running_layer("zero").eval().quantize_operand("input", x)
    assert y.abs().max() < 15 * 1.01e-8  # the authors' rule: everything collapses
