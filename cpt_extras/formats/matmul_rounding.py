"""Rounding of both operands for each of the three matmuls of a linear layer, as hardware does.  Beyond the paper.

The paper rounds every tensor once, and each of its matmuls takes the rounded tensor. Tensor cores multiply operands of
one kind of format whose blocks lie along the sum. So the recipes of NVIDIA and others round an operand again for every
matmul that takes it:

    forward          y = x w^T     x and w along the input features, at their levels
    input gradient   dx = dy w     dy and w along the output features, at the level of the error
    weight gradient  dw = dy^T x   dy and x along the tokens, at the level of the weight gradient

``MatmulGrids`` does this in ``nn.Linear``; all other operations run in float32, and are reported so. Biases and their
gradients are not rounded. A Hadamard rotation of a gradient's format rotates both operands of its matmul along the sum.
Tokens are filled up with zeros to whole blocks. Evaluation takes the running range of the input as the scale of the
tensor, so that no sample influences another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cpt_core.quantization.active_bits import ActiveBits, Roles
from cpt_core.quantization.fake_quantize import round_gradient
from cpt_core.quantization.roles import Quantizer, level_field, weight_gradient_role
from cpt_core.schedules.schedule import Formats, RoleLevels
from cpt_extras.formats.costs import OPERANDS_PER_MATMUL
from cpt_extras.formats.format import FORMATS
from cpt_extras.formats.format_rounding import rotate
from cpt_extras.formats.ladder import MAX_LEVEL, FormatLadder, MatmulLadders
from cpt_extras.formats.ladder_rounding import (
    NO_LENGTHS,
    OPERATION_SUM_DIMS,
    SUM_LENGTHS,
    LadderBits,
    LadderGrids,
    on_level,
    requested_formats,
)
from cpt_extras.formats.quantizer import FormatQuantizer
from cpt_extras.operations.forward_state import ForwardState, in_state

FLOAT32_LADDER = FormatLadder(
    dict.fromkeys(range(1, MAX_LEVEL + 1), FORMATS["float32"])
)
FLOAT32_LADDERS = MatmulLadders(*[FLOAT32_LADDER] * 4)


class MatmulFormats(Formats):
    """Formats at which the matmuls of a layer are priced: both operands of a backward matmul have its level."""

    __slots__ = ()

    def operands(self, pass_name: str) -> tuple[Any, Any]:
        """Return the formats of the two operands of a pass."""
        first, second = OPERANDS_PER_MATMUL[pass_name]
        return getattr(self, first), getattr(self, second)


class MatmulBits(LadderBits):
    """Active formats of a layer.

    Attributes:
        weight_for_error: quantiser of the weight in the matmul of the input gradient; None for float32.
        input_for_weight: quantiser of the input in the matmul of the weight gradient; None for float32.
    """

    weight_for_error: Quantizer | None = None
    input_for_weight: Quantizer | None = None


class MatmulGrids(LadderGrids):
    """Formats of a linear layer that rounds operands for every matmul; see the top of this file."""

    @classmethod
    def for_module(cls, ladders: RoleLevels, module: Any, kind: str) -> MatmulGrids:
        """Return the grids of a layer of a kind: float32 for all kinds but linear layers."""
        if kind != "linear":
            return cls(FLOAT32_LADDERS, {}, NO_LENGTHS, can_rotate=False)
        lengths = SUM_LENGTHS[kind](module)
        # blocks of the weight gradient lie along the tokens, which are filled up
        lengths = lengths._replace(weight_gradient=())
        return cls(MatmulLadders(*ladders), OPERATION_SUM_DIMS, lengths)

    def resolve(self, levels: RoleLevels | None, roles: Roles) -> ActiveBits:
        """Return the active formats of levels, for a layer with these quantisers; ValueError for a missing level."""
        return _matmul_bits(levels, self.ladders, roles)

    def check(self, levels: RoleLevels, layer: str) -> None:
        """Raise ValueError for formats that a layer cannot take."""
        requested = requested_formats(levels, self.ladders)
        sizes = [q.hadamard if q else 0 for q in requested]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{layer}: a Hadamard rotation belongs to both operands of the forward matmul, with one size; got "
                f"{sizes[0]} for activation, {sizes[1]} for weight"
            )
        self._check_formats(requested, layer)

    def multiply(
        self,
        precision: Any,
        compute: Callable[..., Tensor],
        operands: tuple[Tensor, Tensor, Tensor | None],
        roles: tuple[str | None, str | None],
        gradient: str,
        along: tuple[int | None, int | None],
    ) -> Tensor:
        """Return the product of a linear layer, whose operands are rounded for every matmul.

        Matmuls of other kinds inside of the layer round their operands once, as in the paper.
        """
        names = [role and precision.layer_role(role) for role in roles]
        is_own = gradient == "linear_grad" and names[0] == "input"
        if not is_own or operands[1].dim() != 2:
            return super().multiply(
                precision, compute, operands, roles, gradient, along
            )
        return _multiply(precision, operands, names, precision.layer_role(gradient))

    def priced(self, levels: RoleLevels) -> Formats:
        """Return the formats at which the matmuls are priced."""
        return MatmulFormats(*super().priced(levels))

    def to_dict(self) -> dict[str, Any]:
        """Return the ladder of every role, for checkpoints, and that operands are rounded for every matmul."""
        return {"rounded": "per matmul", **super().to_dict()}


@lru_cache(maxsize=4096)
def _matmul_bits(
    levels: RoleLevels | None, ladders: RoleLevels, roles: Roles
) -> MatmulBits:
    requested = requested_formats(levels, ladders)
    quantizers = dict(roles)
    by_role: dict[str, Quantizer] = {}
    for role, quantizer in roles:
        by_role[role] = on_level(quantizer, getattr(requested, level_field(role)))
        if level_field(role) == "error":
            by_role[weight_gradient_role(role)] = on_level(
                quantizer, requested.weight_gradient
            )
    bits = MatmulBits(levels, requested, by_role)
    bits.splits_gradient = False  # a layer's own matmuls round what they take
    if levels is None or "weight" not in quantizers or "input" not in quantizers:
        return bits

    # the other operand of a backward matmul is at the level of the gradient
    backward = levels._replace(weight=levels.error, activation=levels.weight_gradient)
    requested = requested_formats(backward, ladders)
    if requested.weight is not None:
        bits.weight_for_error = on_level(quantizers["weight"], requested.weight)
    if requested.activation is not None:
        level = on_level(quantizers["input"], requested.activation)
        bits.input_for_weight = replace(level, running=False)
    return bits


@torch.compiler.disable
def _multiply(
    precision: Any,
    operands: tuple[Tensor, Tensor, Tensor | None],
    roles: Sequence[Any],
    gradient: str,
) -> Tensor:
    """Return the product of a linear layer; ``roles`` and ``gradient`` are names in the layer."""
    x, weight, bias = operands
    first = precision.round_operand(roles[0], x.detach(), None)
    second = precision.round_operand(roles[1], weight.detach(), None)
    state = ForwardState.capture(precision, evaluates=False)
    backward = partial(_gradients, precision, state, gradient)
    y: Tensor = _Linear.apply(backward, first, second, x, weight)
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gradients: Callable[..., Any],
        first: Tensor,
        second: Tensor,
        x: Tensor,
        weight: Tensor,
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.save_for_backward(x, weight)
        return functional.linear(first, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dw = ctx.gradients(gradient, x, weight, *ctx.needs_input_grad[3:])
        return None, None, None, dx, dw


@dataclass(frozen=True)
class _Rounding:
    """Rounding of the operands of one backward matmul.

    Attributes:
        precision: of the layer.
        size: of the Hadamard rotation of both operands; 0 for none.
    """

    precision: Any
    size: int

    def __call__(
        self, role: str, quantizer: Quantizer | None, x: Tensor, steps: Tensor
    ) -> Tensor:
        """Return an operand whose last dimension is summed, rotated and rounded.

        Args:
            role: role under which it is observed; "" for an operand that was observed in the forward pass.
            quantizer: None does not round.
            x: operand.
            steps: number of steps of an affine grid, 0-d.
        """
        if self.size:
            x = rotate(x, self.size, self.precision.key)
        if quantizer is None:
            return x
        if role and self.precision.is_observed:
            self.precision.observe(role, x)
        is_stochastic = quantizer.rounding == "stochastic"
        key = self.precision.noise_key if is_stochastic else None
        return round_gradient(x, steps, quantizer.grid, key)


def _gradients(
    precision: Any,
    state: ForwardState,
    role: str,
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight, in the state of the forward pass."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    without_autocast = torch.autocast(gradient.device.type, enabled=False)
    with in_state({precision: state}), without_autocast:
        active = precision.active_bits
        dy = gradient.reshape(-1, gradient.shape[-1]).to(dtype)
        tokens = x.reshape(-1, x.shape[-1]).to(dtype)
        dx = dw = None
        if needs_input:
            is_rounded = active.formats.error is not None
            error = active.quantizers[role] if is_rounded else None
            rounded = _Rounding(precision, _rotation(error))
            steps = precision.grad_num_steps
            other = active.weight_for_error if is_rounded else None
            w = rounded("", other, weight.to(dtype).t().contiguous(), steps)
            dx = rounded(role, error, dy, steps) @ w.t()
            dx = dx.reshape(x.shape).to(x.dtype)
        if needs_weight:
            is_rounded = active.formats.weight_gradient is not None
            name = weight_gradient_role(role)
            own = active.quantizers[name] if is_rounded else None
            rounded = _Rounding(precision, _rotation(own))
            steps = precision.weight_grad_num_steps
            other = active.input_for_weight if is_rounded else None
            length = _common_block(own, other)
            dy_rows = rounded(name, own, _whole_blocks(dy.t(), length), steps)
            x_rows = rounded("", other, _whole_blocks(tokens.t(), length), steps)
            dw = (dy_rows @ x_rows.t()).to(weight.dtype)
        return dx, dw


def _rotation(quantizer: Quantizer | None) -> int:
    return quantizer.hadamard if isinstance(quantizer, FormatQuantizer) else 0


def _common_block(*quantizers: Quantizer | None) -> int:
    """Return the number of elements that all blocks and rotations of quantisers divide."""
    sizes = [1]
    for quantizer in quantizers:
        if isinstance(quantizer, FormatQuantizer):
            sizes += [quantizer.format.block or 1, quantizer.hadamard or 1]
    return math.lcm(*sizes)


def _whole_blocks(x: Tensor, length: int) -> Tensor:
    """Return a contiguous copy of a matrix, its last dimension filled up with zeros to whole blocks."""
    return functional.pad(x, (0, -x.shape[-1] % length)).contiguous()
