"""``Graph``: directed edges sorted by destination, and the sum or mean over in-neighbours.  Paper: equation 1.

>>> graph = Graph.from_edges(torch.tensor([0, 1]), torch.tensor([2, 2]), num_nodes=3)
>>> graph.aggregate(torch.tensor([[1.0], [2.0], [4.0]])).tolist()
[[0.0], [0.0], [3.0]]

Shapes: S source nodes, D destination nodes, E edges, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cpt_core import extensions
from cpt_core.graphs import csr
from cpt_core.validation import check_choice, check_int, check_types, short_repr

REDUCTIONS = ("sum", "mean")
MAX_NODES = 2**63 - 1


class Graph:
    """Directed edges from source to destination nodes, stored by destination.

    Args:
        indptr: (D + 1,) int32 or int64, ascending from 0 to E; the edges into node i are ``indptr[i]:indptr[i + 1]``.
        indices: (E,) of the same type: the source of every edge.
        num_src: S; None takes D (an ordinary graph; sampled blocks have more sources than destinations).

    Raises:
        ValueError: for an edge that names no node, or an ``indptr`` that does not fit.

    Int32 indices halve the memory: a graph of 124 million edges takes 0.5 GB, its transpose again.
    """

    def __init__(
        self, indptr: Tensor, indices: Tensor, num_src: int | None = None
    ) -> None:
        check_types(type(self).__init__, locals())
        num_src = (
            None if num_src is None else check_int("num_src", num_src, 0, MAX_NODES)
        )
        for name, part in (("indices", indices), ("indptr", indptr)):
            if (
                part.dim() != 1
                or part.dtype not in (torch.int32, torch.int64)
                or part.dtype != indices.dtype
            ):
                description = f"{part.dtype} {tuple(part.shape)}"
                raise ValueError(
                    f"{name} must be (n,), of int32 or int64 as the other is, got {description}"
                )
        if not len(indptr) or int(indptr[0]) != 0 or int(indptr[-1]) != len(indices):
            raise ValueError(
                f"indptr must go from 0 to the number of edges, {len(indices)}"
            )
        # otherwise a kernel would read beyond the edges
        if bool((indptr[1:] < indptr[:-1]).any()):
            node = int((indptr[1:] < indptr[:-1]).int().argmax())
            raise ValueError(
                f"indptr must ascend, at node {node} it goes from {indptr[node]} to {indptr[node + 1]}"
            )
        self._set_edges(
            indptr, indices, len(indptr) - 1 if num_src is None else num_src
        )
        _check_nodes(indices, self.num_src)

    def _set_edges(self, indptr: Tensor, indices: Tensor, num_src: int) -> None:
        self.indptr, self.indices = indptr, indices
        self.num_src = num_src
        self.num_dst = len(indptr) - 1
        self.num_edges = len(indices)
        self.constant: Tensor | None = None  # features that never change
        self._cache: Any = None  # results computed from constant features
        self._derived: dict[str, Any] = {}

    @classmethod
    def _unchecked(cls, indptr: Tensor, indices: Tensor, num_src: int) -> Graph:
        """Return the graph of valid edges, without checks, which would synchronise with the GPU."""
        graph = cls.__new__(cls)
        graph._set_edges(indptr, indices, num_src)
        return graph

    @classmethod
    def from_edges(cls, source: Tensor, destination: Tensor, num_nodes: int) -> Graph:
        """Return the graph of edges source[k] -> destination[k], both (E,); parallel edges count as often as given."""
        check_types(cls.from_edges, locals())
        num_nodes = check_int("num_nodes", num_nodes, 0, MAX_NODES)
        for name, part in (("source", source), ("destination", destination)):
            if (
                part.is_floating_point()
                or part.is_complex()
                or part.dtype == torch.bool
            ):
                raise ValueError(
                    f"{name} must be of integers, numbers of nodes, got {part.dtype}"
                )
        if source.dim() != 1 or source.shape != destination.shape:
            shapes = f"{tuple(source.shape)} and {tuple(destination.shape)}"
            raise ValueError(
                f"source and destination must be (E,), an entry per edge, got {shapes}"
            )
        _check_nodes(source, num_nodes)
        _check_nodes(destination, num_nodes)
        indptr, order = csr.group_edges(destination, num_nodes)
        kind = torch.int32 if max(num_nodes, len(source)) < 2**31 else torch.int64
        return cls._unchecked(indptr.to(kind), source[order].to(kind), num_nodes)

    @classmethod
    def from_dgl(cls, graph: Any) -> Graph:
        """Return a DGL graph or block of one node type and one edge type as a ``Graph``; it is not copied."""
        return extensions.load("dgl").graph_from_dgl(graph)

    @classmethod
    def from_pyg(cls, data: Any) -> Graph:
        """Return a ``Data`` of PyTorch Geometric as a ``Graph`` without edge weights."""
        return extensions.load("pyg").graph_from_pyg(data)

    def __repr__(self) -> str:
        return f"Graph({self.num_src} -> {self.num_dst} nodes, {self.num_edges} edges)"

    def __reduce__(self) -> tuple[Any, ...]:
        """Include only the edges in copies and pickles."""
        return Graph._unchecked, (self.indptr, self.indices, self.num_src)

    @property
    def device(self) -> torch.device:
        """Device of the edges."""
        return self.indices.device

    def to(self, device: torch.device | str) -> Graph:
        """Return the graph on another device; constant features do not move with it."""
        check_types(self.to, {"device": device})
        try:
            if torch.device(device) == self.device:
                return self
        except RuntimeError as error:
            raise ValueError(
                f"device must be one of torch's, got {device!r}: {error}"
            ) from None
        return Graph._unchecked(
            self.indptr.to(device), self.indices.to(device), self.num_src
        )

    @property
    def in_degrees(self) -> Tensor:
        """Number of edges into every destination, (D,) float32."""

        def count() -> Tensor:
            return self.indptr.diff().float()

        return self.derive("in_degrees", count)

    @property
    def out_degrees(self) -> Tensor:
        """Number of edges out of every source, (S,) float32."""

        def count() -> Tensor:
            return csr.count_nodes(self.indices, self.num_src).float()

        return self.derive("out_degrees", count)

    @property
    def transposed(self) -> Graph:
        """Graph of the reversed edges, which the backward pass sums over."""

        def transpose() -> Graph:
            return Graph._unchecked(
                *csr.transpose_edges(self.indptr, self.indices, self.num_src),
                self.num_dst,
            )

        return self.derive("transposed", transpose)

    def derive(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return ``compute()``, a property of the edges, cached by its name."""
        # cached_property has a lock, which compilers cannot trace
        if name not in self._derived:
            self._derived[name] = compute()
        return self._derived[name]

    def aggregate(self, h: Tensor, reduce: str = "sum") -> Tensor:
        """Return the "sum" or "mean" of features over every node's in-neighbours; 0 for a node without any.

        (S, F) floating -> (D, F) of the same type; half precisions are summed in float32.
        """
        check_choice("reduce", reduce, REDUCTIONS)
        check_features(h, self.num_src, "h: ")
        is_wide = h.dtype in (torch.float32, torch.float64)
        wide = h if is_wide else h.float()

        has_backward = wide.requires_grad and torch.is_grad_enabled()
        back: tuple[Tensor | None, Tensor | None] = (None, None)
        if has_backward:
            back = self.transposed.indptr, self.transposed.indices
        out = torch.ops.cpt_graphs.sum(wide, self.indptr, self.indices, *back)
        if reduce == "mean":
            degrees = self.in_degrees.to(out).clamp_min(1)
            out = out / degrees.unsqueeze(1)
        return out.to(h.dtype)

    def set_constant(self, features: Tensor | None) -> Graph:
        """Declare input features that never change, and return the graph: sums over them are computed once.

        Compiled code computes them at every step; see ``kernels.constant_features``.
        """
        check_types(self.set_constant, {"features": features})
        if features is not None and features.requires_grad:
            raise ValueError("constant features cannot require a gradient")
        self.constant, self._cache = features, None
        if features is not None:
            self._cache = extensions.services("constant_features").ConstantFeatures(
                features
            )
        return self

    def keep(self, features: Tensor, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return ``compute()``, cached by ``key`` if the features are constant."""
        if self._cache is None:
            return compute()
        return self._cache.keep(features, key, compute)


def _check_nodes(nodes: Tensor, count: int) -> None:
    """Raise ValueError for numbers of nodes outside 0..count - 1."""
    if len(nodes):
        low, high = map(int, torch.aminmax(nodes))
        if low < 0 or high >= count:
            raise ValueError(
                f"edges must name nodes 0..{count - 1}, got {low if low < 0 else high}"
            )


def check_features(x: Any, nodes: int, where: str = "") -> None:
    """Raise ValueError unless ``x`` is a floating-point tensor (nodes, F)."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{where}features must be a tensor, or a pair of them for a layer, got {short_repr(x)}"
        )
    if x.dim() != 2 or len(x) != nodes:
        raise ValueError(
            f"{where}features must be ({nodes}, F), a row for every node, got {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(
            f"{where}features must be floating point, got {x.dtype}; convert them with .float()"
        )


def as_graph(graph: Any) -> Graph:
    """Return ``graph`` as a ``Graph``; it may be a graph of DGL."""
    if isinstance(graph, Graph):
        return graph
    if not hasattr(graph, "adj_tensors"):
        raise TypeError(
            f"graph must be a Graph or a DGLGraph, got {type(graph).__name__}"
        )
    return Graph.from_dgl(graph)
