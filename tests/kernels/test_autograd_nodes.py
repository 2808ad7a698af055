"""Rounding under compilers: one node per rounding, fused by Inductor, with equal bits."""

import pytest
import torch
from helpers import INF, NAN, normal
from torch._inductor import utils as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cpt_extras.int8.graph_layers
import cpt_extras.kernels.graph  # noqa: F401 - these two bring operators
from cpt_extras.kernels import operators
from cpt_extras.kernels.backend import backend


def rounded(x, levels, key):
    """Round to nearest, then with noise."""
    once = operators.fake_quantize(x * 2, levels, "per_tensor", None)[0].relu()
    return operators.fake_quantize(once * 0.3, levels, "per_tensor", key)[0].relu()


def arguments():
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return x, torch.tensor(7.0), torch.tensor(3)


def nodes(graph):
    named = [str(node.target).replace("cpt_reference", "cpt") for node in graph.nodes]
    return [name for name in named if "cpt" in name]


def test_rounding_is_one_node_for_compilers():
    seen = []

    def backend(graph, inputs):
        seen.append(nodes(graph.graph))
        return graph

    args = arguments()
    assert torch.equal(
        torch.compile(rounded, backend=backend, fullgraph=True)(*args), rounded(*args)
    )
    assert seen == [["cpt.fake_quantize"] * 2]
    traced = make_fx(rounded)(*args)
    assert nodes(traced.graph) == ["cpt.fake_quantize.default"] * 2
    assert torch.equal(traced(*args), rounded(*args))


@pytest.mark.slow
def test_inductor_fuses_rounding_bit_exactly(cpp_kernels):
    compiled, results = torch.compile(rounded, fullgraph=True), []
    torch._dynamo.reset()
    with (
        inductor.fresh_inductor_cache()
    ):  # what was compiled of other versions of the operator counts for nothing
        y, codes = inductor.run_and_get_code(compiled, *arguments())
    assert torch.equal(y, rounded(*arguments()))
    assert codes
    assert not any("cpt" in code for code in codes)
    for call in (compiled, rounded):
        x, *rest = arguments()
        call(x, *rest).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


@pytest.mark.slow
def test_compiled_format_rounding_matches_eager(cpp_kernels):
    """Compare several compiled roundings in few compilations, each of which takes seconds."""
    torch._dynamo.reset()

    def one(x, key):
        return (torch.ops.cpt.fake_quantize(x, LEVELS, "per_row|e4m3", None)[0],)

    def others(x, key):
        a = torch.ops.cpt.fake_quantize(x, LEVELS, "per_tensor|mxfp4", key)[0]
        return a, torch.ops.cpt.round_in_range(
            x, x[2, 0], x[2, 1], LEVELS, "unscaled|e5m2", None, True
        )

    key = torch.tensor(11)
    for step, compiler in ((one, "inductor"), (others, "aot_eager_decomp_partition")):
        x = normal(9, 32)
        x[0, 3], x[1, 2] = INF, NAN
        x.requires_grad_()
        compiled = torch.compile(step, fullgraph=True, backend=compiler)(x, key)
        torch.testing.assert_close(
            compiled, step(x, key), rtol=1e-6, atol=0, equal_nan=True
        )
        compiled[0].sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize(
    "granularity", ["per_tensor", "per_channel", "per_row", "per_position"]
)
def test_fake_quantize_has_fake_tensor_shapes(granularity):
    backend()
    for shape in ((5,), (4, 5), (2, 3, 4), (2, 3, 4, 5)):
        real = operators.fake_quantize(
            torch.randn(shape), torch.tensor(3.0), granularity
        )
        with FakeTensorMode():
            fake = operators.fake_quantize(
                torch.randn(shape), torch.tensor(3.0), granularity
            )
        assert [(t.shape, t.dtype, t.stride()) for t in fake[:1]] == [
            (t.shape, t.dtype, t.stride()) for t in real[:1]
        ]
        assert [t.shape for t in fake] == [t.shape for t in real]


X, KEY, LEVELS = torch.randn(4, 5), torch.tensor(3), torch.tensor(3.0)
LEAF, ONE, BYTES = (
    X.clone().requires_grad_(),
    torch.tensor(1.0),
    torch.ones(5, 3, dtype=torch.int8),
)
EDGES = torch.tensor([0, 1, 3, 3, 4]), torch.tensor([2, 0, 4, 1])
ROWS = X.amin(1, True), X.amax(1, True) - X.amin(1, True)
WITH_GRADIENT = {
    "range": (X, "per_row"),
    "round_to_grid": (LEAF, *ROWS, LEVELS, None, True),
    "fake_quantize": (LEAF, LEVELS, "per_channel", KEY),
    "track_": (torch.zeros(3), ONE, ONE),
    "scale_round": (LEAF, ROWS[1], LEVELS, "per_row"),
    "scale_round_add": (
        LEAF,
        ROWS[1],
        torch.ones(5, requires_grad=True),
        LEVELS,
        "per_row",
    ),
    "round_scale_round": (LEAF, None, LEVELS, None),
}
ON_CODES = {
    "encode": (
        torch.randn(2, 3, 4, 5),
        torch.tensor(-1.0),
        torch.tensor(2.0),
        torch.tensor(7.0),
        None,
        True,
        True,
    ),
    "sum_neighbours": (BYTES, ONE, ONE, ONE, *EDGES),
}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # opcheck reads it
@pytest.mark.parametrize("family", operators.FAMILIES)
@pytest.mark.parametrize("name", [*WITH_GRADIENT, *ON_CODES])
def test_operators_pass_torch_opcheck(family, name):
    ops, rules = (
        getattr(torch.ops, family),
        {"test_utils": ("test_schema", "test_faketensor")},
    )
    if name in WITH_GRADIENT:
        torch.library.opcheck(getattr(ops, name).default, WITH_GRADIENT[name])
    else:
        torch.library.opcheck(getattr(ops, name).default, ON_CODES[name], **rules)
