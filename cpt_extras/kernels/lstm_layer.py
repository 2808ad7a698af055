"""Fused quantised LSTM: one direction of one layer as one operator, as an alternative to ``operations.recurrences``.

A step-by-step LSTM rounds and multiplies its input T times. Here all time steps of the input are one matmul, with a
range for every step, and the recurrence is one operator, ``cpt_extras.kernels.lstm``. Outputs are
equal up to the order of float32 sums; stochastic rounding of gradients draws other noise of the same distribution.

``torch.compile`` refuses to trace any ``nn.LSTM``; with ``torch._dynamo.config.allow_rnn = True`` it takes this one
into its graph, where a layer in one direction is one node, and one more in the backward pass.

Importing this module registers it.

Shapes: as in ``operations.recurrences``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpt_core.quantization.op_handlers import functions_named, register_handler
from cpt_core.quantization.rounding import Range
from cpt_extras.kernels.layer_state import (
    clips_operand,
    grad_rounding_args,
    is_calibrated,
    select_range,
    stored_range,
    track_steps,
)
from cpt_extras.kernels.lstm import ForwardArgs, recurrence
from cpt_extras.kernels.operators import fake_quantize, linear, range_of, round_in_range
from cpt_extras.operations.recurrences import LSTMDirection, lstm_handler


def run_fused(
    direction: LSTMDirection, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one direction of one layer: x (N, I), h and c (B, H) -> hidden states (N, H), last h and c."""
    precision, role = direction.precision, f"hidden_{direction.name}"
    input_weight = precision.quantize_operand("weight", direction.input_weight)
    hidden_weight = precision.quantize_operand("weight", direction.hidden_weight)
    input_bias, hidden_bias = (
        None if bias is None else precision.quantize_operand("bias", bias)
        for bias in (direction.input_bias, direction.hidden_bias)
    )
    product = linear(rounded_input(direction, x), input_weight, input_bias)
    x_gates = _with_rounded_gradient(direction, product)

    needs_gradient = any(
        t is not None and t.requires_grad
        for t in (x_gates, hidden_weight, hidden_bias, h, c)
    )
    save = torch.is_grad_enabled() and needs_gradient
    low, width, filled = stored_range(precision, role)
    grad_levels, grad_granularity, key, advance = grad_rounding_args(
        precision, "grad", direction.steps if save else 0
    )
    y, last_h, last_c, ranges = recurrence(
        ForwardArgs(
            x_gates,
            hidden_weight,
            hidden_bias,
            h,
            c,
            direction.steps,
            direction.sizes,
            reverse=direction.is_reverse,
            save=save,
            levels=precision.num_steps if precision.active_bits.activation else None,
            granularity=precision.quantizers[role].grid,
            low=low,
            width=width,
            filled=filled,
            grad_levels=grad_levels,
            grad_granularity=grad_granularity,
            key=key,
            advance=advance,
        )
    )
    if precision.training and precision.quantizers[role].running and ranges.numel():
        track_steps(precision, role, *ranges)
    observe_operands(direction, x, h, y)
    return y, last_h, last_c


def observe_operands(direction: LSTMDirection, x: Tensor, h: Tensor, y: Tensor) -> None:
    """Pass x (N, I), and the hidden states that entered the time steps, (N, H), to the recording callback.

    h (B, H) is the state before the first step, y (N, H) those after every step.
    """
    precision = direction.precision
    if precision.is_observed:
        rows = direction.step_sizes(x)
        precision.observe(f"input_{direction.name}", x, rows)
        precision.observe(
            f"hidden_{direction.name}", _hidden_before(direction, y, h), rows
        )


def rounded_input(direction: LSTMDirection, x: Tensor) -> Tensor:
    """Quantise x (N, I), every time step on its own range."""
    precision, role = direction.precision, f"input_{direction.name}"
    quantizer = precision.quantizers[role]
    if (
        not precision.active_bits.activation
        or x.numel() == 0
        or is_calibrated(precision, role)
    ):
        return precision.quantize_operand(role, x)
    has_own_ranges = precision.training or not quantizer.running
    if not direction.sizes and quantizer.granularity == "per_tensor" and has_own_ranges:
        # time steps become channels, each with a range
        steps_apart = x.unflatten(0, (direction.steps, -1))
        grid = "per_channel" + quantizer.grid.removeprefix("per_tensor")
        y, low, width = fake_quantize(steps_apart, precision.num_steps, grid)
        _track_input(direction, low.flatten(), width.flatten())
        return y.flatten(0, 1)
    low, width = input_ranges(direction, x.detach())
    return round_in_range(
        x,
        low,
        width,
        precision.num_steps,
        quantizer.grid,
        clip=clips_operand(precision, role),
    )


def input_ranges(direction: LSTMDirection, x: Tensor) -> Range:
    """Return the ranges of x (N, I), one per time step, expanded to its rows, (N, 1)."""
    precision, role = direction.precision, f"input_{direction.name}"
    quantizer = precision.quantizers[role]
    follows = quantizer.running and precision.training
    if not direction.sizes and quantizer.granularity == "per_tensor":
        low, width = range_of(x.unflatten(0, (direction.steps, -1)), "per_channel")
        if follows:
            _track_input(direction, low.flatten(), width.flatten())
        size = len(x) // direction.steps
        rows = [r.expand(-1, size, 1).reshape(-1, 1) for r in (low, width)]
        return select_range(precision, role, *rows)

    parts = x.split(direction.step_sizes(x))
    ranges = [range_of(part, quantizer.grid) for part in parts]
    lows, widths = zip(*ranges, strict=True)
    if follows:
        _track_input(direction, torch.stack(lows), torch.stack(widths))
    rows = [_expand_to_rows(values, parts) for values in (lows, widths)]
    return select_range(precision, role, *rows)


def _expand_to_rows(values: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """Return the value of every part of a tensor for each of its rows, (N, 1)."""
    pairs = zip(values, parts, strict=True)
    return torch.cat([value.expand(len(part), 1) for value, part in pairs])


def _track_input(direction: LSTMDirection, low: Tensor, width: Tensor) -> None:
    """Update the running range of the input with those of all time steps, (T,), in the order of the direction."""
    precision, role = direction.precision, f"input_{direction.name}"
    if precision.quantizers[role].running:
        low, width = (r.flip(0) if direction.is_reverse else r for r in (low, width))
        track_steps(precision, role, low, width)


def _with_rounded_gradient(direction: LSTMDirection, y: Tensor) -> Tensor:
    """Return the input matmul (N, 4 H) with its gradient quantised per time step."""
    precision = direction.precision
    # a row belongs to one time step: ranges per row need no split
    if precision.quantizers["grad"].granularity == "per_row":
        return precision.gradient("grad", y)
    return torch.cat(
        [precision.gradient("grad", part) for part in y.split(direction.step_sizes(y))]
    )


def _hidden_before(direction: LSTMDirection, y: Tensor, h: Tensor) -> Tensor:
    """Return the hidden states that enter the time steps, (N, H), from those after them (N, H) and the first (B, H)."""
    sizes = direction.step_sizes(y)
    outputs = y.split(sizes)
    if direction.is_reverse:  # sequences that end earlier begin with states of h
        later = zip(sizes, (*outputs[1:], h[:0]), strict=True)
        parts = [torch.cat([states, h[len(states) : n]]) for n, states in later]
    else:
        earlier = zip(outputs[:-1], sizes[1:], strict=True)
        parts = [h[: sizes[0]], *(states[:n] for states, n in earlier)]
    return torch.cat(parts)


register_handler(functions_named("lstm"), lstm_handler(run_fused), "input hx")
