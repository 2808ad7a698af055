"""Graph convolutions in few passes over the nodes: what is fused, kept or compiled changes no bit."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_core.formats.quantizer import Quantizer
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, Precision, SAGEConv
from cpt_core.inspecting.check import check
from cpt_core.models.gnn import GraphNet
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.graph_layers import GraphPrecision
from cpt_core.quantization.scheduler import precision

SOURCES, NODES = 50, 40
FP, Q = QuantConfig(), QuantConfig(aggregation="quantized")
NEAREST = Q.with_gradient_rounding("nearest")


def edges(nodes=SOURCES):
    source, destination = (torch.randint(n, (300,), generator=torch.Generator().manual_seed(n)) for n in (nodes, NODES))
    return source, destination


def graph(backend="auto"):
    return Graph.from_edges(*edges(NODES), NODES, backend)


def block(backend="auto"):
    """A graph with more sources than destinations."""
    source, destination = edges()
    order = destination.argsort(stable=True)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(destination, minlength=NODES).cumsum(0)])
    return Graph(indptr, source[order], SOURCES, backend)


def features(count, width=6):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def step(model, g, x, bits=3, q_grad=5):
    """Outputs and gradients of two training steps, an evaluation, and where the noise has got to."""
    found = []
    with precision(model, bits, q_grad=q_grad):
        for _ in range(2):
            x = x.detach().requires_grad_()
            y = model(g, x)
            wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
            found += [y, *torch.autograd.grad((y * y.detach().cos()).sum(), wanted, allow_unused=True)]
        with torch.no_grad():
            found.append(model.eval()(g, x))
    return found, [m.noise_key.item() for m in model.modules() if isinstance(m, GraphPrecision)]


def frozen(layer, name):
    getattr(layer, name).requires_grad_(False)
    return layer


def own(**quantizers):
    return replace(Q, quantizers={**Q.quantizers, **quantizers})


CASES = {
    "FP-Agg": (lambda: GraphConv(6, 9), graph, FP, {}),
    "Q-Agg": (lambda: GraphConv(6, 9), graph, Q, {}),
    "FP-Agg, product first": (lambda: GraphConv(6, 4), graph, FP, {}),
    "Q-Agg, product first": (lambda: GraphConv(6, 4), graph, Q, {}),
    "Q-Agg, block": (lambda: GraphConv(6, 9), block, Q, {}),
    "Q-Agg, product first, block": (lambda: GraphConv(6, 4), block, Q, {}),
    "CSR": (lambda: GraphConv(6, 9), lambda: graph("csr"), Q, {}),
    "left": (lambda: GraphConv(6, 9, norm="left"), graph, Q, {}),
    "right": (lambda: GraphConv(6, 9, norm="right"), graph, Q, {}),
    "no norm": (lambda: GraphConv(6, 9, norm="none"), graph, Q, {}),
    "no bias": (lambda: GraphConv(6, 9, bias=False), graph, Q, {}),
    "gradients to the nearest": (lambda: GraphConv(6, 9), graph, NEAREST, {}),
    "gradients in float32": (lambda: GraphConv(6, 9), graph, Q, {"q_grad": "float"}),
    "operands in float32": (lambda: GraphConv(6, 9), graph, Q, {"bits": 32}),
    "ranges per tensor": (
        lambda: GraphConv(6, 9), graph, own(graph_input=Quantizer("per_tensor", running=True)), {},
    ),
    "shared steps": (lambda: GraphConv(6, 9), graph, Q.with_shared_steps(), {}),
    "gradient ranges per row": (
        lambda: GraphConv(6, 9), graph, own(graph_grad=Quantizer("per_row", rounding="stochastic")), {},
    ),
    "float64": (lambda: GraphConv(6, 9).double(), graph, Q, {}),
    "bfloat16": (lambda: GraphConv(6, 9).bfloat16(), graph, Q, {}),
    "frozen weight": (lambda: frozen(GraphConv(6, 9), "weight"), graph, Q, {}),
    "frozen bias": (lambda: frozen(GraphConv(6, 9), "bias"), graph, Q, {}),
    "SAGE": (lambda: SAGEConv(6, 9), graph, Q, {}),
    "SAGE, product first": (lambda: SAGEConv(6, 4), block, Q, {}),
    "three layers": (lambda: GraphNet("gcn", 6, 4, hidden=8, dropout=0.0), graph, Q, {}),
    "no nodes": (lambda: GraphConv(6, 9), lambda: Graph(torch.zeros(1, dtype=torch.int64), edges()[0][:0]), Q, {}),
}  # fmt: skip


@pytest.fixture
def plain(monkeypatch):
    """Call to take the plain chains from then on."""

    def take():
        monkeypatch.setattr(GraphPrecision, "scaled_operand", Precision.scaled_operand)
        monkeypatch.setattr(GraphPrecision, "scaled_and_biased", Precision.scaled_and_biased)

    return take


@pytest.mark.parametrize("case", CASES)
def test_one_pass_over_the_rows_changes_no_bit(case, plain):
    make, graph_of, config, bits = CASES[case]
    torch.manual_seed(0)
    model, g = quantize_(make(), config), graph_of()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    other, x = copy.deepcopy(model), features(g.num_src).to(next(model.parameters()).dtype)
    found, key = step(model, g, x, **bits)
    plain()
    expected, expected_key = step(other, g, x, **bits)
    assert key == expected_key
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


class Operations(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("sizes", "config", "expected"),
    [
        ((6, 9), FP, {"scale_round": 0, "scale_round_add": 1, "round_scale_round": 1}),
        ((6, 9), Q, {"scale_round": 1, "scale_round_add": 1, "round_scale_round": 1}),
        ((6, 4), FP, {"scale_round": 1, "scale_round_add": 1, "round_scale_round": 0}),  # the sum between is float32
        ((6, 4), Q, {"scale_round": 1, "scale_round_add": 1, "round_scale_round": 1}),
    ],
)
def test_what_stands_side_by_side_is_one_pass(sizes, config, expected):
    model, x = quantize_(GraphConv(*sizes), config), features(NODES).requires_grad_()
    with precision(model, 3, q_grad=5), Operations() as ran:
        model(graph(), x).square().sum().backward()
    assert {name: ran.names.count(name) for name in expected} == expected


@pytest.mark.parametrize("config", [FP, Q], ids=["FP-Agg", "Q-Agg"])
@pytest.mark.parametrize("backend", ["dgl", "csr"])
def test_what_is_rounded_in_passing_is_seen(backend, config):
    found = check(quantize_(GraphNet("gcn", 6, 4, hidden=8), config), (graph(backend), features(NODES)))
    assert found.ok, str(found)
    assert all(p.quantized for p in found.products), str(found)
    assert {p.layer for p in found.products if p.backward} == {"convs.0", "convs.1", "convs.2"}


# --- kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FP, Q], ids=["FP-Agg", "Q-Agg"])
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_training_and_evaluation_share_what_is_kept(monkeypatch, config, first):
    g, x, calls = graph(), features(NODES), []
    model, original = quantize_(GraphNet("gcn", 6, 4, hidden=8, dropout=0.0), config), Graph.aggregate
    monkeypatch.setattr(Graph, "aggregate", lambda self, h, r="sum": calls.append(h.shape[1]) or original(self, h, r))
    expected = {}
    for constant in (None, x):
        g.set_constant(constant)
        calls.clear()
        for evaluates in (first == "evaluation", first == "training"):
            for bits in (3, 5, 3):
                with precision(model.train(not evaluates), bits, q_grad=8), torch.inference_mode(evaluates):
                    y = model(g, x)
                assert torch.equal(y, expected.setdefault((evaluates, bits), y))
                if not evaluates:
                    y.sum().backward()
    assert calls.count(6) == (1 if config is FP else 2)


def test_a_sum_behind_its_product_is_not_kept():
    g, x = graph(), features(NODES)
    g.set_constant(x)
    model = quantize_(GraphConv(6, 4), Q)
    with precision(model, 3, q_grad=5):
        before = model(g, x).detach()
        nn.init.constant_(model.weight, 1.0)
        assert not torch.equal(model(g, x), before)
