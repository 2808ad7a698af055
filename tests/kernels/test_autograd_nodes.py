"""Operators under compilers: one node per rounding, fused by Inductor, with equal bits."""

import pytest
import torch
from helpers import INF, NAN, normal
from torch._inductor import utils as inductor
from torch.fx.experimental.proxy_tensor import make_fx

import cpt_extras.int8.graph_layers
import cpt_extras.kernels.graph  # noqa: F401 - these two bring operators
from cpt_extras.kernels import operators

STEPS, KEY = torch.tensor(7.0), torch.tensor(3)


def round_twice(x, key):
    """Round to nearest, then with noise."""
    once = operators.fake_quantize(x * 2, STEPS, "per_tensor", None)[0].relu()
    return operators.fake_quantize(once * 0.3, STEPS, "per_tensor", key)[0].relu()


def round_to_e4m3(x):
    return torch.ops.cpt.fake_quantize(x, STEPS, "per_row|e4m3", None)[0]


def round_to_formats(x, key):
    blocks = torch.ops.cpt.fake_quantize(x, STEPS, "per_tensor|mxfp4", key)[0]
    stored = x[2, 0], x[2, 1], STEPS, "unscaled|e5m2", None, True
    return round_to_e4m3(x), blocks, torch.ops.cpt.round_in_range(x, *stored)


def leaf(*shape):
    return normal(*shape).requires_grad_()


def names_of_nodes(graph):
    names = [str(node.target).replace("cpt_reference", "cpt") for node in graph.nodes]
    return [name for name in names if "cpt" in name]


def test_rounding_is_one_node_for_compilers():
    graphs, x = [], leaf(16, 40)

    def backend(graph, inputs):
        graphs.append(graph.graph)
        return graph

    expected = round_twice(x, KEY)
    compiled = torch.compile(round_twice, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x, KEY), expected)
    assert list(map(names_of_nodes, graphs)) == [["cpt.fake_quantize"] * 2]
    traced = make_fx(round_twice)(x, KEY)
    assert names_of_nodes(traced.graph) == ["cpt.fake_quantize.default"] * 2
    assert torch.equal(traced(x, KEY), expected)


@pytest.mark.slow
def test_inductor_fuses_rounding_bit_exactly(cpp_kernels):
    def round_all(x, key):
        return round_twice(x, key), round_to_e4m3(x)

    torch._dynamo.reset()
    compiled, x, y = (
        torch.compile(round_all, fullgraph=True),
        leaf(16, 40),
        leaf(16, 40),
    )
    with inductor.fresh_inductor_cache():  # which may hold former versions
        (affine, in_format), codes = inductor.run_and_get_code(compiled, x, KEY)
    expected, expected_in_format = round_all(y, KEY)
    assert torch.equal(affine, expected)
    torch.testing.assert_close(in_format, expected_in_format, rtol=1e-6, atol=0)
    assert codes
    assert not any("cpt" in code for code in codes)
    affine.sum().backward()
    expected.sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.slow
def test_compiled_format_rounding_matches_eager(cpp_kernels):
    x, key = normal(9, 32), torch.tensor(11)
    x[0, 3], x[1, 2] = INF, NAN
    x.requires_grad_()
    torch._dynamo.reset()
    compiler = "aot_eager_decomp_partition"
    compiled = torch.compile(round_to_formats, fullgraph=True, backend=compiler)
    found, expected = compiled(x, key), round_to_formats(x, key)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
    found[0].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


X, ONE = normal(4, 5), torch.tensor(1.0)
WIDTH = X.amax(1, True) - X.amin(1, True)
EDGES = torch.tensor([0, 1, 3, 3, 4]), torch.tensor([2, 0, 4, 1])
INT8 = torch.ones(5, 3, dtype=torch.int8)
OPERATORS = {
    "range": (X, "per_row"),
    "round_to_grid": (leaf(4, 5), X.amin(1, True), WIDTH, STEPS, None, True),
    "fake_quantize": (leaf(4, 5), STEPS, "per_channel", KEY),
    "track_": (torch.zeros(3), ONE, ONE),
    "scale_round": (leaf(4, 5), WIDTH, STEPS, "per_row"),
    "scale_round_add": (leaf(4, 5), WIDTH, leaf(5), STEPS, "per_row"),
    "round_scale_round": (leaf(4, 5), None, STEPS, None),
    "encode": (normal(2, 3, 4, 5), -ONE, ONE * 2, STEPS, None, True, True),
    "sum_neighbours": (INT8, ONE, ONE, ONE, *EDGES),
}
INT8_OPERATORS = "encode", "sum_neighbours"  # without gradients


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("family", operators.FAMILIES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_pass_torch_opcheck(family, name):
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    options = checks if name in INT8_OPERATORS else {}
    operator = getattr(getattr(torch.ops, family), name).default
    torch.library.opcheck(operator, OPERATORS[name], **options)
