"""When operations of a layer are executed on 8-bit integers: ``QuantConfig(execution="integer")`` or "auto"."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from cpt_core.processor import multiplies_codes
from cpt_core.quantization.precision import LayerPrecision

CODE_BITS = 8  # at most: codes are int8


def multiplies_integers(precision: LayerPrecision, x: Tensor) -> bool:
    """Return whether operations with ``x`` are executed on integers now: the layer is asked to, and the bits fit."""
    if precision.execution == "simulated" or not has_int8_operands(precision) or x.numel() == 0:
        return False
    if x.is_meta or x.dtype != torch.float32:
        return False
    return _runs_on(precision.execution, x.device)


def has_int8_operands(precision: LayerPrecision) -> bool:
    """Return whether both operands of a layer have grids of at most 8 bits, at the active bits."""
    formats = precision.now.formats
    return fits_int8(formats.activation) and fits_int8(formats.weight) and not precision.now.splits_gradient


def has_int8_gradient(precision: LayerPrecision) -> bool:
    """Return whether the gradient of a layer has a grid of at most 8 bits, at the bits that were active last."""
    return precision.execution != "simulated" and fits_int8(precision.last_gradient_format)


def fits_int8(format: object) -> bool:
    """Return whether what a role is rounded to, see ``ActiveBits.formats``, is a grid of at most 8 bits."""
    return isinstance(format, int) and format <= CODE_BITS


@torch.compiler.assume_constant_result
def _runs_on(execution: str, device: torch.device) -> bool:
    """Return whether operations are to be executed on integers on a device; warn once of one where that is slow."""
    is_fast = multiplies_codes(device)
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
    if not has_int8_operands(precision):
        return f"{precision.execution} (simulated at these bits)"
    is_slow = precision.execution == "auto" and not multiplies_codes(precision.levels.device)
    return f"{precision.execution} (simulated on this device)" if is_slow else precision.execution
