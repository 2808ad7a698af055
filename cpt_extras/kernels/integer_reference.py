"""8-bit integers of quantised tensors, in plain torch: what C++ and Triton are held to, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from cpt_core.quantization.rounding import MIN_SCALE, noise


@torch.no_grad()
def encode(
    x: Tensor,
    low: Tensor,
    width: Tensor,
    levels: Tensor,
    key: Tensor | None,
    clip: bool,
    channels_last: bool = False,
) -> Tensor:
    """Return k - 2**(q - 1), int8, of the grid points that ``rounding.round_to_grid`` returns; q at most 8.

    NaN has code 0: it is in the range. In memory codes lie as ``x`` does; with ``channels_last`` those of (N, C, H, W)
    have the channels of a pixel beside each other.
    """
    scale = (width / levels).clamp_min(MIN_SCALE)
    k = (x.float() - low) / scale
    if key is not None:
        k = k + noise(key, k)
    if clip:
        k = torch.clamp(k, torch.zeros_like(levels), levels)
    codes = k.round().clamp_min_(0).nan_to_num_(0).sub_((levels + 1) / 2)
    return empty_codes(x, channels_last).copy_(codes)


def empty_codes(x: Tensor, channels_last: bool) -> Tensor:
    """Return memory for the codes of a tensor."""
    if not channels_last:
        return torch.empty_like(x, dtype=torch.int8)
    return x.new_empty([x.shape[d] for d in (0, 2, 3, 1)], dtype=torch.int8).permute(
        0, 3, 1, 2
    )


def affine(
    product: Tensor,
    row_codes: Tensor,
    row_values: Tensor,
    column_codes: Tensor,
    column_values: Tensor,
) -> None:
    """Turn sums of products of codes into those of values, in place: the storage holds float32 afterwards.

    No size is 0.

    Args:
        product: sums k_a k_b, int32 (M, N), of G products below each other; the names are those of ``int8.matmul``.
        row_codes: of a: sum k and z, int32 (2, M).
        row_values: of a: s, s sum (k - z) and r, float32 (3, M).
        column_codes: of b: z and sum (k - z), int32 (2, G N).
        column_values: of b: s, r and s sum (k - z) + K r, and the bias, float32 (4, G N).
    """
    rows, columns = product.shape
    groups = column_codes.shape[1] // columns
    (sums, zero_a), (scale_a, scaled, rest_a) = (
        v.view(len(v), groups, -1, 1) for v in (row_codes, row_values)
    )
    (zero_b, sums_b), (scale_b, rest_b, total_b, bias) = (
        v.view(len(v), groups, 1, columns) for v in (column_codes, column_values)
    )
    t = (product.view(groups, -1, columns) - zero_b * sums - zero_a * sums_b).float()
    y = (scale_a * scale_b) * t + scaled * rest_b + rest_a * total_b + bias
    product.copy_(y.view(rows, columns).view(torch.int32))
