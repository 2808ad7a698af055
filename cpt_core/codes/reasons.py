"""Which products of a layer run in float32 although it is asked for codes, and why; ``summary`` shows it."""

from __future__ import annotations

from collections.abc import Mapping

from cpt_core.processor import multiplies_codes
from cpt_core.quantization.layers import ONE_RANGE, PASSES, QuantizedLayer
from cpt_core.quantization.operations import QuantOperations

SUMS = ("aggregation", "aggregation error")  # over neighbours, and back
# form -> role with several ranges -> products that are simulated then
SEVERAL: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "QuantConv2d": {
        "grad": dict.fromkeys(PASSES[1:], "gradients have several ranges"),
        "weight": {"error": "weights have a range per channel"},
    },
    "QuantLinear": {
        "weight": {"error": "weights have a range per row"},
        "grad": {"weight": "gradients of sequences have a range per position"},
        "input": {"weight": "inputs have several ranges"},
    },
    "QuantLSTM": {"weight": {"error": "weights have a range per row"}},
    "_QuantGraph": {
        "input": {"weight": "inputs have a range per node"},
        "aggregation": {SUMS[0]: "features have a range per node"},
        "grad": dict.fromkeys(("weight", SUMS[1]), "gradients have a range per node"),
    },
    "_QuantGraphConv": {"weight": {"forward": "weights have a range per row"}},
    "_QuantSAGEConv": {"weight": {"error": "weights have a range per row"}},
}
NEVER: Mapping[str, Mapping[str, str]] = {  # form -> products that are simulated whatever the ranges are
    "QuantLSTM": {"weight": "every step has ranges of its own"},
    "_QuantSAGEConv": {SUMS[1]: "a mean divides every node's gradient by its own degree"},
}


def products_of(layer: QuantizedLayer) -> tuple[str, ...]:
    """Return the products of a layer, by name."""
    return (*PASSES, *SUMS) if getattr(layer, "quantizes_aggregation", False) else PASSES


def simulated_products(layer: QuantizedLayer) -> dict[str, str]:
    """Return which of them are simulated, with the reason: at all levels, or at some level of a ladder."""
    if layer.precision.execution == "auto" and not multiplies_codes(layer.precision.levels.device):
        found = dict.fromkeys(products_of(layer), "auto: this device does not multiply codes")
    else:
        found = _in_attention(layer) if isinstance(layer, QuantOperations) else _in_layer(layer)
    return found | _in_other_formats(layer)


def _in_layer(layer: QuantizedLayer) -> dict[str, str]:
    if reason := layer.not_on_codes():
        return dict.fromkeys(products_of(layer), reason)
    kinds = [kind.__name__ for kind in type(layer).__mro__]
    of_graph = ("per_position",) if layer.KIND == "graph" else ()  # the same as per_tensor for (N, F)
    several = {role for role, q in layer.precision.quantizers.items() if q.grid not in (*ONE_RANGE, *of_graph)}
    by_role = {role: of for kind in reversed(kinds) for role, of in SEVERAL.get(kind, {}).items()}
    found = {product: why for role, of in by_role.items() if role in several for product, why in of.items()}
    found |= next((NEVER[kind] for kind in kinds if kind in NEVER), {})
    return {product: found[product] for product in products_of(layer) if product in found}


def _in_attention(layer: QuantOperations) -> dict[str, str]:
    """Of caught products; "weight" are the gradients of keys and values."""
    if layer.precision.execution == "auto":
        return dict.fromkeys(PASSES, "many small products are no faster on codes")
    if not layer.catching.per_feature:
        return dict.fromkeys(PASSES, "only attention with keys by feature has products on codes")
    reasons = {
        "forward": {"key": "keys have a range per feature", "value": "values have one per token"},
        "weight": dict.fromkeys(("query", "probabilities", "grad"), "the tokens have ranges of their own"),
    }
    by_row = {r for r, q in layer.precision.quantizers.items() if q.grid in ("per_row", "per_position")}
    found = {k: [why for role, why in of.items() if role in by_row] for k, of in reasons.items()}
    return {k: ", ".join(dict.fromkeys(why)) for k, why in found.items() if why}


def _in_other_formats(layer: QuantizedLayer) -> dict[str, str]:
    """Return the products that some level of a ladder has in formats without codes, with the first such level."""
    forward = ("forward", "aggregation")
    for role, ladder in layer.precision.ladders._asdict().items():
        if odd := [q for q in ladder.levels if not (ladder.quantizer(q).plain or ladder[q].is_identity)]:
            why = f"at level {odd[0]} the {role.replace('_', ' ')} is in {ladder.quantizer(odd[0])}"
            gradients = role in ("error", "weight_gradient")
            return {product: why for product in products_of(layer) if not (gradients and product in forward)}
    return {}
