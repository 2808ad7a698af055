"""What a call of a layer reads and writes: elements of the first operand, of the weights, and of the result.

Each is moved once: a convolution reads its image once, not once per window; a recurrent layer its weights, not once
per step of a sequence. What no product reads, such as a bias, is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cpt_core.bitops.macs import GATES_OF, inputs_of_product, rows_of, units_of
from cpt_core.graphs.graph import Graph

Elements = tuple[int, int, int]


def graph_elements(module: Any, macs: int, weights: int) -> Elements:
    """Elements of the products of a graph convolution: as many rows as its MACs are of."""
    features, outputs = inputs_of_product(module), int(module._out_feats)
    rows = macs // (features * outputs)
    return rows * features, weights, rows * outputs


def sum_elements(graph: Graph, width: int) -> Elements:
    """Elements of a sum over neighbours: features of the sources, one per edge, features of the destinations."""
    return graph.num_src * width, graph.num_edges, graph.num_dst * width


def recurrent_elements(module: Any, x: Tensor, y: Tensor, weights: int) -> tuple[Elements, Elements]:
    """Elements of the first input product of an LSTM, GRU or RNN, and of those behind it together."""
    units = units_of(module) // module.num_layers  # of a layer, over its directions
    rows, gates, above = rows_of(y), GATES_OF[module.mode], module.num_layers - 1
    first = gates * units * module.input_size
    state = module.proj_size or module.hidden_size
    read = units_of(module) // module.hidden_size * state + above * y.shape[-1]
    written = gates * units * (module.num_layers + above)
    if module.proj_size:
        read += units_of(module)
        written += module.num_layers * y.shape[-1]
    return (x.numel(), first, rows * gates * units), (rows * read, weights - first, rows * written)


def gate_elements(module: Any, y: Tensor) -> Elements:
    """Elements of the gates of an LSTM: what the products left, then cell and hidden state."""
    return 4 * rows_of(y) * units_of(module), 0, 2 * rows_of(y) * units_of(module)


def upsampled_elements(module: Any, y: Mapping[str, Tensor]) -> Elements:
    """Elements of a feature pyramid's copies: each level is read to make the one below it."""
    sizes = [level.numel() for level in list(y.values())[: len(module.inner_blocks)]]
    return sum(sizes[1:]), 0, sum(sizes[:-1])
