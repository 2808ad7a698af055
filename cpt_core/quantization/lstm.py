"""The quantised LSTM: a handler of ``torch.lstm``, the function that ``nn.LSTM`` calls.  Paper: section 4.4.

Both matmuls of every step are quantised: the input x_t and the hidden state h, each with one range per time step, and
both weights. The gates, the cell state and the hidden state itself stay in float32, also under autocast.

    gates_t = q(x_t) q(W)' + q(b) + q(h_{t-1}) q(U)' + q(b')
    i, f, o = sigmoid(gates)   g = tanh(gates)   c_t = f c_{t-1} + i g   h_t = o tanh(c_t)

Packed sequences and two directions are computed by ``cpt_extras.operations.recurrences``. LSTMs with a projection and
subclasses of ``nn.LSTM`` are left alone. Without quantisation ("float", or 24 bits and more) torch's own LSTM runs.

Shapes: T steps, B sequences, I inputs, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cpt_core import extensions
from cpt_core.quantization import fake_quantize
from cpt_core.quantization.fake_quantize import check_floating
from cpt_core.quantization.op_handlers import functions_named, register_handler
from cpt_core.quantization.op_interception import QuantizedOpsMode
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import Quantizer


class RecurrentCall(NamedTuple):
    """Arguments of ``torch.lstm`` and its like, which have two lists of them: for padded and for packed sequences."""

    x: Tensor  # (T, B, I), (B, T, I) if ``is_batch_first``, or packed (N, I)
    sizes: tuple[int, ...] | None  # sequences of every step where they are packed
    state: tuple[
        Tensor, ...
    ]  # h and c, (layers directions, B, H) each; of other recurrent layers h alone
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
        return cls(
            x, sizes, (state,) if isinstance(state, Tensor) else tuple(state), *others
        )

    @property
    def directions(self) -> int:
        """Directions of every layer."""
        return 2 if self.is_bidirectional else 1

    def direction_weights(self, index: int) -> list[Any]:
        """Return weights of input and hidden state, their biases, and the projection, of a direction of a layer."""
        count = len(self.weights) // (self.num_layers * self.directions)
        weights = self.weights[index * count : (index + 1) * count]
        biases = weights[2:4] if self.has_biases else (None, None)
        has_projection = count > (4 if self.has_biases else 2)
        return [*weights[:2], *biases, weights[-1] if has_projection else None]


def direction_names(num_layers: int, bidirectional: bool) -> list[str]:
    """Return the names of layers and directions, as in the parameters of ``nn.LSTM``."""
    ways = ("", "_reverse") if bidirectional else ("",)
    return [f"l{layer}{way}" for layer in range(num_layers) for way in ways]


def lstm_roles(module: Any, roles: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    """Return roles whose "input" and "hidden" every layer and direction has for itself."""
    names = direction_names(module.num_layers, module.bidirectional)
    data = {
        f"{role}_{name}": roles[role] for name in names for role in ("input", "hidden")
    }
    return data | {
        role: quantizer
        for role, quantizer in roles.items()
        if role not in ("input", "hidden")
    }


def lstm(
    mode: QuantizedOpsMode, function: Any, input: Tensor, *args: Any
) -> tuple[Tensor, ...] | None:
    """Quantise ``torch.lstm``: return hidden states, last h and last c."""
    layer = mode.running.stack[-1].interception
    if layer.kind != "lstm":
        return None
    if layer.precision is None or not mode.is_active(layer.precision):
        return function(input, *args)
    call = RecurrentCall.of(input, *args)
    if call.is_bidirectional or call.sizes is not None:
        return extensions.load("recurrences").run_lstm(layer.precision, call)
    return run_in_float32(call, partial(run_layers, layer.precision))


def run_in_float32(
    call: RecurrentCall, run: Callable[[RecurrentCall], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return ``run(call)``, computed in float32 also under autocast, in the types of the input and the state."""
    before = call.x, *call.state
    for tensor in before:
        check_floating(tensor)  # the result would be cut to its dtype
    device, dtype = call.x.device.type, torch.promote_types(call.x.dtype, torch.float32)
    state = tuple(tensor.to(dtype) for tensor in call.state)
    weights = tuple(tensor.to(dtype) for tensor in call.weights)
    with (
        torch.autocast(device, enabled=False)
        if torch.is_autocast_enabled(device)
        else nullcontext()
    ):
        after = run(call._replace(x=call.x.to(dtype), state=state, weights=weights))
    return tuple(new.to(old.dtype) for new, old in zip(after, before, strict=True))


def run_layers(
    precision: LayerPrecision, call: RecurrentCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Run all layers, with dropout between them; return hidden states, last h and last c."""
    x = call.x.transpose(0, 1).contiguous() if call.is_batch_first else call.x
    if len(x) == 0:
        raise ValueError("the sequences of a recurrent layer need at least one step")
    ends = []
    for layer in range(call.num_layers):
        if call.dropout and layer > 0:
            x = functional.dropout(x, call.dropout, call.training)
        h, c = (tensor[layer] for tensor in call.state)
        x, *end = run_layer(
            precision, f"l{layer}", call.direction_weights(layer), x, h, c
        )
        ends.append(end)
    last_h, last_c = (torch.stack(tensors) for tensors in zip(*ends, strict=True))
    return x.transpose(0, 1) if call.is_batch_first else x, last_h, last_c


def run_layer(
    precision: LayerPrecision,
    name: str,
    weights: Sequence[Any],
    x: Tensor,
    h: Tensor,
    c: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer, such as "l0", one time step after the other: x (T, B, I), h and c (B, H) before the first step.

    ``weights``: W (4 H, I), U (4 H, H), and their biases (4 H,) or None.
    """
    multiply = partial(
        precision.matmul_with_quantized_grad, fake_quantize.operators.linear
    )
    input_weight, hidden_weight = (
        precision.quantize_operand("weight", weight) for weight in weights[:2]
    )
    input_bias, hidden_bias = (
        None if bias is None else precision.quantize_operand("bias", bias)
        for bias in weights[2:4]
    )
    states = []
    for step in x:
        input_gates = multiply(
            precision.quantize_operand(f"input_{name}", step), input_weight, input_bias
        )
        hidden_gates = multiply(
            precision.quantize_operand(f"hidden_{name}", h), hidden_weight, hidden_bias
        )
        h, c = lstm_state(input_gates + hidden_gates, c)
        states.append(h)
    return torch.stack(states), h, c


def lstm_state(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and c behind a step, (B, H) each, from its gates (B, 4 H) and the c before it."""
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


register_handler(functions_named("lstm"), lstm, "input hx")
