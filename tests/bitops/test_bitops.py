"""Bit operations by hand and against reference counts, and equality of ledger and plan."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel

from cpt_core.bitops.conventions import CONVENTIONS
from cpt_core.bitops.plan import count_bitops, count_step
from cpt_core.models import MODELS
from cpt_core.models.lstm_lm import LanguageModel
from cpt_core.models.mobilenet import InvertedResidual
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule
from cpt_extras.diagnostics.ledger import BitOpsLedger
from cpt_extras.diagnostics.uncounted import uncounted_functions
from cpt_extras.search.custom_schedules import FunctionSchedule


def images(size, batch=1):
    return (torch.empty(batch, 3, size, size),)


def words(*shape):
    return torch.empty(shape, dtype=torch.int64)


# row of flops.csv -> (model, inputs)
REFERENCE = {
    "cifar10_resnet74": (lambda: MODELS["resnet74"](3, 32, 10), lambda: images(32)),
    "cifar10_mobilenetv2": (
        lambda: MODELS["mobilenetv2"](3, 32, 10),
        lambda: images(32),
    ),
    "imagenet_resnet18": (
        lambda: MODELS["resnet18"](3, 224, 1000),
        lambda: images(224),
    ),
    "ptb_lstm": (
        lambda: LanguageModel(10_000, 800, 800),
        lambda: (words(35, 20), None),
    ),
    "xnli_mbert": (
        lambda: BertModel(BertConfig()),
        lambda: (words(1, 128),),
    ),  # the vocabulary plays no part
}
KINDS = {
    "conv": "conv2d",
    "batch_norm": "batch_norm",
    "linear": "linear lstm",
    "layer_norm": "layer_norm",
}
KINDS["hand_added"] = "gates"


@pytest.mark.parametrize("name", REFERENCE)
def test_forward_macs_equal_reference(name, reference_macs):
    row = reference_macs.get(name)
    if row is None:
        pytest.skip(f"{name} is not in this reference")
    make, given = REFERENCE[name]
    with torch.device("meta"):
        calls = count_step(make(), given())
    # the authors' counter does not see the products of attention
    assert sum(c.macs for c in calls if c.part != "products") == int(
        row["forward_count"]
    )
    for part in row["breakdown"].split(";"):
        kind, count = part.split("=")
        assert sum(c.macs for c in calls if c.function in KINDS[kind].split()) == int(
            count
        )


def test_count_bitops_conventions_match_hand_counts():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    quantize_(model, QuantConfig(float32=("2",)))
    schedule = make_schedule("LR", q_min=3, q_max=8, total_steps=10, n_cycles=1)
    q = schedule.bits()
    x = torch.empty(5, 4)
    paper = count_bitops(model, (x,), schedule, convention="paper")
    assert paper.total == sum((60 + 30) * int(b * b + 2 * b * 8) for b in q) / 1024
    per_op = count_bitops(model, (x,), schedule, convention="per_op")
    # the first layer needs no error product; the second stays in float32
    assert (
        per_op.total == sum(60 * int(b * b + b * 8) + 3 * 30 * 1024 for b in q) / 1024
    )
    assert per_op.by_layer.keys() == {"0", "2"}
    assert sum(per_op.by_layer.values()) == pytest.approx(per_op.total)
    assert sum(per_op.by_pass.values()) == pytest.approx(per_op.total)
    assert uncounted_functions(model, (x,)) == {"relu": 15}


def test_count_bitops_accepts_gradient_bits():
    model = quantize_(nn.Sequential(nn.Linear(4, 3)))
    schedule = make_schedule("STATIC", q_max=6, total_steps=2)
    plan = count_bitops(model, (torch.empty(1, 4),), schedule, q_grad=8)
    # forward and weight gradient; the input needs none. The paper's convention prices all three
    assert plan.total == 2 * 12 * (36 + 48) / 1024
    assert plan.by_convention["paper"] == 2 * 12 * (36 + 2 * 48) / 1024


RISING = FunctionSchedule(lambda u: 3 + 5 * u, total_steps=3)
PER_LAYER = {
    name: make_schedule("STATIC", q_max=q, total_steps=3)
    for name, q in (("0", 4), ("*", 8))
}
# one network of every kind: deeper ones repeat its blocks
MODELS_TO_TRAIN = {
    "mlp": (lambda: MODELS["mlp6"](1, 8, 10), (4, 1, 8, 8), "cifar", RISING),
    "depthwise block": (
        lambda: nn.Sequential(InvertedResidual(4, 8, 6, 1)),
        (2, 4, 6, 6),
        "all",
        RISING,
    ),
    "a schedule per layer": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        (5, 4),
        "all",
        PER_LAYER,
    ),
}


@pytest.mark.parametrize("name", MODELS_TO_TRAIN)
def test_plan_equals_ledger(name):
    make, shape, preset, schedule = MODELS_TO_TRAIN[name]
    model = quantize_(make(), preset)
    scheduler = PrecisionScheduler(model, schedule)
    x = torch.randn(shape)
    with BitOpsLedger(model) as ledger:
        for _ in range(3):
            model.train()
            model(x).sum().backward()
            scheduler.step()
            model.eval()
            with torch.no_grad():
                model(x)  # evaluation is not training: it must not count
    for convention in CONVENTIONS:
        plan = count_bitops(model.train(), (x,), schedule, convention=convention)
        assert ledger.total(convention) == plan.total
        assert ledger.by_layer(convention) == plan.by_layer
        assert ledger.by_pass(convention) == plan.by_pass
        assert ledger.costs(convention) == pytest.approx(plan.costs)
        assert ledger.table(convention).loc["total"].tolist() == pytest.approx(
            list(plan.costs.values())
        )
        assert min(plan.costs.values()) > 0


def test_ledger_counts_every_backward_pass():
    model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    with precision(model, bits=4, q_grad=8), BitOpsLedger(model) as ledger:
        y = model(torch.ones(2, 4))
        spent = []
        for loss in (y.sum(), y.square().sum()):
            loss.backward(retain_graph=True)
            spent.append(dict(ledger.by_pass("per_op")))
    forward, error, weight = (
        n * q / 1024 for n, q in ((2 * 18, 16), (2 * 6, 32), (2 * 18, 32))
    )
    assert spent == [
        {"forward": forward, "error": n * error, "weight": n * weight} for n in (1, 2)
    ]


def test_ledger_prices_float32_layers_at_active_bits():
    """Price float32 layers at the bits of the model, which change between two passes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    quantize_(model, QuantConfig(float32=("1",)))
    with BitOpsLedger(model) as ledger, torch.no_grad():
        for bits, so_far in ((4, 4**2), (8, 4**2 + 8**2), (4, 2 * 4**2 + 8**2)):
            with precision(model, bits):
                model(torch.ones(1, 4))
            assert ledger.bitops("paper")["1"]["forward"] == 16 * so_far


def test_ledger_omits_missing_backward_pass():
    model = quantize_(nn.Sequential(nn.Linear(4, 3)))
    x = torch.randn(2, 4)
    with precision(model, bits=4, q_grad=8), BitOpsLedger(model) as ledger:
        model(x)  # no backward pass
        assert ledger.by_pass("per_op") == {
            "forward": 24 * 16 / 1024,
            "error": 0,
            "weight": 0,
        }
        model(x).sum().backward()
        assert ledger.by_pass("per_op") == {
            "forward": 48 * 16 / 1024,
            "error": 0,
            "weight": 24 * 32 / 1024,
        }
    model_is_unwatched = ledger.total()
    with precision(model, bits=4):
        model(x).sum().backward()
    assert ledger.total() == model_is_unwatched


def test_count_bitops_rejects_models_without_matmul():
    with pytest.raises(ValueError, match="nothing to count in Sequential"):
        count_bitops(nn.Sequential(nn.ReLU()), (torch.empty(1, 4),))


@pytest.mark.parametrize(("affine", "training", "fixed"), [(True, 5, 2), (False, 4, 1)])
def test_batch_norm_macs_follow_mode_and_affine(affine, training, fixed):
    norm = nn.Sequential(
        nn.BatchNorm2d(2, affine=affine), nn.Conv2d(2, 1, 1)
    )  # something must be trained
    x = torch.empty(1, 2, 3, 3)
    assert count_bitops(norm, (x,)).macs["0"] == training * 18
    assert count_bitops(norm.eval(), (x,)).macs["0"] == fixed * 18


# --- attention and LSTMs ----------------------------------------------------------------------------

TINY = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    num_labels=3,
)


def test_attention_macs_excluded_from_paper_convention():
    """Price attention at its bits per operation, and exclude it from the paper's total."""
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
def test_ledger_counts_gradient_through_last_state(bits):
    lstm = quantize_(nn.LSTM(5, 4))
    lstm.precision.set_bits(bits, bits)
    totals = []
    for use in (
        lambda y, h, c: y,
        lambda y, h, c: h,
        lambda y, h, c: y.sum() + h.sum() + c.sum(),
    ):
        with BitOpsLedger(lstm) as ledger:
            y, (h, c) = lstm(torch.randn(7, 3, 5))
            use(y, h, c).sum().backward()
        totals.append(ledger.total("per_op"))
    assert totals[0] == totals[1] == totals[2] > 0


def test_lstm_first_input_needs_no_gradient():
    """Skip the input gradient of the first matmul, and count it for the recurrence."""
    plan = count_bitops(nn.LSTM(5, 4), (torch.empty(7, 3, 5),), convention="per_op")
    inner, first = 21 * 16 * 4, 21 * 16 * 5
    assert plan.by_pass["forward"] == inner + first + 4 * (27 * 21 + 15)
    assert plan.by_pass["error"] == inner + 4 * (27 * 21 + 15)
    assert plan.by_pass["weight"] == inner + first
    assert plan.total == pytest.approx(sum(plan.by_pass.values()))
