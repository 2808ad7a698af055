"""A matmul that compilers take into their graph as one call.

Importing this module imports the compiler, which takes as long as importing torch: only code that is being compiled
does so.
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
def traced_matmul(name: str, *operands: Tensor) -> Tensor:
    """Call a function of ``MATMUL_FUNCTIONS`` by name, or an einsum by its equation."""
    return _Matmul.apply(
        MATMUL_FUNCTIONS.get(name) or partial(torch.einsum, name), *operands
    )
