"""torch.compile: one graph serves a whole cycle of bits, and it computes what eager code does."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import WITH_CUDA, pictures
from torch import nn
from torch.utils._pytree import tree_leaves

from cpt_core.graphs.graph import Graph
from cpt_core.models.gnn import GraphNet
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule

STEPS, NODES = 12, 40
NEAREST = QuantConfig().with_gradient_rounding("nearest")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.conv2(self.relu(self.bn(self.conv1(x))))


class OnGraph(nn.Module):
    """A graph network on its graph; ``constant``: eager code keeps the sum over the features."""

    def __init__(self, kind, backend, constant):
        super().__init__()
        source, destination = torch.randint(0, NODES, (2, 300), generator=torch.Generator().manual_seed(0))
        self.net = GraphNet(kind, 6, 4, hidden=8, layers=2, dropout=0.0)
        self.graph, self.constant = Graph.from_edges(source, destination, NODES, backend), constant

    def forward(self, x):
        return self.net(self.graph, x)


def nodes():
    return torch.randn(NODES, 6, generator=torch.Generator().manual_seed(1))


CASES = {
    "convolutions": (Block, pictures),
    "lstm": (lambda: nn.LSTM(5, 4, bidirectional=True, bias=False), lambda: torch.randn(6, 3, 5)),
    "gcn": (lambda: OnGraph("gcn", "auto", True), nodes),
    "sage": (lambda: OnGraph("sage", "csr", False), nodes),
}


@pytest.fixture
def counter():
    from torch._dynamo import config, reset
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    reset()
    with config.patch(allow_rnn=True):  # else it takes any ``nn.LSTM`` for one that it cannot trace
        yield CompileCounterWithBackend("aot_eager")
    reset()


def step(model, call, x):
    """Return outputs and gradients, and what training leaves in the layers."""
    model.zero_grad()
    outputs = tree_leaves(call(x))
    sum(y.square().sum() for y in outputs).backward()
    left = [value for layer in layer_precisions(model).values() for value in layer.get_running().values()]
    return [*(y.detach() for y in outputs), *(p.grad for p in model.parameters()), *left]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "device"), [*((k, "cpu") for k in CASES), pytest.param("convolutions", "cuda", marks=WITH_CUDA)]
)
def test_one_compiled_graph_serves_a_whole_cycle(kind, device, counter):
    torch.manual_seed(0)
    make, inputs = CASES[kind]
    config = replace(NEAREST, aggregation="quantized" if kind == "gcn" else "fp")
    eager, x = quantize_(make(), config).to(device), inputs().to(device)
    model = copy.deepcopy(eager)
    if getattr(model, "constant", False):
        model.graph.set_constant(x)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    schedule = make_schedule("LR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=1)
    assert set(schedule.bits().tolist()) == {3, 4, 5, 6, 7, 8}
    schedulers = [PrecisionScheduler(m, schedule) for m in (eager, model)]
    counts = []
    for _ in range(STEPS):
        for found, expected in zip(step(model, compiled, x), step(eager, eager, x), strict=True):
            torch.testing.assert_close(found, expected)
        for scheduler in schedulers:
            scheduler.step()
        counts.append(counter.frame_count)
    assert counts == [1] + [2 if kind in ("gcn", "sage") else 1] * (
        STEPS - 1
    )  # a graph's degrees are found in the first
    parts = [part for graph in counter.graphs for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    recurrences = [n for part in parts for n in part.graph.nodes if "lstm_forward" in str(n.target)]
    assert len(recurrences) == (2 if kind == "lstm" else 0)  # a layer in one direction is one node
    again = PrecisionScheduler(compiled, schedule)  # its layers have other names
    again.load_state_dict(schedulers[0].state_dict())
    assert again.last_step == STEPS
    with precision(model.eval(), "q_max"), precision(eager.eval(), "q_max"), torch.no_grad():
        for found, expected in zip(tree_leaves(compiled(x)), tree_leaves(eager(x)), strict=True):
            torch.testing.assert_close(found, expected)


def test_a_compiled_graph_serves_levels_that_other_models_have_had_before(counter):
    torch.manual_seed(0)
    first = quantize_(Block(), NEAREST)
    second = copy.deepcopy(first)
    with precision(first, 5, 7):
        first(pictures(0))
    compiled = torch.compile(second, fullgraph=True, backend=counter)
    for bits in (3, 5, 7):
        with precision(second, bits, 7):
            compiled(pictures(0))
    assert counter.frame_count == 1
