"""Library of float32 matmuls (GEMMs) on a CPU: the one that torch calls, MKL as a rule, or oneDNN.

MKL takes a slow path on AMD's processors with AVX-512. Both libraries round sums differently in the last digit, so that
timing them at run time would make result rows that cannot be reproduced. Instead the library is looked up by the kind
of processor, in a table of measurements, and result rows record it. ``python -m bench.gemm_shapes`` measures an entry.

``CPT_PRODUCTS=torch`` (or ``onednn``) forces a library; it is an error if that is not available.

Batched matmuls (attention) stay with torch, which has no operator for those of oneDNN.

Shapes: M rows, K elements of a sum, N columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_core.validation import check_choice
from cpt_extras.cpu_info import processor

GEMM_LIBRARIES = ("torch", "onednn")
# (vendor, widest instructions) -> time with oneDNN / time with MKL of a forward and a backward pass; one thread
ONEDNN_TIME_RATIOS: dict[tuple[str, ...], float] = {
    (
        "AuthenticAMD",
        "AVX512",
    ): 0.50,  # nn.LSTM 800: 113 ms, 224 without oneDNN; 20 x 800 by 800 x 3200: 0.61, 1.15
    (
        "AuthenticAMD",
        "AVX2",
    ): 1.32,  # the geometric mean of bench.gemm_shapes on a Zen 3
}
MAX_TIME_RATIO = 0.9  # oneDNN is used below it
# A sum of so many products of codes fits in int32: 255 * 255 * 2**15 < 2**31.
MAX_INT8_TERMS = 1 << 15
# In smaller matmuls the call of oneDNN takes longer than it saves.
MIN_ONEDNN_MACS = 1 << 21

active = "torch"


def has_onednn_matmul() -> bool:
    """Return whether torch has oneDNN's matmul."""
    return torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )


def choose_library(forced: str = "") -> tuple[str, str]:
    """Return the library for this processor, and the reason.

    Args:
        forced: a library to use, or "".

    Raises:
        ValueError: for an unknown name.
        RuntimeError: for oneDNN if torch lacks it.
    """
    if forced:
        check_choice("CPT_PRODUCTS", forced, GEMM_LIBRARIES)
        if forced == "onednn" and not has_onednn_matmul():
            raise RuntimeError(
                "CPT_PRODUCTS=onednn asks for oneDNN's products, but this torch has none"
            )
        return forced, f"CPT_PRODUCTS={forced}"
    kind = processor()
    name = ", ".join(kind) or "an unknown processor"
    if not torch.backends.mkl.is_available() or kind not in ONEDNN_TIME_RATIOS:
        return "torch", f"{name}: nothing was measured to be faster"
    measured = f"{name}: oneDNN takes {ONEDNN_TIME_RATIOS[kind]:.2f} of MKL's time"
    if ONEDNN_TIME_RATIOS[kind] < MAX_TIME_RATIO and not has_onednn_matmul():
        return "torch", f"{measured}, but this torch has no product of oneDNN"
    return (
        "onednn" if ONEDNN_TIME_RATIOS[kind] < MAX_TIME_RATIO else "torch"
    ), measured


def use(library: str) -> None:
    """Use a library for float32 matmuls from now on, in Python and in the C++ kernels."""
    global active
    active = library
    if hasattr(torch.ops.cpt, "onednn_from"):
        torch.ops.cpt.onednn_from(
            MIN_ONEDNN_MACS if library == "onednn" else torch.iinfo(torch.int64).max
        )


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN multiplies x (..., K) by weight (N, K), and the gradients of both, which are as large."""
    if (
        active == "torch"
        or not x.is_cpu
        or not x.dtype == weight.dtype == torch.float32
    ):
        return False
    return bool(x.numel() * weight.shape[0] >= MIN_ONEDNN_MACS)


def execute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear`` of x (M, K), weight (N, K) and bias (N,); without autograd where oneDNN computes it."""
    if uses_onednn(x, weight):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return torch.nn.functional.linear(x, weight, bias)


def linear(ops: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear`` of x (..., K), weight (N, K) and bias (N,), with a gradient by the same library.

    ``ops`` is the family of operators, such as ``torch.ops.cpt``.
    """
    if not uses_onednn(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    y: Tensor = ops.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], len(weight))


# --- the operator -----------------------------------------------------------------------------------------------------
LINEAR_SCHEMA = "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"


def fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return an empty tensor of the shape of the result."""
    return x.new_empty((len(x), len(weight)))


def save_linear_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the operands that the gradients need, as ``torch.nn.functional.linear`` does."""
    x, weight = inputs[:2]
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)


def linear_gradient(ops: Any, ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients dx = dy w, dw = dy' x, and the sum of dy for the bias."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    d_x = linear(ops, d_y, weight.t()) if needs_x else None
    d_weight = linear(ops, d_y.t(), x.t()) if needs_weight else None
    d_bias = d_y.sum(0) if needs_bias else None
    return d_x, d_weight, d_bias
