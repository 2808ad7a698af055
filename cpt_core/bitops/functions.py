"""Counters of functions that are counted as a whole, registered in ``COUNTED_FUNCTIONS``.

Normalisations, the gates of LSTMs and the upsampling of feature pyramids are no matmuls, but the paper prices them.
Recurrent layers read a weight once, not once per step, and sums over constant features are computed once.

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


# --- elementwise work ---------------------------------------------------------------------------------------------


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
    """Count 5 operations per element, 4 without affine; 2 or 1 with fixed statistics."""
    per_element = (
        (4 if weight is None else 5) if training else (1 if weight is None else 2)
    )
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
    """Count a copied element as an operation, as the counters of the authors do, in feature pyramids alone."""
    running = mode.running.stack[-1]
    if type(running.module).__name__ == PYRAMID:
        name, second = (
            running.interception.name,
            input.new_empty(0),
        )  # it has one operand
        yield describe_operation(
            name, "interpolate", y.numel(), input, second, y, None, UPSAMPLING
        )


# --- recurrent layers ---------------------------------------------------------------------------------------------

RECURRENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def recurrence(
    kind: str, mode: QuantizedOpsMode, output: tuple[Tensor, ...], x: Tensor, *args: Any
) -> Iterator[Operation]:
    """Count the matmuls of a recurrent layer with its weights, and the gates of an LSTM.

    The authors add 15.2 million operations of gates by hand for 35 steps of 20 sequences, 800 wide: 27 per unit and
    step, and 5 per unit and sequence that their rounded numbers have besides.
    """
    call = RecurrentCall.from_arguments(x, *args)
    if call.sizes is None:
        starts = ends = x.shape[0 if call.is_batch_first else 1]
    else:
        starts, ends = call.sizes[0], call.sizes[-1]
    rows = output[0].numel() // output[0].shape[-1]
    matrices = [w for w in call.weights if w.dim() == 2]
    per_direction = len(matrices) // (
        call.num_layers * call.directions
    )  # of inputs, of states, of projections
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
        weights = matrices[
            first : first + per_layer : per_direction
        ]  # all directions read the same inputs
        size, width = sum(w.numel() for w in weights), weights[0].shape[1]
        has_error = has_inner_error if first else x.requires_grad
        yield operation(
            rows * size, (rows * width, size, rows * size // width), has_error
        )

    for number, weight in enumerate(matrices):
        if number % per_direction == 0:
            continue
        # the states that a layer starts from need no gradient, but fused kernels compute one; backwards, the first
        # step is the last
        is_backwards = number % per_layer >= per_direction
        sequences = ends if is_backwards else starts
        if is_fused or has_state_grad or number % per_direction != 1:
            sequences = 0
        elements = rows * weight.shape[1], weight.numel(), rows * weight.shape[0]
        yield operation((rows - sequences) * weight.numel(), elements, has_inner_error)
        yield operation(
            sequences * weight.numel(), (0, 0, 0), False
        )  # moved with the others

    if kind == "lstm":
        units = sum(w.shape[0] for w in matrices[1::per_direction]) // 4
        elements = 4 * rows * units, 0, 2 * rows * units
        macs = units * (27 * rows + 5 * starts)
        yield Operation(
            layer.name, GATES, macs, elements, has_inner_error, False, None, GATES
        )


# --- graph convolutions -------------------------------------------------------------------------------------------


def neighbour_sum(
    mode: QuantizedOpsMode,
    y: Tensor,
    /,
    graph: Graph,
    x: Tensor,
    out_exponent: float = 0.0,
    reduce: str = "sum",
) -> Iterator[Operation]:
    """Count an operation per edge and feature; quantised with Q-Agg alone."""
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
