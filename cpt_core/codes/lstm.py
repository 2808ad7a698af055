"""An LSTM on codes: its products with the input and with the hidden state, int8 x int8 -> int32.

The hidden state of a step has one range, and every row of the weight: their product has an integer form. So has that
of a gradient with the weight where the weight has one range. The gradient of the weight is a sum over steps, each of
which has ranges of its own: it is computed in float32, on the values of the codes that were kept.

Shapes: as in ``quantization.lstm``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_core.codes.integer import column_tables, multiply
from cpt_core.codes.layers import GradientRounding, encoded, first_order, linear_on_codes, marked
from cpt_core.codes.quantized_tensor import QuantizedTensor
from cpt_core.kernels import operators
from cpt_core.kernels.lstm import Forward, gradients
from cpt_core.quantization.lstm import QuantLSTM
from cpt_core.quantization.precision import LayerPrecision


def step_product(
    ops: Any, given: tuple[Tensor, ...], weight: Tensor, columns: tuple[Tensor, ...]
) -> tuple[Tensor, QuantizedTensor]:
    """Return the product of a step, and its left operand: given as codes (M, K), low, width and levels."""
    rounded = QuantizedTensor.with_codes(*given)
    return multiply(ops, rounded, weight, columns), rounded


@torch.compiler.disable
def cell_on_codes(
    layer: QuantLSTM, cell: str, x: Tensor, steps: tuple[int, tuple[int, ...]], h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one direction of one layer: x (N, I), h and c (B, H) -> y (N, H), h and c."""
    p, role = layer.precision, f"hidden_{cell}"
    count, sizes = steps
    by_row = p.quantizers["grad"].granularity == "per_row"  # a row belongs to one step
    parts = () if by_row else sizes or (len(x) // count,) * count
    (w, b), (u, d) = (layer.weights(kind, cell, x.dtype) for kind in ("ih", "hh"))
    x_gates = linear_on_codes(p, x, w, b, _encoded_input(layer, cell, x, steps), parts)
    given = x_gates, u, None if d is None else p.operand("bias", d), h, c
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    y, h, c, ranges = _Recurrence.apply(*given, p, role, (count, sizes, cell.endswith("_reverse")), save)
    if layer.training and p.quantizers[role].running:
        p.track(role, *ranges)
    return y, h, c


def _encoded_input(layer: QuantLSTM, cell: str, x: Tensor, steps: tuple[int, tuple[int, ...]]) -> QuantizedTensor:
    """Return the codes of x (N, I), every step on its own range."""
    p, role = layer.precision, f"input_{cell}"
    if p.running_range(role) is not None:
        return encoded(p, role, x)
    p.follow(x)
    x = x.detach()
    low, width = layer.ranges(cell, x, steps)
    return QuantizedTensor.on(x, marked(p, role, x, low), width, p.levels, None, p.clips(role))


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_gates: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, c: Tensor,
        p: LayerPrecision, role: str, steps: tuple[int, tuple[int, ...], bool], save: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        u = encoded(p, "weight", weight)
        low, width, filled = p.stored_range(role)
        column_codes, column_values = column_tables(u.t(), bias)
        *found, ranges, gates, codes, before, tanh = operators.active.lstm_forward(*Forward(
            x_gates, u.codes, None, h, c, *steps, save=save,
            levels=p.levels, granularity=p.quantizers[role].grid, low=low, width=width, filled=filled,
            grad_levels=None, grad_granularity="", key=None, advance=False,
            column_codes=column_codes, column_values=column_values,
        ))  # fmt: skip
        low, scale, half = QuantizedTensor.with_codes(codes, ranges[0], ranges[1], p.levels)[1:]
        ctx.save_for_backward(*u, low, scale, half, codes, gates, before, tanh)
        ctx.state, ctx.steps, ctx.gradient = h.shape, steps, GradientRounding(p)
        *ctx.noise, ctx.advance = p.gradient_noise("grad", steps[0])
        ctx.mark_non_differentiable(ranges)
        ctx.set_materialize_grads(False)
        return *found, ranges

    @staticmethod
    @first_order
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing allows no more
        u, (low, scale, half, codes, *kept) = QuantizedTensor(*saved[:4]), saved[4:]
        integer = ctx.gradient.encodes and u.one_step
        weight, tables = (u.codes, column_tables(u)) if integer else (u.dequantize(), ())
        d_gates, behind, d_h, d_c = gradients(
            operators.active, given[:3], ctx.state, weight, kept, ctx.steps, ctx.noise, ctx.advance, tables
        )
        of_w, of_b = ctx.needs_input_grad[1:3]
        d_weight = None
        if of_w:
            count, sizes, reverse = ctx.steps
            rows = sizes or [len(codes) // count] * count
            of_steps = ((v.flip(0) if reverse else v) for v in (low, scale))
            low, scale = (torch.cat([x.expand(n, 1) for x, n in zip(v, rows, strict=True)]) for v in of_steps)
            d_weight = behind.t() @ QuantizedTensor(codes, low, scale, half).dequantize()
        return d_gates, d_weight, behind.sum(0) if of_b else None, d_h, d_c, *[None] * 4
