"""Graphs: sums over neighbours against dense matrices, checks, cached results, sampled blocks."""

import copy
import pickle
from types import SimpleNamespace

import dgl
import pytest
import torch
from helpers import WITH_CUDA, OpRecorder, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt_core.graphs.graph import Graph, as_graph
from cpt_lab.data.graph_batches import sample_blocks


def random_edges(nodes=30, edges=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, nodes, (2, edges), generator=generator)


def triangle():
    return Graph.from_edges(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), 3)


def index_pointers(destination, num_dst):
    counts = torch.bincount(destination, minlength=num_dst)
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


@settings(max_examples=20)
@given(st.integers(1, 30), st.integers(1, 50), st.integers(0, 200), st.integers(0, 99))
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=WITH_CUDA)])
def test_graph_aggregate_matches_dense_matmul(
    device, reduce, num_dst, num_src, num_edges, seed
):
    """Sum over random edges, among them parallel ones, nodes without edges and graphs without edges."""
    random = torch.Generator().manual_seed(seed)
    destination = torch.randint(num_dst, (num_edges,), generator=random).sort().values
    source = torch.randint(num_src, (num_edges,), generator=random)
    graph = Graph(index_pointers(destination, num_dst), source, num_src).to(device)
    matrix = torch.zeros(num_dst, num_src, dtype=torch.float64)
    one = torch.ones(num_edges, dtype=torch.float64)
    matrix.index_put_((destination, source), one, accumulate=True)
    assert torch.equal(graph.in_degrees.cpu(), matrix.sum(1).float())
    assert torch.equal(graph.out_degrees.cpu(), matrix.sum(0).float())
    eye = torch.eye(num_dst, device=device)
    assert torch.equal(graph.transposed.aggregate(eye).cpu(), matrix.T.float())
    assert graph.transposed is graph.transposed

    if reduce == "mean":
        matrix /= matrix.sum(1, keepdim=True).clamp_min(1)
    x = torch.randn(num_src, 5, generator=random, requires_grad=True)
    upstream = torch.randn(num_dst, 5, generator=random)
    y = graph.aggregate(x.to(device), reduce).cpu()
    (gradient,) = torch.autograd.grad(y, x, upstream)
    for found, expected in (
        (y, matrix @ x.double()),
        (gradient, matrix.T @ upstream.double()),
    ):
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_graph_aggregate_sums_half_in_float32(dtype):
    """Sum half precision in float32, and return the type of the input."""
    ones = torch.ones(4096, dtype=torch.int64)
    graph = Graph.from_edges(0 * ones, ones, 2)
    y = graph.aggregate(torch.ones(2, 1, dtype=dtype))
    assert y.dtype == dtype
    assert y[1].item() == 4096  # bfloat16 alone would stop at 256


def test_as_graph_converts_dgl_graphs():
    source, destination = random_edges()
    g = dgl.graph((source, destination), num_nodes=30)
    graph = as_graph(g)
    assert as_graph(graph) is graph
    x, upstream = torch.randn(30, 3, requires_grad=True), torch.randn(30, 3)
    sums = graph.aggregate(x), dgl.ops.copy_u_sum(g, x)
    assert torch.equal(*sums)
    gradients = [torch.autograd.grad(y, x, upstream)[0] for y in sums]
    assert torch.equal(*gradients)
    block = dgl.to_block(dgl.in_subgraph(g, torch.tensor([3, 4])), torch.tensor([3, 4]))
    small, sources = as_graph(block), block.num_src_nodes()
    assert (small.num_src, small.num_dst) == (sources, 2)
    assert (small.transposed.num_src, small.transposed.num_dst) == (2, sources)
    message = "graph must be a Graph or a DGLGraph, got Tensor"
    refused(message, as_graph, torch.eye(3), error=TypeError)


def test_graph_from_pyg_rejects_edge_weights():
    """Accept objects with the attributes of PyTorch Geometric's ``Data``, without edge weights."""
    edge_index = random_edges()
    data, x = SimpleNamespace(edge_index=edge_index, num_nodes=30), torch.randn(30, 3)
    graphs = Graph.from_pyg(data), Graph.from_edges(*edge_index, 30)
    assert torch.equal(*(graph.aggregate(x) for graph in graphs))
    weighted = SimpleNamespace(**vars(data), edge_weight=torch.ones(200))
    refused("and no edge_weight, got a Tensor and a Tensor", Graph.from_pyg, weighted)
    for bad in (
        SimpleNamespace(num_nodes=3),
        SimpleNamespace(edge_index=edge_index.t(), num_nodes=30),
    ):
        message = r"data must have an edge_index, a tensor \(2, E\), and no "
        refused(message, Graph.from_pyg, bad)


def edges(source, destination, nodes):
    return Graph.from_edges(torch.tensor(source), torch.tensor(destination), nodes)


def csr(indptr, indices, dtype=torch.int64):
    return Graph(torch.tensor(indptr, dtype=dtype), torch.tensor(indices))


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (edges, ([0], [5], 3), r"nodes 0\.\.2, got 5"),
        (edges, ([5], [0], 3), r"nodes 0\.\.2, got 5"),
        (edges, ([2**32], [0], 3), r"nodes 0\.\.2, got 4294967296"),
        (edges, ([-1], [0], 3), r"nodes 0\.\.2, got -1"),
        (edges, ([0, 1], [1], 2), r"an entry per edge, got \(2,\) and"),
        (csr, ([0, 3], [0]), "indptr must go from 0 to the number of edges, 1"),
        (csr, ([], [0]), "indptr must go from 0 to the"),
        (csr, ([0, 5, 2], [0, 1]), "ascend, at node 1 it goes from 5 to 2"),
        (csr, ([0, -3, 2], [0, 1]), "indptr must ascend, at node 0 .* to -3"),
        (csr, ([0, 1], [0], torch.int32), "of int32 or int64 .* got torch.int32"),
        (csr, ([0, 1], [0.0], torch.float32), "int32 or int64 .* got torch.float32"),
        (csr, ([0, 1], [[0]]), r"indices must be \(n,\), .* \(1, 1\)"),
    ],
)
def test_graph_rejects_invalid_edges(call, arguments, message):
    refused(message, call, *arguments)


def test_graph_rejects_invalid_features():
    graph, ones = triangle(), torch.ones(3, 1)
    for call, arguments, message in (
        (graph.aggregate, (ones[:2],), r"must be \(3, F\).*got \(2, 1\)"),
        (graph.aggregate, (ones.long(),), r"floating point, got torch.int64"),
        (graph.aggregate, (ones, "max"), "unknown reduce 'max'; choose from sum, mean"),
        (graph.set_constant, (ones.requires_grad_(),), "cannot require a gradient"),
    ):
        refused(message, call, *arguments)


# --- constant features ----------------------------------------------------------------------------


def test_graph_caches_sums_of_constant_features():
    graph, x = triangle(), torch.rand(3, 2)
    graph.set_constant(x)
    calls = []

    def compute(key):
        return graph.keep(x, key, lambda: calls.append(key) or graph.aggregate(x))

    assert torch.equal(compute("a"), compute("a"))
    compute("b")
    assert calls == ["a", "b"]
    graph.keep(
        x.clone(), "a", lambda: calls.append("other") or x
    )  # equal, but not the same tensor
    assert calls == ["a", "b", "other"]
    x.add_(1)  # changed in place: nothing kept is valid
    assert torch.equal(compute("a"), graph.aggregate(x))
    with torch.inference_mode():
        kept = graph.keep(x, "c", lambda: graph.aggregate(x))
    assert not kept.is_inference()  # training may use what evaluation computed


# --- sampling -------------------------------------------------------------------------------------


def names_of(nodes, block, level):
    """Return the edges of a block in node numbers of the graph, given its destinations."""
    destination = torch.repeat_interleave(
        torch.arange(block.num_dst), block.indptr.diff().long()
    )
    return list(
        zip(
            nodes[block.indices.long()].tolist(),
            level[destination].tolist(),
            strict=True,
        )
    )


def test_sample_blocks_returns_distinct_graph_edges():
    source, destination = random_edges(40, 400)
    unique = torch.unique(torch.stack([source, destination]), dim=1)
    graph = Graph.from_edges(*unique, 40)
    edges = set(map(tuple, unique.T.tolist()))
    seeds = torch.tensor([5, 0, 17])
    nodes, blocks = sample_blocks(
        graph, seeds, [3, 4], torch.Generator().manual_seed(0)
    )
    assert [b.num_dst for b in blocks] == [blocks[1].num_src, 3]
    assert len(nodes) == blocks[0].num_src == len(set(nodes.tolist()))
    assert nodes[:3].tolist() == seeds.tolist()
    level = nodes[: blocks[0].num_dst]
    for block, sources, destinations, fanout in (
        (blocks[0], nodes, level, 3),
        (blocks[1], level, seeds, 4),
    ):
        found = names_of(sources, block, destinations)
        assert set(found) <= edges
        assert len(set(found)) == len(found)
        assert block.in_degrees.tolist() == [
            min(fanout, int(graph.in_degrees[n])) for n in destinations
        ]


def test_sample_blocks_without_fanout_takes_all():
    graph = Graph.from_edges(*random_edges(), 30)
    nodes, (block,) = sample_blocks(graph, torch.arange(30), [None], torch.Generator())
    x = torch.randn(30, 4)
    torch.testing.assert_close(block.aggregate(x[nodes]), graph.aggregate(x))


def test_sample_blocks_skips_repeated_validation():
    """Validate a graph once, since every check makes the CPU wait for the GPU."""
    with OpRecorder() as ran:
        graph = Graph.from_edges(*random_edges(), 30)
    assert ran.count("_local_scalar_dense")
    with OpRecorder() as ran:
        _, blocks = sample_blocks(
            graph, torch.arange(20), [5, None], torch.Generator().manual_seed(0)
        )
        copies = [copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))]
        blocks += [graph.to("meta"), *copies]
    assert not ran.count("_local_scalar_dense")
    for block in blocks:
        assert (block.num_dst, block.num_edges) == (
            len(block.indptr) - 1,
            len(block.indices),
        )
    x = torch.randn(30, 2)
    assert all(torch.equal(other.aggregate(x), graph.aggregate(x)) for other in copies)


def test_sample_blocks_is_uniform_like_dgl():
    """Sample 4 of 12 leaves of 4,000 stars as uniformly as DGL does, singly and in pairs."""
    n = 4000
    stars, leaves = torch.arange(n), torch.arange(n, n + 12)
    edges = leaves.repeat(n), stars.repeat_interleave(12)
    graph = Graph.from_edges(*edges, n + 12)
    nodes, (block,) = sample_blocks(graph, stars, [4], torch.Generator().manual_seed(0))
    dgl.seed(0)
    others, _, (theirs,) = dgl.dataloading.NeighborSampler([4]).sample_blocks(
        dgl.graph(edges), stars
    )
    source, destination = theirs.edges()
    for leaf, star in (
        torch.tensor(names_of(nodes, block, stars)).T,
        (others[source], destination),
    ):
        taken = torch.zeros(n, 12).index_put_(
            (star, leaf - n), torch.ones(()), accumulate=True
        )
        assert taken.max() == 1
        assert taken.sum(1).eq(4).all()
        # standard deviation of a leaf's count: sqrt(n / 3 * 2 / 3) = 30; of a pair's: sqrt(n / 11 * 10 / 11) = 18
        assert (taken.sum(0) - n / 3).abs().max() < 5 * 30
        assert abs(taken[:, 0] @ taken[:, 11] - n / 11) < 5 * 18
