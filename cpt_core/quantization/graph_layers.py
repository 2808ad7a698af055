"""Quantised graph convolutions, made from those of ``cpt_core.graphs``.  Paper: section 4.3, equation 1.

FP-Agg keeps the sum over neighbours in float32; Q-Agg quantises what enters it, and the gradient behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from cpt_core.graphs.graph import Graph, as_graph
from cpt_core.graphs.layers import Features, GraphConv, SAGEConv, graph_convolution, sage_convolution
from cpt_core.quantization.layers import QuantizedLayer, in_float32
from cpt_core.quantization.quantizers import Quantizer


class _QuantGraph(QuantizedLayer):
    """What the quantised graph convolutions share.

    Roles: "input" (one range per node), "weight", "bias", "grad", and with Q-Agg "aggregation".
    """

    KIND = "graph"

    @classmethod
    def roles(cls, module: nn.Module, quantizers: Mapping[str, Quantizer], aggregation: str) -> dict[str, Quantizer]:
        """With FP-Agg nothing quantises the sum over neighbours."""
        roles = super().roles(module, quantizers, aggregation)
        return {role: q for role, q in roles.items() if role != "aggregation" or aggregation == "quantized"}

    @property
    def quantizes_aggregation(self) -> bool:
        """Whether the sum over neighbours is quantised (Q-Agg)."""
        return "aggregation" in self.precision.quantizers

    def _in_float32(self, convolution: Callable[..., Tensor], graph: Graph, features: Features, *rest: Any) -> Tensor:
        x = features[0] if isinstance(features, tuple) else features
        return in_float32(self.precision, x, convolution, self, self.precision, graph, features, *rest)


class _QuantGraphConv(_QuantGraph):
    def forward(
        self, graph: Any, feat: Features, weight: Tensor | None = None, edge_weight: Tensor | None = None
    ) -> Tensor:
        """(S, I) -> (D, O)."""
        if weight is not None or edge_weight is not None:
            raise ValueError("a quantised graph convolution takes neither edge weights nor a weight from outside")
        return self._in_float32(graph_convolution, as_graph(graph), feat, self.weight)  # type: ignore[attr-defined]

    @classmethod
    def why_not(cls, module: nn.Module) -> str:
        """A layer without a weight of its own cannot be converted."""
        return "" if module.weight is not None else "it has no weight of its own"


class QuantGraphConv(_QuantGraphConv, GraphConv):
    """``GraphConv`` with quantised operands; the bias is added at q bits too, as the authors do."""

    FLOAT = GraphConv


class QuantSAGEConv(_QuantGraph, SAGEConv):
    """``SAGEConv`` with quantised operands of both products and of the bias addition."""

    FLOAT = SAGEConv
    WHOLE = True

    def forward(self, graph: Any, features: Features) -> Tensor:
        """(S, I) -> (D, O)."""
        return self._in_float32(sage_convolution, as_graph(graph), features)


CONVERSIONS: dict[type[nn.Module], type[QuantizedLayer]] = {c.FLOAT: c for c in (QuantGraphConv, QuantSAGEConv)}
