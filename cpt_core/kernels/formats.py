"""Rounding to number formats, plain, in every execution.  Beyond the paper.

What kernels call granularity is a *grid* where a format is in force: the granularity alone for the paper's affine grid,
else granularity, "|" and the format's name.

>>> grid_of("per_row", Format.of("e2m1"))
'per_row|e2m1'
>>> x = torch.tensor([[0.1, 0.5, -6.0], [1.0, 2.0, 12.0]])
>>> fake_quantize(x, torch.tensor(15.0), "per_row|e2m1", None)[0].tolist()
[[0.0, 0.5, -6.0], [1.0, 2.0, 12.0]]

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
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from cpt_core.formats.format import FORMATS, Format
from cpt_core.kernels import clipping, reference
from cpt_core.kernels.elements import round_elements

UNSCALED = "unscaled"  # instead of a granularity: an element's values as they are
LEAST_SCALE = 2.0**-126  # the smallest normal float32: of a range of zeros too
WIDE = 16  # bits of a minifloat from which on it is not scaled
SCALE = FORMATS["e4m3"]  # of a block of nvfp4


def grid_of(granularity: str, format: Format) -> str:
    """Return the grid of a role's granularity and a format; a granularity of the format's own counts."""
    return granularity if format.plain_affine else f"{format.granularity or granularity}|{format}"


def grid_of_steps(format: Format) -> str:
    """Return the grid of a format on which every index of the first dimension has a range of its own."""
    return grid_of("per_channel", replace(format, granularity="per_channel") if format.granularity else format)


def parts_of(grid: str) -> tuple[str, Format | None]:
    """Return the granularity of a grid, and its format; None for the affine grid that ``levels`` tell of."""
    if grid not in _parts:  # a dict: compilers do not follow a cached function
        granularity, _, name = grid.partition("|")
        _parts[grid] = granularity, Format.of(name) if name else None
    return _parts[grid]


_parts: dict[str, tuple[str, Format | None]] = {}


def fake_quantize(x: Tensor, levels: Tensor, grid: str, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Round a tensor that is not empty on its own range, whatever the grid; as ``reference.fake_quantize``."""
    if parts_of(grid)[1] is None:
        return reference.fake_quantize(x, levels, grid, key)
    return quantize_to(x, grid, levels, key)


def quantize_to(x: Tensor, grid: str, levels: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Round to a grid on the tensor's own range; return it with the range, which is the same for every format."""
    low, width = reference.range_of(x, grid)
    return round_in_range(x, low, width, levels, grid, key, reference.clips(grid, key is not None)), low, width


def round_in_range(
    x: Tensor, low: Tensor, width: Tensor, levels: Tensor, grid: str, key: Tensor | None, clip: bool
) -> Tensor:
    """Round to a grid of a given range, such as a stored one.

    Args:
        x: any shape and floating dtype.
        low: minimum of the range, float32, broadcastable to x.
        width: maximum - minimum, likewise; neither plays a part for mx and for what is not scaled.
        levels: n = 2**q - 1 of a grid without a format, 0-d float32; a format has its own.
        grid: see ``grid_of``.
        key: of the noise of stochastic rounding, 0-d int64; None for rounding half to even. A format's own rounding
            counts.
        clip: of a grid without a format, see ``reference.round_to_grid``; formats always do.

    Raises:
        ValueError: for a row that blocks do not divide, a format that rounds stochastically but has no key, and one
            that clips but has no scale.
    """
    granularity, format = parts_of(grid)
    if format is None:
        return reference.round_to_grid(x, low, width, levels, key, clip)
    if format.rounding == "stochastic" and key is None:
        raise ValueError(f"format {format} rounds stochastically and needs a key of the noise")
    key = None if format.rounding == "nearest" else key
    if format.is_identity:
        return x.clone()
    y = x.float()
    if format.block:
        rounded = _in_blocks(y, low, width, granularity, format, key)
    elif format.kind == "affine":
        low, width = clipping.ends(y, low, width, format)
        rounded = clipping.affine(y, low, width, format, key)
    elif granularity == UNSCALED or (format.kind == "minifloat" and format.bits >= WIDE):
        if format.clipping != "none":
            raise ValueError(f"{format} has no scale here, so there is no range to clip: give it a granularity")
        rounded = round_elements(y, None, format, key)
    else:
        scaled = partial(_scale, format=format)
        rounded = round_elements(y, clipping.chosen(y, _largest(low, width), scaled, format), format, key)
    return rounded.to(x.dtype)


def _largest(low: Tensor, width: Tensor) -> Tensor:
    """Return the largest magnitude of a range."""
    return torch.maximum(-low, low + width)


def _scale(largest: Tensor, format: Format) -> Tensor:
    """Return s of ranges with these largest magnitudes."""
    return (largest / format.largest).clamp_min(LEAST_SCALE)


def _in_blocks(x: Tensor, low: Tensor, width: Tensor, granularity: str, format: Format, key: Tensor | None) -> Tensor:
    check_blocks(x.shape, format)
    size = x.shape[-1]
    rows = functional.pad(x, (0, -size % format.block)) if format.partial else x
    shape = rows.shape
    rows = rows.reshape(-1, format.block)
    largest = torch.maximum(-rows.amin(-1, True), rows.amax(-1, True))
    if format.scale == "e8m0":
        scaled = partial(_power_of_two, format=format)
    else:
        whole = _largest(low, width)
        if format.granularity is None:  # one scale for the tensor, whatever the ranges of its role
            whole = whole.amax()
        whole = (whole / (format.largest * SCALE.largest)).clamp_min(LEAST_SCALE)
        if whole.dim():
            whole = whole.expand((*x.shape[:-1], 1)).expand(*x.shape[:-1], shape[-1] // format.block).reshape(-1, 1)
        scaled = partial(_two_scales, whole=whole, format=format)
    y = round_elements(rows, clipping.chosen(rows, largest, scaled, format), format, key)
    return y.reshape(shape)[..., :size]


def check_blocks(shape: torch.Size, format: Format) -> None:
    """Raise ValueError unless the blocks of a format divide the last dimension, or the last block may be shorter."""
    if format.block and (not shape or (shape[-1] % format.block and not format.partial)):
        raise ValueError(
            f"blocks of {format.block} do not divide the last dimension of a tensor of shape {tuple(shape)}; "
            f"with partial=True the last block of a row of {format} may be shorter"
        )


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
