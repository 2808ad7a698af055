"""Simulated (fake) quantisation: round to the grid, pass the gradient on, quantise gradients.  Paper: figure 1.

    n = 2**q - 1        s = max(range / n, 1e-8)        x_q = round(clip((x - min) / s, 0, n)) * s + min

>>> quantize(torch.tensor([0.0, 0.2, 1.0]), bits=1).tolist()
[0.0, 0.0, 1.0]

The hot path. Scales are float32, results keep the input's dtype; NaN and infinity propagate, so that loss scalers see
them. Gradients of gradients (``create_graph=True``) take every rounding as the identity, that of gradients too; the
LSTM alone refuses them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_core.quantization.noise import LongNoise, NoisePool, hash_noise
from cpt_core.quantization.quantizers import (
    IDENTITY_BITS,
    Quantizer,
    check_bits,
    check_floating,
    in_parts,
    quantizer_of,
    rows_of_part,
)

MIN_SCALE = 1e-8  # smallest step of a grid; a constant tensor has range 0 and comes back unchanged


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
    if in_parts(x) and x.dtype == torch.float32 and x.is_contiguous():
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
    rows = rows_of_part(x)
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


class _StraightThrough(torch.autograd.Function):
    """Round in the forward pass, hand the gradient on unchanged in the backward pass; saves nothing.

    An own Function because the gradient of ``clamp`` at its bounds has changed between versions of torch, and the
    extremes of a min-max range always sit on the bounds. (A separate ``setup_context`` would double the time of a
    small layer: torch then inspects the signature in every call.)
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, low: Tensor, width: Tensor, levels: Tensor, noise: Tensor | LongNoise | None, clip: bool
    ) -> Tensor:
        return round_to_grid(x, low, width, levels, noise, clip)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return gradient, None, None, None, None, None


def straight_through(x: Tensor, low: Tensor, width: Tensor, levels: Tensor, clip: bool = False) -> Tensor:
    """Quantise ``x`` on a given range with the straight-through estimator; see ``round_to_grid`` for arguments.

    Paper: figure 1. The gradient passes unchanged everywhere, also for clipped values.
    """
    return _StraightThrough.apply(x, low, width, levels, None, clip)


def quantize(x: Tensor, bits: int, quantizer: Quantizer | str = "conv_input") -> Tensor:
    """Quantise a tensor to ``bits`` bits on its own range, with the straight-through estimator.

    Args:
        x: floating tensor of any shape; empty tensors come back as they are.
        bits: 1 to 32; 24 and more is the identity.
        quantizer: a ``Quantizer`` or a role of ``QUANTIZERS``; its rounding and running range play no part here.

    Raises:
        ValueError: for an unknown role, bits outside 1..32, or a tensor of integers, booleans or complex numbers.
    """
    check_floating(x)
    quantizer = quantizer_of(quantizer)
    check_bits("bits", bits)
    if bits >= IDENTITY_BITS or x.numel() == 0:
        return x
    low, width = quantizer.range_of(x.detach())
    return straight_through(x, low, width, low.new_tensor(levels_of(bits)), quantizer.clips)


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
    low, width = quantizer.range_of(gradient.detach())
    noise: Tensor | LongNoise | None = None
    if quantizer.rounding == "stochastic":
        if torch.compiler.is_compiling():
            assert key is not None
            noise = hash_noise(gradient, key)
        else:
            assert pool is not None
            long = gradient.numel() > NoisePool.SIZE
            noise = pool.draw_long(gradient) if long else pool.draw(gradient)
    # with create_graph=True the gradient has one of its own, which passes the rounding
    rounded = _StraightThrough.apply if gradient.requires_grad else round_to_grid
    return rounded(gradient, low, width, levels, noise, quantizer.clips)


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
