"""Fused operators of graph convolutions against chains of plain operations, bit for bit."""

import pytest
import torch
from helpers import identical, normal
from kernels.samples import samples

from cpt_extras.int8 import graph_layers as int8_graph_layers
from cpt_extras.kernels import graph, operators

MATRICES = {name: x for name, x in samples(5).items() if x.dim() == 2} | {
    "large": normal(400, 900),
    "odd": normal(37, 13),
    "one column": normal(50, 1),
    "one row": normal(1, 50),
}
GRIDS = "per_row", "per_tensor", "per_position", "per_channel", "per_row|e4m3"
pytestmark = pytest.mark.usefixtures("cpp_kernels")


def operator_calls(x):
    """Yield (name of an operator, its arguments, expected results) for a matrix."""
    quantize = torch.ops.cpt_reference.fake_quantize
    factors, bias = normal(len(x), 1).abs().to(x), normal(x.shape[1]).to(x)
    for steps in map(torch.tensor, (1.0, 15.0, 65535.0)):
        for scale in (factors, None):
            scaled = x if scale is None else x * scale
            for grid in GRIDS:
                y = quantize(scaled, steps, grid, None)[0]
                if scale is not None:
                    yield "scale_round", (x, scale, steps, grid), [y]
                yield "scale_round_add", (x, scale, bias, steps, grid), [y + bias]
            for key in (None, torch.tensor(-7)):
                once = quantize(x, steps, "per_position", key)[0]
                scaled_once = once if scale is None else once * scale
                next_key = None if key is None else key + 1
                twice = quantize(scaled_once, steps, "per_position", next_key)[0]
                arguments = x, scale, steps, key
                yield "round_scale_round", arguments, [twice, once.sum(0)]


def check_operators(x, family):
    for name, arguments, expected in operator_calls(x):
        found = getattr(getattr(torch.ops, family), name)(*arguments)
        found = [found] if isinstance(found, torch.Tensor) else found
        assert identical(found, expected), name
        assert [t.stride() for t in found] == [t.stride() for t in expected], name


@pytest.mark.parametrize("family", operators.FAMILIES)
@pytest.mark.parametrize("name", MATRICES)
def test_fused_graph_operators_match_plain_chain(name, family):
    check_operators(MATRICES[name], family)


@pytest.mark.slow
def test_fused_graph_operators_ignore_thread_count(threaded):
    threaded(3)
    check_operators(normal(200, 500), "cpt")


@pytest.mark.parametrize("name", graph.GRAPH_OPERATORS)
def test_fused_graph_operators_pass_gradients_unchanged(name):
    x, bias = normal(6, 5).requires_grad_(), normal(5).requires_grad_()
    steps = torch.tensor(3.0)
    for scale in (normal(6, 1).abs(), None):
        if name == "scale_round" and scale is None:
            continue
        scaled = x if scale is None else x * scale
        settings, expected = {
            "scale_round": ((scale, steps, "per_row"), [scaled]),
            "scale_round_add": ((scale, bias, steps, "per_row"), [scaled + bias]),
            "round_scale_round": ((scale, steps, torch.tensor(1)), [scaled, x.sum(0)]),
        }[name]
        found = getattr(torch.ops.cpt, name)(x, *settings)
        found = [found] if isinstance(found, torch.Tensor) else found
        leaves = [x, bias] if name == "scale_round_add" else [x]
        upstream = [normal(*y.shape) for y in expected]
        gradients = torch.autograd.grad(found, leaves, upstream)
        plain_gradients = torch.autograd.grad(expected, leaves, upstream)
        torch.testing.assert_close(gradients, plain_gradients)


# --- on int8 --------------------------------------------------------------------------------------


def random_edges(dtype, sources, rows, count):
    """Return indptr and indices of random edges; half of the rows have none."""
    generator = torch.Generator().manual_seed(count)
    destinations = torch.randint(rows, (count,), generator=generator) // 2
    degrees = torch.bincount(destinations, minlength=rows)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(sources, (count,), generator=generator)
    return indptr.to(dtype), indices.to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("sources", "rows", "count", "features"),
    [(50, 40, 300, 6), (3, 9, 2, 1), (7, 5, 0, 4), (300, 200, 5000, 130)],
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_sum_neighbours_of_int8_is_exact(
    dtype, sources, rows, count, features, is_transposed, monkeypatch
):
    monkeypatch.setattr(int8_graph_layers, "MAX_GATHERED_NUMBERS", 64)
    indptr, indices = random_edges(dtype, sources, rows, count)
    codes = torch.randint(-128, 128, (features, sources), dtype=torch.int8).t()
    codes = codes if is_transposed else codes.contiguous()
    adjacency = torch.zeros(rows, sources, dtype=torch.int64)
    nodes = torch.arange(rows).repeat_interleave(indptr.diff().long())
    ones = torch.ones(count, dtype=torch.int64)
    adjacency.index_put_((nodes, indices.long()), ones, accumulate=True)
    # zero point, scale and value at the zero point; with the first ones sums are whole
    for grid in ((-128.0, 1.0, 0.0), (17.0, 0.3, 0.1), (0.0, 2.0, -1.0)):
        arguments = codes, *map(torch.tensor, grid), indptr, indices
        found = torch.ops.cpt.sum_neighbours(*arguments)
        expected = torch.ops.cpt_reference.sum_neighbours(*arguments)
        assert identical([found], [expected])
        if grid[0] == -128:
            assert torch.equal(found, (adjacency @ (codes.long() + 128)).float())


def test_sum_neighbours_rejects_wrong_types():
    grid, (indptr, indices) = (
        [torch.tensor(1.0)] * 3,
        random_edges(torch.int32, 5, 4, 9),
    )
    codes, sum_neighbours = torch.ones(5, 3), torch.ops.cpt.sum_neighbours
    with pytest.raises(RuntimeError, match="codes must be int8"):
        sum_neighbours(codes, *grid, indptr, indices)
    with pytest.raises(RuntimeError, match="edges must be int32 or int64"):
        sum_neighbours(codes.to(torch.int8), *grid, indptr, indices.long())
