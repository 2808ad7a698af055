"""Pricing conventions: the operations of a training step, the passes and the bits that are priced.

- "per_op" prices the operations that run: quantised ones at their bits, all others at 32, and only gradients that are
  computed (the first layer, for example, needs no input gradient).
- "paper" is the authors' convention: three passes of every layer that their counters know, at the bits of the step,
  also of layers that run in float32, and of levels of 24 bits and more, which do. It includes BatchNorm, LayerNorm, the
  gates of LSTMs and the upsampling of feature pyramids. It excludes matmuls outside of layers, such as both of
  attention, sums over neighbours, and operations that the backward pass recomputes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpt_core.schedules.schedule import PASS_OPERANDS

if TYPE_CHECKING:
    from cpt_core.quantization.op_interception import Operation

CONVENTIONS = ("paper", "per_op")
# kinds of work besides the matmul or convolution of a layer, values of ``Operation.part``
AGGREGATION = "aggregation"
GATES = "gates"
NORM = "norm"
MATMULS = "matmuls"  # outside of layers, such as those of attention
UPSAMPLING = "upsampling"
UNPRICED_PARTS = {"paper": (AGGREGATION, MATMULS), "per_op": (UPSAMPLING,)}


def row_name(operation: Operation) -> str:
    """Return the name of an operation in tables: its layer and, in brackets, the kind of work."""
    if operation.part in ("", NORM):
        return operation.layer
    return f"{operation.layer} ({operation.part})".lstrip()


def is_matmul(operation: Operation) -> bool:
    """Return whether an operation is a matmul or convolution, inside of a layer or not."""
    return operation.part in ("", MATMULS)


def priced_passes(operation: Operation, convention: str) -> tuple[str, ...]:
    """Return the passes of a training step that a convention prices."""
    if operation.part in UNPRICED_PARTS[convention]:
        return ()
    if convention == "paper":
        return () if operation.is_recomputed else tuple(PASS_OPERANDS)
    computed = {"forward": True, "error": operation.error, "weight": operation.weight}
    return tuple(name for name in PASS_OPERANDS if computed[name])
