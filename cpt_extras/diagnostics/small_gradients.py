"""Warning about gradients that are so small that no grid of their bits has so small a step."""

from __future__ import annotations

import warnings

from torch import Tensor

from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.rounding import MIN_SCALE


def warn_of_small_gradient(precision: LayerPrecision, gradient: Tensor) -> None:
    """Warn where a layer's gradient is so small that its grid has fewer steps than its bits."""
    if not isinstance(precision.active_bits.formats.error, int) or not gradient.numel():
        return
    width, fewest = (
        gradient.max() - gradient.min(),
        MIN_SCALE * precision.grad_num_steps.clamp(max=2**8 - 1),
    )
    if bool((width > 0) & (width < fewest)):
        warnings.warn(  # one text for all layers: it is shown once
            "gradients are so small that they keep fewer bits than asked for, as no grid has a step below "
            f"{MIN_SCALE:g}. Multiply the loss, and divide the gradients before optimizer.step(), as "
            "torch.amp.GradScaler does",
            stacklevel=3,
        )
