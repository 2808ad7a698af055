"""Functions of graph convolutions, in plain torch: project features, sum over neighbours, scale and add a bias.

    GCN:   H' = D_in^-1/2 A D_out^-1/2 H W + b        SAGE:  h'_i = W_self h_i + W_neigh mean_j h_j + b

A function mode intercepts the functions decorated with ``overridable`` like torch functions, which is how
``cpt_core.quantize_`` rounds their operands, see ``quantization.graph_handlers``. A layer with fewer outputs than
inputs multiplies by the weight before it sums over neighbours, so that the sum has fewer features.

Shapes: S source and D destination nodes of a graph, I inputs, O outputs, F features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from cpt_core.graphs.graph import Graph, check_features

# (S, I), or a pair of features of sources (S, I) and destinations (D, I)
Features = Tensor | tuple[Tensor, Tensor]
Function = TypeVar("Function", bound=Callable[..., Any])
# norm -> (exponent of out-degrees before the sum over neighbours, exponent of in-degrees after it)
NORM_EXPONENTS = {
    "both": (-0.5, -0.5),
    "left": (-1.0, 0.0),
    "right": (0.0, -1.0),
    "none": (0.0, 0.0),
}


def overridable(function: Function) -> Function:
    """Return ``function`` so that an active function mode can intercept its calls."""

    @functools.wraps(function)
    def visible(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(visible, (), *args, **kwargs)
        return function(*args, **kwargs)

    return visible  # type: ignore[return-value]


@overridable
def project(
    graph: Graph,
    x: Tensor,
    weight: Tensor,
    out_exponent: float = 0.0,
    is_transposed: bool = False,
) -> Tensor:
    """Return ``(x * out_degrees ** out_exponent) @ weight``, (S, O).

    Args:
        graph: graph whose out-degrees scale the rows of x; with ``out_exponent=0`` it is not read, and S is any number.
        x: (S, I).
        weight: (I, O).
        out_exponent: of the out-degrees; 0 scales nothing.
        is_transposed: whether the weight is (O, I), as that of a linear layer.
    """
    scaled = scale_rows(x, degree_scale(graph, "out", out_exponent, x))
    if is_transposed:
        return torch.nn.functional.linear(scaled, weight)
    return torch.matmul(scaled, weight)


@overridable
def neighbour_sum(
    graph: Graph, x: Tensor, out_exponent: float = 0.0, reduce: str = "sum"
) -> Tensor:
    """Return the "sum" or "mean" of ``x * out_degrees ** out_exponent`` over every node's in-neighbours, (D, F)."""

    def compute() -> Tensor:
        scale = degree_scale(graph, "out", out_exponent, x)
        return graph.aggregate(scale_rows(x, scale), reduce)

    if is_constant(graph, x):
        return graph.keep(x, (out_exponent, reduce), compute)
    return compute()


@overridable
def scale_and_add_bias(
    graph: Graph, h: Tensor, in_exponent: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """Return ``h * in_degrees ** in_exponent + bias``, (D, O): h (D, O), bias (O,)."""
    h = scale_rows(h, degree_scale(graph, "in", in_exponent, h))
    return h if bias is None else h + bias


def degree_scale(
    graph: Graph, direction: str, exponent: float, like: Tensor
) -> Tensor | None:
    """Return a power of the "in" (D, 1) or "out" (S, 1) degrees, where 0 counts as 1; None for the exponent 0."""
    if not exponent:
        return None
    degrees = graph.in_degrees if direction == "in" else graph.out_degrees
    return degrees.to(like).clamp_min(1).pow(exponent).unsqueeze(1)


def scale_rows(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``x * scale``, of x (N, F) and a scale (N, 1)."""
    return x if scale is None else x * scale


def is_constant(graph: Graph, x: Tensor) -> bool:
    """Return whether sums of x are cached, except in compiled code, which would recompile for every bit width."""
    return x is graph.constant and not torch.compiler.is_compiling()


@overridable
def graph_conv(
    graph: Graph,
    features: Features,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: str = "both",
) -> Tensor:
    """Return the GCN layer of features, (D, O): weight (I, O), bias (O,).  Paper: equation 1."""
    x, _ = source_and_destination(graph, features)
    out_exponent, in_exponent = NORM_EXPONENTS[norm]
    if weight.shape[0] > weight.shape[1]:  # fewer features to sum
        h = project(graph, x, weight, out_exponent)
        h = neighbour_sum(graph, h)
    else:
        h = neighbour_sum(graph, x, out_exponent)
        h = project(graph, h, weight)
    return scale_and_add_bias(graph, h, in_exponent, bias)


@overridable
def sage_conv(
    graph: Graph,
    features: Features,
    neighbour_weight: Tensor,
    self_weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the mean GraphSAGE layer of features, (D, O): both weights (O, I), bias (O,).  Paper: section 4.3."""
    source, destination = source_and_destination(graph, features)
    if neighbour_weight.shape[1] > neighbour_weight.shape[0]:  # fewer features to sum
        h = project(graph, source, neighbour_weight, is_transposed=True)
        neighbours = neighbour_sum(graph, h, reduce="mean")
    else:
        h = neighbour_sum(graph, source, reduce="mean")
        neighbours = project(graph, h, neighbour_weight, is_transposed=True)
    destination_part = project(graph, destination, self_weight, is_transposed=True)
    return scale_and_add_bias(graph, destination_part + neighbours, bias=bias)


def source_and_destination(graph: Graph, features: Features) -> tuple[Tensor, Tensor]:
    """Return the features of sources and destinations.

    Destinations without features of their own are the first sources, as in a block.
    """
    if isinstance(features, tuple) and len(features) == 2:
        source, destination = features
        check_features(source, graph.num_src, "source ")
        check_features(destination, graph.num_dst, "destination ")
        return source, destination

    check_features(features, graph.num_src)
    is_block = graph.num_src != graph.num_dst
    destination = features[: graph.num_dst] if is_block else features
    check_features(destination, graph.num_dst)
    return features, destination


def check_in_degrees(graph: Graph) -> None:
    """Raise ValueError for a graph with nodes that no edge leads to."""
    if bool((graph.in_degrees == 0).any()):
        raise ValueError(
            "the graph has nodes without in-edges, which get no message: add self-loops, or make the layer with "
            "allow_zero_in_degree=True"
        )
