"""Int8 LSTM: its matmuls with the input and with the hidden state, int8 x int8 -> int32.

The hidden state of a step has one range, and so has every row of the weight: their matmul has an integer form. So has
that of a gradient with the weight if the weight has one range. The weight gradient is a sum over time steps, which have
different ranges: it is computed in float32, on the dequantised hidden states.

Shapes: as in ``operations.recurrences``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_core.quantization.op_interception import OP_EXECUTORS
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.rounding import has_zero_point
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
    ops: Any, operand: tuple[Tensor, ...], weight: Tensor, columns: tuple[Tensor, ...]
) -> tuple[Tensor, QuantizedTensor]:
    """Return the matmul of one time step, float32, and its quantised first operand.

    Args:
        ops: family of operators, such as ``torch.ops.cpt``.
        operand: codes (M, K), low, width and number of steps of the first operand.
        weight: codes of the second operand, (K, N).
        columns: tables of its columns, see ``column_tables``.
    """
    quantized = QuantizedTensor.from_codes(*operand)
    return multiply(ops, quantized, weight, columns), quantized


def int8_fallback_reason(precision: LayerPrecision, hidden_size: int) -> str:
    """Return why no matmul of an LSTM has an int8 form, or ""."""
    role = next(role for role in precision.quantizers if role.startswith("hidden_"))
    grid = precision.quantizers[role].grid
    if has_zero_point(grid):
        return FallbackReason.STATE_ZERO_POINT.describe()
    if grid != "per_tensor":
        return FallbackReason.SEVERAL_RANGES.describe(operands="hidden states")
    if 4 * hidden_size > MAX_INT8_TERMS:
        return FallbackReason.INT32_OVERFLOW.describe()
    return ""


def lstm(
    direction: LSTMDirection, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Run one direction of one layer in int8; None if it is to be simulated."""
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
    # a row belongs to one time step: gradients with a range per row need not be split
    has_row_ranges = precision.quantizers["grad"].granularity == "per_row"
    parts = () if has_row_ranges else direction.step_sizes(x)
    input_codes = _encode_input(direction, x)
    x_gates = linear_int8(
        precision, x, direction.input_weight, direction.input_bias, input_codes, parts
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


def _encode_input(direction: LSTMDirection, x: Tensor) -> QuantizedTensor:
    """Quantise x (N, I) to codes, every time step on its own range."""
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
        *results, ranges, gates, codes, before, tanh = operators.active.lstm_forward(
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
        hidden = QuantizedTensor.from_codes(codes, ranges[0], ranges[1], p.num_steps)
        ctx.save_for_backward(*u, *hidden, gates, before, tanh)
        ctx.state, ctx.steps = h.shape, steps
        ctx.gradient_rounding = GradientRounding(p)
        ctx.rounding_args = grad_rounding_args(p, "grad", steps[0])
        ctx.mark_non_differentiable(ranges)
        ctx.set_materialize_grads(False)
        return *results, ranges

    @staticmethod
    @forbid_double_backward
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, as activation checkpointing allows
        u, hidden = QuantizedTensor(*saved[:4]), QuantizedTensor(*saved[4:8])
        tables: tuple[Tensor, ...] = ()
        if ctx.gradient_rounding.encodes and u.has_one_scale:
            weight, tables = u.codes, column_tables(u)
        else:
            weight = u.dequantize()
        levels, grid, key, advance = ctx.rounding_args
        if levels is not None:
            levels = ctx.gradient_rounding.num_steps
        d_gates, d_product, d_h, d_c = run_backward(
            operators.active,
            gradients[:3],
            ctx.state,
            weight,
            saved[8:],
            ctx.steps,
            (levels, grid, key),
            advance,
            tables,
        )
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        d_weight = d_bias = None
        if needs_weight:
            d_weight = d_product.t() @ _dequantize_steps(hidden, *ctx.steps)
        if needs_bias:
            d_bias = d_product.sum(0)
        return d_gates, d_weight, d_bias, d_h, d_c, None, None, None, None


def _dequantize_steps(
    hidden: QuantizedTensor, num_steps: int, sizes: tuple[int, ...], reverse: bool
) -> Tensor:
    """Return the values of the hidden states of all time steps, (N, H).

    Args:
        hidden: codes (N, H), with a range per time step in the order in which the steps are computed, (T,).
        num_steps: T.
        sizes: sequences of every time step; empty where all have the same number.
        reverse: whether the last time step is computed first.
    """
    rows = sizes or [len(hidden.codes) // num_steps] * num_steps

    def range_of_rows(steps: Tensor) -> Tensor:
        in_order = steps.flip(0) if reverse else steps
        parts = [x.expand(n, 1) for x, n in zip(in_order, rows, strict=True)]
        return torch.cat(parts)

    low, scale = range_of_rows(hidden.low), range_of_rows(hidden.scale)
    return hidden._replace(low=low, scale=scale).dequantize()


for _execution in ("integer", "auto"):
    OP_EXECUTORS[_execution, "lstm"] = lstm
