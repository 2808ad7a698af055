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
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from cpt_core.formats.format import FORMATS, Format
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels import clipping
from cpt_core.kernels.elements import round_elements
from cpt_core.kernels.grids import UNSCALED, check_blocks

LEAST_SCALE = 2.0**-126  # the smallest normal float32: of a range of zeros too
WIDE = 16  # bits of a minifloat from which on it is not scaled
SCALE = FORMATS["e4m3"]  # of a block of nvfp4


def round_to_format(
    x: Tensor, low: Tensor, width: Tensor, granularity: str, to: Quantizer, key: Tensor | None
) -> Tensor:
    """Round to a format on a given range; as ``grids.round_in_range``."""
    format = to.format
    assert format is not None
    if format.is_identity:
        return x.clone()
    y = x.float()
    if format.block:
        rounded = _in_blocks(y, low, width, to, format, key)
    elif format.kind == "affine":
        low, width = clipping.ends(y, low, width, to, format)
        rounded = clipping.affine(y, low, width, format, key)
    elif granularity == UNSCALED or (format.kind == "minifloat" and format.bits >= WIDE):
        if to.clipping != "none":
            raise ValueError(f"{to} has no scale here, so there is no range to clip: give it a granularity")
        rounded = round_elements(y, None, format, key)
    else:
        scaled = partial(_scale, format=format)
        rounded = round_elements(y, clipping.chosen(y, _largest(low, width), scaled, to, format), format, key)
    return rounded.to(x.dtype)


def _largest(low: Tensor, width: Tensor) -> Tensor:
    """Return the largest magnitude of a range."""
    return torch.maximum(-low, low + width)


def _scale(largest: Tensor, format: Format) -> Tensor:
    """Return s of ranges with these largest magnitudes."""
    return (largest / format.largest).clamp_min(LEAST_SCALE)


def _in_blocks(x: Tensor, low: Tensor, width: Tensor, to: Quantizer, format: Format, key: Tensor | None) -> Tensor:
    check_blocks(x.shape, format)
    size = x.shape[-1]
    rows = functional.pad(x, (0, -size % format.block)) if format.partial else x
    shape = rows.shape
    rows = rows.reshape(-1, format.block)
    largest = torch.maximum(-rows.amin(-1, True), rows.amax(-1, True))
    if format.scale == "e8m0":
        scaled = partial(_power_of_two, format=format)
    else:
        whole = (_largest(low, width) / (format.largest * SCALE.largest)).clamp_min(LEAST_SCALE)
        if whole.dim():
            whole = whole.expand((*x.shape[:-1], 1)).expand(*x.shape[:-1], shape[-1] // format.block).reshape(-1, 1)
        scaled = partial(_two_scales, whole=whole, format=format)
    y = round_elements(rows, clipping.chosen(rows, largest, scaled, to, format), format, key)
    return y.reshape(shape)[..., :size]


def _power_of_two(largest: Tensor, format: Format) -> Tensor:
    """Return the e8m0 scales of blocks; OCP's NaN where a number is not finite."""
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2**floor(log2), and 0 of subnormal numbers
    shift = 2.0**-format.greatest_exponent
    if format.kind == "symmetric":  # OCP's integers are fractions of 1, and the limits are those of their scale
        scale = power.clamp(2.0**-127, 2.0**127) * shift
    else:
        scale = (power * shift).clamp(2.0**-127, 2.0**127)
    return torch.where(largest.isfinite(), scale, math.nan)


def _two_scales(largest: Tensor, whole: Tensor, format: Format) -> Tensor:
    """Return the product of the e4m3 scales of blocks and the float32 scale; 0 where the first comes out as 0."""
    return round_elements(largest / format.largest / whole, None, SCALE, None) * whole
