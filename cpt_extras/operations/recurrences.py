"""Recurrent layers beyond the LSTM of the paper, which is ``cpt_core.quantization.lstm``.

RNNs, GRUs, their cells, and LSTMs with a projection run step by step from quantised linear operations. ``run_lstm`` is
the quantised LSTM for packed sequences and two directions, too. What computes one direction of it is ``run_by_steps``,
or a faster function to the same numbers, see ``lstm_handler``; or an executor "lstm" of the same form, of
``OP_EXECUTORS``, that may return None.

Shapes: T steps, B sequences, I inputs, H hidden; N = B_0 + ... + B_{T-1} rows, step after step, as in a
``PackedSequence``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.lstm import (
    RecurrentCall,
    direction_names,
    lstm_state,
    run_in_float32,
)
from cpt_core.quantization.op_interception import OP_EXECUTORS, QuantizedOpsMode
from cpt_core.quantization.precision import LayerPrecision

State = tuple[Tensor, ...]  # h and c; of other recurrent layers h alone
Linear = Callable[..., Tensor]  # x (N, K), weight (M, K), bias -> (N, M)
# weights of input and hidden state, their biases, and the projection; None for a missing one
Weights = Sequence[Any]
Step = Callable[[Linear, Weights, Tensor, State], State]


def rnn_step(
    activation: Callable[[Tensor], Tensor],
    linear: Linear,
    w: Weights,
    x: Tensor,
    state: State,
) -> State:
    """Take a step of an RNN."""
    return (activation(linear(x, w[0], w[2]) + linear(state[0], w[1], w[3])),)


def gru_step(linear: Linear, w: Weights, x: Tensor, state: State) -> State:
    """Take a step of a GRU."""
    x_reset, x_update, x_new = linear(x, w[0], w[2]).chunk(3, -1)
    h_reset, h_update, h_new = linear(state[0], w[1], w[3]).chunk(3, -1)
    reset = torch.sigmoid(x_reset + h_reset)
    update = torch.sigmoid(x_update + h_update)
    new = torch.tanh(x_new + reset * h_new)
    return (new + update * (state[0] - new),)


def lstm_step(linear: Linear, w: Weights, x: Tensor, state: State) -> State:
    """Take a step of an LSTM, perhaps with a projection."""
    gates = linear(x, w[0], w[2]) + linear(state[0], w[1], w[3])
    h, c = lstm_state(gates, state[1])
    return (h if w[4] is None else linear(h, w[4])), c


CELL_STEPS: dict[str, Step] = {
    "rnn_tanh": partial(rnn_step, torch.tanh),
    "rnn_relu": partial(rnn_step, torch.relu),
    "gru": gru_step,
    "lstm": lstm_step,
}


def run_cell(
    kind: str,
    linear: Linear,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Compute ``torch.gru_cell`` or another cell function of torch, with its arguments."""
    state = tuple(hx) if kind == "lstm" else (hx,)
    after = CELL_STEPS[kind](linear, [w_ih, w_hh, b_ih, b_hh, None], input, state)
    return after if kind == "lstm" else after[0]


def run_recurrence(
    kind: str, linear: Linear, input: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Compute ``torch.gru`` or another recurrent function of torch, with its arguments."""
    call = RecurrentCall.from_arguments(input, *args)

    def run_direction(index: int, x: Tensor, *start: Tensor) -> tuple[Tensor, ...]:
        steps = x.split(call.sizes or len(x) // num_time_steps(call))
        is_reverse = call.is_bidirectional and index % 2 == 1
        return run_steps(
            partial(CELL_STEPS[kind], linear, call.direction_weights(index)),
            steps,
            start,
            is_reverse,
        )

    return run_layers(call, run_direction)


def cast_outputs(
    kind: str,
    state: State,
    has_projection: bool,
    outputs: Any,
    half_dtype: torch.dtype,
) -> Any:
    """Return the outputs of a recurrent function or cell in the dtypes in which torch returns them.

    On the CPU, autocast reaches only the matmuls of these functions, whose outputs torch then combines with the state.

    Args:
        kind: key of ``CELL_STEPS``.
        state: h, or h and c, before the first step.
        has_projection: whether an LSTM has a projection.
        outputs: h of a cell; h and c of the cell of an LSTM; hidden states, last h, and last c of an LSTM otherwise.
        half_dtype: dtype of the matmuls.
    """
    state_dtype = half_dtype
    if state[0].device.type == "cpu" and not kind.startswith("rnn"):
        state_dtype = torch.promote_types(half_dtype, state[-1].dtype)
    hidden_dtype = half_dtype if has_projection else state_dtype
    if isinstance(outputs, Tensor):
        return outputs.to(hidden_dtype)
    *hidden, last = outputs
    last_dtype = state_dtype if kind == "lstm" else hidden_dtype
    return *(y.to(hidden_dtype) for y in hidden), last.to(last_dtype)


# --- the quantised LSTM ---------------------------------------------------------------------------------------------


class LSTMDirection(NamedTuple):
    """One direction of one layer of a quantised LSTM, without its inputs.

    Attributes:
        precision: of the LSTM.
        name: of the direction, such as "l0_reverse"; its operands have the roles "input_l0_reverse" and
            "hidden_l0_reverse", each with a running range of its own.
        input_weight: (4 H, I), not quantised, as the following.
        hidden_weight: (4 H, H).
        input_bias: (4 H,), or None.
        hidden_bias: (4 H,), or None.
        steps: T.
        sizes: sequences of every step; empty where all steps have the same.
    """

    precision: LayerPrecision
    name: str
    input_weight: Tensor
    hidden_weight: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    steps: int
    sizes: tuple[int, ...]

    @property
    def is_reverse(self) -> bool:
        """Whether the direction runs from the last step to the first."""
        return self.name.endswith("_reverse")

    def step_sizes(self, x: Tensor) -> tuple[int, ...]:
        """Return how many rows of x (N, ...) belong to every step."""
        return self.sizes or (len(x) // self.steps,) * self.steps


# ``run(direction, x, h, c)`` computes one direction: x (N, I), h and c (B, H) -> hidden states (N, H), last h and c
RunDirection = Callable[[LSTMDirection, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def lstm_handler(run_direction: RunDirection) -> Callable[..., Any]:
    """Return a handler of ``torch.lstm`` that computes every direction of every layer with a function."""

    def handler(
        mode: QuantizedOpsMode, function: Any, input: Tensor, *args: Any
    ) -> tuple[Tensor, ...] | None:
        layer = mode.running.stack[-1].interception
        if layer.kind != "lstm":
            return None
        if layer.precision is None or not mode.is_active(layer.precision):
            return function(input, *args)
        return run_lstm(
            layer.precision, RecurrentCall.from_arguments(input, *args), run_direction
        )

    return handler


def run_by_steps(
    direction: LSTMDirection, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, ...]:
    """Run one direction of one layer, time step by time step."""
    precision, name = direction.precision, direction.name
    input_weight = precision.quantize_operand("weight", direction.input_weight)
    hidden_weight = precision.quantize_operand("weight", direction.hidden_weight)
    input_bias, hidden_bias = (
        None if bias is None else precision.quantize_operand("bias", bias)
        for bias in (direction.input_bias, direction.hidden_bias)
    )

    def multiply(operand: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return precision.matmul_with_quantized_grad(
            fake_quantize.operators.linear, operand, weight, bias
        )

    def step(x: Tensor, state: State) -> State:
        hidden, cell = state
        input_gates = multiply(
            precision.quantize_operand(f"input_{name}", x), input_weight, input_bias
        )
        hidden_gates = multiply(
            precision.quantize_operand(f"hidden_{name}", hidden),
            hidden_weight,
            hidden_bias,
        )
        return lstm_state(input_gates + hidden_gates, cell)

    return run_steps(
        step, x.split(direction.step_sizes(x)), (h, c), direction.is_reverse
    )


def run_lstm(
    precision: LayerPrecision,
    call: RecurrentCall,
    run_direction: RunDirection = run_by_steps,
) -> tuple[Tensor, ...]:
    """Return hidden states, last h and last c of a quantised LSTM."""
    names = direction_names(call.num_layers, call.is_bidirectional)
    executor = OP_EXECUTORS.get((precision.execution, "lstm"))
    sizes = call.sizes if call.sizes is not None and len(set(call.sizes)) > 1 else ()

    def run_all(in_dtype: RecurrentCall) -> tuple[Tensor, ...]:
        def run(index: int, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
            w_ih, w_hh, b_ih, b_hh, _ = in_dtype.direction_weights(index)
            direction = LSTMDirection(
                precision,
                names[index],
                w_ih,
                w_hh,
                b_ih,
                b_hh,
                num_time_steps(call),
                sizes,
            )
            results = None if executor is None else executor(direction, x, h, c)
            return run_direction(direction, x, h, c) if results is None else results

        return run_layers(in_dtype, run)

    return run_in_float32(call, run_all)


# --- layers, directions and steps -----------------------------------------------------------------------------------


def num_time_steps(call: RecurrentCall) -> int:
    """Return the number of time steps."""
    if call.sizes is not None:
        return len(call.sizes)
    return call.x.shape[1 if call.is_batch_first else 0]


def run_layers(
    call: RecurrentCall, run_direction: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Run all layers, with dropout between them; return hidden states and the states behind the last step.

    Args:
        call: arguments of the function.
        run_direction: index of layer and direction, x (N, I), state (B, H) each -> hidden states (N, H), last state.
    """
    if num_time_steps(call) == 0:
        raise ValueError("the sequences of a recurrent layer need at least one step")
    x = call.x.transpose(0, 1) if call.is_batch_first else call.x
    x = x.flatten(0, 1) if call.sizes is None else x
    ends: list[Sequence[Tensor]] = []
    for layer in range(call.num_layers):
        outputs = []
        for index in range(layer * call.directions, (layer + 1) * call.directions):
            y, *end = run_direction(index, x, *(tensor[index] for tensor in call.state))
            outputs.append(y)
            ends.append(end)
        x = torch.cat(outputs, -1)
        if call.dropout and layer < call.num_layers - 1:
            x = functional.dropout(x, call.dropout, call.training)
    if call.sizes is None:
        x = x.unflatten(0, (num_time_steps(call), -1))
        x = x.transpose(0, 1) if call.is_batch_first else x
    return x, *(torch.stack(tensors) for tensors in zip(*ends, strict=True))


def run_steps(
    step: Callable[[Tensor, State], State],
    xs: Sequence[Tensor],
    start: State,
    is_reverse: bool,
) -> tuple[Tensor, ...]:
    """Return hidden states of all steps, and the last state; batches shrink, or grow, as in packed sequences.

    Args:
        step: x and the state before the step -> the state behind it.
        xs: inputs of all steps.
        start: the state before the first step.
        is_reverse: whether to run from the last step to the first.
    """
    xs = xs[::-1] if is_reverse else xs
    state, ys = tuple(s[: len(xs[0])] for s in start), []
    ended_states: list[State] = []
    for x in xs:
        if len(x) < len(state[0]):
            ended_states.append(tuple(s[len(x) :] for s in state))
            state = tuple(s[: len(x)] for s in state)
        elif len(x) > len(state[0]):
            state = tuple(
                torch.cat([s, begin[len(s) : len(x)]])
                for s, begin in zip(state, start, strict=True)
            )
        state = step(x, state)
        ys.append(state[0])
    parts = [state, *ended_states[::-1]]
    y = torch.cat(ys[::-1] if is_reverse else ys)
    return y, *(torch.cat(tensors) for tensors in zip(*parts, strict=True))
