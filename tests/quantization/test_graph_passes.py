"""Graph convolutions in few passes over the nodes: what is fused, kept or compiled changes no bit."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import Ran, identical
from quantization.test_graph_integer import CONFIGS, LAYERS, NODES, graph, passes, prepared
from quantization.test_integer import drawn
from torch import nn

from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, Precision
from cpt_core.inspecting.check import check
from cpt_core.models.gnn import GraphNet
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.graph_layers import GraphPrecision
from cpt_core.quantization.scheduler import precision

FP, Q = QuantConfig(), QuantConfig(aggregation="quantized")
CASES = {
    **{name: (name, Q) for name in LAYERS},
    **{name: ("GCN", replace(config, execution="simulated")) for name, config in CONFIGS.items()},
    "FP-Agg, authors' steps": ("GCN", FP),
    "FP-Agg, product first": ("GCN, product first", FP),
    "gradients to the nearest": ("GCN", Q.with_gradient_rounding("nearest")),
    **dict.fromkeys(("float64", "bfloat16", "CSR", "no nodes"), ("GCN", Q)),
}
GRAPHS = {
    "CSR": graph(backend="csr"),
    "no nodes": Graph(torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
}


def features():
    return drawn("two-sided", NODES, 6)


@pytest.fixture
def plain(monkeypatch):
    """Call to take the plain chains from then on."""

    def take():
        monkeypatch.setattr(GraphPrecision, "scaled_operand", Precision.scaled_operand)
        monkeypatch.setattr(GraphPrecision, "scaled_and_biased", Precision.scaled_and_biased)

    return take


@pytest.mark.parametrize("case", CASES)
def test_one_pass_over_the_rows_changes_no_bit(case, plain):
    name, config = CASES[case]
    layer, g, x, bits = prepared(name)
    g, x = GRAPHS.get(case, g), x[:0] if case == "no nodes" else x
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(case, torch.float32)
    model = quantize_(layer.to(dtype), config)
    other = copy.deepcopy(model)
    found, key = passes(model, g, x.to(dtype), **bits)
    plain()
    expected, expected_key = passes(other, g, x.to(dtype), **bits)
    assert key == expected_key
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


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
    model, x = quantize_(GraphConv(*sizes), config), features().requires_grad_()
    with precision(model, 3, q_grad=5), Ran() as ran:
        model(graph(), x).square().sum().backward()
    assert {name: ran.count(f"cpt::{name}") for name in expected} == expected


@pytest.mark.parametrize("config", [FP, Q], ids=["FP-Agg", "Q-Agg"])
@pytest.mark.parametrize("backend", ["dgl", "csr"])
def test_what_is_rounded_in_passing_is_seen(backend, config):
    found = check(quantize_(GraphNet("gcn", 6, 4, hidden=8), config), (graph(backend=backend), features()))
    assert found.ok, str(found)
    assert all(p.quantized for p in found.products), str(found)
    assert {p.layer for p in found.products if p.backward} == {"convs.0", "convs.1", "convs.2"}


@pytest.mark.parametrize("kind", ["gcn", "sage"])
@pytest.mark.parametrize("config", [FP, Q], ids=["FP-Agg", "Q-Agg"])
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_training_and_evaluation_share_what_is_kept_of_constant_features(monkeypatch, kind, config, first):
    g, x, calls = graph(), features(), []
    model, original = GraphNet(kind, 6, 4, hidden=8, layers=2, dropout=0.0), Graph.aggregate
    quantize_(model, config.with_gradient_rounding("nearest"))
    monkeypatch.setattr(Graph, "aggregate", lambda self, h, r="sum": calls.append(h.shape[1]) or original(self, h, r))
    expected, counts = {}, []
    for constant in (None, x):
        g.set_constant(constant)
        calls.clear()
        for evaluates in (first == "evaluation", first == "training"):
            for bits in (3, 5, 3):
                with precision(model.train(not evaluates), bits, q_grad=8), torch.inference_mode(evaluates):
                    found = [model(g, x)]
                    found += [] if evaluates else torch.autograd.grad(found[0].square().sum(), model.parameters())
                assert identical(found, expected.setdefault((evaluates, bits), found))
        counts.append(calls.count(6))
    assert counts == [6, 1 if config is FP else 2]  # of a constant: once, or once for every number of bits


def test_a_sum_behind_its_product_is_not_kept():
    g, x = graph(), features()
    g.set_constant(x)
    model = quantize_(GraphConv(6, 4), Q)
    with precision(model, 3, q_grad=5):
        before = model(g, x).detach()
        nn.init.constant_(model.weight, 1.0)
        assert not torch.equal(model(g, x), before)
