"""Fallbacks of int8 execution: matmuls that are simulated although a layer was asked to compute in int8, and why.

It contains the rules of every kind of layer, ``simulated_matmuls``, which applies them to a layer, and
``describe_int8``, the fields of a row of ``summary``. The reasons are members of ``FallbackReason``.

A sum of int8 products has an integer form only where every operand has one scale along the summed dimension. So most
rules read: "if this role of this kind of layer has several ranges, these of its matmuls are simulated".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from cpt_core.quantization.convert import precision_of
from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_core.quantization.op_interception import HOOK
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import ZERO_POINT, Quantizer
from cpt_extras.cpu_info import has_fast_int8
from cpt_extras.formats.ladder_rounding import ladders_of_layer
from cpt_extras.int8.lstm import int8_fallback_reason

# Names of the matmuls of a layer: y = x w, the input gradient dx = dy w, the weight gradient dw = x dy.
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "error", "weight"
LAYER_MATMULS = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
GRADIENT_MATMULS = (INPUT_GRADIENT, WEIGHT_GRADIENT)

# Names of the sums of a graph convolution over the neighbours of every node, forward and backward.
AGGREGATION, AGGREGATION_GRADIENT = "aggregation", "aggregation error"

ONE_RANGE_GRIDS = ("per_tensor", "per_sample_mean")  # one range for a whole tensor
ONE_RANGE_GRIDS_OF_MATRIX = (*ONE_RANGE_GRIDS, "per_position")  # for (N, F)
TOKEN_RANGE_GRIDS = ("per_row", "per_position")


class Rule(NamedTuple):
    """Matmuls of a kind of layer that are simulated if a role has several ranges.

    Attributes:
        layer: kind of an intercepted module, such as "conv", or name of a class.
        role: role whose operand has several ranges.
        matmuls: names of the simulated matmuls.
        reason: text of the reason, in which ``SLICE`` stands for what has a range of its own.
    """

    layer: str
    role: str
    matmuls: tuple[str, ...]
    reason: str


# Stands in a reason for what has a range of its own: "row" for a role with granularity "per_row".
SLICE = "{slice}"


def _range_per(slice_name: str, operands: str) -> str:
    return FallbackReason.RANGE_PER_SLICE.describe(operands=operands, slice=slice_name)


def _several_ranges(operands: str) -> str:
    return FallbackReason.SEVERAL_RANGES.describe(operands=operands)


# Where several rules name one matmul, the reason of the last one stands.
FALLBACK_RULES = (
    Rule("conv", "grad", GRADIENT_MATMULS, _several_ranges("gradients")),
    Rule("conv", "weight", (INPUT_GRADIENT,), _range_per(SLICE, "weights")),
    Rule("linear", "weight", (INPUT_GRADIENT,), _range_per(SLICE, "weights")),
    Rule(
        "linear",
        "grad",
        (WEIGHT_GRADIENT,),
        _range_per("position", "gradients of sequences"),
    ),
    Rule("linear", "input", (WEIGHT_GRADIENT,), _several_ranges("inputs")),
    Rule("lstm", "weight", (INPUT_GRADIENT,), _range_per(SLICE, "weights")),
    Rule("graph", "input", (WEIGHT_GRADIENT,), _range_per("node", "inputs")),
    Rule("graph", "aggregation", (AGGREGATION,), _range_per("node", "features")),
    Rule(
        "graph",
        "grad",
        (WEIGHT_GRADIENT, AGGREGATION_GRADIENT),
        _range_per("node", "gradients"),
    ),
    Rule("GraphConv", "weight", (FORWARD,), _range_per(SLICE, "weights")),
    Rule("SAGEConv", "weight", (INPUT_GRADIENT,), _range_per(SLICE, "weights")),
)

# kind or class of a layer -> {matmul that is simulated whatever the ranges are: reason}
ALWAYS_SIMULATED = {
    "lstm": {WEIGHT_GRADIENT: FallbackReason.RANGE_PER_TIME_STEP.describe()},
    "SAGEConv": {AGGREGATION_GRADIENT: FallbackReason.MEAN_GRADIENT.describe()},
}

# Rules of attention, whose operands are activations. "weight" are the gradients of keys and values.
ATTENTION_RULES = (
    Rule("attention", "key", (FORWARD,), _range_per("feature", "keys")),
    Rule("attention", "value", (FORWARD,), _range_per("token", "values")),
    Rule("attention", "query", (WEIGHT_GRADIENT,), _range_per("token", "operands")),
    Rule(
        "attention",
        "probabilities",
        (WEIGHT_GRADIENT,),
        _range_per("token", "operands"),
    ),
    Rule("attention", "grad", (WEIGHT_GRADIENT,), _range_per("token", "operands")),
)


def matmuls_of_layer(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the matmuls of a converted layer."""
    precision = precision_of(layer)
    if precision is not None and "aggregation" in precision.quantizers:
        return (*LAYER_MATMULS, AGGREGATION, AGGREGATION_GRADIENT)
    return LAYER_MATMULS


def describe_int8(layer: nn.Module) -> dict[str, Any]:
    """Return the fields of ``LayerSummary`` about the int8 matmuls of a layer."""
    reasons = simulated_matmuls(layer)
    int8_matmuls = [name for name in matmuls_of_layer(layer) if name not in reasons]
    note = f", int8 matmuls: {', '.join(int8_matmuls) or 'none'}"
    if reasons:
        described = [f"{name} simulated: {reason}" for name, reason in reasons.items()]
        note += f" ({'; '.join(described)})"
    return {"simulated": reasons, "note": note}


def simulated_matmuls(layer: nn.Module) -> dict[str, str]:
    """Return the matmuls of a layer that are simulated, at all bits or at some level of a ladder.

    Returns:
        {name of the matmul: reason}.
    """
    precision = precision_of(layer)
    assert precision is not None
    if precision.execution == "auto" and not has_fast_int8(precision.num_steps.device):
        reason = FallbackReason.NO_FAST_INT8.describe()
        reasons = dict.fromkeys(matmuls_of_layer(layer), reason)
    elif _kind(layer) == "attention":
        reasons = _attention_reasons(layer, precision)
    else:
        reasons = _layer_reasons(layer, precision)
    return reasons | _format_reasons(layer, precision)


def _kind(layer: Any) -> str:
    return getattr(layer, HOOK).kind


def _layer_reasons(layer: nn.Module, precision: LayerPrecision) -> dict[str, str]:
    """Return {matmul: reason} of the simulated matmuls of a layer with a weight."""
    unsupported = unsupported_reason(layer, precision)
    if unsupported:
        return dict.fromkeys(matmuls_of_layer(layer), unsupported)

    kind = _kind(layer)
    one_range_grids = ONE_RANGE_GRIDS_OF_MATRIX if kind == "graph" else ONE_RANGE_GRIDS
    slices = {
        role: quantizer.granularity.removeprefix("per_")
        for role, quantizer in precision.quantizers.items()
        if grid_without_zero_point(quantizer) not in one_range_grids
    }
    layer_names = [kind, *(base.__name__ for base in type(layer).__mro__)]

    reasons: dict[str, str] = {}
    for layer_name in layer_names:
        reasons |= _apply_rules(
            [rule for rule in FALLBACK_RULES if rule.layer == layer_name], slices
        )
    for layer_name in layer_names:
        reasons |= ALWAYS_SIMULATED.get(layer_name, {})
    return {name: reasons[name] for name in matmuls_of_layer(layer) if name in reasons}


def _apply_rules(rules: Iterable[Rule], slices: Mapping[str, str]) -> dict[str, str]:
    """Return {matmul: reason} of the rules whose role is in ``slices``.

    Args:
        rules: rules of one kind of layer.
        slices: role with several ranges -> name of what has a range of its own, such as "row".
    """
    reasons: dict[str, str] = {}
    for rule in rules:
        if rule.role in slices:
            reason = rule.reason.replace(SLICE, slices[rule.role])
            reasons |= dict.fromkeys(rule.matmuls, reason)
    return reasons


def unsupported_reason(layer: Any, precision: LayerPrecision) -> str:
    """Return why no matmul of a layer has an int8 form, or ""."""
    kind = _kind(layer)
    if kind == "lstm":
        return int8_fallback_reason(precision, layer.hidden_size)
    if kind == "conv":
        return _conv_reason(layer, precision)
    return ""


def _conv_reason(layer: Any, precision: LayerPrecision) -> str:
    if not isinstance(layer, nn.Conv2d):
        return FallbackReason.UNSUPPORTED_LAYER.describe(layer=type(layer).__name__)
    if layer.groups > 1:
        return FallbackReason.CONV_GROUPS.describe(groups=layer.groups)
    if isinstance(layer.padding, str) and layer.padding_mode == "zeros":
        return FallbackReason.CONV_PADDING.describe(padding=layer.padding)
    if grid_without_zero_point(precision.quantizers["input"]) not in ONE_RANGE_GRIDS:
        return _several_ranges("inputs")
    return ""


def grid_without_zero_point(quantizer: Quantizer) -> str:
    """Return the grid of a quantiser without the suffix for a zero point, which int8 supports both with and without."""
    return quantizer.grid.removesuffix(ZERO_POINT)


def _attention_reasons(layer: nn.Module, precision: LayerPrecision) -> dict[str, str]:
    """Return {matmul: reason} of the simulated matmuls of two activations."""
    if precision.execution == "auto":
        reason = FallbackReason.SMALL_MATMULS.describe()
        return dict.fromkeys(LAYER_MATMULS, reason)
    if not getattr(layer, HOOK).is_paper_attention:
        reason = FallbackReason.UNSUPPORTED_ATTENTION.describe()
        return dict.fromkeys(LAYER_MATMULS, reason)

    roles = {
        role
        for role, quantizer in precision.quantizers.items()
        if grid_without_zero_point(quantizer) in TOKEN_RANGE_GRIDS
    }
    reasons: dict[str, str] = {}
    for name in (FORWARD, WEIGHT_GRADIENT):
        parts = dict.fromkeys(
            rule.reason
            for rule in ATTENTION_RULES
            if name in rule.matmuls and rule.role in roles
        )
        if parts:
            reasons[name] = ", ".join(parts)
    return reasons


def _format_reasons(layer: nn.Module, precision: LayerPrecision) -> dict[str, str]:
    """Return {matmul: reason} for the first level of a ladder whose number format int8 cannot represent."""
    for role, ladder in ladders_of_layer(precision)._asdict().items():
        unsupported_levels = [
            level
            for level in ladder.levels
            if not (ladder.quantizer(level).plain or ladder[level].is_identity)
        ]
        if not unsupported_levels:
            continue

        level = unsupported_levels[0]
        reason = FallbackReason.FORMAT_WITHOUT_INT8.describe(
            level=level,
            role=role.replace("_", " "),
            number_format=ladder.quantizer(level),
        )
        names = matmuls_of_layer(layer)
        if role in ("error", "weight_gradient"):
            names = tuple(name for name in names if name not in (FORWARD, AGGREGATION))
        return dict.fromkeys(names, reason)
    return {}
