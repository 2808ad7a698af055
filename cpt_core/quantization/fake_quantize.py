"""Simulated (fake) quantisation: round to the grid, pass the gradient on, quantise gradients.  Paper: figure 1.

>>> PlainOperators.fake_quantize(torch.tensor([0.0, 0.2, 1.0]), torch.tensor(rounding.num_steps(1)), "per_tensor")[0]
tensor([0., 0., 1.])

``PlainOperators`` rounds with the functions of ``rounding.py``; ``use_operators`` replaces it by faster operators with
bit-identical results. Scales are float32, results keep the input's dtype. NaN stays NaN. A tensor that contains an
infinity and is rounded on its own range becomes NaN, so that loss scalers notice it; on a stored range, in evaluation,
infinity is clipped like any value outside. Gradients pass a rounding unchanged, also those of clipped values
(straight-through estimator), and so do gradients of gradients (``create_graph=True``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cpt_core import extensions
from cpt_core.quantization import rounding
from cpt_core.validation import short_repr

INT64 = (-(2**63), 2**63 - 1)  # range of a noise key
# compiled code may advance a key in place from torch 2.12 on
COMPILED_KEYS_COUNT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def check_floating(x: Tensor) -> None:
    """Raise ValueError unless ``x`` is a floating-point tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, got {short_repr(x)}")
    if not x.is_floating_point():
        raise ValueError(
            f"only floating tensors can be quantised, got {x.dtype}; convert it with .float() first"
        )


def advances_key_in_backward() -> bool:
    """Return whether a backward pass reads the current noise key and advances it in place.

    Otherwise it uses the key of its forward pass: before torch 2.12, compiled code must not modify a tensor that a
    later backward pass needs. Layers that round several gradients then draw other noise than in eager code.
    """
    return COMPILED_KEYS_COUNT or not torch.compiler.is_compiling()


def round_gradient(
    gradient: Tensor, steps: Tensor, grid: str, key: Tensor | None
) -> Tensor:
    """Return ``gradient`` rounded on its own range; the key of stochastic rounding advances.

    Args:
        gradient: any shape.
        steps: n = 2**q - 1, 0-d float32.
        grid: name of the grid, see ``Quantizer.grid``.
        key: key of the noise of stochastic rounding, 0-d int64; None for rounding half to even.
    """
    if gradient.numel() == 0:
        return gradient
    rounded = operators.fake_quantize(gradient, steps, grid, key)[0]
    if key is not None and advances_key_in_backward():
        key.add_(1)
    return rounded


def fill_steps(steps: Tensor, value: float) -> None:
    """Fill a tensor of grid steps in place, and record the value on it for later backward passes."""
    steps.fill_(value)
    steps.filled = value  # type: ignore[attr-defined]


def recorded_steps(steps: Tensor | None) -> float | None:
    """Return the recorded number of steps, without device synchronisation.

    None in compiled code, which reads the tensor.
    """
    return None if torch.compiler.is_compiling() else getattr(steps, "filled", None)


def forward_steps(steps: Tensor, value: float | None) -> Tensor:
    """Return the number of steps that a forward pass used, for its backward pass.

    Args:
        steps: the layer's tensor, which a later change of bits fills in place; compiled or captured code reads it.
        value: ``recorded_steps(steps)`` during the forward pass.
    """
    if value is None or value == recorded_steps(steps):
        return steps
    return torch.full_like(steps, value)


class _QuantizeGradient(torch.autograd.Function):
    """Identity function with a quantised gradient.

    The resulting weight gradients and the update stay in full precision. There is no ``setup_context``: torch would
    inspect its signature in every call, which doubles the time of a small layer.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, steps: Tensor, grid: str, key: Tensor | None
    ) -> Tensor:
        ctx.steps, ctx.grid, ctx.key = steps, grid, key
        ctx.filled = recorded_steps(steps)
        if torch.compiler.is_compiling():
            # compiled code would lose gradients through a view of ``y.detach()``
            return torch.ops.aten._unsafe_view(y, y.shape)
        # an alias that autograd does not treat as a view, so that an in-place ReLU may follow
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_autocast_enabled(gradient.device.type):
            warnings.warn(
                "backward() runs under autocast, which rounds the results of quantised matmuls once more; "
                "call it outside of the autocast block",
                stacklevel=2,
            )
        steps = forward_steps(ctx.steps, ctx.filled)
        return round_gradient(gradient, steps, ctx.grid, ctx.key), None, None, None


class _StraightThrough(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, round_: Callable[..., Tensor], *grid: Any
    ) -> Tensor:
        ctx.num_constants = 1 + len(grid)
        return round_(x, *grid)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * ctx.num_constants


class PlainOperators:
    """Rounding functions in plain torch; a replacement provides functions of these names.

    Arguments are those of ``rounding.round_to_grid``, with ``grid`` the name of a grid, see ``Quantizer.grid``.
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
        """Return a non-empty tensor rounded on its own range, and minimum and width of the range."""
        low, width = rounding.range_of(x.detach(), grid)
        clip = rounding.clips(grid, key is not None)
        rounded = PlainOperators.round_in_range(x, low, width, steps, grid, key, clip)
        return rounded, low, width

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
        """Return ``x`` rounded to the grid of a given range."""
        if rounding.has_zero_point(grid):
            return _StraightThrough.apply(
                x, rounding.round_with_zero_point, low, width, steps, key
            )
        return _StraightThrough.apply(
            x, rounding.round_to_grid, low, width, steps, key, clip
        )

    @staticmethod
    def name_on(device: torch.device) -> str:
        """Return the name of the implementation on a device, for messages."""
        return "plain torch"


operators: Any = PlainOperators


def use_operators(replacement: Any) -> Any:
    """Replace ``operators`` by ``replacement``; return the former operators."""
    global operators
    former, operators = operators, replacement
    return former


@cache
def load_kernels() -> None:
    """Load and build the fast rounding functions once, if they are installed."""
    if extensions.is_installed("kernels"):
        extensions.load("kernels").backend()
