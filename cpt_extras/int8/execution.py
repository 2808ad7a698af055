"""Choice between int8 execution and simulation, for layers with ``execution`` "integer" or "auto".

A layer runs in int8 where its formats have at most 8 bits, its input is float32, and, for "auto", the device has fast
int8 matmuls.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from cpt_core.quantization.precision import LayerPrecision
from cpt_extras.cpu_info import has_fast_int8

CODE_BITS = 8  # at most, since codes are int8


def runs_int8(precision: LayerPrecision, x: Tensor) -> bool:
    """Return whether a layer computes on ``x`` in int8 now."""
    if (
        precision.execution == "simulated"
        or not precision.int8_operands
        or x.numel() == 0
    ):
        return False
    if x.is_meta or x.dtype != torch.float32:
        return False
    return _device_runs_int8(precision.execution, x.device)


def note_active_bits(precision: LayerPrecision) -> None:
    """Store whether operands and gradient of a layer fit into int8; called when its bits change.

    A change to float32 leaves ``int8_gradient`` as it is, since a backward pass may still come.
    """
    active = precision.active_bits
    formats = active.formats
    operands_fit = fits_int8(formats.activation) and fits_int8(formats.weight)
    precision.int8_operands = operands_fit and not active.splits_gradient
    if active.levels is not None and active.levels.error is not None:
        precision.int8_gradient = fits_int8(formats.error)


def fits_int8(format: object) -> bool:
    """Return whether a format of ``ActiveBits.formats`` is a uniform grid of at most 8 bits."""
    return isinstance(format, int) and format <= CODE_BITS


@torch.compiler.assume_constant_result
def _device_runs_int8(execution: str, device: torch.device) -> bool:
    """Return whether int8 runs on a device; warn once for "integer" on a device where it is slow."""
    is_fast = has_fast_int8(device)
    if execution == "integer" and not is_fast and device not in _warned_devices:
        _warned_devices.add(device)
        warnings.warn(
            f"int8 matmuls are slower than float32 on this device ({device}): execution='integer' "
            "computes them all the same; execution='auto' would simulate them",
            stacklevel=2,
        )
    return is_fast or execution == "integer"


_warned_devices: set[torch.device] = set()


def describe_execution(precision: LayerPrecision) -> str:
    """Return the execution of a layer in words, with what it is in effect."""
    if not precision.int8_operands:
        return f"{precision.execution} (simulated at these bits)"
    device = precision.num_steps.device
    if precision.execution == "auto" and not has_fast_int8(device):
        return f"{precision.execution} (simulated on this device)"
    return precision.execution
