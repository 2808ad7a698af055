"""A compiled model with an LSTM: one graph for all bits, the recurrence one node of it."""

import copy

import pytest
import torch
from torch import nn

from cpt_core.quantization.convert import QuantConfig, quantize_

NEAREST = QuantConfig().with_gradient_rounding("nearest")


def lstm_of(config=NEAREST, **options):
    torch.manual_seed(0)
    return quantize_(nn.LSTM(5, 4, **options), config)


@pytest.fixture
def counter():
    from torch._dynamo import config, reset
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    reset()
    with config.patch(allow_rnn=True):  # else it takes any ``nn.LSTM`` for one that it cannot trace
        yield CompileCounterWithBackend("aot_eager")
    reset()


@pytest.mark.slow
def test_one_compiled_graph_serves_all_bits(counter):
    eager = lstm_of(bidirectional=True, bias=False)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for bits in (3, 4, 5, 6, 7, 8, 3):
        x, results = torch.randn(6, 3, 5), []
        for m, call in ((eager, eager), (module, compiled)):
            m.zero_grad()
            m.precision.set_bits(bits, 8)
            y, (h, c) = call(x)
            (y.square().sum() + h.sum() - c.cos().sum()).backward()
            running = m.precision.get_running()
            results.append([y.detach(), h.detach(), c.detach(), *(p.grad for p in m.parameters()), *running.values()])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert counter.frame_count == 1
    parts = [part for graph in counter.graphs for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    nodes = [n for part in parts for n in part.graph.nodes if "lstm_forward" in str(n.target)]
    assert len(nodes) == len(module.precision.get_running()) // 2  # a layer in one direction is one node


@pytest.mark.slow
def test_compiled_gradients_draw_new_noise_for_every_step_and_call(counter):
    module = lstm_of(QuantConfig())
    compiled, x = torch.compile(module, fullgraph=True, backend=counter), torch.randn(6, 3, 5)
    module.precision.set_bits(8, 2)
    keys, draws = [], []
    for _ in range(3):
        keys.append(int(module.precision.noise_key))
        draws.append(torch.autograd.grad(compiled(x)[0].cos().sum(), module.weight_hh_l0)[0])
    assert keys == [keys[0], keys[0] + 7, keys[0] + 14]  # one for the input product, and one for each of six steps
    assert not torch.equal(draws[0], draws[1])
    with torch.no_grad():
        compiled(x)
    assert int(module.precision.noise_key) == keys[0] + 21
