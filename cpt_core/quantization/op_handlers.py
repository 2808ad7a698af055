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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.op_interception import OP_HANDLERS, Interception, Operands, QuantizedOpsMode
from cpt_core.quantization.precision import in_float32

Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # first operand, second operand, bias
ATTENTION_SCORES = ("attention_query", "attention_key")
ATTENTION_CONTEXT = ("attention_probabilities", "attention_value")

# Self-attention of transformers whose keys have a range per head and feature, over all tokens, as in the paper's BERT.
PER_FEATURE_KEYS = {"BertSelfAttention"}


def has_keys_per_feature(module: nn.Module) -> bool:
    """Return whether the keys of a module have a range per feature: an encoder's attention, as the paper's BERT has."""
    is_causal = getattr(module, "is_decoder", False) or getattr(module, "is_causal", False)
    return type(module).__name__ in PER_FEATURE_KEYS and not is_causal


def linear(mode: QuantizedOpsMode, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Quantise ``F.linear``: x (..., K), weight (N, K), bias (N,) -> (..., N)."""
    layer = mode.layer_of(weight)
    roles = input_role(layer, "linear"), "linear_weight"

    def macs(x: Tensor, w: Tensor, y: Tensor) -> int:
        return x.numel() * w.shape[0]

    def run(*operands: Any) -> Tensor:
        compute = fake_quantize.operators.linear
        return mode.run(layer, "linear", compute, operands, roles, macs, "linear_grad")

    return in_float32(layer.precision, input, run, input, weight, bias)


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

    def compute(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return function(x, w, b, *rest, **more)

    def macs(x: Tensor, w: Tensor, y: Tensor) -> int:
        return y.numel() * w[0].numel()

    def run(*operands: Any) -> Tensor:
        roles = input_role(layer, "conv"), "conv_weight"
        name = function.__name__.partition(".")[0]
        return mode.run(layer, name, compute, operands, roles, macs, "conv_grad", options=(rest, more))

    is_unbatched = input.dim() < weight.dim()
    y = in_float32(layer.precision, input, run, input.unsqueeze(0) if is_unbatched else input, weight, bias)
    return y.squeeze(0) if is_unbatched else y


def matmul(mode: QuantizedOpsMode, function: Any, first: Tensor, second: Tensor) -> Tensor:
    """Quantise a matmul of any two operands, either of them perhaps a vector."""
    return run_matmul(mode, multiply, first, second)


def multiply(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return a @ b, without the bias."""
    return fake_quantize.operators.matmul(a, b)


def run_matmul(mode: QuantizedOpsMode, compute: Compute, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``compute(a, b, bias)``, linear in a (..., M, K) and b (..., K, N), with quantised operands."""
    is_first_weight, is_second_weight = mode.is_weight(a), mode.is_weight(b)
    layer = mode.running.stack[-1].interception
    if is_second_weight:
        layer = mode.layer_of(b)
    elif is_first_weight:
        layer = mode.layer_of(a)
    elif a.shape[-1:] == (1,):  # a scaling
        layer = layer._replace(precision=None)
    weight_roles = input_role(layer, "linear"), "linear_weight"

    def run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        operands = a, b, bias
        if is_second_weight and b.dim() > 1:
            return _run_matmul(mode, layer, compute, operands, weight_roles, transposed=(False, True))
        if is_first_weight and a.dim() > 1:
            return _run_matmul(mode, layer, compute, operands, weight_roles, is_swapped=True)
        is_transposed = b.dim() > 1 and b.stride(-1) != 1 and b.stride(-2) == 1
        roles = ATTENTION_SCORES if is_transposed else ATTENTION_CONTEXT
        return _multiply_activations(mode, layer, compute, operands, roles)

    return in_float32(layer.precision, a, run, a, b, bias)


def _multiply_activations(
    mode: QuantizedOpsMode, layer: Interception, compute: Compute, operands: Operands, roles: tuple[str, str]
) -> Tensor:
    """Multiply a (..., M, K) and b (..., K, N), neither of them a weight.

    Keys have a range per token, values one per row as they lie; with keys per feature, as in the paper's BERT, keys
    have one per row of the transposed matrix.
    """
    a, b, _ = operands
    if a.dim() > 1 < b.dim() and a.shape[-1] == 1:  # an outer product: vectors lie across the sum
        return _run_matmul(mode, layer, compute, operands, ATTENTION_CONTEXT, transposed=(True, False))
    if roles == ATTENTION_SCORES and not layer.keys_per_feature:
        return _run_matmul(mode, layer, compute, operands, roles, transposed=(False, True), along=(None, -1))
    return _run_matmul(mode, layer, compute, operands, roles)


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
    """Run a matmul by ``mode.run``.

    ``transposed``: whether a and b are rounded as transposed matrices; ``is_swapped``: whether b is the first operand,
    whose gradient is the input gradient.
    """
    a, b, bias = operands

    def arrange(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Transpose or swap a and b; the same undoes it."""
        if transposed[0]:
            x = x.mT
        if transposed[1]:
            y = y.mT
        return (y, x) if is_swapped else (x, y)

    def compute_arranged(first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
        return compute(*arrange(first, second), bias)

    def macs(first: Tensor, second: Tensor, output: Tensor) -> int:
        return output.numel() * a.shape[-1]

    gradient = "linear_grad" if "linear_weight" in roles else "attention_grad"
    options = compute_arranged  # for executors that only round
    arranged = *arrange(a, b), bias
    return mode.run(layer, "matmul", compute_arranged, arranged, roles, macs, gradient, along=along, options=options)


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
        operands = query, key.transpose(-2, -1), None
        scores = _multiply_activations(mode, layer, multiply, operands, ATTENTION_SCORES)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        probabilities = functional.dropout(torch.ops.aten._safe_softmax(scores, -1), dropout_p, True)
        return _multiply_activations(mode, layer, multiply, (probabilities, value, None), ATTENTION_CONTEXT)

    return in_float32(layer.precision, query, run, query, key, value, attn_mask)


def functions_named(*names: str) -> list[Any]:
    """Return the functions of torch with these names, wherever it has them."""
    places = (torch, functional, Tensor, torch.linalg, torch._C._nn, torch._C._sparse, torch.ops.aten)  # type: ignore[attr-defined]
    found = [getattr(place, name) for name in names for place in places if hasattr(place, name)]
    overloads = "default", "padding", "input", "data"  # of the operators that graphs are made of
    return found + [getattr(f, name) for f in found for name in overloads if hasattr(f, name)]


def register_handler(functions: list[Any], handler: Callable[..., Any], names: str) -> None:
    """Let a handler run instead of functions of torch, or of other callables that a function mode sees.

    ``names``: of the operands in their order, separated by spaces: operands may be given by name.
    """
    operands = names.split()

    @wraps(handler)
    def bound(mode: QuantizedOpsMode, function: Any, *args: Any, **kwargs: Any) -> Any:
        while kwargs and len(args) < len(operands) and operands[len(args)] in kwargs:
            args = (*args, kwargs.pop(operands[len(args)]))
        return handler(mode, function, *args, **kwargs)

    OP_HANDLERS.update(dict.fromkeys(functions, bound))


HANDLERS: dict[str, tuple[Callable[..., Any], str]] = {  # function -> handler, and the names of its operands
    "linear": (linear, "input weight bias"),
    **{f"conv{n}d": (convolution, "input weight bias") for n in (1, 2, 3)},
    **dict.fromkeys(("matmul", "__matmul__"), (matmul, "input other")),
    **dict.fromkeys(("mm", "bmm"), (matmul, "input mat2")),
    "scaled_dot_product_attention": (attention, "query key value attn_mask"),
}
for _name, (_handler, _operands) in HANDLERS.items():
    register_handler(functions_named(_name), _handler, _operands)


def module_kind(module: nn.Module) -> str:
    """Return the kind of a layer: "linear", "conv" and "lstm" keep a running range of their input."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, _ConvNd):
        return "conv"
    if type(module) is nn.LSTM and not module.proj_size:  # a projection would be a third matmul
        return "lstm"
    return "attention"
