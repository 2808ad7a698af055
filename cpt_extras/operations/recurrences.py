"""RNNs, GRUs, their cells, and LSTMs with a projection, step by step from quantised linear operations.

A plain ``nn.LSTM`` has a handler of its own, see ``quantization.lstm``.

Shapes: T steps, N sequences, H hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpt_core.quantization import lstm
from cpt_core.quantization.lstm import RecurrentCall, State, lstm_state

Linear = Callable[..., Tensor]  # x (N, K), weight (M, K), bias -> (N, M)
Weights = Sequence[Any]  # of input and hidden state, their biases, and the projection; None for what there is not
Step = Callable[[Linear, Weights, Tensor, State], State]


def rnn_step(activation: Callable[[Tensor], Tensor], linear: Linear, w: Weights, x: Tensor, state: State) -> State:
    """Take a step of an RNN."""
    return (activation(linear(x, w[0], w[2]) + linear(state[0], w[1], w[3])),)


def gru_step(linear: Linear, w: Weights, x: Tensor, state: State) -> State:
    """Take a step of a GRU."""
    x_gates, h_gates = linear(x, w[0], w[2]).chunk(3, -1), linear(state[0], w[1], w[3]).chunk(3, -1)
    reset, update = torch.sigmoid(x_gates[0] + h_gates[0]), torch.sigmoid(x_gates[1] + h_gates[1])
    new = torch.tanh(x_gates[2] + reset * h_gates[2])
    return (new + update * (state[0] - new),)


def lstm_step(linear: Linear, w: Weights, x: Tensor, state: State) -> State:
    """Take a step of an LSTM, perhaps with a projection."""
    gates = linear(x, w[0], w[2]) + linear(state[0], w[1], w[3])
    h, c = lstm_state(gates, state[1])
    return (h if w[4] is None else linear(h, w[4])), c


STEPS: dict[str, Step] = {
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
    """Compute what ``torch.gru_cell`` and its like do."""
    state = tuple(hx) if kind == "lstm" else (hx,)
    after = STEPS[kind](linear, [w_ih, w_hh, b_ih, b_hh, None], input, state)
    return after if kind == "lstm" else after[0]


def run_layers(kind: str, linear: Linear, input: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Compute what ``torch.gru`` and its like do; arguments as there."""
    call = RecurrentCall.of(input, *args)

    def run_direction(index: int, x: Tensor, *start: Tensor) -> tuple[Tensor, ...]:
        steps = x.split(call.sizes or len(x) // call.steps)
        is_reverse = call.is_bidirectional and index % 2 == 1
        return lstm.run_steps(partial(STEPS[kind], linear, call.weights_of(index)), steps, start, is_reverse)

    return lstm.run_layers(call, run_direction)
