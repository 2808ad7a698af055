"""Recurrence of a quantised LSTM as two operators, forward and backward, and their plain implementation.

An operator runs all time steps of one layer in one direction, given the part of the gates that comes from the input:

    gates_t = x_gates_t + q(h_{t-1}) U' + b        i, f, o = sigmoid(gates)   g = tanh(gates)
    c_t = f c_{t-1} + i g                          h_t = o tanh(c_t)

The gradient is written out, so that a step takes a dozen operations, and the weight gradient is one matmul at the end.
The gradient of h U' is quantised per time step, as a step-by-step program does.

If the weight is given as codes, with the tables that ``integer_reference.dequantize_matmul_`` takes for the columns of
a matmul, matmuls run in int8 and hidden states are saved as codes.

Shapes: T steps, B sequences, H hidden; N = B_0 + ... + B_{T-1} rows, step after step, as in a ``PackedSequence``. The
sequences of a step never grow in number: a ``PackedSequence`` is sorted by length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpt_core.quantization.fake_quantize import forward_steps, recorded_steps
from cpt_core.quantization.rounding import clips
from cpt_extras.kernels import gemm_backend, operators
from cpt_extras.kernels.grids import is_plain, parse_grid
from cpt_extras.optional_libraries import import_optional

STEP_ARGS = "SymInt steps, SymInt[] sizes, bool reverse"
GRADIENT_ARGS = "Tensor? grad_levels, str grad_granularity, Tensor? key"
INT8_STEP_MATMUL = (
    "cpt_extras.int8.lstm:step_matmul"  # opened where codes are multiplied
)
COLUMN_TABLE_ARGS = "Tensor? column_codes=None, Tensor? column_values=None"
SCHEMAS = {
    "lstm_forward": "(Tensor x_gates, Tensor weight, Tensor? bias, Tensor h0, Tensor c0, "
    f"{STEP_ARGS}, Tensor? levels, str granularity, Tensor? low, Tensor? width, Tensor? filled, bool save, "
    f"{GRADIENT_ARGS}, bool advance, {COLUMN_TABLE_ARGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "lstm_backward": "(Tensor d_out, Tensor d_h, Tensor d_c, Tensor weight, Tensor gates, Tensor before, "
    f"Tensor tanh_c, {STEP_ARGS}, {GRADIENT_ARGS}, {COLUMN_TABLE_ARGS}) -> (Tensor, Tensor, Tensor, Tensor)",
}


class ForwardArgs(NamedTuple):
    """Arguments of ``lstm_forward``, in its order.

    Attributes:
        x_gates: part of the gates that comes from the input, (N, 4 H).
        weight: (4 H, H), quantised, or its codes.
        bias: (4 H,), quantised, or None; with codes it is in the tables.
        h0: (B, H).
        c0: (B, H).
        steps: T.
        sizes: sequences of every time step; empty where there are N / T in each.
        reverse: whether to run from the last time step to the first.
        levels: number of steps 2**q - 1 of the hidden state's grid; None leaves the hidden state unrounded.
        granularity: granularity or grid (``kernels.grids``) of the hidden state; codes are always on the affine grid.
        low: minimum of a stored range, used for all time steps; values outside of it are clipped. With codes, where NaN
            has none, a NaN makes the whole hidden state of a time step NaN.
        width: width of the stored range.
        filled: number on the device; the stored range is used only if it is above 0. None uses it always.
        save: whether to return what the backward pass needs; else empty tensors.
        grad_levels: for the backward pass, as the next two; see ``BackwardArgs``.
        grad_granularity: granularity or grid of the gradient.
        key: noise key of the gradient.
        advance: whether the backward pass adds 1 to the key for every time step.
        column_codes: first table of the columns of h U', if ``weight`` holds codes; see
            ``integer_reference.dequantize_matmul_``.
        column_values: second table.
    """

    x_gates: Tensor
    weight: Tensor
    bias: Tensor | None
    h0: Tensor
    c0: Tensor
    steps: int
    sizes: Sequence[int]
    reverse: bool
    levels: Tensor | None
    granularity: str
    low: Tensor | None
    width: Tensor | None
    filled: Tensor | None
    save: bool
    grad_levels: Tensor | None
    grad_granularity: str
    key: Tensor | None
    advance: bool
    column_codes: Tensor | None = None
    column_values: Tensor | None = None


class BackwardArgs(NamedTuple):
    """Arguments of ``lstm_backward``, in its order.

    Attributes:
        d_out: gradient of the hidden states, (N, H).
        d_h: gradient of the last h, (B, H).
        d_c: gradient of the last c, (B, H).
        weight: as in ``ForwardArgs``.
        gates: as ``forward`` returned them, (N, 4 H).
        before: cell states before every time step, (N, H).
        tanh_c: tanh of the cell states, (N, H).
        steps: as in ``ForwardArgs``, like the next two.
        sizes: sequences of every time step.
        reverse: whether the last time step was computed first.
        levels: number of steps 2**q - 1 of the grid of the gradient of h U'; None leaves it unrounded.
        granularity: its granularity or grid, per time step.
        key: its noise key in the time step that is computed first, one more in every further one; None rounds half to
            even.
        column_codes: first table of the columns of the gradient's matmul, if ``weight`` holds codes.
        column_values: second table.
    """

    d_out: Tensor
    d_h: Tensor
    d_c: Tensor
    weight: Tensor
    gates: Tensor
    before: Tensor
    tanh_c: Tensor
    steps: int
    sizes: Sequence[int]
    reverse: bool
    levels: Tensor | None
    granularity: str
    key: Tensor | None
    column_codes: Tensor | None = None
    column_values: Tensor | None = None


class _HiddenOperand(NamedTuple):
    """Hidden state that enters a time step, as an operand.

    Attributes:
        operand: rounded values, or codes.
        range: minimum and width of its range; None where it is not rounded.
        reports_range: whether the range is a result of ``forward``.
    """

    operand: Tensor
    range: tuple[Tensor, Tensor] | None
    reports_range: bool


def forward(ops: Any, *arguments: Any) -> tuple[Tensor, ...]:
    """Run all time steps.

    Args:
        ops: family of operators that quantise, such as ``torch.ops.cpt``.
        arguments: those of ``ForwardArgs``.

    Returns:
        Hidden states (N, H), and the last h and c (B, H). The ranges of the hidden state, (2, T) in the order in which
        the steps are computed, if it has one of its own per step, or with codes; else empty. Then gates (N, 4 H),
        quantised hidden states or their codes, cell states before the step, and tanh(c), each (N, H).
    """
    args = ForwardArgs(*arguments)
    hidden_size = args.weight.shape[1]
    outputs: list[Tensor] = []
    ranges: list[tuple[Tensor, Tensor]] = []
    # gates, operands, cell states before the step, tanh(c)
    saved: list[list[Tensor]] = [[], [], [], []]
    h, c = args.h0.contiguous(), args.c0.contiguous()
    for (x_gates,) in _split_steps(args.steps, args.sizes, args.reverse, args.x_gates):
        size = len(x_gates)
        hidden = _quantize_hidden(ops, args, h[:size])
        if hidden.range is not None and hidden.reports_range:
            ranges.append(hidden.range)

        gates = _multiply_hidden(ops, args, hidden).add_(x_gates)
        by_gate = gates.view(size, 4, hidden_size)
        by_gate[:, :2].sigmoid_()
        by_gate[:, 2].tanh_()
        by_gate[:, 3].sigmoid_()
        i, f, g, o = by_gate.unbind(1)
        cell = (c[:size] * f).add_(i * g)
        tanh = torch.tanh(cell)
        outputs.append(o * tanh)

        if args.save:
            values = gates, hidden.operand, c[:size], tanh
            for column, value in zip(saved, values, strict=True):
                column.append(value)
        h, c = _update_rows(h, outputs[-1]), _update_rows(c, cell)

    all_ranges = args.x_gates.new_empty((2, 0), dtype=torch.float32)
    if ranges and parse_grid(args.granularity)[0] == "per_tensor":
        lows, widths = zip(*ranges, strict=True)
        all_ranges = torch.stack([torch.stack(lows), torch.stack(widths)])
    all_saved = [
        _concat_steps(column, args.reverse) if args.save else args.x_gates.new_empty(0)
        for column in saved
    ]
    return _concat_steps(outputs, args.reverse), h, c, all_ranges, *all_saved


def _quantize_hidden(ops: Any, args: ForwardArgs, hidden: Tensor) -> _HiddenOperand:
    """Quantise the hidden state that enters a time step, (B_t, H)."""
    if args.levels is None or not hidden.numel():
        return _HiddenOperand(hidden, None, reports_range=False)

    stored = _stored_hidden_range(ops, args, hidden)
    if args.column_codes is not None:
        low, width = stored or ops.range(hidden, args.granularity)
        is_clipped = stored is not None
        codes = ops.encode(hidden, low, width, args.levels, None, is_clipped)
        return _HiddenOperand(codes, (low, width), reports_range=True)
    if stored is None:
        rounded, low, width = ops.fake_quantize(
            hidden, args.levels, args.granularity, None
        )
        return _HiddenOperand(rounded, (low, width), reports_range=True)
    if is_plain(args.granularity):
        rounded = ops.round_to_grid(hidden, *stored, args.levels, None, True)
    else:
        rounded = ops.round_in_range(
            hidden, *stored, args.levels, args.granularity, None, True
        )
    return _HiddenOperand(rounded, stored, reports_range=False)


def _stored_hidden_range(
    ops: Any, args: ForwardArgs, hidden: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return minimum and width of the stored range; None if the hidden state has a range of its own."""
    if args.low is None or args.width is None:
        return None
    low, width = args.low, args.width
    has_codes = args.column_codes is not None
    if args.filled is None and not has_codes:
        return low, width

    own_low, own_width = ops.range(hidden, args.granularity)
    if args.filled is not None:
        low = torch.where(args.filled > 0, low, own_low)
        width = torch.where(args.filled > 0, width, own_width)
    if has_codes:  # NaN has no code: the range is NaN then
        low = torch.where(own_low.isnan(), own_low, low)
    return low, width


def _multiply_hidden(ops: Any, args: ForwardArgs, hidden: _HiddenOperand) -> Tensor:
    """Return h U' + b of a time step, (B_t, 4 H)."""
    if args.column_codes is None or args.levels is None:
        return gemm_backend.execute(hidden.operand, args.weight, args.bias)
    step_matmul = import_optional(INT8_STEP_MATMUL, "")
    operand = hidden.operand, *(hidden.range or ()), args.levels
    tables = args.column_codes, args.column_values
    product: Tensor = step_matmul(ops, operand, args.weight.t(), tables)[0]
    return product


def _update_rows(state: Tensor, rows: Tensor) -> Tensor:
    """Return a state (B, H) with its first rows replaced: sequences that have ended, or not begun, keep theirs."""
    return rows if len(rows) == len(state) else torch.cat([rows, state[len(rows) :]])


def backward(ops: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the chain rule from the last time step to the first.

    Args:
        ops: family of operators that quantise, such as ``torch.ops.cpt``.
        arguments: those of ``BackwardArgs``.

    Returns:
        The gradients of ``x_gates`` and of h U', (N, 4 H), the second quantised (empty if it equals the first), and
        those of h0 and c0, (B, H).
    """
    args = BackwardArgs(*arguments)
    hidden_size = args.weight.shape[1]
    d_h, d_c = args.d_h.contiguous(), args.d_c.contiguous()
    f = args.gates.view(-1, 4, hidden_size)[:, 1]
    slopes, tanh_slopes = _gate_slopes(args, hidden_size)
    d_gates = torch.empty_like(args.gates)
    d_product = d_gates if args.levels is None else torch.empty_like(args.gates)
    keys: Sequence[Tensor | None] = [None] * args.steps
    if args.key is not None:
        keys = (args.key + torch.arange(args.steps, device=args.key.device)).unbind()

    tensors = args.d_out, slopes, tanh_slopes, f, d_gates, d_product
    parts = _split_steps(args.steps, args.sizes, not args.reverse, *tensors)
    for part, key in zip(parts, keys, strict=True):
        d_out, slope, tanh_slope, forget, step_gates, step_product = part
        size = len(step_gates)
        dh = d_out + d_h[:size]
        dc = torch.addcmul(d_c[:size], dh, tanh_slope)
        by_gate = step_gates.view(size, 4, hidden_size)
        torch.mul(slope[:, :3], dc.unsqueeze(1), out=by_gate[:, :3])
        torch.mul(slope[:, 3], dh, out=by_gate[:, 3])
        d_hidden = _multiply_gradient(ops, args, step_gates, step_product, key)
        d_h, d_c = _update_rows(d_h, d_hidden), _update_rows(d_c, dc * forget)

    if args.levels is None:
        d_product = args.gates.new_empty(0)
    return d_gates, d_product, d_h, d_c


def _gate_slopes(args: BackwardArgs, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the chain rule for all time steps at once.

    Returns:
        Derivatives of c by the arguments of gates i, f and g, and of h by that of o, (N, 4, H); derivative of h by c,
        (N, H).
    """
    by_gate = args.gates.view(-1, 4, hidden_size)
    i, _, g, o = by_gate.unbind(1)
    slopes = by_gate * (1 - by_gate)  # of the sigmoids
    slopes[:, 2] = 1 - g * g
    slopes[:, 0] *= g
    slopes[:, 1] *= args.before
    slopes[:, 2] *= i
    slopes[:, 3] *= args.tanh_c
    return slopes, o * (1 - args.tanh_c * args.tanh_c)


def _multiply_gradient(
    ops: Any, args: BackwardArgs, d_gates: Tensor, out: Tensor, key: Tensor | None
) -> Tensor:
    """Quantise the gradient of the gates of a time step into ``out``, and return the gradient of h, (B_t, H).

    Without ``levels``, ``out`` is ``d_gates``.
    """
    if args.levels is None or args.column_codes is None:
        if args.levels is not None and d_gates.numel():
            out.copy_(ops.fake_quantize(d_gates, args.levels, args.granularity, key)[0])
        return gemm_backend.execute(out, args.weight.t())

    low, width = ops.range(d_gates, args.granularity)
    is_clipped = clips(args.granularity, key is not None)
    codes = ops.encode(d_gates, low, width, args.levels, key, is_clipped)
    step_matmul = import_optional(INT8_STEP_MATMUL, "")
    operand = codes, low, width, args.levels
    tables = args.column_codes, args.column_values
    d_hidden, quantized = step_matmul(ops, operand, args.weight, tables)
    out.copy_(quantized.dequantize())
    result: Tensor = d_hidden
    return result


def _split_steps(
    steps: int, sizes: Sequence[int], reverse: bool, *tensors: Tensor
) -> list[tuple[Tensor, ...]]:
    """Return the rows of every time step of several tensors, from the last step to the first if ``reverse``."""
    sizes = list(sizes) or [len(tensors[0]) // steps] * steps
    parts = list(zip(*(tensor.split(sizes) for tensor in tensors), strict=True))
    return parts[::-1] if reverse else parts


def _concat_steps(parts: list[Tensor], reverse: bool) -> Tensor:
    return torch.cat(parts[::-1] if reverse else parts)


def recurrence(args: ForwardArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the time steps of a quantised LSTM, and return the first four results of ``forward``."""
    ops = operators.active
    if torch.compiler.is_compiling():
        y, h, c, ranges, *_ = _Recurrence.apply(ops, *args)
    else:
        y, h, c, ranges, *_ = ops.lstm_forward(*args)
    return y, h, c, ranges


# --- registration -----------------------------------------------------------------------------------------------------


def _register(library: torch.library.Library, family: str) -> None:
    """Define the operators in a family, with their plain implementation, fake tensors and gradient."""
    ops = getattr(torch.ops, family)
    for name, plain, fake, gradient, setup in (
        ("lstm_forward", forward, _fake_forward, partial(_gradient, ops), _setup),
        ("lstm_backward", backward, _fake_backward, _refuse_double_backward, None),
    ):
        run = partial(plain, ops)
        operators.MATMUL_OPERATORS[f"{family}::{name}"] = run
        operators.define(library, name, SCHEMAS[name], run, fake, gradient, setup)


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return empty tensors of the shapes of ``forward``."""
    args = ForwardArgs(*arguments)
    x_gates, rows = args.x_gates, len(args.x_gates)
    hidden_size = args.weight.shape[1]

    is_rounded = args.levels is not None and x_gates.numel() > 0
    has_one_range = parse_grid(args.granularity)[0] == "per_tensor"
    returns_ranges = is_rounded and has_one_range and args.low is None
    num_ranges = args.steps if returns_ranges else 0

    gates_shape = tuple(x_gates.shape) if args.save else (0,)
    hidden_shape = (rows, hidden_size) if args.save else (0,)
    saved_shapes = gates_shape, hidden_shape, hidden_shape, hidden_shape
    return (
        x_gates.new_empty((rows, hidden_size)),
        torch.empty_like(args.h0, memory_format=torch.contiguous_format),
        torch.empty_like(args.c0, memory_format=torch.contiguous_format),
        x_gates.new_empty((2, num_ranges), dtype=torch.float32),
        *(x_gates.new_empty(shape) for shape in saved_shapes),
    )


def _fake_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors of the shapes of ``backward``."""
    args = BackwardArgs(*arguments)
    gates = args.gates
    d_product = gates.new_empty(0) if args.levels is None else torch.empty_like(gates)
    empty = partial(torch.empty_like, memory_format=torch.contiguous_format)
    return torch.empty_like(gates), d_product, empty(args.d_h), empty(args.d_c)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what the backward pass needs; the setup of an operator's context."""
    args = ForwardArgs(*inputs)
    ctx.steps = args.steps, args.sizes, args.reverse
    ctx.has_bias = args.bias is not None
    ctx.state = args.h0.shape
    # saved as attributes: they may change in place before the backward pass, which saved tensors must not
    ctx.rounding = args.grad_levels, args.grad_granularity, args.key
    ctx.advance = args.advance
    ctx.filled = recorded_steps(args.grad_levels)
    ctx.save_for_backward(args.weight, *output[4:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])


def _gradient(
    ops: Any, ctx: Any, d_out: Any, d_h: Any, d_c: Any, *_: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments of ``lstm_forward``."""
    weight, gates, operands, before, tanh_c = ctx.saved_tensors
    levels, granularity, key = ctx.rounding
    if levels is not None:
        levels = forward_steps(levels, ctx.filled)
    arguments = (
        (d_out, d_h, d_c),
        ctx.state,
        weight,
        (gates, before, tanh_c),
        ctx.steps,
        (levels, granularity, key),
        ctx.advance,
    )
    d_weight = d_bias = None
    # compilers trace this under the autocast of the forward pass
    with torch.autocast(weight.device.type, enabled=False):
        d_gates, d_product, d_h, d_c = run_backward(ops, *arguments)
        if ctx.needs_input_grad[1]:
            d_weight = gemm_backend.linear(ops, d_product.t(), operands.t())
    if ctx.has_bias and ctx.needs_input_grad[2]:
        d_bias = d_product.sum(0)
    no_gradients = [None] * (len(ctx.needs_input_grad) - 5)
    return d_gates, d_weight, d_bias, d_h, d_c, *no_gradients


class _Recurrence(torch.autograd.Function):
    """The operator with its gradient for compilers, which let the backward pass of a Function change the noise key."""

    @staticmethod
    def forward(ctx: Any, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = ops.lstm_forward(*args)
        ctx.ops = ops
        _setup(ctx, args, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return None, *_gradient(ctx.ops, ctx, *gradients)


def run_backward(
    ops: Any,
    gradients: Sequence[Tensor | None],
    state: Sequence[int],
    weight: Tensor,
    saved: Sequence[Tensor],
    steps: tuple[Any, ...],
    rounding: tuple[Any, ...],
    advance: bool,
    tables: Sequence[Tensor | None] = (None,) * 2,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run ``lstm_backward`` with zeros for missing gradients, and advance the noise key.

    Args:
        ops: family of operators.
        gradients: those of the hidden states and of the last h and c; None where there is none.
        state: shape of a state, (B, H).
        weight: as in ``ForwardArgs``.
        saved: ``gates``, ``before`` and ``tanh_c`` of ``BackwardArgs``.
        steps: ``steps``, ``sizes`` and ``reverse``.
        rounding: ``levels``, ``granularity`` and ``key``.
        advance: whether the number of time steps is added to the key.
        tables: ``column_codes`` and ``column_values``.

    Returns:
        The results of ``backward``, where the gradient of h U' is never empty.
    """
    gates, before, _ = saved
    levels, _, key = rounding
    d_out, d_h, d_c = gradients
    if d_out is None:
        d_out = torch.zeros_like(before)
    if d_h is None:
        d_h = gates.new_zeros(state)
    if d_c is None:
        d_c = gates.new_zeros(state)
    d_gates, d_product, d_h, d_c = ops.lstm_backward(
        d_out, d_h, d_c, weight, *saved, *steps, *rounding, *tables
    )
    if levels is None:
        d_product = d_gates
    elif advance and key is not None and gates.numel():
        key.add_(steps[0])
    return d_gates, d_product, d_h, d_c


def _refuse_double_backward(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "trying to differentiate twice: the quantised LSTM has no gradients of gradients"
    )


for _family, _library in operators.LIBRARIES.items():
    _register(_library, _family)
