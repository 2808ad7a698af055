"""Conventions of pricing: which operations of a training step are priced, which of their passes, at which bits.

- "per_op" prices what runs. What is quantised costs its bits, the rest 32, and only gradients that are computed cost
  anything (the first layer, for example, needs no input gradient);
- "paper" is the authors': three passes of every layer that their counters know, BatchNorm, LayerNorm, the gates of
  LSTMs and the upsampling of feature pyramids among them, at the bits of the step, also of layers that run in float32.
  They do not see matmuls outside of layers, such as both of attention, nor sums over neighbours, nor what is computed
  again in the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpt_core.quantization.op_interception import Operation

CONVENTIONS = ("paper", "per_op")
# pass -> roles of its operands: y = x w; dx = dy w; dw = x dy
PASS_OPERANDS = {
    "forward": ("activation", "weight"),
    "error": ("error", "weight"),
    "weight": ("weight_gradient", "activation"),
}

# parts of a layer that are priced by themselves
AGGREGATION, GATES, NORM, PRODUCTS, UPSAMPLING = (
    "aggregation",
    "gates",
    "norm",
    "products",
    "upsampling",
)
UNPRICED_PARTS = {"paper": (AGGREGATION, PRODUCTS), "per_op": (UPSAMPLING,)}


def row_name(operation: Operation) -> str:
    """Return the name of an operation in tables: that of its layer, with its part."""
    return (
        operation.layer
        if operation.part in ("", NORM)
        else f"{operation.layer} ({operation.part})".lstrip()
    )


def is_matmul(operation: Operation) -> bool:
    """Return whether an operation is a matmul or convolution, inside of a layer or not."""
    return operation.part in ("", PRODUCTS)


def priced_passes(operation: Operation, convention: str) -> tuple[str, ...]:
    """Return the passes of a training step that a convention prices."""
    if operation.part in UNPRICED_PARTS[convention]:
        return ()
    if convention == "paper":
        return () if operation.is_recomputed else tuple(PASS_OPERANDS)
    computed = {"forward": True, "error": operation.error, "weight": operation.weight}
    return tuple(name for name in PASS_OPERANDS if computed[name])
