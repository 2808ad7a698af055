"""Products of quantised operands, computed on their codes: int8 x int8 -> int32, and back to float32.

With x = s (k - z) + r, as of a ``QuantizedTensor``, a product over K elements is

    a b = s_a s_b sum (k_a - z_a)(k_b - z_b)  +  s_a r_b sum (k_a - z_a)  +  r_a (s_b sum (k_b - z_b) + K r_b)

The first sum is exact: sum k_a k_b in int32, less z_b sum k_a and z_a sum (k_b - z_b). What is multiplied afterwards
is no larger than it, so that nothing cancels. Steps may differ along a product's rows or columns, not along K.

Differs: libraries of integer products (torchao, oneDNN's quantised layers) have zero points that are whole numbers, and
    no offset r: that is another grid than the paper's code has, which starts at a tensor's minimum.
Differs: what the simulation finds infinite or NaN is so here, but codes may give up earlier: where s_a s_b, or the sum
    of an operand alone, is beyond float32, and where terms of both signs are, which a float32 sum may or may not see.

>>> a = QuantizedTensor.quantize(torch.tensor([[0.0, 3.0]]), 2, "per_tensor")
>>> a.codes.tolist(), matmul(a, a.t()).tolist()
([[-2, 1]], [[9.0]])

Shapes: M rows and N columns of a product, K elements of a sum, G products at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import operators
from cpt_extras.kernels.gemm_backend import MAX_INT8_TERMS

MAX_SUMMED_ROWS = 1 << 23  # of a sum of codes: 128 * 2**23 < 2**31
CUDA_MULTIPLE, CUDA_MIN_ROWS = 8, 32  # sizes that ``torch._int_mm`` takes on CUDA


def has_integer_form(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether no step of two matrices, or of many pairs, differs along the sum of their product."""
    return (a.has_one_scale or a.scale.shape[-1] == 1) and (
        b.has_one_scale or b.scale.shape[-2] == 1
    )


def matmul(
    a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None = None
) -> Tensor:
    """Return ``a @ b + bias``, float32; of matrices, or of as many pairs as the leading dimensions have.

    Args:
        a: (..., M, K), its ranges 0-d or (..., M, 1).
        b: (..., K, N), its ranges 0-d or (..., 1, N); the leading dimensions as those of ``a``.
        bias: (N,) or None.

    Raises:
        ValueError: for steps that differ along K.
    """
    if not has_integer_form(a, b):
        raise ValueError(
            f"steps differ along the sum: {tuple(a.scale.shape)} and {tuple(b.scale.shape)}"
        )
    K = a.codes.shape[-1]
    if K <= MAX_INT8_TERMS:
        return multiply(operators.active, a, b.codes, column_tables(b, bias))
    y = matmul(*_part(a, b, 0), bias)
    for start in range(MAX_INT8_TERMS, K, MAX_INT8_TERMS):
        y += matmul(*_part(a, b, start))
    return y


def _part(
    a: QuantizedTensor, b: QuantizedTensor, start: int
) -> tuple[QuantizedTensor, QuantizedTensor]:
    end = start + MAX_INT8_TERMS
    return a._replace(codes=a.codes[..., start:end]), b._replace(
        codes=b.codes[..., start:end, :]
    )


def multiply(
    ops: Any, a: QuantizedTensor, codes: Tensor, columns: Sequence[Any]
) -> Tensor:
    """Return the product with codes (..., K, N), given the tables of their columns; ``ops``: as ``torch.ops.cpt``."""
    product = int_mm(a.codes, codes)
    ops.affine_(product.view(-1, product.shape[-1]), *row_tables(a), *columns)
    return product.view(torch.float32)


def row_tables(a: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return what ``integer_reference.affine`` takes of the rows of a product."""
    zero, rest, scale = _flat_grid(a, (*a.codes.shape[:-1], 1))
    sums = sum_codes(a.codes, -1).flatten()
    return torch.stack([sums, zero]), torch.stack(
        [scale, scale * (sums - a.codes.shape[-1] * zero), rest]
    )


def column_tables(
    b: QuantizedTensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what ``integer_reference.affine`` takes of the columns of a product, with a bias (N,)."""
    *outer, K, N = b.codes.shape
    zero, rest, scale = _flat_grid(b, (*outer, 1, N))
    shifted = sum_codes(b.codes, -2).flatten() - K * zero
    added = (
        torch.zeros_like(scale) if bias is None else bias.expand(*outer, N).flatten()
    )
    return torch.stack([zero, shifted]), torch.stack(
        [scale, rest, scale * shifted + K * rest, added]
    )


def _flat_grid(
    x: QuantizedTensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z, r and s of every row or column of a product."""
    zero, rest, scale = (
        (v.reshape(()) if x.has_one_scale else v).expand(shape).flatten()
        for v in (x.zero, x.rest, x.scale)
    )
    return zero.int(), rest, scale


def sum_values(x: QuantizedTensor) -> Tensor:
    """Return the sums of a matrix over its rows, (N,) float32; its ranges 0-d."""
    zero, rest, scale = x.zero, x.rest, x.scale
    rows = len(x.codes)
    found = sum(sum_codes(part, -2).long() for part in x.codes.split(MAX_SUMMED_ROWS))
    return scale * (found - rows * zero.long()) + rows * rest


def sum_codes(codes: Tensor, dim: int) -> Tensor:
    """Return the sums of codes over columns (dim -1) or rows (dim -2), int32; faster than ``sum``."""
    rows = codes if dim == -1 else codes.transpose(-2, -1)
    return int_mm(rows.flatten(0, -2), codes.new_ones(codes.shape[dim], 1)).view(
        rows.shape[:-1]
    )


def int_mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product of int8 matrices of any size, or of as many pairs as there are, int32; a matrix in ``out``."""
    if a.dim() > 2:  # no library multiplies many at once
        product = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.int32)
        for x, y, found in zip(
            *(t.flatten(0, -3) for t in (a, b, product)), strict=True
        ):
            int_mm(x, y, found)
        return product
    (M, K), N = a.shape, b.shape[1]
    if not a.is_cuda or 0 in (M, K, N):
        return (
            torch._int_mm(_with_row_strides(a), _with_row_strides(b))
            if out is None
            else torch._int_mm(_with_row_strides(a), _with_row_strides(b), out=out)
        )
    rows = max(M, CUDA_MIN_ROWS)
    K_, N_ = (-(-size // CUDA_MULTIPLE) * CUDA_MULTIPLE for size in (K, N))
    a = torch.nn.functional.pad(a, (0, K_ - K, 0, rows - M))
    b = torch.nn.functional.pad(b, (0, N_ - N, 0, K_ - K))
    product = torch._int_mm(a, b)[:M, :N]
    return product.contiguous() if out is None else out.copy_(product)


def _with_row_strides(x: Tensor) -> Tensor:
    """Return a matrix of one row or column with the strides of rows: torch 2.6 reads others wrong on the CPU."""
    if x.shape[1] == 1:
        return x.as_strided(x.shape, (x.stride(0), 1))
    return (
        x.as_strided(x.shape, (x.shape[1], 1))
        if x.shape[0] == 1 and x.stride(1) == 1
        else x
    )
