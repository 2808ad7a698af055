"""Matmuls whose output gradient is quantised separately for the input gradient and the weight gradient.

Beyond the paper, which quantises the gradient once. A layer needs it when a schedule, or a ladder, has another format
for the error than for the weight gradient. The operation runs once more in the backward pass, so any operation will do
whose tensors with a gradient are all operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpt_core.quantization.fake_quantize import round_gradient
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import weight_gradient_role
from cpt_core.schedules.schedule import RoleLevels
from cpt_extras.operations.forward_state import ForwardState, in_state

RoundGradients = Callable[[Tensor], tuple[Tensor, Tensor]]
ROUND_ONCE = (
    "lstm",
    "graph",
)  # kinds of layers that round a gradient once for both of its uses


def check(kind: str, formats: RoleLevels, layer: str) -> None:
    """Raise ValueError for a kind of layer that quantises its output's gradient once."""
    if kind in ROUND_ONCE:
        raise ValueError(
            f"{layer} quantises its output's gradient once for both backward products; it cannot have one format for "
            f"the error ({formats.error or 'float32'}) and another for the weight gradient "
            f"({formats.weight_gradient or 'float32'})"
        )


class _SplitGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: str,
        round_gradients: RoundGradients,
        compute: Callable[..., Tensor],
        *operands: Any,
    ) -> Tensor:
        ctx.round_gradients, ctx.compute = round_gradients, compute
        ctx.save_for_backward(*operands)
        detached = [x if x is None else x.detach() for x in operands]
        with torch.enable_grad():
            output = compute(*detached)
        # the backward pass differentiates operands only
        if output.requires_grad:
            raise ValueError(
                f"layer {layer!r} computes an operation of a further tensor that needs a gradient, as nn.Bilinear of "
                "two inputs; it cannot have one format for the error and another for the weight gradient"
            )
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needs_grad = ctx.needs_input_grad[3:]
        is_differentiated_again = torch.is_grad_enabled()  # create_graph=True
        operands: list[Any] = list(ctx.saved_tensors)
        if not is_differentiated_again:
            operands = [
                x if x is None else x.detach().requires_grad_(need)
                for x, need in zip(operands, needs_grad, strict=True)
            ]
        with torch.enable_grad():
            output = ctx.compute(*operands)
        for_input, for_weight = ctx.round_gradients(gradient)
        gradients: list[Tensor | None] = [None] * len(operands)
        for rounded, places in (
            (for_input, (0,)),
            (for_weight, range(1, len(operands))),
        ):
            indices = [i for i in places if needs_grad[i]]
            if not indices:
                continue
            inputs = [operands[i] for i in indices]
            operand_gradients = torch.autograd.grad(
                output,
                inputs,
                rounded,
                retain_graph=True,
                create_graph=is_differentiated_again,
            )
            for i, operand_gradient in zip(indices, operand_gradients, strict=True):
                gradients[i] = operand_gradient
        return None, None, None, *gradients


def matmul_with_split_gradient(
    precision: LayerPrecision,
    role: str,
    compute: Callable[..., Tensor],
    *operands: Tensor | None,
) -> Tensor:
    """Return ``compute(*operands)``, whose gradient is quantised separately for input and weight.

    Args:
        precision: of the layer.
        role: of the gradient.
        compute: linear in each operand.
        operands: first operand, second operand, and perhaps a bias; None for one that is not there.

    Raises:
        ValueError: if ``compute`` uses another tensor that needs a gradient.
    """
    round_gradients = partial(
        _rounded_gradients,
        precision,
        ForwardState.capture(precision, evaluates=False),
        role,
    )
    return _SplitGradient.apply(precision.name, round_gradients, compute, *operands)


def _rounded_gradients(
    precision: LayerPrecision, state: ForwardState, role: str, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return an output's gradient as the input gradient takes it, and as the weight gradient does.

    Args:
        precision: of the layer.
        state: of the layer in the forward pass, whose bits count.
        role: of the gradient.
        gradient: that has come.
    """
    with in_state({precision: state}):
        return _round_for_both(precision, role, gradient)


def _round_for_both(
    precision: LayerPrecision, role: str, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    formats = precision.active_bits.formats
    for_input = for_weight = gradient
    if formats.error is not None:
        for_input = rounded_gradient(
            precision, role, gradient, precision.grad_num_steps
        )
    if formats.weight_gradient is not None:
        role = weight_gradient_role(role)
        for_weight = rounded_gradient(
            precision, role, gradient, precision.weight_grad_num_steps
        )
    return for_input, for_weight


def rounded_gradient(
    precision: LayerPrecision, role: str, gradient: Tensor, steps: Tensor
) -> Tensor:
    """Return a gradient that has come on the grid of its role; ``steps``: n = 2**q - 1, 0-d."""

    def rounded(role: str, gradient: Tensor) -> Tensor:
        if precision.is_observed:
            precision.observe(role, gradient)
        quantizer = precision.quantizers[role]
        key = precision.noise_key if quantizer.rounding == "stochastic" else None
        return round_gradient(gradient, steps, quantizer.grid, key)

    return precision.grids.apply(precision, role, gradient, None, rounded)
