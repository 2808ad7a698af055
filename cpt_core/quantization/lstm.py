"""The quantised LSTM: a handler of ``torch.lstm``, the function that ``nn.LSTM`` calls.  Paper: section 4.4.

Both matmuls of every step are quantised: the input x_t and the hidden state h, each with one range per time step, and
both weights. The gates, the cell state and the hidden state itself stay in float32.

    gates_t = q(x_t) q(W)' + q(b) + q(h_{t-1}) q(U)' + q(b')
    i, f, o = sigmoid(gates)   g = tanh(gates)   c_t = f c_{t-1} + i g   h_t = o tanh(c_t)

The handler takes the arguments of the function apart and goes through layers and directions. What computes one of them
is ``run_by_steps``, or a faster function to the same numbers, see ``lstm_handler``; or an executor "lstm" of the same
form, of ``EXECUTORS``, that may return None. LSTMs with a projection, subclasses
of ``nn.LSTM`` and cells run by ``recurrences`` instead.

Without quantisation ("float", or 24 bits and more) torch's own LSTM runs. Output and gates are computed in float32 also
under autocast.

Shapes: T steps, B sequences, I inputs, H hidden; N = B_0 + ... + B_{T-1} rows, step after step, as in a
``PackedSequence``.

>>> from torch import nn
>>> from cpt_core.quantization.convert import quantize_
>>> lstm = quantize_(nn.LSTM(4, 3))
>>> lstm.precision.set_bits(5, q_grad=8)
>>> lstm(torch.ones(7, 2, 4))[0].shape
torch.Size([7, 2, 3])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.fake_quantize import check_floating
from cpt_core.quantization.op_handlers import functions_named, register_handler
from cpt_core.quantization.op_interception import EXECUTORS, QuantizedOpsMode
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import Quantizer

State = tuple[Tensor, ...]  # h and c; of other recurrent layers h alone


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

    def rows_of_steps(self, x: Tensor) -> tuple[int, ...]:
        """Return how many rows of x (N, ...) belong to every step."""
        return self.sizes or (len(x) // self.steps,) * self.steps


# ``run(direction, x, h, c)`` computes one direction: x (N, I), h and c (B, H) -> hidden states (N, H), last h and c
RunDirection = Callable[[LSTMDirection, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class _Call(NamedTuple):
    """Arguments of ``torch.lstm``, which has two lists of them: for padded and for packed sequences."""

    x: Tensor  # (T, B, I), (B, T, I) if ``batch_first``, or packed (N, I)
    sizes: tuple[int, ...] | None  # sequences of every step where they are packed
    state: State  # (layers directions, B, H) each
    weights: list[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool

    @classmethod
    def of(cls, x: Tensor, args: tuple[Any, ...]) -> _Call:
        """Return a call of either form; ``args``: those behind x."""
        if isinstance(args[0], Tensor):
            return cls(x, tuple(args[0].tolist()), *args[1:], False)  # type: ignore[call-arg]
        return cls(x, None, *args)

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def weights_of(self, index: int) -> list[Tensor | None]:
        """Return weights of input and hidden state, and their biases, of a direction of a layer."""
        count = 4 if self.has_biases else 2
        own: list[Tensor | None] = [*self.weights[index * count : (index + 1) * count]]
        return own if self.has_biases else [*own, None, None]


# --- what conversion needs to know ------------------------------------------------------------------------------------


def direction_names(num_layers: int, bidirectional: bool) -> list[str]:
    """Return the names of layers and directions, as in the parameters of ``nn.LSTM``."""
    ways = ("", "_reverse") if bidirectional else ("",)
    return [f"l{layer}{way}" for layer in range(num_layers) for way in ways]


def lstm_roles(module: Any, roles: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    """Return roles whose "input" and "hidden" every layer and direction has for itself."""
    names = direction_names(module.num_layers, module.bidirectional)
    data = {f"{role}_{name}": roles[role] for name in names for role in ("input", "hidden")}
    return data | {role: quantizer for role, quantizer in roles.items() if role not in ("input", "hidden")}


# --- the handler ------------------------------------------------------------------------------------------------------


def lstm_handler(run_direction: RunDirection) -> Callable[..., Any]:
    """Return a handler of ``torch.lstm`` that computes every direction of every layer with a function."""

    def handler(mode: QuantizedOpsMode, function: Any, input: Tensor, *args: Any) -> tuple[Tensor, ...] | None:
        layer = mode.running.stack[-1].interception
        if layer.kind != "lstm":
            return None
        if layer.precision is None or not mode.is_active(layer.precision):
            return function(input, *args)
        return _run(layer.precision, run_direction, _Call.of(input, args))

    return handler


def _run(precision: LayerPrecision, run_direction: RunDirection, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, last h and last c of a quantised LSTM, in the types of its input and state."""
    x, (h, c) = call.x, call.state
    for tensor in (x, h, c):
        check_floating(tensor)  # the result would be cut to its dtype
    if call.sizes is None:
        x = x.transpose(0, 1) if call.batch_first else x
        steps, batch = x.shape[:2]
        sizes: tuple[int, ...] = ()
        x = x.flatten(0, 1)
    else:
        steps = len(call.sizes)
        sizes = call.sizes if len(set(call.sizes)) > 1 else ()
    if steps == 0:
        raise ValueError("the sequences of an LSTM need at least one step")

    device, dtype = x.device.type, torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        state = h.to(dtype), c.to(dtype)
        call_in_float32 = call._replace(x=x.to(dtype), state=state)
        y, last_h, last_c = _run_layers(precision, run_direction, call_in_float32, steps, sizes)
    if call.sizes is None:
        y = y.unflatten(0, (steps, batch))
        y = y.transpose(0, 1) if call.batch_first else y
    return y.to(x.dtype), last_h.to(h.dtype), last_c.to(c.dtype)


def _run_layers(
    precision: LayerPrecision, run_direction: RunDirection, call: _Call, steps: int, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run all layers over x (N, I), with dropout between them."""
    names = direction_names(call.num_layers, call.bidirectional)
    executor = EXECUTORS.get((precision.execution, "lstm"))
    x = call.x
    ends: list[State] = []
    for layer in range(call.num_layers):
        outputs = []
        for index in range(layer * call.directions, (layer + 1) * call.directions):
            own = (None if w is None else w.to(x.dtype) for w in call.weights_of(index))
            direction = LSTMDirection(precision, names[index], *own, steps=steps, sizes=sizes)  # type: ignore[arg-type, misc]
            start = call.state[0][index], call.state[1][index]
            results = None if executor is None else executor(direction, x, *start)
            y, h, c = run_direction(direction, x, *start) if results is None else results
            outputs.append(y)
            ends.append((h, c))
        x = torch.cat(outputs, -1)
        if call.dropout and layer < call.num_layers - 1:
            x = functional.dropout(x, call.dropout, call.training)
    return x, torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends])


def run_by_steps(direction: LSTMDirection, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run one direction of one layer, one time step after the other."""
    precision, name = direction.precision, direction.name
    input_weight = precision.operand("weight", direction.input_weight)
    hidden_weight = precision.operand("weight", direction.hidden_weight)
    input_bias, hidden_bias = (
        None if bias is None else precision.operand("bias", bias)
        for bias in (direction.input_bias, direction.hidden_bias)
    )

    def multiply(operand: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return precision.multiplied(fake_quantize.operators.linear, operand, weight, bias)

    def step(x: Tensor, state: State) -> State:
        hidden, cell = state
        input_gates = multiply(precision.operand(f"input_{name}", x), input_weight, input_bias)
        hidden_gates = multiply(precision.operand(f"hidden_{name}", hidden), hidden_weight, hidden_bias)
        return lstm_state(input_gates + hidden_gates, cell)

    steps = list(x.split(direction.rows_of_steps(x)))
    if direction.is_reverse:
        steps.reverse()
    ys, (last_h, last_c) = run_steps(step, steps, (h, c))
    if direction.is_reverse:
        ys.reverse()
    return torch.cat(ys), last_h, last_c


def lstm_state(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and c behind a step, (B, H) each, from its gates (B, 4 H) and the c before it."""
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def run_steps(step: Callable[[Tensor, State], State], xs: Sequence[Tensor], start: State) -> tuple[list[Tensor], State]:
    """Run over steps, the batches of which may shrink, or grow, as those of packed sequences do."""
    state, ys = tuple(s[: len(xs[0])] for s in start), []
    ended: list[State] = []
    for x in xs:
        if len(x) < len(state[0]):
            ended.append(tuple(s[len(x) :] for s in state))
            state = tuple(s[: len(x)] for s in state)
        elif len(x) > len(state[0]):
            state = tuple(torch.cat([s, begin[len(s) : len(x)]]) for s, begin in zip(state, start, strict=True))
        state = step(x, state)
        ys.append(state[0])
    parts = [state, *ended[::-1]]
    return ys, tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


register_handler(functions_named("lstm"), lstm_handler(run_by_steps), "input hx")
