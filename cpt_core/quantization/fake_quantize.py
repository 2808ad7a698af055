"""Simulated (fake) quantisation: round to the grid, pass the gradient on, quantise gradients.  Paper: figure 1.

>>> PlainOperators.fake_quantize(torch.tensor([0.0, 0.2, 1.0]), torch.tensor(rounding.num_steps(1)), "per_tensor")[0]
tensor([0., 0., 1.])

The rounding itself is that of ``rounding.py``, or of faster functions with the same results that take its place, see
``use_operators``. Scales are float32, results keep the input's dtype. NaN stays NaN. On a range of its own a tensor
with an infinity is NaN, so that loss scalers see it; on a stored range, in evaluation, infinity is clipped to the end
as any value outside. Gradients pass a rounding unchanged, also those of clipped values (straight-through estimator);
gradients of gradients (``create_graph=True``) do likewise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cpt_core import extensions
from cpt_core.quantization import rounding
from cpt_core.validation import short_repr

INT64 = (-(2**63), 2**63 - 1)  # a key of noise is one
COMPILED_KEYS_COUNT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def check_floating(x: Tensor) -> None:
    """Raise ValueError for no tensor, one whose grid would be cut to whole numbers, or that has no order."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, got {short_repr(x)}")
    if not x.is_floating_point():
        raise ValueError(
            f"only floating tensors can be quantised, got {x.dtype}; convert it with .float() first"
        )


def advances_key_in_backward() -> bool:
    """Return whether a backward pass takes its noise from the key as it finds it, and advances it.

    Else it has the key that its forward pass took: before torch 2.12, compiled code must not change what a backward
    pass that is still to come was given. Then layers that round several gradients draw others than in eager code.
    """
    return COMPILED_KEYS_COUNT or not torch.compiler.is_compiling()


def round_gradient(
    gradient: Tensor, steps: Tensor, grid: str, key: Tensor | None
) -> Tensor:
    """Return a gradient rounded on its own range; arguments as those of ``PlainOperators.fake_quantize``."""
    if gradient.numel() == 0:
        return gradient
    rounded = operators.fake_quantize(gradient, steps, grid, key)[0]
    if key is not None and advances_key_in_backward():
        key.add_(1)
    return rounded


def fill_steps(steps: Tensor, value: float) -> None:
    """Fill a number of steps in place, and note it in the tensor for backward passes that are still to come."""
    steps.fill_(value)
    steps.filled = value  # type: ignore[attr-defined]


def recorded_steps(steps: Tensor | None) -> float | None:
    """Return the noted number of steps, without waiting for a device; None in compiled code, which reads the tensor."""
    return None if torch.compiler.is_compiling() else getattr(steps, "filled", None)


def forward_steps(steps: Tensor, value: float | None) -> Tensor:
    """Return the steps of a forward pass in its backward pass.

    Args:
        steps: filled in place since, where the bits have changed; code that is compiled or captured reads it itself.
        value: ``recorded_steps(steps)`` in the forward pass.
    """
    if value is None or value == recorded_steps(steps):
        return steps
    return torch.full_like(steps, value)


class _QuantizeGradient(torch.autograd.Function):
    """Identity in the forward pass; the backward pass quantises the incoming gradient.

    Weight gradients themselves and the update stay in full precision. There is no ``setup_context``, which would double
    the time of a small layer: torch then inspects the signature in every call.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, steps: Tensor, grid: str, key: Tensor | None
    ) -> Tensor:
        ctx.steps, ctx.grid, ctx.key = steps, grid, key
        ctx.filled = recorded_steps(steps)
        if (
            torch.compiler.is_compiling()
        ):  # for a view of ``y.detach()``, compiled code would take away gradients
            return torch.ops.aten._unsafe_view(y, y.shape)
        return (
            y.detach()
        )  # an alias, but no view to autograd: an in-place ReLU may follow

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_autocast_enabled(gradient.device.type):
            warnings.warn(
                "backward() runs under autocast, which rounds quantised products once more; leave its block before",
                stacklevel=2,
            )
        steps = forward_steps(ctx.steps, ctx.filled)
        return round_gradient(gradient, steps, ctx.grid, ctx.key), None, None, None


class _StraightThrough(torch.autograd.Function):
    """Rounding to the grid of a range, whose gradient passes unchanged."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, round_: Callable[..., Tensor], *grid: Any
    ) -> Tensor:
        ctx.others = 1 + len(grid)
        return round_(x, *grid)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * ctx.others


class PlainOperators:
    """The rounding functions in plain torch; what takes their place has functions of the same names.

    Their arguments are those of ``rounding.round_to_grid``; ``grid`` names the ranges, see ``Quantizer.grid``.
    """

    range = staticmethod(rounding.range_of)
    track_ = staticmethod(rounding.track)
    quantize_gradient = staticmethod(_QuantizeGradient.apply)
    linear = staticmethod(torch.nn.functional.linear)
    matmul = staticmethod(torch.matmul)

    @staticmethod
    def fake_quantize(
        x: Tensor, steps: Tensor, grid: str, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Round a tensor that is not empty on its own range; return it, and the range."""
        low, width = rounding.range_of(x.detach(), grid)
        clip = rounding.clips(grid, key is not None)
        return (
            PlainOperators.round_in_range(x, low, width, steps, grid, key, clip),
            low,
            width,
        )

    @staticmethod
    def round_in_range(
        x: Tensor,
        low: Tensor,
        width: Tensor,
        steps: Tensor,
        grid: str,
        key: Tensor | None = None,
        clip: bool = False,
    ) -> Tensor:
        """Round to the grid of a given range."""
        if rounding.has_zero_point(grid):
            return _StraightThrough.apply(
                x, rounding.round_with_zero_point, low, width, steps, key
            )
        return _StraightThrough.apply(
            x, rounding.round_to_grid, low, width, steps, key, clip
        )

    @staticmethod
    def name_on(device: torch.device) -> str:
        """Return what rounds on a device, in a word."""
        return "plain torch"


operators: Any = PlainOperators


def use_operators(replacement: Any) -> Any:
    """Let functions of an object round, in the place of ``PlainOperators``; return those that did before."""
    global operators
    before, operators = operators, replacement
    return before


def load_kernels() -> None:
    """Load the fast rounding functions, once, where they are installed: they build themselves then."""
    if "kernels" not in _loaded and extensions.is_installed("kernels"):
        _loaded.add("kernels")
        extensions.load("kernels").backend()


_loaded: set[str] = set()
