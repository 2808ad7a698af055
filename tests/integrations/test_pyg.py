"""PyTorch Geometric's layers: converted in place, their sums quantised and priced.

They are those of PyTorch Geometric itself where it is installed, else those of ``stand_in_geometric``.
"""

import copy
import gc
import importlib
import pickle
import sys
import warnings
from importlib.util import find_spec
from types import SimpleNamespace

import dgl
import dgl.nn
import pytest
import stand_in_geometric
import torch
from cpt_core.quantization.coverage import QuantizationWarning, float32_reason
from helpers import refused, said_by
from torch import nn

import cpt_core as cpt
from cpt_core.bitops.plan import count_bitops
from cpt_core.graphs.graph import Graph
from cpt_core.inspecting.ledger import BitOpsLedger

NODES, REAL = 40, find_spec("torch_geometric") is not None
Q_AGG = cpt.QuantConfig(aggregation="quantized")
STATIC = cpt.make_schedule("STATIC", q_max=4, total_steps=1)
KINDS = {
    "GCN": ("GCNConv", {}),
    "GCN as it is": ("GCNConv", {"normalize": False}),
    "GCN without loops": ("GCNConv", {"add_self_loops": False, "cached": True}),
    "SAGE": ("SAGEConv", {}),
    "SAGE normalised": ("SAGEConv", {"normalize": True}),
    "GraphConv": ("GraphConv", {}),
}


@pytest.fixture(scope="module", autouse=True)
def pyg():
    """The library's ``nn``, or what stands in for it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):  # of the library's import
        for name, module in {} if REAL else stand_in_geometric.modules().items():
            patch.setitem(sys.modules, name, module)
        yield importlib.import_module("torch_geometric.nn")
        if not REAL:
            sys.modules.pop("cpt_core.integrations.pyg", None)


def edges(nodes=NODES, seed=0):
    """Directed, with loops, parallel edges, and nodes that no edge reaches."""
    found = torch.randint(0, nodes, (2, 90), generator=torch.Generator().manual_seed(seed))
    assert len(found[1].unique()) < nodes
    assert (found[0] == found[1]).any()
    return found


def features(width=6):
    return torch.randn(NODES, width, generator=torch.Generator().manual_seed(1))


def layer(pyg, kind, *sizes):
    torch.manual_seed(0)
    name, options = KINDS[kind]
    made = getattr(pyg, name)(*sizes or (6, 4), **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # biases are 0
    return made


def sage_state(theirs):
    """Return the parameters of a ``SAGEConv`` under DGL's names."""
    neighbours, own = theirs.lin_l, theirs.lin_r
    return {"fc_neigh.weight": neighbours.weight, "fc_self.weight": own.weight, "fc_self.bias": neighbours.bias}


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        for number, each in enumerate(layers, 1):
            self.add_module(f"conv{number}", each)

    def forward(self, x, edge_index):
        first, *rest = self.children()
        x = first(x, edge_index)
        for each in rest:
            x = each(x.relu(), edge_index)
        return x


@pytest.mark.parametrize("aggregation", ["fp", "quantized"])
@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_layer_until_it_is_quantised(pyg, kind, sizes, aggregation):
    theirs, e, x = layer(pyg, kind, *sizes), edges(), features(sizes[0]).requires_grad_()
    state, expected = copy.deepcopy(theirs.state_dict()), theirs(x, e)
    gradients = torch.autograd.grad(expected.square().sum(), [x, *theirs.parameters()])
    before = type(theirs)
    cpt.quantize_(theirs, cpt.QuantConfig(aggregation=aggregation))
    theirs.load_state_dict(state, strict=True)
    assert list(theirs.state_dict()) == list(state)
    for bits in ("float", 24):
        with cpt.precision(theirs, bits):
            y = theirs(x, edge_index=e)
            found = torch.autograd.grad(y.square().sum(), [x, *theirs.parameters()])
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-4)
    with cpt.precision(theirs, 3):
        low = theirs(x, e)
        assert (low - expected).abs().max() > 1e-2
        assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(theirs)))(x, e), low)
    cpt.restore_(theirs)
    assert type(theirs) is before
    assert torch.equal(theirs(x, e), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_other_types(pyg, kind):
    theirs, e = layer(pyg, kind).double(), edges()
    expected = theirs(features().double(), e)
    cpt.quantize_(theirs, Q_AGG)
    with cpt.precision(theirs, "float"):
        torch.testing.assert_close(theirs(features().double(), e), expected, rtol=1e-12, atol=1e-12)
    with cpt.precision(theirs.float(), 8), torch.autocast("cpu", torch.bfloat16):
        y = theirs(features(), e)
    assert y.dtype == torch.bfloat16
    with cpt.precision(theirs, 8):
        torch.testing.assert_close(theirs(features(), e), y.float(), rtol=0.01, atol=0.01)  # rounded once or twice


@pytest.mark.parametrize("aggregation", ["fp", "quantized"])
@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)])
@pytest.mark.parametrize("kind", ["GCN", "SAGE"])
def test_dgls_layer_gives_the_same_numbers(pyg, kind, sizes, aggregation):
    """Of an undirected graph: DGL's normalisation looks at out-degrees, too. In Q-Agg also the same gradients."""
    theirs, e = layer(pyg, kind, *sizes), edges()
    e = torch.cat([e, e.flip(0)], 1)[:, torch.cat([e[0], e[1]]) != torch.cat([e[1], e[0]])]
    e = torch.cat([e, torch.arange(NODES).repeat(2, 1)], 1)
    if kind == "GCN":
        other = dgl.nn.GraphConv(*sizes)
        other.load_state_dict({"weight": theirs.lin.weight.t(), "bias": theirs.bias})
    else:
        other = dgl.nn.SAGEConv(*sizes, "mean")
        other.load_state_dict(sage_state(theirs))
    found = []
    nearest = cpt.QuantConfig(aggregation=aggregation).with_gradient_rounding("nearest")
    g = Graph.from_edges(*e, NODES)
    for each, called in ((theirs, lambda x: theirs(x, e)), (other, lambda x: other(g, x))):
        x = features(sizes[0]).requires_grad_()
        with cpt.precision(cpt.quantize_(each, nearest), 3, q_grad=6):
            y = called(x)
            y.square().sum().backward()
        found.append((y, x.grad))
    # FP-Agg: DGL scales features by degree before they are rounded, and gradients behind that; here sums do so
    for one, two in list(zip(*found, strict=True))[: 2 if aggregation == "quantized" else 1]:
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*does not run on shapes alone")
@pytest.mark.parametrize("aggregation", ["fp", "quantized"])
@pytest.mark.parametrize("kind", ["GCN", "SAGE", "GraphConv"])
def test_sums_are_priced_by_plan_and_ledger(pyg, kind, aggregation):
    e, x = edges(), features()
    model = Net(layer(pyg, kind, 6, 8), layer(pyg, kind, 8, 3))
    plain = count_bitops(model, (x, e), STATIC, convention="per_op")
    cpt.quantize_(model, cpt.QuantConfig(aggregation=aggregation))
    plan = count_bitops(model, (x, e), STATIC, convention="per_op", q_grad=8)
    with cpt.precision(model, 4, q_grad=8), BitOpsLedger(model) as ledger:
        model(edge_index=e, x=x).sum().backward()
    assert ledger.by_layer("per_op") == plan.by_layer
    assert plain.macs == plan.macs
    loops = int((e[0] == e[1]).sum())
    count = e.shape[1] + (NODES - loops if kind == "GCN" else 0)
    products = NODES * (1 if kind == "GCN" else 2)
    bits, back = (4, 8) if aggregation == "quantized" else (32, 32)
    assert plan.bitops == {
        "conv1": {"forward": products * 48 * 16, "weight": products * 48 * 32},
        "conv1 (aggregation)": {"forward": count * 6 * bits * bits},
        "conv2": {"forward": products * 24 * 16, "error": products * 24 * 32, "weight": products * 24 * 32},
        "conv2 (aggregation)": {"forward": count * 3 * bits * bits, "error": count * 3 * bits * back},
    }
    assert plan.uncounted.keys() == {"relu"}


@pytest.mark.parametrize("kind", ["GCN", "SAGE", "GraphConv"])
def test_on_codes(pyg, kind):
    found = []
    for execution in ("simulated", "integer"):
        config = cpt.QuantConfig(aggregation="quantized", execution=execution).with_shared_steps()
        with cpt.precision(cpt.quantize_(layer(pyg, kind), config), 8) as model:
            found.append(model(features(), edges()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_graph_is_made_once_for_edges_that_stay(pyg, monkeypatch):
    made, real = [], Graph.from_edges.__func__
    count = classmethod(lambda cls, *given: made.append(1) or real(cls, *given))
    monkeypatch.setattr(Graph, "from_edges", count)
    e, x = edges(), features()
    model = cpt.quantize_(Net(layer(pyg, "SAGE", 6, 6), layer(pyg, "GraphConv", 6, 6)), Q_AGG)
    with cpt.precision(model, 8):
        with torch.inference_mode():
            first = model(x, e)
        for _ in range(2):
            y = model(x, e)
            y.sum().backward()
        assert len(made) == 1
        assert torch.equal(first, y)
        e[:, :10] = 0  # in place
        assert not torch.equal(model(x, e), y)
        assert torch.equal(model(x, e.clone()), model(x, e))
        assert len(made) == 3
        model(torch.cat([x, x]), e)  # isolated nodes more
        assert len(made) == 4
        with torch.inference_mode():
            own = e.clone()
            for _ in range(2):
                model(x, own)  # its version is unknown: nothing is kept
        assert len(made) == 8
    kept = sys.modules["cpt_core.integrations.pyg"].GRAPHS
    del own
    gc.collect()
    alive = len(kept)
    del e
    assert len(kept) == alive - 1


# --- what has no quantised form -------------------------------------------------------------------


def changed(p):
    model = p.GCNConv(6, 4)
    model.lin = nn.Linear(6, 4)
    return model


ODD = {
    "improved": (lambda p: p.GCNConv(6, 4, improved=True), "its improved=True has"),
    "flow": (lambda p: p.GCNConv(6, 4, flow="target_to_source"), "its flow='target_to_source' has"),
    "node_dim": (lambda p: p.GraphConv(6, 4, node_dim=0), "its node_dim=0 has"),
    "aggregator": (lambda p: p.SAGEConv(6, 4, aggr="sum"), "its aggr='sum' has no quantised form"),
    "mean": (lambda p: p.GraphConv(6, 4, aggr="mean"), "its aggr='mean' has"),
    "subclass": (lambda p: type("Own", (p.GraphConv,), {})(6, 4), ""),
    "two sizes": (lambda p: p.SAGEConv((6, 5), 4), "its neighbours have another size"),
    "other layer": (lambda p: p.SGConv(6, 4), ""),
    "changed": (changed, "it was changed after it was made"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_has_no_form_keeps_its_products_quantised_and_is_named(pyg, what):
    make, reason = ODD[what]
    torch.manual_seed(0)
    model = nn.Sequential(make(pyg))
    if reason:
        assert float32_reason(model[0], False).startswith(reason)
    before = type(model[0])
    said = rf"stay in float32 in {before.__name__} '0': they have no quantised"
    refused(said, cpt.quantize_, model, Q_AGG, error=QuantizationWarning)  # warnings are errors in these tests
    assert type(model[0]) is before
    with pytest.warns(QuantizationWarning, match=said):
        cpt.quantize_(model, Q_AGG)
    assert not hasattr(model[0], "graph_in")
    cpt.restore_(model)
    assert type(model[0]) is before
    cpt.quantize_(model)  # without a warning, which would be an error
    x = features() if what != "two sizes" else (features(), features(5))
    with cpt.precision(model, 2):
        low = model[0](x, edges())
    with cpt.precision(model, "float"):
        assert (model[0](x, edges()) - low).abs().max() > 1e-2
    cpt.restore_(model)
    cpt.quantize_(nn.Sequential(model, nn.Linear(9, 9)), cpt.QuantConfig(("0",), aggregation="quantized"))  # asked for


PAIR = (features(), features()[:30])
FP = "; take aggregation='fp'"


@pytest.mark.parametrize(
    ("kind", "call", "said"),
    [
        ("GraphConv", lambda e: (features(), e, torch.rand(90)), f"take no edge_weight{FP}"),
        ("GCN as it is", lambda e: (features(), e, torch.rand(90)), f"take no edge_weight{FP}"),
        ("SAGE", lambda e: (features(), e, (NODES, NODES)), f"take no size{FP}"),
        ("SAGE", lambda e: (PAIR, e % 30), rf"take no features but a tensor \(N, F\){FP}"),
        ("GCN", lambda e: (PAIR, e), r"must be a tensor \(N, F\), got a tuple"),
        ("SAGE", lambda e: (features()[None], e), r"no features but a tensor \(N, F\)"),
        ("SAGE", lambda e: (features(), e.t()), r"edge_index must be \(2, E\), got \(90, 2\)"),
        ("GraphConv", lambda e: (features(), e + 9), "edges must name nodes 0..39, got 4"),
    ],
)
def test_calls_beyond_a_graph_are_fp_aggs(pyg, kind, call, said):
    theirs, given = layer(pyg, kind), call(edges())
    model = cpt.quantize_(copy.deepcopy(theirs), Q_AGG)
    with cpt.precision(model, 8):
        refused(said, model, *given)
    if FP not in said:
        return
    expected = theirs(*given)
    cpt.quantize_(cpt.restore_(model))
    with cpt.precision(model, "float"):
        torch.testing.assert_close(model(*given), expected, rtol=1e-5, atol=1e-5)
    assert count_bitops(model, given, STATIC, convention="per_op").macs["(aggregation)"] == 90 * min(6, 4)


def test_hooks_along_edges_are_not_passed_over(pyg):
    model = cpt.quantize_(layer(pyg, "SAGE"), Q_AGG)
    model._message_forward_hooks[0] = lambda *given: None
    with cpt.precision(model, 8):
        refused("take no hooks or explanations along edges", model, features(), edges())


# --- beside it ------------------------------------------------------------------------------------


def test_a_graph_of_its_data(pyg):
    data = SimpleNamespace(edge_index=edges(), num_nodes=NODES)
    theirs, ours = layer(pyg, "SAGE"), cpt.SAGEConv(6, 4)
    ours.load_state_dict(sage_state(theirs))
    torch.testing.assert_close(ours(Graph.from_pyg(data), features()), theirs(features(), edges()))
    with pytest.raises(ValueError, match="and no edge_weight, got a Tensor and a Tensor"):
        Graph.from_pyg(SimpleNamespace(**vars(data), edge_weight=torch.ones(90)))
    for bad in (SimpleNamespace(num_nodes=3), SimpleNamespace(edge_index=edges().t(), num_nodes=NODES)):
        refused(r"data must have an edge_index, a tensor \(2, E\), and no ", Graph.from_pyg, bad)


def test_a_program_takes_fp_agg(pyg):
    layers, given = [layer(pyg, kind, 6, 6) for kind in ("GCN", "SAGE", "GraphConv")], (features(), edges())
    model = cpt.quantize_(Net(*layers))
    with cpt.precision(model, 8):
        model(*given)
        expected = model.eval()(*given)
    torch.testing.assert_close(cpt.export(model, given).module()(*given), expected)
    cpt.restore_(model.train())
    for each in layers:
        model = cpt.quantize_(Net(each), Q_AGG).eval()
        refused(r"layer 'conv1' is a [A-Za-z]+, and a program takes no graphs", cpt.export, model, given)


@pytest.mark.slow
def test_nobody_imports_it_who_does_not_use_it():
    code = (
        "import sys, torch, cpt_core as cpt\n"
        "cpt.quantize_(torch.nn.Sequential(cpt.SAGEConv(4, 4), torch.nn.Linear(4, 4)),"
        " cpt.QuantConfig(aggregation='quantized'))\n"
        "assert not [m for m in sys.modules if m.startswith(('torch_geometric', 'cpt_core.integrations.pyg'))]"
    )
    said_by(sys.executable, "-c", code)


# --- with the library itself ----------------------------------------------------------------------


@pytest.mark.skipif(not REAL, reason="PyTorch Geometric is not installed")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["GCN", "GraphConv"])
def test_sparse_edges_and_weights(pyg, kind):
    torch_geometric = pytest.importorskip("torch_geometric")
    e, x, w, model = edges(), features(), torch.rand(90), layer(pyg, kind)
    e = e.unique(dim=1).contiguous()
    sparse = torch.sparse_coo_tensor(e.flip(0), torch.ones(e.shape[1]), (NODES, NODES)).to_sparse_csr()
    expected = model(x, e, w[: e.shape[1]]), model(x, sparse)
    cpt.quantize_(model)
    with cpt.precision(model, "float"):
        found = model(x, e, w[: e.shape[1]]), model(x, sparse)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    cpt.quantize_(cpt.restore_(model), Q_AGG)
    with cpt.precision(model, 8):
        refused("take no sparse matrix", model, x, sparse)
        own = torch_geometric.EdgeIndex(e, sparse_size=(NODES, NODES))
        assert torch.equal(model(x, own), model(x, e))


@pytest.mark.skipif(not REAL, reason="PyTorch Geometric is not installed")
def test_data_and_lazy_layers(pyg):
    torch_geometric = pytest.importorskip("torch_geometric")
    data = torch_geometric.data.Data(x=features(), edge_index=edges())
    assert Graph.from_pyg(data).num_edges == 90
    refused("data must have an edge_index", Graph.from_pyg, torch_geometric.data.HeteroData())
    lazy = pyg.SAGEConv(-1, 4)
    assert float32_reason(lazy, False).startswith("lazy")
    lazy(features(), edges())
    with cpt.precision(cpt.quantize_(lazy, Q_AGG), 8):
        assert lazy(features(), edges()).shape == (NODES, 4)


@pytest.mark.skipif(not REAL, reason="PyTorch Geometric is not installed")
@pytest.mark.parametrize("kind", ["GCN", "SAGE", "GraphConv"])
def test_compiled(pyg, kind):
    for aggregation in ("fp", "quantized"):
        torch._dynamo.reset()
        model = cpt.quantize_(layer(pyg, kind), cpt.QuantConfig(aggregation=aggregation))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=aggregation == "fp")
        with cpt.precision(model, 4):
            torch.testing.assert_close(compiled(features(), edges()), model(features(), edges()))
