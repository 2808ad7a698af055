"""The plain backend: ranges, rounding to the grid and its noise in torch's own operations.  Paper: figure 1.

    n = 2**q - 1        s = max(range / n, 1e-8)        x_q = round(clip((x - min) / s, 0, n)) * s + min

It is what the other backends are held to, bit for bit, and runs wherever they do not.

Shapes: N batch, C channels, F features, L positions.  Ranges are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MIN_SCALE = 1e-8  # smallest step of a grid; a constant tensor has range 0 and comes back unchanged
CODE_BITS = 8  # at most: codes are int8
RUNNING_DECAY = 0.9  # weight of the old value; torch's BatchNorm counts its momentum the other way round
BLOCK = 1 << 18  # elements of a part of a large tensor on the CPU, per thread: 1 MB
Range = tuple[Tensor, Tensor]  # (minimum, maximum - minimum), broadcastable to the tensor, float32


# aminmax of a whole tensor is fast on the CPU; aminmax(dim=...) and min(dim) are 15-20 times slower than amin + amax.
def per_tensor(x: Tensor) -> Range:
    """One range for the whole tensor, 0-d."""
    low, high = torch.aminmax(x)
    low = low.float()
    return low, high.float() - low


def per_channel(x: Tensor) -> Range:
    """One range per slice of the first dimension (output channel), shape (C, 1, ...)."""
    dims = tuple(range(1, x.dim())) or None
    return _min_and_width(x, dims) if dims else per_tensor(x)


def per_row(x: Tensor) -> Range:
    """One range per row of the last dimension, shape (..., 1)."""
    return _min_and_width(x, (-1,))


def per_position(x: Tensor) -> Range:
    """One range per position, shared by the batch: extremes over the first and the last dimension, shape (..., 1).

    For (N, F) this is one range; for (N, L, F) one per position l, shape (L, 1).
    """
    if x.dim() < 3:
        return per_tensor(x)
    low, width = _min_and_width(x, (0, -1))
    return low.squeeze(0), width.squeeze(0)


def per_sample_mean(x: Tensor) -> Range:
    """One range: the mean over the batch of every sample's minimum and maximum, shape (1, ..., 1)."""
    dims = tuple(range(1, x.dim()))
    low, high = x.amin(dims, keepdim=True).float(), x.amax(dims, keepdim=True).float()
    low = low.mean(0, keepdim=True)
    return low, high.mean(0, keepdim=True) - low


def in_parts(x: Tensor) -> bool:
    """Whether a tensor is worked on part by part: large ones on the CPU, so that a part stays in the cache."""
    return x.is_cpu and not torch.compiler.is_compiling() and x.numel() > 2 * BLOCK  # sizes may be symbols there


def rows_of_part(x: Tensor) -> int:
    """Rows of a part of a large tensor."""
    return max(1, BLOCK * torch.get_num_threads() * len(x) // x.numel())


def _min_and_width(x: Tensor, dims: tuple[int, ...]) -> Range:
    low = x.amin(dims, keepdim=True).float()
    return low, x.amax(dims, keepdim=True).float() - low


GRANULARITIES: dict[str, Callable[[Tensor], Range]] = {
    "per_tensor": per_tensor,
    "per_channel": per_channel,
    "per_row": per_row,
    "per_position": per_position,
    "per_sample_mean": per_sample_mean,
}


def range_of(x: Tensor, granularity: str) -> Range:
    """Return the ranges of a tensor that is not empty; of a grid (``kernels.grids``) those of its granularity."""
    return GRANULARITIES[granularity.partition("|")[0]](x)


def round_to_grid(x: Tensor, low: Tensor, width: Tensor, levels: Tensor, key: Tensor | None, clip: bool) -> Tensor:
    """Round ``x`` to the grid low + k * width / levels, k = 0..levels.

    One allocation, then in place: sub, div, (noise, clip,) round, mul, add. Without ``clip`` the range must come from
    ``x`` itself: its extremes then round to 0 and n.

    Args:
        x: any shape and floating dtype; the grid is float32, the result has the dtype of ``x``.
        low: minimum of the range, float32, broadcastable to x.
        width: maximum - minimum, likewise.
        levels: n = 2**q - 1, 0-d float32: a tensor, so that one compiled graph serves every q.
        key: of the noise of stochastic rounding, 0-d int64; None for rounding half to even.
        clip: bring values outside the range to its ends.
    """
    scale = (width / levels).clamp_min(MIN_SCALE)  # s = max(range / n, 1e-8)
    y = x.float()
    if in_parts(y) and y.is_contiguous():
        out = _round_in_parts(y, low, scale, levels, key, clip)
    else:
        out = _round(y - low, low, scale, levels, None if key is None else noise_of(key, y), clip)
    return out.to(x.dtype)


def into(own: Tensor) -> Tensor | None:
    """A tensor that may be written over; a compiler's graph holds no such thing, and needs none."""
    return None if torch.compiler.is_compiling() else own


def _round(y: Tensor, low: Tensor, scale: Tensor, levels: Tensor, noise: Tensor | None, clip: bool) -> Tensor:
    """Finish ``y`` = x - low, in place."""
    y = nearest(y, scale, noise, levels if clip else None)
    y = torch.mul(y, scale, out=into(y))
    return torch.add(y, low, out=into(y))


def nearest(y: Tensor, scale: Tensor, noise: Tensor | None, levels: Tensor | None = None) -> Tensor:
    """Return the number of the grid point that ``y`` = x - low goes to, in place; of 0 to ``levels``, where given."""
    y = torch.div(y, scale, out=into(y))
    if noise is not None:
        y = torch.add(y, noise, out=into(y))
    if levels is not None and y.is_cpu and not torch.compiler.is_compiling() and type(levels) is Tensor:
        y = y.clamp_(0.0, float(levels))  # scalar bounds are much faster than tensor bounds on the CPU
    elif levels is not None:
        y = torch.clamp(y, torch.zeros_like(levels), levels, out=into(y))
    return torch.round(y, out=into(y))


def _round_in_parts(x: Tensor, low: Tensor, scale: Tensor, levels: Tensor, key: Tensor | None, clip: bool) -> Tensor:
    """Do the same to one part after the other."""
    out = torch.empty_like(x)
    y = out
    if low.numel() == 1:
        low, scale, x, y = low.reshape(()), scale.reshape(()), x.view(-1), out.view(-1)
    for part, noise, a, s in parts_of(x, key, low, scale):
        torch.sub(x[part], a, out=y[part])
        _round(y[part], a, s, levels, noise, clip)
    return out


def parts_of(x: Tensor, key: Tensor | None, *of_ranges: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of one part after the other, with their noise and what belongs to their ranges.

    Each part stays in the processor's cache over all the operations.
    """
    row, rows = x.numel() // len(x), rows_of_part(x)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        noise = None if key is None else hash_noise(key, start * row, x[part].numel()).view(x[part].shape)
        # one for every row, or shared by the first dimension
        own = [v[part] if v is not None and v.dim() == x.dim() and len(v) == len(x) else v for v in of_ranges]
        yield part, noise, *own


@torch.no_grad()
def encode(
    x: Tensor, low: Tensor, width: Tensor, levels: Tensor, key: Tensor | None, clip: bool, channels_last: bool = False
) -> Tensor:
    """Return k - 2**(q - 1), int8, of the grid points that ``round_to_grid`` returns; q at most 8.

    NaN has code 0: it is in the range. In memory codes lie as ``x`` does; with ``channels_last`` those of (N, C, H, W)
    have the channels of a pixel beside each other.
    """
    y, scale = x.float() - low, (width / levels).clamp_min(MIN_SCALE)
    y = nearest(y, scale, None if key is None else noise_of(key, y), levels if clip else None)
    codes = y.clamp_min_(0).nan_to_num_(0).sub_((levels + 1) / 2)
    return empty_codes(x, channels_last).copy_(codes)


def empty_codes(x: Tensor, channels_last: bool) -> Tensor:
    """Return memory for the codes of a tensor."""
    if not channels_last:
        return torch.empty_like(x, dtype=torch.int8)
    return x.new_empty([x.shape[d] for d in (0, 2, 3, 1)], dtype=torch.int8).permute(0, 3, 1, 2)


def clips(granularity: str, stochastic: bool) -> bool:
    """Whether values of the tensor itself can lie outside its range."""
    return stochastic or granularity.partition("|")[0] == "per_sample_mean"


def track(running: Tensor, low: Tensor, width: Tensor) -> None:
    """Let a running range (3,) follow the range of one call, both 0-d, in place.

    running = 0.9 running + 0.1 (low, width, 1), two products and a sum; a range that is not finite leaves it alone.
    """
    now = torch.stack([low, width, torch.ones_like(width)])
    after = running * RUNNING_DECAY + now * (1 - RUNNING_DECAY)
    running.copy_(torch.where(now.isfinite().all(), after, running))


def hash_noise(key: Tensor, start: int, count: int) -> Tensor:
    """Return the noise of the elements ``start`` to ``start + count`` (row by row), in (-0.5, 0.5), float32.

    A pure function of key and place: the same in every backend, for any number of threads and layout in memory.
    ``key`` is scrambled to 64 bits by splitmix64's finaliser, then enters a 32-bit finaliser of the place at two
    points, so that the noise of two keys is no rearrangement of one sequence. A hash serves two neighbours: u takes
    2**16 values, symmetric about 0. ``key`` is 0-d int64, different in every call.
    """
    first, second = key_halves(key)
    pair = torch.arange(start >> 1, (start + count + 1) >> 1, device=key.device, dtype=torch.int64)
    h = pair.to(torch.int32).bitwise_xor_(first)  # wraps, as all that follows; in place, which is three times as fast
    if start + count > 1 << 33:
        h.bitwise_xor_((pair >> 32).to(torch.int32).mul_(GOLDEN))
    moved = torch.empty_like(h)
    for shift, mask, factor, then in ((16, 0xFFFF, MIX[0], second), (15, 0x1FFFF, MIX[1], None), (16, 0xFFFF, 1, None)):
        torch.bitwise_right_shift(h, shift, out=moved)
        h.bitwise_xor_(moved.bitwise_and_(mask)).mul_(factor)
        if then is not None:
            h.bitwise_xor_(then)
    halves = h.bitwise_xor_(CENTRE).view(torch.int16).narrow(0, start & 1, count)  # 16 bits less 2**15, the lower first
    return halves.float().mul_(2.0**-16).add_(2.0**-17)


def traced_noise(key: Tensor, count: int) -> Tensor:
    """Return ``hash_noise`` from the first element on, without a change in place: what a graph may hold."""
    first, second = key_halves(key)
    pair = torch.arange((count + 1) >> 1, device=key.device, dtype=torch.int64)
    h = pair.to(torch.int32) ^ first ^ (pair >> 32).to(torch.int32) * GOLDEN
    h = (h ^ ((h >> 16) & 0xFFFF)) * MIX[0] ^ second
    h = (h ^ ((h >> 15) & 0x1FFFF)) * MIX[1]
    h = h ^ ((h >> 16) & 0xFFFF)
    halves = torch.stack([h & 0xFFFF, (h >> 16) & 0xFFFF], 1).flatten().narrow(0, 0, count)
    return halves.float() * 2.0**-16 + (2.0**-17 - 0.5)


def noise_of(key: Tensor, x: Tensor) -> Tensor:
    """Return the noise of all elements of a tensor, in its shape."""
    if torch.compiler.is_compiling():
        return traced_noise(key, x.numel()).view(x.shape)
    return hash_noise(key, 0, x.numel()).view(x.shape)


def _signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >> (bits - 1) else word


GOLDEN, CENTRE = _signed(0x9E3779B1, 32), _signed(0x80008000, 32)
MIX = (0x7FEB352D, _signed(0x846CA68B, 32))
_STEP, *_MIX64 = (_signed(w, 64) for w in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def key_halves(key: Tensor) -> tuple[Tensor, Tensor]:
    """Return two int32 from a key."""
    z = key + _STEP
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX64[0]
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX64[1]
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    return z.to(torch.int32), (z >> 32).to(torch.int32)


def affine(product: Tensor, row_codes: Tensor, row_values: Tensor, column_codes: Tensor, column_values: Tensor) -> None:
    """Turn sums of products of codes into those of values, in place: the storage holds float32 afterwards.

    No size is 0.

    Args:
        product: sums k_a k_b, int32 (M, N), of G products below each other; the names are those of ``codes.integer``.
        row_codes: of a: sum k and z, int32 (2, M).
        row_values: of a: s, s sum (k - z) and r, float32 (3, M).
        column_codes: of b: z and sum (k - z), int32 (2, G N).
        column_values: of b: s, r and s sum (k - z) + K r, and the bias, float32 (4, G N).
    """
    M, N = product.shape
    G = column_codes.shape[1] // N
    (sums, zero_a), (scale_a, scaled, rest_a) = (v.view(len(v), G, -1, 1) for v in (row_codes, row_values))
    (zero_b, sums_b), (scale_b, rest_b, total_b, bias) = (
        v.view(len(v), G, 1, N) for v in (column_codes, column_values)
    )
    t = (product.view(G, -1, N) - zero_b * sums - zero_a * sums_b).float()
    y = (scale_a * scale_b) * t + scaled * rest_b + rest_a * total_b + bias
    product.copy_(y.view(M, N).view(torch.int32))
