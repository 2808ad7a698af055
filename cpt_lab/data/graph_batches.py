"""Sampled neighbourhoods for training in batches.  Paper: section 4.3 (OGBN-Products)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cpt_core.graphs.graph import Graph


def sample_blocks(
    graph: Graph,
    seeds: Tensor,
    fanouts: Sequence[int | None],
    generator: torch.Generator,
) -> tuple[Tensor, list[Graph]]:
    """Sample the neighbourhood of ``seeds``: at most ``fanouts[i]`` in-neighbours of every node in layer i.

    Neighbours are drawn without replacement; a node with fewer neighbours, or a fan-out of None, takes all of them. The
    result is a pure function of the arguments and the generator's state, on any device.

    Args:
        graph: all edges.
        seeds: (B,) nodes whose outputs are wanted.
        fanouts: one entry per layer, the first layer first.
        generator: generator on the graph's device.

    Returns:
        The nodes whose input features are needed, and one block (``Graph``) per layer. The destinations of a block are
        the first of its sources, and the sources of block i + 1 are the destinations of block i.

    Differs: the authors use DGL's ``NeighborSampler``. That of DGL 1.1.3 returns edges that do not exist on int32
        graphs and repeats its samples on a single thread only; the distribution is the same (tested).
    """
    blocks: list[Graph] = []
    nodes = seeds.to(torch.int64)
    place = torch.full(
        (graph.num_src,), -1, dtype=graph.indices.dtype, device=graph.device
    )
    for fanout in reversed(fanouts):
        indptr, edges = _sample(graph, nodes, fanout, generator)
        sources = graph.indices[edges]
        place[nodes] = torch.arange(len(nodes), dtype=place.dtype, device=place.device)
        new = torch.unique(sources[place[sources] < 0]).to(torch.int64)
        place[new] = torch.arange(
            len(nodes), len(nodes) + len(new), dtype=place.dtype, device=place.device
        )
        local = place[sources]
        nodes = torch.cat([nodes, new])
        place[nodes] = -1
        blocks.append(Graph._unchecked(indptr.to(local.dtype), local, len(nodes)))
    return nodes, blocks[::-1]


def _sample(
    graph: Graph, nodes: Tensor, fanout: int | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw in-edges of every node; return offsets (len(nodes) + 1,) and positions in ``graph.indices``."""
    start = graph.indptr[nodes].to(torch.int64)
    degree = graph.indptr[nodes + 1].to(torch.int64) - start
    count = degree if fanout is None else degree.clamp_max(fanout)
    indptr = torch.zeros(len(nodes) + 1, dtype=torch.int64, device=nodes.device)
    torch.cumsum(count, 0, out=indptr[1:])

    # The first edges of every node, in order.
    row = torch.repeat_interleave(torch.arange(len(nodes), device=nodes.device), count)
    position = torch.arange(len(row), device=nodes.device)
    edges = position - indptr[row] + start[row]
    if fanout is None:
        return indptr, edges

    # Nodes with more neighbours than the fan-out draw theirs.
    large = torch.nonzero(degree > fanout).squeeze(1)
    if large.numel():
        sampled = _draw_distinct(degree[large], fanout, generator)
        slots = indptr[large].unsqueeze(1) + torch.arange(fanout, device=nodes.device)
        edges[slots] = start[large].unsqueeze(1) + sampled
    return indptr, edges


def _draw_distinct(count: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Draw k different numbers below count[i] for every row i, (rows, k), by Floyd's algorithm on all rows at once."""
    random = torch.rand(
        k, len(count), generator=generator, device=count.device, dtype=torch.float64
    )
    sampled = torch.empty(k, len(count), dtype=torch.int32, device=count.device)
    for i in range(k):
        largest = (count - k + i).to(
            torch.int32
        )  # largest number that this round may draw
        candidate = (random[i] * (largest + 1)).to(torch.int32)
        is_repeated = (sampled[:i] == candidate).any(0)
        sampled[i] = torch.where(is_repeated, largest, candidate)
    return sampled.T
