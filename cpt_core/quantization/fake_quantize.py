"""Simulated (fake) quantisation: round to the grid, pass the gradient on, quantise gradients.  Paper: figure 1.

    n = 2**q - 1        s = max(range / n, 1e-8)        x_q = round(clip((x - min) / s, 0, n)) * s + min

>>> quantize(torch.tensor([0.0, 0.2, 1.0]), bits=1).tolist()
[0.0, 0.0, 1.0]

The rounding itself is an operator with several backends, ``cpt_core.kernels``. Scales are float32, results keep the
input's dtype. NaN stays NaN. On a range of its own a tensor with an infinity is NaN, so that loss scalers see it; on a
stored range, in evaluation, infinity is clipped to the end as any value outside. Gradients pass a rounding unchanged,
also those of clipped values; gradients of gradients (``create_graph=True``) do likewise; only the LSTM and products on
codes refuse them.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from cpt_core.checks import check_bits, whole
from cpt_core.formats.format import MOST_AFFINE, Format
from cpt_core.formats.quantizer import Quantizer, grid_of
from cpt_core.kernels import operators
from cpt_core.kernels.backend import backend
from cpt_core.kernels.grids import UNSCALED, check_blocks
from cpt_core.kernels.operators import check_floating, fake_quantize, round_in_range
from cpt_core.quantization.quantizers import quantizer_of

INT64 = (-(2**63), 2**63 - 1)  # a key of noise is one

COMPILED_KEYS_COUNT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def levels_of(bits: int) -> float:
    """Return n = 2**bits - 1, the number of steps of the grid."""
    return float(2**bits - 1)


def quantize(
    x: Tensor,
    bits: int | None = None,
    quantizer: Quantizer | str | None = None,
    *,
    format: Format | Quantizer | str | None = None,
    seed: int | None = None,
) -> Tensor:
    """Quantise a tensor to ``bits`` bits, or to a number format, on its own range; straight-through estimator.

    >>> quantize(torch.tensor([0.3, 5.1, -1000.0]), format="e4m3").tolist()
    [0.3125, 5.0, -448.0]

    Args:
        x: floating tensor of any shape; empty tensors come back as they are.
        bits: of the affine grid, 1 to 32; 24 and more is the identity.
        quantizer: a ``Quantizer`` or a role of ``QUANTIZERS``, "conv_input" where ``bits`` are given; its granularity
            counts, its rounding and running range play no part here.
        format: instead of ``bits``: a ``Format``, its name, also with options, or what a level of a ladder has
            besides. Without a granularity and without a quantiser, minifloats and powers of two are not scaled, and the
            others have one range per tensor. A Hadamard rotation plays no part here: it is one of a product's operands.
        seed: of the noise of a format that rounds stochastically, an integer; the same seed, the same numbers.

    Raises:
        ValueError: for an unknown role or format, bits outside 1..32, both or neither of bits and format; a tensor of
            integers, booleans or complex numbers, or of a type with fewer values than the format; blocks that do not
            divide the last dimension, or hold NaN or infinity; a seed that is missing, or that nothing uses.
    """
    check_floating(x)
    if x.layout != torch.strided:
        raise ValueError(f"only dense tensors can be quantised, got {x.layout}; convert it with .to_dense() first")
    if (bits is None) == (format is None):
        raise ValueError(f"give either bits or a format, got bits={bits!r} and format={format!r}")
    if format is None:
        quantizer = quantizer_of("conv_input" if quantizer is None else quantizer)
        identity = check_bits("bits", bits) > MOST_AFFINE
        grid, levels, key = quantizer.grid, levels_of(bits or 1), _key(seed, None)
    else:
        to = Quantizer.of(format)
        format = to.format
        assert format is not None
        identity = format.is_identity
        grid, levels, key = _grid(to, format, quantizer), levels_of(format.bits), _key(seed, to)
        if not identity:
            _check(x, format)
    if identity or x.numel() == 0:
        return x
    backend()
    n = torch.tensor(levels, dtype=torch.float32, device=x.device)
    if grid.startswith(UNSCALED):
        none = torch.zeros_like(n)
        return round_in_range(x, none, none, n, grid, None if key is None else key.to(x.device))
    return fake_quantize(x, n, grid, None if key is None else key.to(x.device))[0]


def _grid(to: Quantizer, format: Format, quantizer: Quantizer | str | None) -> str:
    """Return the grid of a format where no layer says what its role is."""
    if quantizer is not None:
        return quantizer_of(quantizer).on(to).grid
    scaled = format.kind in ("affine", "symmetric") or format.scale == "e4m3"
    return grid_of(to.granularity or ("per_tensor" if scaled and format.scale != "e8m0" else UNSCALED), to)


def _key(seed: int | None, to: Quantizer | None) -> Tensor | None:
    if (to is not None and to.rounding == "stochastic") != (seed is not None):
        what = "a grid of bits" if to is None else f"format {to}"
        raise ValueError(f"stochastic rounding needs a seed, and nothing else takes one; got seed={seed!r} for {what}")
    return None if seed is None else torch.tensor(whole("seed", seed, *INT64), dtype=torch.int64)


def _check(x: Tensor, format: Format) -> None:
    """Raise ValueError for a format wider than the tensor's type, and for blocks that cannot be rounded."""
    kind = torch.finfo(x.dtype)
    significand = 1 - int(math.log2(kind.eps))
    exponent = math.log2(kind.smallest_normal)
    needed = {"symmetric": format.bits - 1, "affine": format.bits}.get(format.kind, format.significand)
    floating = format.kind in ("minifloat", "log2")
    if needed > significand or (floating and not exponent <= format.least_exponent):
        raise ValueError(f"format {format} is wider than the tensor's type, {x.dtype}; convert it with .float() first")
    check_blocks(x.shape, format)
    if format.block and not torch.compiler.is_compiling() and not x.is_meta and not bool((sound := x.isfinite()).all()):
        place = tuple((~sound).nonzero()[0].tolist())
        raise ValueError(f"a block of {format} cannot hold {x[place].item()}, which stands at {place}")


class _QuantizeGradient(torch.autograd.Function):
    """Identity in the forward pass; the backward pass quantises the incoming gradient.

    An own Function without ``setup_context``, which would double the time of a small layer: torch then inspects the
    signature in every call.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, levels: Tensor, quantizer: Quantizer, key: Tensor | None) -> Tensor:
        ctx.levels, ctx.quantizer, ctx.key = levels, quantizer, key
        return y.detach()  # an alias, but no view to autograd: an in-place ReLU may follow

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_autocast_enabled(gradient.device.type):
            said = "backward() runs under autocast, which rounds quantised products once more; leave its block before"
            warnings.warn(said, stacklevel=2)
        return round_gradient(gradient, ctx.levels, ctx.quantizer, ctx.key), None, None, None


def counts_in_backward() -> bool:
    """Whether a backward pass takes its noise from the key as it finds it, and lets it count on.

    Else it has the key that its forward pass took: before torch 2.12, compiled code must not change what a backward
    pass that is still to come was given. Then layers that round several gradients draw others than in eager code.
    """
    return COMPILED_KEYS_COUNT or not torch.compiler.is_compiling()


def round_gradient(gradient: Tensor, levels: Tensor, quantizer: Quantizer, key: Tensor | None) -> Tensor:
    """Return a quantised gradient on its own range; what the backward pass of ``quantize_gradient`` does."""
    if gradient.numel() == 0:
        return gradient
    if quantizer.rounding != "stochastic":
        key = None
    rounded = fake_quantize(gradient, levels, quantizer.grid, key)[0]
    if key is not None and counts_in_backward():
        key.add_(1)
    return rounded


def quantize_gradient(y: Tensor, levels: Tensor, quantizer: Quantizer, key: Tensor | None = None) -> Tensor:
    """Return ``y``; in the backward pass its gradient is quantised before it goes on.

    Args:
        y: the output of a quantised product.
        levels: 0-d float32, n = 2**q_grad - 1.
        quantizer: granularity and rounding.
        key: of the noise of stochastic rounding, 0-d int64; every backward pass adds 1 to it.

    Paper: figure 1. Weight gradients themselves and the update stay in full precision.
    """
    if operators.has_gradient_node(y):
        key = key if quantizer.rounding == "stochastic" else None
        return torch.ops.cpt.quantize_gradient(y, levels, key, quantizer.grid)
    return _QuantizeGradient.apply(y, levels, quantizer, key)
