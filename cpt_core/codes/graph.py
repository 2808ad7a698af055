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

PART = 1 << 24  # numbers that the plain sum over neighbours gathers at a time


def round_scale_encode(
    gradient: Tensor, scale: Tensor | None, levels: Tensor, key: Tensor | None
) -> tuple[QuantizedTensor, Tensor]:
    """Return what ``round_scale_round`` does, the gradient of ``x`` as codes; levels of at most 8 bits."""
    codes, low, width, of_bias = operators.active.round_scale_encode(gradient, scale, levels, key)
    return QuantizedTensor.with_codes(codes, low, width, levels), of_bias


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
    rounded, totals, rows = QuantizedTensor.with_codes(codes, low, width, levels), codes.sum(0), len(codes)
    once = rounded.dequantize() if scale is None else rounded.dequantize() * scale
    whole = (totals + rows * rounded.half.long()).double()  # exact
    of_bias = (whole * rounded.scale.double() + rows * low.double()).float()
    low, width = ops.range(once, "per_tensor")
    return ops.encode(once, low, width, levels, None if key is None else key + 1, key is not None), low, width, of_bias


def _sum_neighbours(
    _: Any, codes: Tensor, zero: Tensor, scale: Tensor, rest: Tensor, indptr: Tensor, indices: Tensor
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


OPERATORS: dict[str, tuple[str, Any, Any]] = {  # schema, what it does with and without numbers
    "round_scale_encode": (
        "(Tensor gradient, Tensor? scale, Tensor levels, Tensor? key) -> (Tensor, Tensor, Tensor, Tensor)",
        _round_scale_encode,
        lambda g, *_: (torch.empty_like(g, dtype=torch.int8), *(g.new_empty(size) for size in ((), (), g.shape[1:]))),
    ),
    "sum_neighbours": (
        "(Tensor codes, Tensor zero, Tensor scale, Tensor rest, Tensor indptr, Tensor indices) -> Tensor",
        _sum_neighbours,
        lambda codes, zero, scale, rest, indptr, _: scale.new_empty(len(indptr) - 1, codes.shape[1]),
    ),
}
for _family, _library in operators.LIBRARIES.items():
    for _name, (_schema, _plain, _fake) in OPERATORS.items():
        _library.define(f"{_name}{_schema}")
        _library.impl(_name, partial(_plain, getattr(torch.ops, _family)), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_family}::{_name}", _fake, lib=_library)
