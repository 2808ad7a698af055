"""Int8 graph convolutions: equality with the simulation; fused, cached and compiled forms change no bit."""

import copy
from dataclasses import replace
from functools import partial

import dgl.nn
import pytest
import torch
from helpers import OpRecorder, identical, losses_of, to_dgl
from quantization.test_int8 import drawn, kept_bytes
from torch import nn

import cpt_core as cpt
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.models.gnn import GraphNet
from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.graph_handlers import GraphHandlers
from cpt_core.quantization.roles import Quantizer
from cpt_extras.int8 import graph_layers as graph_integer
from cpt_extras.kernels.graph_layer import FusedGraphHandlers

SOURCES, NODES = 50, 40
SHARED = cpt.QuantConfig(
    execution="integer", aggregation="quantized"
).with_shared_steps()
AUTHORS = cpt.QuantConfig(execution="integer", aggregation="quantized")
FP_AGG = replace(SHARED, aggregation="fp")
ALL = "forward, error, weight, aggregation, aggregation error"


def graph(sources=NODES, seed=0):
    """Return a graph with nodes lacking in-edges or out-edges; with more sources it is a block."""
    drawn = torch.Generator().manual_seed(seed)
    destination = torch.randint(NODES, (150,), generator=drawn).sort().values
    indptr = torch.cat(
        [
            torch.zeros(1, dtype=torch.int64),
            torch.bincount(destination, minlength=NODES).cumsum(0),
        ]
    )
    return Graph(indptr, torch.randint(sources, (150,), generator=drawn), sources)


def features():
    return drawn("two-sided", NODES, 6)


# --- layers ------------------------------------------------------------------------------------------


def frozen(layer, name):
    getattr(layer, name).requires_grad_(False)
    return layer


def own(**quantizers):
    return replace(AUTHORS, quantizers={**AUTHORS.quantizers, **quantizers})


TENSOR = Quantizer("per_tensor", running=True)
LAYERS = {
    "GCN": (lambda: GraphConv(6, 9), NODES, {}),
    "GCN, product first": (lambda: GraphConv(9, 6), NODES, {}),
    "block": (lambda: GraphConv(6, 9), SOURCES, {}),
    "product first, block": (lambda: GraphConv(9, 6), SOURCES, {}),
    "left": (lambda: GraphConv(6, 9, norm="left"), NODES, {}),
    "right": (lambda: GraphConv(9, 6, norm="right"), NODES, {}),
    "no norm": (lambda: GraphConv(6, 9, norm="none"), NODES, {}),
    "no bias": (lambda: GraphConv(6, 9, bias=False), NODES, {}),
    "no bias, product first": (lambda: GraphConv(9, 6, bias=False), NODES, {}),
    "gradients in float32": (lambda: GraphConv(6, 9), NODES, {"q_grad": "float"}),
    "gradients of 12 bits": (lambda: GraphConv(9, 6), NODES, {"q_grad": 12}),
    "12 bits": (lambda: GraphConv(6, 9), NODES, {"bits": 12}),
    "operands in float32": (lambda: GraphConv(9, 6), NODES, {"bits": "float"}),
    "frozen weight": (lambda: frozen(GraphConv(6, 9), "weight"), NODES, {}),
    "frozen bias": (lambda: frozen(GraphConv(6, 9), "bias"), NODES, {}),
    "SAGE": (lambda: SAGEConv(6, 9), NODES, {}),
    "SAGE, product first": (lambda: SAGEConv(9, 6), SOURCES, {}),
    "GCN of DGL": (
        lambda: dgl.nn.GraphConv(6, 9, allow_zero_in_degree=True),
        NODES,
        {},
    ),
    "SAGE of DGL": (lambda: dgl.nn.SAGEConv(9, 6, "mean"), SOURCES, {}),
}
CONFIGS = {
    "shared steps": SHARED,
    "authors' steps": AUTHORS,
    "FP-Agg": FP_AGG,
    "running ranges": own(graph_input=TENSOR, graph_aggregation=TENSOR),
    "gradient ranges per row": own(
        graph_grad=Quantizer("per_row", rounding="stochastic")
    ),
}


def passes(model, g, x, bits=8, q_grad=8):
    """Return the output and gradients of two steps, an evaluation, and the noise key."""
    found, generator = [], torch.Generator().manual_seed(5)
    with cpt.precision(model, bits, q_grad=q_grad):
        for by in (1.0, 2.0):
            x = (by * x).detach().requires_grad_()
            y = model(g, x)
            wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
            upstream = torch.randn(y.shape, generator=generator).to(y.dtype)
            found += [
                y.detach(),
                *torch.autograd.grad(y, wanted, upstream, allow_unused=True),
            ]
        with torch.no_grad():
            found.append(model.eval()(g, x))
    return found, [p.noise_key.item() for p in layer_precisions(model).values()]


def prepared(name):
    """Return a layer with a nonzero bias, its graph, features and bits."""
    make, sources, bits = LAYERS[name]
    torch.manual_seed(0)
    layer, g = make(), graph(sources)
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    x = drawn(
        "two-sided",
        sources,
        getattr(layer, "_in_feats", getattr(layer, "_in_src_feats", 0)),
    )
    return layer, to_dgl(g) if "DGL" in name else g, x, bits


# Every configuration with the layers that differ most, two of them with every other layer.
MOST = ("GCN", "product first, block", "SAGE of DGL")
PAIRS = [
    (n, c)
    for i, n in enumerate(LAYERS)
    for j, c in enumerate(CONFIGS)
    if n in MOST or j in (i % 2, 2 + i % 3)
]


@pytest.mark.parametrize(("name", "config"), PAIRS)
def test_int8_graph_layers_equal_simulation(name, config):
    (layer, g, x, bits), outcomes = prepared(name), []
    for how in ("integer", "simulated"):
        model = cpt.quantize_(
            copy.deepcopy(layer), replace(CONFIGS[config], execution=how)
        )
        outcomes.append(passes(model, g, x, **bits))
    (found, key), (expected, expected_key) = outcomes
    assert key == expected_key
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if (
            a is not None
        ):  # where a rounding follows a sum, numbers in the middle may go up or down: a step of 255
            assert a.shape == b.shape
            assert float((a - b).norm() / b.norm()) < 2e-3
            assert float(((a - b).abs() < 1e-5 * b.abs().max()).float().mean()) > 0.97


@pytest.mark.parametrize(
    ("layer", "config", "products", "sums", "integer_sums", "said"),
    [
        (GraphConv(6, 9), SHARED, 0, 0, 2, ALL),
        (GraphConv(9, 6), SHARED, 0, 0, 2, ALL),
        (GraphConv(6, 9), FP_AGG, 0, 2, 0, "forward, error, weight"),
        (
            GraphConv(6, 9),
            AUTHORS,
            2,
            1,
            1,
            "error, aggregation error (forward simulated: weights have a range per row;"
            " weight simulated: inputs have a range per node; aggregation simulated: features have a range per node)",
        ),
        (
            SAGEConv(6, 9),
            SHARED,
            0,
            1,
            1,
            "forward, error, weight, aggregation (aggregation error simulated: the mean ",
        ),
        (
            SAGEConv(9, 6),
            AUTHORS,
            4,
            2,
            0,
            "forward (error simulated: weights have a range per row; weight simulated:",
        ),
        (
            GraphConv(6, 9),
            own(graph_grad=Quantizer("per_row")),
            2,
            2,
            0,
            "error (forward simulated",
        ),
    ],
)
def test_int8_graph_layers_run_as_in_summary(
    layer, config, products, sums, integer_sums, said
):
    model, g = cpt.quantize_(nn.ModuleList([copy.deepcopy(layer)]), config), graph()
    x = drawn(
        "two-sided",
        NODES,
        layer.weight.shape[0] if isinstance(layer, GraphConv) else layer._in_src_feats,
    )
    _ = g.transposed
    with cpt.precision(model, 8, q_grad=8), OpRecorder() as ran:
        model[0](g, x.requires_grad_()).square().sum().backward()
    counted = (
        ran.count("mm", "addmm"),
        ran.count("cpt_graphs::sum"),
        ran.count("cpt::sum_neighbours"),
    )
    assert counted == (products, sums, integer_sums)
    assert f"int8 matmuls: {said}" in str(cpt.summary(model))


def test_int8_graph_sum_is_limited_to_int32(monkeypatch):
    monkeypatch.setattr(graph_integer, "MAX_DEGREE", 6)
    model, g, x = cpt.quantize_(GraphConv(6, 9), SHARED), graph(), features()
    most = int(g.in_degrees.max())
    with (
        cpt.precision(model, 8),
        pytest.raises(
            ValueError, match=rf"at most 6 terms, {most} edges lead to a node"
        ),
    ):
        model(g, x)


# --- constant features -------------------------------------------------------------------------------


@pytest.mark.parametrize(  # a width of 6: the sum comes first; of 12: the product
    ("kind", "width", "config"),
    [
        ("gcn", 6, SHARED),
        ("gcn", 12, AUTHORS),
        ("gcn", 12, FP_AGG),
        ("sage", 6, AUTHORS),
        ("sage", 6, FP_AGG),
        ("sage", 12, SHARED),
    ],
)
def test_int8_constant_features_encoded_once_per_bits(monkeypatch, kind, width, config):
    encode, made, outcomes = graph_integer.encode_operand, [], []
    monkeypatch.setattr(
        graph_integer,
        "encode_operand",
        lambda p, role, x: made.append((role, x.shape[1])) or encode(p, role, x),
    )
    for constant in (False, True):
        torch.manual_seed(0)
        g, x = graph(), drawn("two-sided", NODES, width)
        g.set_constant(x if constant else None)
        model = cpt.quantize_(
            GraphNet(kind, width, 3, hidden=8, layers=2, dropout=0.0), config
        )
        made.clear()
        for bits in (3, 8, 3, 5, 8):
            with cpt.precision(model, bits, q_grad=8):
                model(g, x).square().sum().backward()
        # two sets of features go into a sum before its product in GraphSAGE: the nodes' own, and the means
        sets = 1 + (kind == "sage" and width == 6)
        assert made.count(("input", width)) == (
            sets * 3 if constant else (1 + (kind == "sage")) * 5
        )
        outcomes.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_int8_cached_features_follow_in_place_changes():
    """Reuse in training the constant features encoded during evaluation."""
    g, x = graph(), features()
    model = cpt.quantize_(
        GraphNet("gcn", 6, 3, hidden=8, layers=2, dropout=0.0), SHARED
    )
    for change in (lambda: None, lambda: x.mul_(-2), lambda: x.add_(1)):
        change()
        results = []
        for constant in (x, None):
            g.set_constant(constant) if g.constant is None or constant is None else None
            with cpt.precision(model, 4, q_grad=8):
                with torch.inference_mode():
                    first = model(g, x).clone()
                y = model(g, x)
                y.sum().backward()
            assert torch.equal(first, y)
            results.append(y)
        assert torch.equal(*results)
        g.set_constant(x)
        with cpt.precision(model, 4):
            model(g, x)  # fills what the next change must not leave


# --- training ----------------------------------------------------------------------------------------


def test_int8_graph_conv_saves_int8_for_backward():
    g, x = graph(), drawn("two-sided", NODES, 64).requires_grad_()
    configs = (replace(SHARED, execution=e) for e in ("integer", "simulated"))
    integer, simulated = (
        kept_bytes(cpt.quantize_(GraphConv(64, 64), c), g, x) for c in configs
    )
    assert integer < 0.35 * simulated


def network(kind="gcn", config=SHARED):
    torch.manual_seed(1)
    return cpt.quantize_(GraphNet(kind, 6, 3, hidden=16, dropout=0.0), config)


SCHEDULE = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=8, n_cycles=1)


def train(model, checkpoint=False):
    """Return the losses of eight steps on constant features."""
    g, x = graph(), features()
    g.set_constant(x)
    target = torch.randint(3, (NODES,), generator=torch.Generator().manual_seed(3))
    run = (
        partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False)
        if checkpoint
        else model
    )
    return losses_of(
        model,
        SCHEDULE,
        lambda step: nn.functional.cross_entropy(run(g, x), target),
        8,
        lr=0.05,
    )


@pytest.mark.parametrize(("kind", "config"), [("gcn", AUTHORS), ("sage", SHARED)])
def test_int8_graph_training_equals_simulation_and_repeats(kind, config):
    losses = train(network(kind, config))
    assert losses == train(network(kind, config), checkpoint=True)
    simulated = train(network(kind, replace(config, execution="simulated")))
    assert losses[0] == pytest.approx(
        simulated[0], rel=1e-2
    )  # a code that flips is a step of a 3-bit grid
    assert losses == pytest.approx(simulated, rel=0.1)


# --- few passes over the nodes -----------------------------------------------------------------------

FP, Q = cpt.QuantConfig(), cpt.QuantConfig(aggregation="quantized")
CHAINS = {
    **{name: (name, Q) for name in LAYERS},
    **{
        name: ("GCN", replace(config, execution="simulated"))
        for name, config in CONFIGS.items()
    },
    "FP-Agg, authors' steps": ("GCN", FP),
    "FP-Agg, product first": ("GCN, product first", FP),
    "gradients to the nearest": ("GCN", Q.with_gradient_rounding("nearest")),
    **dict.fromkeys(("float64", "bfloat16", "no nodes"), ("GCN", Q)),
}
NO_NODES = Graph(torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


@pytest.fixture
def plain_handlers():
    """Return a function that disables the fused operators until the test ends."""
    yield GraphHandlers().register
    FusedGraphHandlers().register()


@pytest.mark.parametrize("case", CHAINS)
def test_fused_row_operators_equal_plain_chains(case, plain_handlers):
    name, config = CHAINS[case]
    layer, g, x, bits = prepared(name)
    if case == "no nodes":
        g, x = NO_NODES, x[:0]
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(
        case, torch.float32
    )
    model = cpt.quantize_(layer.to(dtype), config)
    other = copy.deepcopy(model)
    found, key = passes(model, g, x.to(dtype), **bits)
    plain_handlers()
    expected, expected_key = passes(other, g, x.to(dtype), **bits)
    assert key == expected_key
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize(
    ("sizes", "config", "expected"),
    [
        ((6, 9), FP, {"scale_round": 0, "scale_round_add": 1, "round_scale_round": 1}),
        ((6, 9), Q, {"scale_round": 1, "scale_round_add": 1, "round_scale_round": 1}),
        (
            (6, 4),
            FP,
            {"scale_round": 1, "scale_round_add": 1, "round_scale_round": 0},
        ),  # the sum between is float32
        ((6, 4), Q, {"scale_round": 1, "scale_round_add": 1, "round_scale_round": 1}),
    ],
)
def test_graph_conv_fuses_adjacent_operations(sizes, config, expected):
    model, x = cpt.quantize_(GraphConv(*sizes), config), features().requires_grad_()
    with cpt.precision(model, 3, q_grad=5), OpRecorder() as ran:
        model(graph(), x).square().sum().backward()
    assert {name: ran.count(f"cpt::{name}") for name in expected} == expected


@pytest.mark.parametrize("config", [FP, Q], ids=["FP-Agg", "Q-Agg"])
def test_check_sees_rounding_in_fused_operators(config):
    found = cpt.check(
        cpt.quantize_(GraphNet("gcn", 6, 4, hidden=8), config), (graph(), features())
    )
    assert found.ok, str(found)
    assert all(e.quantized or "aggregation" in e.layer for e in found.operations), str(
        found
    )
    assert {e.layer for e in found.operations if e.backward} >= {
        "convs.0",
        "convs.1",
        "convs.2",
    }


@pytest.mark.parametrize("kind", ["gcn", "sage"])
@pytest.mark.parametrize("config", [FP, Q], ids=["FP-Agg", "Q-Agg"])
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_constant_features_cache_serves_training_and_evaluation(
    monkeypatch, kind, config, first
):
    g, x, calls = graph(), features(), []
    model, original = (
        GraphNet(kind, 6, 4, hidden=8, layers=2, dropout=0.0),
        Graph.aggregate,
    )
    cpt.quantize_(model, config.with_gradient_rounding("nearest"))
    monkeypatch.setattr(
        Graph,
        "aggregate",
        lambda self, h, r="sum": calls.append(h.shape[1]) or original(self, h, r),
    )
    expected, counts = {}, []
    for constant in (None, x):
        g.set_constant(constant)
        calls.clear()
        for evaluates in (first == "evaluation", first == "training"):
            for bits in (3, 5, 3):
                with (
                    cpt.precision(model.train(not evaluates), bits, q_grad=8),
                    torch.inference_mode(evaluates),
                ):
                    found = [model(g, x)]
                    found += (
                        []
                        if evaluates
                        else torch.autograd.grad(
                            found[0].square().sum(), model.parameters()
                        )
                    )
                assert identical(found, expected.setdefault((evaluates, bits), found))
        counts.append(calls.count(6))
    assert counts == [
        6,
        1 if config is FP else 2,
    ]  # of a constant: once, or once for every number of bits


def test_aggregation_after_matmul_is_not_cached():
    g, x = graph(), features()
    g.set_constant(x)
    model = cpt.quantize_(GraphConv(6, 4), Q)
    with cpt.precision(model, 3, q_grad=5):
        before = model(g, x).detach()
        nn.init.constant_(model.weight, 1.0)
        assert not torch.equal(model(g, x), before)
