"""Products of layers on codes: the same grids and schedules as simulated, int8 x int8 -> int32 where that is exact.

A product has an integer form where the steps of its operands do not differ along its sum. With the authors' quantisers
(a range per output row of weights, one per position for gradients of sequences) that is the forward product, and others
as shapes allow; with ``QuantConfig.with_shared_steps()`` it is all three. The other products are computed in float32
on the dequantised operands, which is the simulation. What is saved between the passes are codes, a byte each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cpt_core.kernels.integer import MOST_BITS, QuantizedTensor, has_integer_form, matmul
from cpt_core.quantization.fake_quantize import round_gradient
from cpt_core.quantization.precision import LayerPrecision


def linear_on_codes(precision: LayerPrecision, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the layer's product (..., O) of x (..., K), weight (O, K) and bias (O,), all quantised."""
    quantized_bias = None if bias is None else precision.operand("bias", bias)
    return _Linear.apply(x, weight, quantized_bias, precision)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, precision: LayerPrecision) -> Tensor:
        a, w = precision.encoded("input", x).matrix(), precision.encoded("weight", weight)
        ctx.save_for_backward(*a, *w)
        ctx.precision, ctx.shape, ctx.quantizes_gradient = precision, x.shape, precision.quantizes_gradient
        return product(a, w.t(), bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        precision, saved = ctx.precision, ctx.saved_tensors
        a, w = QuantizedTensor(*saved[:4]), QuantizedTensor(*saved[4:])
        g = quantized_gradient(precision, gradient) if ctx.quantizes_gradient else as_matrix(gradient)
        of_x, of_w, of_b = ctx.needs_input_grad[:3]
        return (
            product(g, w).view(ctx.shape) if of_x else None,
            product(g.t(), a) if of_w else None,
            values(g).sum(0) if of_b else None,
            None,
        )


def quantized_gradient(precision: LayerPrecision, gradient: Tensor) -> Tensor | QuantizedTensor:
    """Return the quantised gradient of a product as a matrix: codes, or values where codes have too few bits."""
    if precision.q_grad is not None and precision.q_grad <= MOST_BITS:
        return precision.encoded_gradient("grad", gradient).matrix()
    quantizer = precision.quantizers["grad"]
    return as_matrix(round_gradient(gradient, precision.grad_levels, quantizer, precision.noise_key))


def as_matrix(x: Tensor) -> Tensor:
    """Return a tensor as a matrix, all dimensions but the last as its rows."""
    return x.reshape(-1, x.shape[-1])


def product(a: Tensor | QuantizedTensor, b: Tensor | QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``: on codes where both have them and the product has an integer form, else in float32."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and has_integer_form(a, b):
        return matmul(a, b, bias)
    y = values(a) @ values(b)
    return y if bias is None else y + bias


def values(x: Tensor | QuantizedTensor) -> Tensor:
    """Return the values of an operand, float32."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x
