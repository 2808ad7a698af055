"""Weights of a converted model that stay in float32 although the user did not exclude them, and the warning."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection

from torch import nn

from cpt_core.quantization.convert import (
    float32_reason,
    layer_parts,
    precision_of,
    weights_of,
)

MIN_NOTABLE_SHARE = 0.1  # of a model's weights; a smaller share gives no warning


class QuantizationWarning(UserWarning):
    """Warning that operations run in float32 which a user of ``quantize_`` may believe to be quantised."""


def float32_weights(
    model: nn.Module, excluded: Collection[str]
) -> tuple[float, Counter[str]]:
    """Return the share of the weights in float32 that were not ``excluded``, and the number of modules by kind."""
    parts, modules = layer_parts(model), dict(model.named_modules())
    total = quantized = 0
    kinds: Counter[str] = Counter()
    for name, module in modules.items():
        layer_name = parts.get(name, name)
        layer = modules[layer_name]
        if layer_name in excluded:
            continue
        size = sum(weight.numel() for weight in weights_of(module))
        total += size
        if precision_of(layer) is not None:
            quantized += size
        elif size:
            kinds[f"{type(module).__name__} ({float32_reason(layer)})"] += 1
    return (1 - quantized / total if total else 0.0), kinds


def warn_of_float32(model: nn.Module, excluded: Collection[str]) -> None:
    """Warn where more than a tenth of the weights stay in float32 and were not ``excluded``."""
    share, kinds = float32_weights(model, excluded)
    if share > MIN_NOTABLE_SHARE:
        modules = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        warnings.warn(
            f"{share:.0%} of the weights stay in float32: {modules}; summary(model) lists them, "
            "check(model, inputs) counts their operations",
            QuantizationWarning,
            stacklevel=4,
        )
