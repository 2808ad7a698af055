"""Quantisation of torch functions and program structures that the paper's models do not have.

The problem: the core intercepts linear layers, convolutions, matmuls, attention and the LSTM. Other models multiply by
``addmm``, ``einsum`` or ``grouped_mm``, use GRUs, or run inside ``DataParallel``, checkpoints and compilers. Without
handlers, those operations would stay in float32, or be quantised at the wrong bits.

The design: ``quantize_`` loads this package through ``cpt_core.extensions``; each module registers its handlers.

- ``contractions``: functions that are matmuls in disguise, rewritten as a matmul or an einsum with roles and ranges.
- ``recurrences``: RNNs, GRUs, their cells, and LSTMs with packed sequences, step by step; imported at first use.
- ``split_gradients``: separate formats of the output gradient for the input gradient and the weight gradient.
- ``forward_state`` and ``recomputation``: recomputation in the backward pass uses the bits of the forward pass.
- ``guarded_mode``: interception inside replicas, interrupted forward passes, compiled code and checkpoints.
- ``autocast_matmul``, ``traced_matmul``: backward passes that a compiler traces under autocast stay in float32.
- ``unsupported_tensors``: a clear error for tensors of other classes, such as weights that are quantised already.

The trade-offs: ``guarded_mode`` looks at Python frames, which costs some microseconds per module. Functions without a
handler run in float32; ``cpt.check`` finds them (docs/fallbacks.md).
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

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

        function = recurrences.run_cell if is_cell else recurrences.run_recurrence
        signature = inspect.signature(partial(function, kind, functional.linear))
        operands = signature.bind(*args, **kwargs).args
        tensors: list[Any] = [tuple(x) if isinstance(x, list) else x for x in operands]

        def run(*in_float32: Any) -> Any:
            # the owner of a weight is that of the parameter, not of its copy in float32
            pairs = zip(tree_leaves(in_float32), tree_leaves(tensors), strict=True)
            parameters = {id(copy): original for copy, original in pairs}

            def linear(x: Any, weight: Any, bias: Any = None) -> Any:
                parameter = parameters.get(id(weight), weight)
                return op_handlers.run_linear(mode, parameter, x, weight, bias)

            return function(kind, linear, *in_float32)

        precision = mode.running.stack[-1].interception.precision
        with without_modes():
            if is_cell:
                state, has_projection = tensors[1], False
            else:
                call = recurrences.RecurrentCall.from_arguments(*tensors)
                state, has_projection = call.state, call.has_projection
            state = (state,) if isinstance(state, Tensor) else state
            cast = partial(recurrences.cast_outputs, kind, state, has_projection)
            return in_float32(precision, tensors[0], run, *tensors, cast=cast)

    return composite


for _kind in ("rnn_tanh", "rnn_relu", "gru", "lstm"):
    COMPOSITE_OPS |= dict.fromkeys(
        functions_named(_kind), _recurrence(_kind, is_cell=False)
    )
    COMPOSITE_OPS |= dict.fromkeys(
        functions_named(f"{_kind}_cell"), _recurrence(_kind, is_cell=True)
    )
