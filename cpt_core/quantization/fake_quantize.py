"""Simulated (fake) quantisation: round to the grid, pass the gradient on, quantise gradients.  Paper: figure 1.

    n = 2**q - 1        s = max(range / n, 1e-8)        x_q = round(clip((x - min) / s, 0, n)) * s + min

>>> quantize(torch.tensor([0.0, 0.2, 1.0]), bits=1).tolist()
[0.0, 0.0, 1.0]

The rounding itself is an operator with several executions, ``cpt_core.kernels``. Scales are float32, results keep the
input's dtype; NaN and infinity propagate, so that loss scalers see them. Gradients pass a rounding unchanged, also
those of clipped values; gradients of gradients (``create_graph=True``) do likewise; only the LSTM and products on codes
refuse them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_core.kernels import operators
from cpt_core.kernels.execution import execution
from cpt_core.kernels.operators import fake_quantize
from cpt_core.quantization.quantizers import IDENTITY_BITS, Quantizer, check_bits, check_floating, quantizer_of


def levels_of(bits: int) -> float:
    """Return n = 2**bits - 1, the number of steps of the grid."""
    return float(2**bits - 1)


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
    execution()
    levels = torch.tensor(levels_of(bits), dtype=torch.float32, device=x.device)
    return fake_quantize(x, levels, quantizer.granularity)[0]


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
        return round_gradient(gradient, ctx.levels, ctx.quantizer, ctx.key), None, None, None


def round_gradient(gradient: Tensor, levels: Tensor, quantizer: Quantizer, key: Tensor | None) -> Tensor:
    """Return a quantised gradient on its own range; what the backward pass of ``quantize_gradient`` does."""
    if gradient.numel() == 0:
        return gradient
    if quantizer.rounding == "nearest":
        return fake_quantize(gradient, levels, quantizer.granularity)[0]
    assert key is not None
    rounded = fake_quantize(gradient, levels, quantizer.granularity, key)[0]
    if not torch.compiler.is_compiling():  # compiled code has drawn its key in the forward pass
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
    stochastic = quantizer.rounding == "stochastic"
    if operators.has_gradient_node(y):
        return torch.ops.cpt.quantize_gradient(y, levels, key if stochastic else None, quantizer.granularity)
    return _QuantizeGradient.apply(y, levels, quantizer, key)
