"""Rounding to a uniform grid, in plain torch: ranges, the grid, and the noise of stochastic rounding.  Paper: figure 1.

    n = 2**q - 1        s = max(range / n, 1e-8)        x_q = round(clip((x - min) / s, 0, n)) * s + min

A grid with a zero point is shifted by at most half a step so that 0 is on it, see ``round_with_zero_point``.

This file is the reference: faster implementations, see ``cpt_core.extensions``, return bit-identical results. It does
not handle autograd; ``fake_quantize`` adds the straight-through estimator.

Shapes: N batch, C channels, F features, L positions.  Ranges are float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cpt_core.quantization.roles import ZERO_POINT

MIN_SCALE = 1e-8  # smallest step of a grid; a constant tensor has range 0 and comes back unchanged
RUNNING_DECAY = 0.9  # weight of the old value; torch's BatchNorm counts its momentum the other way round
# (minimum, maximum - minimum), float32, broadcastable to the tensor
Range = tuple[Tensor, Tensor]


def per_tensor(x: Tensor) -> Range:
    """Return one range for the whole tensor, 0-d."""
    low, high = torch.aminmax(x)
    low = low.float()
    return low, high.float() - low


def per_channel(x: Tensor) -> Range:
    """Return one range per slice of the first dimension (output channel), shape (C, 1, ...)."""
    dims = tuple(range(1, x.dim()))
    return _range_over(x, dims) if dims else per_tensor(x)


def per_row(x: Tensor) -> Range:
    """Return one range per row of the last dimension, shape (..., 1)."""
    return _range_over(x, (-1,))


def per_position(x: Tensor) -> Range:
    """Return one range per position, shared by the batch: extremes over the first and the last dimension.

    For (N, F) this is one range; for (N, L, F) one per position l, shape (L, 1).
    """
    if x.dim() < 3:
        return per_tensor(x)
    low, width = _range_over(x, (0, -1))
    return low.squeeze(0), width.squeeze(0)


def per_sample_mean(x: Tensor) -> Range:
    """Return one range: the mean over the batch of every sample's minimum and maximum, shape (1, ..., 1)."""
    dims = tuple(range(1, x.dim()))
    low, high = x.amin(dims, keepdim=True).float(), x.amax(dims, keepdim=True).float()
    low = low.mean(0, keepdim=True)
    return low, high.mean(0, keepdim=True) - low


def _range_over(x: Tensor, dims: tuple[int, ...]) -> Range:
    # amin and amax: aminmax(dim=...) is 15 to 20 times slower on a CPU
    low = x.amin(dims, keepdim=True).float()
    return low, x.amax(dims, keepdim=True).float() - low


RANGE_FUNCTIONS: dict[str, Callable[[Tensor], Range]] = {
    function.__name__: function
    for function in (per_tensor, per_channel, per_row, per_position, per_sample_mean)
}


def range_of(x: Tensor, grid: str) -> Range:
    """Return the ranges of a non-empty tensor; ``grid``: a name of ``RANGE_FUNCTIONS``, or with a zero point."""
    return RANGE_FUNCTIONS[grid.removesuffix(ZERO_POINT)](x)


def has_zero_point(grid: str) -> bool:
    """Return whether 0 is on a grid exactly, see ``Quantizer.grid``."""
    return ZERO_POINT in grid


def clips(grid: str, is_stochastic: bool) -> bool:
    """Return whether values of the tensor itself can lie outside its grid."""
    return is_stochastic or has_zero_point(grid) or grid.startswith("per_sample_mean")


def shift_to_zero(low: Tensor, width: Tensor, steps: Tensor) -> Range:
    """Return the range of a grid with a zero point: extended to 0 and shifted by at most half a step.

    Its points low + k * width / steps, k = 0..steps, are those of ``round_with_zero_point``, up to the last digit.
    """
    zero_index, scale, width = _zero_point(low, width, steps)
    return -(zero_index * scale), width


def _zero_point(
    low: Tensor, width: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the index of the grid point 0, the step size, and the width of the range extended to 0."""
    low, high = low.clamp_max(0.0), (low + width).clamp_min(0.0)
    width = high - low
    scale = (width / steps).clamp_min(MIN_SCALE)
    return torch.minimum((-low / scale).round(), steps), scale, width


def track(running: Tensor, low: Tensor, width: Tensor) -> None:
    """Update a running range (3,) with the range of one call, both 0-d, in place.

    running = 0.9 running + 0.1 (low, width, 1), as two products and a sum; a range that is not finite is ignored.
    """
    current = torch.stack([low, width, torch.ones_like(width)])
    updated = running * RUNNING_DECAY + current * (1 - RUNNING_DECAY)
    running.copy_(torch.where(current.isfinite().all(), updated, running))


def num_steps(bits: int) -> float:
    """Return n = 2**bits - 1, the number of steps of the grid."""
    return float(2**bits - 1)


def round_to_grid(
    x: Tensor, low: Tensor, width: Tensor, steps: Tensor, key: Tensor | None, clip: bool
) -> Tensor:
    """Round ``x`` to the grid low + k * width / steps, k = 0..steps.

    Without ``clip`` the range must come from ``x`` itself: its extremes then round to 0 and n.

    Args:
        x: any shape and floating dtype; the grid is float32, the result has the dtype of ``x``.
        low: minimum of the range, float32, broadcastable to x.
        width: maximum - minimum, float32, broadcastable to x.
        steps: n = 2**q - 1, 0-d float32: a tensor, so that one compiled graph serves every q.
        key: key of the noise of stochastic rounding, 0-d int64; None for rounding half to even.
        clip: whether to clamp values to the range.
    """
    scale = (width / steps).clamp_min(MIN_SCALE)
    index = (x.float() - low) / scale
    if key is not None:
        index = index + noise(key, index)
    if clip:
        index = torch.clamp(index, torch.zeros_like(steps), steps)
    rounded = index.round() * scale + low
    return rounded.to(x.dtype)


def round_with_zero_point(
    x: Tensor, low: Tensor, width: Tensor, steps: Tensor, key: Tensor | None
) -> Tensor:
    """Round ``x`` to the grid k * scale, k = -zero..steps - zero, which contains 0.

    The range is extended to 0 if it lies on one side of it, then shifted by at most half a step. So 0 stays exactly 0,
    and additional zeros in a tensor change no other value: padding, masked positions, pruned weights.

    Args:
        x: any shape and floating dtype.
        low: minimum of the range, float32, broadcastable to x.
        width: maximum - minimum, float32, broadcastable to x.
        steps: n = 2**q - 1, 0-d float32.
        key: key of the noise of stochastic rounding, 0-d int64; None for rounding half to even.
    """
    zero_index, scale, _ = _zero_point(low, width, steps)
    index = x.float() / scale
    if key is not None:
        index = index + noise(key, index)
    clipped = torch.clamp(index, -zero_index, steps - zero_index)
    rounded = clipped.round() * scale
    return rounded.to(x.dtype)


def noise(key: Tensor, x: Tensor) -> Tensor:
    """Return the noise of ``hash_noise`` in the shape of ``x``."""
    return hash_noise(key, x.numel()).view(x.shape)


def hash_noise(key: Tensor, count: int) -> Tensor:
    """Return noise for ``count`` elements in row-major order, float32 in (-0.5, 0.5).

    It is a pure function of key and position, equal in every implementation, for any number of threads and memory
    layout. ``key`` (0-d int64) is scrambled to 64 bits by splitmix64's finaliser, then enters a 32-bit finaliser of the
    position at two points, so that the noise of one key is no permutation of that of another. One hash serves two
    neighbouring elements: the noise takes 2**16 values, symmetric about 0.
    """
    first, second = key_halves(key)
    pair = torch.arange((count + 1) >> 1, device=key.device, dtype=torch.int64)
    # int32 arithmetic wraps here and below
    h = pair.to(torch.int32) ^ first ^ (pair >> 32).to(torch.int32) * GOLDEN
    h = (h ^ ((h >> 16) & 0xFFFF)) * MIX[0] ^ second
    h = (h ^ ((h >> 15) & 0x1FFFF)) * MIX[1]
    h = h ^ ((h >> 16) & 0xFFFF)
    halves = (
        torch.stack([h & 0xFFFF, (h >> 16) & 0xFFFF], 1).flatten().narrow(0, 0, count)
    )
    return halves.float() * 2.0**-16 + (2.0**-17 - 0.5)


def key_halves(key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two int32 halves of a scrambled key."""
    z = key + _STEP
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX64[0]
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX64[1]
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    return z.to(torch.int32), (z >> 32).to(torch.int32)


def _signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >> (bits - 1) else word


GOLDEN = _signed(0x9E3779B1, 32)
MIX = (0x7FEB352D, _signed(0x846CA68B, 32))
_STEP, *_MIX64 = (
    _signed(word, 64)
    for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
