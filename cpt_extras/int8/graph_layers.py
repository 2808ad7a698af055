"""Int8 graph convolutions: their matmuls, and with Q-Agg the sums over neighbours, forward and backward.

A sum over neighbours has an integer form where all features have one scale: int8 codes are added in int32, and the
degree of a node corrects the sum for the zero point. The authors' range per node rules that out for features, but not
for gradients, which have one range; ``QuantConfig.with_shared_steps()`` allows both. Sums without an integer form are
simulated.

Importing this module registers the executors of both operations. The operator at the end replaces a chain of plain
operations and gives the same bits; on a CPU, C++ runs it in one pass (``graph.h``).

>>> x = QuantizedTensor.quantize(torch.tensor([[0.0, 1.0], [3.0, 2.0]]), 2, "per_tensor")
>>> sum_over_neighbours(Graph(torch.tensor([0, 2]), torch.tensor([0, 1]), num_src=2), x).tolist()
[[3.0, 3.0]]

Shapes: N nodes (S sources, D destinations of a block), F features, I inputs, O outputs, E edges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpt_core.graphs.graph import Graph
from cpt_core.quantization.graph_handlers import GraphOperand
from cpt_core.quantization.op_interception import OP_EXECUTORS
from cpt_core.quantization.precision import LayerPrecision
from cpt_extras.int8.execution import runs_int8
from cpt_extras.int8.fallback import ONE_RANGE_GRIDS_OF_MATRIX
from cpt_extras.int8.layers import (
    GradientRounding,
    Operand,
    dequantized,
    encode_operand,
    forbid_double_backward,
    multiply_operands,
    saved_operands,
)
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import operators

MAX_DEGREE = 1 << 24  # a sum of so many codes, of 128 at most, fits in int32
MAX_GATHERED_NUMBERS = (
    1 << 24
)  # the plain sum over neighbours gathers so many at a time


@torch.compiler.disable
def project(
    precision: LayerPrecision,
    operands: tuple[Tensor, Tensor, Tensor | None],
    roles: tuple[str, str],
    along: Any,
    operand: GraphOperand,
) -> Tensor | None:
    """Multiply x (N, I) by a weight in int8; None if it is to be simulated."""
    x, weight, _ = operands
    if not runs_int8(precision, x):
        return None
    quantizer = precision.quantizers["input"]

    def encode() -> QuantizedTensor:
        return encode_operand(precision, "input", x)

    def encode_once() -> QuantizedTensor:
        key = (
            "codes",
            operand.out_exponent,
            len(x),
            quantizer,
            precision.active_bits.formats.activation,
        )
        return operand.graph.keep(operand.x, key, encode)

    # a running range is updated by every batch, so that codes cannot be cached
    codes = encode if quantizer.running else encode_once
    return _Project.apply(x, weight, codes, operand.is_transposed, precision)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        codes: Callable[[], QuantizedTensor],
        is_transposed: bool,
        precision: LayerPrecision,
    ) -> Tensor:
        a, w = codes(), encode_operand(precision, "weight", weight)
        ctx.save_for_backward(*a, *w)
        ctx.is_transposed, ctx.rounding = is_transposed, GradientRounding(precision)
        return multiply_operands(a, w.t() if is_transposed else w)

    @staticmethod
    @forbid_double_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, w = saved_operands(ctx)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        g = ctx.rounding(gradient) if gradient.numel() else gradient
        x_grad = weight_grad = None
        if needs_x:
            x_grad = multiply_operands(g, w if ctx.is_transposed else w.t())
        if needs_weight and ctx.is_transposed:
            weight_grad = multiply_operands(g.t(), a)
        elif needs_weight:
            weight_grad = multiply_operands(a.t(), g)
        return x_grad, weight_grad, None, None, None


@torch.compiler.disable
def aggregate(
    precision: LayerPrecision,
    operands: tuple[Tensor, Tensor, Tensor | None],
    roles: tuple[str, str],
    along: Any,
    operand: GraphOperand,
) -> Tensor | None:
    """Return the sum or mean over neighbours, computed in int8; None if it is to be simulated."""
    x = operands[0]
    if not runs_int8(precision, x):
        return None
    return _Aggregate.apply(x, operand.graph, operand.reduce == "mean", precision)


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, graph: Graph, is_mean: bool, precision: LayerPrecision
    ) -> Tensor:
        ctx.graph, ctx.is_mean = graph, is_mean
        ctx.rounding = GradientRounding(precision)
        if precision.quantizers["aggregation"].grid in ONE_RANGE_GRIDS_OF_MATRIX:
            h = sum_over_neighbours(graph, encode_operand(precision, "aggregation", x))
        else:
            h = graph.aggregate(precision.quantize_operand("aggregation", x))
        return h.div_(_divisors(graph)) if is_mean else h

    @staticmethod
    @forbid_double_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        g = ctx.rounding(gradient) if gradient.numel() else gradient
        if ctx.is_mean:
            g = dequantized(g) / _divisors(ctx.graph)
        return sum_over_neighbours(ctx.graph.transposed, g), None, None, None


def sum_over_neighbours(graph: Graph, x: Operand) -> Tensor:
    """Return the sum over every node's in-neighbours, (D, F) float32; codes with one scale are summed in int32.

    Raises:
        ValueError: for codes, if more than ``MAX_DEGREE`` edges lead to a node.
    """
    if not (isinstance(x, QuantizedTensor) and x.has_one_scale):
        return graph.aggregate(dequantized(x))
    if graph.num_edges > MAX_DEGREE:

        def largest_in_degree() -> int:
            return int(graph.indptr.diff().max())

        degree = graph.derive("largest_in_degree", largest_in_degree)
        if degree > MAX_DEGREE:
            raise ValueError(
                f"a sum of codes has at most {MAX_DEGREE:,} terms, {degree:,} edges lead to a node; "
                "take execution 'simulated'"
            )
    fields = x.zero_point, x.scale, x.zero_value
    grid = [v.reshape(()) for v in fields]
    return operators.active.sum_neighbours(x.codes, *grid, graph.indptr, graph.indices)


def _divisors(graph: Graph) -> Tensor:
    return graph.in_degrees.clamp_min(1).unsqueeze(1)


# --- the operator -----------------------------------------------------------------------------------------------------


def _sum_neighbours(
    _: Any,
    codes: Tensor,
    zero: Tensor,
    scale: Tensor,
    rest: Tensor,
    indptr: Tensor,
    indices: Tensor,
) -> Tensor:
    """Return sums of values over neighbours, (D, F): the plain form of the operator."""
    num_nodes, num_features, num_edges = len(indptr) - 1, codes.shape[1], len(indices)
    degrees = indptr.diff()
    destinations = torch.arange(num_nodes, device=codes.device)
    destinations = destinations.repeat_interleave(degrees, output_size=num_edges)

    code_sums = torch.zeros(
        num_nodes, num_features, dtype=torch.int32, device=codes.device
    )
    edges_at_a_time = max(1, MAX_GATHERED_NUMBERS // max(1, num_features))
    for start in range(0, num_edges, edges_at_a_time):
        edges = slice(start, start + edges_at_a_time)
        code_sums.index_add_(0, destinations[edges], codes[indices[edges]].int())

    degrees = degrees.long().unsqueeze(1)
    centred = (code_sums - degrees * zero.long()).float()
    return scale * centred + degrees.float() * rest


# name -> schema, plain implementation, and its shapes for fake tensors
INT8_GRAPH_OPERATORS: dict[str, tuple[str, Any, Any]] = {
    "sum_neighbours": (
        "(Tensor codes, Tensor zero, Tensor scale, Tensor rest, Tensor indptr, Tensor indices) -> Tensor",
        _sum_neighbours,
        lambda codes, zero, scale, rest, indptr, _: scale.new_empty(
            len(indptr) - 1, codes.shape[1]
        ),
    ),
}
for _family, _library in operators.LIBRARIES.items():
    for _name, (_schema, _plain, _fake) in INT8_GRAPH_OPERATORS.items():
        operators.define(
            _library,
            _name,
            _schema,
            partial(_plain, getattr(torch.ops, _family)),
            _fake,
        )
for _execution in ("integer", "auto"):
    OP_EXECUTORS[_execution, "graph_linear"] = project
    OP_EXECUTORS[_execution, "aggregation"] = aggregate
