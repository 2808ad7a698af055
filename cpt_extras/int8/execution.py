"""When operations of a layer are executed on 8-bit integers: ``QuantConfig(execution="integer")`` or "auto"."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from cpt_core.quantization.precision import LayerPrecision
from cpt_extras.cpu_info import has_fast_int8

CODE_BITS = 8  # at most: codes are int8


def runs_int8(precision: LayerPrecision, x: Tensor) -> bool:
    """Return whether operations with ``x`` are executed on integers now: the layer is asked to, and the bits fit."""
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
    """Note whether operands and gradient of a layer have grids of at most 8 bits; called when its bits change.

    A change to float32 leaves the note of the gradient: a backward pass may still come.
    """
    active = precision.active_bits
    formats = active.formats
    operands_fit = fits_int8(formats.activation) and fits_int8(formats.weight)
    precision.int8_operands = operands_fit and not active.splits_gradient
    if active.levels is not None and active.levels.error is not None:
        precision.int8_gradient = fits_int8(formats.error)


def fits_int8(format: object) -> bool:
    """Return whether what a role is rounded to, see ``ActiveBits.formats``, is a grid of at most 8 bits."""
    return isinstance(format, int) and format <= CODE_BITS


@torch.compiler.assume_constant_result
def _device_runs_int8(execution: str, device: torch.device) -> bool:
    """Return whether operations are to be executed on integers on a device; warn once of one where that is slow."""
    is_fast = has_fast_int8(device)
    if execution == "integer" and not is_fast and device not in _warned_devices:
        _warned_devices.add(device)
        warnings.warn(
            f"products of 8-bit integers are slower than float32 on this device ({device}): execution='integer' "
            "computes them all the same; execution='auto' would simulate them",
            stacklevel=2,
        )
    return is_fast or execution == "integer"


_warned_devices: set[torch.device] = set()


def describe_execution(precision: LayerPrecision) -> str:
    """Return the execution of a layer, and where it is another than was asked for."""
    if not precision.int8_operands:
        return f"{precision.execution} (simulated at these bits)"
    is_slow = precision.execution == "auto" and not has_fast_int8(
        precision.num_steps.device
    )
    return (
        f"{precision.execution} (simulated on this device)"
        if is_slow
        else precision.execution
    )
