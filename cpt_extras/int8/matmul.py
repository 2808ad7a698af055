"""Int8 matmuls: quantised operands are multiplied as integers, int8 x int8 -> int32, and scaled back to float32.

With x = s (k - z) + r, as in ``QuantizedTensor``, a sum of K products is

    a b = s_a s_b sum (k_a - z_a)(k_b - z_b)  +  s_a r_b sum (k_a - z_a)  +  r_a (s_b sum (k_b - z_b) + K r_b)

The first sum is exact: sum k_a k_b in int32, less z_b sum k_a and z_a sum (k_b - z_b). No term that is added to it
later is larger, so that nothing cancels. Scales may differ between rows of a and columns of b, but not along K.

Differs: libraries of integer matmuls (torchao, oneDNN's quantised layers) have integer zero points and no offset r:
    that is another grid than the paper's code has, which starts at a tensor's minimum.
Differs: what is infinite or NaN in simulation is so here, too, but int8 may overflow earlier: where s_a s_b, or the sum
    of one operand alone, is beyond float32, and where terms of both signs are, which a float32 sum may or may not see.

>>> a = QuantizedTensor.quantize(torch.tensor([[0.0, 3.0]]), 2, "per_tensor")
>>> a.codes.tolist(), matmul(a, a.t()).tolist()
([[-2, 1]], [[9.0]])

Shapes: M rows and N columns of a matmul, K elements of a sum, G matmuls at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import operators
from cpt_extras.kernels.gemm_backend import MAX_INT8_TERMS

MAX_SUMMED_ROWS = 1 << 23  # a sum of codes fits in int32: 128 * 2**23 < 2**31
# ``torch._int_mm`` on CUDA needs this many rows, and multiples of this in other sizes.
CUDA_MIN_ROWS = 32
CUDA_MULTIPLE = 8


def has_integer_form(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Return whether ``a @ b`` has an integer form: no scale differs along the summed dimension."""
    a_is_constant = a.has_one_scale or a.scale.shape[-1] == 1
    b_is_constant = b.has_one_scale or b.scale.shape[-2] == 1
    return a_is_constant and b_is_constant


def matmul(
    a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None = None
) -> Tensor:
    """Return ``a @ b + bias``, float32, of matrices or of batches of them.

    Args:
        a: (..., M, K), its ranges 0-d or (..., M, 1).
        b: (..., K, N), its ranges 0-d or (..., 1, N); the leading dimensions as those of ``a``.
        bias: (N,) or None.

    Raises:
        ValueError: if scales differ along K.
    """
    if not has_integer_form(a, b):
        raise ValueError(
            f"scales differ along the sum: {tuple(a.scale.shape)} and {tuple(b.scale.shape)}"
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
    """Return the next ``MAX_INT8_TERMS`` elements of the summed dimension of both operands."""
    end = start + MAX_INT8_TERMS
    a_part = a._replace(codes=a.codes[..., start:end])
    b_part = b._replace(codes=b.codes[..., start:end, :])
    return a_part, b_part


def multiply(
    ops: Any, a: QuantizedTensor, codes: Tensor, columns: Sequence[Any]
) -> Tensor:
    """Return ``a @ b``, float32.

    Args:
        ops: family of operators, such as ``torch.ops.cpt``.
        a: first operand, (..., M, K).
        codes: codes of the second operand, (..., K, N).
        columns: both results of ``column_tables`` of the second operand.
    """
    product = int_mm(a.codes, codes)
    ops.affine_(product.view(-1, product.shape[-1]), *row_tables(a), *columns)
    return product.view(torch.float32)


def row_tables(a: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return ``row_codes`` and ``row_values`` of ``integer_reference.dequantize_matmul_`` for the first operand."""
    K = a.codes.shape[-1]
    zero_point, zero_value, scale = _flat_grid(a, (*a.codes.shape[:-1], 1))
    sums = sum_codes(a.codes, -1).flatten()
    row_codes = torch.stack([sums, zero_point])
    row_values = torch.stack([scale, scale * (sums - K * zero_point), zero_value])
    return row_codes, row_values


def column_tables(
    b: QuantizedTensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``column_codes`` and ``column_values`` of ``integer_reference.dequantize_matmul_``, with a bias (N,)."""
    *outer, K, N = b.codes.shape
    zero_point, zero_value, scale = _flat_grid(b, (*outer, 1, N))
    shifted_sums = sum_codes(b.codes, -2).flatten() - K * zero_point
    value_sums = scale * shifted_sums + K * zero_value
    if bias is None:
        biases = torch.zeros_like(scale)
    else:
        biases = bias.expand(*outer, N).flatten()
    column_codes = torch.stack([zero_point, shifted_sums])
    column_values = torch.stack([scale, zero_value, value_sums, biases])
    return column_codes, column_values


def _flat_grid(
    x: QuantizedTensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return zero point, zero value and scale of every row or column, flat; ``shape``: that of the rows or columns."""

    def flat(v: Tensor) -> Tensor:
        v = v.reshape(()) if x.has_one_scale else v
        return v.expand(shape).flatten()

    return flat(x.zero_point).int(), flat(x.zero_value), flat(x.scale)


def sum_values(x: QuantizedTensor) -> Tensor:
    """Return the sums of a matrix over its rows, (N,) float32; its ranges are 0-d."""
    num_rows = len(x.codes)
    parts = x.codes.split(MAX_SUMMED_ROWS)
    code_sums = sum(sum_codes(part, -2).long() for part in parts)
    shifted_sums = code_sums - num_rows * x.zero_point.long()
    return x.scale * shifted_sums + num_rows * x.zero_value


def sum_codes(codes: Tensor, dim: int) -> Tensor:
    """Sum codes over columns (dim -1) or rows (dim -2) into int32, by a matmul, which is faster than ``sum``."""
    rows = codes if dim == -1 else codes.transpose(-2, -1)
    ones = codes.new_ones(codes.shape[dim], 1)
    return int_mm(rows.flatten(0, -2), ones).view(rows.shape[:-1])


def int_mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``a @ b`` of int8 matrices of any size, or of batches of them, in int32.

    Args:
        a: (..., M, K).
        b: (..., K, N).
        out: memory for the product of two matrices.
    """
    if a.dim() > 2:  # no library multiplies batches of int8 matrices
        products = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.int32)
        batches = [t.flatten(0, -3) for t in (a, b, products)]
        for x, y, product in zip(*batches, strict=True):
            int_mm(x, y, product)
        return products

    (M, K), N = a.shape, b.shape[1]
    if not a.is_cuda or 0 in (M, K, N):
        a, b = _with_row_strides(a), _with_row_strides(b)
        return torch._int_mm(a, b) if out is None else torch._int_mm(a, b, out=out)

    padded_M = max(M, CUDA_MIN_ROWS)
    padded_K = _round_up(K, CUDA_MULTIPLE)
    padded_N = _round_up(N, CUDA_MULTIPLE)
    a = torch.nn.functional.pad(a, (0, padded_K - K, 0, padded_M - M))
    b = torch.nn.functional.pad(b, (0, padded_N - N, 0, padded_K - K))
    product = torch._int_mm(a, b)[:M, :N]
    return product.contiguous() if out is None else out.copy_(product)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _with_row_strides(x: Tensor) -> Tensor:
    """Return a matrix of one row or column with row-major strides: torch 2.6 reads others wrong on the CPU."""
    if x.shape[1] == 1:
        return x.as_strided(x.shape, (x.stride(0), 1))
    if x.shape[0] == 1 and x.stride(1) == 1:
        return x.as_strided(x.shape, (x.shape[1], 1))
    return x
