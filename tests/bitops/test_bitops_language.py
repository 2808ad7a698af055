"""Operations of LSTMs and attention: by hand, against the reference, and what the ledger sees of them."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel

from cpt_core.bitops.ledger import BitOpsLedger
from cpt_core.bitops.plan import count_bitops
from cpt_core.bitops.trace import trace
from cpt_core.models.lstm_lm import LanguageModel
from cpt_core.quantization.convert import quantize_
from cpt_core.schedules.make import make_schedule

TINY = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, num_labels=3
)


def macs_by_kind(calls):
    return {kind: sum(c.macs for c in calls if c.kind == kind) for kind in dict.fromkeys(c.kind for c in calls)}


def test_the_language_model_equals_the_reference(reference_macs):
    with torch.device("meta"):
        model, inputs = LanguageModel(10_000, 800, 800), (torch.empty(35, 20, dtype=torch.int64), None)
    plan = count_bitops(model, inputs, convention="paper")
    by_hand = 700 * 4 * 800 * (800 + 800) + 700 * 800 * 10_000
    assert macs_by_kind(trace(model, inputs)[0]) == {
        "LSTM": 700 * 4 * 800 * 1600, "gates": 15_200_000, "Linear": 700 * 800 * 10_000,
    }  # fmt: skip
    assert plan.forward_macs == by_hand + 15_200_000
    assert plan.forward_macs == int(reference_macs["ptb_lstm"]["forward_count"])
    assert "embedding" in plan.uncounted


def test_bert_equals_the_reference(reference_macs):
    with torch.device("meta"):
        model = BertModel(BertConfig())  # the vocabulary plays no part
    ids = torch.empty(1, 128, dtype=torch.int64, device="meta")
    plan = count_bitops(model, (ids, ids), convention="paper")
    assert plan.forward_macs == int(reference_macs["xnli_mbert"]["forward_count"])
    linear = sum(macs for layer, macs in plan.macs.items() if not layer.endswith("LayerNorm"))
    assert linear == 12 * 128 * (4 * 768**2 + 2 * 768 * 3072) + 768**2
    attention = {f"encoder.layer.{i}.attention.self (products)": 2 * 128 * 128 * 768 for i in range(12)}
    assert plan.unpriced == attention  # the authors' counter does not see it


def test_attention_is_priced_at_its_bits_per_op_and_left_out_of_the_paper_s():
    model = quantize_(BertForSequenceClassification(TINY))
    ids = torch.ones(3, 9, dtype=torch.int64)
    schedule = make_schedule("CR", q_min=3, q_max=8, total_steps=40, n_cycles=2)
    per_op = count_bitops(model, (ids, ids), schedule, convention="per_op")
    bits = schedule.bits()
    expected = 2 * 3 * 9 * 9 * 16 * int((bits**2 + 2 * bits * 8).sum()) / 32**2
    assert per_op.by_layer["bert.encoder.layer.1.attention.self (products)"] == expected
    paper = count_bitops(model, (ids, ids), schedule, convention="paper")
    assert not [name for name in paper.by_layer if "(products)" in name]


@pytest.mark.parametrize("bits", [None, 4])
def test_the_ledger_sees_a_gradient_through_the_last_state_alone(bits):
    lstm = quantize_(nn.LSTM(5, 4))
    lstm.precision.set_bits(bits, bits)
    totals = []
    for use in (lambda y, h, c: y, lambda y, h, c: h, lambda y, h, c: y.sum() + h.sum() + c.sum()):
        with BitOpsLedger(lstm) as ledger:
            y, (h, c) = lstm(torch.randn(7, 3, 5))
            use(y, h, c).sum().backward()
        totals.append(ledger.total("per_op"))
    assert totals[0] == totals[1] == totals[2] > 0


def test_error_products_of_an_lstm():
    """The first input product needs none when its input is data; the recurrence always does."""
    plan = count_bitops(nn.LSTM(5, 4), (torch.empty(7, 3, 5),), convention="per_op")
    inner, first = 21 * 16 * 4, 21 * 16 * 5
    assert plan.by_pass["forward"] == inner + first + 4 * (27 * 21 + 15)
    assert plan.by_pass["error"] == inner + 4 * (27 * 21 + 15)
    assert plan.by_pass["weight"] == inner + first
    assert np.isclose(plan.total, sum(plan.by_pass.values()))
