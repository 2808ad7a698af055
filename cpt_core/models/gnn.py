"""Graph networks: GCN and GraphSAGE with ReLU, normalisation and dropout between their layers.  Paper: section 4.3."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, MatrixNorm, SAGEConv

GRAPH_MODELS: dict[str, type[nn.Module]] = {"gcn": GraphConv, "sage": SAGEConv}


class GraphNet(nn.Module):
    """Graph convolutions; after all but the last ReLU and normalisation, then dropout before the next.

    Args:
        kind: "gcn" or "sage".
        inputs: features of a node.
        norm: "matrix" (over all nodes and features, no parameters), "node" (each node by itself) or "none".

    Differs: the paper does not mention the normalisation layers; the default is the authors' code's.
    """

    def __init__(
        self,
        kind: str,
        inputs: int,
        classes: int,
        hidden: int = 512,
        layers: int = 3,
        dropout: float = 0.2,
        norm: str = "matrix",
    ) -> None:
        super().__init__()
        convolution: Any = GRAPH_MODELS[kind]
        sizes = [inputs] + [hidden] * (layers - 1) + [classes]
        self.convs = nn.ModuleList(
            convolution(a, b) for a, b in itertools.pairwise(sizes)
        )
        norms: dict[str, Callable[[], nn.Module]] = {
            "matrix": MatrixNorm,
            "node": lambda: nn.LayerNorm(hidden, elementwise_affine=False),
            "none": nn.Identity,
        }
        self.norms = nn.ModuleList(norms[norm]() for _ in range(layers - 1))
        self.relu, self.dropout = nn.ReLU(), nn.Dropout(dropout)

    def forward(self, graphs: Graph | Sequence[Graph], x: Tensor) -> Tensor:
        """Return logits: one graph for all layers, or one block per layer.

        (N, inputs) -> (N, classes), or (sources of the first block, inputs) -> (destinations of the last, classes).
        """
        for i in range(len(self.convs)):
            x = self.layer(i, graphs if isinstance(graphs, Graph) else graphs[i], x)
            x = self.between(i, x)
        return x

    def layer(self, i: int, graph: Graph, x: Tensor) -> Tensor:
        """Apply convolution ``i`` and, unless it is the last, ReLU."""
        x = self.convs[i](graph, x)
        return self.relu(x) if i + 1 < len(self.convs) else x

    def between(self, i: int, x: Tensor) -> Tensor:
        """Normalise the output of layer ``i`` and drop some of it, unless it is the last."""
        return self.dropout(self.norms[i](x)) if i + 1 < len(self.convs) else x
