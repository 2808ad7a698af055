"""Matmuls whose backward pass stays in float32 when a compiler traces it under autocast.

Autocast rounds the operands of matmuls to half precision. Quantised layers turn it off in the forward pass, and the
eager backward pass runs outside of it. Compilers trace both passes under the autocast of the forward pass; so here the
backward pass turns autocast off itself. Autocast does not touch the gradients of convolutions.

>>> matmul(torch.ones(2, 3), torch.ones(3, 1)).tolist()
[[3.0], [3.0]]
"""

from __future__ import annotations

import torch
from torch import Tensor


def _traced_matmul(name: str, *operands: Tensor) -> Tensor:
    """Call ``traced_matmul`` in compiled code."""
    from cpt_extras.operations.traced_matmul import traced_matmul

    return traced_matmul(name, *operands)


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
