"""Handlers of the torch functions that multiply: operands, roles and MACs of each.

A handler has the form ``handler(mode, function, *args, **kwargs)``, with the arguments of the torch function, and
passes its operations to ``mode.run``. The role of an operand follows from what it is:

- a weight is a parameter, a view of one, or the weight argument of a torch function: one range per output;
- the other operand of the weight of an ``nn.Linear`` or a convolution is the layer's input: one running range;
- the other operand of any other weight is an input with one range per vector, or per position of a convolution; and
  so is that of such a weight in a tied decoder, which sums over the outputs of the layer;
- two operands of which neither is a weight are those of attention: one range per token each, see ``run_matmul``; an
  operand whose features are not tracked has one running range.

So no range spans samples, tokens or nodes, except for running ranges, which evaluation does not change. The scales of
block formats do: blocks lie along the sum, in ``probabilities @ values`` over tokens. In eager code the memory layout
of a tensor has no influence, see ``feature_axes``. Outside of the paper's layers every grid has a
zero point (``round_with_zero_point``), and so has the grid of a weight that is computed, such as a masked one.

To add a function, write a handler and add it to ``HANDLERS_BY_NAME``.

Some operations of these functions run in float32: a sum over one element (the angles of rotary positions are such
matmuls; their operands would have ranges of one number, which rounds exactly), unless it weights the only position, as
the first step with a cache does; values of a single feature, for the same reason; operands that are sparse, complex or
not floating-point; and calls with ``out=``.

Differs: the paper and its code quantise the layers of their own models and say nothing about other operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.feature_axes import TensorMark, mark_of, set_mark
from cpt_core.quantization.op_interception import (
    OP_HANDLERS,
    Interception,
    Operands,
    QuantizedOpsMode,
)
from cpt_core.quantization.precision import in_float32

# (first operand, second operand, bias) -> output
Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# (first operand, second operand, output) -> multiply-accumulates
Macs = Callable[[Tensor, Tensor, Tensor], int]
ATTENTION_SCORES = ("attention_query", "attention_key")
ATTENTION_CONTEXT = ("attention_probabilities", "attention_value")

# class names of the self-attention in the paper's BERT, see ``QuantConfig.attention``
PAPER_ATTENTION = {"BertSelfAttention"}


def is_paper_attention(module: nn.Module) -> bool:
    """Return whether a module is the self-attention of an encoder, as in the paper's BERT."""
    is_causal = getattr(module, "is_decoder", False) or getattr(
        module, "is_causal", False
    )
    return type(module).__name__ in PAPER_ATTENTION and not is_causal


def linear(
    mode: QuantizedOpsMode,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Quantise ``F.linear``: x (..., K), weight (N, K), bias (N,) -> (..., N)."""
    return run_linear(mode, weight, input, weight, bias)


def run_linear(
    mode: QuantizedOpsMode,
    parameter: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return ``F.linear`` with quantised operands; ``parameter``: the weight before it was cast, which has an owner."""
    layer = mode.find_layer(parameter)
    roles = weight_op_roles(mode, layer, "linear", parameter)
    if input.shape[-1] == 1 and layer.kind != "linear" and roles[0] != "masked_input":
        layer = in_full_precision(layer)

    def macs(x: Tensor, w: Tensor, y: Tensor) -> int:
        return x.numel() * w.shape[0]

    def run(*operands: Any) -> Tensor:
        compute = fake_quantize.operators.linear
        return mode.run(layer, "linear", compute, operands, roles, macs, "linear_grad")

    return in_float32(layer.precision, input, run, input, weight, bias)


def input_role(layer: Interception, kind: str) -> str:
    """Return the role of the input of an operation with a weight.

    A layer of another kind has no running range: its input gets a role without one.
    """
    if layer.kind == kind:
        return f"{kind}_input"
    return "conv_input" if kind == "conv" else "attention_query"


def weight_op_roles(
    mode: QuantizedOpsMode, layer: Interception, kind: str, weight: Tensor
) -> tuple[str, str]:
    """Return the roles of input and weight of a linear operation or convolution.

    A weight that is computed may be masked, so that some inputs must not influence an output. Its input then has a
    running range, since hidden inputs would change the range of a vector.
    """
    if mode.is_weight(weight):
        if kind == "linear":
            return parameter_input_role(mode, layer, weight, -1), "linear_weight"
        return input_role(layer, kind), f"{kind}_weight"
    if layer.kind == kind:
        return f"{kind}_input", "computed_weight"
    has_range = has_role(layer, "masked_input")
    return "masked_input" if has_range else input_role(layer, kind), f"{kind}_weight"


def parameter_input_role(
    mode: QuantizedOpsMode, layer: Interception, weight: Tensor, summed_dim: int
) -> str:
    """Return the role of the operand that is multiplied by a parameter, or by a view of one.

    A tied decoder sums over the *outputs* of its encoder, in ``F.linear(h, self.encoder.weight.T)``. Its input is
    another one than that of the layer, so that it gets a role without the running range.
    """
    parameter = weight if weight._base is None else weight._base
    is_matrix = parameter.dim() == 2 and weight.dim() > 1
    if layer.kind == "linear" and is_matrix and not is_running(mode, layer):
        output_stride, input_stride = parameter.stride()
        if weight.stride(summed_dim) == output_stride != input_stride:
            return "attention_query"
    return input_role(layer, "linear")


def is_running(mode: QuantizedOpsMode, layer: Interception) -> bool:
    """Return whether a layer is the innermost running module."""
    return mode.running.stack[-1].interception.precision is layer.precision


def has_role(layer: Interception, role: str) -> bool:
    """Return whether a layer has a quantiser of a role."""
    return layer.precision is not None and role in layer.precision.quantizers


def in_full_precision(layer: Interception) -> Interception:
    """Return the record of ``layer`` without its precision, so that its operations run in float32."""
    return layer._replace(precision=None)


def convolution(
    mode: QuantizedOpsMode,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """Quantise a convolution, with a range per output channel of the weight.

    Differs: biases are quantised (one range) wherever there are any; the authors' classification code cannot run with
    biases at all.
    """

    def compute(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return function(x, w, b, *rest, **more)

    def macs(x: Tensor, w: Tensor, y: Tensor) -> int:
        return y.numel() * w[0].numel()

    return run_convolution(
        mode, function, compute, (input, weight, bias), macs, options=(rest, more)
    )


def run_convolution(
    mode: QuantizedOpsMode,
    function: Any,
    compute: Compute,
    operands: Operands,
    macs: Macs,
    options: Any = None,
    arrange_weight: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return ``compute(input, weight, bias)`` with quantised operands: input (N, C, ...) or (C, ...).

    The weight (O, C, ...) has a range per output channel; ``arrange_weight`` returns another weight so, as ``compute``
    takes it. ``options``: arguments for executors.

    The input of a convolution layer, or of a masked weight, has one running range; the input of a convolution in the
    forward of another module has one range per position, over the channels. With a single channel these would be ranges
    of one number, so that it runs in float32.
    """
    input, weight, bias = operands
    layer = mode.find_layer(weight)
    roles = weight_op_roles(mode, layer, "conv", weight)
    has_running_range = layer.kind == "conv" or roles[0] == "masked_input"
    # a tied decoder, whose input is another one than that of the layer
    is_tied = arrange_weight is not None and not is_running(mode, layer)
    if layer.kind == "conv" and is_tied:
        roles, has_running_range = ("attention_query", roles[1]), False
    is_unbatched = input.dim() < weight.dim()
    batch = input.unsqueeze(0) if is_unbatched else input
    if batch.shape[1] == 1 and not has_running_range:
        layer = in_full_precision(layer)
    name = function.__name__.partition(".")[0]

    def compute_channels_last(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return compute(x.movedim(-1, 1), w, b)

    def run(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        w = w if arrange_weight is None else arrange_weight(w)
        if has_running_range or layer.precision is None:
            along = (1, None) if roles[0] == "masked_input" else (None, None)
            return mode.run(
                layer,
                name,
                compute,
                (x, w, b),
                roles,
                macs,
                "conv_grad",
                along=along,
                options=options,
            )
        by_position = x.movedim(1, -1), w, b
        return mode.run(
            layer,
            name,
            compute_channels_last,
            by_position,
            roles,
            macs,
            "conv_grad",
            along=(-1, None),
        )

    y = in_float32(layer.precision, input, run, batch, weight, bias)
    y = y.squeeze(0) if is_unbatched else y
    set_mark(y, TensorMark(dim=1 - weight.dim()))
    return y


def matmul(
    mode: QuantizedOpsMode, function: Any, first: Tensor, second: Tensor
) -> Tensor:
    """Quantise a matmul of any two operands, either of them perhaps a vector."""
    return run_matmul(mode, multiply, first, second)


def multiply(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return a @ b, without the bias."""
    return fake_quantize.operators.matmul(a, b)


def run_matmul(
    mode: QuantizedOpsMode,
    compute: Compute,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``compute(a, b, bias)``, linear in a (..., M, K) and b (..., K, N), with quantised operands.

    A weight and its other operand have ranges along the sum, over K. Of two activations, each has a range for every
    vector of its features, whether these are summed over, as in ``queries @ keys.mT``, or not, as values in
    ``probabilities @ values``. A range over tokens would let masked ones, which are multiplied by 0, change the others.
    """
    is_first_weight, is_second_weight = mode.is_weight(a), mode.is_weight(b)
    first, second = a, b
    layer = mode.running.stack[-1].interception
    if is_second_weight:
        layer = mode.find_layer(b)
    elif is_first_weight:
        layer = mode.find_layer(a)
    marks = mark_of(a), mark_of(b)
    weights_tokens = marks[0].weights_tokens or marks[1].weights_tokens
    is_scaling = a.shape[-1:] == (1,) and not weights_tokens
    if is_scaling and layer.kind != "linear":
        layer = in_full_precision(layer)
    sums = sums_features(a, marks[0], -1), sums_features(b, marks[1], -2)

    def run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        operands = a, b, bias
        if is_second_weight or is_first_weight:
            is_swapped = not is_second_weight
            parameter, summed_dim = (first, -1) if is_swapped else (second, -2)
            if parameter.dim() > 1:
                role = parameter_input_role(mode, layer, parameter, summed_dim)
                weight_roles = role, "linear_weight"
                return _run_weight_matmul(
                    mode, layer, compute, operands, weight_roles, is_swapped
                )
        # the weight may be masked, so that some inputs must not influence an output
        if marks[1].is_computed_weight and sums[0]:
            roles = weight_op_roles(mode, layer, "linear", b)
            return _run_weight_matmul(mode, layer, compute, operands, roles, False)
        if marks[0].is_computed_weight and sums[1]:
            roles = weight_op_roles(mode, layer, "linear", a)
            return _run_weight_matmul(mode, layer, compute, operands, roles, True)
        return _multiply_activations(mode, layer, compute, operands, sums)

    y = in_float32(layer.precision, a, run, a, b, bias)
    if not torch.compiler.is_compiling():
        are_weights = (
            is_first_weight or marks[0].is_computed_weight or mode.is_constant(a),
            is_second_weight or marks[1].is_computed_weight,
        )
        has_vector = a.dim() == 1 or b.dim() == 1
        dim = output_feature_dim(marks, sums, are_weights, is_scaling, has_vector)
        is_score = sums == (True, True) and not any(are_weights)
        set_mark(y, TensorMark(dim, is_score, all(are_weights)))
    return y


def sums_features(x: Tensor, mark: TensorMark, summed_dim: int) -> bool | None:
    """Return whether a matmul sums over the features of an operand; None if neither axis is known to have them.

    Args:
        x: the operand.
        mark: its mark.
        summed_dim: dimension that the matmul sums over, -1 or -2.
    """
    if x.dim() == 1:
        return None if mark.dim is None else True
    if mark.dim not in (-1, -2):
        return None
    return mark.dim == summed_dim


def output_feature_dim(
    marks: tuple[TensorMark, TensorMark],
    sums: tuple[bool | None, bool | None],
    are_weights: tuple[bool, bool],
    is_scaling: bool,
    has_vector: bool,
) -> int | None:
    """Return the feature dimension of a matmul of a (..., M, K) and b (..., K, N); None if it is not known.

    Args:
        marks: marks of a and b.
        sums: whether the matmul sums over the features of a, and of b.
        are_weights: whether a and b are weights, or buffers.
        is_scaling: whether it sums over one element, as frequencies times positions.
        has_vector: whether a or b has one dimension.
    """
    if has_vector:
        return None if None in (marks[0].dim, marks[1].dim) else -1
    if is_scaling and sums[0] is False:
        return -2
    if are_weights == (True, False):
        return {True: -2, False: -1, None: marks[1].dim}[sums[1]]
    if are_weights == (False, True):
        return {True: -1, False: -2, None: marks[0].dim}[sums[0]]
    return OUTPUT_DIMS[sums]


# whether the sum is over the features of a and of b -> feature dimension of a @ b
OUTPUT_DIMS: dict[tuple[bool | None, bool | None], int | None] = {
    (True, True): -1,
    (True, False): -1,
    (True, None): -1,
    (False, True): -2,
    (False, False): -1,
    (False, None): None,
    (None, True): None,
    (None, False): -1,
    (None, None): None,
}


def _run_weight_matmul(
    mode: QuantizedOpsMode,
    layer: Interception,
    compute: Compute,
    operands: Operands,
    roles: tuple[str, str],
    is_swapped: bool,
) -> Tensor:
    """Return a matmul with a weight, both ranges along the sum; ``is_swapped``: the first operand is the weight."""
    return _run_matmul(
        mode,
        layer,
        compute,
        operands,
        roles,
        transposed=(False, operands[1].dim() > 1),
        is_swapped=is_swapped,
    )


class _Arrangement(NamedTuple):
    """Roles and ranges of a matmul of two activations, the arguments of ``_run_matmul``."""

    roles: tuple[str, str]
    transposed: tuple[bool, bool]
    along: tuple[int | None, int | None]
    is_swapped: bool


# whether the sum is over the features of the first and the second operand -> arrangement
ARRANGEMENTS = {
    # queries times transposed keys
    (True, True): _Arrangement(ATTENTION_SCORES, (False, True), (None, -1), False),
    # probabilities times values
    (True, False): _Arrangement(ATTENTION_CONTEXT, (False, False), (None, None), False),
    # transposed values times transposed probabilities
    (False, True): _Arrangement(ATTENTION_CONTEXT, (True, True), (-1, -2), True),
    # transposed keys times values
    (False, False): _Arrangement(ATTENTION_CONTEXT, (True, False), (-2, -2), False),
}


def _multiply_activations(
    mode: QuantizedOpsMode,
    layer: Interception,
    compute: Compute,
    operands: Operands,
    sums: tuple[bool | None, bool | None],
) -> Tensor:
    """Return the matmul of a (..., M, K) and b (..., K, N), neither of them a weight.

    Each has one range for every vector of features. An untracked operand has one running range. In the paper's
    attention, keys have one range per feature over all tokens. Values of a single feature would have ranges of one
    number, and a range over tokens would let masked ones change the others, so that the matmul runs in float32.
    ``sums``: whether the matmul sums over the features of a, and of b; None where they are not tracked.
    """
    a, b, _ = operands
    roles, transposed, along, is_swapped = ARRANGEMENTS[
        sums[0] is not False, sums[1] is not False
    ]
    if sums == (True, True) and layer.is_paper_attention:
        return _run_matmul(mode, layer, compute, operands, roles)
    if None in sums:
        if not has_role(layer, "untracked_input"):
            layer = in_full_precision(layer)
        is_untracked = [sum_ is None for sum_ in sums]
        if is_swapped:
            is_untracked.reverse()
        first, second = (
            "untracked_input" if untracked else role
            for untracked, role in zip(is_untracked, roles, strict=True)
        )
        roles = first, second
    is_first_single = sums[0] is False and a.shape[-2] == 1
    is_second_single = sums[1] is False and b.shape[-1] == 1
    if is_first_single or is_second_single:
        layer = in_full_precision(layer)
    return _run_matmul(
        mode,
        layer,
        compute,
        operands,
        roles,
        transposed=(transposed[0] and a.dim() > 1, transposed[1] and b.dim() > 1),
        along=along,
        is_swapped=is_swapped,
    )


class MatmulOptions(NamedTuple):
    """Arguments of a matmul for executors.

    Attributes:
        compute: ``compute(first, second, bias)``, which multiplies the operands as the executor receives them; they may
            be transposed and swapped.
        is_paper_attention: whether it is ``first @ second`` of the paper's attention, neither transposed nor swapped.
    """

    compute: Compute
    is_paper_attention: bool


def _run_matmul(
    mode: QuantizedOpsMode,
    layer: Interception,
    compute: Compute,
    operands: Operands,
    roles: tuple[str, str],
    *,
    transposed: tuple[bool, bool] = (False, False),
    is_swapped: bool = False,
    along: tuple[int | None, int | None] = (None, None),
) -> Tensor:
    """Return a matmul computed by ``mode.run``.

    ``transposed``: whether a and b are rounded as transposed matrices; ``is_swapped``: whether b is the first operand,
    whose gradient is the input gradient.
    """
    a, b, bias = operands

    def turn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.mT if transposed[0] else x, y.mT if transposed[1] else y

    def compute_arranged(first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
        if is_swapped:
            first, second = second, first
        a, b = turn(first, second)
        return compute(a, b, bias)

    def macs(first: Tensor, second: Tensor, output: Tensor) -> int:
        return output.numel() * a.shape[-1]

    gradient = "linear_grad" if "linear_weight" in roles else "attention_grad"
    is_arranged = is_swapped or any(transposed)
    options = MatmulOptions(
        compute_arranged, layer.is_paper_attention and not is_arranged
    )
    x, y = turn(a, b)
    arranged = (y, x, bias) if is_swapped else (x, y, bias)
    return mode.run(
        layer,
        "matmul",
        compute_arranged,
        arranged,
        roles,
        macs,
        gradient,
        along=along,
        options=options,
    )


def attention(
    mode: QuantizedOpsMode,
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Quantise both matmuls of attention; scaling, mask, softmax and dropout stay in float32.

    scores = q(Q) q(K')     P = dropout(softmax(scores * scale + mask))     context = q(P) q(V)
    """
    if is_causal and attn_mask is not None:
        raise RuntimeError("attention takes a mask or is_causal=True, not both")
    # torch's mask classes, such as CausalBias, are tensors without data
    if attn_mask is not None and hasattr(attn_mask, "_materialize"):
        attn_mask = attn_mask._materialize(query.device)
    layer = mode.running.stack[-1].interception

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if enable_gqa:
            key, value = (
                x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)
                for x in (key, value)
            )
        queries_and_keys = query, key.transpose(-2, -1), None
        is_scaling = query.shape[-1] == 1
        scores_layer = in_full_precision(layer) if is_scaling else layer
        scores = _multiply_activations(
            mode, scores_layer, multiply, queries_and_keys, sums=(True, True)
        )
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            mask = torch.ones(
                scores.shape[-2:], dtype=torch.bool, device=scores.device
            ).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        probabilities = functional.dropout(
            torch.ops.aten._safe_softmax(scores, -1), dropout_p, True
        )
        return _multiply_activations(
            mode, layer, multiply, (probabilities, value, None), sums=(True, False)
        )

    return in_float32(layer.precision, query, run, query, key, value, attn_mask)


def functions_named(*names: str) -> list[Any]:
    """Return the torch functions of these names in all namespaces of torch, with their operator overloads."""
    namespaces = (
        torch,
        functional,
        Tensor,
        torch.linalg,
        torch._C._nn,
        torch._C._sparse,  # type: ignore[attr-defined]
        torch.ops.aten,
    )
    functions = [
        getattr(namespace, name)
        for name in names
        for namespace in namespaces
        if hasattr(namespace, name)
    ]
    # graphs of torch.fx call the overloads of an operator
    overload_names = ("default", "padding", "input", "data")
    overloads = [
        getattr(function, name)
        for function in functions
        for name in overload_names
        if hasattr(function, name)
    ]
    return functions + overloads


def register_handler(
    functions: list[Any], handler: Callable[..., Any], names: str
) -> None:
    """Register a handler for torch functions, or for other callables that a function mode intercepts.

    ``names``: names of the operands in their order, separated by spaces, since a caller may pass them by keyword.
    """
    operands = names.split()

    @wraps(handler)
    def bound(mode: QuantizedOpsMode, function: Any, *args: Any, **kwargs: Any) -> Any:
        while kwargs and len(args) < len(operands) and operands[len(args)] in kwargs:
            args = (*args, kwargs.pop(operands[len(args)]))
        return handler(mode, function, *args, **kwargs)

    OP_HANDLERS.update(dict.fromkeys(functions, bound))


# name of a torch function -> handler, and the names of its operands
HANDLERS_BY_NAME: dict[str, tuple[Callable[..., Any], str]] = {
    "linear": (linear, "input weight bias"),
    **{f"conv{n}d": (convolution, "input weight bias") for n in (1, 2, 3)},
    **dict.fromkeys(("matmul", "__matmul__"), (matmul, "input other")),
    **dict.fromkeys(("mm", "bmm"), (matmul, "input mat2")),
    "scaled_dot_product_attention": (attention, "query key value attn_mask"),
}
for _name, (_handler, _operands) in HANDLERS_BY_NAME.items():
    register_handler(functions_named(_name), _handler, _operands)


def module_kind(module: nn.Module) -> str:
    """Return the kind of a layer: "linear", "conv" or "lstm", which have running ranges, else "attention"."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, _ConvNd):
        return "conv"
    # a projection would be a third matmul
    if type(module) is nn.LSTM and not module.proj_size:
        return "lstm"
    return "attention"
