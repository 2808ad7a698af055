"""Graph convolutions on codes: their products, and with Q-Agg the sums over neighbours, forward and backward.

A sum has an integer form where all that enters it has one step: int8 codes are added in int32, and a multiple of the
degree makes values of the sum. The authors' range per node rules that out for features, not for gradients, which have
one range; ``QuantConfig.with_shared_steps()`` allows both. What has no integer form is the simulation.

The operators at the end stand each for a chain of plain operations and give the same bits; on a CPU, C++ runs them in
one pass (``graph.h``).

>>> x = QuantizedTensor.of(torch.tensor([[0.0, 1.0], [3.0, 2.0]]), 2, "per_tensor")
>>> total(Graph(torch.tensor([0, 2]), torch.tensor([0, 1]), num_src=2), x).tolist()
[[3.0, 3.0]]

Shapes: N nodes (S sources, D destinations of a block), F features, I inputs, O outputs, E edges; scales (N, 1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpt_core.codes.layers import GradientRounding, Operand, encoded, first_order, product, saved_operands, sums, values
from cpt_core.codes.quantized_tensor import QuantizedTensor
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import Keep, Tail
from cpt_core.kernels import operators
from cpt_core.quantization.graph_layers import ONE_RANGE, WHOLE, GraphPrecision

LARGEST_DEGREE = 1 << 24  # 2**24 codes, of 128 at most, are summed in int32
PART = 1 << 24  # numbers that the plain sum over neighbours gathers at a time


@torch.compiler.disable
def product_on_codes(
    p: GraphPrecision, x: Tensor, scale: Tensor | None, weight: Tensor, keep: Keep, linear: bool, tail: Tail | None
) -> Tensor:
    """Return ``(x * scale) @ weight`` and what follows it; arguments as those of ``Precision.product``."""

    def encode() -> QuantizedTensor:
        return encoded(p, "input", x if scale is None else x * scale)

    quantizer = p.quantizers["input"]
    # where there is a range to follow, nothing is kept
    codes = encode if quantizer.running else lambda: keep(("codes", quantizer, p.now.formats.activation), encode)
    bias = None if tail is None or tail.bias is None else p.operand("bias", tail.bias)
    return _Product.apply(x, weight, bias, codes, scale, linear, After(p, tail))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, codes: Callable[[], QuantizedTensor],
        scale: Tensor | None, linear: bool, after: After,
    ) -> Tensor:  # fmt: skip
        a, w = codes(), encoded(after.precision, "weight", weight)
        ctx.save_for_backward(*a, *w)
        ctx.scale, ctx.linear, ctx.after = scale, linear, after
        return after.forward(product(a, w.t() if linear else w), bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, w = saved_operands(ctx)
        of_x, of_w = ctx.needs_input_grad[:2]
        g, of_bias = ctx.after.backward(gradient, of_x or of_w)
        error = product(g, w if ctx.linear else w.t()) if of_x else None
        return (
            error if error is None or ctx.scale is None else error.mul_(ctx.scale),
            (product(g.t(), a) if ctx.linear else product(a.t(), g)) if of_w else None,
            of_bias,
            *[None] * 4,
        )


@torch.compiler.disable
def sum_on_codes(
    p: GraphPrecision, graph: Graph, x: Tensor, scale: Tensor | None, reduce: str, tail: Tail | None
) -> Tensor:
    """Return the sum over neighbours and what follows it; arguments as those of ``Precision.neighbour_sum``."""
    bias = None if tail is None or tail.bias is None else p.operand("bias", tail.bias)
    return _Sum.apply(x, bias, graph, scale, reduce == "mean", After(p, tail))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, graph: Graph, scale: Tensor | None, mean: bool, after: After
    ) -> Tensor:
        ctx.graph, ctx.scale, ctx.mean, ctx.after = graph, scale, mean, after
        p = after.precision
        if p.quantizers["aggregation"].grid in ONE_RANGE:
            h = total(graph, encoded(p, "aggregation", x if scale is None else x * scale))
        else:
            h = graph.aggregate(p.scaled_operand("aggregation", x, scale))
        return after.forward(h.div_(_divisors(graph)) if mean else h, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_x = ctx.needs_input_grad[0]
        g, of_bias = ctx.after.backward(gradient, of_x)
        error = None
        if of_x:
            error = total(ctx.graph.transposed, values(g) / _divisors(ctx.graph) if ctx.mean else g)
            error = error if ctx.scale is None else error.mul_(ctx.scale)
        return error, of_bias, *[None] * 4


def total(graph: Graph, x: Operand) -> Tensor:
    """Return the sum over every node's in-neighbours, (D, F) float32: of codes, in int32, where those have one step.

    ValueError for codes, where more edges than ``LARGEST_DEGREE`` lead to a node.
    """
    if not (isinstance(x, QuantizedTensor) and x.one_step):
        return graph.aggregate(values(x))
    if graph.num_edges > LARGEST_DEGREE and graph.largest_in_degree > LARGEST_DEGREE:
        raise ValueError(
            f"a sum of codes has at most {LARGEST_DEGREE:,} terms, {graph.largest_in_degree:,} edges lead to a node; "
            "take execution 'simulated'"
        )
    zero, rest, scale = (v.reshape(()) for v in (x.zero, x.rest, x.scale))
    return operators.active.sum_neighbours(x.codes, zero, scale, rest, graph.indptr, graph.indices)


def _divisors(graph: Graph) -> Tensor:
    return graph.in_degrees.clamp_min(1).unsqueeze(1)


class After:
    """What follows a product or a sum h, ``h * scale + bias`` with both terms rounded, and what comes back to h."""

    def __init__(self, precision: GraphPrecision, tail: Tail | None) -> None:
        self.precision, self.rounding = precision, GradientRounding(precision)
        self.scale_of = (lambda h: None) if tail is None else tail.scale
        self.biased = tail is not None and tail.bias is not None
        self.scale: Tensor | None = None

    def forward(self, h: Tensor, bias: Tensor | None) -> Tensor:
        """Return what follows h, (N, F), which may be changed; the bias is rounded already."""
        self.scale = self.scale_of(h)
        if bias is None:
            return h if self.scale is None else h.mul_(self.scale)
        p = self.precision
        if p._in_one_pass("input", h):
            return operators.active.scale_round_add(h, self.scale, bias, p.levels, p.quantizers["input"].grid)
        return p.operand("input", h if self.scale is None else h * self.scale) + bias

    def backward(self, gradient: Tensor, further: bool) -> tuple[Operand, Tensor | None]:
        """Return the gradient of h, rounded if it goes ``further``, and that of the bias."""
        g, of_bias = gradient, None
        if gradient.numel() == 0:
            return gradient, gradient.sum(0) if self.biased else None
        if self.biased:
            p = self.precision
            quantizer = p.quantizers["grad"]
            if further and self.rounding.encodes and quantizer.grid in WHOLE:  # in two passes
                key = p.noise_key if quantizer.rounding == "stochastic" else None
                found = operators.active.round_scale_encode(gradient, self.scale, p.grad_levels, key)
                codes, low, width, of_bias = found
                if p.observed:
                    self._observe_both(gradient, key)
                if key is not None:
                    key.add_(2)
                return QuantizedTensor.with_codes(codes, low, width, p.grad_levels), of_bias
            once = self.rounding(gradient)
            g, of_bias = values(once), sums(once)
        if not further:
            return g, of_bias
        return self.rounding(g if self.scale is None else g * self.scale), of_bias

    def _observe_both(self, gradient: Tensor, key: Tensor | None) -> None:
        """Show both gradients that ``round_scale_encode`` rounds, the second when the key is that of its noise."""
        p = self.precision
        p.observe("grad", gradient)
        once = operators.fake_quantize(gradient, p.grad_levels, "per_tensor", key)[0]
        if key is not None:
            key.add_(1)
        p.observe("grad", once if self.scale is None else once * self.scale)
        if key is not None:
            key.sub_(1)


# --- the operators ----------------------------------------------------------------------------------------------------


def _round_scale_encode(
    ops: Any, gradient: Tensor, scale: Tensor | None, levels: Tensor, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what ``round_scale_round`` does, the gradient of ``x`` as codes; levels of at most 8 bits."""
    low, width = ops.range(gradient, "per_tensor")
    codes = ops.encode(gradient, low, width, levels, key, key is not None)
    rounded, totals, rows = QuantizedTensor.with_codes(codes, low, width, levels), codes.sum(0), len(codes)
    once = rounded.dequantize() if scale is None else rounded.dequantize() * scale
    whole = (totals + rows * rounded.half.long()).double()  # exact
    of_bias = (whole * rounded.scale.double() + rows * low.double()).float()
    low, width = ops.range(once, "per_tensor")
    return ops.encode(once, low, width, levels, None if key is None else key + 1, key is not None), low, width, of_bias


def _sum_neighbours(
    _: Any, codes: Tensor, zero: Tensor, scale: Tensor, rest: Tensor, indptr: Tensor, indices: Tensor
) -> Tensor:
    rows, degrees = len(indptr) - 1, indptr.diff()
    totals = torch.zeros(rows, codes.shape[1], dtype=torch.int32, device=codes.device)
    nodes = torch.arange(rows, device=codes.device).repeat_interleave(degrees, output_size=len(indices))
    edges = max(1, PART // max(1, codes.shape[1]))
    for start in range(0, len(indices), edges):
        part = slice(start, start + edges)
        totals.index_add_(0, nodes[part], codes[indices[part]].int())
    degrees = degrees.long().unsqueeze(1)
    return scale * (totals - degrees * zero.long()).float() + degrees.float() * rest


OPERATORS: dict[str, tuple[str, Any, Any]] = {  # schema, what it does with and without numbers
    "round_scale_encode": (
        "(Tensor gradient, Tensor? scale, Tensor levels, Tensor? key) -> (Tensor, Tensor, Tensor, Tensor)",
        _round_scale_encode,
        lambda g, *_: (torch.empty_like(g, dtype=torch.int8), *(g.new_empty(size) for size in ((), (), g.shape[1:]))),
    ),
    "sum_neighbours": (
        "(Tensor codes, Tensor zero, Tensor scale, Tensor rest, Tensor indptr, Tensor indices) -> Tensor",
        _sum_neighbours,
        lambda codes, zero, scale, rest, indptr, _: scale.new_empty(len(indptr) - 1, codes.shape[1]),
    ),
}
for _family, _library in operators.LIBRARIES.items():
    for _name, (_schema, _plain, _fake) in OPERATORS.items():
        operators.define(_library, _name, _schema, partial(_plain, getattr(torch.ops, _family)), _fake)
