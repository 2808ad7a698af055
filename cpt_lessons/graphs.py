"""Figure and data of lesson 16 on graph networks: a star and a small graph of digits."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from matplotlib.figure import Figure

from cpt_lab.analysis.style import COLORS, TEXT, subplots
from cpt_lab.data.graphs import GraphData, load_graph
from cpt_lab.experiments.graph import GraphRecipe
from cpt_lab.experiments.registry import recipe


def digits() -> GraphData:
    """Return a nearest-neighbour graph over scikit-learn's digits, 5 labels per class."""
    return load_graph(cast(GraphRecipe, recipe("smoke", "digits-graph")))


def star(edges: Sequence[tuple[int, int]], features: Sequence[float]) -> Figure:
    """Draw undirected edges, the node of most neighbours in the middle, with features and degrees (self-loops too)."""
    degrees = [1 + sum(node in edge for edge in edges) for node in range(len(features))]
    middle = int(np.argmax(degrees))
    outer_nodes = [node for node in range(len(features)) if node != middle]
    angles = np.pi / 2 + 2 * np.pi * np.arange(len(outer_nodes)) / len(outer_nodes)
    places = {middle: (0.0, 0.0)} | {
        n: (1.7 * np.cos(a), np.sin(a))
        for n, a in zip(outer_nodes, angles, strict=True)
    }
    alt = f"{len(edges)} edges between {len(features)} nodes, of features {', '.join(f'{x:g}' for x in features)}"
    with subplots(1, 1, alt, figsize=(7, 3)) as (figure, ((ax,),)):
        for a, b in edges:
            ax.plot(
                *zip(places[a], places[b], strict=True),
                color="#888888",
                linewidth=1.4,
                zorder=1,
            )
        for node, (x, y) in places.items():
            ax.plot(x, y, "o", color=COLORS["small"], markersize=26, zorder=2)
            ax.text(
                x,
                y,
                str(node),
                color="white",
                fontsize=12,
                ha="center",
                va="center",
                zorder=3,
            )
            said = f"feature {features[node]:,g}\ndegree {degrees[node]}, with its self-loop"
            side = -1 if x < -0.1 else 1  # away from the edges
            up = 0.14 if node == middle else 0
            ax.text(
                x + 0.24 * side,
                y + up,
                said,
                color=TEXT["static"],
                fontsize=9,
                va="center",
                ha="right" if side < 0 else "left",
            )
        ax.set(
            xlim=(-3.2, 3.2),
            ylim=(-0.8, 1.3),
            xticks=[],
            yticks=[],
            frame_on=False,
            aspect="equal",
        )
        ax.set_title(
            f"Node {middle} adds up what its {degrees[middle] - 1} neighbours send, and its own",
            fontsize=10,
        )
        ax.grid(visible=False)
    return figure
