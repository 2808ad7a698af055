"""Conventions of pricing: which operations of a training step are priced, and which of their passes.

- "per_op" prices what runs: only gradients that are computed;
- "paper" is the paper's: three passes of every layer that the authors' counters know, BatchNorm, LayerNorm, the gates
  of LSTMs and the upsampling of feature pyramids among them. They do not see matmuls outside of layers, such as both of
  attention, nor sums over neighbours, nor what is computed again in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

CONVENTIONS = ("paper", "per_op")
# pass -> roles of its operands: y = x w; dx = dy w; dw = x dy
PASSES = {
    "forward": ("activation", "weight"),
    "error": ("error", "weight"),
    "weight": ("weight_gradient", "activation"),
}

# parts of a layer that are priced by themselves
AGGREGATION, GATES, NORM, PRODUCTS, UPSAMPLING = "aggregation", "gates", "norm", "products", "upsampling"
UNPRICED_PARTS = {"paper": (AGGREGATION, PRODUCTS), "per_op": (UPSAMPLING,)}


@dataclass(frozen=True)
class Work:
    """One operation of a training step, as it is counted.

    Attributes:
        module: name of the module that it belongs to.
        function: name of the operation.
        macs: multiply-accumulates, or elementwise operations, of the forward pass.
        elements: how many of the first operand, the second and the output are moved.
        error: whether the input gradient is computed if a gradient comes back.
        weight: whether the weight gradient is.
        part: what of the module it is; "" for the matmul or convolution of a layer.
        owner: the layer whose bits apply; None for float32.
        once: computed once per bit width in a whole run.
        is_recomputed: computed again in the backward pass.
    """

    module: str
    function: str
    macs: int
    elements: tuple[int, int, int]
    error: bool
    weight: bool
    part: str = ""
    owner: str | None = None
    once: bool = False
    is_recomputed: bool = False

    @property
    def layer(self) -> str:
        """The name in tables: that of the module, with its part."""
        return self.module if self.part in ("", NORM) else f"{self.module} ({self.part})".lstrip()

    def passes(self, convention: str) -> tuple[str, ...]:
        """Return the passes of a training step that a convention prices."""
        if self.part in UNPRICED_PARTS[convention]:
            return ()
        if convention == "paper":
            return () if self.is_recomputed else tuple(PASSES)
        computed = {"forward": True, "error": self.error, "weight": self.weight}
        return tuple(name for name in PASSES if computed[name])
