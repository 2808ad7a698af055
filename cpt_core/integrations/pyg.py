"""Quantised forms of PyTorch Geometric's ``GCNConv``, mean ``SAGEConv`` and ``GraphConv``, called as those are.

Imported by ``quantize_`` only when the program uses ``torch_geometric.nn`` itself. With FP-Agg PyTorch Geometric sums
over neighbours as ever. With Q-Agg a ``Graph`` does, which is made once for an ``edge_index`` and kept for as long as
that tensor lives unchanged, with ``cached=True`` or without.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.nn import GCNConv, GraphConv, Linear, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops

from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import Features, graph_convolution, sage_convolution
from cpt_core.quantization.coverage import module_kind
from cpt_core.quantization.graph_layers import _QuantGraph, _QuantGraphConv, _QuantSAGEConv
from cpt_core.schedules.schedule import Levels

GRAPHS = WeakTensorKeyDictionary()  # edge_index -> its version and nodes, and its graphs, with loops and without
FORM = {"flow": "source_to_target", "node_dim": -2, "improved": False, "project": False, "root_weight": True}
HOOKS = ("_propagate", "_message", "_aggregate")  # how the names of what runs along edges begin


def _normalised(layer: Any, edges: Any, weight: Tensor | None, x: Any) -> tuple[Any, Tensor | None]:
    """Return edges and their weights as ``GCNConv.forward`` makes them, and keeps them if it is ``cached``."""
    place = "_cached_edge_index" if isinstance(edges, Tensor) else "_cached_adj_t"
    found = getattr(layer, place)
    if found is None:
        found = gcn_norm(edges, weight, len(x), layer.improved, layer.add_self_loops, layer.flow, x.dtype)
        if layer.cached:
            setattr(layer, place, found)
    return found if isinstance(found, tuple) else (found, None)


def _is_list(edges: Any) -> bool:
    return isinstance(edges, Tensor) and edges.layout == torch.strided


def _messages(layer: Any, x: Features, edges: Any, given: dict[str, Any]) -> Any:
    """Return what sums as PyTorch Geometric does, in float32, in the place of a ``Graph``."""
    single = isinstance(layer, GCNConv)
    if single and layer.normalize:
        edges, given["edge_weight"] = _normalised(layer, edges, given["edge_weight"], x)
    sizes = (len(x[0]), len(x[1])) if isinstance(x, tuple) else (len(x), len(x))
    if not single and given["size"] is None:
        given["size"] = sizes
    count = edges.shape[1] if _is_list(edges) else edges._nnz() if isinstance(edges, Tensor) else edges.nnz()
    return SimpleNamespace(
        num_src=sizes[0],
        num_dst=sizes[1],
        num_edges=count,
        constant=None,
        keep=lambda features, key, compute: compute(),
        aggregate=lambda h, _: layer.propagate(edges, x=h if single else (h, None), **given),
    )


class _Edges(Graph):
    """Edges as ``GCNConv`` normalises them, by in-degrees on both sides: what no edge reaches, sends nothing."""

    out_degrees = property(lambda self: self.in_degrees.masked_fill(self.in_degrees == 0, torch.inf))


@torch.compiler.disable
def _kept(edge_index: Tensor, nodes: int, loops: bool) -> Graph:
    if edge_index.is_inference():  # which has no version
        return _made(edge_index, nodes, loops)
    of, graphs = GRAPHS.get(edge_index, (None, {}))
    if of != (edge_index._version, nodes):
        GRAPHS[edge_index] = (edge_index._version, nodes), (graphs := {})
    if loops not in graphs:
        with torch.inference_mode(False), torch.no_grad():  # training may use what evaluation made
            graphs[loops] = _made(edge_index, nodes, loops)
    return graphs[loops]


def _made(edge_index: Tensor, nodes: int, loops: bool) -> Graph:
    if edge_index.dim() != 2 or len(edge_index) != 2:
        raise ValueError(f"edge_index must be (2, E), got {tuple(edge_index.shape)}")
    edges = add_remaining_self_loops(edge_index, None, 1.0, nodes)[0] if loops else edge_index
    if edges.is_meta:  # to count operations
        return _Edges._unchecked(edges.new_empty(nodes + 1), edges[0], nodes, "auto")
    source, destination = edges.as_tensor() if hasattr(edges, "as_tensor") else edges
    return _Edges.from_edges(source, destination, nodes)


class _QuantPyG(_QuantGraph):
    WHOLE = True
    LINEAR: ClassVar[tuple[str, ...]]  # the linear layer of neighbours, and of the destinations themselves
    AGGREGATORS: ClassVar[tuple[str, ...]] = ("add", "sum")
    REST: ClassVar[tuple[str, ...]] = ("edge_weight",)  # arguments behind the edges
    fc_neigh = property(lambda self: getattr(self, self.LINEAR[0]))
    fc_self = property(lambda self: getattr(self, self.LINEAR[1]))

    @classmethod
    def lengths(cls, module: Any) -> Levels:
        out, inside = getattr(module, cls.LINEAR[0]).weight.shape
        return Levels((inside, out), (inside,), (out,), (out,))

    @classmethod
    def why_not(cls, module: nn.Module) -> str:
        """Return what of a layer has no quantised form."""
        odd = {name: value for name in FORM if (value := getattr(module, name, FORM[name])) != FORM[name]}
        if module.aggr not in cls.AGGREGATORS:
            odd["aggr"] = module.aggr
        if odd:
            return f"its {', '.join(f'{name}={value!r}' for name, value in odd.items())} has no quantised form"
        linear = [getattr(module, name) for name in cls.LINEAR]
        if module_kind(module) is not cls.FLOAT or any(type(part) is not Linear for part in linear):
            return "it was changed after it was made"
        if any(is_lazy(part.weight) for part in linear):
            return "lazy: run the model once before it is converted"
        return "" if len({part.weight.shape for part in linear}) == 1 else "its neighbours have another size"

    @classmethod
    def graph_in(cls, module: Any, x: Any, edges: Any, *rest: Any) -> Any:
        """Return what sums over neighbours in a call."""
        given = dict(zip(cls.REST, rest, strict=False))
        if not getattr(module, "quantizes_aggregation", False):
            return _messages(module, x, edges, given)
        hooked = any(name.startswith(HOOKS) and name.endswith("_hooks") and v for name, v in vars(module).items())
        odd = {
            "sparse matrix": not _is_list(edges),
            "features but a tensor (N, F)": not isinstance(x, Tensor) or x.dim() != 2,
            **{name: value is not None for name, value in given.items()},
            "hooks or explanations along edges": hooked or module.explain,
        }
        if taken := [name for name, is_there in odd.items() if is_there]:
            raise ValueError(f"quantised sums of a {cls.FLOAT.__name__} take no {taken[0]}; take aggregation='fp'")
        return _kept(edges, len(x), getattr(module, "add_self_loops", False))


class QuantPyGGCNConv(_QuantPyG, _QuantGraphConv, GCNConv):
    """``GCNConv`` of PyTorch Geometric with quantised operands."""

    FLOAT, LINEAR = GCNConv, ("lin",)
    _allow_zero_in_degree, _activation = True, None
    _norm = property(lambda self: "both" if self.normalize and self.quantizes_aggregation else "none")

    def forward(  # type: ignore[override]
        self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        """(N, I) -> (N, O)."""
        if not isinstance(x, Tensor):
            raise ValueError(f"features of a GCNConv must be a tensor (N, F), got a {type(x).__name__}")
        graph = self.graph_in(self, x, edge_index, edge_weight)
        return self._in_float32(graph_convolution, graph, x, self.lin.weight.t())


class QuantPyGSAGEConv(_QuantPyG, _QuantSAGEConv, SAGEConv):
    """Mean ``SAGEConv`` of PyTorch Geometric with quantised operands."""

    FLOAT, LINEAR, REST, AGGREGATORS = SAGEConv, ("lin_l", "lin_r"), ("size",), ("mean",)

    def forward(self, x: Features, edge_index: Any, size: Any = None) -> Tensor:
        """(S, I) -> (D, O)."""
        h = self._in_float32(sage_convolution, self.graph_in(self, x, edge_index, size), x)
        return nn.functional.normalize(h, dim=-1) if self.normalize else h


class QuantPyGGraphConv(_QuantPyG, _QuantSAGEConv, GraphConv):
    """``GraphConv`` of PyTorch Geometric with quantised operands."""

    FLOAT, LINEAR, REST = GraphConv, ("lin_rel", "lin_root"), ("edge_weight", "size")

    def forward(self, x: Features, edge_index: Any, edge_weight: Tensor | None = None, size: Any = None) -> Tensor:
        """(S, I) -> (D, O)."""
        return self._in_float32(sage_convolution, self.graph_in(self, x, edge_index, edge_weight, size), x, "sum")
