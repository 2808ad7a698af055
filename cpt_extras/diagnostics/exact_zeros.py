"""Warning about weights with exact zeros, as pruning makes them, which are no values of the paper's grid."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from cpt_core.quantization.rounding import MIN_SCALE, num_steps

MIN_ZERO_SHARE = 0.05  # of the elements of a weight: fewer zeros are chance, or were initialised and never trained


def warn_of_exact_zeros(precision: Any, weight: Tensor) -> None:
    """Warn where more than ``MIN_ZERO_SHARE`` of a weight is 0 and its grid moves these zeros."""
    bits = precision.active_bits.formats.weight
    if not isinstance(bits, int) or not _can_read(weight):
        return
    share, max_move = _moved_zeros(weight.detach(), num_steps(bits))
    if share > MIN_ZERO_SHARE:
        name = precision.name or "a quantised layer"
        warnings.warn(
            f"{share:.0%} of the weights of layer {name!r} are exactly 0 and become up to {max_move:.2g}. The paper's "
            "grid between minimum and maximum has no 0: pruned or masked weights do not stay masked. Put 0 on all "
            "grids by quantize_(model, QuantConfig().with_zero_points()), or take a symmetric number format",
            stacklevel=5,
        )


def _can_read(weight: Tensor) -> bool:
    """Return whether the elements of a weight can be read: there are any, and no tracing or capture."""
    is_plain = (
        type(weight) in (Tensor, nn.Parameter)
        and not weight.is_meta
        and weight.dim() > 1
        and weight.numel() > 0
    )
    is_captured = (
        weight.is_cuda
        and torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
    )
    return is_plain and not is_captured and torch._C._len_torch_dispatch_stack() == 0


def _moved_zeros(weight: Tensor, steps: float) -> tuple[float, float]:
    """Return the share of elements that are 0 and not 0 after rounding by rows, and the largest of these moves."""
    rows = weight.flatten(1)
    low, high = rows.amin(1), rows.amax(1)
    scale = ((high - low) / steps).clamp_min(MIN_SCALE)
    nearest_to_zero = (-low / scale).round() * scale + low
    has_zero_inside = (low < 0) & (high > 0)
    moves_zeros = has_zero_inside & (nearest_to_zero.abs() > MIN_SCALE)
    is_moved = (rows == 0) & moves_zeros[:, None]
    if not bool(is_moved.any()):
        return 0.0, 0.0

    max_move = nearest_to_zero[is_moved.any(1)].abs().max()
    return float(is_moved.float().mean()), float(max_move)
