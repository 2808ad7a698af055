"""The recurrence of a quantised LSTM as two operators, forward and backward, and their plain backend.

All steps of one layer in one direction, from the input part of the gates on:

    gates_t = x_gates_t + q(h_{t-1}) U' + b        i, f, o = sigmoid(gates)   g = tanh(gates)
    c_t = f c_{t-1} + i g                          h_t = o tanh(c_t)

The gradient is written out, so that a step takes a dozen operations, and the weight gradient is one product at the end.
The gradient behind the product with h is quantised per step, as a step-by-step program does.

Given the weight's codes, and the tables that ``integer_reference.affine`` takes of the columns of a product, the
products with it are those of codes, and what is kept of the hidden states are codes.

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
from cpt_extras.kernels.grids import parse_grid
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
    """What ``lstm_forward`` takes, in its order."""

    x_gates: Tensor  # (N, 4 H)
    weight: Tensor  # (4 H, H), quantised; or its codes
    bias: Tensor | None  # (4 H,), quantised; on codes it is in the tables
    h0: Tensor  # (B, H)
    c0: Tensor  # likewise
    steps: int  # T
    sizes: Sequence[int]  # sequences of every step; empty where there are N / T in each
    reverse: bool  # from the last step to the first
    levels: Tensor | None  # n = 2**q - 1 of the hidden state; None leaves it alone
    granularity: str  # of the hidden state's ranges, or its grid (``kernels.grids``); codes are of the affine one alone
    # A stored range, which is taken for all steps instead; values outside it are clipped. On codes, where NaN has none,
    # all of a step's hidden state is NaN if any of it is.
    low: Tensor | None
    width: Tensor | None
    filled: (
        Tensor | None
    )  # it is taken only if this number is above 0, which is decided on the device
    save: bool  # return what the backward pass needs; else empty tensors
    grad_levels: (
        Tensor | None
    )  # for the backward pass, as the following, see ``BackwardArgs``
    grad_granularity: str
    key: Tensor | None
    advance: bool  # whether the backward pass adds 1 to the key for every step
    column_codes: Tensor | None = (
        None  # the two tables of the columns of h U', of codes
    )
    column_values: Tensor | None = None


class BackwardArgs(NamedTuple):
    """What ``lstm_backward`` takes, in its order."""

    d_out: Tensor  # gradient of the hidden states, (N, H)
    d_h: Tensor  # of the last h, (B, H)
    d_c: Tensor  # of the last c, likewise
    weight: Tensor  # as in ``ForwardArgs``
    gates: Tensor  # what ``forward`` returned, as the following
    before: Tensor
    tanh_c: Tensor
    steps: int  # as in ``ForwardArgs``, as the following
    sizes: Sequence[int]
    reverse: bool
    levels: (
        Tensor | None
    )  # n = 2**q - 1 of the gradient behind the product with h; None leaves it alone
    granularity: str  # of its ranges, step by step, or its grid
    key: (
        Tensor | None
    )  # of its noise in the first step computed, one more in every step; None rounds half to even
    column_codes: Tensor | None = (
        None  # the tables of the columns of the gradient's product with codes of ``weight``
    )
    column_values: Tensor | None = None


def forward(ops: Any, *given: Any) -> tuple[Tensor, ...]:
    """Run all steps of what is given, as ``ForwardArgs``; ``ops``, such as ``torch.ops.cpt``, quantise.

    Returns:
        Hidden states (N, H), the last h and c (B, H); the ranges of the hidden state, (2, T) in the order in which the
        steps are computed, if it has one of its own per step, or on codes, else empty; then gates (N, 4 H), quantised
        hidden states or their codes, cell states before the step, and tanh(c), each (N, H).
    """
    a = ForwardArgs(*given)
    weight, levels, granularity = a.weight, a.levels, a.granularity
    tables = None if a.column_codes is None else a[-2:]
    whole, format = parse_grid(granularity)
    hidden_size = weight.shape[1]
    out: list[Tensor] = []
    columns: list[list[Tensor]] = [
        [],
        [],
        [],
        [],
    ]  # gates, operands, c before the step, tanh(c)
    ranges: list[tuple[Tensor, Tensor]] = []
    h, c = a.h0.contiguous(), a.c0.contiguous()
    for (x_part,) in _split_steps(a.steps, a.sizes, a.reverse, a.x_gates):
        size = len(x_part)
        operand = h[:size]
        if levels is not None and operand.numel():
            found: Sequence[Tensor] = ()
            if a.low is not None and a.width is not None:
                found = [a.low, a.width]
                own = (
                    found
                    if a.filled is None and tables is None
                    else ops.range(operand, granularity)
                )
                if a.filled is not None:
                    found = [
                        torch.where(a.filled > 0, stored, now)
                        for stored, now in zip(found, own, strict=True)
                    ]
                if tables is not None:  # NaN has no code: the range is NaN then
                    found = [torch.where(own[0].isnan(), own[0], found[0]), found[1]]
            if tables is not None:
                clip, found = bool(found), found or ops.range(operand, granularity)
                operand = ops.encode(operand, *found, levels, None, clip)
                ranges.append((found[0], found[1]))
            elif found:
                operand = (
                    ops.round_to_grid(operand, *found, levels, None, True)
                    if format is None
                    else ops.round_in_range(
                        operand, *found, levels, granularity, None, True
                    )
                )
            else:
                operand, *found = ops.fake_quantize(operand, levels, granularity, None)
                ranges.append((found[0], found[1]))
        if tables is not None and levels is not None:
            product, _ = import_optional(INT8_STEP_MATMUL, "")(
                ops, (operand, *found, levels), weight.t(), tables
            )
        else:
            product = gemm_backend.execute(operand, weight, a.bias)
        step = product.add_(x_part)
        four = step.view(size, 4, hidden_size)
        four[:, :2].sigmoid_(), four[:, 2].tanh_(), four[:, 3].sigmoid_()
        i, f, g, o = four.unbind(1)
        cell = (c[:size] * f).add_(i * g)
        tanh = torch.tanh(cell)
        out.append(o * tanh)
        if a.save:
            for column, value in zip(
                columns, (step, operand, c[:size], tanh), strict=True
            ):
                column.append(value)
        # sequences that have ended, or not begun in reverse, keep their state
        h, c = (
            new if size == len(old) else torch.cat([new, old[size:]])
            for new, old in ((out[-1], h), (cell, c))
        )
    hidden = _concat_steps(out, a.reverse)
    saved = [
        _concat_steps(column, a.reverse) if a.save else a.x_gates.new_empty(0)
        for column in columns
    ]
    of_steps = a.x_gates.new_empty((2, 0), dtype=torch.float32)
    if ranges and whole == "per_tensor":
        of_steps = torch.stack(
            [torch.stack(part) for part in zip(*ranges, strict=True)]
        )
    return hidden, h, c, of_steps, *saved


def backward(ops: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the chain rule to what is given, as ``BackwardArgs``, from the last step to the first.

    Returns:
        The gradients of ``x_gates`` and of what the product with h gave, (N, 4 H), the second quantised (empty where
        it is the first), and of h0 and c0, (B, H).
    """
    a = BackwardArgs(*given)
    weight, gates, before, tanh_c, levels = (
        a.weight,
        a.gates,
        a.before,
        a.tanh_c,
        a.levels,
    )
    tables = None if a.column_codes is None else a[-2:]
    hidden_size = weight.shape[1]
    d_h, d_c = a.d_h.contiguous(), a.d_c.contiguous()
    four = gates.view(-1, 4, hidden_size)
    i, f, g, o = four.unbind(1)
    # what the gradients of c and h are multiplied with, for all steps at once
    slopes = four * (1 - four)  # of the sigmoids
    slopes[:, 2] = 1 - g * g
    slopes[:, 0] *= g
    slopes[:, 1] *= before
    slopes[:, 2] *= i
    slopes[:, 3] *= tanh_c
    to_c = o * (1 - tanh_c * tanh_c)
    d_gates = torch.empty_like(gates)
    behind = d_gates if levels is None else torch.empty_like(gates)
    keys = (
        [None] * a.steps
        if a.key is None
        else (a.key + torch.arange(a.steps, device=a.key.device)).unbind()
    )
    parts = _split_steps(
        a.steps, a.sizes, not a.reverse, a.d_out, slopes, to_c, f, d_gates, behind
    )
    for (out_part, slope, c_part, f_part, step, after), now in zip(
        parts, keys, strict=True
    ):
        size = len(step)
        dh = out_part + d_h[:size]
        dc = torch.addcmul(d_c[:size], dh, c_part)
        four = step.view(size, 4, hidden_size)
        torch.mul(slope[:, :3], dc.unsqueeze(1), out=four[:, :3])
        torch.mul(slope[:, 3], dh, out=four[:, 3])
        if levels is not None and tables is not None:
            low, width = ops.range(step, a.granularity)
            codes = ops.encode(
                step, low, width, levels, now, clips(a.granularity, now is not None)
            )
            product, rounded = import_optional(INT8_STEP_MATMUL, "")(
                ops, (codes, low, width, levels), weight, tables
            )
            after.copy_(rounded.dequantize())
        else:
            if levels is not None and step.numel():
                after.copy_(ops.fake_quantize(step, levels, a.granularity, now)[0])
            product = gemm_backend.execute(after, weight.t())
        new = (product, dc * f_part)
        d_h, d_c = (
            n if size == len(old) else torch.cat([n, old[size:]])
            for n, old in zip(new, (d_h, d_c), strict=True)
        )
    return d_gates, gates.new_empty(0) if levels is None else behind, d_h, d_c


def _split_steps(
    steps: int, sizes: Sequence[int], reverse: bool, *tensors: Tensor
) -> list[tuple[Tensor, ...]]:
    """The rows of every step of several tensors, from the last step to the first if ``reverse``."""
    sizes = list(sizes) or [len(tensors[0]) // steps] * steps
    found = list(zip(*(tensor.split(sizes) for tensor in tensors), strict=True))
    return found[::-1] if reverse else found


def _concat_steps(column: list[Tensor], reverse: bool) -> Tensor:
    return torch.cat(column[::-1] if reverse else column)


def recurrence(given: ForwardArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the steps of a quantised LSTM and return the first four results of ``forward``."""
    ops = operators.active
    y, h, c, ranges, *_ = (
        _Recurrence.apply(ops, *given)
        if torch.compiler.is_compiling()
        else ops.lstm_forward(*given)
    )
    return y, h, c, ranges


# --- registration -----------------------------------------------------------------------------------------------------


def _register(library: torch.library.Library, family: str) -> None:
    """Define the operators in a family, with their plain backend, fake tensors and gradient."""
    ops = getattr(torch.ops, family)
    for name, plain, fake, gradient, setup in (
        ("lstm_forward", forward, _fake_forward, partial(_gradient, ops), _setup),
        ("lstm_backward", backward, _fake_backward, _refuse_double_backward, None),
    ):
        loop = operators.MATMUL_OPERATORS[f"{family}::{name}"] = partial(plain, ops)
        operators.define(library, name, SCHEMAS[name], loop, fake, gradient, setup)


def _fake_forward(*given: Any) -> tuple[Tensor, ...]:
    a = ForwardArgs(*given)
    rows, hidden_size = len(a.x_gates), a.weight.shape[1]
    one_range = a.levels is not None and parse_grid(a.granularity)[0] == "per_tensor"
    kept = one_range and a.low is None and a.x_gates.numel() > 0
    wide = a.x_gates.shape if a.save else (0,)
    narrow = (rows, hidden_size) if a.save else (0,)
    return (
        a.x_gates.new_empty((rows, hidden_size)),
        torch.empty_like(a.h0, memory_format=torch.contiguous_format),
        torch.empty_like(a.c0, memory_format=torch.contiguous_format),
        a.x_gates.new_empty((2, a.steps if kept else 0), dtype=torch.float32),
        *(a.x_gates.new_empty(shape) for shape in (wide, narrow, narrow, narrow)),
    )


def _fake_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = BackwardArgs(*given)
    behind = a.gates.new_empty(0) if a.levels is None else torch.empty_like(a.gates)
    empty = partial(torch.empty_like, memory_format=torch.contiguous_format)
    return torch.empty_like(a.gates), behind, empty(a.d_h), empty(a.d_c)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = ForwardArgs(*inputs)
    ctx.steps, ctx.has_bias, ctx.state = (
        (a.steps, a.sizes, a.reverse),
        a.bias is not None,
        a.h0.shape,
    )
    # these may change in place between forward and backward passes: not saved, which would be an error
    ctx.quantizes, ctx.advance = (a.grad_levels, a.grad_granularity, a.key), a.advance
    ctx.filled = recorded_steps(a.grad_levels)
    ctx.save_for_backward(a.weight, *output[4:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])


def _gradient(
    ops: Any, ctx: Any, d_out: Any, d_h: Any, d_c: Any, *_: Any
) -> tuple[Tensor | None, ...]:
    weight, gates, operands, before, tanh_c = ctx.saved_tensors
    levels, *noise = ctx.quantizes
    quantizes = None if levels is None else forward_steps(levels, ctx.filled), *noise
    given = (
        (d_out, d_h, d_c),
        ctx.state,
        weight,
        (gates, before, tanh_c),
        ctx.steps,
        quantizes,
        ctx.advance,
    )
    with torch.autocast(
        weight.device.type, enabled=False
    ):  # compilers trace this under that of the forward pass
        d_gates, behind, d_h, d_c = run_backward(ops, *given)
        d_weight = (
            gemm_backend.linear(ops, behind.t(), operands.t())
            if ctx.needs_input_grad[1]
            else None
        )
    d_bias = behind.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    return (
        d_gates,
        d_weight,
        d_bias,
        d_h,
        d_c,
        *[None] * (len(ctx.needs_input_grad) - 5),
    )


class _Recurrence(torch.autograd.Function):
    """The operator with its gradient, for compilers: they let a backward pass change what a Function keeps, the key."""

    @staticmethod
    def forward(ctx: Any, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        found = ops.lstm_forward(*args)
        ctx.ops = ops
        _setup(ctx, args, found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return None, *_gradient(ctx.ops, ctx, *gradients)


def run_backward(
    ops: Any,
    given: Sequence[Tensor | None],
    state: Sequence[int],
    weight: Tensor,
    saved: Sequence[Tensor],
    steps: tuple[Any, ...],
    quantizes: tuple[Any, ...],
    advance: bool,
    tables: Sequence[Tensor | None] = (None,) * 2,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what ``backward`` does, all of them whole, and let the key of the noise go on.

    Args:
        ops, weight: as in ``backward``.
        given: gradients of the hidden states and of the last h and c; None where there is none.
        state: (B, H).
        saved, steps, quantizes, tables: fields of ``BackwardArgs`` that follow each other, from ``gates``, ``steps``,
            ``levels`` and ``column_codes`` on.
        advance: whether the key is to count the steps.
    """
    gates, before, _ = saved
    levels, _, key = quantizes
    d_out = torch.zeros_like(before) if given[0] is None else given[0]
    d_h, d_c = (gates.new_zeros(state) if d is None else d for d in given[1:])
    d_gates, behind, d_h, d_c = ops.lstm_backward(
        d_out, d_h, d_c, weight, *saved, *steps, *quantizes, *tables
    )
    if levels is None:
        behind = d_gates
    elif advance and key is not None and gates.numel():
        key.add_(steps[0])
    return d_gates, behind, d_h, d_c


def _refuse_double_backward(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "trying to differentiate twice: the quantised LSTM has no gradients of gradients"
    )


for _family, _library in operators.LIBRARIES.items():
    _register(_library, _family)
