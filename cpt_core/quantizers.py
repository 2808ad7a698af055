"""Quantisers: ranges, the affine grid, the straight-through estimator and the gradient quantiser.  Paper: figure 1.

Quantisation is simulated: a tensor is rounded to a uniform grid of ``2**q`` levels between its minimum and its
maximum and stays in floating point.  ``QUANTIZERS`` names the range of every role.

    n = 2**q - 1        s = max(range / n, 1e-8)        x_q = round(clip((x - min) / s, 0, n)) * s + min

>>> quantize(torch.tensor([0.0, 0.2, 1.0]), bits=1).tolist()
[0.0, 0.0, 1.0]

Shapes: N batch, C channels, F features, L positions.  Ranges and scales are float32, results keep the input's dtype.
NaN and infinity propagate, so that loss scalers see them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 18  # elements of a part of a large tensor on the CPU, per thread: 1 MB
MIN_SCALE = 1e-8  # smallest step of a grid; a constant tensor has range 0 and comes back unchanged
IDENTITY_BITS = 24  # float32 has 24 significant bits: from here on quantisation changes nothing worth simulating

Range = tuple[Tensor, Tensor]  # (minimum, maximum - minimum), broadcastable to the tensor, float32


# --- ranges: one minimum and one width per ... ----------------------------------------------------
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


def _min_and_width(x: Tensor, dims: tuple[int, ...]) -> Range:
    if 0 not in dims and x.dim() > 1 and x.is_cpu and x.numel() > 2 * BLOCK and not torch.compiler.is_compiling():
        parts = x.split(_rows(x))  # each is read from memory once
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
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"unknown granularity {self.granularity!r}; choose from {', '.join(GRANULARITIES)}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"unknown rounding {self.rounding!r}; choose from nearest, stochastic")
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


# --- the grid -------------------------------------------------------------------------------------


def levels_of(bits: int) -> float:
    """Return n = 2**bits - 1, the number of steps of the grid."""
    return float(2**bits - 1)


def round_to_grid(
    x: Tensor, low: Tensor, width: Tensor, levels: Tensor, noise: Tensor | LongNoise | None, clip: bool
) -> Tensor:
    """Round ``x`` to the grid low + k * width / levels, k = 0..levels; the hot path.

    One allocation, then in place; sub, div, (noise, clip,) round, mul, add in the reference's order and therefore
    bit-identical to it. Without ``clip`` the range must come from ``x`` itself: its extremes then round to 0 and n.

    Args:
        x: any shape and floating dtype.
        low: minimum of the range, float32, broadcastable to x.
        width: maximum - minimum, likewise.
        levels: n = 2**q - 1, 0-d float32: a tensor, so that one compiled graph serves every q.
        noise: uniform in [-0.5, 0.5), the shape of x or a ``LongNoise``; None for rounding half to even.
        clip: bring values outside the range to its ends.
    """
    scale = (width / levels).clamp_min(MIN_SCALE)  # s = max(range / n, 1e-8)
    eager = x.is_cpu and not torch.compiler.is_compiling()
    bounds: Any = None
    if clip:  # scalar bounds are much faster than tensor bounds on the CPU
        bounds = (0.0, float(levels)) if eager else (torch.zeros_like(levels), levels)
    if eager and x.numel() > 2 * BLOCK and x.dtype == torch.float32 and x.is_contiguous():
        return _round_in_blocks(x, low, scale, noise, bounds)
    if isinstance(noise, LongNoise):
        noise = noise.part(0, x.numel()).view(x.shape)
    y = x - low if x.dtype == torch.float32 else x.float() - low
    y = _round(y, low, scale, noise, bounds)
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def _round(y: Tensor, low: Tensor, scale: Tensor, noise: Tensor | None, bounds: Any) -> Tensor:
    """Finish ``y`` = x - low, in place."""
    y = y.div_(scale)
    if noise is not None:
        y = y.add_(noise)
    if bounds is not None:
        y = y.clamp_(*bounds)
    return y.round_().mul_(scale).add_(low)


def _round_in_blocks(x: Tensor, low: Tensor, scale: Tensor, noise: Tensor | LongNoise | None, bounds: Any) -> Tensor:
    """Do the same to one part after the other: each stays in the processor's cache over all the operations."""
    out = torch.empty_like(x)
    y = out
    if low.numel() == 1:
        low, scale, x, y = low.reshape(()), scale.reshape(()), x.view(-1), out.view(-1)
    row = x.numel() // len(x)
    rows = _rows(x)
    by_row = low.dim() == x.dim() and len(low) == len(x)  # else the range is shared by the first dimension
    for start in range(0, len(x), rows):
        source, target = x[start : start + rows], y[start : start + rows]
        a, s = (low[start : start + rows], scale[start : start + rows]) if by_row else (low, scale)
        u: Tensor | None = None
        if isinstance(noise, LongNoise):
            u = noise.part(start * row, source.numel()).view(source.shape)
        elif noise is not None:
            u = noise.view(-1)[start * row : start * row + source.numel()].view(source.shape)
        torch.sub(source, a, out=target)
        _round(target, a, s, u, bounds)
    return out


def _rows(x: Tensor) -> int:
    """Rows of a part of a large tensor."""
    return max(1, BLOCK * torch.get_num_threads() * len(x) // x.numel())


class _StraightThrough(torch.autograd.Function):
    """Round in the forward pass, hand the gradient on unchanged in the backward pass; saves nothing.

    An own Function because the gradient of ``clamp`` at its bounds has changed between versions of torch, and the
    extremes of a min-max range always sit on the bounds. (A separate ``setup_context`` would double the time of a
    small layer: torch then inspects the signature in every call.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, width: Tensor, levels: Tensor, clip: bool) -> Tensor:
        return round_to_grid(x, low, width, levels, None, clip)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gradient, None, None, None, None


def straight_through(x: Tensor, low: Tensor, width: Tensor, levels: Tensor, clip: bool = False) -> Tensor:
    """Quantise ``x`` on a given range with the straight-through estimator; see ``round_to_grid`` for arguments.

    Paper: figure 1. The gradient passes unchanged everywhere, also for clipped values.
    """
    return _StraightThrough.apply(x, low, width, levels, clip)


def quantize(x: Tensor, bits: int, quantizer: Quantizer | str = "conv_input") -> Tensor:
    """Quantise a tensor to ``bits`` bits on its own range, with the straight-through estimator.

    Args:
        x: floating tensor of any shape; empty tensors come back as they are.
        bits: 1 to 32; 24 and more is the identity.
        quantizer: a ``Quantizer`` or a role of ``QUANTIZERS``; its rounding and running range play no part here.

    Raises:
        ValueError: for an unknown role or bits outside 1..32.
    """
    quantizer = quantizer_of(quantizer)
    check_bits("bits", bits)
    if bits >= IDENTITY_BITS or x.numel() == 0:
        return x
    low, width = quantizer.range_of(x.detach())
    return straight_through(x, low, width, low.new_tensor(levels_of(bits)), quantizer.clips)


# --- gradients ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LongNoise:
    """Noise for a tensor that is larger than the pool, which is read round and round, part by part."""

    pool: Tensor  # two times the same ``size`` numbers
    offset: int
    size: int

    def part(self, start: int, count: int) -> Tensor:
        """Return the numbers of the elements from ``start`` on, (count,)."""
        first = (self.offset + start) % self.size
        pool = self.pool if first + count <= 2 * self.size else self.pool.repeat(-(-count // self.size))
        return pool.narrow(0, first, count)


class NoisePool:
    """Uniform noise for stochastic rounding: drawn once, then read at a pseudo-random offset in every call.

    Drawing fresh noise would take most of the time of the gradient quantiser. The state is two integers, the seed and
    the number of calls, so a resumed run continues with the same noise. Copies share the pool itself.
    """

    SIZE = 1 << 22

    def __init__(self, seed: int = 0) -> None:
        """Start a stream for ``seed``, any integer."""
        self.seed, self.calls = int(seed), 0

    def draw(self, like: Tensor) -> Tensor:
        """Return noise in [-0.5, 0.5), float32, with the shape and the device of ``like``."""
        noise = self.draw_long(like).part(0, like.numel())
        if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
            return noise.as_strided(like.shape, like.stride())  # the same order in memory: adding it stays fast
        return noise.view(like.shape)

    def draw_long(self, like: Tensor) -> LongNoise:
        """Return the same noise to be read in parts, without a copy of it."""
        offset = _mix(self.seed, self.calls) % self.SIZE
        self.calls += 1
        return LongNoise(_noise(self.seed, like.device), offset, self.SIZE)

    def state_dict(self) -> dict[str, int]:
        """Return seed and number of calls."""
        return {"seed": self.seed, "calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue a stored stream."""
        self.seed, self.calls = int(state["seed"]), int(state["calls"])


@lru_cache(maxsize=4)
def _noise(seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_mix(seed, -1) >> 1)
    pool = torch.rand(NoisePool.SIZE, generator=generator, dtype=torch.float32, device="cpu").sub_(0.5)
    return torch.cat([pool, pool]).to(device)  # twice, so that every offset has SIZE values after it


def _mix(seed: int, index: int) -> int:
    """Return 64 well-mixed bits of a pair of integers (the splitmix64 finaliser)."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def hash_noise(like: Tensor, key: Tensor) -> Tensor:
    """Return noise in [-0.5, 0.5) as a function of (key, element index); what compiled code uses.

    Args:
        like: gives shape and device.
        key: 0-d int64, different in every call.
    """
    index = torch.arange(like.numel(), device=like.device, dtype=torch.int64)
    z = index ^ (key * 0x9E3779B1)  # the key is mixed in, not added: no shifted copies of one sequence
    z = (z ^ (z >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    z = (z ^ (z >> 15)) * 0x846CA68B & 0xFFFFFFFF
    z = (z ^ (z >> 16)) & 0xFFFFFF
    return (z.float() * 2.0**-24 - 0.5).view(like.shape)


class _QuantizeGradient(torch.autograd.Function):
    """Identity in the forward pass; the backward pass quantises the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, levels: Tensor, quantizer: Quantizer, pool: NoisePool | None, key: Tensor | None
    ) -> Tensor:
        ctx.levels, ctx.quantizer, ctx.pool, ctx.key = levels, quantizer, pool, key
        return y.detach()  # an alias, but no view to autograd: an in-place ReLU may follow

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return round_gradient(gradient, ctx.levels, ctx.quantizer, ctx.pool, ctx.key), None, None, None, None


def round_gradient(
    gradient: Tensor, levels: Tensor, quantizer: Quantizer, pool: NoisePool | None, key: Tensor | None
) -> Tensor:
    """Return a quantised gradient on its own range; what the backward pass of ``quantize_gradient`` does."""
    if gradient.numel() == 0:
        return gradient
    low, width = quantizer.range_of(gradient)
    noise: Tensor | LongNoise | None = None
    if quantizer.rounding == "stochastic":
        if torch.compiler.is_compiling():
            assert key is not None
            noise = hash_noise(gradient, key)
        else:
            assert pool is not None
            long = gradient.numel() > NoisePool.SIZE
            noise = pool.draw_long(gradient) if long else pool.draw(gradient)
    return round_to_grid(gradient, low, width, levels, noise, quantizer.clips)


def quantize_gradient(
    y: Tensor, levels: Tensor, quantizer: Quantizer, pool: NoisePool | None = None, key: Tensor | None = None
) -> Tensor:
    """Return ``y``; in the backward pass its gradient is quantised before it goes on.

    Args:
        y: the output of a quantised product.
        levels: 0-d float32, n = 2**q_grad - 1.
        quantizer: granularity and rounding.
        pool: noise of stochastic rounding in ordinary (eager) execution.
        key: 0-d int64, the key of the noise in compiled execution.

    Paper: figure 1. Weight gradients themselves and the update stay in full precision.
    """
    return _QuantizeGradient.apply(y, levels, quantizer, pool, key)


# --- checks ---------------------------------------------------------------------------------------


def quantizer_of(quantizer: Quantizer | str) -> Quantizer:
    """Return a quantiser given by value or by role; ValueError names the roles."""
    if isinstance(quantizer, Quantizer):
        return quantizer
    if quantizer not in QUANTIZERS:
        raise ValueError(f"unknown quantizer {quantizer!r}; choose from {', '.join(QUANTIZERS)}")
    return QUANTIZERS[quantizer]


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
