"""Where the range of a format ends: at its extremes, at a percentile, or where the error is least.  Beyond the paper.

The least squared error is searched among ends that are moved in by multiples of 1/32 (power-of-two scales: to the
powers beside), for every range or block by itself, in rounding half to even.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cpt_core.formats.format import Format
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels import reference
from cpt_core.kernels.elements import round_elements
from cpt_core.kernels.reference import into

FACTORS = tuple(k / 32 for k in range(32, 7, -1))
MOVES = tuple(k / 32 for k in range(1, 17))  # of one end of an affine range, in widths
POWERS = (1.0, 2.0, 0.5)


def chosen(x: Tensor, largest: Tensor, scale_of: Callable[[Tensor], Tensor], to: Quantizer, format: Format) -> Tensor:
    """Return the scales of ranges with these largest magnitudes, float32, after clipping."""
    if to.clipping == "percentile":
        return scale_of(torch.minimum(at_percentile(x.abs(), largest, to.percentile), largest))
    scale = scale_of(largest)
    if to.clipping == "none":
        return scale
    factors = POWERS if format.scale == "e8m0" else FACTORS
    least = _error(round_elements(x, scale, format), x, largest)
    for factor in factors[1:]:
        other = scale_of(largest * factor)
        error = _error(round_elements(x, other, format), x, largest)
        better = error < least
        scale, least = torch.where(better, other, scale), torch.where(better, error, least)
    return scale


def ends(x: Tensor, low: Tensor, width: Tensor, to: Quantizer, format: Format) -> tuple[Tensor, Tensor]:
    """Return minimum and width of the ranges of an affine format after clipping."""
    if to.clipping == "none":
        return low, width
    high = low + width
    if to.clipping == "percentile":
        least = torch.maximum(at_percentile(x, low, 100 - to.percentile), low)
        return least, torch.minimum(at_percentile(x, low, to.percentile), high) - least
    a, b = torch.zeros_like(low), torch.zeros_like(low)  # what the two ends are moved in by
    error = _error(affine(x, low, width, format), x, low)
    for upper in (True, False, True):
        for move in MOVES:
            c, d = (a, torch.full_like(b, move)) if upper else (torch.full_like(a, move), b)
            now = _error(affine(x, low + c * width, width * (1 - c - d), format), x, low)
            better = now < error
            a, b, error = (torch.where(better, new, old) for new, old in ((c, a), (d, b), (now, error)))
    return low + a * width, width * (1 - a - b)


def affine(x: Tensor, low: Tensor, width: Tensor, format: Format, key: Tensor | None = None) -> Tensor:
    """Round to the affine grid of a range, as ``reference.round_to_grid``; infinity is NaN."""
    n = 2.0**format.bits - 1
    scale = (width / n).clamp_min(reference.MIN_SCALE)
    k = x - low
    k = torch.div(k, scale, out=into(k))
    if key is not None:
        k = torch.add(k, reference.noise_of(key, x), out=into(k))
    k = torch.round(k, out=into(k))
    if not format.saturate:
        k = torch.where((k < 0) | (k > n), math.nan, k)
    k = torch.clamp(k, 0, n, out=into(k))
    y = torch.mul(k, scale, out=into(k))
    y = torch.add(y, low, out=into(y))
    return torch.add(y, x * 0, out=into(y))


def at_percentile(x: Tensor, like: Tensor, percentile: float) -> Tensor:
    """Return a percentile of the elements of every range, between two of them on a straight line.

    Sorted, because ``torch.quantile`` takes 2**24 elements at most. NaN counts as the largest.
    """
    shape = [1] * (x.dim() - like.dim()) + list(like.shape)
    kept = [d for d, size in enumerate(shape) if size != 1]
    others = [d for d in range(x.dim()) if d not in kept]
    count = math.prod(x.shape[d] for d in others)
    sorted_ = x.permute(kept + others).reshape(-1, count).sort(-1).values
    place = percentile / 100 * (count - 1)
    below = math.floor(place)
    above = min(below + 1, count - 1)
    return torch.lerp(sorted_[:, below], sorted_[:, above], place - below).reshape(like.shape)


def _error(y: Tensor, x: Tensor, like: Tensor) -> Tensor:
    return (y - x).square().sum_to_size(like.shape)
