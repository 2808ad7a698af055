"""Quantisers: one range per tensor, channel, row or position, and the quantiser of every role.  Paper: figure 1.

A tensor is rounded to a uniform grid of ``2**q`` levels between the minimum and the maximum of its range;
``fake_quantize`` does the rounding. Add a quantiser here: a granularity, if it needs a new one, or a role.

>>> QUANTIZERS["conv_weight"].range_of(torch.tensor([[0.0, 1.0], [2.0, 5.0]]))[1].tolist()
[[1.0], [3.0]]

Shapes: N batch, C channels, F features, L positions.  Ranges are float32.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpt_core.checks import choose

BLOCK = 1 << 18  # elements of a part of a large tensor on the CPU, per thread: 1 MB
IDENTITY_BITS = 24  # float32 has 24 significant bits: from here on quantisation changes nothing worth simulating
Range = tuple[Tensor, Tensor]  # (minimum, maximum - minimum), broadcastable to the tensor, float32


# aminmax of a whole tensor is fast on the CPU; aminmax(dim=...) and min(dim) are 15-20 times slower than amin + amax.
def per_tensor(x: Tensor) -> Range:
    """One range for the whole tensor, 0-d."""
    low, high = torch.aminmax(x)
    low = low.float()
    return low, high.float() - low


def per_channel(x: Tensor) -> Range:
    """One range per slice of the first dimension (output channel), shape (C, 1, ...)."""
    dims = tuple(range(1, x.dim())) or None
    return _min_and_width(x, dims) if dims else per_tensor(x)


def per_row(x: Tensor) -> Range:
    """One range per row of the last dimension, shape (..., 1)."""
    return _min_and_width(x, (-1,))


def per_position(x: Tensor) -> Range:
    """One range per position, shared by the batch: extremes over the first and the last dimension, shape (..., 1).

    For (N, F) this is one range; for (N, L, F) one per position l, shape (L, 1).
    """
    if x.dim() < 3:
        return per_tensor(x)
    low, width = _min_and_width(x, (0, -1))
    return low.squeeze(0), width.squeeze(0)


def per_sample_mean(x: Tensor) -> Range:
    """One range: the mean over the batch of every sample's minimum and maximum, shape (1, ..., 1)."""
    dims = tuple(range(1, x.dim()))
    low, high = x.amin(dims, keepdim=True).float(), x.amax(dims, keepdim=True).float()
    low = low.mean(0, keepdim=True)
    return low, high.mean(0, keepdim=True) - low


def in_parts(x: Tensor) -> bool:
    """Whether a tensor is worked on part by part: large ones on the CPU, so that a part stays in the cache."""
    return x.is_cpu and x.numel() > 2 * BLOCK and not torch.compiler.is_compiling()


def rows_of_part(x: Tensor) -> int:
    """Rows of a part of a large tensor."""
    return max(1, BLOCK * torch.get_num_threads() * len(x) // x.numel())


def _min_and_width(x: Tensor, dims: tuple[int, ...]) -> Range:
    if 0 not in dims and x.dim() > 1 and in_parts(x):
        parts = x.split(rows_of_part(x))  # each is read from memory once
        pairs = [(p.amin(dims, True), p.amax(dims, True)) for p in parts]
        low, high = (torch.cat(values) for values in zip(*pairs, strict=True))
    else:
        low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    low = low.float()
    return low, high.float() - low


GRANULARITIES: dict[str, Callable[[Tensor], Range]] = {
    "per_tensor": per_tensor,
    "per_channel": per_channel,
    "per_row": per_row,
    "per_position": per_position,
    "per_sample_mean": per_sample_mean,
}


@dataclass(frozen=True)
class Quantizer:
    """How the tensor of one role is quantised.

    Args:
        granularity: a key of ``GRANULARITIES``.
        rounding: "nearest" (half to even) or "stochastic" (unbiased inside the range).
        running: keep a running range during training and use it in evaluation.
    """

    granularity: str
    rounding: str = "nearest"
    running: bool = False

    def __post_init__(self) -> None:
        """Check the names."""
        choose("granularity", self.granularity, GRANULARITIES)
        choose("rounding", self.rounding, ("nearest", "stochastic"))
        if self.running and self.granularity != "per_tensor":
            raise ValueError(f"a running range needs granularity 'per_tensor', got {self.granularity!r}")

    def range_of(self, x: Tensor) -> Range:
        """Return the range of a tensor that is not empty."""
        return GRANULARITIES[self.granularity](x)

    @property
    def clips(self) -> bool:
        """Whether values of the tensor itself can lie outside its range."""
        return self.granularity == "per_sample_mean" or self.rounding == "stochastic"


# The roles of the authors' layers.
# Differs: the paper speaks of clipping; like the authors' code this is an affine grid between minimum and maximum.
QUANTIZERS: dict[str, Quantizer] = {
    "conv_input": Quantizer("per_tensor", running=True),
    "conv_weight": Quantizer("per_channel"),
    "conv_grad": Quantizer("per_tensor", rounding="stochastic"),
    "linear_input": Quantizer("per_tensor", running=True),
    "linear_weight": Quantizer("per_row"),
    "linear_grad": Quantizer("per_position", rounding="stochastic"),
    "graph_input": Quantizer("per_row"),  # one range per node
    "graph_weight": Quantizer("per_row"),
    "graph_aggregation": Quantizer("per_row"),  # what enters the sum over neighbours, in Q-Agg
    "graph_grad": Quantizer("per_position", rounding="stochastic"),
    "lstm_input": Quantizer("per_tensor", running=True),  # at every time step
    "lstm_hidden": Quantizer("per_tensor", running=True),
    "lstm_weight": Quantizer("per_row"),
    "lstm_grad": Quantizer("per_row", rounding="stochastic"),  # one range per sequence, at every time step
    "attention_query": Quantizer("per_row"),  # one range per token and head
    "attention_key": Quantizer("per_row"),  # of the transposed keys: one range per head and feature, over the tokens
    "attention_probabilities": Quantizer("per_row"),
    "attention_value": Quantizer("per_row"),
    "attention_grad": Quantizer("per_position", rounding="stochastic"),
    "bias": Quantizer("per_tensor"),
}


def quantizer_of(quantizer: Quantizer | str) -> Quantizer:
    """Return a quantiser given by value or by role; ValueError names the roles."""
    if isinstance(quantizer, Quantizer):
        return quantizer
    return QUANTIZERS[choose("quantizer", quantizer, QUANTIZERS)]


def check_bits(what: str, bits: Any) -> int:
    """Return ``bits`` as an int when it is a whole number in 1..32, else raise ValueError."""
    try:
        if isinstance(bits, bool):
            raise TypeError
        value = int(bits) if isinstance(bits, float) and bits.is_integer() else operator.index(bits)
    except TypeError:
        value = 0
    if not 1 <= value <= 32:
        raise ValueError(f"{what} must be an integer from 1 to 32, got {bits!r}")
    return value


def check_floating(x: Tensor) -> None:
    """Raise ValueError for a tensor whose grid would be cut to whole numbers, or that has no order."""
    if not x.is_floating_point():
        raise ValueError(f"only floating tensors can be quantised, got {x.dtype}; convert it with .float() first")
