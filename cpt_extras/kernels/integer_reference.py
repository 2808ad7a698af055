"""Plain torch implementations of the int8 operators, which C++ and Triton must match bit for bit."""

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
    """Return the codes k - 2**(q - 1) of the grid points of ``rounding.round_to_grid``, int8, for q of at most 8 bits.

    NaN gets the code of k = 0; the range is NaN, too. Codes have the memory layout of ``x``, or, with
    ``channels_last``, the channels of a pixel of (N, C, H, W) side by side.
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
    """Return uninitialised memory for the codes of a tensor."""
    if not channels_last:
        return torch.empty_like(x, dtype=torch.int8)
    return x.new_empty([x.shape[d] for d in (0, 2, 3, 1)], dtype=torch.int8).permute(
        0, 3, 1, 2
    )


def dequantize_matmul_(
    product: Tensor,
    row_codes: Tensor,
    row_values: Tensor,
    column_codes: Tensor,
    column_values: Tensor,
) -> None:
    """Convert int32 matmul sums to float32 values, in place.

    The memory holds float32 afterwards. No size may be 0; the names are those of ``int8.matmul``.

    Args:
        product: sums of k_a k_b, int32 (M, N); the rows of G matmuls below each other.
        row_codes: sums and zero points of the rows of a: sum k and z, int32 (2, M).
        row_values: of the rows of a: s, s sum (k - z) and r, float32 (3, M).
        column_codes: zero points and sums of the columns of b: z and sum (k - z), int32 (2, G N).
        column_values: of the columns of b: s, r and s sum (k - z) + K r, and the bias, float32 (4, G N).
    """
    rows, columns = product.shape
    groups = column_codes.shape[1] // columns
    sums_a, zero_a = row_codes.view(2, groups, -1, 1)
    scale_a, scaled_sums_a, rest_a = row_values.view(3, groups, -1, 1)
    zero_b, sums_b = column_codes.view(2, groups, 1, columns)
    scale_b, rest_b, value_sums_b, bias = column_values.view(4, groups, 1, columns)

    products = product.view(groups, -1, columns)
    centred = (products - zero_b * sums_a - zero_a * sums_b).float()
    y = (scale_a * scale_b) * centred
    y = y + scaled_sums_a * rest_b + rest_a * value_sums_b + bias
    product.copy_(y.view(rows, columns).view(torch.int32))
