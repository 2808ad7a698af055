"""``summary`` of models with inputs, and its agreement with ``check``, ``count_bitops`` and the ledger."""

import pytest
import torch
from helpers import FunctionModule
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.fallback_reasons import FallbackReason

X = torch.randn(3, 5, 8)


def attention():
    """Return a model with a layer, and matmuls in a child and in the model."""

    def forward(m, x):
        h = m.head(x)
        return m.attend(h, h) @ h

    attend = FunctionModule(lambda m, q, k: getattr(torch, "matmul")(q, k.mT))  # noqa: B009
    return FunctionModule(forward, head=nn.Linear(8, 6), attend=attend)


def recurrent():
    return FunctionModule(
        lambda m, x: m.head(m.norm(m.rnn(x)[0])),
        rnn=nn.LSTM(8, 6),
        norm=nn.LayerNorm(6),
        head=nn.Linear(6, 4),
    )


def convolutional():
    return FunctionModule(
        lambda m, x: m.head(m.norm(m.conv(x)).mean(-1)),
        conv=nn.Conv1d(5, 4, 3),
        norm=nn.BatchNorm1d(4),
        head=nn.Linear(4, 3),
    )


def graph():
    edges = cpt.Graph.from_edges(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), 3)
    return FunctionModule(
        lambda m, x: m.head(m.conv(edges, x[:, 0])),
        conv=cpt.GraphConv(8, 6),
        head=nn.Linear(6, 4),
    )


@pytest.mark.parametrize("make", [attention, recurrent, convolutional, graph])
def test_summary_report(make, golden):
    """Show shares of MACs and reasons; normalisation, gates and aggregation have none."""
    model = cpt.quantize_(make(), cpt.QuantConfig(float32=("head",)))
    texts = [str(cpt.summary(model, inputs)) for inputs in (None, (X,))]
    texts.append(f"unconverted:\n{cpt.summary(make(), (X,))}\n")
    golden(f"summary/{make.__name__}.txt", "\n\n".join(texts))


@pytest.mark.parametrize(
    ("make", "float32"),
    [
        (attention, ()),
        (attention, ("head",)),
        (attention, ("attend",)),
        (attention, ("attend", "head")),
        (recurrent, ("head",)),
        (convolutional, ("head",)),
        (graph, ("head",)),
    ],
)
def test_summary_agrees_with_counts(make, float32):
    """Count the float32 shares that check, count_bitops and the ledger count."""
    model = cpt.quantize_(make(), cpt.QuantConfig(float32=float32))
    checked = cpt.check(model, (X,), invariances=False)
    with cpt.BitOpsLedger(model) as ledger, cpt.precision(model, 4):
        model(X)
    total = sum(e.macs for e in checked.operations if not e.backward)
    shares = {e.layer: e.macs / total for e in checked.float32}
    assert set(shares) == set(float32)
    counted = cpt.count_bitops(model, (X,), cpt.StaticSchedule(4, 1))
    for found in (
        cpt.summary(model, (X,)).float32_shares,
        counted.float32,
        ledger.float32,
    ):
        assert {k.removesuffix(" (matmuls)"): v for k, v in found.items()} == shares
    assert checked.quantized_share == pytest.approx(1 - sum(shares.values()), abs=1e-12)


def single_channel():
    """Return a model with a convolution over one channel in its own forward."""

    def forward(m, x):
        return m.head(torch.nn.functional.conv1d(x[:, :1], m.weight))

    weight = nn.Parameter(torch.randn(4, 1, 3))
    return FunctionModule(forward, weight=weight, head=nn.Linear(6, 3))


def test_summary_names_layers_without_quantized_matmul():
    """A sum over one element runs in float32, so that a module with no other matmul is not called quantised."""
    model = cpt.quantize_(single_channel())
    report = cpt.summary(model, (X,))
    reason = FallbackReason.NO_QUANTIZED_MATMUL.describe()
    assert [(row.name, row.reason) for row in report.float32] == [("", reason)]
    assert [row.name for row in report.quantized] == ["head"]
    checked = cpt.check(model, (X,), invariances=False)
    assert {e.layer for e in checked.float32} == {""}
