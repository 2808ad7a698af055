"""Counters of torch functions that are counted as a whole, registered in ``COUNTED_FUNCTIONS``.

The paper prices normalisation, the gates of LSTMs and the upsampling of feature pyramids, which are no matmuls.
Recurrent layers read a weight once and not at every step, and sums over constant features are computed once.

A counter has the form ``counter(mode, output, *args, **kwargs) -> operations``, with the arguments of the function.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from cpt_core.bitops.conventions import AGGREGATION, GATES, NORM, UPSAMPLING
from cpt_core.graphs import functional as graph_functional
from cpt_core.graphs.functional import is_constant
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import spread_norm
from cpt_core.quantization.lstm import RecurrentCall
from cpt_core.quantization.op_handlers import functions_named
from cpt_core.quantization.op_interception import (
    COUNTED_FUNCTIONS,
    Operation,
    QuantizedOpsMode,
    describe_operation,
)

PYRAMID = "FeaturePyramidNetwork"  # of torchvision


# --- elementwise work ---


def batch_norm(
    mode: QuantizedOpsMode,
    y: Tensor,
    /,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *rest: Any,
    **more: Any,
) -> Iterator[Operation]:
    """Count 5 operations per element, 4 without affine parameters; 2 or 1 with fixed statistics."""
    per_element = 4 if training else 1
    if weight is not None:
        per_element += 1  # one multiply-accumulate with the affine parameters
    yield _norm(mode, "batch_norm", per_element, input, weight, y)


def layer_norm(
    mode: QuantizedOpsMode,
    y: Tensor,
    /,
    input: Tensor,
    normalized_shape: Any = None,
    weight: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> Iterator[Operation]:
    """Count 4 operations per element, as the counters of the authors do."""
    yield _norm(mode, "layer_norm", 4, input, weight, y)


def _norm(
    mode: QuantizedOpsMode,
    name: str,
    per_element: int,
    x: Tensor,
    weight: Tensor | None,
    y: Tensor,
) -> Operation:
    layer = (
        mode.running.stack[-1].interception
        if weight is None
        else mode.find_layer(weight)
    )
    scale = x.new_empty(0) if weight is None else weight
    return describe_operation(
        layer.name, name, per_element * y.numel(), x, scale, y, None, NORM
    )


def interpolate(
    mode: QuantizedOpsMode, y: Tensor, /, input: Tensor, *rest: Any, **more: Any
) -> Iterator[Operation]:
    """Count one operation per copied element in feature pyramids, as the counters of the authors do."""
    running = mode.running.stack[-1]
    if type(running.module).__name__ == PYRAMID:
        name = running.interception.name
        second = input.new_empty(0)  # there is no second operand
        yield describe_operation(
            name, "interpolate", y.numel(), input, second, y, None, UPSAMPLING
        )


# --- recurrent layers ---

RECURRENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def recurrence(
    kind: str, mode: QuantizedOpsMode, output: tuple[Tensor, ...], x: Tensor, *args: Any
) -> Iterator[Operation]:
    """Count the matmuls of a recurrent layer with its weights, and the gates of an LSTM.

    The authors add 15.2 million operations of gates by hand for 35 steps of 20 sequences, 800 wide. That is 27 per unit
    and step, plus 5 per unit and sequence, which their rounded numbers include.
    """
    call = RecurrentCall.from_arguments(x, *args)
    if call.sizes is None:
        starts = ends = x.shape[0 if call.is_batch_first else 1]
    else:
        starts, ends = call.sizes[0], call.sizes[-1]
    rows = output[0].numel() // output[0].shape[-1]
    matrices = [w for w in call.weights if w.dim() == 2]
    # matrices of a direction: of inputs, of states and perhaps of projections
    per_direction = len(matrices) // (call.num_layers * call.directions)
    per_layer = per_direction * call.directions

    layer = mode.find_layer(matrices[0])
    has_weight_grad = any(w.requires_grad for w in matrices)
    has_inner_error = x.requires_grad or has_weight_grad
    has_state_grad = any(s.requires_grad for s in call.state)
    is_fused = (
        kind == "lstm"
        and per_direction == 2
        and (layer.precision is not None or call.sizes is None)
    )
    operation = partial(
        Operation, layer.name, kind, weight=has_weight_grad, precision=layer.precision
    )

    for first in range(0, len(matrices), per_layer):
        # all directions read the same inputs
        weights = matrices[first : first + per_layer : per_direction]
        size, width = sum(w.numel() for w in weights), weights[0].shape[1]
        has_error = has_inner_error if first else x.requires_grad
        yield operation(
            rows * size, (rows * width, size, rows * size // width), has_error
        )

    for number, weight in enumerate(matrices):
        if number % per_direction == 0:
            continue
        # initial states need no gradient, but fused kernels compute one; in the backward direction, the last step is
        # the first
        is_backwards = number % per_layer >= per_direction
        sequences = ends if is_backwards else starts
        if is_fused or has_state_grad or number % per_direction != 1:
            sequences = 0
        elements = rows * weight.shape[1], weight.numel(), rows * weight.shape[0]
        yield operation((rows - sequences) * weight.numel(), elements, has_inner_error)
        # elements of these steps are included above
        yield operation(sequences * weight.numel(), (0, 0, 0), False)

    if kind == "lstm":
        units = sum(w.shape[0] for w in matrices[1::per_direction]) // 4
        elements = 4 * rows * units, 0, 2 * rows * units
        macs = units * (27 * rows + 5 * starts)
        yield Operation(
            layer.name, GATES, macs, elements, has_inner_error, False, None, GATES
        )


# --- graph convolutions ---


def neighbour_sum(
    mode: QuantizedOpsMode,
    y: Tensor,
    /,
    graph: Graph,
    x: Tensor,
    out_exponent: float = 0.0,
    reduce: str = "sum",
) -> Iterator[Operation]:
    """Count one operation per edge and feature, which is quantised with Q-Agg only."""
    layer = mode.running.stack[-1].interception
    precision = layer.precision
    if precision is not None and "aggregation" not in precision.quantizers:
        precision = None
    macs, once = graph.num_edges * x.shape[1], is_constant(graph, x)
    yield describe_operation(
        layer.name,
        AGGREGATION,
        macs,
        x,
        graph.indices,
        y,
        precision,
        AGGREGATION,
        once=once,
    )


COUNTED_FUNCTIONS |= {
    functional.batch_norm: batch_norm,
    functional.layer_norm: layer_norm,
    spread_norm: layer_norm,
    functional.interpolate: interpolate,
    graph_functional.neighbour_sum: neighbour_sum,
    **{
        function: partial(recurrence, kind)
        for kind in RECURRENCES
        for function in functions_named(kind)
    },
}
