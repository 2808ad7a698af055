"""Operations of layers in training with fewer calls, in C++: the bits of the plain path, faster.

A small layer takes longer to be called than to be computed. The plain path (``LayerPrecision.quantized``) calls an
operator for every operand, one for the running range, one for the operation and one for the gradient. Here C++ does all
of it in one call for linear layers and convolutions, and in two around any other matmul (``cpp/layer.h``). It does so
for float32 tensors on a CPU on the paper's grids, in training, while nobody records what is rounded. Everything else is
left to the plain path: an executor returns None.

``backend`` imports this module where the C++ kernels are loaded; that registers the executors.
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
    """Compute ``F.linear`` of rounded operands, with a rounded gradient; None where the plain path is to do it."""
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
    """Compute ``F.conv2d`` likewise; ``options``: its arguments behind the bias, None where x is arranged otherwise."""
    if options is None:
        return None
    geometry, named = options
    if named or len(geometry) != 4 or isinstance(geometry[1], str):
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
    """Compute a matmul likewise; ``options``: the function that computes it of rounded operands."""
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
    y: Tensor = CPT.with_rounded_gradient(
        options(*rounded) if len(rounded) > 2 else options(*rounded, None),
        *_gradient_rounding_args(precision, grids),
    )
    return y


class OperationGrids(NamedTuple):
    """What the operators are told of the roles of an operation.

    Attributes:
        running: name of the running range of the first operand; None for no such range.
        is_weight: whether the second operand is a weight.
        first: grid of the first operand; ``second``, ``bias`` and ``grad`` likewise.
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
    """Return the grids of an operation; None where the plain path is to compute it."""
    if (
        torch.compiler.is_compiling()
    ):  # asked first: compiled code is not guarded on the others
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
    now: ActiveBits, kind: str, roles: Roles, gradient: str
) -> OperationGrids | None:
    """Return the grids of roles; None where an operand is not rounded, or has a range that is not followed here."""

    def own(role: str) -> str:  # as ``LayerPrecision.layer_role``
        name = role.removeprefix(f"{kind}_")
        return name if name in now.quantizers else role

    first, second, bias, grad = (
        now.quantizers[own(role)] for role in (*roles, "bias", gradient)
    )
    if (
        not now.activation
        or not now.weight
        or now.splits_gradient
        or second.running
        or bias.running
    ):
        return None
    return OperationGrids(
        running=f"running_{own(roles[0])}" if first.running else None,
        is_weight=level_field(own(roles[1])) == "weight",
        first=first.grid,
        second=second.grid,
        bias=bias.grid,
        grad=grad.grid,
        is_stochastic=grad.rounding == "stochastic",
    )


def _operand_rounding_args(
    precision: LayerPrecision, grids: OperationGrids
) -> tuple[Any, ...]:
    """Return how the operands are rounded."""
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
    """Return how the gradient is rounded."""
    levels = precision.grad_num_steps if precision.active_bits.gradient else None
    return levels, precision.noise_key if grids.is_stochastic else None, grids.grad


OP_EXECUTORS["simulated", "linear"] = linear
OP_EXECUTORS["simulated", "conv2d"] = conv2d
OP_EXECUTORS["simulated", "matmul"] = matmul
