"""Counting in a training of a model that is not converted: it computes what it would compute without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cpt_core.bitops.counting import CountingMode, copy_inputs, tensors_in
from cpt_core.quantization.op_interception import (
    COUNTED_FUNCTIONS,
    Interception,
    Operation,
)


class NativeCountingMode(CountingMode):
    """Runs functions as torch has them, and their handlers once more on shapes, to find the operations."""

    on_operation: Callable[[Operation, Any], None] | None

    def __init__(self) -> None:
        super().__init__()
        self._originals: dict[
            int, Tensor
        ] = {}  # id of a tensor without data -> the one that it stands for

    def is_weight(self, x: Tensor) -> bool:
        """Return whether a tensor is, or stands for, a weight."""
        return super().is_weight(self._originals.get(id(x), x))

    def find_layer(self, weight: Tensor) -> Interception:
        """Return the module that holds a weight."""
        return super().find_layer(self._originals.get(id(weight), weight))

    def run_function(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute functions that are counted as a whole, whose handlers report nothing; others as usual."""
        if function in COUNTED_FUNCTIONS:
            return function(*args, **kwargs)
        return super().run_function(function, args, kwargs)

    def call_handler(
        self, handler: Callable[..., Any], function: Any, args: Any, kwargs: Any
    ) -> Any:
        """Compute a function, and let its handler report the operations of tensors without data."""
        output = function(*args, **kwargs)
        report = self.on_operation
        if report is None:
            return output
        operations: list[Operation] = []
        stand_ins: dict[int, Tensor] = {}
        meta_args, meta_kwargs = copy_inputs((args, kwargs), True, stand_ins)
        self._originals = {id(stand_ins[id(x)]): x for x in tensors_in((args, kwargs))}
        self.on_operation = lambda operation, output: operations.append(operation)
        try:
            handler(self, function, *meta_args, **meta_kwargs)
        finally:
            self.on_operation = report
            self._originals = {}
        for operation in operations:
            report(operation, output)
        return output
