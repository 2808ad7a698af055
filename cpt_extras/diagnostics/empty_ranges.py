"""Warning about evaluation on empty running ranges, as after loading ``model.state_dict()`` alone."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from cpt_core.quantization.precision import LayerPrecision
from cpt_extras.diagnostics.float32_weights import QuantizationWarning

EMPTY_RANGES = "empty ranges"  # the name of the warning


def warn_of_empty_range(precision: LayerPrecision, role: str, weight: Tensor) -> None:
    """Warn once per model where a layer evaluates with an empty running range.

    A model that a scheduler drives from its own first step on may be evaluated before it is trained: then there is no
    warning. Copies of it are trained by no scheduler, and parts that stay in evaluation mode fill no range.

    Args:
        precision: of the layer.
        role: of the tensor with the range.
        weight: of the running range; 0 when nothing has filled it.
    """
    issued_warnings = precision.issued_warnings
    if issued_warnings is None or EMPTY_RANGES in issued_warnings:
        return
    if not _can_read(weight) or float(weight) > 0:
        return
    if precision.is_untrained and not precision.has_loaded:
        return
    issued_warnings.add(EMPTY_RANGES)
    warnings.warn(
        f"layer {precision.name!r} has no running range of its {role} yet: evaluation rounds every batch on a range of "
        "its own, so that the result for one sample depends on the others. Of a model that was trained quantised load "
        "the scheduler's state, too: PrecisionScheduler(model, schedule).load_state_dict(saved); into a copy or an "
        "average of a model copy them by cpt.quantization.copy_ranges(model, copy); else run some batches in training "
        "mode first, under torch.no_grad(), also of a frozen part that stays in eval() while the rest is trained",
        QuantizationWarning,
        stacklevel=2,
    )


def _can_read(weight: Tensor) -> bool:
    """Return whether a number may be read from the device now."""
    is_captured = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    is_plain = (
        type(weight) is Tensor
        and not weight.is_meta
        and torch._C._len_torch_dispatch_stack() == 0
    )
    return is_plain and not is_captured
