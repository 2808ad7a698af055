"""Functions of torch that few models use: ``contractions``, and ``recurrences``, imported when the first one runs."""

from __future__ import annotations

import inspect
from typing import Any

from cpt_core.operations.contractions import register_library_operators as register_library_operators
from cpt_core.quantization.op_handlers import functions_named
from cpt_core.quantization.op_interception import COMPOSITE_OPS, QuantizedOpsMode
from cpt_core.quantization.precision import in_float32


def _recurrence(kind: str, is_cell: bool) -> Any:
    """Return a function of ``COMPOSITE_OPS``, computed in float32 between its operations."""

    def composite(mode: QuantizedOpsMode, *args: Any, **kwargs: Any) -> Any:
        from cpt_core.operations import recurrences

        run = recurrences.run_cell if is_cell else recurrences.run_layers
        _, input, *others = inspect.signature(run).bind(kind, *args, **kwargs).args
        operands = [tuple(x) if isinstance(x, list) else x for x in others]
        precision = mode.running.stack[-1].interception.precision
        return in_float32(precision, input, run, kind, input, *operands)

    return composite


for _kind in ("rnn_tanh", "rnn_relu", "gru", "lstm"):
    COMPOSITE_OPS |= dict.fromkeys(functions_named(_kind), _recurrence(_kind, is_cell=False))
    COMPOSITE_OPS |= dict.fromkeys(functions_named(f"{_kind}_cell"), _recurrence(_kind, is_cell=True))
