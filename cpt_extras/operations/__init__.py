"""Functions of torch that few models use: ``contractions``, and ``recurrences``, imported when the first one runs."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch.nn import functional

from cpt_core.quantization import op_handlers
from cpt_core.quantization.op_handlers import functions_named
from cpt_core.quantization.op_interception import (
    COMPOSITE_OPS,
    QuantizedOpsMode,
    without_modes,
)
from cpt_core.quantization.precision import in_float32
from cpt_extras.operations.contractions import (
    register_library_operators as register_library_operators,
)

op_handlers.PAPER_ATTENTION |= set(  # encoders like the paper's BERT
    "RobertaSelfAttention XLMRobertaSelfAttention CamembertSelfAttention ElectraSelfAttention DistilBertSelfAttention "
    "AlbertAttention ViTAttention".split()
)


def _recurrence(kind: str, is_cell: bool) -> Any:
    """Return a function of ``COMPOSITE_OPS``, computed in float32 between its operations."""

    def composite(mode: QuantizedOpsMode, *args: Any, **kwargs: Any) -> Any:
        from cpt_extras.operations import recurrences

        linear = partial(op_handlers.linear, mode, functional.linear)
        run = partial(
            recurrences.run_cell if is_cell else recurrences.run_recurrence,
            kind,
            linear,
        )
        operands = inspect.signature(run).bind(*args, **kwargs).args
        tensors: list[Any] = [tuple(x) if isinstance(x, list) else x for x in operands]
        precision = mode.running.stack[-1].interception.precision
        with without_modes():
            return in_float32(precision, tensors[0], run, *tensors)

    return composite


for _kind in ("rnn_tanh", "rnn_relu", "gru", "lstm"):
    COMPOSITE_OPS |= dict.fromkeys(
        functions_named(_kind), _recurrence(_kind, is_cell=False)
    )
    COMPOSITE_OPS |= dict.fromkeys(
        functions_named(f"{_kind}_cell"), _recurrence(_kind, is_cell=True)
    )
