"""Which library multiplies float32 matrices on a CPU: the one that torch calls (MKL, as a rule), or oneDNN.

MKL takes a slow path on AMD's processors with AVX-512. The two round sums differently in the last digit, and a race
between them would make rows that do not repeat: the library is looked up by the kind of processor, in a table that
measurements filled, and is part of where a row comes from. ``python -m bench.gemm_shapes`` measures a row of it.

``CPT_PRODUCTS=torch`` (or ``onednn``) forces one; what is forced and not there is an error.

Products of many pairs (attention) stay with torch: it has no operator for those of oneDNN.

Shapes: M rows, K elements of a sum, N columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_core.validation import check_choice
from cpt_extras.cpu_info import processor

GEMM_LIBRARIES = ("torch", "onednn")
# Time with oneDNN in that with MKL by maker and widest instructions, a forward and a backward pass; one thread.
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
MAX_TIME_RATIO = 0.9  # of a ratio
MAX_INT8_TERMS = 1 << 15  # codes of a sum of products: 255 * 255 * 2**15 < 2**31
MIN_ONEDNN_MACS = (
    1 << 21
)  # multiply-accumulates of a product: below, oneDNN's call takes longer than it saves

active = "torch"


def has_onednn_matmul() -> bool:
    """Whether torch has oneDNN's product of matrices."""
    return torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )


def choose_library(asked: str = "") -> tuple[str, str]:
    """Return the library for this processor, and why.

    Args:
        asked: one that is forced, or "".

    Raises:
        ValueError: for an unknown name.
        RuntimeError: for one that is not there.
    """
    if asked:
        check_choice("CPT_PRODUCTS", asked, GEMM_LIBRARIES)
        if asked == "onednn" and not has_onednn_matmul():
            raise RuntimeError(
                "CPT_PRODUCTS=onednn asks for oneDNN's products, but this torch has none"
            )
        return asked, f"CPT_PRODUCTS={asked}"
    kind = processor()
    named = ", ".join(kind) or "an unknown processor"
    if not torch.backends.mkl.is_available() or kind not in ONEDNN_TIME_RATIOS:
        return "torch", f"{named}: nothing was measured to be faster"
    measured = f"{named}: oneDNN takes {ONEDNN_TIME_RATIOS[kind]:.2f} of MKL's time"
    if ONEDNN_TIME_RATIOS[kind] < MAX_TIME_RATIO and not has_onednn_matmul():
        return "torch", f"{measured}, but this torch has no product of oneDNN"
    return (
        "onednn" if ONEDNN_TIME_RATIOS[kind] < MAX_TIME_RATIO else "torch"
    ), measured


def use(library: str) -> None:
    """Let products run in a library, in C++ as well where there is any."""
    global active
    active = library
    if hasattr(torch.ops.cpt, "onednn_from"):
        torch.ops.cpt.onednn_from(
            MIN_ONEDNN_MACS if library == "onednn" else torch.iinfo(torch.int64).max
        )


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether the product of x (..., K) and weight (N, K) is oneDNN's: as that of its gradient, which is as large."""
    if (
        active == "torch"
        or not x.is_cpu
        or not x.dtype == weight.dtype == torch.float32
    ):
        return False
    return bool(x.numel() * weight.shape[0] >= MIN_ONEDNN_MACS)


def execute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (M, K) times weight (N, K) transposed, plus bias (N,); without a gradient where oneDNN computes it."""
    if uses_onednn(x, weight):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return torch.nn.functional.linear(x, weight, bias)


def linear(ops: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., K) times weight (N, K) transposed, plus bias (N,), with its gradient, made of such products again.

    ``ops`` are the operators, such as ``torch.ops.cpt``.
    """
    if not uses_onednn(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    y: Tensor = ops.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], len(weight))


# --- the operator -----------------------------------------------------------------------------------------------------
LINEAR_SCHEMA = "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"


def fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a tensor of the product's shape."""
    return x.new_empty((len(x), len(weight)))


def save_linear_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the operands of which gradients will be made, as ``torch.nn.functional.linear`` does."""
    of_x, of_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(inputs[0] if of_weight else None, inputs[1] if of_x else None)


def linear_gradient(ops: Any, ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    """Return dx = dy w, dw = dy' x, and the sum of dy for the bias."""
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    return (
        linear(ops, d_y, weight.t()) if of_x else None,
        linear(ops, d_y.t(), x.t()) if of_weight else None,
        d_y.sum(0) if of_bias else None,
    )
