"""What compilers see: one node per rounding, which Inductor takes apart and fuses; the same bits come out."""

import pytest
import torch
from torch._inductor import utils as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cpt_core.kernels import operators
from cpt_core.kernels.backend import backend


def rounded(x, levels, key):
    return operators.fake_quantize(x * 2, levels, "per_tensor", key)[0].relu()


def arguments(key):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return x, torch.tensor(7.0), None if key is None else torch.tensor(key)


def nodes(graph):
    named = [str(node.target).replace("cpt_reference", "cpt") for node in graph.nodes]
    return [name for name in named if "cpt" in name]


@pytest.mark.parametrize("key", [None, 3])
def test_dynamo_and_make_fx_see_one_node(key):
    seen = []

    def backend(graph, inputs):
        seen.append(nodes(graph.graph))
        return graph

    args = arguments(key)
    assert torch.equal(torch.compile(rounded, backend=backend, fullgraph=True)(*args), rounded(*args))
    assert seen == [["cpt.fake_quantize"]]
    traced = make_fx(rounded)(*args)
    assert nodes(traced.graph) == ["cpt.fake_quantize.default"]
    assert torch.equal(traced(*args), rounded(*args))


@pytest.mark.parametrize("key", [None, 3])
def test_inductor_fuses_it_and_gives_the_same_bits(cpp_kernels, key):
    compiled, results = torch.compile(rounded, fullgraph=True), []
    torch._dynamo.reset()
    with inductor.fresh_inductor_cache():  # what was compiled of other versions of the operator counts for nothing
        y, codes = inductor.run_and_get_code(compiled, *arguments(key))
    assert torch.equal(y, rounded(*arguments(key)))
    assert codes
    assert not any("cpt" in code for code in codes)
    for call in (compiled, rounded):
        x, *rest = arguments(key)
        call(x, *rest).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "per_row", "per_position"])
def test_fake_tensors_have_the_shapes_of_real_ones(granularity):
    backend()
    for shape in ((5,), (4, 5), (2, 3, 4), (2, 3, 4, 5)):
        real = operators.fake_quantize(torch.randn(shape), torch.tensor(3.0), granularity)
        with FakeTensorMode():
            fake = operators.fake_quantize(torch.randn(shape), torch.tensor(3.0), granularity)
        assert [(t.shape, t.dtype, t.stride()) for t in fake[:1]] == [(t.shape, t.dtype, t.stride()) for t in real[:1]]
        assert [t.shape for t in fake] == [t.shape for t in real]
