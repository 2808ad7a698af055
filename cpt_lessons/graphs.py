"""What notebook 05 shows of graph networks: a star, what sums over neighbours cost, a loss without a floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from cpt_core.bitops.plan import count_bitops
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv
from cpt_core.models.gnn import GraphNet
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.schedules.make import make_schedule
from cpt_lab.analysis.style import COLORS, TEXT, drawing, whole
from cpt_lab.data.graphs import bidirected
from cpt_lab.experiments import designs


class Experiment(NamedTuple):
    """The runs of figures 5 and 6.

    Attributes:
        fp: all arms with FP-Agg.
        quantized: arms with Q-Agg.
        pairs: both aggregations at static precisions.
    """

    fp: list[Any]
    quantized: list[Any]
    pairs: list[Any]


def experiment(
    scale: str, dataset: str, model: str, schedules: Sequence[str], seeds: Sequence[int], preset: str
) -> Experiment:
    """Return the runs at a scale; with Q-Agg, smoke runs are CR and static q_max."""
    where = (scale, dataset, model or None)
    given: dict[str, Any] = {"seeds": seeds or None, "preset": preset}
    fp = designs.quality_cost(*where, task="graph", schedules=schedules, **given)
    demo, top = scale == "demo", fp[0].q_max
    few = [s for s in schedules if s == "CR"] if scale == "smoke" else schedules
    bits = [2, 3, 4, 8] if demo else [top]
    quantized = designs.q_agg(*where, schedules=few, static=bits if demo else None, **given)
    return Experiment(fp, quantized, designs.aggregation(*where, bits=bits, **given))


def star(edges: Sequence[tuple[int, int]], features: Sequence[float]) -> Figure:
    """Draw undirected edges, the node of most neighbours in the middle, with features and degrees (self-loops too)."""
    degrees = [1 + sum(node in edge for edge in edges) for node in range(len(features))]
    middle = int(np.argmax(degrees))
    others = [node for node in range(len(features)) if node != middle]
    angles = np.pi / 2 + 2 * np.pi * np.arange(len(others)) / len(others)
    places = {middle: (0.0, 0.0)} | {n: (1.7 * np.cos(a), np.sin(a)) for n, a in zip(others, angles, strict=True)}
    alt = f"{len(edges)} edges between {len(features)} nodes, of features {', '.join(f'{x:g}' for x in features)}"
    with drawing(1, 1, alt, figsize=(7, 3)) as (figure, axes):
        ax = axes[0][0]
        for a, b in edges:
            ax.plot(*zip(places[a], places[b], strict=True), color="#888888", linewidth=1.4, zorder=1)
        for node, (x, y) in places.items():
            ax.plot(x, y, "o", color=COLORS["small"], markersize=26, zorder=2)
            ax.text(x, y, str(node), color="white", fontsize=12, ha="center", va="center", zorder=3)
            said = f"feature {features[node]:,g}\ndegree {degrees[node]}, with its self-loop"
            side = -1 if x < -0.1 else 1  # away from the edges
            up = 0.14 if node == middle else 0
            ax.text(
                x + 0.24 * side, y + up, said, color=TEXT["static"], fontsize=9, va="center",
                ha="right" if side < 0 else "left",
            )  # fmt: skip
        ax.set(xlim=(-3.2, 3.2), ylim=(-0.9, 1.4), xticks=[], yticks=[], frame_on=False, aspect="equal")
        ax.grid(visible=False)
    return figure


def convolved(edges: Sequence[tuple[int, int]], features: Sequence[float]) -> list[float]:
    """Return what a GCN layer with the weight 1, without bias and activation, makes of one feature per node.

    Args:
        edges: undirected; self-loops are added.
        features: of the nodes.
    """
    source, destination = np.array(edges).T
    graph = bidirected(source, destination, len(features), self_loops=True)
    layer = GraphConv(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    return layer(graph, torch.tensor(features, dtype=torch.float32).unsqueeze(1)).flatten().tolist()


def aggregation_share(nodes: int, edges: int, sizes: Sequence[int], bits: Sequence[int]) -> None:
    """Print what sums over neighbours add to the operations of a GCN: counted plainly, and in BitOps of a step."""
    indptr = torch.div(torch.arange(nodes + 1) * edges, nodes, rounding_mode="floor")
    graph, x = Graph(indptr, torch.zeros(edges, dtype=torch.int64), nodes), torch.empty(nodes, sizes[0], device="meta")
    inputs, depth = (graph.set_constant(x), x), len(sizes) - 1

    def share(kind: str, q: int, counted: str) -> float:
        model = quantize_(GraphNet("gcn", sizes[0], sizes[-1], sizes[1], depth), QuantConfig(aggregation=kind))
        schedule = make_schedule("STATIC", q_max=q, total_steps=1000)
        plan = count_bitops(model, inputs, schedule, convention="per_op", q_grad=max(bits))
        layers = {k: v for k, v in getattr(plan, counted).items() if "norm" not in k}
        return 100 * sum(v for k, v in layers.items() if "aggregation" in k) / sum(layers.values())

    print(f"operations of a forward pass: {share('fp', max(bits), 'macs'):.1f} % are sums over neighbours")
    for q in bits:
        fp, quantized = (share(kind, q, "by_layer") for kind in ("fp", "quantized"))
        print(f"BitOps of training at {q} bits: FP-Agg {fp:5.1f} %   Q-Agg {quantized:4.1f} %")


def losses_of_a_node(losses: Mapping[str, Sequence[float]]) -> Figure:
    """Draw losses of one node, by name, over the steps of gradient descent that lower them."""
    alt = f"{' and '.join(losses)} of one node over steps of gradient descent: one levels off at 0, one falls for ever"
    with drawing(1, 1, alt, figsize=(6.4, 2.8)) as (figure, axes):
        ax = axes[0][0]
        for (name, values), group in zip(losses.items(), ("small", "large"), strict=False):
            ax.plot(range(1, len(values) + 1), values, color=COLORS[group], linewidth=1.8, label=name)
        ax.axhline(0, color="#888888", linewidth=0.8)
        whole(ax.xaxis)
        low = min(min(values) for values in losses.values())
        ax.set(xlabel="step", ylabel="loss", ylim=(1.08 * low, max(2.0, -0.08 * low)))
        ax.legend(fontsize=9)
    return figure
