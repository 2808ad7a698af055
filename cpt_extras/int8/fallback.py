"""Matmuls of a layer that run in float32 although it is asked for 8-bit integers, and why; ``summary`` shows them.

A table per kind of layer: which role with several ranges leaves which matmul without an integer form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from cpt_core.quantization.convert import precision_of
from cpt_core.quantization.op_interception import HOOK
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import ZERO_POINT, Quantizer
from cpt_extras.cpu_info import has_fast_int8
from cpt_extras.formats.ladder_rounding import ladders_of_layer
from cpt_extras.int8.lstm import int8_reason

PASSES = ("forward", "error", "weight")  # y = x w;  dx = dy w;  dw = x dy
ONE_RANGE = ("per_tensor", "per_sample_mean")  # grids with one range for a whole tensor
ONE_RANGE_OF_MATRIX = (*ONE_RANGE, "per_position")  # for a matrix (N, F)
SUMS = ("aggregation", "aggregation error")  # over neighbours, and back
# kind or class of a layer -> role with several ranges -> matmuls that are simulated then
SEVERAL_RANGES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "conv": {
        "grad": dict.fromkeys(PASSES[1:], "gradients have several ranges"),
        "weight": {"error": "weights have a range per channel"},
    },
    "linear": {
        "weight": {"error": "weights have a range per row"},
        "grad": {"weight": "gradients of sequences have a range per position"},
        "input": {"weight": "inputs have several ranges"},
    },
    "lstm": {"weight": {"error": "weights have a range per row"}},
    "graph": {
        "input": {"weight": "inputs have a range per node"},
        "aggregation": {SUMS[0]: "features have a range per node"},
        "grad": dict.fromkeys(("weight", SUMS[1]), "gradients have a range per node"),
    },
    "GraphConv": {"weight": {"forward": "weights have a range per row"}},
    "SAGEConv": {"weight": {"error": "weights have a range per row"}},
}
# kind or class of a layer -> matmuls that are simulated whatever the ranges are
ALWAYS_SIMULATED: Mapping[str, Mapping[str, str]] = {
    "lstm": {"weight": "every step has ranges of its own"},
    "SAGEConv": {SUMS[1]: "a mean divides every node's gradient by its own degree"},
}


def products_of(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the matmuls of a converted layer."""
    precision = precision_of(layer)
    return (
        (*PASSES, *SUMS)
        if precision is not None and "aggregation" in precision.quantizers
        else PASSES
    )


def described(layer: nn.Module) -> dict[str, Any]:
    """Return the attributes of ``LayerSummary`` that say where a layer computes on integers."""
    simulated = simulated_products(layer)
    on_codes = (
        ", ".join(product for product in products_of(layer) if product not in simulated)
        or "none"
    )
    reasons = "; ".join(
        f"{product} simulated: {reason}" for product, reason in simulated.items()
    )
    note = f", on codes: {on_codes}" + (f" ({reasons})" if reasons else "")
    return {"simulated": simulated, "note": note}


def simulated_products(layer: nn.Module) -> dict[str, str]:
    """Return the matmuls of a converted layer that are simulated at all bits or some level of a ladder, and why."""
    precision = precision_of(layer)
    assert precision is not None
    if precision.execution == "auto" and not has_fast_int8(precision.num_steps.device):
        reasons = dict.fromkeys(
            products_of(layer), "auto: this device does not multiply codes"
        )
    elif _kind(layer) == "attention":
        reasons = _reasons_of_attention(layer, precision)
    else:
        reasons = _reasons_of_layer(layer, precision)
    return reasons | _reasons_of_formats(layer, precision)


def _kind(layer: Any) -> str:
    return getattr(layer, HOOK).kind


def _reasons_of_layer(layer: nn.Module, precision: LayerPrecision) -> dict[str, str]:
    kind = _kind(layer)
    if reason := unsupported_reason(layer, precision):
        return dict.fromkeys(products_of(layer), reason)
    one_range = ONE_RANGE_OF_MATRIX if kind == "graph" else ONE_RANGE
    several = {
        role
        for role, quantizer in precision.quantizers.items()
        if grid_without_zero_point(quantizer) not in one_range
    }
    kinds = [kind, *(base.__name__ for base in type(layer).__mro__)]
    reasons: dict[str, str] = {}
    for name in kinds:
        for role, simulated in SEVERAL_RANGES.get(name, {}).items():
            reasons |= simulated if role in several else {}
    for name in kinds:
        reasons |= ALWAYS_SIMULATED.get(name, {})
    return {
        product: reasons[product]
        for product in products_of(layer)
        if product in reasons
    }


def unsupported_reason(layer: Any, precision: LayerPrecision) -> str:
    """Return why no matmul of a layer has an integer form, or ""."""
    if _kind(layer) == "lstm":
        return int8_reason(precision, layer.hidden_size)
    return _convolution_reason(layer, precision) if _kind(layer) == "conv" else ""


def _convolution_reason(layer: Any, precision: LayerPrecision) -> str:
    if not isinstance(layer, nn.Conv2d):
        return f"a {type(layer).__name__} has no integer form"
    if layer.groups > 1:
        return f"it has {layer.groups} groups"
    if isinstance(layer.padding, str) and layer.padding_mode == "zeros":
        return f"its padding is {layer.padding!r}"
    has_one_range = grid_without_zero_point(precision.quantizers["input"]) in ONE_RANGE
    return "" if has_one_range else "its inputs have several ranges"


def grid_without_zero_point(quantizer: Quantizer) -> str:
    """Return the grid of a quantiser; integers serve those with and without a zero point."""
    return quantizer.grid.removesuffix(ZERO_POINT)


def _reasons_of_attention(
    layer: nn.Module, precision: LayerPrecision
) -> dict[str, str]:
    """Return the reasons for matmuls of two activations; "weight" are the gradients of keys and values."""
    if precision.execution == "auto":
        return dict.fromkeys(PASSES, "many small products are no faster on codes")
    if not getattr(layer, HOOK).is_paper_attention:
        return dict.fromkeys(PASSES, "only the paper's attention has products on codes")
    by_role = {
        "forward": {
            "key": "keys have a range per feature",
            "value": "values have one per token",
        },
        "weight": dict.fromkeys(
            ("query", "probabilities", "grad"), "the tokens have ranges of their own"
        ),
    }
    several = "per_row", "per_position"
    per_row = {
        role
        for role, q in precision.quantizers.items()
        if grid_without_zero_point(q) in several
    }
    reasons: dict[str, str] = {}
    for product, of_roles in by_role.items():
        parts = dict.fromkeys(
            reason for role, reason in of_roles.items() if role in per_row
        )
        if parts:
            reasons[product] = ", ".join(parts)
    return reasons


def _reasons_of_formats(layer: nn.Module, precision: LayerPrecision) -> dict[str, str]:
    """Return the matmuls that some level of a ladder has in formats without integers, with the first such level."""
    forward = ("forward", "aggregation")
    for role, ladder in ladders_of_layer(precision)._asdict().items():
        odd = [
            q
            for q in ladder.levels
            if not (ladder.quantizer(q).plain or ladder[q].is_identity)
        ]
        if odd:
            reason = f"at level {odd[0]} the {role.replace('_', ' ')} is in {ladder.quantizer(odd[0])}"
            is_gradient = role in ("error", "weight_gradient")
            return {
                product: reason
                for product in products_of(layer)
                if not (is_gradient and product in forward)
            }
    return {}
