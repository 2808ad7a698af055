"""Quantised tensors: int8 codes and the affine grid that they lie on, the operands of int8 matmuls.

A value is x = s (k - z) + r, with its code k of 8 bits, the scale s, the zero point z, which is the code nearest to the
value 0, and the value r of that code. |r| <= s / 2 where the range contains 0; the zero point is an integer.

>>> x = QuantizedTensor.quantize(torch.tensor([[0.0, 3.0]]), 2, "per_tensor")
>>> x.codes.tolist(), x.dequantize().tolist()
([[-2, 1]], [[0.0, 3.0]])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cpt_core.quantization.rounding import MIN_SCALE
from cpt_extras.kernels import operators


class QuantizedTensor(NamedTuple):
    """A tensor on an affine grid, whose points are low + i * scale for i = 0..2**bits - 1.

    Attributes:
        codes: i - code_offset, int8.
        low: minimum of the range, float32, broadcastable to the codes.
        scale: distance of two points, float32, broadcastable to the codes.
        code_offset: 2**(bits - 1), 0-d float32.
    """

    codes: Tensor
    low: Tensor
    scale: Tensor
    code_offset: Tensor

    @classmethod
    def quantize_on(
        cls,
        x: Tensor,
        low: Tensor,
        width: Tensor,
        levels: Tensor,
        key: Tensor | None = None,
        clip: bool = False,
        channels_last: bool = False,
    ) -> QuantizedTensor:
        """Quantise ``x`` to a given grid of at most 8 bits, with the arguments of ``integer_reference.encode``."""
        codes = operators.active.encode(x, low, width, levels, key, clip, channels_last)
        return cls.from_codes(codes, low, width, levels)

    @classmethod
    def from_codes(
        cls, codes: Tensor, low: Tensor, width: Tensor, levels: Tensor
    ) -> QuantizedTensor:
        """Return the tensor with given codes, on the grid of a range and a number of steps."""
        return cls(codes, low, (width / levels).clamp_min(MIN_SCALE), (levels + 1) / 2)

    @classmethod
    def quantize(cls, x: Tensor, bits: int, granularity: str) -> QuantizedTensor:
        """Quantise a tensor to ``bits`` bits on its own range."""
        levels = torch.tensor(2.0**bits - 1, device=x.device)
        return cls.quantize_on(x, *operators.range_of(x, granularity), levels)

    @property
    def zero_point(self) -> Tensor:
        """The zero point: the code nearest to the value 0, float32; the first or last code if 0 is far out of range."""
        return (
            (-self.low / self.scale - self.code_offset)
            .round()
            .clamp(-128, 127)
            .nan_to_num(0)
        )

    @property
    def zero_value(self) -> Tensor:
        """The value of the zero point, float32."""
        return (self.zero_point + self.code_offset) * self.scale + self.low

    @property
    def has_one_scale(self) -> bool:
        """Whether all elements share one scale."""
        return self.scale.numel() == 1

    def dequantize(self) -> Tensor:
        """Return the values, float32, bit for bit as fake quantisation gives them."""
        return self.codes.float().add_(self.code_offset).mul_(self.scale).add_(self.low)

    def rearrange(self, arrange: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Apply ``arrange``, which reshapes or permutes a tensor, to the codes and to ranges that are not scalars."""
        low, scale = (
            v.reshape(()) if self.has_one_scale else arrange(v)
            for v in (self.low, self.scale)
        )
        return QuantizedTensor(arrange(self.codes), low, scale, self.code_offset)

    def t(self) -> QuantizedTensor:
        """Return the tensor with its last two dimensions exchanged."""
        return self.rearrange(lambda v: v.transpose(-2, -1))

    def matrix(self) -> QuantizedTensor:
        """Return the tensor as a matrix, all dimensions but the last as its rows."""
        outer = self.codes.shape[:-1]

        def flatten(v: Tensor) -> Tensor:
            return v.expand(*outer, v.shape[-1]).reshape(-1, v.shape[-1])

        return self.rearrange(flatten)
