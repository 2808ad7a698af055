"""Node classification: full-graph GCN, sampled GraphSAGE; OGBN-Arxiv, OGBN-Products and your own graphs.

Paper: section 4.3.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, cast

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
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.resources import usable_cores
from cpt_lab.tasks.base import (
    LearningRate,
    Metrics,
    constant,
    cosine,
    make_optimizer,
    milestones,
    sum_batches,
)

MAX_SAMPLERS = 2  # processes at most that sample from a large graph on the CPU
MIN_EDGES_FOR_SAMPLERS = 2_000_000  # edges from which sampling is worth them
EVALUATION_NODES = 4096
EXACT_CHUNK_NODES = 1 << 18  # nodes

# graphs of the layers, input features (sources, F), labels of the rows that count, those rows (None: all)
Batch = tuple[Graph | list[Graph], Tensor, Tensor, Tensor | None]


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

    def model(self) -> nn.Module:
        """Return the recipe's model."""
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
                (self.graph, self.features, self.labels[train], train)
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
            yield blocks, self.features[nodes], self.labels[seeds], None

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return what the model is called with."""
        return batch[:2]

    def loss(self, model: nn.Module, batch: Batch, carry: None) -> tuple[Tensor, None]:
        """Return the mean loss over the labelled nodes of the batch."""
        graphs, x, labels, rows = batch
        logits = model(graphs, x)
        return _loss(
            self.recipe.loss, logits if rows is None else logits[rows], labels
        ), None

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, Metrics]:
        """Return accuracy (share of nodes, 0..1) and mean loss of every split that is not empty."""
        splits = {
            name: part for name in ("valid", "test") if len(part := self.rows[name])
        }
        net = cast(GraphNet, model)
        if not self.recipe.batch or self.recipe.inference == "exact":
            whole = (
                net(self.graph, self.features)
                if not self.recipe.batch
                else self._exact(net)
            )
            logits = {name: whole[part] for name, part in splits.items()}
        else:
            logits = {
                name: self._sampled_logits(net, part) for name, part in splits.items()
            }
        return {
            name: self._measure(logits[name], part) for name, part in splits.items()
        }

    def _measure(self, logits: Tensor, nodes: Tensor) -> Metrics:
        labels = self.labels[nodes]
        predicted = logits.argmax(1)
        right, loss = sum_batches(
            [((predicted == labels).sum(), _loss(self.recipe.loss, logits, labels))]
        )
        accuracy = right / len(labels)
        if self.data.ogb:
            pair = {
                "y_true": labels.cpu().numpy()[:, None],
                "y_pred": predicted.cpu().numpy()[:, None],
            }
            accuracy = float(ogb_evaluator(self.data.ogb).eval(pair)["acc"])
        return {"accuracy": accuracy, "loss": loss} | self._by_degree(
            predicted == labels, nodes
        )

    def _by_degree(self, right: Tensor, nodes: Tensor) -> Metrics:
        """Accuracy of the strata of in-degree that have nodes."""
        degrees = self.graph.in_degrees[nodes]
        found = {}
        for low, high in itertools.pairwise((*self.recipe.degrees, math.inf)):
            if (inside := (degrees >= low) & (degrees < high)).any():
                found[f"accuracy_degree{low}"] = float(right[inside].double().mean())
        return found

    def _sampled_logits(self, model: GraphNet, nodes: Tensor) -> Tensor:
        """Logits from sampled neighbours, the same ones in every evaluation of a run, (n, classes)."""
        random = seeded_generator(self.seed, Stream.EVALUATE, device=self.device)
        out = []
        for seeds in nodes.split(EVALUATION_NODES):
            sources, blocks = sample_blocks(self.graph, seeds, self.fanouts, random)
            out.append(model(blocks, self.features[sources]))
        return torch.cat(out)

    def _exact(self, model: GraphNet) -> Tensor:
        """Logits of all nodes from all their neighbours, layer by layer, (N, classes).

        Layers that widen their input run in chunks of nodes, for memory; the others, which multiply before they sum,
        run in one piece: every chunk would repeat the product for nearly all nodes.
        """
        h = self.features
        for i in range(self.recipe.layers):
            width = (
                self.data.classes if i + 1 == self.recipe.layers else self.recipe.hidden
            )
            whole = h.shape[1] > width
            h = model.between(
                i,
                model.layer(i, self.graph, h)
                if whole
                else self._in_chunks(model, i, h, width),
            )
        return h

    def _in_chunks(self, model: GraphNet, i: int, h: Tensor, width: int) -> Tensor:
        """Layer i for all nodes, a chunk of them at a time, (N, width)."""
        out, random = h.new_empty(self.graph.num_dst, width), seeded_generator(0)
        for chunk in torch.arange(self.graph.num_dst, device=self.device).split(
            EXACT_CHUNK_NODES
        ):
            sources, (block,) = sample_blocks(self.graph, chunk, [None], random)
            out[chunk] = model.layer(i, block, h[sources])
        return out

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LearningRate]:
        """Return Adam and the learning rate by the recipe's rule."""
        r = self.recipe
        adam = make_optimizer(torch.optim.Adam, model.parameters(), r)
        if r.lr_rule == "step":
            return adam, milestones(r.lr, (0.5, 0.75), r.steps)
        return adam, cosine(
            r.lr, r.final_lr, r.steps
        ) if r.lr_rule == "cosine" else constant(r.lr)


def _loss(kind: str, logits: Tensor, labels: Tensor) -> Tensor:
    if kind == "nll_raw":
        return nn.functional.nll_loss(
            logits, labels
        )  # what the authors' Arxiv script computes: no log-softmax
    return nn.functional.cross_entropy(logits, labels)


class _SampledBatches(Dataset):
    """Sampled neighbourhoods of a step's nodes: a pure function of (seed, step), whoever computes it."""

    def __init__(
        self, graph: Graph, train: Tensor, fanouts: list[int], seed: int
    ) -> None:
        self.graph, self.train, self.fanouts, self.seed = graph, train, fanouts, seed

    def __getitem__(
        self, key: tuple[int, list[tuple[int, int]]]
    ) -> tuple[Tensor, Tensor, list[Graph]]:
        step, numbers = key
        seeds = self.train[
            to_device(
                torch.tensor([number for _, number in numbers]), self.train.device
            )
        ]
        random = seeded_generator(self.seed, step, Stream.SAMPLE, device=seeds.device)
        return seeds, *sample_blocks(self.graph, seeds, self.fanouts, random)
