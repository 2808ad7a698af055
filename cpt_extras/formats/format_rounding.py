"""Rounding to number formats other than the paper's, plain, in every backend.  Beyond the paper.

A format other than affine has scales s: x / s is rounded to the values of an element, and what comes out times s.

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

import torch
from torch import Tensor
from torch.nn import functional

from cpt_core.quantization.rounding import MIN_SCALE, hash_noise, noise
from cpt_extras.formats.format import FORMATS, UNSCALED, Format, check_blocks
from cpt_extras.operations.autocast_matmul import matmul

LEAST_SCALE = 2.0**-126  # the smallest normal float32: of a range of zeros too
WIDE = 16  # bits of a minifloat from which on it is not scaled
SCALE = FORMATS["e4m3"]  # of a block of nvfp4


def into(own: Tensor) -> Tensor | None:
    """Return a tensor that may be written over; None for compilers, whose graphs hold no such thing and need none."""
    return None if torch.compiler.is_compiling() else own


def round_to_format(
    x: Tensor,
    low: Tensor,
    width: Tensor,
    granularity: str,
    format: Format,
    key: Tensor | None,
) -> Tensor:
    """Round to a format on a given range; as ``grids.round_in_range``."""
    if format.is_identity:
        return x.clone()
    y = x.float()
    if format.block:
        rounded = _in_blocks(y, low, width, format, key)
    elif format.kind == "affine":
        rounded = affine(y, low, width, format, key)
    elif granularity == UNSCALED or (
        format.kind == "minifloat" and format.bits >= WIDE
    ):
        rounded = round_elements(y, None, format, key)
    else:
        scale = (_largest(low, width) / format.largest).clamp_min(LEAST_SCALE)
        rounded = round_elements(y, scale, format, key)
    return rounded.to(x.dtype)


def _largest(low: Tensor, width: Tensor) -> Tensor:
    """Return the largest magnitude of a range."""
    return torch.maximum(-low, low + width)


def _in_blocks(
    x: Tensor, low: Tensor, width: Tensor, format: Format, key: Tensor | None
) -> Tensor:
    check_blocks(x.shape, format)
    size = x.shape[-1]
    rows = functional.pad(x, (0, -size % format.block)) if format.partial else x
    shape = rows.shape
    rows = rows.reshape(-1, format.block)
    largest = torch.maximum(-rows.amin(-1, True), rows.amax(-1, True))
    if format.scale == "e8m0":
        scale = _power_of_two(largest, format)
    else:
        whole = (_largest(low, width) / (format.largest * SCALE.largest)).clamp_min(
            LEAST_SCALE
        )
        if whole.dim():
            whole = (
                whole.expand((*x.shape[:-1], 1))
                .expand(*x.shape[:-1], shape[-1] // format.block)
                .reshape(-1, 1)
            )
        scale = _two_scales(largest, whole, format)
    y = round_elements(rows, scale, format, key)
    return y.reshape(shape)[..., :size]


def _power_of_two(largest: Tensor, format: Format) -> Tensor:
    """Return the e8m0 scales of blocks; OCP's NaN where a number is not finite."""
    power = (largest.view(torch.int32) & 0x7F800000).view(
        torch.float32
    )  # 2**floor(log2), and 0 of subnormal numbers
    shift = 2.0**-format.greatest_exponent
    if (
        format.kind == "symmetric"
    ):  # OCP's integers are fractions of 1, and the limits are those of their scale
        scale = power.clamp(2.0**-127, 2.0**127) * shift
    else:
        scale = (power * shift).clamp(2.0**-127, 2.0**127)
    return torch.where(largest.isfinite(), scale, math.nan)


def _two_scales(largest: Tensor, whole: Tensor, format: Format) -> Tensor:
    """Return the product of the e4m3 scales of blocks and the float32 scale; 0 where the first comes out as 0."""
    return round_elements(largest / format.largest / whole, None, SCALE, None) * whole


def affine(
    x: Tensor, low: Tensor, width: Tensor, format: Format, key: Tensor | None = None
) -> Tensor:
    """Round to the affine grid of a range, as ``rounding.round_to_grid``; infinity is NaN."""
    n = 2.0**format.bits - 1
    scale = (width / n).clamp_min(MIN_SCALE)
    k = (x - low) / scale
    if key is not None:
        k = torch.add(k, noise(key, k), out=into(k))
    k = torch.round(k, out=into(k))
    if not format.saturate:
        k = torch.where((k < 0) | (k > n), math.nan, k)
    k = torch.clamp(k, 0, n, out=into(k))
    y = torch.mul(k, scale, out=into(k))
    y = torch.add(y, low, out=into(y))
    return torch.add(y, x * 0, out=into(y))


# --- the values of an element: minifloats, powers of two and whole numbers, exactly -----------------------------------

# A float32 x between 2**e and 2**(e + 1) has neighbours at multiples of 2**(e - m) in a format with m bits of mantissa;
# below its smallest normal number at those of that one. Adding 1.5 * 2**23 times this step, and taking it away again,
# leaves x rounded to such a multiple, half to even: that is all that float32's own addition has bits for.
EXPONENT = 0x7F800000  # the bits of a float32's exponent
# torch rounds to these itself, half to even; both have infinities
NATIVE = {(8, 7, "infinity"): torch.bfloat16, (5, 10, "infinity"): torch.float16}


def round_elements(
    x: Tensor, scale: Tensor | None, format: Format, key: Tensor | None = None
) -> Tensor:
    """Round x / scale to the values of an element, and multiply by the scale again.

    Args:
        x: float32.
        scale: float32, broadcastable to ``x``; where it is 0, so is the result; None for none.
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
    return torch.mul(y, scale, out=into(y))


def _bounded(x: Tensor, format: Format, noise: Tensor | None) -> Tensor:
    """Round, then saturate or overflow; into memory of its own."""
    largest = format.largest
    if format.kind == "symmetric":
        y = _whole(x, noise)
    elif noise is None and (
        native := NATIVE.get((format.exponent, format.mantissa, format.specials))
    ):
        y = x.to(native).float()
    else:
        y = _floating(x, format, noise)
    if format.saturate:
        y = torch.clamp(y, -largest, largest, out=into(y))
        if format.specials == "infinity":
            return torch.where(x.isinf(), x, y)
        return torch.add(y, x * 0, out=into(y))  # NaN of infinity
    beyond = x.isinf() | (y.abs() > largest)
    return torch.where(
        beyond, x * math.inf if format.specials == "infinity" else math.nan, y
    )


def _whole(x: Tensor, noise: Tensor | None) -> Tensor:
    y = x.round()
    return y if noise is None else y + (x - y + noise).round()


def _floating(x: Tensor, format: Format, noise: Tensor | None) -> Tensor:
    mantissa = format.mantissa
    power = (x.view(torch.int32) & EXPONENT).view(torch.float32)  # 2**e
    power = torch.clamp(
        power,
        2.0**format.least_exponent,
        2.0**format.greatest_exponent,
        out=into(power),
    )
    if (
        wide := mantissa > 20 or format.greatest_exponent + 24 - mantissa > 127
    ):  # beyond what float32 holds
        x, power = x.double(), power.double()
    shift = 1.5 * 2.0 ** ((52 if wide else 23) - mantissa)
    if mantissa or noise is not None:
        magic = (
            power * shift
            if noise is not None
            else torch.mul(power, shift, out=into(power))
        )
    else:  # a code is even where its exponent is, not where the multiple is
        odd = (power.float().view(torch.int32) >> 23) & 1
        magic = power * (shift + 1 - odd.to(power.dtype))
    y = x + magic
    y = torch.sub(y, magic, out=into(y))
    if noise is not None:
        rest = torch.addcmul(x - y, noise, power, value=2.0**-mantissa)
        rest = torch.add(rest, magic, out=into(rest))
        rest = torch.sub(rest, magic, out=into(rest))
        y = torch.add(y, rest, out=into(y))
    return y.float()


# --- a random Hadamard rotation, which spreads what is large in a few places over all of them ------------------------


def rotate(x: Tensor, size: int, seed: int, inverse: bool = False) -> Tensor:
    """Rotate blocks of ``size`` along the last dimension by one orthonormal matrix, D H / sqrt(size).

    H is Walsh's matrix of -1 and 1, D has random signs on its diagonal. Both operands of a product that are rotated
    along its sum, with the same seed, have the same product.

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
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=x.device)
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < size:
        matrix = torch.kron(matrix, step)
    signs = hash_noise(torch.tensor(seed, device=x.device), size)
    matrix = torch.where(signs[:, None] < 0, -matrix, matrix) * size**-0.5
    blocks = x.unflatten(-1, (-1, size))
    return matmul(blocks, (matrix.t() if inverse else matrix).to(x.dtype)).flatten(-2)
