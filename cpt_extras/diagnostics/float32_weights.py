"""Weights of a converted model that stay in float32 although nobody asked for that: which, why, and a warning."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection

from torch import nn
from torch.nn.parameter import is_lazy

from cpt_core.quantization.convert import float32_reason, layer_parts, precision_of

MIN_NOTABLE_SHARE = 0.1  # of a model's weights: less stays in float32 without a warning


class QuantizationWarning(UserWarning):
    """Something runs in float32 that a user of ``quantize_`` may believe to be quantised."""


def float32_weights(
    model: nn.Module, excluded: Collection[str]
) -> tuple[float, Counter[str]]:
    """Return the share of the weights that stay in float32 unasked, and the modules that hold them, kind -> count.

    Weights are tensors of two or more dimensions that are no embedding, nor (1, T, C) as positions and tokens to add.
    """
    parts, modules = layer_parts(model), dict(model.named_modules())
    total = quantized = 0
    kinds: Counter[str] = Counter()
    for name, module in modules.items():
        layer = modules[parts.get(name, name)]
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            or parts.get(name, name) in excluded
        ):
            continue
        held = [
            p for p in module._parameters.values() if p is not None and not is_lazy(p)
        ]
        size = sum(p.numel() for p in held if p.dim() > 1 and len(p) > 1)
        total += size
        if precision_of(layer) is not None:
            quantized += size
        elif size:
            kinds[f"{type(module).__name__} ({float32_reason(layer)})"] += 1
    return (1 - quantized / total if total else 0.0), kinds


def warn_of_float32(model: nn.Module, excluded: Collection[str]) -> None:
    """Warn where more than a tenth of the weights stay in float32 unasked."""
    share, kinds = float32_weights(model, excluded)
    if share > MIN_NOTABLE_SHARE:
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        warnings.warn(
            f"{share:.0%} of the weights stay in float32: {listed}; summary(model) lists them, "
            "check(model, inputs) counts their operations",
            QuantizationWarning,
            stacklevel=4,
        )
