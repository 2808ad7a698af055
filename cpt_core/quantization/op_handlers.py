"""Handlers of the functions of torch that multiply: operands, roles and MACs of each.

Every handler has the form ``handler(mode, function, *args, **kwargs)``, with the arguments of the function, and hands
its operations to ``mode.run``. What an operand is decides its role:

- a weight is a parameter, a view of one, or what stands where a function of torch has its weight: a range per output;
- what meets the weight of an ``nn.Linear`` or a convolution is that layer's input: one range, kept as a running range;
- what meets any other weight is an input with a range per vector;
- two operands neither of which is a weight are those of attention: each has a range per vector as it lies in memory.

Add a function here: a handler, and a line of ``HANDLERS``.

In float32, by name: a sum over one element of two operands that are no weights (the angles of rotary positions are such
products, and no sums); operands that are sparse, complex or no floating numbers; and what is told where to write
(``out=``).

Differs: the paper and its code quantise the layers of their own models; nothing there says what other operations do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from cpt_core.quantization import autocast_matmul, fake_quantize
from cpt_core.quantization.op_interception import COMPOSITE_OPS, OP_HANDLERS, Interception, QuantizedOpsMode
from cpt_core.quantization.precision import in_float32

Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # first operand, second operand, bias
ATTENTION_SCORES = ("attention_query", "attention_key")
ATTENTION_CONTEXT = ("attention_probabilities", "attention_value")

# Self-attention of transformers whose keys have a range per head and feature, over all tokens, as in the paper's BERT.
PER_FEATURE_KEYS = (
    "BertSelfAttention RobertaSelfAttention XLMRobertaSelfAttention CamembertSelfAttention ElectraSelfAttention "
    "DistilBertSelfAttention AlbertAttention ViTAttention"
).split()


def has_keys_per_feature(module: nn.Module) -> bool:
    """Return whether the keys of a module have a range per feature: an encoder's attention, as the paper's BERT has."""
    is_causal = getattr(module, "is_decoder", False) or getattr(module, "is_causal", False)
    return type(module).__name__ in PER_FEATURE_KEYS and not is_causal


# --- layers -----------------------------------------------------------------------------------------------------------


def linear(mode: QuantizedOpsMode, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Quantise ``F.linear``: x (..., K), weight (N, K), bias (N,) -> (..., N)."""
    layer = mode.layer_of(weight)
    roles = input_role(layer, "linear"), "linear_weight"

    def run(*operands: Any) -> Tensor:
        compute = fake_quantize.operators.linear
        return mode.run(layer, "linear", compute, operands, roles, _linear_macs, "linear_grad")

    return in_float32(layer.precision, input, run, input, weight, bias)


def _linear_macs(input: Tensor, weight: Tensor, output: Tensor) -> int:
    return input.numel() * weight.shape[0]


def input_role(layer: Interception, kind: str) -> str:
    """Return the role of what meets a weight: only layers of its kind keep a running range of it."""
    if layer.kind == kind:
        return f"{kind}_input"
    return "conv_input" if kind == "conv" else "attention_query"


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
    layer = mode.layer_of(weight)
    is_transposed = function in TRANSPOSED_CONVOLUTIONS

    def compute(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return function(x, w.transpose(0, 1) if is_transposed else w, b, *rest, **more)

    def macs(x: Tensor, w: Tensor, y: Tensor) -> int:
        return x.numel() * weight[0].numel() if is_transposed else y.numel() * w[0].numel()

    def run(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        roles = input_role(layer, "conv"), "conv_weight"
        operands = x, w.transpose(0, 1) if is_transposed else w, b
        name = function.__name__.partition(".")[0]
        return mode.run(layer, name, compute, operands, roles, macs, "conv_grad", options=(rest, more))

    is_unbatched = input.dim() < weight.dim()
    y = in_float32(layer.precision, input, run, input.unsqueeze(0) if is_unbatched else input, weight, bias)
    return y.squeeze(0) if is_unbatched else y


# --- matmuls ----------------------------------------------------------------------------------------------------------


def matmul(mode: QuantizedOpsMode, function: Any, first: Tensor, second: Tensor) -> Tensor:
    """Quantise a matmul of any two operands, either of them perhaps a vector."""
    return _matmul(mode, multiply, first, second)


def multiply(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return a @ b, without the bias."""
    return autocast_matmul.matmul(a, b)


def _matmul(mode: QuantizedOpsMode, compute: Compute, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``compute(a, b, bias)``, linear in a (..., M, K) and b (..., K, N), with quantised operands."""
    is_first_weight, is_second_weight = mode.is_weight(a), mode.is_weight(b)
    layer = mode.running.stack[-1].interception
    if is_second_weight:
        layer = mode.layer_of(b)
    elif is_first_weight:
        layer = mode.layer_of(a)
    elif a.dim() > 0 and a.shape[-1] == 1:  # a scaling
        layer = layer._replace(precision=None)

    def run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        roles = input_role(layer, "linear"), "linear_weight"
        if is_second_weight and b.dim() > 1:
            return _run_matmul(mode, layer, compute, (a, b.mT, bias), _second_transposed, roles, "linear_grad")
        if is_first_weight and a.dim() > 1:  # the input gradient is that of the first operand
            return _run_matmul(mode, layer, compute, (b, a, bias), _swapped, roles, "linear_grad")
        is_transposed = b.dim() > 1 and b.stride(-1) != 1 and b.stride(-2) == 1
        roles = ATTENTION_SCORES if is_transposed else ATTENTION_CONTEXT
        return _multiply_activations(mode, layer, compute, roles, a, b, bias)

    return in_float32(layer.precision, a, run, a, b, bias)


def _multiply_activations(
    mode: QuantizedOpsMode,
    layer: Interception,
    compute: Compute,
    roles: tuple[str, str],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply a (..., M, K) and b (..., K, N), neither of them a weight.

    Keys have a range per token, values one per row as they lie; with keys per feature, as in the paper's BERT, keys
    have one per row of the transposed matrix.
    """
    gradient = "attention_grad"
    if a.dim() > 1 < b.dim() and a.shape[-1] == 1:  # an outer product: vectors lie across the sum
        return _run_matmul(mode, layer, compute, (a.mT, b, bias), _first_transposed, ATTENTION_CONTEXT, gradient)
    if roles == ATTENTION_SCORES and not layer.keys_per_feature:
        operands = a, b.mT, bias
        return _run_matmul(mode, layer, compute, operands, _second_transposed, roles, gradient, along=(None, -1))
    return _run_matmul(mode, layer, compute, (a, b, bias), _unchanged, roles, gradient)


def _run_matmul(
    mode: QuantizedOpsMode,
    layer: Interception,
    compute: Compute,
    operands: tuple[Tensor, Tensor, Tensor | None],
    arrange: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    roles: tuple[str, str],
    gradient: str,
    along: tuple[int | None, int | None] = (None, None),
) -> Tensor:
    """Run a matmul by ``mode.run``; ``arrange`` makes its two operands, a and b, of those that are rounded."""

    def compute_arranged(first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
        return compute(*arrange(first, second), bias)

    def macs(first: Tensor, second: Tensor, output: Tensor) -> int:
        return _matmul_macs(*arrange(first, second))

    options = compute_arranged  # for executors that only round
    return mode.run(layer, "matmul", compute_arranged, operands, roles, macs, gradient, along=along, options=options)


def _unchanged(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first, second


def _swapped(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return second, first


def _first_transposed(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first.mT, second


def _second_transposed(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first, second.mT


def _matmul_macs(a: Tensor, b: Tensor) -> int:
    if a.dim() == 0 or b.dim() == 0:
        return 0
    if b.dim() == 1:
        return a.numel()
    if a.dim() == 1:
        return b.numel()
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return math.prod(batch) * a.shape[-2] * a.shape[-1] * b.shape[-1]


def added_matmul(
    mode: QuantizedOpsMode,
    function: Any,
    input: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Tensor:
    """Quantise ``beta input + alpha first @ second``; an ``input`` that is a parameter is a bias."""

    def scaled(factor: Any, x: Tensor) -> Tensor:
        return x if factor == 1 else factor * x

    def compute(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        product = scaled(alpha, autocast_matmul.matmul(a, b))
        return product if bias is None else scaled(beta, bias) + product

    if mode.is_weight(input) and beta != 0:
        return _matmul(mode, compute, first, second, input)
    product = scaled(alpha, _matmul(mode, multiply, first, second))
    return product if beta == 0 else scaled(beta, input) + product  # torch does not read an input times 0


# --- attention --------------------------------------------------------------------------------------------------------


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
    if attn_mask is not None and hasattr(attn_mask, "_materialize"):  # torch's own masks are tensors without numbers
        attn_mask = attn_mask._materialize(query.device)
    layer = mode.running.stack[-1].interception

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        scores = _multiply_activations(mode, layer, multiply, ATTENTION_SCORES, query, key.transpose(-2, -1))
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        probabilities = functional.dropout(torch.ops.aten._safe_softmax(scores, -1), dropout_p, True)
        return _multiply_activations(mode, layer, multiply, ATTENTION_CONTEXT, probabilities, value)

    return in_float32(layer.precision, query, run, query, key, value, attn_mask)


# --- the table --------------------------------------------------------------------------------------------------------


def functions_named(*names: str) -> list[Any]:
    """Return the functions of torch with these names, wherever it has them."""
    places = (torch, functional, Tensor, torch.linalg, torch._C._nn, torch._C._sparse, torch.ops.aten)  # type: ignore[attr-defined]
    found = [getattr(place, name) for name in names for place in places if hasattr(place, name)]
    overloads = "default", "padding", "input", "data"  # of the operators that graphs are made of
    return found + [getattr(f, name) for f in found for name in overloads if hasattr(f, name)]


TRANSPOSED_CONVOLUTIONS = frozenset(functions_named(*(f"conv_transpose{n}d" for n in (1, 2, 3))))


def register_handler(functions: list[Any], handler: Callable[..., Any], names: str) -> None:
    """Let a handler run instead of functions.

    Args:
        functions: of torch, or other callables that a function mode sees.
        handler: ``handler(mode, function, *args, **kwargs)``.
        names: of the operands in their order, separated by spaces: operands may be given by name.
    """
    bound = _with_positional_operands(handler, names.split())
    OP_HANDLERS.update(dict.fromkeys(functions, bound))


def _with_positional_operands(handler: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    @wraps(handler)
    def bound(mode: QuantizedOpsMode, function: Any, *args: Any, **kwargs: Any) -> Any:
        while kwargs and len(args) < len(names) and names[len(args)] in kwargs:
            args = (*args, kwargs.pop(names[len(args)]))
        return handler(mode, function, *args, **kwargs)

    return bound


def with_inner_functions_visible(function: Any) -> Callable[..., Any]:
    """Return a function of torch that is written in Python, without its question whether a mode wants it whole."""
    questions = "has_torch_function", "has_torch_function_variadic"
    namespace = function.__globals__ | dict.fromkeys(questions, lambda *_: False)
    inner = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    inner.__kwdefaults__ = function.__kwdefaults__
    return lambda mode, *args, **kwargs: inner(*args, **kwargs)


HANDLERS: dict[str, tuple[Callable[..., Any], str]] = {  # function -> handler, and the names of its operands
    "linear": (linear, "input weight bias"),
    **{f"conv{n}d": (convolution, "input weight bias") for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": (convolution, "input weight bias") for n in (1, 2, 3)},
    **dict.fromkeys(("matmul", "__matmul__"), (matmul, "input other")),
    **dict.fromkeys(("mm", "bmm"), (matmul, "input mat2")),
    "addmm": (added_matmul, "input mat1 mat2"),
    "baddbmm": (added_matmul, "input batch1 batch2"),
    "scaled_dot_product_attention": (attention, "query key value attn_mask"),
}
for _name, (_handler, _operands) in HANDLERS.items():
    register_handler(functions_named(_name), _handler, _operands)
COMPOSITE_OPS[functional.multi_head_attention_forward] = with_inner_functions_visible(
    functional.multi_head_attention_forward
)


def module_kind(module: nn.Module) -> str:
    """Return the kind of a layer: "linear", "conv" and "lstm" keep a running range of their input."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, _ConvNd):
        return "conv"
    if type(module) is nn.LSTM and not module.proj_size:  # a projection would be a third matmul
        return "lstm"
    return "attention"
