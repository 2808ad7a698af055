"""Products of quantised operands, computed on their codes: int8 x int8 -> int32, and back to float32.

A quantised tensor is x = s (k - z) + r: codes k of 8 bits, a step s, the code z nearest to the value 0, and what is
left there, |r| <= s / 2 where the range holds 0. A product over K elements is

    a b = s_a s_b sum (k_a - z_a)(k_b - z_b)  +  s_a r_b sum (k_a - z_a)  +  r_a (s_b sum (k_b - z_b) + K r_b)

The first sum is exact: sum k_a k_b in int32, less z_b sum k_a and z_a sum (k_b - z_b). What is multiplied afterwards
is no larger than it, so that nothing cancels. Steps may differ along a product's rows or columns, not along K.

>>> a = QuantizedTensor.of(torch.tensor([[0.0, 1.0]]), 2, "per_tensor")
>>> a.codes.tolist(), matmul(a, a.t()).tolist()
([[-2, 1]], [[1.0]])

Shapes: M rows and N columns of a product, K elements of a sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cpt_core.kernels import operators
from cpt_core.kernels.reference import MIN_SCALE

MOST_BITS = 8  # codes are int8
LONGEST = 1 << 15  # of a sum: 255 * 255 * 2**15 < 2**31
CUDA_MULTIPLE, CUDA_LEAST = 8, 32  # sizes that ``torch._int_mm`` takes on CUDA


class QuantizedTensor(NamedTuple):
    """A tensor on its grid: low + k * scale, k = 0..2**bits - 1.

    Attributes:
        codes: k - 2**(bits - 1), int8.
        low: minimum of the range, float32, broadcastable to the codes.
        scale: the step of the grid, likewise.
        half: 2**(bits - 1), 0-d float32.
    """

    codes: Tensor
    low: Tensor
    scale: Tensor
    half: Tensor

    @classmethod
    def on(
        cls, x: Tensor, low: Tensor, width: Tensor, levels: Tensor, key: Tensor | None = None, clip: bool = False
    ) -> QuantizedTensor:
        """Round to a given grid of at most 8 bits; arguments as those of ``reference.round_to_grid``."""
        codes = operators.encode(x, low, width, levels, key, clip)
        return cls(codes, low, (width / levels).clamp_min(MIN_SCALE), (levels + 1) / 2)

    @classmethod
    def of(cls, x: Tensor, bits: int, granularity: str) -> QuantizedTensor:
        """Round a tensor to ``bits`` bits on its own range."""
        levels = torch.tensor(2.0**bits - 1, device=x.device)
        return cls.on(x, *operators.range_of(x, granularity), levels)

    def dequantize(self) -> Tensor:
        """Return the values, float32: bit for bit those of the simulation."""
        return (self.codes + self.half).mul_(self.scale).add_(self.low)

    def t(self) -> QuantizedTensor:
        """Return the transposed matrix."""
        low, scale = (v.t() if v.dim() == 2 else v for v in (self.low, self.scale))
        return QuantizedTensor(self.codes.t(), low, scale, self.half)

    def matrix(self) -> QuantizedTensor:
        """Return the tensor as a matrix, all dimensions but the last as its rows."""
        columns = self.codes.shape[-1]
        low, scale = (
            v.expand(*self.codes.shape[:-1], v.shape[-1]).reshape(-1, v.shape[-1]) if v.numel() > 1 else v.reshape(())
            for v in (self.low, self.scale)
        )
        return QuantizedTensor(self.codes.reshape(-1, columns), low, scale, self.half)


def varies(x: Tensor, dim: int) -> bool:
    """Whether a scale of a matrix has several numbers along one of its dimensions."""
    return x.dim() == 2 and x.shape[dim] > 1


def has_integer_form(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether the steps of both leave the sum of the product of two matrices."""
    return not (varies(a.scale, 1) or varies(b.scale, 0))


def matmul(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``, float32.

    Args:
        a: (M, K), its scale 0-d or (M, 1).
        b: (K, N), its scale 0-d or (1, N).
        bias: (N,) or None.

    Raises:
        ValueError: for steps that differ along K.
    """
    if not has_integer_form(a, b):
        raise ValueError(f"steps differ along the sum: {tuple(a.scale.shape)} and {tuple(b.scale.shape)}")
    K = a.codes.shape[1]
    if K <= LONGEST:
        return _matmul(a, b, bias)
    parts = range(0, K, LONGEST)
    return sum(
        _matmul(
            a._replace(codes=a.codes[:, k : k + LONGEST]),
            b._replace(codes=b.codes[k : k + LONGEST]),
            None if k else bias,
        )
        for k in parts
    )  # type: ignore[return-value]


def _matmul(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None) -> Tensor:
    (M, K), N = a.codes.shape, b.codes.shape[1]
    sums_a, zero_a, rest_a, scale_a = _side(a, M, 1)
    sums_b, zero_b, rest_b, scale_b = _side(b, N, 0)
    shifted_a, shifted_b = sums_a - K * zero_a, sums_b - K * zero_b
    product = int_mm(a.codes, b.codes)
    operators.active.affine_(
        product,
        torch.stack([sums_a, zero_a]),
        torch.stack([scale_a, scale_a * shifted_a, rest_a]),
        torch.stack([zero_b, shifted_b]),
        torch.stack([scale_b, rest_b, scale_b * shifted_b + K * rest_b, scale_b.new_zeros(N) if bias is None else bias]),
    )
    return product.view(torch.float32)


def _side(x: QuantizedTensor, length: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what follows the rows (dim 1 is summed) or columns (dim 0) of a product: sums of codes, z, r and s."""
    low, scale = (v.reshape(-1).expand(length) for v in (x.low, x.scale))
    zero = (-low / scale - x.half).round().clamp(-128, 127).nan_to_num(0)
    return sum_codes(x.codes, dim), zero.int(), (zero + x.half) * scale + low, scale


def sum_codes(codes: Tensor, dim: int) -> Tensor:
    """Return the sums of a matrix of codes over its columns (dim 1) or rows (dim 0), int32; faster than ``sum``."""
    ones = codes.new_ones(codes.shape[dim], 1)
    return int_mm(codes if dim else codes.t(), ones).squeeze(1)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two int8 matrices of any size, int32."""
    (M, K), N = a.shape, b.shape[1]
    if not a.is_cuda or 0 in (M, K, N):
        return torch._int_mm(a, b)
    rows = max(M, CUDA_LEAST)
    K_, N_ = (-(-size // CUDA_MULTIPLE) * CUDA_MULTIPLE for size in (K, N))
    a = torch.nn.functional.pad(a, (0, K_ - K, 0, rows - M))
    b = torch.nn.functional.pad(b, (0, N_ - N, 0, K_ - K))
    return torch._int_mm(a, b)[:M, :N].contiguous()
