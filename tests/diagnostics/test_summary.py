"""``summary`` of a model and its inputs, against ``check``, which runs and watches a step."""

import pytest
import torch
from helpers import FunctionModule
from torch import nn

import cpt_core as cpt


def net(attend=lambda _, q, k: q @ k.mT):
    """Return a model with a layer, and matmuls in a child and in the model."""

    def forward(m, x):
        h = m.linear(x)
        return m.attend(h, h) @ h

    return FunctionModule(
        forward, linear=nn.Linear(8, 6), attend=FunctionModule(attend)
    )


X = (torch.randn(3, 5, 8),)
MACS = {"": 3 * 5 * 5 * 6, "linear": 3 * 5 * 8 * 6, "attend": 3 * 5 * 6 * 5}


@pytest.mark.parametrize(
    "float32", [(), ("attend",), ("linear",), ("attend", "linear")]
)
def test_summary_shares_match_check(float32):
    model = cpt.quantize_(net(), cpt.QuantConfig(float32=float32))
    found = cpt.summary(model, X)
    assert {r.name: r.share for r in found.rows} == {
        k: n / sum(MACS.values()) for k, n in MACS.items()
    }
    plain = {p.layer: p.macs / sum(MACS.values()) for p in cpt.check(model, X).float32}
    assert {
        k.removesuffix(" (products)"): v for k, v in found.float32_shares.items()
    } == plain
    assert {r.name: r.reason for r in found.float32} == dict.fromkeys(
        float32, "not selected by quantize_"
    )
    assert set(plain) == set(float32)


def test_summary_prints_float32_share():
    model = cpt.quantize_(net(), cpt.QuantConfig(float32=("attend",)))
    lines = str(cpt.summary(model, X)).splitlines()
    assert any(
        line.startswith("attend ")
        and line.endswith("27.8%  float32 (not selected by quantize_)")
        for line in lines
    )
    assert (
        "27.8% of the forward MACs of matmuls and convolutions run in float32: attend (products) 27.8%"
        in lines
    )
    assert "MACs" not in str(cpt.summary(model))


def test_summary_counts_intercepted_functional_matmul():
    model = net(
        lambda _, q, k: getattr(torch, "".join(("mat", "mul")))(q, k.mT)
    )  # which its code does not name
    found = cpt.summary(cpt.quantize_(model), X)
    assert [(r.quantized, r.share) for r in found.rows if r.name == "attend"] == [
        (True, 450 / 1620)
    ]
    assert found.float32_shares == {}
    assert cpt.check(model, X).quantized_share == 1


def test_summary_of_unconverted_model_is_float32():
    found = cpt.summary(net(), X)
    assert sum(found.float32_shares.values()) == 1
    assert not found.quantized


def recurrent():
    return FunctionModule(
        lambda m, x: m.head(m.norm(m.rnn(x)[0])),
        rnn=nn.LSTM(8, 6),
        norm=nn.LayerNorm(6),
        head=nn.Linear(6, 4),
    )


def convolutional():
    def forward(m, x):
        return m.head(m.norm(m.conv(x)).mean(-1))

    return FunctionModule(
        forward, conv=nn.Conv1d(5, 4, 3), norm=nn.BatchNorm1d(4), head=nn.Linear(4, 3)
    )


def graph():
    edges = cpt.Graph.from_edges(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), 3)
    conv = cpt.GraphConv(8, 6)
    return FunctionModule(
        lambda m, x: m.head(m.conv(edges, x[:, 0])), conv=conv, head=nn.Linear(6, 4)
    )


@pytest.mark.parametrize("make", [net, recurrent, convolutional, graph])
def test_summary_ledger_and_check_agree(make):
    """Count matmuls and convolutions alone, without normalisation, gates and aggregation."""
    left_out = "head" if make is not net else "linear"
    model = cpt.quantize_(make(), cpt.QuantConfig(float32=(left_out,)))
    checked, found = cpt.check(model, X, invariances=False), cpt.summary(model, X)
    with cpt.BitOpsLedger(model) as ledger, cpt.precision(model, 4):
        model(*X)
    head = sum(e.macs for e in checked.float32)
    shares = {
        left_out: head / sum(e.macs for e in checked.operations if not e.backward)
    }
    assert (
        found.float32_shares
        == cpt.count_bitops(model, X, cpt.StaticSchedule(4, 1)).float32
        == ledger.float32
        == shares
    )
    assert checked.quantized_share == pytest.approx(1 - shares[left_out], abs=1e-12)
    assert 0.01 < shares[left_out] < 0.6
    norms = [row.share for row in found.rows if row.name == "norm"]
    assert norms in ([], [0.0])
