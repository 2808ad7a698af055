"""Products of layers on codes: the same grids and schedules as simulated, int8 x int8 -> int32 where that is exact.

A product has an integer form where the steps of its operands do not differ along its sum. With the authors' quantisers
(a range per output row or channel of weights, one per position for gradients of sequences) that is the forward product,
and others as shapes allow; with ``QuantConfig.with_shared_steps()`` it is all three. The other products are computed in
float32 on the dequantised operands, which is the simulation. Between the passes codes are kept, a byte each.

Shapes: N batch, C and O channels in and out, H and W height and width (of the output: P and Q), I and J of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input, conv2d_weight

from cpt_core.kernels.integer import QuantizedTensor, has_integer_form, matmul, sum_values
from cpt_core.quantization.fake_quantize import round_gradient
from cpt_core.quantization.precision import LayerPrecision

Operand = Tensor | QuantizedTensor


@torch.compiler.disable
def linear_on_codes(
    precision: LayerPrecision,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: QuantizedTensor | None = None,
    parts: Sequence[int] = (),
) -> Tensor:
    """Return the product (..., O) of x (..., C), weight (O, C) and bias (O,), all quantised.

    Args:
        precision: of the layer.
        x: the input.
        weight: likewise.
        bias: likewise, or None.
        codes: those of ``x`` where a layer finds the ranges itself.
        parts: rows of the parts of the output whose gradients are quantised by themselves; empty for one part.
    """
    quantized_bias = None if bias is None else precision.operand("bias", bias)
    return _Linear.apply(x, weight, quantized_bias, precision, codes, parts)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        precision: LayerPrecision,
        codes: QuantizedTensor | None,
        parts: Sequence[int],
    ) -> Tensor:
        a = (precision.encoded("input", x) if codes is None else codes).matrix()
        w = precision.encoded("weight", weight)
        ctx.save_for_backward(*a, *w)
        ctx.shape, ctx.gradient = x.shape, GradientRounding(precision, parts)
        return product(a, w.t(), bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing allows no more
        a, w = QuantizedTensor(*saved[:4]), QuantizedTensor(*saved[4:])
        g = ctx.gradient(gradient)
        g = g.matrix() if isinstance(g, QuantizedTensor) else g.reshape(-1, g.shape[-1])
        of_x, of_w, of_b = ctx.needs_input_grad[:3]
        dx = product(g, w).view(ctx.shape) if of_x else None
        if isinstance(g, QuantizedTensor) and not has_integer_form(g.t(), a):
            g = g.dequantize()  # once
        return (
            dx,
            product(g.t(), a) if of_w else None,
            sums(g) if of_b else None,
            *[None] * 3,
        )


class Geometry(NamedTuple):
    """Stride, padding (the same on both sides) and dilation of a convolution, each of height and width."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


@torch.compiler.disable
def conv2d_on_codes(
    precision: LayerPrecision, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """Return the convolution (N, O, P, Q) of x (N, C, H, W) by weight (O, C, I, J) and bias (O,), all quantised."""
    quantized_bias = None if bias is None else precision.operand("bias", bias)
    return _Conv2d.apply(x, weight, quantized_bias, precision, geometry)


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, precision: LayerPrecision, geometry: Geometry
    ) -> Tensor:
        a, w = precision.encoded("input", x), precision.encoded("weight", weight)
        a = a._replace(codes=channels_last(a.codes))
        ctx.save_for_backward(*a, *w)
        ctx.geometry, ctx.gradient = geometry, GradientRounding(precision)
        if not a.one_step:
            return conv2d(a.dequantize(), w.dequantize(), bias, *geometry)
        kernel = w.codes.shape[2:]
        columns, shape = windows(a, kernel, *geometry)
        rows = w.laid_out(lambda v: v.permute(0, 2, 3, 1).reshape(len(v), -1))
        shifts = None
        if any(geometry.padding):
            ones = x.new_ones(1, 1, *x.shape[2:], dtype=torch.float32)
            shifts = conv2d(ones, w.dequantize().sum(1, keepdim=True), None, *geometry).flatten(2)[0].t().contiguous()
        y = matmul(columns, rows.t(), bias, shifts)
        return y.view(*shape, len(weight)).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing allows no more
        a, w = QuantizedTensor(*saved[:4]), QuantizedTensor(*saved[4:])
        g, geometry = ctx.gradient(gradient), ctx.geometry
        of_x, of_w, of_b = ctx.needs_input_grad[:3]
        if isinstance(g, QuantizedTensor):
            g = g._replace(codes=channels_last(g.codes))
        return (
            _conv2d_input(g, w, a.codes.shape, geometry) if of_x else None,
            _conv2d_weight(g, a, w.codes.shape, geometry) if of_w else None,
            sums(_pixels(g) if isinstance(g, QuantizedTensor) else g.transpose(1, -1).flatten(0, -2)) if of_b else None,
            None,
            None,
        )


def _conv2d_input(g: Operand, w: QuantizedTensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    stride, padding, dilation = geometry
    kernel = w.codes.shape[2:]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    whole = isinstance(g, QuantizedTensor) and g.one_step and w.one_step
    if not whole or any(p > r for p, r in zip(padding, reach, strict=True)):
        return conv2d_input(shape, values(w), values(g), *geometry)
    assert isinstance(g, QuantizedTensor)
    before = (reach[0] - padding[0], reach[1] - padding[1])
    size = (shape[2] + reach[0], shape[3] + reach[1])
    columns, _ = windows(g, kernel, (1, 1), before, dilation, apart=stride, size=size)
    matrix = w.laid_out(lambda v: v.flip(2, 3).permute(2, 3, 0, 1).reshape(-1, v.shape[1]))
    ones = g.low.new_ones(1, 1, *g.codes.shape[2:])
    weights = w.dequantize().sum(0, keepdim=True)
    shifts = conv2d_input((1, *shape[1:]), weights, ones, *geometry).flatten(2)[0].t().contiguous()
    y = matmul(columns, matrix, None, shifts)
    return y.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)


def _conv2d_weight(g: Operand, a: QuantizedTensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    if not (isinstance(g, QuantizedTensor) and g.one_step and a.one_step):
        return conv2d_weight(values(a), shape, values(g), *geometry)
    columns, _ = windows(a, shape[2:], *geometry)
    # without the rest of a, which padding does not have; it follows
    columns = columns._replace(low=-(a.zero + a.half) * a.scale)
    y = matmul(_pixels(g).t(), columns).view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
    size = g.codes.shape[1:]
    over_batch = sum_values(g.laid_out(lambda v: v.permute(0, 2, 3, 1).reshape(len(v), -1)))
    over_batch = over_batch.view(1, *size[1:], size[0]).permute(0, 3, 1, 2)
    ones = over_batch.new_ones(1, 1, *a.codes.shape[2:])
    return y + a.rest * conv2d_weight(ones, (shape[0], 1, *shape[2:]), over_batch, *geometry)


def windows(
    x: QuantizedTensor,
    kernel: torch.Size,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    apart: tuple[int, int] = (1, 1),
    size: tuple[int, int] | None = None,
) -> tuple[QuantizedTensor, tuple[int, int, int]]:
    """Return what every position of a kernel sees, (N * P * Q, I * J * C), and (N, P, Q).

    Args:
        x: (N, C, H, W), channels last in memory, its range 0-d.
        kernel: its size.
        stride: of the kernel.
        padding: zeros in front of the first row and column, and, without ``size``, behind the last.
        dilation: of the kernel.
        apart: distance of the tensor's rows and columns from each other, with zeros between them.
        size: of the tensor with all zeros.
    """
    N, C, *inner = x.codes.shape
    codes = x.codes.permute(0, 2, 3, 1)
    if size is None:
        size = (inner[0] + 2 * padding[0], inner[1] + 2 * padding[1])
    if size != tuple(inner):
        around = x.zero.to(torch.int8).expand(N, *size, C).clone()
        ends = [p + (n - 1) * a + 1 for p, n, a in zip(padding, inner, apart, strict=True)]
        around[:, padding[0] : ends[0] : apart[0], padding[1] : ends[1] : apart[1]] = codes
        codes = around
    outer = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(size, kernel, stride, dilation, strict=True)]
    image, row, column, _ = codes.stride()
    strides = (image, row * stride[0], column * stride[1], row * dilation[0], column * dilation[1], 1)
    seen = codes.as_strided((N, *outer, *kernel, C), strides).reshape(N * outer[0] * outer[1], -1)
    return x._replace(codes=seen, low=x.low.reshape(()), scale=x.scale.reshape(())), (N, outer[0], outer[1])


def channels_last(codes: Tensor) -> Tensor:
    """Return codes (N, C, H, W) with channels last in memory."""
    return codes.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _pixels(x: QuantizedTensor) -> QuantizedTensor:
    """Return (N, C, H, W) with one range as a matrix (N * H * W, C)."""
    return x.laid_out(lambda v: v.permute(0, 2, 3, 1).reshape(-1, v.shape[1]))


# --- what all layers share --------------------------------------------------------------------------------------------


class GradientRounding:
    """Quantises a gradient in the backward pass; whether, is decided in the forward pass, as in the simulation."""

    def __init__(self, precision: LayerPrecision, parts: Sequence[int] = ()) -> None:
        """Note what is in force; ``parts``: rows that are quantised by themselves, the last first."""
        self.precision, self.quantizes, self.parts = precision, precision.quantizes_gradient, parts

    @property
    def encodes(self) -> bool:
        """Whether a gradient gets codes; asked when it comes, as the levels are: bits may have changed by then."""
        return self.quantizes and self.precision.fits_codes[1]

    def __call__(self, gradient: Tensor) -> Operand:
        """Return codes, or values where the gradient has too many bits for codes."""
        if not self.quantizes:
            return gradient
        p = self.precision
        if not self.encodes:
            found = [round_gradient(g, p.grad_levels, p.quantizers["grad"], p.noise_key) for g in self._split(gradient)]
            return torch.cat(found[::-1]) if self.parts else found[0]
        codes = [p.encoded_gradient("grad", g) for g in self._split(gradient)][::-1]
        return in_rows(codes) if self.parts else codes[0]

    def _split(self, gradient: Tensor) -> Sequence[Tensor]:
        return gradient.split(self.parts)[::-1] if self.parts else (gradient,)


def in_rows(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return matrices on grids of equally many levels below each other; a range is 0-d or one of a row."""
    low, scale = (torch.cat([getattr(x, name).expand(len(x.codes), 1) for x in parts]) for name in ("low", "scale"))
    return QuantizedTensor(torch.cat([x.codes for x in parts]), low, scale, parts[0].half)


def product(a: Operand, b: Operand, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``: on codes where both have them and the product has an integer form, else in float32."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and has_integer_form(a, b):
        return matmul(a, b, bias)
    y = values(a) @ values(b)
    return y if bias is None else y + bias


def sums(g: Operand) -> Tensor:
    """Return the sums of a matrix over its rows, for the gradient of a bias."""
    return sum_values(g) if isinstance(g, QuantizedTensor) and g.one_step else values(g).sum(0)


def values(x: Operand) -> Tensor:
    """Return the values of an operand, float32."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x
