"""Node classification: full-graph GCN and sampled GraphSAGE on OGBN-Arxiv, OGBN-Products and the user's own graphs.

Paper: section 4.3.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from cpt_core.graphs.graph import Graph
from cpt_core.models.gnn import GraphNet
from cpt_lab.data.graph_batches import sample_blocks
from cpt_lab.data.graph_readers import ogb_evaluator
from cpt_lab.data.graphs import load_graph, random_graph
from cpt_lab.data.loading import load_once, make_loader, to_device
from cpt_lab.data.random_streams import Stream, batch_keys, seeded_generator
from cpt_lab.experiments.graph import GraphRecipe
from cpt_lab.experiments.schema import CYCLIC_RULES
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.resources import usable_cores
from cpt_lab.tasks.base import (
    LearningRate,
    Metrics,
    constant,
    cosine,
    cyclic,
    make_optimizer,
    milestones,
    sum_batches,
)

MAX_SAMPLERS = 2  # processes that sample neighbours from a large graph on the CPU
MIN_EDGES_FOR_SAMPLERS = (
    2_000_000  # on smaller graphs, processes take longer to start than they save
)
EVALUATION_NODES = 4096
EXACT_CHUNK_NODES = 1 << 18  # nodes whose outputs exact inference computes at a time


class Batch(NamedTuple):
    """Nodes of a training step.

    Attributes:
        graphs: the whole graph, or one block per layer.
        features: features of the input nodes, (sources, F).
        labels: labels of the nodes in the loss.
        rows: rows of the model's output that are these nodes; None for all rows.
    """

    graphs: Graph | list[Graph]
    features: Tensor
    labels: Tensor
    rows: Tensor | None


class GraphTask:
    """Adam, cross entropy, accuracy.

    With a batch size, seed nodes come in random order, ``fanout`` neighbours of every node are sampled per layer, and
    a step is a mini-batch; without, a step is an epoch on the full graph.

    Paper: section 4.3.
    Differs: the loss is cross entropy. The authors' Arxiv script applies the negative log-likelihood to raw logits,
        which has no lower bound (``loss="nll_raw"``).
    Differs: edges of OGBN-Products are not doubled; the authors add reverse edges to a graph that has them.
    """

    def __init__(
        self, spec: RunSpec, device: torch.device, stand_in: bool = False
    ) -> None:
        self.recipe, self.seed, self.device = (
            cast(GraphRecipe, spec.recipe),
            spec.seed,
            device,
        )
        made_from = ("self_loops", "standardize")
        self.data = (
            random_graph(self.recipe)
            if stand_in
            else load_once(load_graph, self.recipe, *made_from)
        )
        self.graph = self.data.graph.to(device)
        self.features, self.labels = (
            self.data.features.to(device),
            self.data.labels.to(device),
        )
        self.rows = {
            name: getattr(self.data, name).to(device)
            for name in ("train", "valid", "test")
        }
        if not self.recipe.batch:
            self.graph.set_constant(self.features)
        kind = {"gcn": "GCN", "sage": "GraphSAGE"}[self.recipe.model]
        aggregation = {"fp": "FP-Agg", "quantized": "Q-Agg"}[self.recipe.aggregation]
        loss = ", raw-logit loss" if self.recipe.loss == "nll_raw" else ""
        self.title = f"{kind} ({aggregation}{loss}) on {self.data.title}"
        self.fanouts = [self.recipe.fanout] * self.recipe.layers  # neighbours per node
        self.cost_batches = 8 if self.recipe.batch else 1  # samples differ in size
        self.fixed_shape = not self.recipe.batch

    def build_model(self) -> nn.Module:
        """Build the recipe's model."""
        r = self.recipe
        inputs = self.features.shape[1]
        return GraphNet(
            r.model, inputs, self.data.classes, r.hidden, r.layers, r.dropout, r.norm
        ).to(self.device)

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield the batches from step ``start`` on, without end."""
        train = self.rows["train"]
        if not self.recipe.batch:
            yield from itertools.repeat(
                Batch(self.graph, self.features, self.labels[train], train)
            )
        samples = _SampledBatches(self.graph, train, self.fanouts, self.seed)
        keys = enumerate(
            batch_keys(len(train), self.recipe.batch, self.seed, start), start
        )
        if self.device.type == "cpu" and self.graph.num_edges > MIN_EDGES_FOR_SAMPLERS:
            workers = min(MAX_SAMPLERS, usable_cores())
            parts: Any = make_loader(
                samples, self.device, workers, sampler=keys, batch_size=None
            )
        else:
            parts = map(samples.__getitem__, keys)
        for seeds, nodes, blocks in parts:
            yield Batch(blocks, self.features[nodes], self.labels[seeds], None)

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the model's arguments: graphs and features."""
        return batch.graphs, batch.features

    def loss(self, model: nn.Module, batch: Batch, carry: None) -> tuple[Tensor, None]:
        """Return the mean loss over the labelled nodes of the batch."""
        logits = model(batch.graphs, batch.features)
        if batch.rows is not None:
            logits = logits[batch.rows]
        return _loss(self.recipe.loss, logits, batch.labels), None

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, Metrics]:
        """Return accuracy (share of nodes, 0..1) and mean loss of every split that is not empty."""
        splits = {
            name: self.rows[name] for name in ("valid", "test") if len(self.rows[name])
        }
        net = cast(GraphNet, model)
        if self.recipe.batch and self.recipe.inference != "exact":
            logits = {
                name: self._sampled_logits(net, nodes) for name, nodes in splits.items()
            }
        else:
            all_logits = (
                self._exact_logits(net)
                if self.recipe.batch
                else net(self.graph, self.features)
            )
            logits = {name: all_logits[nodes] for name, nodes in splits.items()}
        return {
            name: self._measure(logits[name], nodes) for name, nodes in splits.items()
        }

    def _measure(self, logits: Tensor, nodes: Tensor) -> Metrics:
        labels = self.labels[nodes]
        predicted = logits.argmax(1)
        is_correct = predicted == labels
        correct, loss = sum_batches(
            [(is_correct.sum(), _loss(self.recipe.loss, logits, labels))]
        )
        accuracy = correct / len(labels)
        if self.data.ogb:
            pair = {
                "y_true": labels.cpu().numpy()[:, None],
                "y_pred": predicted.cpu().numpy()[:, None],
            }
            accuracy = float(ogb_evaluator(self.data.ogb).eval(pair)["acc"])
        return {"accuracy": accuracy, "loss": loss} | self._accuracy_by_degree(
            is_correct, nodes
        )

    def _accuracy_by_degree(self, is_correct: Tensor, nodes: Tensor) -> Metrics:
        """Return the accuracy of nodes by range of in-degree; ranges without nodes are left out."""
        degrees = self.graph.in_degrees[nodes]
        accuracies = {}
        for low, high in itertools.pairwise((*self.recipe.degrees, math.inf)):
            in_range = (degrees >= low) & (degrees < high)
            if in_range.any():
                accuracies[f"accuracy_degree{low}"] = float(
                    is_correct[in_range].double().mean()
                )
        return accuracies

    def _sampled_logits(self, model: GraphNet, nodes: Tensor) -> Tensor:
        """Return logits (n, classes), with the same sampled neighbours in every evaluation."""
        random = seeded_generator(self.seed, Stream.EVALUATE, device=self.device)
        logits = []
        for seeds in nodes.split(EVALUATION_NODES):
            sources, blocks = sample_blocks(self.graph, seeds, self.fanouts, random)
            logits.append(model(blocks, self.features[sources]))
        return torch.cat(logits)

    def _exact_logits(self, model: GraphNet) -> Tensor:
        """Return logits (N, classes) of all nodes from all their neighbours, layer by layer.

        Layers that widen their input run in chunks of nodes, to save memory. Layers that narrow it multiply before they
        aggregate, and run at once: every chunk would repeat the matmul for nearly all nodes.
        """
        h = self.features
        for i in range(self.recipe.layers):
            is_last = i + 1 == self.recipe.layers
            width = self.data.classes if is_last else self.recipe.hidden
            if h.shape[1] > width:
                outputs = model.layer(i, self.graph, h)
            else:
                outputs = self._layer_in_chunks(model, i, h, width)
            h = model.between(i, outputs)
        return h

    def _layer_in_chunks(
        self, model: GraphNet, i: int, h: Tensor, width: int
    ) -> Tensor:
        """Return the outputs (N, width) of layer i for all nodes, computed in chunks of nodes."""
        outputs, random = h.new_empty(self.graph.num_dst, width), seeded_generator(0)
        nodes = torch.arange(self.graph.num_dst, device=self.device)
        for chunk in nodes.split(EXACT_CHUNK_NODES):
            sources, (block,) = sample_blocks(self.graph, chunk, [None], random)
            outputs[chunk] = model.layer(i, block, h[sources])
        return outputs

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LearningRate]:
        """Return Adam and the learning rate by the recipe's rule."""
        r = self.recipe
        adam = make_optimizer(torch.optim.Adam, model.parameters(), r)
        if r.lr_rule in CYCLIC_RULES:
            rising = r.lr_rule == "cyclic_rising"
            return adam, cyclic(r.lr, r.n_cycles, r.steps, rising)
        if r.lr_rule == "step":
            return adam, milestones(r.lr, (0.5, 0.75), r.steps)
        if r.lr_rule == "cosine":
            return adam, cosine(r.lr, r.final_lr, r.steps)
        return adam, constant(r.lr)


def _loss(kind: str, logits: Tensor, labels: Tensor) -> Tensor:
    if kind == "nll_raw":
        # The authors' Arxiv script applies no log-softmax.
        return nn.functional.nll_loss(logits, labels)
    return nn.functional.cross_entropy(logits, labels)


class _SampledBatches(Dataset):
    """Sampled neighbourhoods of the nodes of a step, as a pure function of (seed, step) in any process."""

    def __init__(
        self, graph: Graph, train: Tensor, fanouts: list[int], seed: int
    ) -> None:
        self.graph, self.train, self.fanouts, self.seed = graph, train, fanouts, seed

    def __getitem__(
        self, key: tuple[int, list[tuple[int, int]]]
    ) -> tuple[Tensor, Tensor, list[Graph]]:
        """Return seed nodes, input nodes and blocks for a key (step, keys of the batch)."""
        step, batch_keys_of_step = key
        indices = torch.tensor([index for _, index in batch_keys_of_step])
        seeds = self.train[to_device(indices, self.train.device)]
        random = seeded_generator(self.seed, step, Stream.SAMPLE, device=seeds.device)
        nodes, blocks = sample_blocks(self.graph, seeds, self.fanouts, random)
        return seeds, nodes, blocks
