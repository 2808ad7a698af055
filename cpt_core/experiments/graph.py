"""Node classification: fields and settings of its recipes.  Paper: section 4.3, figures 5 and 6."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cpt_core.checks import choose
from cpt_core.experiments.recipe import Recipe


@dataclass(frozen=True)
class GraphRecipe(Recipe):
    """Node classification with Adam and a cosine learning rate. A ``batch`` of 0 trains on the full graph.

    Attributes:
        final_lr: learning rate at the end as a share of ``lr``.
        hidden: width of the hidden layers; ``layers`` the number of graph convolutions.
        dropout: on the input of every layer but the first.
        norm: after every hidden layer: "matrix" (over all nodes and features), "node" or "none".
        self_loops: add an edge from every node to itself.
        standardize: shift and scale every feature to mean 0 and variance 1 over all nodes.
        loss: "cross_entropy", or "nll_raw": the negative log-likelihood of logits that are no log-probabilities, as in
            the authors' Arxiv script. It has no lower bound and is there to be compared with.
        aggregation: the sum over neighbours in float32, "fp" (FP-Agg), or "quantized" (Q-Agg).
        fanout: neighbours sampled for every node and layer when training in batches.
        inference: "sampled" evaluates with samples as in training, "exact" with all neighbours, layer by layer.
    """

    final_lr: float = 0.1
    hidden: int = 512
    layers: int = 3
    dropout: float = 0.2
    norm: str = "matrix"
    self_loops: bool = True
    standardize: bool = False
    loss: str = "cross_entropy"
    aggregation: str = "fp"
    fanout: int = 32
    inference: str = "sampled"

    def __post_init__(self) -> None:
        """Check the choices."""
        for name, allowed in (
            ("norm", ("matrix", "node", "none")),
            ("loss", ("cross_entropy", "nll_raw")),
            ("aggregation", ("fp", "quantized")),
            ("inference", ("sampled", "exact")),
        ):
            choose(name, getattr(self, name), allowed)


ARXIV = GraphRecipe(
    task="graph", dataset="ogbn-arxiv", model="gcn", quantized="all",
    steps=1000, batch=0, lr=1e-3, q_min=3, n_cycles=8, weight_decay=0.0,  # paper 4.3; a step is an epoch
    standardize=True, evaluate_every=20,
)  # fmt: skip

PRODUCTS = GraphRecipe(
    task="graph", dataset="ogbn-products", model="sage", quantized="all",
    steps=80 * 193, batch=1024, lr=3e-4, q_min=3, n_cycles=8, weight_decay=1e-4,  # weight decay: authors' code
    layers=2, self_loops=False, evaluate_every=10 * 193,
)  # fmt: skip

# Sized on Facebook page-page: 22,470 nodes show the order of the schedules in a few seconds a run.
GRAPH_DEMO = replace(ARXIV, steps=64, lr=3e-2, q_min=2, n_cycles=4, hidden=32, evaluate_every=8, seeds=(0, 1, 2))

SAGE_DEMO = replace(
    PRODUCTS, steps=120, batch=512, lr=1e-2, q_min=2, n_cycles=4, hidden=32, fanout=10, standardize=True,
    weight_decay=0.0, evaluate_every=40, seeds=(0, 1, 2),
)  # fmt: skip

DIGITS_GCN = replace(GRAPH_DEMO, dataset="digits-graph", steps=100, lr=1e-2, hidden=64, standardize=False)
DIGITS_SAGE = replace(SAGE_DEMO, dataset="digits-graph", steps=100, batch=128, hidden=64, standardize=False)

AUTHORS_ARXIV: dict[str, dict[str, Any]] = {
    "": dict(
        steps=500, self_loops=False, loss="nll_raw", eval_bits="current", cycle_rule="floor_plus_one", evaluate_every=1
    ),
}

AUTHORS_PRODUCTS: dict[str, dict[str, Any]] = {
    "": dict(lr=1e-3, q_min=4, eval_bits="current", cycle_rule="floor_plus_one", evaluate_every=5 * 193),
}

OGB_GRAPHS = ("ogbn-arxiv", "ogbn-products")
