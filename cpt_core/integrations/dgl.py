"""Quantised forms of DGL's own ``GraphConv`` and mean ``SAGEConv``, for models that were written with DGL.

Imported by ``quantize_`` only when the program uses ``dgl.nn`` itself.
"""

from __future__ import annotations

from typing import Any

from dgl.nn import GraphConv, SAGEConv
from torch import Tensor, nn

from cpt_core.graphs.graph import as_graph
from cpt_core.graphs.layers import Features, sage_convolution
from cpt_core.quantization.graph_layers import _QuantGraphConv, _QuantSAGEConv


class QuantDGLGraphConv(_QuantGraphConv, GraphConv):
    """``dgl.nn.GraphConv`` with quantised operands."""

    FLOAT = GraphConv


class QuantDGLSAGEConv(_QuantSAGEConv, SAGEConv):
    """``dgl.nn.SAGEConv`` with ``aggregator_type="mean"`` and quantised operands."""

    FLOAT = SAGEConv

    def forward(self, graph: Any, feat: Features, edge_weight: Tensor | None = None) -> Tensor:
        """(S, I) -> (D, O)."""
        if edge_weight is not None:
            raise ValueError("a quantised graph convolution takes no edge weights")
        dropped = tuple(map(self.feat_drop, feat)) if isinstance(feat, tuple) else self.feat_drop(feat)
        h = self._in_float32(sage_convolution, as_graph(graph), dropped)
        h = h if self.activation is None else self.activation(h)
        return h if self.norm is None else self.norm(h)

    @classmethod
    def why_not(cls, module: nn.Module) -> str:
        """Only the mean aggregator has a quantised form."""
        kind = module._aggre_type
        return "" if kind == "mean" else f"its aggregator {kind!r} has no quantised form"
