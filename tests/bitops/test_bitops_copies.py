"""Counting on a copy of the model: packed sequences, parametrised weights, cached tensors and control flow."""

from types import SimpleNamespace

import dgl
import pytest
import torch
from helpers import FunctionModule, refused
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

from cpt_core.bitops.conventions import CONVENTIONS
from cpt_core.bitops.plan import count_bitops
from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.scheduler import precision
from cpt_extras.diagnostics.check import check
from cpt_extras.diagnostics.ledger import BitOpsLedger


def state_of(model):
    return [t.clone() for t in (*model.state_dict().values(), torch.get_rng_state())]


def unchanged(model, before):
    return all(torch.equal(a, b) for a, b in zip(state_of(model), before, strict=True))


# --- packed sequences -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [nn.LSTM, nn.GRU, nn.RNN, lambda *sizes: quantize_(nn.LSTM(*sizes))]
)
def test_count_bitops_accepts_packed_sequences(make):
    model = make(5, 4)
    packed = pack_sequence(
        [torch.randn(length, 5) for length in (4, 7, 2)], enforce_sorted=False
    )
    for module in model.modules():
        if hasattr(module, "set_bits"):
            module.set_bits(None, None)
    with BitOpsLedger(model) as ledger:
        model(packed)[0].data.sum().backward()
    for convention in CONVENTIONS:
        plan = count_bitops(model, (packed,), convention=convention)
        assert plan.by_pass["forward"] == ledger.by_pass(convention)["forward"]
        weights = sum(
            p.numel() for n, p in model.named_parameters() if n.startswith("weight")
        )
        assert {**plan.macs, **plan.unpriced}[
            "" if isinstance(model, nn.LSTM) else "(products)"
        ] == 13 * weights
        assert plan.macs.get("(gates)", 4 * (27 * 13 + 5 * 3)) == 4 * (
            27 * 13 + 5 * 3
        )  # 13 steps of 3 sequences


# --- weights that are computed --------------------------------------------------------------------

COMPUTED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm, old": nn.utils.weight_norm,
    "spectral_norm, old": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings(
    "ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning"
)
@pytest.mark.parametrize("name", COMPUTED)
def test_parametrised_layers_cost_like_plain_layers(name):
    bare = nn.Sequential(nn.Linear(8, 4))
    x = torch.randn(3, 8, 8)
    expected = count_bitops(bare, (x,), convention="per_op").bitops["0"]
    model = nn.Sequential(COMPUTED[name](nn.Linear(8, 4)))
    model(x)  # the old forms keep the weight that they computed last
    before = state_of(model)
    assert count_bitops(model, (x,), convention="per_op").bitops["0"] == expected
    assert unchanged(model, before)
    with BitOpsLedger(model) as ledger:
        model(x).sum().backward()
    assert ledger.by_layer("per_op")["0"] == sum(expected.values()) / 32**2


# --- models that keep something -------------------------------------------------------------------


def keeping(where):
    """Return a model that caches what it computed, as RAFT caches its pyramid."""

    def forward(model, x):
        y = model.layer(x)
        model.kept = where(y)
        return y

    return FunctionModule(forward, layer=nn.Linear(4, 4))


def test_count_bitops_copies_models_with_cached_tensors():
    model, x = keeping(lambda y: [y, (y, {"a": y})]), torch.randn(2, 4)
    before = count_bitops(model, (x,))
    model(x)
    assert count_bitops(model, (x,)) == before
    assert model.layer.weight.device.type == "cpu"


def test_count_bitops_rejects_uncopyable_models():
    model, x = keeping(lambda y: SimpleNamespace(value=y)), torch.randn(2, 4)
    model(x)
    refused(
        r"cannot copy FunctionModule, .* remove what the model keeps from an earlier forward",
        count_bitops,
        model,
        (x,),
    )


# --- models that ask for data ---------------------------------------------------------------------


def choosing():
    """Return a model whose second layer receives only the positive rows."""

    def forward(model, x):
        x = nn.functional.dropout(model.norm(model.first(x.add_(1))), 0.5)
        return model.second(x[(x[:, 0] > -9).nonzero().squeeze(1)])

    return FunctionModule(
        forward, first=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), second=nn.Linear(4, 2)
    )


def test_count_bitops_runs_data_dependent_models():
    model, x = choosing(), torch.randn(6, 4)
    given, before = x.clone(), state_of(model)
    plan = count_bitops(model, (x,))
    assert plan.macs == {"first": 6 * 16, "norm": 5 * 24, "second": 6 * 8}
    assert unchanged(model, before)
    assert torch.equal(x, given)


@pytest.mark.parametrize("where", ["model", "inputs"])
def test_count_bitops_requires_real_inputs(where):
    """Explain that a data-dependent model and its inputs need real tensors."""
    model, x = choosing(), torch.randn(6, 4)
    model, x = (model.to("meta"), x) if where == "model" else (model, x.to("meta"))
    with pytest.raises(
        ValueError,
        match=r"^FunctionModule does not run on shapes alone .*; give the model and its inputs real",
    ):
        count_bitops(model, (x,))


def test_count_bitops_passes_on_shape_errors():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        count_bitops(nn.Sequential(nn.Linear(2, 2)), (torch.ones(1, 3),))


def test_plan_equals_ledger_for_torchvision_detector():
    model = quantize_(
        RetinaNet(
            resnet_fpn_backbone(backbone_name="resnet18", weights=None), 3, 32, 32
        )
    )
    images, targets = (
        [torch.rand(3, 32, 32)],
        [{"boxes": torch.tensor([[1.0, 1, 9, 9]]), "labels": torch.tensor([1])}],
    )
    plan = count_bitops(model, (images, targets))
    with precision(model, "float"), BitOpsLedger(model) as ledger:
        model(images, targets)
    assert plan.unpriced["backbone.fpn (upsampling)"] == 256 * (8 * 8 + 4 * 4 + 2 * 2)
    assert ledger.by_pass()["forward"] == plan.by_pass["forward"] > 0


EDGES = ([0, 1, 2, 0], [1, 2, 0, 2])
LAYERS_OF_DGL = {
    # MACs of a forward pass on three nodes with six features each
    "SAGE pool": (lambda: dgl.nn.SAGEConv(6, 4, "pool"), 3 * (36 + 24 + 24)),
    "SAGE mean": (lambda: dgl.nn.SAGEConv(6, 4, "mean"), 3 * 48),
    "GAT": (lambda: dgl.nn.GATConv(6, 4, 2), 3 * 48),
    # an edge is a step of a sequence, a node has a sequence: products, gates, and two linear layers
    "SAGE lstm": (
        lambda: dgl.nn.SAGEConv(6, 4, "lstm"),
        4 * 4 * 6 * (6 + 6) + 6 * (27 * 4 + 5 * 3) + 2 * 3 * 24,
    ),
}


@pytest.mark.parametrize("name", LAYERS_OF_DGL)
def test_dgl_layers_have_expected_macs(name):
    make, macs = LAYERS_OF_DGL[name]
    layer, graph, x = make(), dgl.graph(EDGES), torch.randn(3, 6)
    plan = count_bitops(layer, (graph, x), convention="paper")
    assert plan.forward_macs == macs
    with BitOpsLedger(layer) as ledger:
        layer(graph, x)
    assert ledger.by_pass("paper")["forward"] == macs
    assert ledger.unpriced == plan.unpriced


def test_dgl_graph_conv_counts_aggregation_once_converted():
    layer, graph, x = dgl.nn.GraphConv(6, 4), dgl.graph(EDGES), torch.randn(3, 6)
    plain = count_bitops(layer, (graph, x), convention="paper")
    assert (plain.forward_macs, plain.unpriced) == (
        0,
        {"(products)": 3 * 24},
    )  # its sum is no function of torch
    plan = count_bitops(quantize_(layer), (graph, x), convention="paper")
    assert (plan.forward_macs, plan.unpriced) == (3 * 24, {"(aggregation)": 4 * 4})


@pytest.mark.parametrize(
    ("sizes", "sums"), [((6, 9), 3 * 6), ((9, 6), 4 * 9)]
)  # the narrower side is summed
def test_dgl_sage_accepts_bipartite_features(sizes, sums):
    layer, graph = (
        quantize_(dgl.nn.SAGEConv(sizes, 7, "mean")),
        dgl.create_block(([0, 1, 3, 0], [1, 2, 0, 2])),
    )
    nodes = torch.randn(4, sizes[0]), torch.randn(3, sizes[1])
    plan = count_bitops(layer, (graph, nodes))
    assert plan.macs[""] == 7 * (sums + 3 * sizes[1])
    assert check(layer, (graph, nodes)).ok
