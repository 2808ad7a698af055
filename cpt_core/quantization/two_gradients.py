"""A product whose gradient is quantised for each of its two backward products by itself.  Beyond the paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rounded = Callable[[Tensor], tuple[Tensor, Tensor]]


class _TwoGradients(torch.autograd.Function):
    """A product; its backward products see gradients that are quantised for each of them.

    Its products run once more in the backward pass, so that any product will do.
    """

    @staticmethod
    def forward(ctx: Any, rounded: Rounded, multiply: Callable[..., Tensor], *operands: Any) -> Tensor:
        ctx.rounded, ctx.multiply = rounded, multiply
        ctx.save_for_backward(*operands)
        return multiply(*operands)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        further = torch.is_grad_enabled()  # create_graph=True: those of gradients go through the operands themselves
        with torch.enable_grad():
            operands: list[Any] = [
                x if x is None or further else x.detach().requires_grad_(need)
                for x, need in zip(ctx.saved_tensors, needed, strict=True)
            ]
            y = ctx.multiply(*operands)
        of_error, of_weight = ctx.rounded(gradient)
        found: list[Tensor | None] = [None] * len(operands)
        for part, places in ((of_error, (0,)), (of_weight, range(1, len(operands)))):
            wanted = [i for i in places if needed[i]]
            if wanted:
                of_part = [operands[i] for i in wanted]
                gradients = torch.autograd.grad(y, of_part, part, retain_graph=True, create_graph=further)
                for i, of_operand in zip(wanted, gradients, strict=True):
                    found[i] = of_operand
        return None, None, *found


@torch.compiler.disable
def two_gradients(rounded: Rounded, multiply: Callable[..., Tensor], *operands: Any) -> Tensor:
    """Return ``multiply(*operands)``.

    Args:
        rounded: gradient of the product -> as that of the first operand takes it, and as those of the others do.
        multiply: linear in each operand.
        operands: of the product; None for one that is not there.
    """
    return _TwoGradients.apply(rounded, multiply, *operands)
