"""The quantised LSTM: a handler of ``torch.lstm``, the function that ``nn.LSTM`` calls.  Paper: section 4.4.

Both matmuls of every step are quantised: the input x_t and the hidden state h, each with one range per time step, and
both weights. The gates, the cell state and the hidden state itself stay in float32.

    gates_t = q(x_t) q(W)' + q(b) + q(h_{t-1}) q(U)' + q(b')
    i, f, o = sigmoid(gates)   g = tanh(gates)   c_t = f c_{t-1} + i g   h_t = o tanh(c_t)

The handler takes the arguments of the function apart and goes through layers and directions. What computes one of them
is ``run_by_steps``, or a faster function to the same numbers, see ``lstm_handler``; or an executor "lstm" of the same
form, of ``EXECUTORS``, that may return None. The handler leaves LSTMs with a projection and subclasses of ``nn.LSTM``
alone.

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
RunDirection = Callable[[LSTMDirection, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


class RecurrentCall(NamedTuple):
    """Arguments of ``torch.lstm`` and its like, which have two lists of them: for padded and for packed sequences."""

    x: Tensor  # (T, B, I), (B, T, I) if ``is_batch_first``, or packed (N, I)
    sizes: tuple[int, ...] | None  # sequences of every step where they are packed
    state: State  # (layers directions, B, H) each
    weights: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    training: bool
    is_bidirectional: bool
    is_batch_first: bool

    @classmethod
    def of(cls, x: Tensor, *args: Any) -> RecurrentCall:
        """Return a call of either form; ``args``: those behind x."""
        sizes = None
        if isinstance(args[2], bool):  # whether there are biases: sequences are padded
            state, *others = args
        else:
            batch_sizes, state, *others = args
            sizes = tuple(batch_sizes.tolist())
            others.append(False)  # no batch comes first
        return cls(x, sizes, (state,) if isinstance(state, Tensor) else tuple(state), *others)

    @property
    def directions(self) -> int:
        """Directions of every layer."""
        return 2 if self.is_bidirectional else 1

    @property
    def steps(self) -> int:
        """T."""
        return self.x.shape[1 if self.is_batch_first else 0] if self.sizes is None else len(self.sizes)

    def to(self, dtype: torch.dtype) -> RecurrentCall:
        """Return the call with all tensors of a type."""
        state, weights = (tuple(t.to(dtype) for t in tensors) for tensors in (self.state, self.weights))
        return self._replace(x=self.x.to(dtype), state=state, weights=weights)

    def weights_of(self, index: int) -> list[Any]:
        """Return weights of input and hidden state, their biases, and the projection, of a direction of a layer."""
        count = len(self.weights) // (self.num_layers * self.directions)
        weights = self.weights[index * count : (index + 1) * count]
        biases = weights[2:4] if self.has_biases else (None, None)
        has_projection = count > (4 if self.has_biases else 2)
        return [*weights[:2], *biases, weights[-1] if has_projection else None]


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
        return _run(layer.precision, run_direction, RecurrentCall.of(input, *args))

    return handler


def _run(precision: LayerPrecision, run_direction: RunDirection, call: RecurrentCall) -> tuple[Tensor, ...]:
    """Return hidden states, last h and last c of a quantised LSTM, in the types of its input and state."""
    before = call.x, *call.state
    for tensor in before:
        check_floating(tensor)  # the result would be cut to its dtype
    names = direction_names(call.num_layers, call.is_bidirectional)
    executor = EXECUTORS.get((precision.execution, "lstm"))
    sizes = call.sizes if call.sizes is not None and len(set(call.sizes)) > 1 else ()
    device, dtype = call.x.device.type, torch.promote_types(call.x.dtype, torch.float32)
    in_dtype = call.to(dtype)

    def run(index: int, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        w_ih, w_hh, b_ih, b_hh, _ = in_dtype.weights_of(index)
        direction = LSTMDirection(precision, names[index], w_ih, w_hh, b_ih, b_hh, call.steps, sizes)
        results = None if executor is None else executor(direction, x, h, c)
        return run_direction(direction, x, h, c) if results is None else results

    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        after = run_layers(in_dtype, run)
    return tuple(new.to(old.dtype) for new, old in zip(after, before, strict=True))


def run_layers(call: RecurrentCall, run_direction: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Run all layers, with dropout between them; return hidden states and the states behind the last step.

    Args:
        call: arguments of the function.
        run_direction: index of layer and direction, x (N, I), state (B, H) each -> hidden states (N, H), last state.
    """
    if call.steps == 0:
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
        x = x.unflatten(0, (call.steps, -1))
        x = x.transpose(0, 1) if call.is_batch_first else x
    return x, *(torch.stack(tensors) for tensors in zip(*ends, strict=True))


def run_by_steps(direction: LSTMDirection, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
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

    return run_steps(step, x.split(direction.rows_of_steps(x)), (h, c), direction.is_reverse)


def lstm_state(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and c behind a step, (B, H) each, from its gates (B, 4 H) and the c before it."""
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def run_steps(
    step: Callable[[Tensor, State], State], xs: Sequence[Tensor], start: State, is_reverse: bool
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
    y = torch.cat(ys[::-1] if is_reverse else ys)
    return y, *(torch.cat(tensors) for tensors in zip(*parts, strict=True))


register_handler(functions_named("lstm"), lstm_handler(run_by_steps), "input hx")
