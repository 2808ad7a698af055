"""Graph convolutions: GCN and mean GraphSAGE.  Paper: equation 1.

The layers have the parameters and ``state_dict`` keys of DGL's layers of the same name and run without DGL. They are
called as ``layer(graph, features)``, with a ``Graph`` or a graph of DGL.

Shapes: N nodes, S source and D destination nodes of a block, I inputs, O outputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from cpt_core.graphs.functional import (
    NORM_EXPONENTS,
    Features,
    check_in_degrees,
    graph_conv,
    overridable,
    sage_conv,
)
from cpt_core.graphs.graph import as_graph
from cpt_core.validation import check_choice, check_int, check_types

MAX_FEATURES = 2**31 - 1
LAYER_NORM_EPS = 1e-5  # what torch adds to the variance


class GraphConv(nn.Module):
    """A graph convolution (GCN layer): Xavier uniform weight (I, O), zero bias (O,).

    Args:
        in_feats: input features of a node.
        out_feats: output features of a node.
        norm: "both" (symmetric, the paper's), "left", "right" or "none".
        bias: whether to add a bias.
        allow_zero_in_degree: nodes without in-edges are given the bias alone instead of being refused.

    Paper: equation 1.
    """

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        norm: str = "both",
        bias: bool = True,
        allow_zero_in_degree: bool = True,
    ) -> None:
        super().__init__()
        check_types(GraphConv.__init__, locals())
        check_choice("norm", norm, NORM_EXPONENTS)
        in_feats = check_int("in_feats", in_feats, 1, MAX_FEATURES)
        out_feats = check_int("out_feats", out_feats, 1, MAX_FEATURES)
        # attributes are named as in DGL
        self._in_feats, self._out_feats, self._norm = in_feats, out_feats, norm
        self._allow_zero_in_degree = allow_zero_in_degree
        self.weight = nn.Parameter(
            nn.init.xavier_uniform_(torch.empty(in_feats, out_feats))
        )
        self.bias = nn.Parameter(torch.zeros(out_feats)) if bias else None

    def forward(self, graph: Any, features: Features) -> Tensor:
        """(S, I) -> (D, O)."""
        graph = as_graph(graph)
        if not self._allow_zero_in_degree:
            check_in_degrees(graph)
        return graph_conv(graph, features, self.weight, self.bias, self._norm)

    def extra_repr(self) -> str:
        """Return features and norm for ``repr``."""
        return f"{self._in_feats}, {self._out_feats}, norm={self._norm}"


class SAGEConv(nn.Module):
    """A GraphSAGE layer with mean aggregation: linear maps of the node itself (with bias) and of its neighbours' mean.

    Initialised as the authors do: ``fc_neigh`` Xavier uniform with ReLU's gain, ``fc_self`` torch's default, zero bias.
    """

    def __init__(self, in_feats: int, out_feats: int, bias: bool = True) -> None:
        super().__init__()
        check_types(SAGEConv.__init__, locals())
        in_feats = check_int("in_feats", in_feats, 1, MAX_FEATURES)
        out_feats = check_int("out_feats", out_feats, 1, MAX_FEATURES)
        self._in_src_feats, self._out_feats = in_feats, out_feats
        self.fc_neigh = nn.Linear(in_feats, out_feats, bias=False)
        self.fc_self = nn.Linear(in_feats, out_feats, bias=bias)
        nn.init.xavier_uniform_(self.fc_neigh.weight, gain=math.sqrt(2))
        if bias:
            nn.init.zeros_(self.fc_self.bias)

    def forward(self, graph: Any, features: Features) -> Tensor:
        """(S, I) -> (D, O)."""
        return sage_conv(
            as_graph(graph),
            features,
            self.fc_neigh.weight,
            self.fc_self.weight,
            self.fc_self.bias,
        )


class MatrixNorm(nn.Module):
    """Layer normalisation over all nodes and features at once, without parameters, as the authors have it.

    The statistics are those of the whole batch of nodes: on a full graph test nodes take part, and in sampled training
    they depend on the sample.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(N, F) -> (N, F), mean 0 and variance 1 over all entries."""
        return spread_norm(x) if x.is_cuda else nn.functional.layer_norm(x, x.shape)


@overridable
def spread_norm(x: Tensor) -> Tensor:
    """Return ``x`` normalised over all entries, in parallel on a GPU: torch's layer norm takes one thread block."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, correction=0)
    return ((wide - mean) * torch.rsqrt(variance + LAYER_NORM_EPS)).to(x.dtype)
