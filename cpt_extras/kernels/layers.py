"""Fused C++ forms of linear layers, convolutions and matmuls in training, with the bits of the plain path.

Calling a small layer takes longer than computing it. The plain path (``LayerPrecision``) calls an operator for every
operand, for the running range, for the operation and for the gradient. Here C++ does all of that in one call for linear
layers and convolutions, and in two around any other matmul (``cpp/layer.h``). It serves float32 tensors on a CPU, on
the paper's grids, in training, while no recording runs. Everything else is left to the plain path: an executor then
returns None.

``backend`` imports this module when it has loaded the C++ kernels; that registers the executors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.active_bits import ActiveBits, AffineGrids
from cpt_core.quantization.op_interception import OP_EXECUTORS
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import level_field
from cpt_extras.kernels import gemm_backend, operators

Operands = tuple[Tensor, Tensor, Tensor | None]
Roles = tuple[str, str]
Along = tuple[int | None, int | None]
CPT = torch.ops.cpt


def linear(
    precision: LayerPrecision,
    operands: Operands,
    roles: Roles,
    along: Along,
    options: Any,
) -> Tensor | None:
    """Compute ``F.linear`` of rounded operands, with a rounded gradient; None leaves it to the plain path."""
    grids = _grids(precision, roles, "linear_grad")
    if grids is None or gemm_backend.uses_onednn(operands[0], operands[1]):
        return None
    y: Tensor | None = CPT.quantized_linear(
        *operands,
        *_operand_rounding_args(precision, grids),
        *_gradient_rounding_args(precision, grids),
    )
    return y


def conv2d(
    precision: LayerPrecision,
    operands: Operands,
    roles: Roles,
    along: Along,
    options: Any,
) -> Tensor | None:
    """Compute ``F.conv2d`` of rounded operands, with a rounded gradient; None leaves it to the plain path.

    ``options`` are the arguments after the bias, (args, kwargs); None where x is arranged in another way.
    """
    if options is None:
        return None
    geometry, kwargs = options
    if kwargs or len(geometry) != 4 or isinstance(geometry[1], str):
        return None
    grids = _grids(precision, roles, "conv_grad")
    if grids is None:
        return None
    how = (
        *_operand_rounding_args(precision, grids),
        *_gradient_rounding_args(precision, grids),
    )
    y: Tensor | None = CPT.quantized_conv2d(*operands, *how, *geometry)
    return y


def matmul(
    precision: LayerPrecision,
    operands: Operands,
    roles: Roles,
    along: Along,
    options: Any,
) -> Tensor | None:
    """Compute a matmul of rounded operands, with a rounded gradient; None leaves it to the plain path.

    ``options``: ``MatmulOptions``, whose ``compute`` multiplies the rounded operands.
    """
    grids = _grids(
        precision,
        roles,
        "linear_grad" if roles[1] == "linear_weight" else "attention_grad",
    )
    if grids is None:
        return None
    rounded = CPT.round_operands(*operands, *_operand_rounding_args(precision, grids))
    if not rounded:
        return None
    no_bias = () if len(rounded) > 2 else (None,)
    y: Tensor = CPT.with_rounded_gradient(
        options.compute(*rounded, *no_bias),
        *_gradient_rounding_args(precision, grids),
    )
    return y


class OperationGrids(NamedTuple):
    """Grids of the roles of an operation, as arguments of its operator.

    Attributes:
        running: name of the running range of the first operand; None for no such range.
        is_weight: whether the second operand is a weight.
        first: grid of the first operand.
        second: grid of the second operand.
        bias: grid of the bias.
        grad: grid of the gradient.
        is_stochastic: whether the gradient is rounded stochastically.
    """

    running: str | None
    is_weight: bool
    first: str
    second: str
    bias: str
    grad: str
    is_stochastic: bool


def _grids(
    precision: LayerPrecision, roles: Roles, gradient: str
) -> OperationGrids | None:
    """Return the grids of an operation; None leaves it to the plain path."""
    if torch.compiler.is_compiling():  # first, so that compilers guard on nothing else
        return None
    if (
        not precision.training
        or precision.observer is not None
        or (precision.awaits_first_gradient and not precision.is_fixed)
    ):
        return None
    if (
        type(precision.grids) is not AffineGrids
        or operators.active is not torch.ops.cpt
    ):
        return None
    if fake_quantize.operators is not operators.KernelOperators:
        return None
    if (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    ):
        return None
    return _select_grids(precision.active_bits, precision.kind, roles, gradient)


@lru_cache(maxsize=4096)
def _select_grids(
    active_bits: ActiveBits, kind: str, roles: Roles, gradient: str
) -> OperationGrids | None:
    """Return the grids of roles; None if an operand is not rounded, or has a range that C++ does not update."""

    def layer_role(role: str) -> str:  # as ``LayerPrecision.layer_role``
        name = role.removeprefix(f"{kind}_")
        return name if name in active_bits.quantizers else role

    first, second, bias, grad = (
        active_bits.quantizers[layer_role(role)] for role in (*roles, "bias", gradient)
    )
    if not (active_bits.activation and active_bits.weight):
        return None
    if active_bits.splits_gradient or second.running or bias.running:
        return None
    return OperationGrids(
        running=f"running_{layer_role(roles[0])}" if first.running else None,
        is_weight=level_field(layer_role(roles[1])) == "weight",
        first=first.grid,
        second=second.grid,
        bias=bias.grid,
        grad=grad.grid,
        is_stochastic=grad.rounding == "stochastic",
    )


def _operand_rounding_args(
    precision: LayerPrecision, grids: OperationGrids
) -> tuple[Any, ...]:
    """Return the arguments of an operator that tell how to round the operands."""
    weight_levels = precision.weight_num_steps
    second_levels = weight_levels if grids.is_weight else precision.num_steps
    running = None if grids.running is None else vars(precision)[grids.running]
    return (
        precision.num_steps,
        second_levels,
        weight_levels,
        running,
        grids.first,
        grids.second,
        grids.bias,
    )


def _gradient_rounding_args(
    precision: LayerPrecision, grids: OperationGrids
) -> tuple[Any, ...]:
    """Return the arguments of an operator that tell how to round the gradient."""
    levels = precision.grad_num_steps if precision.active_bits.gradient else None
    key = precision.noise_key if grids.is_stochastic else None
    return levels, key, grids.grad


OP_EXECUTORS["simulated", "linear"] = linear
OP_EXECUTORS["simulated", "conv2d"] = conv2d
OP_EXECUTORS["simulated", "matmul"] = matmul
