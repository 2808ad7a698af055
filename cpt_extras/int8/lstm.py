"""An LSTM on codes: its products with the input and with the hidden state, int8 x int8 -> int32.

The hidden state of a step has one range, and every row of the weight: their product has an integer form. So has that
of a gradient with the weight where the weight has one range. The gradient of the weight is a sum over steps, each of
which has ranges of its own: it is computed in float32, on the values of the codes that were kept.

Shapes: as in ``operations.recurrences``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_core.quantization.op_interception import OP_EXECUTORS
from cpt_core.quantization.precision import LayerPrecision
from cpt_extras.int8.execution import runs_int8
from cpt_extras.int8.layers import (
    GradientRounding,
    encode_operand,
    forbid_double_backward,
    linear_int8,
    propagate_nan,
)
from cpt_extras.int8.matmul import column_tables, multiply
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import operators
from cpt_extras.kernels.gemm_backend import MAX_INT8_TERMS
from cpt_extras.kernels.layer_state import (
    clips_operand,
    grad_rounding_args,
    is_calibrated,
    stored_range,
    track_steps,
)
from cpt_extras.kernels.lstm import ForwardArgs, run_backward
from cpt_extras.kernels.lstm_layer import input_ranges, observe_operands
from cpt_extras.operations.recurrences import LSTMDirection


def step_matmul(
    ops: Any, given: tuple[Tensor, ...], weight: Tensor, columns: tuple[Tensor, ...]
) -> tuple[Tensor, QuantizedTensor]:
    """Return the product of a step, and its left operand: given as codes (M, K), low, width and levels."""
    rounded = QuantizedTensor.from_codes(*given)
    return multiply(ops, rounded, weight, columns), rounded


def int8_fallback_reason(precision: LayerPrecision, hidden_size: int) -> str:
    """Return why no matmul of an LSTM runs on int8, or ""."""
    role = next(role for role in precision.quantizers if role.startswith("hidden_"))
    if precision.quantizers[role].grid != "per_tensor":
        return FallbackReason.SEVERAL_RANGES.describe(operands="hidden states")
    if 4 * hidden_size > MAX_INT8_TERMS:
        return FallbackReason.INT32_OVERFLOW.describe()
    return ""


def lstm(
    direction: LSTMDirection, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Run one direction of one layer on 8-bit integers, where these fit; None else."""
    hidden_size = direction.hidden_weight.shape[1]
    if not runs_int8(direction.precision, x) or int8_fallback_reason(
        direction.precision, hidden_size
    ):
        return None
    return run_int8(direction, x, h, c)


@torch.compiler.disable
def run_int8(
    direction: LSTMDirection, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one direction of one layer: x (N, I), h and c (B, H) -> hidden states (N, H), last h and c."""
    precision, role = direction.precision, f"hidden_{direction.name}"
    by_row = (
        precision.quantizers["grad"].granularity == "per_row"
    )  # a row belongs to one step
    parts = () if by_row else direction.step_sizes(x)
    encoded_input = _encoded_input(direction, x)
    x_gates = linear_int8(
        precision, x, direction.input_weight, direction.input_bias, encoded_input, parts
    )

    bias = direction.hidden_bias
    rounded_bias = None if bias is None else precision.quantize_operand("bias", bias)
    operands = x_gates, direction.hidden_weight, rounded_bias, h, c
    save = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in operands
    )
    steps = direction.steps, direction.sizes, direction.is_reverse
    y, last_h, last_c, ranges = _Recurrence.apply(
        *operands, precision, role, steps, save
    )
    if precision.training and precision.quantizers[role].running:
        track_steps(precision, role, *ranges)
    observe_operands(direction, x, h, y)
    return y, last_h, last_c


def _encoded_input(direction: LSTMDirection, x: Tensor) -> QuantizedTensor:
    """Return the codes of x (N, I), every step on its own range."""
    precision, role = direction.precision, f"input_{direction.name}"
    if is_calibrated(precision, role):
        return encode_operand(precision, role, x)
    precision.follow(x)
    x = x.detach()
    low, width = input_ranges(direction, x)
    low = propagate_nan(precision, role, x, low)
    return QuantizedTensor.quantize_on(
        x, low, width, precision.num_steps, None, clips_operand(precision, role)
    )


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_gates: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        h: Tensor,
        c: Tensor,
        p: LayerPrecision,
        role: str,
        steps: tuple[int, tuple[int, ...], bool],
        save: bool,
    ) -> tuple[Tensor, ...]:
        u = encode_operand(p, "weight", weight)
        low, width, filled = stored_range(p, role)
        column_codes, column_values = column_tables(u.t(), bias)
        *found, ranges, gates, codes, before, tanh = operators.active.lstm_forward(
            *ForwardArgs(
                x_gates,
                u.codes,
                None,
                h,
                c,
                *steps,
                save=save,
                levels=p.num_steps,
                granularity=p.quantizers[role].grid,
                low=low,
                width=width,
                filled=filled,
                grad_levels=None,
                grad_granularity="",
                key=None,
                advance=False,
                column_codes=column_codes,
                column_values=column_values,
            )
        )
        low, scale, half = QuantizedTensor.from_codes(
            codes, ranges[0], ranges[1], p.num_steps
        )[1:]
        ctx.save_for_backward(*u, low, scale, half, codes, gates, before, tanh)
        ctx.state, ctx.steps, ctx.gradient = h.shape, steps, GradientRounding(p)
        *ctx.noise, ctx.advance = grad_rounding_args(p, "grad", steps[0])
        ctx.mark_non_differentiable(ranges)
        ctx.set_materialize_grads(False)
        return *found, ranges

    @staticmethod
    @forbid_double_backward
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing allows no more
        u, (low, scale, half, codes, *kept) = QuantizedTensor(*saved[:4]), saved[4:]
        integer = ctx.gradient.encodes and u.has_one_scale
        weight, tables = (
            (u.codes, column_tables(u)) if integer else (u.dequantize(), ())
        )
        levels, *noise = ctx.noise
        noise_of_forward = None if levels is None else ctx.gradient.levels, *noise
        d_gates, behind, d_h, d_c = run_backward(
            operators.active,
            given[:3],
            ctx.state,
            weight,
            kept,
            ctx.steps,
            noise_of_forward,
            ctx.advance,
            tables,
        )
        of_w, of_b = ctx.needs_input_grad[1:3]
        d_weight = None
        if of_w:
            count, sizes, reverse = ctx.steps
            rows = sizes or [len(codes) // count] * count
            of_steps = ((v.flip(0) if reverse else v) for v in (low, scale))
            low, scale = (
                torch.cat([x.expand(n, 1) for x, n in zip(v, rows, strict=True)])
                for v in of_steps
            )
            d_weight = (
                behind.t() @ QuantizedTensor(codes, low, scale, half).dequantize()
            )
        return d_gates, d_weight, behind.sum(0) if of_b else None, d_h, d_c, *[None] * 4


for _execution in ("integer", "auto"):
    OP_EXECUTORS[_execution, "lstm"] = lstm
