"""Int8 graph convolutions: equality with the simulation; fused, cached and compiled forms change no bit."""

import copy
from dataclasses import replace
from functools import partial

import dgl.nn
import pytest
import torch
from helpers import OpRecorder, identical, losses_of, refused, to_dgl
from quantization.test_int8 import drawn, kept_bytes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import cpt_core as cpt
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.models.gnn import GraphNet
from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.graph_handlers import GraphHandlers
from cpt_core.quantization.roles import Quantizer
from cpt_extras.int8 import graph_layers as int8_graph_layers
from cpt_extras.kernels.graph_layer import FusedGraphHandlers

SOURCES, NODES, EDGES = 50, 40, 150
AUTHORS = cpt.QuantConfig(execution="integer", aggregation="quantized")
SHARED = AUTHORS.with_shared_steps()
FP_AGG = replace(SHARED, aggregation="fp")
SIMULATED = cpt.QuantConfig(aggregation="quantized")
SIMULATED_FP_AGG = cpt.QuantConfig()


def make_graph(sources=NODES):
    """Return a graph with nodes lacking in-edges or out-edges; with more sources it is a block."""
    generator = torch.Generator().manual_seed(0)
    degrees = torch.randint(NODES, (EDGES,), generator=generator).bincount(
        minlength=NODES
    )
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(sources, (EDGES,), generator=generator)
    return Graph(indptr, indices, sources)


def features(width=6, nodes=NODES):
    return drawn("two-sided", nodes, width)


def frozen(layer, name):
    getattr(layer, name).requires_grad_(False)
    return layer


# --- layers -------------------------------------------------------------------------------------

LAYERS = {  # name -> layer, width of its input, options of ``passes``
    "GCN": (lambda: GraphConv(6, 9), 6, {}),
    "GCN, matmul first": (lambda: GraphConv(9, 6), 9, {}),
    "block": (lambda: GraphConv(6, 9), 6, {}),
    "matmul first, block": (lambda: GraphConv(9, 6), 9, {}),
    "left": (lambda: GraphConv(6, 9, norm="left"), 6, {}),
    "right": (lambda: GraphConv(9, 6, norm="right"), 9, {}),
    "no norm": (lambda: GraphConv(6, 9, norm="none"), 6, {}),
    "no bias": (lambda: GraphConv(6, 9, bias=False), 6, {}),
    "no bias, matmul first": (lambda: GraphConv(9, 6, bias=False), 9, {}),
    "gradients in float32": (lambda: GraphConv(6, 9), 6, {"q_grad": "float"}),
    "gradients of 12 bits": (lambda: GraphConv(9, 6), 9, {"q_grad": 12}),
    "12 bits": (lambda: GraphConv(6, 9), 6, {"bits": 12}),
    "operands in float32": (lambda: GraphConv(9, 6), 9, {"bits": "float"}),
    "frozen weight": (lambda: frozen(GraphConv(6, 9), "weight"), 6, {}),
    "frozen bias": (lambda: frozen(GraphConv(6, 9), "bias"), 6, {}),
    "SAGE": (lambda: SAGEConv(6, 9), 6, {}),
    "SAGE, matmul first, block": (lambda: SAGEConv(9, 6), 9, {}),
    "GCN of DGL": (lambda: dgl.nn.GraphConv(6, 9, allow_zero_in_degree=True), 6, {}),
    "SAGE of DGL": (lambda: dgl.nn.SAGEConv(9, 6, "mean"), 9, {}),
}


def with_quantizers(**quantizers):
    return replace(AUTHORS, quantizers={**AUTHORS.quantizers, **quantizers})


RUNNING = Quantizer("per_tensor", running=True)
BY_ROW = Quantizer("per_row", rounding="stochastic")
CONFIGS = {
    "shared steps": SHARED,
    "authors' steps": AUTHORS,
    "FP-Agg": FP_AGG,
    "running ranges": with_quantizers(graph_input=RUNNING, graph_aggregation=RUNNING),
    "gradient ranges per row": with_quantizers(graph_grad=BY_ROW),
}


def make_case(name):
    """Return a layer with a nonzero bias, its graph and features, and options of ``passes``."""
    make, width, options = LAYERS[name]
    torch.manual_seed(0)
    layer, sources = make(), SOURCES if "block" in name else NODES
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    graph = make_graph(sources)
    graph = to_dgl(graph) if "DGL" in name else graph
    return layer, graph, features(width, sources), options


def passes(model, graph, x, bits=8, q_grad=8):
    """Return the output and gradients of two steps, an evaluation, and the noise keys."""
    results, generator = [], torch.Generator().manual_seed(5)
    leaves = [p for p in model.parameters() if p.requires_grad]
    with cpt.precision(model, bits, q_grad=q_grad):
        for factor in (1.0, 2.0):
            x = (factor * x).detach().requires_grad_()
            y = model(graph, x)
            upstream = torch.randn(y.shape, generator=generator).to(y.dtype)
            gradients = torch.autograd.grad(
                y, [x, *leaves], upstream, allow_unused=True
            )
            results += [y.detach(), *gradients]
        with torch.no_grad():
            results.append(model.eval()(graph, x))
    return results, [p.noise_key.item() for p in layer_precisions(model).values()]


# Every configuration with the layers that differ most, two of them with every other layer.
MOST_DIFFERENT = "GCN", "matmul first, block", "SAGE of DGL"
CASES = [
    (name, config)
    for i, name in enumerate(LAYERS)
    for j, config in enumerate(CONFIGS)
    if name in MOST_DIFFERENT or j in (i % 2, 2 + i % 3)
]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_int8_graph_layers_equal_simulation(name, config):
    layer, graph, x, options = make_case(name)
    simulated = replace(CONFIGS[config], execution="simulated")
    models = [
        cpt.quantize_(copy.deepcopy(layer), c) for c in (CONFIGS[config], simulated)
    ]
    results, keys = passes(models[0], graph, x, **options)
    expected, expected_keys = passes(models[1], graph, x, **options)
    assert keys == expected_keys
    for a, b in zip(results, expected, strict=True):
        if b is None:
            assert a is None
            continue
        # where a rounding follows a sum, numbers in the middle may go up or down
        assert a.shape == b.shape
        assert float((a - b).norm() / b.norm()) < 2e-3
        is_near = (a - b).abs() < 1e-5 * b.abs().max()
        assert float(is_near.float().mean()) > 0.97


AGGREGATED_BY_NODE = (
    "error, aggregation error (forward simulated: weights have a range per row;"
    " weight simulated: inputs have a range per node;"
    " aggregation simulated: features have a range per node)"
)
ALL = "forward, error, weight, aggregation, aggregation error"
BY_ROW_GRADIENT = with_quantizers(graph_grad=Quantizer("per_row"))


@pytest.mark.parametrize(
    ("kind", "sizes", "config", "counts", "text"),  # of mm, float sums and int8 sums
    [
        (GraphConv, (6, 9), SHARED, (0, 0, 2), ALL),
        (GraphConv, (9, 6), SHARED, (0, 0, 2), ALL),
        (GraphConv, (6, 9), FP_AGG, (0, 2, 0), "forward, error, weight"),
        (GraphConv, (6, 9), AUTHORS, (2, 1, 1), AGGREGATED_BY_NODE),
        (
            SAGEConv,
            (6, 9),
            SHARED,
            (0, 1, 1),
            "forward, error, weight, aggregation (aggregation error simulated: the mean ",
        ),
        (
            SAGEConv,
            (9, 6),
            AUTHORS,
            (4, 2, 0),
            "forward (error simulated: weights have a range per row; weight simulated:",
        ),
        (GraphConv, (6, 9), BY_ROW_GRADIENT, (2, 2, 0), "error (forward simulated"),
    ],
)
def test_int8_graph_layers_run_as_in_summary(kind, sizes, config, counts, text):
    model = cpt.quantize_(nn.ModuleList([kind(*sizes)]), config)
    graph, x = make_graph(), features(sizes[0]).requires_grad_()
    _ = graph.transposed
    with cpt.precision(model, 8, q_grad=8), OpRecorder() as recorder:
        model[0](graph, x).square().sum().backward()
    operations = ("mm", "addmm"), ("cpt_graphs::sum",), ("cpt::sum_neighbours",)
    assert tuple(recorder.count(*names) for names in operations) == counts
    assert f"int8 matmuls: {text}" in str(cpt.summary(model))


def test_int8_graph_sum_is_limited_to_int32(monkeypatch):
    monkeypatch.setattr(int8_graph_layers, "MAX_DEGREE", 6)
    model, graph = cpt.quantize_(GraphConv(6, 9), SHARED), make_graph()
    degree = int(graph.in_degrees.max())
    with cpt.precision(model, 8):
        message = rf"at most 6 terms, {degree} edges lead to a node"
        refused(message, model, graph, features())


def test_int8_graph_conv_saves_int8_for_backward():
    graph, x, sizes = make_graph(), features(64).requires_grad_(), []
    for execution in ("integer", "simulated"):
        config = replace(SHARED, execution=execution)
        model = cpt.quantize_(GraphConv(64, 64), config)
        sizes.append(kept_bytes(model, graph, x))
    assert sizes[0] < 0.35 * sizes[1]


# --- constant features --------------------------------------------------------------------------


def two_layers(kind, width, config, classes=3):
    torch.manual_seed(0)
    model = GraphNet(kind, width, classes, hidden=8, layers=2, dropout=0.0)
    return cpt.quantize_(model, config)


@pytest.mark.parametrize(
    # a width of 6: the sum comes first; of 12: the matmul
    ("kind", "width", "config", "constant_sets", "sets"),
    [
        ("gcn", 6, SHARED, 1, 1),
        ("gcn", 12, AUTHORS, 1, 1),
        ("gcn", 12, FP_AGG, 1, 1),
        # the nodes' own features and the means
        ("sage", 6, AUTHORS, 2, 2),
        ("sage", 6, FP_AGG, 2, 2),
        ("sage", 12, SHARED, 1, 2),
    ],
)
def test_int8_constant_features_encoded_once_per_bits(
    monkeypatch, kind, width, config, constant_sets, sets
):
    encode, encoded, gradients = int8_graph_layers.encode_operand, [], []

    def record(precision, role, x):
        encoded.append((role, x.shape[1]))
        return encode(precision, role, x)

    monkeypatch.setattr(int8_graph_layers, "encode_operand", record)
    for is_constant, expected in ((False, sets * 5), (True, constant_sets * 3)):
        graph, x = make_graph(), features(width)
        graph.set_constant(x if is_constant else None)
        model = two_layers(kind, width, config)
        encoded.clear()
        for bits in (3, 8, 3, 5, 8):
            with cpt.precision(model, bits, q_grad=8):
                model(graph, x).square().sum().backward()
        assert encoded.count(("input", width)) == expected
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_int8_cached_features_follow_in_place_changes():
    """Reuse in training the constant features encoded during evaluation."""
    graph, x = make_graph(), features()
    model = two_layers("gcn", 6, SHARED)

    def evaluate_and_train():
        with cpt.precision(model, 4, q_grad=8):
            with torch.inference_mode():
                evaluated = model(graph, x).clone()
            y = model(graph, x)
            y.sum().backward()
        assert torch.equal(evaluated, y)
        return y

    for factor, shift in ((1, 0), (-2, 0), (1, 1)):
        graph.set_constant(x)
        with cpt.precision(model, 4):
            model(graph, x)  # fills what the change must not leave
        x.mul_(factor).add_(shift)
        y = evaluate_and_train()
        graph.set_constant(None)
        assert torch.equal(y, evaluate_and_train())


@pytest.mark.parametrize("kind", ["gcn", "sage"])
@pytest.mark.parametrize(
    ("config", "sums"), [(SIMULATED_FP_AGG, 1), (SIMULATED, 2)], ids=["fp", "quantized"]
)
@pytest.mark.parametrize("modes", [(False, True), (True, False)])
def test_constant_features_cache_serves_training_and_evaluation(
    monkeypatch, kind, config, sums, modes
):
    graph, x, widths = make_graph(), features(), []
    model = two_layers(kind, 6, config.with_gradient_rounding("nearest"), classes=4)
    aggregate = Graph.aggregate

    def record(graph, h, reduce="sum"):
        widths.append(h.shape[1])
        return aggregate(graph, h, reduce)

    def run(training, bits):
        with (
            cpt.precision(model.train(training), bits, q_grad=8),
            torch.inference_mode(not training),
        ):
            y = model(graph, x)
            if not training:
                return [y]
            return [y, *torch.autograd.grad(y.square().sum(), model.parameters())]

    monkeypatch.setattr(Graph, "aggregate", record)
    expected = {}
    # of a constant there is one sum, or one for every number of bits
    for constant, expected_sums in ((None, 6), (x, sums)):
        graph.set_constant(constant)
        widths.clear()
        for training in modes:
            for bits in (3, 5, 3):
                results = run(training, bits)
                first = expected.setdefault((training, bits), results)
                assert identical(results, first)
        assert widths.count(6) == expected_sums


def test_aggregation_after_matmul_is_not_cached():
    graph, x = make_graph(), features()
    graph.set_constant(x)
    model = cpt.quantize_(GraphConv(6, 4), SIMULATED)
    with cpt.precision(model, 3, q_grad=5):
        before = model(graph, x).detach()
        nn.init.constant_(model.weight, 1.0)
        assert not torch.equal(model(graph, x), before)


# --- training -----------------------------------------------------------------------------------


def train(kind, config, is_checkpointed=False):
    """Return the losses of eight steps on constant features."""
    torch.manual_seed(1)
    model = cpt.quantize_(GraphNet(kind, 6, 3, hidden=16, dropout=0.0), config)
    graph, x = make_graph(), features()
    graph.set_constant(x)
    target = torch.randint(3, (NODES,), generator=torch.Generator().manual_seed(3))
    run = partial(checkpoint, model, use_reentrant=False) if is_checkpointed else model
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=8, n_cycles=1)
    loss = lambda _: cross_entropy(run(graph, x), target)  # noqa: E731
    return losses_of(model, schedule, loss, 8, lr=0.05)


# --- fused operators of rows --------------------------------------------------------------------

CHAINS = {
    **{name: (name, SIMULATED) for name in LAYERS},
    **{
        name: ("GCN", replace(config, execution="simulated"))
        for name, config in CONFIGS.items()
    },
    "FP-Agg, authors' steps": ("GCN", SIMULATED_FP_AGG),
    "FP-Agg, matmul first": ("GCN, matmul first", SIMULATED_FP_AGG),
    "gradients to nearest": ("GCN", SIMULATED.with_gradient_rounding("nearest")),
    "float64": ("GCN", SIMULATED),
    "bfloat16": ("GCN", SIMULATED),
    "no nodes": ("GCN", SIMULATED),
}


@pytest.fixture
def plain_handlers():
    """Return a function that disables the fused operators until the test ends."""
    yield GraphHandlers().register
    FusedGraphHandlers().register()


@pytest.mark.parametrize("case", CHAINS)
def test_fused_row_operators_equal_plain_chains(case, plain_handlers):
    name, config = CHAINS[case]
    layer, graph, x, options = make_case(name)
    if case == "no nodes":
        indptr, indices = torch.zeros(2, 1, dtype=torch.int64)
        graph, x = Graph(indptr, indices[:0]), x[:0]
    if case in ("float64", "bfloat16"):
        dtype = getattr(torch, case)
        layer, x = layer.to(dtype), x.to(dtype)
    model = cpt.quantize_(layer, config)
    other = copy.deepcopy(model)
    results, keys = passes(model, graph, x, **options)
    plain_handlers()
    expected, expected_keys = passes(other, graph, x, **options)
    assert keys == expected_keys
    for a, b in zip(results, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize(
    ("sizes", "config", "counts"),
    [
        ((6, 9), SIMULATED_FP_AGG, (0, 1, 1)),
        ((6, 9), SIMULATED, (1, 1, 1)),
        ((6, 4), SIMULATED_FP_AGG, (1, 1, 0)),  # the sum between is float32
        ((6, 4), SIMULATED, (1, 1, 1)),
    ],
)
def test_graph_conv_fuses_adjacent_operations(sizes, config, counts):
    model, x = cpt.quantize_(GraphConv(*sizes), config), features().requires_grad_()
    with cpt.precision(model, 3, q_grad=5), OpRecorder() as recorder:
        model(make_graph(), x).square().sum().backward()
    names = "scale_round", "scale_round_add", "round_scale_round"
    assert tuple(recorder.count(f"cpt::{name}") for name in names) == counts
