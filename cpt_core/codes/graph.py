"""Operators of graph convolutions on codes: the sum over neighbours, and what rounds a gradient before it.

Each stands for a chain of plain operations and gives the same bits; on a CPU, C++ runs it in one pass (``graph.h``).

>>> x = QuantizedTensor.of(torch.tensor([[0.0, 1.0], [3.0, 2.0]]), 2, "per_tensor")
>>> sum_neighbours(x, torch.tensor([0, 2]), torch.tensor([0, 1])).tolist()
[[3.0, 3.0]]

Shapes: N nodes (S sources, D destinations of a block), F features, E edges; scales (N, 1), float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpt_core.kernels import operators
from cpt_core.kernels.quantized_tensor import QuantizedTensor
from cpt_core.kernels.reference import MIN_SCALE

PART = 1 << 24  # numbers that the plain sum over neighbours gathers at a time


def round_scale_encode(
    gradient: Tensor, scale: Tensor | None, levels: Tensor, key: Tensor | None
) -> tuple[QuantizedTensor, Tensor]:
    """Return what ``round_scale_round`` does, the gradient of ``x`` as codes; levels of at most 8 bits."""
    codes, low, width, of_bias = operators.active.round_scale_encode(gradient, scale, levels, key)
    return QuantizedTensor(codes, low, (width / levels).clamp_min(MIN_SCALE), (levels + 1) / 2), of_bias


def sum_neighbours(x: QuantizedTensor, indptr: Tensor, indices: Tensor) -> Tensor:
    """Return the sums over in-neighbours, (D, F) float32: of the codes in int32, then made values of.

    Args:
        x: (S, F), its range shared.
        indptr: (D + 1,), see ``graphs.Graph``; at most 2**24 edges into a node.
        indices: (E,) sources.
    """
    zero, rest, scale = (v.reshape(()) for v in (x.zero, x.rest, x.scale))
    return operators.active.sum_neighbours(x.codes, zero, scale, rest, indptr, indices)


# --- the operators ----------------------------------------------------------------------------------------------------


def _round_scale_encode(
    ops: Any, gradient: Tensor, scale: Tensor | None, levels: Tensor, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    low, width = ops.range(gradient, "per_tensor")
    codes = ops.encode(gradient, low, width, levels, key, key is not None)
    half, step = (levels + 1) / 2, (width / levels).clamp_min(MIN_SCALE)
    once = (codes + half).mul_(step).add_(low)
    once = once if scale is None else once * scale
    totals, rows = codes.sum(0), len(codes)  # exact: int64
    of_bias = ((totals + rows * half.long()).double() * step.double() + rows * low.double()).float()
    low, width = ops.range(once, "per_tensor")
    return ops.encode(once, low, width, levels, None if key is None else key + 1, key is not None), low, width, of_bias


def _sum_neighbours(
    codes: Tensor, zero: Tensor, scale: Tensor, rest: Tensor, indptr: Tensor, indices: Tensor
) -> Tensor:
    rows, degrees = len(indptr) - 1, indptr.diff()
    totals = torch.zeros(rows, codes.shape[1], dtype=torch.int32, device=codes.device)
    nodes = torch.arange(rows, device=codes.device).repeat_interleave(degrees, output_size=len(indices))
    edges = max(1, PART // max(1, codes.shape[1]))
    for start in range(0, len(indices), edges):
        part = slice(start, start + edges)
        totals.index_add_(0, nodes[part], codes[indices[part]].int())
    degrees = degrees.long().unsqueeze(1)
    return scale * (totals - degrees * zero.long()).float() + degrees.float() * rest


SCHEMAS = {
    "round_scale_encode": "(Tensor gradient, Tensor? scale, Tensor levels, Tensor? key) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    "sum_neighbours": "(Tensor codes, Tensor zero, Tensor scale, Tensor rest, Tensor indptr, Tensor indices) -> Tensor",
}
_FAKES: dict[str, Any] = {
    "round_scale_encode": lambda g, *_: (
        torch.empty_like(g, dtype=torch.int8),
        g.new_empty(()),
        g.new_empty(()),
        g.new_empty(g.shape[1:]),
    ),
    "sum_neighbours": lambda codes, zero, scale, rest, indptr, indices: scale.new_empty(
        len(indptr) - 1, codes.shape[1]
    ),
}
for _family, _library in operators.LIBRARIES.items():
    _encode = partial(_round_scale_encode, getattr(torch.ops, _family))
    for _name, _plain in (("round_scale_encode", _encode), ("sum_neighbours", _sum_neighbours)):
        _library.define(f"{_name}{SCHEMAS[_name]}")
        _library.impl(_name, _plain, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_family}::{_name}", _FAKES[_name], lib=_library)
