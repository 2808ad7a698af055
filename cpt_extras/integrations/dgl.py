"""Conversion of DGL's own ``GraphConv`` and mean ``SAGEConv``, for models that were written with DGL.

Loaded by ``quantize_`` only when a model has modules of DGL. A converted layer runs the functions of
``cpt_core.graphs`` instead of its own forward: DGL's operations are no functions of torch that a mode could see.
"""

from __future__ import annotations

from typing import Any

from dgl.nn import GraphConv, SAGEConv
from torch import Tensor

from cpt_core.graphs.functional import Features, check_in_degrees, graph_conv, sage_conv
from cpt_core.graphs.graph import Graph, as_graph
from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_core.quantization.graph_handlers import GRAPH_LAYERS, GraphLayer


def graph_from_dgl(graph: Any) -> Graph:
    """Return a DGL graph or block of one node type and one edge type as a ``Graph``; it is not copied."""
    indptr, indices, _ = graph.adj_tensors("csc")
    back_indptr, back_indices, _ = graph.adj_tensors("csr")
    converted = Graph._unchecked(indptr, indices, graph.num_src_nodes())

    def transpose() -> Graph:
        return Graph._unchecked(back_indptr, back_indices, converted.num_dst)

    converted.derive("transposed", transpose)
    return converted


def graph_conv_forward(
    module: GraphConv,
    graph: Any,
    feat: Features,
    weight: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:
    """Compute ``dgl.nn.GraphConv``: (S, I) -> (D, O)."""
    if weight is not None or edge_weight is not None:
        raise ValueError(
            "a quantised graph convolution takes neither edge weights nor a weight from outside"
        )
    graph = as_graph(graph)
    if not module._allow_zero_in_degree:
        check_in_degrees(graph)
    h = graph_conv(graph, feat, module.weight, module.bias, module._norm)
    return h if module._activation is None else module._activation(h)


def sage_conv_forward(
    module: SAGEConv, graph: Any, feat: Features, edge_weight: Tensor | None = None
) -> Tensor:
    """Compute ``dgl.nn.SAGEConv`` with ``aggregator_type="mean"``: (S, I) -> (D, O)."""
    if edge_weight is not None:
        raise ValueError("a quantised graph convolution takes no edge weights")
    dropped = (
        tuple(map(module.feat_drop, feat))
        if isinstance(feat, tuple)
        else module.feat_drop(feat)
    )
    bias = (
        module.fc_self.bias if module.fc_neigh.bias is None else module.fc_neigh.bias
    )  # the one that there is
    h = sage_conv(
        as_graph(graph), dropped, module.fc_neigh.weight, module.fc_self.weight, bias
    )
    h = h if module.activation is None else module.activation(h)
    return h if module.norm is None else module.norm(h)


def _graph_conv_reason(module: GraphConv) -> str:
    if module.weight is not None:
        return ""
    return FallbackReason.NO_GRAPH_WEIGHT.describe()


def _sage_conv_reason(module: SAGEConv) -> str:
    aggregator = module._aggre_type
    if aggregator == "mean":
        return ""
    return FallbackReason.UNSUPPORTED_AGGREGATOR.describe(aggregator=aggregator)


GRAPH_LAYERS[GraphConv] = GraphLayer(
    float32_reason=_graph_conv_reason, forward=graph_conv_forward
)
GRAPH_LAYERS[SAGEConv] = GraphLayer(
    has_parts=True, float32_reason=_sage_conv_reason, forward=sage_conv_forward
)
