"""Warning about gradients that are smaller than the steps of a grid can be."""

from __future__ import annotations

import warnings

from torch import Tensor

from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.rounding import MIN_SCALE


def warn_of_small_gradient(precision: LayerPrecision, gradient: Tensor) -> None:
    """Warn where a layer's gradient is so small that it uses fewer steps than its bits allow."""
    if not isinstance(precision.active_bits.formats.error, int) or not gradient.numel():
        return
    width = gradient.max() - gradient.min()
    min_width = MIN_SCALE * precision.grad_num_steps.clamp(max=2**8 - 1)
    if bool((width > 0) & (width < min_width)):
        warnings.warn(  # one text for all layers: it is shown once
            "gradients are so small that they keep fewer bits than asked for, as no grid has a step below "
            f"{MIN_SCALE:g}. Multiply the loss, and divide the gradients before optimizer.step(), as "
            "torch.amp.GradScaler does",
            stacklevel=3,
        )
