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
from contextlib import AbstractContextManager, nullcontext
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
    """Arguments of ``torch.lstm``, ``torch.gru`` and others, from the signature for padded or for packed sequences.

    Attributes:
        x: (T, B, I), (B, T, I) if ``is_batch_first``, or packed (N, I).
        sizes: number of sequences at every time step if they are packed.
        state: h and c of an LSTM, (layers * directions, B, H) each; h alone for other recurrent layers.
        weights: weights and biases of all layers and directions.
        has_biases: whether there are biases.
        num_layers: number of layers.
        dropout: probability of dropout between layers.
        training: whether the layer is in training.
        is_bidirectional: whether there are two directions.
        is_batch_first: whether the batch is the first dimension of x.
    """

    x: Tensor
    sizes: tuple[int, ...] | None
    state: tuple[Tensor, ...]
    weights: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    training: bool
    is_bidirectional: bool
    is_batch_first: bool

    @classmethod
    def from_arguments(cls, x: Tensor, *args: Any) -> RecurrentCall:
        """Return a call from the arguments ``x, *args`` of either signature."""
        sizes = None
        # has_biases is the third argument after x for padded sequences, the fourth for packed ones
        if isinstance(args[2], bool):
            state, *options = args
        else:
            batch_sizes, state, *options = args
            sizes = tuple(batch_sizes.tolist())
            options.append(False)  # packed sequences have no batch dimension
        states = (state,) if isinstance(state, Tensor) else tuple(state)
        return cls(x, sizes, states, *options)

    @property
    def directions(self) -> int:
        """Number of directions."""
        return 2 if self.is_bidirectional else 1

    @property
    def has_projection(self) -> bool:
        """Whether the layers project their hidden state."""
        return self.direction_weights(0)[-1] is not None

    def direction_weights(self, index: int) -> list[Any]:
        """Return the weights of one direction of a layer.

        They are the weights of input and hidden state, their biases or None, and the projection or None.
        """
        num_directions = self.num_layers * self.directions
        count = len(self.weights) // num_directions
        weights = self.weights[index * count : (index + 1) * count]

        biases = weights[2:4] if self.has_biases else (None, None)
        num_without_projection = 4 if self.has_biases else 2
        projection = weights[-1] if count > num_without_projection else None
        return [*weights[:2], *biases, projection]


def direction_names(num_layers: int, bidirectional: bool) -> list[str]:
    """Return the names of layers and directions, as in the parameters of ``nn.LSTM``."""
    suffixes = ("", "_reverse") if bidirectional else ("",)
    return [f"l{layer}{suffix}" for layer in range(num_layers) for suffix in suffixes]


def lstm_roles(module: Any, roles: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    """Return ``roles`` with separate "input" and "hidden" roles for every layer and direction of an LSTM."""
    shared_roles = dict(roles)
    input_quantizer = shared_roles.pop("input")
    hidden_quantizer = shared_roles.pop("hidden")
    separate_roles = {}
    for name in direction_names(module.num_layers, module.bidirectional):
        separate_roles[f"input_{name}"] = input_quantizer
        separate_roles[f"hidden_{name}"] = hidden_quantizer
    return separate_roles | shared_roles


def lstm(
    mode: QuantizedOpsMode, function: Any, input: Tensor, *args: Any
) -> tuple[Tensor, ...] | None:
    """Quantise ``torch.lstm``: return hidden states, last h and last c."""
    layer = mode.running.stack[-1].interception
    if layer.kind != "lstm":
        return None
    if layer.precision is None or not mode.is_active(layer.precision):
        return function(input, *args)
    call = RecurrentCall.from_arguments(input, *args)
    if call.is_bidirectional or call.sizes is not None:
        return extensions.load("recurrences").run_lstm(layer.precision, call)
    return run_in_float32(call, partial(run_layers, layer.precision))


def run_in_float32(
    call: RecurrentCall, run: Callable[[RecurrentCall], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return ``run(call)``, computed in float32 also under autocast, in the types of the input and the state."""
    inputs = call.x, *call.state
    for tensor in inputs:
        check_floating(tensor)  # results are cast to its dtype
    device = call.x.device.type
    dtype = torch.promote_types(call.x.dtype, torch.float32)
    state = tuple(tensor.to(dtype) for tensor in call.state)
    weights = tuple(tensor.to(dtype) for tensor in call.weights)
    no_autocast: AbstractContextManager[Any] = nullcontext()
    if torch.is_autocast_enabled(device):
        no_autocast = torch.autocast(device, enabled=False)
    with no_autocast:
        outputs = run(call._replace(x=call.x.to(dtype), state=state, weights=weights))
    return tuple(
        output.to(tensor.dtype) for output, tensor in zip(outputs, inputs, strict=True)
    )


def run_layers(
    precision: LayerPrecision, call: RecurrentCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Run all layers, with dropout between them; return hidden states, last h and last c."""
    x = call.x.transpose(0, 1).contiguous() if call.is_batch_first else call.x
    if len(x) == 0:
        raise ValueError("the sequences of a recurrent layer need at least one step")
    first_h, first_c = call.state
    last_h, last_c = [], []
    for layer in range(call.num_layers):
        if call.dropout and layer > 0:
            x = functional.dropout(x, call.dropout, call.training)
        weights = call.direction_weights(layer)
        x, h, c = run_layer(
            precision, f"l{layer}", weights, x, first_h[layer], first_c[layer]
        )
        last_h.append(h)
        last_c.append(c)
    hidden_states = x.transpose(0, 1) if call.is_batch_first else x
    return hidden_states, torch.stack(last_h), torch.stack(last_c)


def run_layer(
    precision: LayerPrecision,
    name: str,
    weights: Sequence[Any],
    x: Tensor,
    h: Tensor,
    c: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer step by step; return hidden states (T, B, H), last h and last c.

    Args:
        precision: precision of the LSTM.
        name: name of the layer, such as "l0".
        weights: W (4 H, I), U (4 H, H), and their biases (4 H,) or None.
        x: inputs (T, B, I).
        h: hidden state before the first step, (B, H).
        c: cell state before the first step, (B, H).
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
    """Return h and c after a step, (B, H) each, from its gates (B, 4 H) and the c before it."""
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


register_handler(functions_named("lstm"), lstm, "input hx")
