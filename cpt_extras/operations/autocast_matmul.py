"""Matmuls whose backward pass stays in float32 when a compiler traces it under autocast.

Autocast rounds the operands of matmuls to half precision. Quantised layers turn it off in the forward pass, and the
eager backward pass runs outside of it. Compilers trace both passes under the autocast of the forward pass; so here the
backward pass turns autocast off itself. Autocast does not touch the gradients of convolutions.

>>> matmul(torch.ones(2, 3), torch.ones(3, 1)).tolist()
[[3.0], [3.0]]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class _Matmul(torch.autograd.Function):
    """A matmul; compilers drop the forward computation that its backward pass repeats."""

    @staticmethod
    def forward(ctx: Any, multiply: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        ctx.multiply = multiply
        ctx.save_for_backward(*operands)
        return multiply(*operands)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(gradient.device.type, enabled=False):
            backward = torch.func.vjp(ctx.multiply, *ctx.saved_tensors)[1]
            return None, *backward(gradient)


MATMUL_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "F.linear": torch.nn.functional.linear,
    "torch.matmul": torch.matmul,
}


@torch.compiler.allow_in_graph
def _traced_matmul(name: str, *operands: Tensor) -> Tensor:
    """Call a function of ``MATMUL_FUNCTIONS`` by name, or an einsum by its equation."""
    return _Matmul.apply(
        MATMUL_FUNCTIONS.get(name) or partial(torch.einsum, name), *operands
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear`` in compiled code; see ``operators.linear``."""
    return (
        _traced_matmul("F.linear", x, weight)
        if bias is None
        else _traced_matmul("F.linear", x, weight, bias)
    )


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``torch.matmul``."""
    return (
        _traced_matmul("torch.matmul", a, b)
        if torch.compiler.is_compiling()
        else torch.matmul(a, b)
    )


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Compute ``torch.einsum``."""
    return (
        _traced_matmul(equation, *operands)
        if torch.compiler.is_compiling()
        else torch.einsum(equation, *operands)
    )
