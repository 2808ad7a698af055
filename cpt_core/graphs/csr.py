"""Sum over in-neighbours as an operator, ``torch.ops.cpt_graphs.sum``: a matmul with a sparse matrix of ones.

It is a custom operator because compilers do not support sparse tensors, while they and CUDA graphs accept an operator.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

# (D + 1,) offsets and (E,) sources, see ``Graph``
Edges = tuple[Tensor, Tensor]


def transpose_edges(indptr: Tensor, indices: Tensor, num_src: int) -> Edges:
    """Return the edges in reverse direction, of the dtype of ``indices``."""
    num_dst = len(indptr) - 1
    nodes = torch.arange(num_dst, device=indices.device, dtype=indices.dtype)
    destinations = nodes.repeat_interleave(indptr.diff(), output_size=len(indices))

    transposed_indptr, order = group_edges(indices, num_src)
    return transposed_indptr.to(indices.dtype), destinations[order]


def group_edges(nodes: Tensor, count: int) -> Edges:
    """Return (count + 1,) offsets and the order that groups edges by a node."""
    indptr = torch.zeros(count + 1, dtype=torch.int64, device=nodes.device)
    torch.cumsum(count_nodes(nodes, count), 0, out=indptr[1:])
    return indptr, torch.argsort(nodes, stable=True)


def count_nodes(nodes: Tensor, count: int) -> Tensor:
    """Return how often each of the nodes 0..count - 1 occurs, (count,) int64."""
    totals = torch.zeros(count, dtype=torch.int64, device=nodes.device)
    # expand repeats the one without memory
    ones = torch.ones((), dtype=torch.int64, device=nodes.device).expand(len(nodes))
    return totals.index_add_(0, nodes, ones)


def _sum(h: Tensor, indptr: Tensor, indices: Tensor, *back: Tensor | None) -> Tensor:
    _swallow_warning()
    matrix = _matrix(indptr, indices, h.new_ones(len(indices)), len(h))
    return torch.sparse.mm(matrix, h, "sum") if h.is_cpu else torch.mm(matrix, h)


def _matrix(indptr: Tensor, indices: Tensor, values: Tensor, columns: int) -> Tensor:
    return torch.sparse_csr_tensor(
        indptr, indices, values, (len(indptr) - 1, columns), check_invariants=False
    )


@cache
def _swallow_warning() -> None:
    """Create the first sparse tensor, at which torch warns, without the warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            "Sparse (CSR tensor support is in beta|invariant checks are implicitly)",
        )
        _matrix(
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0),
            0,
        )


def _keep_edges(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, *back = ctx.saved_tensors
    input_gradient = torch.ops.cpt_graphs.sum(gradient, *back, indptr, indices)
    return input_gradient, None, None, None, None


def _empty_sum(h: Tensor, indptr: Tensor, *edges: Any) -> Tensor:
    """Return an empty tensor of the shape of the sum, for compilers."""
    return h.new_empty(len(indptr) - 1, h.shape[1])


LIBRARY = torch.library.Library("cpt_graphs", "DEF")
LIBRARY.define(
    "sum(Tensor h, Tensor indptr, Tensor indices, Tensor? back_indptr, Tensor? back_indices) -> Tensor"
)
LIBRARY.impl("sum", _sum, "CompositeExplicitAutograd")
torch.library.register_fake("cpt_graphs::sum", _empty_sum, lib=LIBRARY)
torch.library.register_autograd(
    "cpt_graphs::sum", _backward, setup_context=_keep_edges, lib=LIBRARY
)
