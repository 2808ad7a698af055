"""Quantised graph convolutions beyond the reference vectors: conversion, constant features, operation counts."""

import copy
import pickle

import dgl
import dgl.nn
import numpy as np
import pytest
import torch
from helpers import FunctionModule, OpRecorder, refused, to_dgl
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
    edges = torch.randint(
        0, NODES, (2, 150), generator=torch.Generator().manual_seed(0)
    )
    if self_loops:
        edges = torch.cat([edges, torch.arange(NODES).expand(2, -1)], 1)
    return Graph.from_edges(*edges, NODES)


def features(width=6):
    return torch.randn(NODES, width, generator=torch.Generator().manual_seed(1))


def forward(m, g, x):
    return m.out(m.conv2(g, m.conv1(g, x).relu()))


def dgl_model(conv=dgl.nn.GraphConv, *args):
    """Return a model written as users of DGL write it."""
    return FunctionModule(
        forward, conv1=conv(6, 16, *args), conv2=conv(16, 4, *args), out=nn.Linear(4, 3)
    )


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", ["both", "left", "right", "none", "mean"])
@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)])
def test_graph_layers_equal_dgl_layers(norm, sizes):
    if norm == "mean":
        ours, theirs = SAGEConv(*sizes), dgl.nn.SAGEConv(*sizes, "mean")
    else:
        ours, theirs = (c(*sizes, norm=norm) for c in (GraphConv, dgl.nn.GraphConv))
    g = graph(self_loops=norm != "mean")
    ours.load_state_dict(theirs.state_dict())
    x = features(sizes[0])
    close(ours(g, x), theirs(to_dgl(g), x))


# --- conversion -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [(), (dgl.nn.SAGEConv, "mean")], ids=["GCN", "SAGE"]
)
def test_dgl_model_converts_in_place_and_back(arguments):
    model, g, x = dgl_model(*arguments), to_dgl(graph()), features()
    classes, parameters = [type(m) for m in model.modules()], list(model.parameters())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    expected = model(g, x)
    quantize_(model)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    model.load_state_dict(state, strict=True)
    assert isinstance(model.conv1, classes[1])
    with precision(model, "float"):
        close(model(g, x), expected)
    with precision(model, 3):
        low = model(g, x)
        assert (low - expected).abs().max() > 1e-3
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(twin(g, x), low)
        low.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    restore_(model)
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(model(g, x), expected)


def test_dgl_layer_dropout_norm_and_activation_run():
    options = {"feat_drop": 0.5, "norm": nn.LayerNorm(3), "activation": torch.tanh}
    layer = dgl.nn.SAGEConv(6, 3, "mean", **options)
    g, x = to_dgl(graph()), features()
    torch.manual_seed(1)
    expected = layer(g, x)
    quantize_(layer)
    with precision(layer, "float"):
        torch.manual_seed(1)
        close(layer(g, x), expected)
    gcn = quantize_(dgl.nn.GraphConv(6, 3, activation=torch.relu))
    with precision(gcn, 8):
        assert gcn(g, x).min() >= 0


def test_dgl_layer_parts_are_covered_by_layer():
    model = dgl_model(dgl.nn.SAGEConv, "mean")
    config = QuantConfig(float32=("*.fc_self",))
    refused(r"'\*\.fc_self' matches part of 'conv1'; name it", quantize_, model, config)
    quantize_(model, QuantConfig(float32=("conv1",)))
    rows = {r.name: r for r in summary(model).rows}
    assert {n: r.quantized for n, r in rows.items() if n != "conv2"} == {
        "conv1.fc_neigh": False,
        "conv1.fc_self": False,
        "conv2.fc_neigh": True,
        "conv2.fc_self": True,
        "out": True,
    }
    assert rows["conv1.fc_self"].reason == "not selected by quantize_"


def test_dgl_unsupported_aggregators_convert_linear_parts_only():
    model = quantize_(dgl_model(dgl.nn.SAGEConv, "pool"))
    assert type(model.conv1) is dgl.nn.SAGEConv
    parts = "fc_pool", "fc_neigh", "fc_self"
    names = {f"{conv}.{part}" for conv in ("conv1", "conv2") for part in parts}
    assert {r.name for r in summary(model).quantized} == names | {"out"}
    with precision(model, 4):
        assert model(to_dgl(graph()), features()).shape == (NODES, 3)
    plain = dgl_model()
    plain.conv2, plain.out = dgl.nn.GraphConv(16, 16, weight=False), nn.Linear(16, 3)
    quantize_(plain)
    with precision(plain, 4):
        plain(to_dgl(graph()), features())
    # a layer without a weight multiplies nothing, which is known once it has run
    assert [r.name for r in summary(plain).quantized] == ["conv1", "out"]


EDGE_WEIGHTS = {"edge_weight": torch.ones(190)}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((graph(), features()[:-1]), {}, r"must be \(40, F\).*got \(39, 6\)"),
        ((graph(), features().unsqueeze(1)), {}, r"got \(40, 1, 6\)"),
        (("graph", features()), {}, "graph must be a Graph or a DGLGraph, got str"),
        ((graph(), features()), EDGE_WEIGHTS, "argument 'edge_weight'"),
    ],
)
def test_graph_conv_rejects_invalid_calls(arguments, options, message):
    model = quantize_(GraphConv(6, 3))
    with precision(model, 8):
        refused(message, model, *arguments, **options, error=(ValueError, TypeError))


PAIRS = {  # sources and destinations with a row too many or too few -> message
    "destinations, too many": ((40, 41), r"destination features .*got \(41, 6\)"),
    "destinations, sources": ((41, 41), r"destination features .*got \(41, 6\)"),
    "destinations, too few": ((40, 39), r"destination features .*got \(39, 6\)"),
    "sources, too many": ((42, 40), r"source features .*got \(42, 6\)"),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("layer", [GraphConv, SAGEConv])
def test_graph_layers_reject_pairs_of_wrong_length(layer, pair):
    lengths, message = PAIRS[pair]
    block = graph()
    if lengths[0] == 41:  # with a source that is no destination
        block = Graph(block.indptr, block.indices, NODES + 1)
    pair_features = tuple(torch.ones(length, 6) for length in lengths)
    model = layer(6, 3)
    refused(message, model, block, pair_features)
    with precision(quantize_(model), 8):
        refused(message, model, block, pair_features)


@pytest.mark.parametrize("layer", [GraphConv, SAGEConv])
def test_graph_layers_take_first_sources_as_destinations(layer):
    square = graph()
    block = Graph(square.indptr, square.indices, NODES + 1)
    x, model = torch.randn(NODES + 1, 6), layer(6, 3)
    expected = model(block, (x, x[:NODES].clone()))
    assert torch.equal(model(block, x), expected)


def test_dgl_layers_reject_edge_weights():
    for layer in (dgl.nn.GraphConv(6, 3), dgl.nn.SAGEConv(6, 3, "mean")):
        message = r"takes n.* edge weights"
        with precision(quantize_(layer), 8):
            refused(message, layer, to_dgl(graph()), features(), **EDGE_WEIGHTS)


def test_graph_conv_of_nodes_without_in_edges():
    lonely, x = (
        Graph.from_edges(torch.tensor([0]), torch.tensor([1]), 3),
        features()[:3],
    )
    model = GraphConv(6, 3)
    nn.init.constant_(model.bias, 2.0)
    quantize_(model)
    with precision(model, 4):
        y = model(lonely, x)
        assert y[[0, 2]].eq(2).all()  # nothing arrives: the bias alone
        assert y.isfinite().all()
    theirs = quantize_(dgl.nn.GraphConv(6, 3))
    message = r"nodes without in-edges.*allow_zero_in_degree=True"
    with precision(theirs, 4):  # as DGL does, unless told otherwise
        refused(message, theirs, to_dgl(lonely), x)
        theirs.set_allow_zero_in_degree(True)
        assert theirs(to_dgl(lonely), x).isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float32, 1e-4, 1e-5), (torch.bfloat16, 2e-2, 2e-2)],
)
@pytest.mark.parametrize("scale", [3.0, 1e-3])
def test_matrix_norm_gpu_form_equals_cpu_form(dtype, rtol, atol, scale):
    numbers, upstream = (
        torch.randn(50, 8, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    )
    x = ((numbers + 5) * scale).to(dtype).requires_grad_()
    results = []
    for norm in (MatrixNorm(), graph_layers.spread_norm):
        y = norm(x)
        assert y.dtype == dtype
        results.append([y, *torch.autograd.grad(y, x, upstream.to(dtype))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one * scale, other * scale, rtol=rtol, atol=atol)


def test_matrix_norm_avoids_layer_norm_on_gpu():
    """Avoid CUDA's layer norm, which would use one thread block for the whole graph. Needs no GPU."""
    for device, layer_norm in (("cpu", True), ("cuda:0", False)):
        with FakeTensorMode(), OpRecorder() as ran:
            assert MatrixNorm()(torch.empty(50, 8, device=device)).shape == (50, 8)
        assert ran.count("native_layer_norm") == layer_norm


# --- operations -----------------------------------------------------------------------------------


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


def test_count_bitops_of_paper_gcn(reference_macs):
    """Count matmuls and LayerNorm but no aggregation, by convention "paper"."""
    nodes, model = 169_343, GraphNet("gcn", 128, 40)
    g = Graph(torch.arange(nodes + 1), torch.arange(nodes))
    x = torch.empty(nodes, 128, device="meta")
    plan = count_bitops(model, (g, x), convention="paper")
    assert plan.forward_macs == int(reference_macs["arxiv_gcn"]["forward_count"])
    widths = enumerate((128, 512, 40))
    sums = {f"convs.{i} (aggregation)": nodes * width for i, width in widths}
    assert plan.unpriced == sums
    assert parameter_count(model) == 349_224
    assert parameter_count(GraphNet("sage", 100, 47, layers=2)) == 151_087


def test_count_bitops_of_paper_sage(reference_macs):
    """Infer first-layer nodes from the authors' constant for a batch of 1,024; count linear layers only."""
    expected = int(reference_macs["products_sage"]["forward_count"])
    first = round((expected - 1024 * 512 * 47) / (2 * 100 * 512 + 512 * 47))
    zeros = torch.zeros(first + 1, dtype=torch.int64)
    blocks = [Graph(zeros, zeros[:0], 5 * first), Graph(zeros[:1025], zeros[:0], first)]
    model = GraphNet("sage", 100, 47, layers=2, norm="none")
    x = torch.empty(5 * first, 100, device="meta")
    plan = count_bitops(model, (blocks, x), convention="paper")
    assert 28_000 < first < 29_500
    assert plan.forward_macs == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregation", "execution"),
    [("fp", "simulated"), ("quantized", "simulated"), ("quantized", "integer")],
)
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_count_bitops_equals_ledger_and_manual_count(kind, aggregation, execution):
    g, x = graph(), features()
    g.set_constant(x)
    config = QuantConfig(aggregation=aggregation, execution=execution)
    model = GraphNet(kind, 6, 3, hidden=8, layers=2)
    quantize_(model, config.with_shared_steps())
    schedule = make_schedule("CR", q_min=3, q_max=8, total_steps=12, n_cycles=2)
    scheduler = PrecisionScheduler(model, schedule)
    with BitOpsLedger(model) as ledger:
        for _ in range(12):
            model(g, x).sum().backward()
            scheduler.step()
    plan = count_bitops(model, (g, x), schedule, convention="per_op")
    assert ledger.by_layer("per_op") == pytest.approx(plan.by_layer)
    assert ledger.total("paper") == pytest.approx(plan.by_convention["paper"])

    is_quantized = aggregation == "quantized"
    bits, back = schedule.bits().astype(float), 8.0 if is_quantized else 32.0
    q = bits if is_quantized else np.full(12, 32.0)
    matmuls = NODES * 6 * 8 * (1 if kind == "gcn" else 2)
    counts = {
        # constant features: one sum per bit width
        "convs.0 (aggregation)": g.num_edges * 6 * (np.unique(q) ** 2).sum(),
        "convs.1 (aggregation)": g.num_edges * 3 * (q * q + q * back).sum(),
        "convs.0": matmuls * (bits * bits + bits * 8).sum(),  # no input gradient
    }
    for name, count in counts.items():
        assert plan.by_layer[name] == pytest.approx(count / 32**2), name


@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_aggregation_after_matmul_has_input_gradient(kind):
    """Count the input gradient of a first-layer sum, which the weight before it needs."""
    g, x = graph(), features()
    model = quantize_(GraphNet(kind, 6, 3, layers=1))
    with precision(model, 4, q_grad=8), BitOpsLedger(model) as ledger:
        model(g, x).sum().backward()
    schedule = make_schedule("STATIC", q_max=4, total_steps=1)
    plan = count_bitops(model, (g, x), schedule, convention="per_op", q_grad=8)
    count = g.num_edges * 3 * 32**2
    assert plan.bitops["convs.0 (aggregation)"] == {"forward": count, "error": count}
    assert ledger.by_layer("per_op") == plan.by_layer


def test_count_bitops_binds_keyword_arguments_by_name():
    macs = []
    for forward in (
        lambda m, g, x: m.conv(features=x, graph=g),
        lambda m, g, x: m.conv(g, x),
    ):
        model = quantize_(FunctionModule(forward, conv=SAGEConv(6, 4)))
        macs.append(count_bitops(model, (graph(), features())).macs)
    assert macs[0] == macs[1]
