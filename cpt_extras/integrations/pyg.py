"""Graphs of PyTorch Geometric for the layers of ``cpt_core.graphs``."""

from typing import Any

from torch import Tensor

from cpt_core.graphs.graph import Graph
from cpt_core.validation import short_repr


def graph_from_pyg(data: Any) -> Graph:
    """Convert a ``Data`` object of PyTorch Geometric to a ``Graph``.

    Raises:
        ValueError: for edge weights, or without an edge_index.
    """
    edges = getattr(data, "edge_index", None)
    weight = getattr(data, "edge_weight", None)
    if (
        not isinstance(edges, Tensor)
        or edges.dim() != 2
        or len(edges) != 2
        or weight is not None
    ):
        got = f"{short_repr(edges)} and {short_repr(weight)}"
        raise ValueError(
            f"data must have an edge_index, a tensor (2, E), and no edge_weight, got {got}"
        )
    return Graph.from_edges(edges[0], edges[1], data.num_nodes)
