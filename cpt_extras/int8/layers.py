"""Int8 forms of linear layers, convolutions and matmuls, with the grids and schedules of their simulation.

It contains a ``torch.autograd.Function`` for each, and the functions that they and other int8 layers share.

A matmul has an integer form where no scale of its operands differs along the summed dimension. With the authors'
quantisers (a range per output row or channel of weights, one per position for gradients of sequences) that is the
forward matmul, and the others as shapes allow; with ``QuantConfig.with_shared_steps()`` it is all three. Other matmuls
are computed in float32 on the dequantised operands, which is the simulation. Operands are saved for the backward pass
as codes, a byte each.

Shapes: N batch, C and O channels in and out, H and W height and width (of the output: P and Q), I and J of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from cpt_core.quantization import rounding
from cpt_core.quantization.fake_quantize import (
    check_floating,
    forward_steps,
    recorded_steps,
)
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.rounding import clips
from cpt_extras.int8 import convolution
from cpt_extras.int8.convolution import Geometry
from cpt_extras.int8.matmul import has_integer_form, matmul, sum_values
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels.layer_state import clips_operand, uses_stored_range
from cpt_extras.kernels.operators import range_of
from cpt_extras.operations.split_gradients import rounded_gradient

Operand = Tensor | QuantizedTensor


def forbid_double_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward pass refuse to be differentiated, since gradients do not flow through saved codes."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "int8 matmuls have no gradients of gradients (create_graph=True); take execution 'simulated'"
            )
        return backward(ctx, *gradients)

    return checked


@torch.compiler.disable
def linear_int8(
    precision: LayerPrecision,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: QuantizedTensor | None = None,
    parts: Sequence[int] = (),
    weight_role: str = "weight",
) -> Tensor:
    """Compute ``F.linear`` with quantised operands.

    Args:
        precision: of the layer.
        x: input, (..., C).
        weight: (O, C).
        bias: (O,) or None.
        codes: the quantised input, where the layer has found its ranges itself.
        parts: rows of the parts of the output whose gradients are quantised separately; empty for one part.
        weight_role: role of the weight in the layer.
    """
    quantized_bias = None if bias is None else precision.quantize_operand("bias", bias)
    return _Linear.apply(
        x, weight, quantized_bias, precision, codes, parts, weight_role
    )


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
        weight_role: str,
    ) -> Tensor:
        if codes is None:
            codes = encode_operand(precision, "input", x)
        a = codes.matrix()
        w = encode_operand(precision, weight_role, weight)
        ctx.save_for_backward(*a, *w)
        ctx.shape = x.shape
        ctx.round_gradient = GradientRounding(precision, parts)
        y = multiply_operands(a, w.t(), bias).view(*x.shape[:-1], len(weight))
        return y.detach()  # no view to autograd: an in-place ReLU may follow

    @staticmethod
    @forbid_double_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, w = saved_operands(ctx)
        g = ctx.round_gradient(gradient)
        g = g.matrix() if isinstance(g, QuantizedTensor) else g.reshape(-1, g.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if needs_x:
            dx = multiply_operands(g, w).view(ctx.shape)
        if isinstance(g, QuantizedTensor) and not has_integer_form(g.t(), a):
            g = g.dequantize()  # once for both of the next uses
        if needs_weight:
            dw = multiply_operands(g.t(), a)
        if needs_bias:
            db = sum_rows(g)
        return dx, dw, db, None, None, None, None


@torch.compiler.disable
def conv2d_int8(
    precision: LayerPrecision,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *geometry: Any,
    weight_role: str = "weight",
) -> Tensor:
    """Compute ``F.conv2d`` with quantised operands.

    Args:
        precision: of the layer.
        x: input, (N, C, H, W).
        weight: (O, C, I, J).
        bias: (O,) or None.
        geometry: stride, padding and dilation, each (height, width).
        weight_role: role of the weight in the layer.
    """
    quantized_bias = None if bias is None else precision.quantize_operand("bias", bias)
    return _Conv2d.apply(
        x, weight, quantized_bias, precision, Geometry(*geometry), weight_role
    )


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        precision: LayerPrecision,
        geometry: Geometry,
        weight_role: str,
    ) -> Tensor:
        a = encode_operand(precision, "input", x, channels_last=True)
        w = encode_operand(precision, weight_role, weight)
        ctx.save_for_backward(*a, *w)
        ctx.geometry = geometry
        ctx.round_gradient = GradientRounding(precision, channels_last=True)
        # the layout is that of torch's convolution, since later operations, such as view, may rely on it
        ctx.channels_last = _is_channels_last(x) or _is_channels_last(weight)
        y = convolution.conv2d(a, w, bias, geometry, ctx.channels_last)
        return y.detach()  # no view to autograd: an in-place ReLU may follow

    @staticmethod
    @forbid_double_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, w = saved_operands(ctx)
        g = ctx.round_gradient(gradient)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if needs_x:
            dx = _conv2d_input(g, w, a.codes.shape, ctx.geometry, ctx.channels_last)
        if needs_weight:
            dw = _conv2d_weight(g, a, w.codes.shape, ctx.geometry)
        if needs_bias:
            db = _conv2d_bias(g)
        return dx, dw, db, None, None, None


def _is_channels_last(x: Tensor) -> bool:
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    return is_last and not x.is_contiguous()


def _conv2d_input(
    g: Operand,
    w: QuantizedTensor,
    shape: torch.Size,
    geometry: Geometry,
    channels_last: bool,
) -> Tensor:
    """Return the input gradient of a convolution, in int8 where gradient and weight have one scale each."""
    if isinstance(g, QuantizedTensor) and g.has_one_scale and w.has_one_scale:
        return convolution.conv2d_input(g, w, shape, geometry, channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    dx = conv2d_input(shape, dequantized(w), dequantized(g), *geometry)
    return dx.contiguous(memory_format=layout)


def _conv2d_weight(
    g: Operand, a: QuantizedTensor, shape: torch.Size, geometry: Geometry
) -> Tensor:
    """Return the weight gradient of a convolution, in int8 where the gradient has one scale."""
    if isinstance(g, QuantizedTensor) and g.has_one_scale:
        return convolution.conv2d_weight(g, a, shape[2:], geometry)
    return conv2d_weight(dequantized(a), shape, dequantized(g), *geometry)


def _conv2d_bias(g: Operand) -> Tensor:
    """Return the bias gradient of a convolution: the sum over all pixels, (O,)."""
    if not isinstance(g, QuantizedTensor):
        return sum_rows(g.transpose(1, -1).flatten(0, -2))

    def pixels_as_rows(v: Tensor) -> Tensor:
        return v.permute(0, 2, 3, 1).reshape(-1, v.shape[1])

    return sum_rows(g.rearrange(pixels_as_rows))


@torch.compiler.disable
def matmul_int8(
    precision: LayerPrecision,
    roles: tuple[str, str],
    gradient: str,
    a: Tensor,
    b: Tensor,
) -> Tensor:
    """Compute ``a @ b`` with quantised operands.

    Args:
        precision: of the layer.
        roles: roles of a and b.
        gradient: role of the result's gradient.
        a: (..., M, K).
        b: (..., K, N).
    """
    return _Matmul.apply(a, b, precision, roles, gradient)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        precision: LayerPrecision,
        roles: tuple[str, str],
        gradient: str,
    ) -> Tensor:
        first = encode_operand(precision, roles[0], a)
        second = encode_operand(precision, roles[1], b)
        ctx.save_for_backward(*first, *second)
        ctx.round_gradient = GradientRounding(precision, role=gradient)
        return multiply_operands(first, second)

    @staticmethod
    @forbid_double_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = saved_operands(ctx)
        g = ctx.round_gradient(gradient)
        needs_a, needs_b = ctx.needs_input_grad[:2]
        da = multiply_operands(g, b.t()) if needs_a else None
        db = multiply_operands(a.t(), g) if needs_b else None
        return da, db, None, None, None


# --- functions of all int8 layers -------------------------------------------------------------------------------------


def encode_operand(
    p: LayerPrecision, role: str, x: Tensor, channels_last: bool = False
) -> QuantizedTensor:
    """Quantise an operand to codes, on the grid of ``p.quantize_operand`` and without a gradient.

    Args:
        p: of the layer, at ``CODE_BITS`` bits at most.
        role: role of the operand.
        x: the operand.
        channels_last: whether the codes of (N, C, H, W) have the channels of a pixel side by side in memory.

    Raises:
        RuntimeError: for float64, and under ``torch.jit.trace``.
    """
    p.require_bits()
    check_floating(x)
    if torch.jit.is_tracing():  # it would store the ranges of the example as constants
        raise RuntimeError(
            "torch.jit.trace cannot record int8 matmuls; take execution 'simulated'"
        )
    if x.dtype == torch.float64:
        raise RuntimeError(
            f"the layer's {role} is torch.float64, its input is not: bring both to one type, as with model.float()"
        )
    p.follow(x)
    if p.is_observed:
        p.observe(role, x)
    quantizer = p.quantizers[role]
    if p.training or not quantizer.running:
        low, width = range_of(x, quantizer.grid)
        if quantizer.running:
            p.track(role, low, width)
    else:
        low, width = p.eval_range(role, x)
        low = propagate_nan(p, role, x, low)
    if quantizer.zero_point:
        x = rounding.round_with_zero_point(x, low, width, p.num_steps_for(role), None)
        low, width = rounding.shift_to_zero(low, width, p.num_steps_for(role))
    return QuantizedTensor.quantize_on(
        x,
        low,
        width,
        p.num_steps_for(role),
        None,
        clips_operand(p, role),
        channels_last,
    )


def propagate_nan(p: LayerPrecision, role: str, x: Tensor, low: Tensor) -> Tensor:
    """Return the minimum of a stored range; NaN if ``x`` contains NaN, which has no code."""
    if not uses_stored_range(p, role):
        return low
    minimum = range_of(x, "per_tensor")[0]
    return torch.where(minimum.isnan(), minimum, low)


def saved_operands(ctx: Any) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return the operands a and b that ``ctx.save_for_backward(*a, *b)`` has saved."""
    saved = ctx.saved_tensors  # read once, as activation checkpointing allows
    half = len(saved) // 2
    return QuantizedTensor(*saved[:half]), QuantizedTensor(*saved[half:])


class GradientRounding:
    """Quantisation of a gradient in the backward pass, at the bits of the forward pass.

    Attributes:
        quantizes: whether the gradient is quantised.
        encodes: whether it is quantised to codes, as it has at most 8 bits.
    """

    def __init__(
        self,
        precision: LayerPrecision,
        parts: Sequence[int] = (),
        channels_last: bool = False,
        role: str = "grad",
    ) -> None:
        """Store the settings of the forward pass.

        Args:
            precision: of the layer.
            parts: rows of the parts of a gradient that are quantised separately, the last part first.
            channels_last: layout of the codes.
            role: role of the gradient.
        """
        self.precision = precision
        self.parts = parts
        self.channels_last = channels_last
        self.role = role
        self.quantizes = precision.active_bits.gradient
        self.encodes = self.quantizes and precision.int8_gradient
        self.filled = recorded_steps(precision.grad_num_steps)

    @property
    def num_steps(self) -> Tensor:
        """The number of steps of the gradient's grid, 0-d."""
        return forward_steps(self.precision.grad_num_steps, self.filled)

    def __call__(self, gradient: Tensor) -> Operand:
        """Return the quantised gradient: codes, or values where it has too many bits for codes."""
        if not self.quantizes:
            return gradient
        p = self.precision
        parts = gradient.split(self.parts)[::-1] if self.parts else (gradient,)
        if not self.encodes:
            rounded = [rounded_gradient(p, self.role, g, self.num_steps) for g in parts]
            return torch.cat(rounded[::-1]) if self.parts else rounded[0]
        codes = [self._encode(g) for g in parts]
        return stack_rows(codes[::-1]) if self.parts else codes[0]

    def _encode(self, gradient: Tensor) -> QuantizedTensor:
        """Return the codes of a gradient on its own range, on the grid of ``p.gradient``."""
        p = self.precision
        if p.is_observed:
            p.observe(self.role, gradient)
        quantizer = p.quantizers[self.role]
        key = p.noise_key if quantizer.rounding == "stochastic" else None
        clip = clips(quantizer.grid, key is not None)
        ranges = range_of(gradient, quantizer.grid)
        num_steps = self.num_steps
        if quantizer.zero_point:  # rounded here, so that encoding needs no noise
            gradient = rounding.round_with_zero_point(gradient, *ranges, num_steps, key)
            ranges = rounding.shift_to_zero(*ranges, num_steps)
        noise_key = None if quantizer.zero_point else key
        codes = QuantizedTensor.quantize_on(
            gradient, *ranges, num_steps, noise_key, clip, self.channels_last
        )
        if key is not None:
            key.add_(1)
        return codes


def stack_rows(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Concatenate matrices of the same bits along their rows; their ranges are 0-d or one per row."""
    low = torch.cat([x.low.expand(len(x.codes), 1) for x in parts])
    scale = torch.cat([x.scale.expand(len(x.codes), 1) for x in parts])
    codes = torch.cat([x.codes for x in parts])
    return QuantizedTensor(codes, low, scale, parts[0].code_offset)


def multiply_operands(a: Operand, b: Operand, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``, in int8 where both are codes and have an integer form, else in float32."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        if has_integer_form(a, b):
            return matmul(a, b, bias)
    y = dequantized(a) @ dequantized(b)
    return y if bias is None else y + bias


def sum_rows(g: Operand) -> Tensor:
    """Return the sums of a matrix over its rows, for the gradient of a bias."""
    if isinstance(g, QuantizedTensor) and g.has_one_scale:
        return sum_values(g)
    return dequantized(g).sum(0)


def dequantized(x: Operand) -> Tensor:
    """Return the values of an operand, float32."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x
