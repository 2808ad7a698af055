"""Tensors of other classes than those of torch, such as weights that a library quantised: asked after an error."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cpt_core.quantization.feature_axes import tensor_arguments
from cpt_core.quantization.op_interception import QuantizedOpsMode


def belong_to_torch(
    mode: QuantizedOpsMode, error: Exception, args: Any, kwargs: Any
) -> bool:
    """Return whether an operation failed for a tensor of another class in a layer in float32: torch is to run it.

    Raises:
        TypeError: where the layer quantises.
    """
    for x in tensor_arguments(args, kwargs):
        if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not _traces(
            type(x)
        ):
            _refuse(mode, x, error)
            return True
    return False


def _traces(kind: type) -> bool:
    """Return whether torch traces code with tensors of this class."""
    return kind.__module__.startswith("torch._subclasses")


def _refuse(mode: QuantizedOpsMode, x: Tensor, error: Exception) -> None:
    """Raise TypeError for a tensor of another class, with which an operation failed in a layer that quantises."""
    layer = mode.find_owner(x) or mode.running.stack[-1].interception
    if layer.precision is None or not layer.precision.active_bits.has_quantized_roles:
        return
    raise TypeError(
        f"layer {layer.name!r} multiplies a {type(x).__module__}.{type(x).__name__}, which is no plain tensor and "
        "cannot be quantised here. Give quantised layers plain floating-point weights and inputs: a weight that is "
        "quantised, or spread over processes by tensor parallelism (parallelize_module), cannot be used with them"
    ) from error
