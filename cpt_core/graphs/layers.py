"""Graph convolutions: GCN and mean GraphSAGE, written once for float32 and for any precision.  Paper: equation 1.

The float32 layers have the parameters and ``state_dict`` keys of DGL's layers of the same name and run without DGL.
``cpt_core.quantize_`` converts both kinds in place. The layers are called as ``layer(graph, features)``, with a
``Graph`` or a graph of DGL. What quantises the operands, if anything does, is handed in as a ``Precision``.

    GCN:   H' = act(D_in^-1/2 A D_out^-1/2 H W + b)        SAGE:  h'_i = W_self h_i + W_neigh mean_j h_j + b

FP-Agg keeps the sum over neighbours in float32; Q-Agg quantises what enters it, and the gradient behind it.

Shapes: N nodes, S source and D destination nodes of a block, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cpt_core.checks import choose, declared, whole
from cpt_core.graphs.graph import Graph, as_graph, check_features

Features = Tensor | tuple[Tensor, Tensor]  # (S, I), or those of sources and destinations
Keep = Callable[[Any, Callable[[], Any]], Any]  # what is computed of constant features is kept, see ``Graph.keep``


class Tail(NamedTuple):
    """What follows a product or a sum h: ``h * scale(h) + bias``."""

    scale: Callable[[Tensor], Tensor | None]
    bias: Tensor | None


class Precision:
    """How a layer computes: with operands as they are, in float32. ``GraphPrecision`` quantises them.

    A layer asks it before it uses an operand and after it made an output.
    """

    execution = "simulated"
    quantizers: Mapping[str, Any] = MappingProxyType({})  # of every role: none
    forward_format: Any = None  # of operands; None for float32

    def operand(self, role: str, x: Tensor) -> Tensor:
        """Return an operand as it enters the product or the sum."""
        return x

    def gradient(self, role: str, y: Tensor) -> Tensor:
        """Return an output whose gradient comes back as the precision wants it."""
        return y

    def scaled_operand(self, role: str, x: Tensor, scale: Tensor | None) -> Tensor:
        """Return the operand made of ``x * scale``: x (N, F), scale (N, 1)."""
        return self.operand(role, x if scale is None else x * scale)

    def scaled_and_biased(self, h: Tensor, output: bool, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return ``h * scale + bias``, (N, F): ``h`` is an ``output`` of the precision, and both terms are operands."""
        if output:
            h = self.gradient("grad", h)
        if scale is not None:
            h = h * scale
        return h if bias is None else self.gradient("grad", self.operand("input", h) + self.operand("bias", bias))

    def product(
        self, x: Tensor, scale: Tensor | None, weight: Tensor, keep: Keep, linear: bool = False,
        tail: Tail | None = None,
    ) -> Tensor:  # fmt: skip
        """Return ``(x * scale) @ weight``, (N, O), and what follows it.

        Args:
            x: (N, I).
            scale: (N, 1) or None.
            weight: (I, O); of a ``linear`` product (O, I).
            keep: keeps what is computed of x alone where x is constant.
            linear: whether the weight is that of a linear layer.
            tail: what follows.
        """
        operands = self.scaled_operand("input", x, scale), self.operand("weight", weight)
        return self._followed(self.multiply(*operands, linear), tail)

    def multiply(self, x: Tensor, weight: Tensor, linear: bool) -> Tensor:
        """Return x (N, I) times weight (I, O); of a ``linear`` product (O, I)."""
        return nn.functional.linear(x, weight) if linear else torch.matmul(x, weight)

    def neighbour_sum(
        self, graph: Graph, x: Tensor, scale: Tensor | None, reduce: str, tail: Tail | None = None
    ) -> Tensor:
        """Return the sum or mean of ``x * scale`` over every node's in-neighbours, (D, F), and what follows it."""
        return self._followed(graph.aggregate(self.scaled_operand("aggregation", x, scale), reduce), tail)

    def _followed(self, h: Tensor, tail: Tail | None) -> Tensor:
        if tail is None:
            return self.gradient("grad", h)
        return self.scaled_and_biased(h, True, tail.scale(h), tail.bias)


FLOAT32 = Precision()
MOST_FEATURES = 2**31 - 1
LAYER_NORM_EPS = 1e-5  # what torch adds to the variance


def _of_sums(p: Precision) -> Precision:
    """The precision of sums over neighbours; with FP-Agg none."""
    return p if "aggregation" in p.quantizers else FLOAT32


def _constant_sum(
    p: Precision, graph: Graph, x: Tensor, norm: str, reduce: str, scale: Callable[[], Tensor | None]
) -> Tensor:
    def compute() -> Tensor:
        return _of_sums(p).neighbour_sum(graph, x, scale(), reduce)

    if x is not graph.constant or torch.compiler.is_compiling():  # which would be compiled anew for every key
        return compute()
    # what enters the sum depends on x, norm and, with Q-Agg, on quantiser, format and execution: all is in the key
    quantizer = p.quantizers.get("aggregation")
    return graph.keep(x, (norm, reduce, quantizer, *((p.forward_format, p.execution) if quantizer else ())), compute)


def _keep(graph: Graph, x: Tensor, *what: Any) -> Keep:
    return lambda key, compute: graph.keep(x, (*what, key), compute)


def _pair(features: Features, graph: Graph) -> tuple[Tensor, Tensor]:
    """Features of sources and destinations; in a block the destinations are the first of the sources."""
    pair = features if isinstance(features, tuple) and len(features) == 2 else (features, features)
    source, destination = pair[0], pair[1][: graph.num_dst] if isinstance(pair[1], Tensor) else pair[1]
    check_features(source, graph.num_src)
    check_features(destination, graph.num_dst)
    return source, destination


def graph_convolution(layer: Any, p: Precision, graph: Graph, features: Features, weight: Tensor) -> Tensor:
    """The GCN layer, in either precision.  Paper: equation 1."""
    x, _ = _pair(features, graph)
    if not layer._allow_zero_in_degree and bool((graph.in_degrees == 0).any()):
        said = "the graph has nodes without in-edges, which get no message: add self-loops, or make the layer with "
        raise ValueError(f"{said}allow_zero_in_degree=True")

    def scale(side: str, like: Tensor) -> Tensor | None:  # D_out^-1/2 on the left, D_in^-1/2 on the right
        return _power(graph, layer._norm, side, like) if layer._norm in (side, "both") else None

    tail = Tail(lambda h: scale("right", h), layer.bias)
    if weight.shape[0] > weight.shape[1]:  # the product first: fewer features to sum
        h = p.product(x, scale("left", x), weight, _keep(graph, x, layer._norm))
        if _of_sums(p) is p:
            h = p.neighbour_sum(graph, h, None, "sum", tail)
        else:
            h = graph.aggregate(h, "sum")
            h = p.scaled_and_biased(h, False, tail.scale(h), tail.bias)
    else:
        h = _constant_sum(p, graph, x, layer._norm, "sum", lambda: scale("left", x))
        h = p.product(h, None, weight, _keep(graph, h), tail=tail)
    return h if layer._activation is None else layer._activation(h)


def _power(graph: Graph, norm: str, side: str, like: Tensor) -> Tensor:
    """Degrees^-1/2 as a column, or 1 / degrees where only one side is normalised; degree 0 counts as 1."""
    degrees = graph.out_degrees if side == "left" else graph.in_degrees
    exponent = -1.0 if norm == side else -0.5
    return degrees.to(like).clamp_min(1).pow(exponent).unsqueeze(1)


def sage_convolution(layer: Any, p: Precision, graph: Graph, features: Features) -> Tensor:
    """The mean GraphSAGE layer, in either precision.  Paper: section 4.3."""
    source, destination = _pair(features, graph)

    def product(x: Tensor, rows_of: Tensor, linear: nn.Linear) -> Tensor:
        return p.product(x, None, linear.weight, _keep(graph, rows_of, len(x)), linear=True)

    if layer.fc_neigh.weight.shape[1] > layer.fc_neigh.weight.shape[0]:
        neighbours = _of_sums(p).neighbour_sum(graph, product(source, source, layer.fc_neigh), None, "mean")
    else:
        mean = _constant_sum(p, graph, source, "", "mean", lambda: None)
        neighbours = product(mean, mean, layer.fc_neigh)
    own = product(destination, destination if isinstance(features, tuple) else source, layer.fc_self)
    return p.scaled_and_biased(own + neighbours, False, None, layer.fc_self.bias)


class GraphConv(nn.Module):
    """A graph convolution (GCN layer): Xavier uniform weight (I, O), zero bias (O,).

    Args:
        in_feats: I.
        out_feats: O.
        norm: "both" (symmetric, the paper's), "left", "right" or "none".
        bias: add one.
        allow_zero_in_degree: nodes without in-edges are given the bias alone instead of being refused.

    Paper: equation 1.
    """

    def __init__(
        self, in_feats: int, out_feats: int, norm: str = "both", bias: bool = True, allow_zero_in_degree: bool = True
    ) -> None:
        super().__init__()
        declared(GraphConv.__init__, locals())
        choose("norm", norm, ("both", "left", "right", "none"))
        in_feats = whole("in_feats", in_feats, 1, MOST_FEATURES)
        out_feats = whole("out_feats", out_feats, 1, MOST_FEATURES)
        # named as in DGL, so that one forward serves both
        self._in_feats, self._out_feats, self._norm = in_feats, out_feats, norm
        self._allow_zero_in_degree, self._activation = allow_zero_in_degree, None
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(in_feats, out_feats)))
        self.bias = nn.Parameter(torch.zeros(out_feats)) if bias else None

    def forward(self, graph: Any, features: Features) -> Tensor:
        """(S, I) -> (D, O)."""
        return graph_convolution(self, FLOAT32, as_graph(graph), features, self.weight)

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self._in_feats}, {self._out_feats}, norm={self._norm}"


class SAGEConv(nn.Module):
    """A GraphSAGE layer with mean aggregation: linear maps of the node itself (with bias) and of its neighbours' mean.

    Args:
        in_feats: I.
        out_feats: O.
        bias: add one.

    Initialised as the authors do: ``fc_neigh`` Xavier uniform with ReLU's gain, ``fc_self`` torch's default, zero bias.
    """

    def __init__(self, in_feats: int, out_feats: int, bias: bool = True) -> None:
        super().__init__()
        declared(SAGEConv.__init__, locals())
        in_feats = whole("in_feats", in_feats, 1, MOST_FEATURES)
        out_feats = whole("out_feats", out_feats, 1, MOST_FEATURES)
        self._in_src_feats, self._out_feats = in_feats, out_feats
        self.fc_neigh = nn.Linear(in_feats, out_feats, bias=False)
        self.fc_self = nn.Linear(in_feats, out_feats, bias=bias)
        nn.init.xavier_uniform_(self.fc_neigh.weight, gain=math.sqrt(2))
        if bias:
            nn.init.zeros_(self.fc_self.bias)

    def forward(self, graph: Any, features: Features) -> Tensor:
        """(S, I) -> (D, O)."""
        return sage_convolution(self, FLOAT32, as_graph(graph), features)


class MatrixNorm(nn.Module):
    """Layer normalisation over all nodes and features at once, without parameters, as the authors have it.

    The statistics are those of the whole batch of nodes: on a full graph test nodes take part, and in sampled training
    they depend on the sample.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(N, F) -> (N, F), mean 0 and variance 1 over all entries."""
        return _spread_norm(x) if x.is_cuda else nn.functional.layer_norm(x, x.shape)


def _spread_norm(x: Tensor) -> Tensor:
    """The same up to rounding, for a whole GPU: its layer norm leaves a row, here all there is, to one block."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, correction=0)
    return ((wide - mean) * torch.rsqrt(variance + LAYER_NORM_EPS)).to(x.dtype)
