"""Products of layers on codes: the same grids and schedules as simulated, int8 x int8 -> int32 where that is exact.

A product has an integer form where the steps of its operands do not differ along its sum. With the authors' quantisers
(a range per output row or channel of weights, one per position for gradients of sequences) that is the forward product,
and others as shapes allow; with ``QuantConfig.with_shared_steps()`` it is all three. The other products are computed in
float32 on the dequantised operands, which is the simulation. Between the passes codes are kept, a byte each.

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
    """Let a backward pass refuse to be differentiated: a second one would leave out all that it saved as codes."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "products on codes have no gradients of gradients (create_graph=True); take execution 'simulated'"
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
    """Return the product (..., O) of x (..., C), weight (O, C) and bias (O,), all quantised.

    Args:
        codes: those of ``x`` where a layer finds the ranges itself.
        parts: rows of the parts of the output whose gradients are quantised by themselves; empty for one part.
        weight_role: of the weight, in the layer.
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
        a = (encode_operand(precision, "input", x) if codes is None else codes).matrix()
        w = encode_operand(precision, weight_role, weight)
        ctx.save_for_backward(*a, *w)
        ctx.shape, ctx.gradient = x.shape, GradientRounding(precision, parts)
        y = product(a, w.t(), bias).view(*x.shape[:-1], len(weight))
        return y.detach()  # no view to autograd: an in-place ReLU may follow

    @staticmethod
    @forbid_double_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, w = saved_operands(ctx)
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
            *[None] * 4,
        )


@torch.compiler.disable
def conv2d_int8(
    precision: LayerPrecision,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *geometry: Any,
    weight_role: str = "weight",
) -> Tensor:
    """Return the convolution (N, O, P, Q) of x (N, C, H, W) by weight (O, C, I, J) and bias (O,), all quantised.

    ``geometry``: stride, padding and dilation, each (rows, columns).
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
        a, w = (
            encode_operand(precision, "input", x, channels_last=True),
            encode_operand(precision, weight_role, weight),
        )
        ctx.save_for_backward(*a, *w)
        ctx.geometry, ctx.gradient = (
            geometry,
            GradientRounding(precision, channels_last=True),
        )
        # as a convolution of torch: what follows may rely on the layout, as view does
        last = torch.channels_last
        ctx.channels_last = any(
            t.is_contiguous(memory_format=last) and not t.is_contiguous()
            for t in (x, weight)
        )
        return convolution.conv2d(
            a, w, bias, geometry, ctx.channels_last
        ).detach()  # as above

    @staticmethod
    @forbid_double_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, w = saved_operands(ctx)
        g, shape = ctx.gradient(gradient), a.codes.shape
        codes = g if isinstance(g, QuantizedTensor) and g.has_one_scale else None
        dx = dw = db = None
        if ctx.needs_input_grad[0] and codes is not None and w.has_one_scale:
            dx = convolution.conv2d_input(
                codes, w, shape, ctx.geometry, ctx.channels_last
            )
        elif ctx.needs_input_grad[0]:
            layout = (
                torch.channels_last if ctx.channels_last else torch.contiguous_format
            )
            dx = conv2d_input(shape, values(w), values(g), *ctx.geometry).contiguous(
                memory_format=layout
            )
        if ctx.needs_input_grad[1] and codes is not None:
            dw = convolution.conv2d_weight(codes, a, w.codes.shape[2:], ctx.geometry)
        elif ctx.needs_input_grad[1]:
            dw = conv2d_weight(values(a), w.codes.shape, values(g), *ctx.geometry)
        if ctx.needs_input_grad[2] and isinstance(
            g, QuantizedTensor
        ):  # of pixels, (N * P * Q, O)
            db = sums(
                g.rearrange(lambda v: v.permute(0, 2, 3, 1).reshape(-1, v.shape[1]))
            )
        elif ctx.needs_input_grad[2]:
            db = sums(g.transpose(1, -1).flatten(0, -2))
        return dx, dw, db, None, None, None


@torch.compiler.disable
def matmul_int8(
    precision: LayerPrecision,
    roles: tuple[str, str],
    gradient: str,
    a: Tensor,
    b: Tensor,
) -> Tensor:
    """Return the matmuls (..., M, N) of a (..., M, K) and b (..., K, N), both quantised, each in its role.

    ``gradient``: role of the result's gradient.
    """
    return _Product.apply(a, b, precision, roles, gradient)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        precision: LayerPrecision,
        roles: tuple[str, str],
        gradient: str,
    ) -> Tensor:
        a_, b_ = (
            encode_operand(precision, role, x)
            for role, x in zip(roles, (a, b), strict=True)
        )
        ctx.save_for_backward(*a_, *b_)
        ctx.gradient = GradientRounding(precision, role=gradient)
        return product(a_, b_)

    @staticmethod
    @forbid_double_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = saved_operands(ctx)
        g = ctx.gradient(gradient)
        of_a, of_b = ctx.needs_input_grad[:2]
        return (
            product(g, b.t()) if of_a else None,
            product(a.t(), g) if of_b else None,
            *[None] * 3,
        )


# --- what all layers share --------------------------------------------------------------------------------------------


def encode_operand(
    p: LayerPrecision, role: str, x: Tensor, channels_last: bool = False
) -> QuantizedTensor:
    """Return what ``p.operand`` returns as codes; for at most ``CODE_BITS`` bits, and without a gradient.

    Raises:
        RuntimeError: for float64, which the input of products on codes is not, and under ``torch.jit.trace``.
    """
    p.require_bits()
    check_floating(x)
    if torch.jit.is_tracing():  # it would keep the ranges of the example, as numbers
        raise RuntimeError(
            "torch.jit.trace cannot record products on codes; take execution 'simulated'"
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
    """Return the minimum of a stored range, NaN if ``x`` holds any: there is no code for it."""
    if not uses_stored_range(p, role):
        return low
    own = range_of(x, "per_tensor")[0]
    return torch.where(own.isnan(), own, low)


def saved_operands(ctx: Any) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return the operands a and b of a product that ``ctx.save_for_backward(*a, *b)`` has kept."""
    saved = ctx.saved_tensors  # once: activation checkpointing allows no more
    half = len(saved) // 2
    return QuantizedTensor(*saved[:half]), QuantizedTensor(*saved[half:])


class GradientRounding:
    """Quantises a gradient in the backward pass, at the bits of the forward pass.

    Attributes:
        quantizes: whether the gradient is quantised.
        encodes: whether it gets codes.
    """

    def __init__(
        self,
        precision: LayerPrecision,
        parts: Sequence[int] = (),
        channels_last: bool = False,
        role: str = "grad",
    ) -> None:
        """Note what is in force; ``parts``: rows that are quantised by themselves, the last first."""
        self.precision, self.quantizes, self.parts = (
            precision,
            precision.active_bits.gradient,
            parts,
        )
        self.channels_last, self.role = channels_last, role
        self.encodes = self.quantizes and precision.int8_gradient
        self.filled = recorded_steps(precision.grad_num_steps)

    @property
    def levels(self) -> Tensor:
        """The number of steps of the gradient's grid, 0-d."""
        return forward_steps(self.precision.grad_num_steps, self.filled)

    def __call__(self, gradient: Tensor) -> Operand:
        """Return codes, or values where the gradient has too many bits for codes."""
        if not self.quantizes:
            return gradient
        p = self.precision
        parts = gradient.split(self.parts)[::-1] if self.parts else (gradient,)
        if not self.encodes:
            found = [rounded_gradient(p, self.role, g, self.levels) for g in parts]
            return torch.cat(found[::-1]) if self.parts else found[0]
        codes = [self._encoded(g) for g in parts][::-1]
        return stack_rows(codes) if self.parts else codes[0]

    def _encoded(self, gradient: Tensor) -> QuantizedTensor:
        """Return the codes of a gradient on its own range, as ``p.gradient`` rounds it in the backward pass."""
        p = self.precision
        if p.is_observed:
            p.observe(self.role, gradient)
        quantizer = p.quantizers[self.role]
        grid, key = (
            quantizer.grid,
            p.noise_key if quantizer.rounding == "stochastic" else None,
        )
        clip = clips(grid, key is not None)
        ranges, levels = range_of(gradient, grid), self.levels
        if quantizer.zero_point:  # its points have their codes, whatever the noise
            gradient = rounding.round_with_zero_point(gradient, *ranges, levels, key)
            ranges = rounding.shift_to_zero(*ranges, levels)
        noise_key = None if quantizer.zero_point else key
        codes = QuantizedTensor.quantize_on(
            gradient, *ranges, levels, noise_key, clip, self.channels_last
        )
        if key is not None:
            key.add_(1)
        return codes


def stack_rows(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return matrices on grids of equally many levels below each other; a range is 0-d or one of a row."""
    low, scale = (
        torch.cat([getattr(x, name).expand(len(x.codes), 1) for x in parts])
        for name in ("low", "scale")
    )
    return QuantizedTensor(
        torch.cat([x.codes for x in parts]), low, scale, parts[0].half
    )


def product(a: Operand, b: Operand, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``: on codes where both have them and the product has an integer form, else in float32."""
    if (
        isinstance(a, QuantizedTensor)
        and isinstance(b, QuantizedTensor)
        and has_integer_form(a, b)
    ):
        return matmul(a, b, bias)
    y = values(a) @ values(b)
    return y if bias is None else y + bias


def sums(g: Operand) -> Tensor:
    """Return the sums of a matrix over its rows, for the gradient of a bias."""
    return (
        sum_values(g)
        if isinstance(g, QuantizedTensor) and g.has_one_scale
        else values(g).sum(0)
    )


def values(x: Operand) -> Tensor:
    """Return the values of an operand, float32."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x
