"""A quantised tensor as its codes, a byte each, and the grid that they are on: what products on codes multiply.

x = s (k - z) + r: codes k of 8 bits, a step s, the code z nearest to the value 0, and what is left there, |r| <= s / 2
where the range holds 0.

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
    """A tensor on its grid: low + k * scale, k = 0..2**bits - 1."""

    codes: Tensor  # k - 2**(bits - 1), int8
    low: Tensor  # minimum of the range, float32, broadcastable to the codes
    scale: Tensor  # the step of the grid, likewise
    half: Tensor  # 2**(bits - 1), 0-d float32

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
        """Round to a given grid of at most 8 bits; arguments as those of ``integer_reference.encode``."""
        codes = operators.active.encode(x, low, width, levels, key, clip, channels_last)
        return cls.from_codes(codes, low, width, levels)

    @classmethod
    def from_codes(
        cls, codes: Tensor, low: Tensor, width: Tensor, levels: Tensor
    ) -> QuantizedTensor:
        """Return the tensor whose codes are given, and the range and number of steps of its grid."""
        return cls(codes, low, (width / levels).clamp_min(MIN_SCALE), (levels + 1) / 2)

    @classmethod
    def quantize(cls, x: Tensor, bits: int, granularity: str) -> QuantizedTensor:
        """Round a tensor to ``bits`` bits on its own range."""
        levels = torch.tensor(2.0**bits - 1, device=x.device)
        return cls.quantize_on(x, *operators.range_of(x, granularity), levels)

    @property
    def zero(self) -> Tensor:
        """The code nearest to the value 0, float32; at the end of the codes where 0 is far outside the range."""
        return (
            (-self.low / self.scale - self.half).round().clamp(-128, 127).nan_to_num(0)
        )

    @property
    def rest(self) -> Tensor:
        """The value of that code, float32."""
        return (self.zero + self.half) * self.scale + self.low

    @property
    def has_one_scale(self) -> bool:
        """Whether all elements share one range."""
        return self.scale.numel() == 1

    def dequantize(self) -> Tensor:
        """Return the values, float32: bit for bit those of the simulation."""
        return self.codes.float().add_(self.half).mul_(self.scale).add_(self.low)

    def rearrange(self, arrange: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Return the tensor with codes, and ranges where there are several, in another shape or order."""
        low, scale = (
            v.reshape(()) if self.has_one_scale else arrange(v)
            for v in (self.low, self.scale)
        )
        return QuantizedTensor(arrange(self.codes), low, scale, self.half)

    def t(self) -> QuantizedTensor:
        """Return the tensor with its last two dimensions exchanged."""
        return self.rearrange(lambda v: v.transpose(-2, -1))

    def matrix(self) -> QuantizedTensor:
        """Return the tensor as a matrix, all dimensions but the last as its rows."""
        outer = self.codes.shape[:-1]
        return self.rearrange(
            lambda v: v.expand(*outer, v.shape[-1]).reshape(-1, v.shape[-1])
        )
