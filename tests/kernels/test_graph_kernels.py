"""Fused operators of graph convolutions against chains of plain operations, bit for bit."""

import pytest
import torch
from helpers import identical, normal
from kernels.test_backends import layouts, numbers

from cpt_extras.int8 import graph_layers as graph_on_codes
from cpt_extras.kernels import graph, operators

LAYOUTS = {name: x for name, x in (layouts(5) | numbers(5)).items() if x.dim() == 2} | {
    "large": normal(400, 900),
    "odd": normal(37, 13),
    "one column": normal(50, 1),
    "one row": normal(1, 50),
}
GRIDS = ("per_row", "per_tensor", "per_position", "per_channel", "per_row|e4m3")
pytestmark = pytest.mark.usefixtures("cpp_kernels")


def same_with_strides(found, expected):
    return identical(found, expected) and all(
        a.stride() == b.stride() for a, b in zip(found, expected, strict=True)
    )


def plain(name, x, scale, bias, levels, key, granularity="per_row"):
    """Compute a fused operator by roundings and plain torch operations."""
    quantize = torch.ops.cpt_reference.fake_quantize
    if name == "round_scale_round":
        once = quantize(x, levels, "per_position", key)[0]
        scaled = once if scale is None else once * scale
        twice = quantize(
            scaled, levels, "per_position", None if key is None else key + 1
        )[0]
        return twice, once.sum(0)
    y = quantize(x if scale is None else x * scale, levels, granularity, None)[0]
    return [y + bias if name == "scale_round_add" else y]


def arguments(name, scale, bias, levels, key, granularity="per_row"):
    own = {
        "scale_round": (scale, levels, granularity),
        "scale_round_add": (scale, bias, levels, granularity),
    }
    return own.get(name, (scale, levels, key))


def call(ops, name, x, *given):
    args = arguments(name, *given)
    found = getattr(ops, name)(x, *args)
    return found if name == "round_scale_round" else [found]


def cases(x):
    scale, bias = normal(len(x), 1).abs().to(x), normal(x.shape[1]).to(x)
    for name in graph.GRAPH_OPERATORS:
        for s in (scale, *[None] * (name != "scale_round")):
            for levels in map(torch.tensor, (1.0, 15.0, 65535.0)):
                if name == "round_scale_round":
                    yield from (
                        (name, x, s, bias, levels, key)
                        for key in (None, torch.tensor(-7))
                    )
                else:
                    yield from ((name, x, s, bias, levels, None, g) for g in GRIDS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_graph_operators_match_plain_chain(layout):
    for case in cases(LAYOUTS[layout]):
        expected = plain(*case)
        for family in operators.FAMILIES:
            assert same_with_strides(
                call(getattr(torch.ops, family), *case), expected
            ), case[0]


def test_fused_graph_operators_ignore_thread_count(threaded):
    x = normal(200, 500)
    expected = [plain(*case) for case in cases(x)]
    threaded(3)
    assert all(
        same_with_strides(call(torch.ops.cpt, *case), e)
        for case, e in zip(cases(x), expected, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "scaled"),
    [
        (name, s)
        for name in graph.GRAPH_OPERATORS
        for s in (True, False)
        if s or name != "scale_round"
    ],
)
def test_fused_graph_operators_pass_gradients_unchanged(name, scaled):
    x, bias = normal(6, 5).requires_grad_(), normal(5).requires_grad_()
    scale = normal(6, 1).abs() if scaled else None
    y = call(torch.ops.cpt, name, x, scale, bias, torch.tensor(3.0), torch.tensor(1))
    expected = x if scale is None else x * scale
    expected = {"scale_round": [expected], "scale_round_add": [expected + bias]}.get(
        name, [expected, x.sum(0)]
    )
    wanted = [x, bias] if name == "scale_round_add" else [x]
    upstream = [normal(*e.shape) for e in expected]
    torch.testing.assert_close(
        *(torch.autograd.grad(v, wanted, upstream) for v in (y, expected))
    )


# --- on codes ----------------------------------------------------------------------------------------


def edges(kind, sources, rows, count):
    drawn = torch.Generator().manual_seed(count)
    destination = torch.randint(rows, (count,), generator=drawn).div(
        2, rounding_mode="floor"
    )  # half have none
    indptr = torch.cat(
        [
            torch.zeros(1, dtype=torch.int64),
            torch.bincount(destination, minlength=rows).cumsum(0),
        ]
    )
    return indptr.to(kind), torch.randint(sources, (count,), generator=drawn).to(kind)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "sizes", [(50, 40, 300, 6), (3, 9, 2, 1), (7, 5, 0, 4), (300, 200, 5000, 130)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_sum_neighbours_of_int8_is_exact(kind, sizes, transposed, monkeypatch):
    monkeypatch.setattr(graph_on_codes, "MAX_GATHERED_NUMBERS", 64)
    sources, rows, count, features = sizes
    indptr, indices = edges(kind, sources, rows, count)
    codes = torch.randint(-128, 128, (features, sources), dtype=torch.int8).t()
    codes = codes if transposed else codes.contiguous()
    numbers = (
        torch.tensor(-128.0),
        torch.tensor(1.0),
        torch.tensor(0.0),
    )  # then the sums are whole numbers
    found = torch.ops.cpt.sum_neighbours(codes, *numbers, indptr, indices)
    dense = torch.zeros(rows, sources, dtype=torch.int64)
    nodes = torch.arange(rows).repeat_interleave(indptr.diff().long())
    dense.index_put_(
        (nodes, indices.long()), torch.ones(count, dtype=torch.int64), accumulate=True
    )
    assert torch.equal(found, (dense @ (codes.long() + 128)).float())
    for numbers in ((17.0, 0.3, 0.1), (0.0, 2.0, -1.0)):
        given = (codes, *map(torch.tensor, numbers), indptr, indices)
        assert identical(
            [torch.ops.cpt.sum_neighbours(*given)],
            [torch.ops.cpt_reference.sum_neighbours(*given)],
        )


def test_sum_neighbours_rejects_wrong_types():
    numbers, (indptr, indices) = (torch.tensor(1.0),) * 3, edges(torch.int32, 5, 4, 9)
    with pytest.raises(RuntimeError, match="codes must be int8"):
        torch.ops.cpt.sum_neighbours(torch.ones(5, 3), *numbers, indptr, indices)
    with pytest.raises(RuntimeError, match="edges must be int32 or int64"):
        torch.ops.cpt.sum_neighbours(
            torch.ones(5, 3, dtype=torch.int8), *numbers, indptr, indices.long()
        )
