"""Torch functions that no cost convention prices: elementwise functions and pooling.  Beyond the paper."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cpt_core.bitops.counting import copy_inputs, report_operations, tensors_in
from cpt_core.bitops.shadow import meta_copy, preserve_state
from cpt_core.quantization.op_interception import COUNTED_FUNCTIONS, Operation
from cpt_core.validation import (
    ForwardInputs,
    check_inputs,
    check_types,
    run_forward,
)

# functions that move, rename or create data cost nothing by any convention
FREE_FUNCTIONS = frozenset(
    "arange broadcast_tensors cat chunk clone contiguous copy detach empty empty_like float full full_like get getitem "
    "hstack new_empty new_full new_ones new_zeros ones ones_like pad repeat_interleave requires_grad set setitem split "
    "stack to type type_as unbind vstack zeros zeros_like".split()
)


def uncounted_functions(model: nn.Module, inputs: ForwardInputs) -> dict[str, int]:
    """Return the output elements of a forward pass by torch function, for functions that ``count_bitops`` leaves out.

    Args:
        model: any module; converted by ``quantize_`` or not. A copy runs.
        inputs: the arguments of its forward, as for ``count_bitops``.

    >>> uncounted_functions(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), (torch.ones(3, 4),))
    {'relu': 6}
    """
    check_types(uncounted_functions, {"model": model})
    inputs = check_inputs(inputs)
    shadow, functions = meta_copy(model, on_meta=False), _UncountedFunctions()
    with (
        preserve_state(model, inputs),
        report_operations(shadow, _ignore),
        functions,
    ):
        run_forward(shadow, copy_inputs(inputs, False, {}))
    return dict(functions.elements)


def _ignore(operation: Operation) -> None:
    """Take no note of an operation: only uncounted functions are of interest."""


class _UncountedFunctions(TorchFunctionMode):
    """Counts the output elements of functions that the mode of the model does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if not isinstance(output, (torch.Tensor, tuple)):
            return output
        first = next(tensors_in(output), None)
        if first is None or not first.is_floating_point() or first._is_view():
            return output

        name = getattr(function, "__name__", "").strip("_")
        if name not in FREE_FUNCTIONS and function not in COUNTED_FUNCTIONS:
            self.elements[name] += first.numel()
        return output
