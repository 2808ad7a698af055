"""What an operator that rounds several tensors by itself has to know of a layer: ranges, and the noise of gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cpt_core.quantization.fake_quantize import advances_key_in_backward
from cpt_core.quantization.precision import LayerPrecision, is_recomputing
from cpt_core.quantization.rounding import RUNNING_DECAY, Range, clips


class StoredRange(NamedTuple):
    """A running range that evaluation uses; all None: every tensor has a range of its own.

    Attributes:
        low: minimum, 0-d.
        width: maximum - minimum, 0-d.
        weight: None where the range counts; else it counts where this is above 0, and the tensor's own elsewhere.
    """

    low: Tensor | None = None
    width: Tensor | None = None
    weight: Tensor | None = None


class GradientRoundingArgs(NamedTuple):
    """What an operator that quantises gradients in its backward pass has to know.

    Attributes:
        steps: of the grid, None where gradients are left alone.
        grid: the granularity.
        key: of the noise, None for none.
        advance: whether the backward pass is to add 1 to the key for each gradient, as eager code does.
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
    return precision.calibrated and uses_stored_range(precision, role)


def stored_range(precision: LayerPrecision, role: str) -> StoredRange:
    """Return the range on which operands of a role are rounded, as ``LayerPrecision.evaluated`` decides."""
    if not uses_stored_range(precision, role):
        return StoredRange()
    low, width, weight = precision.stored_range(role)
    if precision.calibrated:
        return StoredRange(low, width)
    precision.warn_of_empty_range(role, weight)
    return StoredRange(low, width, weight)


def select_range(
    precision: LayerPrecision, role: str, low: Tensor, width: Tensor
) -> Range:
    """Return the ranges at hand, or the stored one where it is used and filled; decided on the device."""
    if not uses_stored_range(precision, role):
        return low, width
    stored_low, stored_width, weight = precision.stored_range(role)
    precision.warn_of_empty_range(role, weight)
    return torch.where(weight > 0, stored_low, low), torch.where(
        weight > 0, stored_width, width
    )


def clips_operand(precision: LayerPrecision, role: str) -> bool:
    """Return whether values can lie outside the range of their role."""
    quantizer = precision.quantizers[role]
    return clips(
        quantizer.grid, quantizer.rounding == "stochastic"
    ) or uses_stored_range(precision, role)


def track_steps(
    precision: LayerPrecision, role: str, low: Tensor, width: Tensor
) -> None:
    """Let a running range follow the ranges of several calls one after the other, (T,), as ``rounding.track`` would."""
    if is_recomputing():
        return
    running = precision.range_tensor(role)
    current = torch.stack([low, width, torch.ones_like(width)])
    counts = current.isfinite().all(0)
    if _can_read_on_host(current) and bool(counts.all()):
        decay, shares = _cached_ema_weights(
            len(counts), torch.get_default_dtype()
        )  # as nearly always
        running.mul_(decay).add_((current * shares).sum(1))
        return
    decay, shares = _ema_weights(counts)
    running.mul_(decay).add_((torch.where(counts, current, 0.0) * shares).sum(1))


def _can_read_on_host(x: Tensor) -> bool:
    """Return whether reading a number makes nothing wait, and nobody follows what is computed, as a capture does."""
    is_followed = (
        torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    )
    return x.is_cpu and type(x) is Tensor and not is_followed


def _ema_weights(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of the old range and of every call, (T,); ``counts``: whether a call counts."""
    later = (
        counts.flip(0).cumsum(0).flip(0) - counts.int()
    )  # calls that count and come after this one
    return RUNNING_DECAY ** counts.sum(), torch.where(
        counts, (1 - RUNNING_DECAY) * RUNNING_DECAY**later, 0.0
    )


@lru_cache(maxsize=64)
def _cached_ema_weights(
    steps: int, default_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the weights of calls that all count, on a CPU; torch takes powers of integers in its default dtype."""
    return _ema_weights(torch.ones(steps, dtype=torch.bool, device="cpu"))


def grad_rounding_args(
    precision: LayerPrecision, role: str, count: int
) -> GradientRoundingArgs:
    """Return what an operator that quantises ``count`` gradients in its backward pass has to know."""
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
