"""Rounding to number formats other than the paper's, in plain torch.  Beyond the paper.

The C++ kernels replace ``round_blocks`` by an operator with equal results (``kernels/cpp/blocks.h``).

A format other than affine has scales s: x / s is rounded to the values of an element, and the result multiplied by s.
``round_to_format`` rounds a tensor on a given range, ``round_elements`` with given scales; ``rotate`` is a random
Hadamard rotation.

    one per range       s = max |x| / largest
    mx                  s = 2**(floor(log2(max |x| of a block)) - exponent of the largest), from 2**-127 to 2**127
    nvfp4               s = e4m3(max |x| of a block / 6 / t) t,   t = max |x| of all / (6 * 448)
    16 bits and more    none: bf16, fp16 and other wide minifloats are never scaled

Rounding is half to even, where even is the code of the value; or stochastic, to one of the two neighbours, unbiased up
to 2**-17 of their distance. Results have the dtype of the input and are computed in float32.

Differs: OCP lets a conversion that saturates turn infinity into the largest number. Here only finite numbers saturate:
infinity stays infinity where the format has one and is NaN elsewhere, NaN stays NaN, and either of them makes all of
its block, or of what shares its own range, NaN, so that loss scalers see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from cpt_core.quantization.rounding import MIN_SCALE, hash_noise, noise
from cpt_extras.formats.format import FORMATS, UNSCALED, Format, check_blocks
from cpt_extras.operations.autocast_matmul import matmul

MIN_FORMAT_SCALE = 2.0**-126  # the smallest normal float32; also the scale of zeros
MIN_UNSCALED_BITS = 16  # minifloats of so many bits and more are not scaled
BLOCK_SCALE_FORMAT = FORMATS["e4m3"]  # of nvfp4


def out_buffer(x: Tensor) -> Tensor | None:
    """Return a tensor to overwrite by ``out=``; None under a compiler, which plans memory itself."""
    return None if torch.compiler.is_compiling() else x


def round_to_format(
    x: Tensor,
    low: Tensor,
    width: Tensor,
    granularity: str,
    format: Format,
    key: Tensor | None,
    in_blocks: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Round ``x`` to a format on a given range.

    Args:
        x: floating-point tensor.
        low: low ends of the ranges.
        width: of the ranges.
        granularity: of the ranges; ``UNSCALED`` rounds without a scale.
        format: number format.
        key: of the noise of stochastic rounding; None rounds to nearest.
        in_blocks: replacement of ``round_blocks`` with equal results.
    """
    if format.is_identity:
        return x.clone()
    y = x.float()
    if format.block:
        rounded = _in_blocks(y, low, width, format, key, in_blocks or round_blocks)
    elif format.kind == "affine":
        rounded = affine(y, low, width, format, key)
    elif granularity == UNSCALED or _is_wide_minifloat(format):
        rounded = round_elements(y, None, format, key)
    else:
        scale = (_largest(low, width) / format.largest).clamp_min(MIN_FORMAT_SCALE)
        rounded = round_elements(y, scale, format, key)
    return rounded.to(x.dtype)


def _is_wide_minifloat(format: Format) -> bool:
    return format.kind == "minifloat" and format.bits >= MIN_UNSCALED_BITS


def _largest(low: Tensor, width: Tensor) -> Tensor:
    """Return the largest magnitude of a range."""
    return torch.maximum(-low, low + width)


def _in_blocks(
    x: Tensor,
    low: Tensor,
    width: Tensor,
    format: Format,
    key: Tensor | None,
    in_blocks: Callable[..., Tensor],
) -> Tensor:
    check_blocks(x.shape, format)
    if format.rows > 1:
        return _in_tiles(x, low, width, format, key, in_blocks)
    size = x.shape[-1]
    rows = functional.pad(x, (0, -size % format.block)) if format.partial else x
    shape = rows.shape
    range_scale = None
    if format.scale == "e4m3":
        largest_scaled = format.largest * BLOCK_SCALE_FORMAT.largest
        range_scale = (_largest(low, width) / largest_scaled).clamp_min(
            MIN_FORMAT_SCALE
        )
        if range_scale.dim():
            blocks_per_row = shape[-1] // format.block
            by_row = range_scale.expand((*x.shape[:-1], 1))
            by_block = by_row.expand(*x.shape[:-1], blocks_per_row)
            range_scale = by_block.reshape(-1, 1)
    y = in_blocks(rows.reshape(-1, format.block), range_scale, format, key)
    return y.reshape(shape)[..., :size]


def round_blocks(
    x: Tensor, range_scale: Tensor | None, format: Format, key: Tensor | None
) -> Tensor:
    """Round every row of a matrix as one block of a format.

    Args:
        x: float32, (blocks, elements).
        range_scale: scale of the range of a block, 0-d or (blocks, 1); None for scales that are powers of two.
        format: format with blocks.
        key: of the noise of stochastic rounding; None rounds to nearest.
    """
    largest = torch.maximum(-x.amin(-1, True), x.amax(-1, True))
    if range_scale is None:
        scale = _power_of_two(largest, format)
    else:
        scale = _two_scales(largest, range_scale, format)
    return round_elements(x, scale, format, key)


def _in_tiles(
    x: Tensor,
    low: Tensor,
    width: Tensor,
    format: Format,
    key: Tensor | None,
    in_blocks: Callable[..., Tensor],
) -> Tensor:
    """Round blocks that cover several rows: the elements of a tile lie in one row of another tensor."""
    has_ranges = format.scale == "e4m3" and low.numel() > 1
    if x.dim() < 2 or has_ranges:
        raise ValueError(
            f"blocks of {format.rows} rows need a matrix, and NVFP4 one range for all of it; got shape "
            f"{tuple(x.shape)} and {low.numel()} ranges"
        )
    num_rows, size = x.shape[-2:]
    padded = functional.pad(x, (0, -size % format.block, 0, -num_rows % format.rows))
    tiles = padded.unflatten(-1, (-1, format.block)).unflatten(-3, (-1, format.rows))
    tiles = tiles.transpose(-3, -2)  # (..., tile rows, tile columns, rows, block)
    one_row = replace(format, block=format.rows * format.block, rows=1)
    rounded = _in_blocks(tiles.flatten(-2), low, width, one_row, key, in_blocks)
    rounded = rounded.unflatten(-1, (format.rows, format.block)).transpose(-3, -2)
    return rounded.flatten(-4, -3).flatten(-2)[..., :num_rows, :size]


def _power_of_two(largest: Tensor, format: Format) -> Tensor:
    """Return the e8m0 scales of blocks; OCP's NaN where a number is not finite."""
    # 2**floor(log2(largest)), and 0 for subnormal numbers
    power = (largest.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
    shift = 2.0**-format.max_exponent
    if format.kind == "symmetric":
        # OCP's integers are fractions of 1, and the limits apply to the scale of these fractions
        scale = power.clamp(2.0**-127, 2.0**127) * shift
    else:
        scale = (power * shift).clamp(2.0**-127, 2.0**127)
    return torch.where(largest.isfinite(), scale, math.nan)


def _two_scales(largest: Tensor, range_scale: Tensor, format: Format) -> Tensor:
    """Return the e4m3 scales of blocks, times the float32 scale of their range."""
    relative = largest / format.largest / range_scale
    return round_elements(relative, None, BLOCK_SCALE_FORMAT, None) * range_scale


def affine(
    x: Tensor, low: Tensor, width: Tensor, format: Format, key: Tensor | None = None
) -> Tensor:
    """Round to the affine grid of a range; infinity becomes NaN.

    Args:
        x: float32.
        low: low ends of the ranges.
        width: of the ranges.
        format: affine.
        key: of the noise of stochastic rounding; None rounds to nearest.
    """
    n = 2.0**format.bits - 1
    scale = (width / n).clamp_min(MIN_SCALE)
    k = (x - low) / scale
    if key is not None:
        k = torch.add(k, noise(key, k), out=out_buffer(k))
    k = torch.round(k, out=out_buffer(k))
    if not format.saturate:
        k = torch.where((k < 0) | (k > n), math.nan, k)
    k = torch.clamp(k, 0, n, out=out_buffer(k))
    y = torch.mul(k, scale, out=out_buffer(k))
    y = torch.add(y, low, out=out_buffer(y))
    return torch.add(y, x * 0, out=out_buffer(y))


# --- exact rounding to the values of an element: minifloats, powers of two and whole numbers --------------------------

# A float32 x between 2**e and 2**(e + 1) has neighbours at multiples of 2**(e - m) in a format with m bits of mantissa;
# below the smallest normal number, multiples of the step at that number. Adding 1.5 * 2**23 times this step and
# subtracting it again rounds x to such a multiple, half to even, as float32 has no bits for a finer sum.
EXPONENT_MASK = 0x7F800000  # the bits of a float32's exponent
# torch rounds to these itself, half to even; both have infinities
NATIVE_DTYPES = {(8, 7, "infinity"): torch.bfloat16, (5, 10, "infinity"): torch.float16}


def round_elements(
    x: Tensor, scale: Tensor | None, format: Format, key: Tensor | None = None
) -> Tensor:
    """Round x / scale to the values of an element, and multiply by the scale again.

    Args:
        x: float32.
        scale: float32, broadcastable to ``x``; where it is 0, the result is 0; None rounds without a scale.
        format: not affine.
        key: of the noise of stochastic rounding, 0-d int64; None for rounding half to even.
    """
    return _rounded(x, scale, format, None if key is None else noise(key, x))


def _rounded(
    x: Tensor, scale: Tensor | None, format: Format, noise: Tensor | None
) -> Tensor:
    if scale is None:
        return _bounded(x, format, noise)
    y = _bounded(x / torch.where(scale == 0, 1.0, scale), format, noise)
    return torch.mul(y, scale, out=out_buffer(y))


def _bounded(x: Tensor, format: Format, noise: Tensor | None) -> Tensor:
    """Round to new memory, then saturate or overflow."""
    largest = format.largest
    native_dtype = NATIVE_DTYPES.get(
        (format.exponent, format.mantissa, format.specials)
    )
    if format.kind == "symmetric":
        y = _round_to_integers(x, noise)
    elif noise is None and native_dtype is not None:
        y = x.to(native_dtype).float()
    else:
        y = _round_to_floats(x, format, noise)
    if format.saturate:
        y = torch.clamp(y, -largest, largest, out=out_buffer(y))
        if format.specials == "infinity":
            return torch.where(x.isinf(), x, y)
        return torch.add(y, x * 0, out=out_buffer(y))  # infinity becomes NaN
    overflows = x.isinf() | (y.abs() > largest)
    if format.specials == "infinity":
        return torch.where(overflows, x * math.inf, y)
    return torch.where(overflows, math.nan, y)


def _round_to_integers(x: Tensor, noise: Tensor | None) -> Tensor:
    y = x.round()
    return y if noise is None else y + (x - y + noise).round()


def _round_to_floats(x: Tensor, format: Format, noise: Tensor | None) -> Tensor:
    """Round to a minifloat or to powers of two without bounds."""
    mantissa = format.mantissa
    power = (x.view(torch.int32) & EXPONENT_MASK).view(torch.float32)  # 2**e
    power = torch.clamp(
        power,
        2.0**format.min_exponent,
        2.0**format.max_exponent,
        out=out_buffer(power),
    )
    needs_float64 = mantissa > 20 or format.max_exponent + 24 - mantissa > 127
    if needs_float64:
        x, power = x.double(), power.double()
    shift = 1.5 * 2.0 ** ((52 if needs_float64 else 23) - mantissa)
    if noise is not None:
        magic = power * shift
    elif mantissa:
        magic = torch.mul(power, shift, out=out_buffer(power))
    else:  # a code is even where its exponent is, not where the multiple is
        is_odd = (power.float().view(torch.int32) >> 23) & 1
        magic = power * (shift + 1 - is_odd.to(power.dtype))
    y = x + magic
    y = torch.sub(y, magic, out=out_buffer(y))
    if noise is not None:
        rest = torch.addcmul(x - y, noise, power, value=2.0**-mantissa)
        rest = torch.add(rest, magic, out=out_buffer(rest))
        rest = torch.sub(rest, magic, out=out_buffer(rest))
        y = torch.add(y, rest, out=out_buffer(y))
    return y.float()


# --- random Hadamard rotation, which spreads outliers over a whole block ------------------------


def rotate(x: Tensor, size: int, seed: int, inverse: bool = False) -> Tensor:
    """Rotate blocks of ``size`` along the last dimension by one orthonormal matrix, D H / sqrt(size).

    H is Walsh's matrix of -1 and 1, D has random signs on its diagonal. A rotation of both operands of a matmul along
    its sum, by one seed, does not change the result.

    >>> x = torch.tensor([[8.0, 0.0, 0.0, 0.0]])
    >>> rotate(x, 4, seed=0).abs().tolist(), rotate(rotate(x, 4, seed=0), 4, seed=0, inverse=True).tolist()
    ([[4.0, 4.0, 4.0, 4.0]], [[8.0, 0.0, 0.0, 0.0]])

    Args:
        x: floating, (..., F); the result has its shape and dtype, and gradients go back through the rotation.
        size: of a block, a power of two, as a ``Quantizer`` has it.
        seed: of the signs.
        inverse: rotate back.

    Raises:
        ValueError: for a size that does not divide F.
    """
    if not x.dim() or x.shape[-1] % size:
        raise ValueError(
            f"rotations of {size} do not divide the last dimension of a tensor of shape {tuple(x.shape)}"
        )
    is_plain = x.is_cpu and type(x) is Tensor and not is_in_torch_dispatch_mode()
    if is_plain and not torch.compiler.is_compiling():
        rotation = _cached_rotation(size, seed)
    else:
        rotation = _rotation(size, seed, x.device)
    if inverse:
        rotation = rotation.t()
    blocks = x.unflatten(-1, (-1, size))
    return matmul(blocks, rotation.to(x.dtype)).flatten(-2)


def _rotation(size: int, seed: int, device: torch.device) -> Tensor:
    """Return the matrix D H / sqrt(size), float32 (size, size)."""
    walsh_2 = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device)
    walsh = torch.ones(1, 1, device=device)
    while len(walsh) < size:
        walsh = torch.kron(walsh, walsh_2)
    noise = hash_noise(torch.tensor(seed, device=device), size)
    return torch.where(noise[:, None] < 0, -walsh, walsh) * size**-0.5


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # the first call may be an evaluation, later ones train
def _cached_rotation(size: int, seed: int) -> Tensor:
    return _rotation(size, seed, torch.device("cpu"))
