"""Products that no layer reports: what a matmul, convolution or attention written as a plain function costs."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Product:
    """One product of two operands."""

    macs: int  # multiply-accumulates; each of the gradients takes as many
    error: bool  # the first operand needs a gradient
    weight: bool  # the second one does
    # of the first operand, of the second, of the result; 0 for what a fused operation keeps to itself
    elements: tuple[int, int, int]


Count = Callable[[tuple[Any, ...], Any], Iterable[Product]]
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
FUSED_ATTENTION = (
    "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention fused_attention_overrideable "
    "attention_math_for_mps"
).split()


def products_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Product]:
    """Return the products that an operation of torch computes; most compute none.

    Convolutions forward, and operations for which the program has registered a formula, are counted by torch's own
    ``flop_registry``; the others by ``OWN``, which knows more of them, groups and the operands of fused attention.
    """
    name = name_of(operation)
    if name in OWN:
        found = list(OWN[name](args, out))
    elif isinstance(operation, HigherOrderOperator):
        raise NotImplementedError(f"cannot look into torch's {name}")
    elif (flops := flop_registry.get(operation._overloadpacket)) is not None:
        first, second = [*(a for a in args if isinstance(a, Tensor)), None, None][:2]
        found = [_product(flops(*args, **kwargs, out_val=out) // 2, first, second)]
    else:
        return []
    if found:  # the last one's result is the operation's
        x, w, _ = found[-1].elements
        found[-1] = replace(found[-1], elements=(x, w, _stored(first_of(out))))
    return found


def first_of(out: Any) -> Any:
    """Return the first of several results, or the only one."""
    return out[0] if isinstance(out, (tuple, list)) and out else out


@cache
def name_of(operation: Any) -> str:
    """Return the name of an operation, without "aten::" and the mark of operations in place."""
    name = operation.name() if isinstance(operation, HigherOrderOperator) else operation._schema.name
    return str(name).removeprefix("aten::").removesuffix("_")


def _needs(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _stored(value: Any) -> int:
    """Elements that a tensor stores: those of a sparse one that are not 0."""
    if not isinstance(value, Tensor):
        return 0
    return value._nnz() if value.layout in SPARSE else value.numel()


def _product(macs: int, first: Any, second: Any) -> Product:
    return Product(int(macs), _needs(first), _needs(second), (_stored(first), _stored(second), 0))


def _attention(args: tuple[Any, ...], out: Any) -> Iterator[Product]:
    """Both products of fused attention, as the unfused form has them: Q K', then P V; masks save nothing."""
    q, k, v = args[:3]
    scores = _product(q.numel() * k.shape[-2], q, k)
    yield scores
    macs = q.numel() // q.shape[-1] * v.shape[-2] * v.shape[-1]
    yield Product(macs, scores.error or scores.weight, _needs(v), (0, v.numel(), 0))


def _attention_backward(args: tuple[Any, ...], out: Any) -> Iterator[Product]:
    """The gradients that fused attention hands on, each one product, as the unfused form has them: dQ, dK; dV, dP."""
    gradient, q, k, v = args[:4]
    scores, context = q.numel() * k.shape[-2], gradient.numel() * v.shape[-2]
    of_q, of_k, of_v = map(_needs, (q, k, v))
    for macs, needed in ((context, of_v), (context, of_q or of_k), (scores, of_q), (scores, of_k)):
        if needed:
            yield _product(macs, gradient, None)


def _convolution_backward(args: tuple[Any, ...], out: Any) -> Iterator[Product]:
    """The gradients of input and weight that are asked for: every weight meets every place of the narrower image."""
    gradient, x, weight, transposed, asked = *args[:3], args[7], args[10]
    image = x if transposed else gradient
    macs = image.shape[0] * math.prod(image.shape[2:]) * weight.numel()
    for other, needed in zip((weight, x), asked, strict=False):
        if needed:
            yield _product(macs, gradient, other)


def _times_columns(args: tuple[Any, ...], out: Any, first: int = 0) -> Iterator[Product]:
    """Every stored element of the first operand meets every column of the second; a vector's partner needs no sum."""
    x, w = args[first : first + 2]
    found = _product(_stored(x) * (w.shape[-1] if w.dim() > 1 else 1), x, w)
    yield replace(found, error=found.error and w.dim() > 1, weight=found.weight and x.dim() > 1)


def _grouped(args: tuple[Any, ...], out: Any) -> Iterator[Product]:
    """A product per group, of experts for example: rows (or columns) belong to one group each."""
    x, w = args[:2]
    yield _product(x.shape[-2] * w.numel() if x.dim() > w.dim() else x.numel() * w.shape[-1], x, w)


def _grouped_backward(args: tuple[Any, ...], out: Any) -> Iterator[Product]:
    """Both gradients at once."""
    x, w, _, gradient = args
    yield _product(gradient.numel() * x.shape[-1], gradient, w)
    yield _product(gradient.numel() * x.shape[-1], x, gradient)


def _linear(args: tuple[Any, ...], out: Any) -> Iterator[Product]:
    yield _product(out.numel() * args[0].shape[-1], *args[:2])


def _trilinear(args: tuple[Any, ...], out: Any) -> Iterator[Product]:
    """Both products of three factors, as ``nn.Bilinear`` has: t = x A, a row (O, J) for every x of I, then y = t z.

    ``absent`` are the dimensions that a factor lacks; what the third one lacks is summed in the first product.
    """
    x, a, z = args[:3]
    *absent, summed = map(set, args[3:7])
    sizes: dict[int, int] = {}
    for factor, missing in zip((x, a, z), absent, strict=True):
        present = [d for d in range(factor.dim() + len(missing)) if d not in missing]
        sizes |= dict(zip(present, factor.shape, strict=True))
    in_first = sizes.keys() - (absent[0] & absent[1])
    in_second = sizes.keys() - (summed & absent[2])
    first = _product(math.prod(sizes[d] for d in in_first), x, a)
    yield first
    yield Product(math.prod(sizes[d] for d in in_second), first.error or first.weight, _needs(z), (0, _stored(z), 0))


def _fast_path(args: tuple[Any, ...], out: Any, weights: tuple[int, ...]) -> Iterator[Product]:
    """Fused self-attention of torch's encoders without gradients: products with its weights, and attention's two."""
    x, tokens = args[0], args[0].shape[1]
    stored = sum(args[i].numel() for i in weights)
    per_token = stored + 2 * tokens * x.shape[-1]
    yield Product(x.numel() // x.shape[-1] * per_token, False, False, (x.numel(), stored, 0))


def _recurrent(args: tuple[Any, ...], out: Any, backward: bool = False) -> Iterator[Product]:
    """Rows of a fused recurrent layer, or of one direction, meet all weights; backward twice, if the input needs it."""
    x, first, second = args[:3]
    weights = [w for w in first if w.dim() == 2] if isinstance(first, (tuple, list)) else [first, second]
    stored = sum(w.numel() for w in weights)
    rows, needed = x.numel() // x.shape[-1], stored - (0 if _needs(x) else weights[0].numel())
    yield Product(rows * (stored + backward * needed), _needs(x), _needs(weights[0]), (x.numel(), stored, 0))


ADDS = ("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation", "_sparse_addmm")  # their first argument is added
OWN: dict[str, Count] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_cdist_backward"), _times_columns),
    **dict.fromkeys(ADDS, partial(_times_columns, first=1)),
    **dict.fromkeys(("_grouped_mm", "transformers::grouped_mm_fallback"), _grouped),
    "transformers::grouped_mm_fallback_backward": _grouped_backward,
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _recurrent),
    **dict.fromkeys(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward"), partial(_recurrent, backward=True)),
    **dict.fromkeys(("linear", "mkldnn::_linear_pointwise", "_euclidean_dist", "_cdist_forward"), _linear),
    "conv_tbc": lambda args, out: [_product(out.numel() * args[1][..., 0].numel(), *args[:2])],
    "linalg_matrix_exp": lambda args, out: [_product(5 * out.numel() * out.shape[-1], args[0], None)],  # unsquared
    "_trilinear": _trilinear,
    "convolution_backward": _convolution_backward,
    "torchvision::deform_conv2d": lambda args, out: [_product(out.numel() * args[1][0].numel(), *args[:2])],
    "_native_multi_head_attention": partial(_fast_path, weights=(5, 7)),
    "_transformer_encoder_layer_fwd": partial(_fast_path, weights=(3, 5, 14, 16)),
    "flex_attention": _attention,  # what its mask leaves out included
    "flex_attention_backward": lambda args, out: _attention_backward((args[5], *args[:3]), out),
    **{f"_scaled_dot_product_{kind}": _attention for kind in FUSED_ATTENTION},
    **{f"_scaled_dot_product_{kind}_backward": _attention_backward for kind in FUSED_ATTENTION},
}
