"""Sums in float64 that are rounded to float32, so that they do not depend on the order of additions.

A matmul library adds in another order for another number of rows: one sample alone and the same sample in its batch
differ in the last digit of float32. Such a difference is no fault, but a number that lies half-way between two values
of a grid is then rounded to another one. Sums in float64, rounded to float32, are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# operators of torch that add, and functions whose vectorised forms differ in the last digit
OPERATORS = frozenset(
    "_addmm_activation _convolution _grouped_mm _log_softmax _safe_softmax _softmax addbmm addmm addmv addr baddbmm "
    "bmm convolution cumsum dot einsum erf exp expm1 gelu linalg_vector_norm linear log log1p log2 logsumexp matmul "
    "mean mm mv native_group_norm native_layer_norm norm pow rsqrt sigmoid silu softplus std sum tanh var var_mean "
    "vdot".split()
)


class ExactSums(TorchDispatchMode):
    """Computes sums and transcendental functions in float64."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_exact_in_float64(func) or kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        is_grouped = func._schema.name == "aten::_grouped_mm"
        function = grouped_matmul if is_grouped else func
        try:
            exact_args = tree_map(_as_float64, args)
            output = function(*exact_args, **tree_map(_as_float64, kwargs))
        except (RuntimeError, NotImplementedError):  # there is no float64 kernel
            return func(*args, **kwargs)
        return tree_map(_as_float32, output) if _has_float32((args, kwargs)) else output


def grouped_matmul(
    a: Tensor, b: Tensor, ends: Tensor | None = None, *rest: Any, **more: Any
) -> Tensor:
    """Multiply each group of rows of a by its matrix of b.

    Args:
        a: rows of all groups, (M, K).
        b: matrices, (G, K, N).
        ends: index behind the last row of every group, (G,).
        rest: ignored.
        more: ignored.

    Raises:
        RuntimeError: for other shapes.
    """
    if ends is None or (a.dim(), b.dim()) != (2, 3):
        raise RuntimeError("only groups of rows are multiplied in float64")
    starts = [0, *ends.tolist()]
    parts = []
    for start, end, matrix in zip(starts[:-1], starts[1:], b, strict=True):
        parts.append(a[start:end] @ matrix)
    rows_of_no_group = len(a) - starts[-1]
    return torch.cat([*parts, a.new_zeros(rows_of_no_group, b.shape[-1])])


def _is_exact_in_float64(func: Any) -> bool:
    if isinstance(func, HigherOrderOperator) or func._schema.is_mutable:
        return False
    namespace, _, name = func._schema.name.partition("::")
    return namespace == "aten" and name in OPERATORS


def _has_float32(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype == torch.float32
    if isinstance(value, dict):
        return any(map(_has_float32, value.values()))
    return isinstance(value, (tuple, list)) and any(map(_has_float32, value))


def _as_float64(value: Any) -> Any:
    is_float32 = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.double() if is_float32 else value


def _as_float32(value: Any) -> Any:
    is_float64 = isinstance(value, Tensor) and value.dtype == torch.float64
    return value.float() if is_float64 else value
