"""What a call of a layer costs: its multiply-accumulates (MACs) and elementwise operations, by class of layer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from cpt_core.graphs.graph import as_graph
from cpt_core.graphs.layers import GraphConv, MatrixNorm, SAGEConv


def conv_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of a convolution: outputs times kernel elements times input channels per group (biases are free)."""
    return y.numel() * math.prod(module.kernel_size) * (module.in_channels // module.groups)


def linear_macs(module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of a linear layer: outputs times inputs of one output (the bias is free)."""
    return y.numel() * int(module.in_features)  # type: ignore[arg-type]


def layer_norm_macs(module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> int:
    """Elementwise operations of a layer normalisation: 4 per element, as the counters of the authors have it."""
    return 4 * y.numel()


def recurrent_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of the first input product of an LSTM, GRU or RNN; those behind it are ``recurrent_inner_macs``."""
    return rows_of(y) * units_of(module) // module.num_layers * GATES_OF[module.mode] * module.input_size


def recurrent_inner_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of the products with hidden states, of the input products of higher layers, and of an LSTM's projections."""
    above = units_of(module) // module.num_layers * (module.num_layers - 1) * y.shape[-1]  # y: what the layers hand on
    state = module.proj_size or module.hidden_size
    gates = GATES_OF[module.mode] * (units_of(module) * state + above)
    return rows_of(y) * (gates + units_of(module) * module.proj_size)


def lstm_gate_operations(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """Elementwise operations of the gates and cells of an LSTM.

    The authors add 15.2 million by hand for 35 steps of 20 sequences, 800 wide: 27 per unit and step, and 5 per unit
    and sequence that their rounded numbers have besides.
    """
    x = inputs[0]
    if isinstance(x, PackedSequence):
        sequences = int(x.batch_sizes[0])
    else:
        sequences = x.shape[0 if module.batch_first else 1] if x.dim() == 3 else 1
    return units_of(module) * (27 * rows_of(y) + 5 * sequences)


def rows_of(y: Tensor) -> int:
    """Return how many vectors of the last dimension a tensor holds."""
    return y.numel() // y.shape[-1]


def units_of(module: Any) -> int:
    """Return the hidden units of an LSTM, GRU or RNN, over all its layers and directions."""
    return module.num_layers * (2 if module.bidirectional else 1) * module.hidden_size


def norm_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """Elementwise operations of a normalisation: 5 per element, 4 without affine, 2 or 1 with fixed statistics."""
    fixed = not module.training and getattr(module, "running_mean", None) is not None
    return y.numel() * ((2 if module.affine else 1) if fixed else (5 if module.affine else 4))


def graph_conv_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of a GCN layer's product; its rows are the sources where the product comes before the sum."""
    graph = as_graph(inputs[0])
    rows = graph.num_src if module._in_feats > module._out_feats else graph.num_dst
    return rows * module._in_feats * module._out_feats


def sage_conv_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of the two products of a GraphSAGE layer."""
    graph = as_graph(inputs[0])
    rows = graph.num_src if module._in_src_feats > module._out_feats else graph.num_dst
    return (rows + graph.num_dst) * module._in_src_feats * module._out_feats


MACS: dict[type[nn.Module], Callable[[Any, tuple[Any, ...], Tensor], int]] = {
    nn.Conv1d: conv_macs,
    nn.Conv2d: conv_macs,
    nn.Conv3d: conv_macs,
    nn.Linear: linear_macs,
    nn.BatchNorm1d: norm_macs,
    nn.BatchNorm2d: norm_macs,
    nn.BatchNorm3d: norm_macs,
    nn.LayerNorm: layer_norm_macs,
    MatrixNorm: layer_norm_macs,
    nn.LSTM: recurrent_macs,
    GraphConv: graph_conv_macs,
    SAGEConv: sage_conv_macs,
}

# Layers with a sum over neighbours, beside their product: the number of features that are summed.
AGGREGATED: dict[type[nn.Module], Callable[[Any], int]] = {
    GraphConv: lambda m: min(m._in_feats, m._out_feats),
    SAGEConv: lambda m: min(m._in_src_feats, m._out_feats),
}

# Layers that the authors' counters do not know; their products are in float32, like those of plain functions.
PLAIN: tuple[type[nn.Module], ...] = (nn.GRU, nn.RNN)
GATES_OF = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}

AGGREGATION, GATES, UPSAMPLING, PRODUCTS = "aggregation", "gates", "upsampling", "products"


def pyramid_kinds() -> set[type[nn.Module]]:
    """Return torchvision's feature pyramid, if the program uses it."""
    module = sys.modules.get("torchvision.ops.feature_pyramid_network")
    return {module.FeaturePyramidNetwork} if module is not None else set()


def upsampled(module: Any, y: Mapping[str, Tensor]) -> int:
    """Return the elements that a feature pyramid makes by upsampling: all levels but the coarsest of its inputs'."""
    return sum(level.numel() for level in list(y.values())[: len(module.inner_blocks) - 1])


def sums_before_product(module: Any) -> bool:
    """Whether a graph convolution sums over neighbours first: the narrower side is summed."""
    return inputs_of_product(module) <= int(module._out_feats)


def inputs_of_product(module: Any) -> int:
    """Return the features that a graph convolution takes."""
    return int(module._in_feats if hasattr(module, "_in_feats") else module._in_src_feats)
