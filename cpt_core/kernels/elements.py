"""Rounding to the values of an element: minifloats, powers of two and whole numbers, exactly.  Beyond the paper.

A float32 x between 2**e and 2**(e + 1) has neighbours at multiples of 2**(e - m) in a format with m bits of mantissa;
below its smallest normal number at those of that one. Adding 1.5 * 2**23 times this step, and taking it away again,
leaves x rounded to such a multiple, half to even: that is all that float32's own addition has bits for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cpt_core.formats.format import Format
from cpt_core.kernels import reference
from cpt_core.kernels.reference import into

EXPONENT = 0x7F800000  # the bits of a float32's exponent
# torch rounds to these itself, half to even; both have infinities
NATIVE = {(8, 7, "infinity"): torch.bfloat16, (5, 10, "infinity"): torch.float16}


def round_elements(x: Tensor, scale: Tensor | None, format: Format, key: Tensor | None = None) -> Tensor:
    """Round x / scale to the values of an element, and multiply by the scale again.

    Args:
        x: float32.
        scale: float32, broadcastable to ``x``; where it is 0, so is the result; None for none.
        format: not affine.
        key: of the noise of stochastic rounding, 0-d int64; None for rounding half to even.
    """
    by_row = scale is not None and scale.dim() == x.dim() > 0 and len(scale) == len(x)
    if not reference.in_parts(x) or not (by_row or scale is None or scale.numel() == 1):
        return _rounded(x, scale, format, None if key is None else reference.noise_of(key, x))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, row = reference.rows_of_part(x), x.numel() // len(x)
    for start in range(0, len(x), rows):  # each part stays in the processor's cache
        part, end = x[start : start + rows], start + rows
        noise = None if key is None else reference.hash_noise(key, start * row, part.numel()).view(part.shape)
        out[start:end] = _rounded(part, scale[start:end] if by_row and scale is not None else scale, format, noise)
    return out


def _rounded(x: Tensor, scale: Tensor | None, format: Format, noise: Tensor | None) -> Tensor:
    if scale is None:
        return _bounded(x, format, noise)
    y = _bounded(x / torch.where(scale == 0, 1.0, scale), format, noise)
    return torch.mul(y, scale, out=into(y))


def _bounded(x: Tensor, format: Format, noise: Tensor | None) -> Tensor:
    """Round, then saturate or overflow; into memory of its own."""
    largest = format.largest
    if format.kind == "symmetric":
        y = _whole(x, noise)
    elif noise is None and (native := NATIVE.get((format.exponent, format.mantissa, format.specials))):
        y = x.to(native).float()
    else:
        y = _floating(x, format, noise)
    if format.saturate:
        y = torch.clamp(y, -largest, largest, out=into(y))
        if format.specials == "infinity":
            return torch.where(x.isinf(), x, y)
        return torch.add(y, x * 0, out=into(y))  # NaN of infinity
    beyond = x.isinf() | (y.abs() > largest)
    return torch.where(beyond, x * math.inf if format.specials == "infinity" else math.nan, y)


def _whole(x: Tensor, noise: Tensor | None) -> Tensor:
    y = x.round()
    return y if noise is None else y + (x - y + noise).round()


def _floating(x: Tensor, format: Format, noise: Tensor | None) -> Tensor:
    mantissa = format.mantissa
    power = (x.view(torch.int32) & EXPONENT).view(torch.float32)  # 2**e
    power = torch.clamp(power, 2.0**format.least_exponent, 2.0**format.greatest_exponent, out=into(power))
    if wide := mantissa > 20 or format.greatest_exponent + 24 - mantissa > 127:  # beyond what float32 holds
        x, power = x.double(), power.double()
    shift = 1.5 * 2.0 ** ((52 if wide else 23) - mantissa)
    if mantissa or noise is not None:
        magic = power * shift if noise is not None else torch.mul(power, shift, out=into(power))
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
