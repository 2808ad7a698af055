"""RNNs, GRUs, their cells, and LSTMs with a projection, step by step from linear operations, which the mode quantises.

A plain ``nn.LSTM`` has a handler of its own, see ``quantization.lstm``.

Shapes: T steps, N sequences, H hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear

from cpt_core.quantization.lstm import State, lstm_state, run_steps

Weights = Sequence[Any]  # of input and hidden state, their biases, and the projection; None for what there is not
Step = Callable[[Weights, Tensor, State], State]


def rnn_step(activation: Callable[[Tensor], Tensor], w: Weights, x: Tensor, state: State) -> State:
    """Take a step of an RNN."""
    return (activation(linear(x, w[0], w[2]) + linear(state[0], w[1], w[3])),)


def gru_step(w: Weights, x: Tensor, state: State) -> State:
    """Take a step of a GRU."""
    x_gates, h_gates = linear(x, w[0], w[2]).chunk(3, -1), linear(state[0], w[1], w[3]).chunk(3, -1)
    reset, update = torch.sigmoid(x_gates[0] + h_gates[0]), torch.sigmoid(x_gates[1] + h_gates[1])
    new = torch.tanh(x_gates[2] + reset * h_gates[2])
    return (new + update * (state[0] - new),)


def lstm_step(w: Weights, x: Tensor, state: State) -> State:
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
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Compute what ``torch.gru_cell`` and its like do."""
    state = tuple(hx) if kind == "lstm" else (hx,)
    after = STEPS[kind]([w_ih, w_hh, b_ih, b_hh, None], input, state)
    return after if kind == "lstm" else after[0]


def run_layers(kind: str, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Compute what ``torch.gru`` and its like do, with their two lists of arguments: padded, or packed with sizes."""
    is_packed = not isinstance(args[2], bool)  # of padded sequences the third says if there are biases
    if is_packed:
        sizes, hx, flat, has_biases, num_layers, dropout, training, is_bidirectional = args
        steps = list(x.split(sizes.tolist()))
    else:
        hx, flat, has_biases, num_layers, dropout, training, is_bidirectional, is_batch_first = args
        steps = list(x.unbind(1 if is_batch_first else 0))
    state = tuple(hx) if kind == "lstm" else (hx,)
    ends: list[State] = []
    directions = 2 if is_bidirectional else 1
    count = len(flat) // (num_layers * directions)
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            weights = _weights(flat[place * count : (place + 1) * count], has_biases)
            start = tuple(s[place] for s in state)
            ys, end = run_steps(partial(STEPS[kind], weights), steps[::-1] if direction else steps, start)
            outputs.append(ys[::-1] if direction else ys)
            ends.append(end)
        steps = [torch.cat(ys, -1) if is_bidirectional else ys[0] for ys in zip(*outputs, strict=True)]
        if dropout and training and layer < num_layers - 1:
            lengths = [len(y) for y in steps]
            steps = list(functional.dropout(torch.cat(steps), dropout, True).split(lengths))
    y = torch.cat(steps) if is_packed else torch.stack(steps, 1 if is_batch_first else 0)
    return y, *(torch.stack(parts) for parts in zip(*ends, strict=True))


def _weights(flat: Sequence[Tensor], has_biases: bool) -> Weights:
    """Return the weights of a direction, with None for biases and the projection where there are none."""
    biases = flat[2:4] if has_biases else (None, None)
    has_projection = len(flat) > (4 if has_biases else 2)
    return [*flat[:2], *biases, flat[-1] if has_projection else None]
