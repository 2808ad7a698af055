"""Counting of operations in a training, without a change of its results.

``NativeCountingMode`` runs the functions of torch unchanged. It finds the operations inside a function by calling its
handler a second time, with tensors that have shapes and no data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from cpt_core.bitops.counting import CountingMode, copy_inputs, tensors_in
from cpt_core.quantization.op_interception import (
    COUNTED_FUNCTIONS,
    Interception,
    Operation,
)


class NativeCountingMode(CountingMode):
    """Mode that runs torch's own functions, and calls their handlers on shapes to find the operations."""

    on_operation: Callable[[Operation, Any], None] | None

    def __init__(self) -> None:
        super().__init__()
        # tensors with data, by the id of the tensor without data that replaces them
        self._originals: dict[int, Tensor] = {}

    def is_weight(self, x: Tensor) -> bool:
        """Return whether a tensor is a weight, or replaces one."""
        return super().is_weight(self._originals.get(id(x), x))

    def find_layer(self, weight: Tensor) -> Interception:
        """Return the module that holds a weight."""
        return super().find_layer(self._originals.get(id(weight), weight))

    def run_function(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function; one that is counted as a whole runs without its handler, which reports nothing."""
        if function in COUNTED_FUNCTIONS:
            return function(*args, **kwargs)
        return super().run_function(function, args, kwargs)

    def call_handler(
        self, handler: Callable[..., Any], function: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run a function, and let its handler report the operations, on tensors without data."""
        output = function(*args, **kwargs)
        report = self.on_operation
        if report is None:
            return output
        operations: list[Operation] = []
        stand_ins: dict[int, Tensor] = {}
        meta_args, meta_kwargs = copy_inputs((args, kwargs), True, stand_ins)
        self._originals = {id(stand_ins[id(x)]): x for x in tensors_in((args, kwargs))}
        self.on_operation = partial(_append, operations)
        try:
            handler(self, function, *meta_args, **meta_kwargs)
        finally:
            self.on_operation = report
            self._originals = {}
        for operation in operations:
            report(operation, output)
        return output


def _append(operations: list[Operation], operation: Operation, output: Any) -> None:
    """Append an operation to a list; its output has no data."""
    operations.append(operation)
