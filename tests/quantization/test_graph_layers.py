"""Quantised graph convolutions beyond the reference vectors: conversion, constant features, operation counts."""

import copy
import pickle

import dgl
import dgl.nn
import numpy as np
import pytest
import torch
from helpers import FunctionModule, OpRecorder, to_dgl
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cpt_core.bitops.plan import count_bitops
from cpt_core.bitops.summary import summary
from cpt_core.graphs import layers as graph_layers
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, MatrixNorm, SAGEConv
from cpt_core.models.gnn import GraphNet
from cpt_core.quantization.convert import QuantConfig, quantize_, restore_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule
from cpt_extras.diagnostics.ledger import BitOpsLedger

NODES = 40


def graph(self_loops=True):
    source, destination = torch.randint(
        0, NODES, (2, 150), generator=torch.Generator().manual_seed(0)
    )
    if self_loops:
        source, destination = (
            torch.cat([e, torch.arange(NODES)]) for e in (source, destination)
        )
    return Graph.from_edges(source, destination, NODES)


def features(width=6):
    return torch.randn(NODES, width, generator=torch.Generator().manual_seed(1))


def forward(m, g, x):
    return m.out(m.conv2(g, m.conv1(g, x).relu()))


def their_model(conv=dgl.nn.GraphConv, *args):
    """Return a model written as users of DGL write it."""
    return FunctionModule(
        forward, conv1=conv(6, 16, *args), conv2=conv(16, 4, *args), out=nn.Linear(4, 3)
    )


@pytest.mark.parametrize("norm", ["both", "left", "right", "none", "mean"])
@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)])
def test_graph_layers_equal_dgl_layers(norm, sizes):
    if norm == "mean":
        ours, theirs, g = (
            SAGEConv(*sizes),
            dgl.nn.SAGEConv(*sizes, "mean"),
            graph(self_loops=False),
        )
    else:
        ours, theirs, g = (
            GraphConv(*sizes, norm=norm),
            dgl.nn.GraphConv(*sizes, norm=norm),
            graph(),
        )
    ours.load_state_dict(theirs.state_dict())
    x = features(sizes[0])
    torch.testing.assert_close(ours(g, x), theirs(to_dgl(g), x), atol=1e-5, rtol=1e-5)


# --- conversion -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [their_model(), their_model(dgl.nn.SAGEConv, "mean")], ids=["GCN", "SAGE"]
)
def test_dgl_model_converts_in_place_and_back(model):
    g, x = to_dgl(graph()), features()
    classes = [type(m) for m in model.modules()]
    parameters, state = (
        list(model.parameters()),
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    expected = model(g, x)
    quantize_(model)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    model.load_state_dict(state, strict=True)
    assert isinstance(model.conv1, classes[1])
    with precision(model, "float"):
        torch.testing.assert_close(model(g, x), expected, atol=1e-5, rtol=1e-5)
    with precision(model, 3):
        low = model(g, x)
        assert (low - expected).abs().max() > 1e-3
        again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(again(g, x), low)
        low.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    restore_(model)
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(model(g, x), expected)


def test_dgl_layer_dropout_norm_and_activation_run():
    torch.manual_seed(0)
    layer = dgl.nn.SAGEConv(
        6, 3, "mean", feat_drop=0.5, norm=nn.LayerNorm(3), activation=torch.tanh
    )
    layer.load_state_dict(layer.state_dict())
    g, x = to_dgl(graph()), features()
    torch.manual_seed(1)
    expected = layer(g, x)
    quantize_(layer)
    with precision(layer, "float"):
        torch.manual_seed(1)
        torch.testing.assert_close(layer(g, x), expected, atol=1e-5, rtol=1e-5)
    gcn = quantize_(dgl.nn.GraphConv(6, 3, activation=torch.relu))
    with precision(gcn, 8):
        assert gcn(g, x).min() >= 0


def test_dgl_layer_parts_are_covered_by_layer():
    model = quantize_(
        their_model(dgl.nn.SAGEConv, "mean"), QuantConfig(float32=("conv1",))
    )
    rows = {r.name: r for r in summary(model).rows}
    assert {n: r.quantized for n, r in rows.items() if n != "conv2"} == {
        "conv1.fc_neigh": False,
        "conv1.fc_self": False,
        "conv2.fc_neigh": True,
        "conv2.fc_self": True,
        "out": True,
    }
    assert rows["conv1.fc_self"].reason == "not selected by quantize_"
    with pytest.raises(
        ValueError, match=r"'\*\.fc_self' matches part of 'conv1'; name it"
    ):
        quantize_(
            their_model(dgl.nn.SAGEConv, "mean"), QuantConfig(float32=("*.fc_self",))
        )


def test_dgl_unsupported_aggregators_convert_linear_parts_only():
    model = quantize_(their_model(dgl.nn.SAGEConv, "pool"))
    assert type(model.conv1) is dgl.nn.SAGEConv
    assert {r.name for r in summary(model).quantized} == {
        "conv1.fc_pool",
        "conv1.fc_neigh",
        "conv1.fc_self",
        "conv2.fc_pool",
        "conv2.fc_neigh",
        "conv2.fc_self",
        "out",
    }
    with precision(model, 4):
        assert model(to_dgl(graph()), features()).shape == (NODES, 3)
    plain = their_model()
    plain.conv2, plain.out = dgl.nn.GraphConv(16, 16, weight=False), nn.Linear(16, 3)
    quantize_(plain)
    with precision(plain, 4):
        plain(
            to_dgl(graph()), features()
        )  # a layer without a weight multiplies nothing, which is known now
    assert [r.name for r in summary(plain).quantized] == ["conv1", "out"]


def test_quantized_aggregation_changes_only_the_sum():
    x, results = features(), {}
    for kind in ("fp", "quantized"):
        torch.manual_seed(0)
        model = quantize_(
            GraphNet("gcn", 6, 3, hidden=8, dropout=0.0), QuantConfig(aggregation=kind)
        )
        assert all(
            ("aggregation" in c.precision.quantizers) == (kind == "quantized")
            for c in model.convs
        )
        with precision(model, 3, q_grad=32):
            results[kind] = model(graph(), x)
    assert not torch.equal(results["fp"], results["quantized"])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m: m(graph(), features()[:-1]),
            ValueError,
            r"must be \(40, F\).*got \(39, 6\)",
        ),
        (
            lambda m: m(graph(), features().unsqueeze(1)),
            ValueError,
            r"got \(40, 1, 6\)",
        ),
        (
            lambda m: m("graph", features()),
            TypeError,
            "graph must be a Graph or a DGLGraph, got str",
        ),
        (
            lambda m: m(graph(), features(), edge_weight=torch.ones(190)),
            TypeError,
            "argument 'edge_weight'",
        ),
    ],
)
def test_graph_conv_rejects_invalid_calls(call, error, message):
    model = quantize_(GraphConv(6, 3))
    with precision(model, 8), pytest.raises(error, match=message):
        call(model)


@pytest.mark.parametrize(
    "layer",
    [dgl.nn.GraphConv(6, 3), dgl.nn.SAGEConv(6, 3, "mean")],
    ids=["GCN", "SAGE"],
)
def test_dgl_layers_reject_edge_weights(layer):
    model = quantize_(layer)
    with (
        precision(model, 8),
        pytest.raises(ValueError, match=r"takes n.* edge weights"),
    ):
        model(to_dgl(graph()), features(), edge_weight=torch.ones(190))


def test_graph_conv_of_nodes_without_in_edges():
    lonely = Graph.from_edges(torch.tensor([0]), torch.tensor([1]), 3)
    model = GraphConv(6, 3)
    nn.init.constant_(model.bias, 2.0)
    quantize_(model)
    with precision(model, 4):
        y = model(lonely, features()[:3])
        assert y[[0, 2]].eq(2).all()  # nothing arrives: the bias alone
        assert y.isfinite().all()
    theirs = quantize_(
        dgl.nn.GraphConv(6, 3)
    )  # DGL refuses such graphs unless told otherwise; so do we
    with (
        precision(theirs, 4),
        pytest.raises(
            ValueError, match=r"nodes without in-edges.*allow_zero_in_degree=True"
        ),
    ):
        theirs(to_dgl(lonely), features()[:3])
    theirs.set_allow_zero_in_degree(True)
    with precision(theirs, 4):
        assert theirs(to_dgl(lonely), features()[:3]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [3.0, 1e-3])
def test_matrix_norm_gpu_form_equals_cpu_form(dtype, scale):
    x = (
        torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * scale
        + 5 * scale
    ).to(dtype)
    upstream = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for norm in (MatrixNorm(), graph_layers.spread_norm):
        mine = x.clone().requires_grad_()
        y = norm(mine)
        assert y.dtype == dtype
        found.append((y, *torch.autograd.grad(y, mine, upstream)))
    for one, other in zip(*found, strict=True):
        close = (
            {"rtol": 1e-4, "atol": 1e-5}
            if dtype == torch.float32
            else {"rtol": 2e-2, "atol": 2e-2}
        )
        torch.testing.assert_close(one * scale, other * scale, **close)


def test_matrix_norm_avoids_layer_norm_on_gpu():
    """Avoid CUDA's layer norm, which would use one thread block for the whole graph. Needs no GPU."""
    for device, layer_norm in (("cpu", True), ("cuda:0", False)):
        with FakeTensorMode(), OpRecorder() as ran:
            assert MatrixNorm()(torch.empty(50, 8, device=device)).shape == (50, 8)
        assert ran.count("native_layer_norm") == layer_norm


# --- operations -----------------------------------------------------------------------------------


def test_count_bitops_of_paper_gcn(reference_macs):
    """Count matmuls and LayerNorm but no aggregation, by convention "paper"."""
    nodes = 169_343
    g = Graph(torch.arange(nodes + 1), torch.arange(nodes))
    plan = count_bitops(
        GraphNet("gcn", 128, 40),
        (g, torch.empty(nodes, 128, device="meta")),
        convention="paper",
    )
    assert plan.forward_macs == int(reference_macs["arxiv_gcn"]["forward_count"])
    sums = {
        f"convs.{i} (aggregation)": nodes * features
        for i, features in enumerate((128, 512, 40))
    }
    assert plan.unpriced == sums
    assert sum(p.numel() for p in GraphNet("gcn", 128, 40).parameters()) == 349_224
    assert (
        sum(p.numel() for p in GraphNet("sage", 100, 47, layers=2).parameters())
        == 151_087
    )


def test_count_bitops_of_paper_sage(reference_macs):
    """Infer first-layer nodes from the authors' constant for a batch of 1,024; count linear layers only."""
    expected = int(reference_macs["products_sage"]["forward_count"])
    first = round((expected - 1024 * 512 * 47) / (2 * 100 * 512 + 512 * 47))
    blocks = [
        Graph(
            torch.zeros(first + 1, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
            5 * first,
        ),
        Graph(
            torch.zeros(1025, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
            first,
        ),
    ]
    model = GraphNet("sage", 100, 47, layers=2, norm="none")
    plan = count_bitops(
        model, (blocks, torch.empty(5 * first, 100, device="meta")), convention="paper"
    )
    assert 28_000 < first < 29_500
    assert plan.forward_macs == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("aggregation", "execution"),
    [("fp", "simulated"), ("quantized", "simulated"), ("quantized", "integer")],
)
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_count_bitops_equals_ledger_and_manual_count(kind, aggregation, execution):
    g, x = graph(), features()
    g.set_constant(x)
    config = QuantConfig(
        aggregation=aggregation, execution=execution
    ).with_shared_steps()
    model = quantize_(GraphNet(kind, 6, 3, hidden=8, layers=2), config)
    schedule = make_schedule("CR", q_min=3, q_max=8, total_steps=12, n_cycles=2)
    scheduler = PrecisionScheduler(model, schedule)
    with BitOpsLedger(model) as ledger:
        for _ in range(12):
            model(g, x).sum().backward()
            scheduler.step()
    plan = count_bitops(model, (g, x), schedule, convention="per_op")
    assert ledger.by_layer("per_op") == pytest.approx(plan.by_layer)
    assert ledger.total("paper") == pytest.approx(plan.by_convention["paper"])
    bits, full = schedule.bits().astype(float), 32**2
    q = bits if aggregation == "quantized" else np.full(12, 32.0)
    sums = plan.by_layer
    once = np.unique(q)  # constant features: one sum per bit width
    assert sums["convs.0 (aggregation)"] == pytest.approx(
        g.num_edges * 6 * (once**2).sum() / full
    )
    back = 8.0 if aggregation == "quantized" else 32.0
    assert sums["convs.1 (aggregation)"] == pytest.approx(
        g.num_edges * 3 * (q * q + q * back).sum() / full
    )
    products = NODES * 6 * 8 * (1 if kind == "gcn" else 2)
    assert sums["convs.0"] == pytest.approx(
        products * (bits * bits + bits * 8).sum() / full
    )  # no error product


@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_aggregation_after_matmul_has_input_gradient(kind):
    """Count the input gradient of a first-layer sum, which the weight before it needs."""
    g, x = graph(), features()
    model = quantize_(GraphNet(kind, 6, 3, layers=1))
    with precision(model, 4, q_grad=8), BitOpsLedger(model) as ledger:
        model(g, x).sum().backward()
    plan = count_bitops(
        model,
        (g, x),
        make_schedule("STATIC", q_max=4, total_steps=1),
        convention="per_op",
        q_grad=8,
    )
    assert plan.bitops["convs.0 (aggregation)"] == dict.fromkeys(
        ("forward", "error"), g.num_edges * 3 * 32**2
    )
    assert ledger.by_layer("per_op") == plan.by_layer


def test_count_bitops_of_dgl_layers():
    plans = [
        count_bitops(quantize_(layer), (g, features()), convention="per_op")
        for layer, g in (
            (GraphConv(6, 3), graph()),
            (dgl.nn.GraphConv(6, 3), to_dgl(graph())),
        )
    ]
    assert (
        plans[0].forward_macs
        == plans[1].forward_macs
        == NODES * 6 * 3 + graph().num_edges * 3
    )


def test_count_bitops_binds_keyword_arguments_by_name():
    layer = quantize_(
        FunctionModule(lambda m, g, x: m.conv(features=x, graph=g), conv=SAGEConv(6, 4))
    )
    swapped = count_bitops(layer, (graph(), features()))
    restore_(layer)
    layer = quantize_(FunctionModule(lambda m, g, x: m.conv(g, x), conv=layer.conv))
    assert swapped.macs == count_bitops(layer, (graph(), features())).macs
