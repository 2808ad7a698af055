"""Linear layers and convolutions in training as one operator each, in C++: the bits of the plain path, faster.

A small layer takes longer to be called than to be computed. The plain path (``LayerPrecision.quantized``) calls an
operator for every operand, one for the running range, one for the operation and one for the gradient; here C++ does all
of it in one call (``cpp/layer.h``). It does so for float32 tensors on a CPU on the paper's grids, in training, while
nobody records what is rounded. Everything else is left to the plain path: an executor returns None.

``backend`` imports this module where the C++ kernels are loaded; that registers the executors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_core.kernels import operators, products
from cpt_core.quantization import fake_quantize
from cpt_core.quantization.active_bits import AffineGrids
from cpt_core.quantization.op_interception import EXECUTORS
from cpt_core.quantization.precision import LayerPrecision

Operands = tuple[Tensor, Tensor, Tensor | None]
Roles = tuple[str, str]
Along = tuple[int | None, int | None]
CPT = torch.ops.cpt


def linear(precision: LayerPrecision, operands: Operands, roles: Roles, along: Along, options: Any) -> Tensor | None:
    """Compute ``F.linear`` of rounded operands, with a rounded gradient; None where the plain path is to do it."""
    if not _is_usual(precision) or products.in_onednn(operands[0], operands[1]):
        return None
    roundings = _roundings(precision, roles, "linear_grad")
    return None if roundings is None else CPT.quantized_linear(*operands, *roundings)


def conv2d(precision: LayerPrecision, operands: Operands, roles: Roles, along: Along, options: Any) -> Tensor | None:
    """Compute ``F.conv2d`` likewise; ``options``: its arguments behind the bias."""
    rest, more = options
    if not _is_usual(precision) or more or len(rest) != 4 or isinstance(rest[1], str):
        return None
    roundings = _roundings(precision, roles, "conv_grad")
    return None if roundings is None else CPT.quantized_conv2d(*operands, *roundings, *rest)


def _is_usual(precision: LayerPrecision) -> bool:
    """Return whether a layer trains on the paper's grids, and nobody looks at what is rounded."""
    if torch.compiler.is_compiling():  # asked first: compiled code is not guarded on the others
        return False
    now = precision.now
    if not precision.training or not now.activation or not now.weight or now.splits_gradient:
        return False
    if precision.observer is not None or (precision.unseen and not precision.fixed):
        return False
    if type(precision.grids) is not AffineGrids or not _is_active():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and torch.autograd.forward_ad._current_level < 0


def _is_active() -> bool:
    """Return whether the C++ kernels round, and not the plain ones, see ``backend.reference``."""
    return fake_quantize.operators is operators.KernelOperators and operators.active is torch.ops.cpt


def _roundings(precision: LayerPrecision, roles: Roles, gradient: str) -> tuple[Any, ...] | None:
    """Return what the operators are told about the grids; None where a weight or a bias has a running range."""
    quantizers, role = precision.now.quantizers, precision.own_role(roles[0])
    input, weight, bias = quantizers[role], quantizers[precision.own_role(roles[1])], quantizers["bias"]
    grad = quantizers[precision.own_role(gradient)]
    if weight.running or bias.running:
        return None
    running = precision._buffers[f"running_{role}"] if input.running else None
    key = precision.noise_key if grad.rounding == "stochastic" else None
    grad_levels = precision.grad_levels if precision.now.gradient else None
    levels = precision.levels, precision.weight_levels, grad_levels
    return *levels, key, running, input.grid, weight.grid, bias.grid, grad.grid


EXECUTORS["simulated", "linear"] = linear
EXECUTORS["simulated", "conv2d"] = conv2d
