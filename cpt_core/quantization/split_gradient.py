"""A matmul whose output gradient is quantised separately for the input gradient and the weight gradient.

Beyond the paper, which quantises the gradient once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RoundGradients = Callable[[Tensor], tuple[Tensor, Tensor]]


class _SplitGradient(torch.autograd.Function):
    """An operation; it runs once more in the backward pass, so that any operation will do."""

    @staticmethod
    def forward(ctx: Any, round_gradients: RoundGradients, compute: Callable[..., Tensor], *operands: Any) -> Tensor:
        ctx.round_gradients, ctx.compute = round_gradients, compute
        ctx.save_for_backward(*operands)
        return compute(*operands)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        is_differentiated_again = torch.is_grad_enabled()  # create_graph=True
        operands: list[Any] = list(ctx.saved_tensors)
        if not is_differentiated_again:
            operands = [
                x if x is None else x.detach().requires_grad_(need) for x, need in zip(operands, needed, strict=True)
            ]
        with torch.enable_grad():
            output = ctx.compute(*operands)
        for_input, for_weight = ctx.round_gradients(gradient)
        gradients: list[Tensor | None] = [None] * len(operands)
        for rounded, places in ((for_input, (0,)), (for_weight, range(1, len(operands)))):
            wanted = [i for i in places if needed[i]]
            if not wanted:
                continue
            inputs = [operands[i] for i in wanted]
            found = torch.autograd.grad(
                output, inputs, rounded, retain_graph=True, create_graph=is_differentiated_again
            )
            for i, operand_gradient in zip(wanted, found, strict=True):
                gradients[i] = operand_gradient
        return None, None, *gradients


@torch.compiler.disable
def with_split_gradient(round_gradients: RoundGradients, compute: Callable[..., Tensor], *operands: Any) -> Tensor:
    """Return ``compute(*operands)``.

    Args:
        round_gradients: output gradient -> as the gradient of the first operand takes it, and as the others do.
        compute: linear in each operand.
        operands: first operand, second operand, and perhaps a bias; None for one that is not there.
    """
    return _SplitGradient.apply(round_gradients, compute, *operands)
