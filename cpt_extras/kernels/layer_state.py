"""Ranges and gradient rounding of a layer, as arguments of operators that round several tensors at once."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cpt_core.quantization.fake_quantize import advances_key_in_backward
from cpt_core.quantization.precision import LayerPrecision, is_recomputing
from cpt_core.quantization.rounding import RUNNING_DECAY, Range, clips


class StoredRange(NamedTuple):
    """A running range, used in evaluation; all fields are None if tensors are rounded on their own ranges.

    Attributes:
        low: minimum, 0-d.
        width: maximum - minimum, 0-d.
        weight: None if the range is always used; else it is used if this is above 0, and a tensor's own range if not.
    """

    low: Tensor | None = None
    width: Tensor | None = None
    weight: Tensor | None = None


class GradientRoundingArgs(NamedTuple):
    """Settings by which an operator rounds gradients in its backward pass.

    Attributes:
        steps: number of steps of the grid, 0-d; None if gradients are not rounded.
        grid: granularity or grid string.
        key: noise key; None rounds to nearest.
        advance: whether the backward pass must add 1 to the key for every gradient, as eager code does.
    """

    steps: Tensor | None
    grid: str
    key: Tensor | None
    advance: bool


def uses_stored_range(precision: LayerPrecision, role: str) -> bool:
    """Return whether operands of a role are rounded on their running range now."""
    return precision.quantizers[role].running and not precision.training


def is_calibrated(precision: LayerPrecision, role: str) -> bool:
    """Return whether operands of a role are rounded on a running range that is known to be filled."""
    return precision.has_filled_range(role) and uses_stored_range(precision, role)


def stored_range(precision: LayerPrecision, role: str) -> StoredRange:
    """Return the stored range on which operands of a role are rounded, as ``LayerPrecision`` decides."""
    if not uses_stored_range(precision, role):
        return StoredRange()
    low, width, weight = precision.stored_range(role)
    if precision.has_filled_range(role):
        return StoredRange(low, width)
    precision.warn_of_empty_range(role, weight)
    return StoredRange(low, width, weight)


def select_range(
    precision: LayerPrecision, role: str, low: Tensor, width: Tensor
) -> Range:
    """Return the stored range if it is used and filled, else the given ranges; selected on the device."""
    if not uses_stored_range(precision, role):
        return low, width
    stored_low, stored_width, weight = precision.stored_range(role)
    precision.warn_of_empty_range(role, weight)
    is_filled = weight > 0
    selected_low = torch.where(is_filled, stored_low, low)
    return selected_low, torch.where(is_filled, stored_width, width)


def clips_operand(precision: LayerPrecision, role: str) -> bool:
    """Return whether values can lie outside the range of their role."""
    quantizer = precision.quantizers[role]
    return clips(
        quantizer.grid, quantizer.rounding == "stochastic"
    ) or uses_stored_range(precision, role)


def track_steps(
    precision: LayerPrecision, role: str, low: Tensor, width: Tensor
) -> None:
    """Update a running range with the ranges of several time steps, (T,), as ``rounding.track`` does one by one."""
    if is_recomputing():
        return
    running = precision.range_tensor(role)
    ranges = torch.stack([low, width, torch.ones_like(width)])
    is_finite = ranges.isfinite().all(0)
    if _can_read_on_host(ranges) and bool(is_finite.all()):  # nearly always
        dtype = torch.get_default_dtype()
        decay, weights = _cached_ema_weights(len(is_finite), dtype)
    else:
        decay, weights = _ema_weights(is_finite)
        ranges = torch.where(is_finite, ranges, 0.0)
    running.mul_(decay).add_((ranges * weights).sum(1))


def _can_read_on_host(x: Tensor) -> bool:
    """Return whether Python may read a tensor: it is on the CPU, and neither compiled nor traced."""
    is_traced = torch.compiler.is_compiling()
    is_traced = is_traced or torch._C._len_torch_dispatch_stack() > 0
    return x.is_cpu and type(x) is Tensor and not is_traced


def _ema_weights(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the old range and of every time step, (T,), in an exponential moving average.

    ``counts`` tells which time steps count.
    """
    num_later = counts.flip(0).cumsum(0).flip(0) - counts.int()
    weights = (1 - RUNNING_DECAY) * RUNNING_DECAY**num_later
    return RUNNING_DECAY ** counts.sum(), torch.where(counts, weights, 0.0)


@lru_cache(maxsize=64)
def _cached_ema_weights(
    steps: int, default_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the weights if all time steps count, on a CPU; torch computes powers of integers in its default dtype."""
    return _ema_weights(torch.ones(steps, dtype=torch.bool, device="cpu"))


def grad_rounding_args(
    precision: LayerPrecision, role: str, count: int
) -> GradientRoundingArgs:
    """Return the settings of an operator that rounds ``count`` gradients of a role in its backward pass."""
    quantizer = precision.quantizers[role]
    if not precision.active_bits.gradient:
        return GradientRoundingArgs(None, quantizer.grid, None, advance=False)
    if quantizer.rounding != "stochastic":
        return GradientRoundingArgs(
            precision.grad_num_steps, quantizer.grid, None, advance=False
        )
    key = precision.next_noise_key(count)
    return GradientRoundingArgs(
        precision.grad_num_steps,
        quantizer.grid,
        key,
        advance=advances_key_in_backward(),
    )
