"""The quantisers against plain numpy, and what any quantiser must keep, for random tensors and bits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels.operators import range_of, round_in_range
from cpt_core.kernels.reference import GRANULARITIES, hash_noise
from cpt_core.quantization.fake_quantize import levels_of, quantize, quantize_gradient

BITS = st.integers(1, 12)
GRANULARITY = st.sampled_from(sorted(GRANULARITIES))
SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, max_side=5)


@st.composite
def tensors(draw, shapes=SHAPES):
    scale = draw(st.sampled_from([1e-7, 1e-3, 1.0, 1e4]))
    elements = st.floats(-1, 1, width=32)
    return draw(hnp.arrays(np.float32, shapes, elements=elements)) * np.float32(scale)


def numpy_range(x, granularity):
    """Return minimum and width, with the dimensions kept."""
    everything = tuple(range(x.ndim))
    axes = {
        "per_tensor": everything,
        "per_channel": everything[1:] or everything,
        "per_row": (x.ndim - 1,),
        "per_position": everything if x.ndim < 3 else (0, x.ndim - 1),
    }
    if granularity == "per_sample_mean":
        rest = everything[1:] or everything
        low = x.min(axis=rest, keepdims=True).mean(axis=0, keepdims=True, dtype=np.float32)
        return low, x.max(axis=rest, keepdims=True).mean(axis=0, keepdims=True, dtype=np.float32) - low
    low = x.min(axis=axes[granularity], keepdims=True)
    return low, x.max(axis=axes[granularity], keepdims=True) - low


def numpy_quantize(x, bits, low, width):
    step = step_of(width, bits)
    return np.rint(np.clip((x - low) / step, 0, 2**bits - 1)) * step + low


def step_of(width, bits):
    return np.maximum(width / (2**bits - 1), np.float32(1e-8))


def top_of(low, width, bits):
    """Highest point of the grid: the maximum, or less than a step above it where the step is at its least."""
    step = step_of(width, bits)
    return low + width + np.where(step == np.float32(1e-8), step, 0)


def rounding_error(x):
    """A few units in the last place of the largest value: what float32 itself may lose on the way."""
    return 4 * np.spacing(np.abs(x).max(initial=np.float32(1e-30)))


@given(tensors(), BITS, GRANULARITY)
def test_equals_plain_numpy(x, bits, granularity):
    low, width = numpy_range(x, granularity)
    expected = numpy_quantize(x, bits, low, width)
    leaf = torch.from_numpy(x).requires_grad_()
    y, upstream = quantize(leaf, bits, Quantizer(granularity)), torch.arange(1.0, x.size + 1).reshape(x.shape)
    y.backward(upstream)
    assert torch.equal(leaf.grad, upstream)  # straight through
    found = y.detach().numpy()
    if granularity == "per_sample_mean":  # a mean depends on the order of the sum, and with it the grid
        step = step_of(width, bits)
        assert (np.abs(found - expected) <= step * 1.001 + rounding_error(x)).all()
        for ours, theirs in zip(range_of(leaf.detach(), granularity), (low, width), strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, atol=rounding_error(x))
    else:
        np.testing.assert_array_equal(found, expected)


@given(tensors(), st.integers(24, 32), GRANULARITY)
def test_24_bits_and_more_change_nothing(x, bits, granularity):
    np.testing.assert_array_equal(quantize(torch.from_numpy(x), bits, Quantizer(granularity)).numpy(), x)


@given(tensors(), BITS)
def test_gradient_passes_clipped_values_too(x, bits):
    leaf = torch.from_numpy(x).requires_grad_()
    low, width = torch.tensor(x.mean()), torch.tensor(np.ptp(x) / 4)  # much is outside
    y = round_in_range(leaf, low, width, torch.tensor(levels_of(bits)), "per_tensor", clip=True)
    y.backward(torch.full_like(y, -3.0))
    assert torch.equal(leaf.grad, torch.full_like(leaf, -3.0))
    np.testing.assert_array_equal(y.detach().numpy(), numpy_quantize(x, bits, low.numpy(), width.numpy()))


# --- stochastic rounding --------------------------------------------------------------------------


def rounded_gradient(upstream, bits, key):
    x = torch.zeros_like(upstream, requires_grad=True)
    quantizer = Quantizer("per_tensor", rounding="stochastic")
    quantize_gradient(x, torch.tensor(levels_of(bits)), quantizer, key).backward(upstream)
    return x.grad


@given(tensors(), BITS, st.integers(-(2**63), 2**63 - 1))
def test_stochastic_rounding_takes_a_neighbour_on_the_grid(x, bits, seed):
    found = rounded_gradient(torch.from_numpy(x), bits, torch.tensor(seed)).numpy()
    low, width = numpy_range(x, "per_tensor")
    step = step_of(width, bits)
    slack = rounding_error(x)
    assert (found >= low - slack).all()
    assert (found <= top_of(low, width, bits) + slack).all()
    assert (np.abs(found - x) <= step * (1 + 1e-5) + slack).all()
    index = (found - low) / step
    assert (np.abs(index - np.rint(index)) * step <= 2 * slack + 1e-4 * step).all()


@pytest.mark.parametrize("bits", [1, 4])
def test_stochastic_rounding_is_unbiased(bits):
    torch.manual_seed(0)
    x = torch.randn(500)
    key, draws = torch.tensor(1), 2000
    mean = sum(rounded_gradient(x, bits, key).double() for _ in range(draws)) / draws
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


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40) | st.integers(2**33 - 9, 2**33))
def test_noise_is_a_function_of_key_and_place(key, start):
    expected = [splitmix_and_finaliser(key, place) for place in range(start, start + 9)]
    assert hash_noise(torch.tensor(key), start, 9).tolist() == expected


def is_uniform(noise):
    """Whether the values look drawn from [-0.5, 0.5): bounds, mean, variance, 64 equal bins (chi square)."""
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
    """Noise of neighbouring keys, as the calls of one layer have them, and of the first keys of neighbouring layers."""
    keys = [(1 << 40) + i for i in range(calls // 2)] + [(7 + i) << 20 for i in range(calls // 2)]
    return [hash_noise(torch.tensor(key), 0, n) for key in keys]


def test_noise_is_uniform_and_not_repeated():
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


def test_another_key_has_other_numbers_not_the_same_ones_in_another_order():
    sums = [float(noise.double().sum()) for noise in drawn(4, 1 << 20)]
    assert min(abs(a - b) for i, a in enumerate(sums) for b in sums[:i]) > 0.1  # their spread is 400
    # an exclusive or with the key alone would give the same blocks of numbers in another order
    blocks = [noise.view(-1, 1 << 8).double().sum(1) for noise in drawn(4, 1 << 20)]
    assert all(len(set(a.tolist()) & set(b.tolist())) < 40 for i, a in enumerate(blocks) for b in blocks[:i])
