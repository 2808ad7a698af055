"""Warning about converted layers that hold weights and run operations that are not intercepted."""

from __future__ import annotations

import warnings

from torch import nn

from cpt_core.quantization.convert import layer_weights, precision_of
from cpt_extras.diagnostics.float32_weights import (
    MIN_NOTABLE_SHARE,
    QuantizationWarning,
)

SILENT_LAYERS = "silent layers"  # the name of the warning


def warn_of_silent_layers(model: nn.Module) -> None:
    """Warn once if layers with more than a tenth of the weights have run without an intercepted operation."""
    modules = dict(model.named_modules())
    total = silent = 0
    names = []
    issued_warnings = None
    for layer, weights in layer_weights(model).items():
        precision = precision_of(modules[layer])
        assert precision is not None
        issued_warnings = precision.issued_warnings
        if issued_warnings is None or SILENT_LAYERS in issued_warnings:
            return
        size = sum(weight.numel() for weight in weights)
        total += size
        if precision.is_silent and not precision.has_run:
            silent += size
            names.append(layer or "(model)")
    if issued_warnings is None or silent <= MIN_NOTABLE_SHARE * total:
        return

    issued_warnings.add(SILENT_LAYERS)
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    warnings.warn(
        f"{silent / total:.0%} of the weights were not quantised in a forward pass: no matmul or convolution was "
        f"intercepted in {shown}. What they multiply runs in float32 and has no price; check(model, inputs) lists it",
        QuantizationWarning,
        stacklevel=4,
    )
