"""RNN, GRU and LSTM of torch step by step, from matmuls, which ``op_handlers`` quantises.

``nn.LSTM`` itself has a handler of its own, see ``lstm``, which takes ``run_direction`` from here; the others serve
cells, GRUs, plain RNNs and LSTMs with projections.

``multiply(x, weight, bias)`` is x (N, K) times weight (M, K) transposed, plus bias.

Shapes: T steps, N sequences, H hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Weights = Sequence[Tensor | None]  # of input and hidden state, their biases, and the projection, if any
State = tuple[Tensor, ...]  # hidden state, and that of the cell


def plain(activation: Callable[[Tensor], Tensor]) -> Callable[..., State]:
    """Return the step of an RNN."""

    def step(multiply: Multiply, x: Tensor, state: State, w: Weights) -> State:
        return (activation(multiply(x, w[0], w[2]) + multiply(state[0], w[1], w[3])),)  # type: ignore[arg-type]

    return step


def gru(multiply: Multiply, x: Tensor, state: State, w: Weights) -> State:
    """Take a step of a GRU."""
    of_x, of_h = multiply(x, w[0], w[2]).chunk(3, -1), multiply(state[0], w[1], w[3]).chunk(3, -1)  # type: ignore[arg-type]
    reset, update = torch.sigmoid(of_x[0] + of_h[0]), torch.sigmoid(of_x[1] + of_h[1])
    new = torch.tanh(of_x[2] + reset * of_h[2])
    return (new + update * (state[0] - new),)


def lstm(multiply: Multiply, x: Tensor, state: State, w: Weights) -> State:
    """Take a step of an LSTM, perhaps with a projection."""
    gates = multiply(x, w[0], w[2]) + multiply(state[0], w[1], w[3])  # type: ignore[arg-type]
    h, c = lstm_state(gates, state[1])
    return (h if w[4] is None else multiply(h, w[4], None)), c


def lstm_state(gates: Tensor, c: Tensor) -> State:
    """Return the hidden state and that of the cell behind a step, from gates (B, 4 H) and the cell's state before."""
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


STEPS: dict[str, Callable[..., State]] = {
    "rnn_tanh": plain(torch.tanh),
    "rnn_relu": plain(torch.relu),
    "gru": gru,
    "lstm": lstm,
}


def cell(kind: str, multiply: Multiply, x: Tensor, state: Any, *weights: Tensor | None) -> Any:
    """Compute what ``torch.gru_cell`` and its like do; weights as there."""
    given = tuple(state) if kind == "lstm" else (state,)
    found = STEPS[kind](multiply, x, given, [*weights, *[None] * (5 - len(weights))])
    return found if kind == "lstm" else found[0]


def unrolled(kind: str, multiply: Multiply, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Compute what ``torch.gru`` and its like do, with their two lists of arguments: padded, or packed with sizes."""
    packed = not isinstance(given[2], bool)  # but the list of weights; there padded sequences say if there are biases
    if packed:
        sizes, state, flat, biases, layers, dropout, train, both = given
        steps = list(x.split(sizes.tolist()))
    else:
        state, flat, biases, layers, dropout, train, both, first = given
        steps = list(x.unbind(1 if first else 0))
    states = tuple(state) if kind == "lstm" else (state,)
    ends: list[State] = []
    ways, each = 1 + both, len(flat) // (layers * (1 + both))
    for layer in range(layers):
        found = []
        for way in range(ways):
            place = layer * ways + way
            own = list(flat[place * each : (place + 1) * each])
            weights = [*own[:2], *(own[2:4] if biases else (None, None))]
            weights.append(own[-1] if each > 2 + 2 * biases else None)
            start = tuple(s[place] for s in states)
            ys, end = run_direction(STEPS[kind], multiply, steps[::-1] if way else steps, start, weights)
            found.append(ys[::-1] if way else ys)
            ends.append(end)
        steps = [torch.cat(ys, -1) if both else ys[0] for ys in zip(*found, strict=True)]
        if dropout and train and layer < layers - 1:
            lengths = [len(y) for y in steps]
            steps = list(functional.dropout(torch.cat(steps), dropout, True).split(lengths))
    y = torch.cat(steps) if packed else torch.stack(steps, 1 if first else 0)
    return y, *(torch.stack(parts) for parts in zip(*ends, strict=True))


def run_direction(
    step: Callable[..., State], multiply: Multiply, xs: Sequence[Tensor], start: State, weights: Weights
) -> tuple[list[Tensor], State]:
    """Run over steps, the batches of which may shrink, or grow, as those of packed sequences do."""
    state, ys = tuple(s[: len(xs[0])] for s in start), []
    ended: list[State] = []
    for x in xs:
        if len(x) < len(state[0]):
            ended.append(tuple(s[len(x) :] for s in state))
            state = tuple(s[: len(x)] for s in state)
        elif len(x) > len(state[0]):
            state = tuple(torch.cat([s, begin[len(s) : len(x)]]) for s, begin in zip(state, start, strict=True))
        state = step(multiply, x, state, weights)
        ys.append(state[0])
    parts = [state, *ended[::-1]]
    return ys, tuple(torch.cat(of) for of in zip(*parts, strict=True))
