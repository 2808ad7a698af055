"""Bit operations of a plan: by hand, against torch's FLOP counter and reference counts."""

from types import SimpleNamespace

import dgl
import pytest
import torch
import transformers as hf
from helpers import FunctionModule, refused
from operation_samples import (
    BERT_SIZES,
    MODELS,
    bert,
    parent_of_weights,
    random,
    sequences,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.bert.modeling_bert import BertSelfAttention

import cpt_core as cpt
from cpt_core.bitops.conventions import CONVENTIONS
from cpt_core.bitops.counting import tensors_in
from cpt_core.bitops.plan import run_step
from cpt_core.models import MODELS as PAPER_MODELS
from cpt_core.models.lstm_lm import LanguageModel
from cpt_core.quantization.convert import QuantConfig, is_convertible
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.formats.costs import COSTS, Operands
from cpt_extras.formats.ladder import LADDERS, FormatLadder
from cpt_extras.formats.prices import layer_prices
from cpt_extras.search.custom_schedules import FunctionSchedule, TableSchedule

# that some layers stay in float32 is what they are here for
pytestmark = [
    pytest.mark.filterwarnings("ignore::cpt_core.QuantizationWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported"),
]


def count(model, *inputs, convention="per_op"):
    """Return the plan of one step of a float model."""
    return cpt.count_bitops(model, inputs, convention=convention)


def loss_of(output):
    output = dict(output) if hasattr(output, "keys") else output
    tensors = [t for t in tensors_in(output) if t.requires_grad]
    return sum(t.float().square().sum() for t in tensors)


# --- MACs of forward passes ---------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_plan_counts_every_matmul_and_equals_ledger(name):
    model, inputs = MODELS[name].build()
    macs = MODELS[name].macs
    if macs is None:
        with FlopCounterMode(display=False) as flops:
            model(*inputs)
        macs = flops.get_total_flops() / 2
    calls = run_step(model, inputs).operations
    assert sum(c.macs for c in calls if c.part not in ("norm", "gates")) == macs

    is_quantized = any(map(is_convertible, model.modules()))
    bits = (lambda u: 3 + 5 * u) if is_quantized else (lambda u: 32)
    schedule = FunctionSchedule(bits, 2, "progress")
    if is_quantized:
        scheduler = cpt.PrecisionScheduler(cpt.quantize_(model), schedule)
    with cpt.BitOpsLedger(model) as ledger:
        for _ in range(2):
            loss_of(model(*inputs)).backward()
            if is_quantized:
                scheduler.step()
    paper, per_op = (
        cpt.count_bitops(model, inputs, schedule, convention=c) for c in CONVENTIONS
    )
    assert not per_op.unpriced
    assert not [layer for layer in paper.macs if layer.endswith("(matmuls)")]
    assert per_op.forward_macs == paper.forward_macs + sum(paper.unpriced.values())
    for plan in (paper, per_op):
        assert ledger.by_layer(plan.convention) == plan.by_layer
        assert ledger.by_pass(plan.convention) == plan.by_pass
    unpriced_of_two_steps = {layer: 2 * n for layer, n in paper.unpriced.items()}
    assert ledger.unpriced == unpriced_of_two_steps


def picture(size):
    return (torch.empty(1, 3, size, size),)


def paper_model(name, size, classes):
    return lambda: PAPER_MODELS[name](3, size, classes), lambda: picture(size)


def words(*shape):
    return torch.empty(shape, dtype=torch.int64)


REFERENCE = {  # row of flops.csv -> model, inputs
    "cifar10_resnet74": paper_model("resnet74", 32, 10),
    "cifar10_mobilenetv2": paper_model("mobilenetv2", 32, 10),
    "imagenet_resnet18": paper_model("resnet18", 224, 1000),
    "ptb_lstm": (
        lambda: LanguageModel(10_000, 800, 800),
        lambda: (words(35, 20), None),
    ),
    # the vocabulary plays no part
    "xnli_mbert": (lambda: hf.BertModel(hf.BertConfig()), lambda: (words(1, 128),)),
}
FUNCTIONS = {  # name in the reference -> functions
    "conv": ["conv2d"],
    "batch_norm": ["batch_norm"],
    "linear": ["linear", "lstm"],
    "layer_norm": ["layer_norm"],
    "hand_added": ["gates"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCE)
def test_forward_macs_equal_reference(name, reference_macs):
    row = reference_macs.get(name)
    if row is None:
        pytest.skip(f"{name} is not in this reference")
    make, inputs = REFERENCE[name]
    with torch.device("meta"):
        calls = run_step(make(), inputs()).operations
    # the authors' counter does not see the matmuls of attention
    total = sum(c.macs for c in calls if c.part != "matmuls")
    assert total == int(row["forward_count"])
    for part in row["breakdown"].split(";"):
        kind, macs = part.split("=")
        functions = FUNCTIONS[kind]
        assert sum(c.macs for c in calls if c.function in functions) == int(macs)


def ring():
    """Return a graph of four nodes with an edge from the neighbour and a self-loop."""
    return cpt.Graph(torch.arange(0, 9, 2), torch.tensor([0, 3, 0, 1, 1, 2, 2, 3]))


SMALL_ATTENTION = hf.BertConfig(hidden_size=6, num_attention_heads=2)
# 5 steps of 2 sequences, 3 wide, 4 units: matmuls with inputs and states, gates
LSTM_CALLS = [
    (480, 30, 48, 160),
    (640, 40, 64, 160),
    (4 * (27 * 10 + 5 * 2), 160, 0, 80),
]
# two layers both ways: matmuls with the inputs of both layers, then 4 with states
DEEP_LSTM_CALLS = [
    (960, 30, 96, 320),
    (10 * 2 * 16 * 8, 10 * 8, 2 * 16 * 8, 10 * 2 * 16),
    *[(10 * 64, 10 * 4, 64, 10 * 16)] * 4,
    (16 * (27 * 10 + 5 * 2), 640, 0, 320),
]
# 3 linear layers on 2 x 5 tokens; scores and context of 2 heads
ATTENTION_CALLS = [*[(360, 60, 36, 60)] * 3, (300, 60, 60, 100), (300, 100, 60, 60)]
BY_HAND = {  # model, inputs, and of every call: MACs, elements of operands and output
    "linear": (lambda: nn.Linear(7, 3), random((2, 5, 7)), [(210, 70, 21, 30)]),
    # outputs x kernel x input channels per group
    "grouped conv, stride 2": (
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        random((2, 4, 6, 6)),
        [(108 * 9 * 2, 288, 108, 108)],
    ),
    "layer norm": (lambda: nn.LayerNorm(7), random((2, 7)), [(4 * 14, 14, 7, 14)]),
    "batch norm": (lambda: nn.BatchNorm1d(3), random((5, 3)), [(5 * 15, 15, 3, 15)]),
    "lstm": (lambda: nn.LSTM(3, 4), random((5, 2, 3)), LSTM_CALLS),
    "deep lstm": (
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
        random((5, 2, 3)),
        DEEP_LSTM_CALLS,
    ),
    # its first step's matmul with a hidden state has no input gradient
    "gru": (
        lambda: nn.GRU(3, 4),
        random((5, 2, 3)),
        [(360, 30, 36, 120), (480 * 4 // 5, 40, 48, 120), (480 // 5, 0, 0, 0)],
    ),
    # the narrower side is summed: after the matmul, and before it
    "graph": (
        lambda: cpt.GraphConv(5, 3),
        lambda: (ring(), torch.empty(4, 5)),
        [(60, 20, 15, 12), (24, 12, 8, 12)],
    ),
    "sage": (
        lambda: cpt.SAGEConv(3, 5),
        lambda: (ring(), torch.empty(4, 3)),
        [(24, 12, 8, 12), (60, 12, 15, 20), (60, 12, 15, 20)],
    ),
    "attention": (
        lambda: BertSelfAttention(SMALL_ATTENTION),
        random((2, 5, 6)),
        ATTENTION_CALLS,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_run_step_matches_macs_and_elements(name):
    make, inputs, expected = BY_HAND[name]
    calls = run_step(make(), inputs()).operations
    assert [(c.macs, *c.elements) for c in calls if c.macs] == expected


@pytest.mark.parametrize(
    ("is_affine", "training", "evaluation"), [(True, 5, 2), (False, 4, 1)]
)
def test_batch_norm_macs_follow_mode_and_affine(is_affine, training, evaluation):
    norm = nn.BatchNorm2d(2, affine=is_affine)
    model = nn.Sequential(norm, nn.Conv2d(2, 1, 1))  # something must be trained
    x = torch.empty(1, 2, 3, 3)
    assert cpt.count_bitops(model, (x,)).macs["0"] == training * 18
    assert cpt.count_bitops(model.eval(), (x,)).macs["0"] == evaluation * 18


def test_lstm_first_input_needs_no_gradient():
    """Skip the input gradient of the first matmul, and count it for the recurrence."""
    plan = count(nn.LSTM(5, 4), torch.empty(7, 3, 5))
    inner, first, gates = 21 * 16 * 4, 21 * 16 * 5, 4 * (27 * 21 + 15)
    assert plan.by_pass["forward"] == inner + first + gates
    assert plan.by_pass["error"] == inner + gates
    assert plan.by_pass["weight"] == inner + first
    assert plan.total == pytest.approx(sum(plan.by_pass.values()))


class Adapted(nn.Linear):
    """Linear layer with an extra matmul, as in adapters."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Linear(2, 8)

    def forward(self, x):
        return super().forward(x) + self.up(x @ self.down.T)


class Conditioned(nn.BatchNorm1d):
    """Normalisation whose scale is the output of an inner layer."""

    def __init__(self):
        super().__init__(5)
        self.scale = nn.Linear(8, 8)

    def forward(self, x):
        return super().forward(x) * self.scale(x)


def test_count_bitops_follows_overridden_forward():
    adapted = Adapted(8, 8)
    adapted.weight.requires_grad_(False)
    model = nn.Sequential(adapted, Conditioned())
    assert cpt.count_bitops(model, sequences()).macs == {
        "0 (matmuls)": 10 * 8 * (8 + 2),
        "0.up": 10 * 2 * 8,
        "1": 2 * 5 * 8 * 5,
        "1.scale": 10 * 8 * 8,
    }
    assert cpt.check(cpt.quantize_(model), sequences()).ok


# --- MACs of gradients --------------------------------------------------------------


def gradient_macs(model, inputs, layer):
    """Return the MACs of both gradient matmuls that the plan prices at 32 bits."""
    bitops = count(model, *inputs).bitops[layer]
    return (bitops.get("error", 0) + bitops.get("weight", 0)) / 32**2


def executed_gradient_macs(model, inputs, layer):
    operations = cpt.check(model, inputs).operations
    return sum(e.macs for e in operations if e.backward and e.layer == layer)


def convolve_by_matmul(conv, x):
    """Compute a convolution as matmuls per group, whose gradients torch counts."""
    groups = conv.groups
    options = {
        "dilation": conv.dilation,
        "padding": conv.padding,
        "stride": conv.stride,
    }
    w = conv.weight.reshape(groups, len(conv.weight) // groups, -1)
    if not conv.transposed:
        columns = F.unfold(x, conv.kernel_size, **options)
        return (w @ columns.reshape(len(x), groups, w.shape[2], -1)).flatten(1, 2)
    columns = w.mT @ x.reshape(len(x), groups, w.shape[1], -1)
    size = conv(x).shape[2:]
    return F.fold(columns.flatten(1, 2), size, conv.kernel_size, **options)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("frozen", ["nothing", "input", "weight"])
@pytest.mark.parametrize(
    ("groups", "stride", "dilation"), [(1, 1, 2), (2, 2, 1), (4, 2, 2)]
)
def test_conv_gradient_macs_match_matmuls(kind, frozen, groups, stride, dilation):
    options = {"dilation": dilation, "groups": groups, "bias": False}
    conv = kind(4, 8, (3, 2), stride, 1, **options)
    conv.weight.requires_grad_(frozen != "weight")
    x = torch.randn(2, 4, 7, 6, requires_grad=frozen != "input")
    y = convolve_by_matmul(conv, x)
    torch.testing.assert_close(y.flatten(), conv(x).flatten())
    with FlopCounterMode(display=False) as flops:
        y.sum().backward()
    expected = flops.get_total_flops() // 2

    model = cpt.quantize_(nn.Sequential(nn.Conv2d(3, 4, 1), conv))
    model[0].requires_grad_(frozen != "input")
    inputs = (torch.randn(2, 3, 7, 6),)
    layer = "1" if kind is nn.Conv2d else "1 (matmuls)"
    assert executed_gradient_macs(model, inputs, "1") == expected
    assert gradient_macs(model, inputs, layer) == expected


def test_bias_gradient_has_no_matmul():
    model = cpt.quantize_(nn.Sequential(nn.Conv2d(3, 4, 1)))
    model[0].weight.requires_grad_(False)
    report = cpt.check(model, (torch.randn(2, 3, 5, 5),))
    assert [e.backward for e in report.operations] == [False]


# --- conventions, bits and costs ----------------------------------------------------


def two_layers(ladder=None):
    """Return a model whose second layer stays in float32, and its input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    config = QuantConfig(float32=("2",), ladder=ladder)
    return cpt.quantize_(model, config), torch.randn(5, 4)


def role_ladders(**ladders):
    """Return ladders by role, with None for the default of the remaining roles."""
    return dict.fromkeys(Operands._fields) | ladders


def three_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def test_count_bitops_accepts_gradient_bits():
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 3)))
    plan = cpt.count_bitops(model, (torch.empty(1, 4),), StaticSchedule(6, 2), q_grad=8)
    # forward and weight gradient; the paper's convention prices all three
    assert plan.total == 2 * 12 * (36 + 48) / 1024
    assert plan.by_convention["paper"] == 2 * 12 * (36 + 2 * 48) / 1024


def test_count_bitops_matches_hand_totals_of_costs():
    model, x = two_layers()
    schedule = TableSchedule(((4, 3), (8, 1)))
    plan = cpt.count_bitops(model, (x,), schedule, convention="per_op")
    assert plan.costs.keys() == COSTS.keys()
    # activations x weights, then gradients of 8 bits x activations
    first = {
        q: (20 * q / 8 + 12 * q / 8 + 15 * 4) + (15 + 20 * q / 8 + 12 * 4)
        for q in (4, 8)
    }
    second = 4 * 3 * (15 + 6 + 10)  # three matmuls in float32
    assert plan.costs["traffic"] == 3 * first[4] + first[8] + 4 * second
    prices = layer_prices(plan.tally)
    assert prices["0"]["traffic"] == 3 * first[4] + first[8]
    first_adders = 60 * (3 * (16 + 32 + 32 + 32) + (64 + 32) * 2)
    second_adders = 4 * 3 * 30 * (24 * 24 + 8 + 32)
    assert plan.costs["multiplier"] == first_adders + second_adders
    assert plan.costs["ace"] == 1024 * plan.total == 1024 * plan.costs["bitops"]
    assert prices["2"]["energy"] == pytest.approx(4 * 3 * 30 * 4.6)
    table = plan.table()
    assert list(table.index) == ["0", "2", "total"]
    assert list(table.columns) == [f"{name} ({c.unit})" for name, c in COSTS.items()]
    assert table.loc["total"].tolist() == pytest.approx(list(plan.costs.values()))
    assert table.loc["0"].tolist() == list(prices["0"].values())


LADDER_BITOPS = {  # ladder -> per operation: forward, weight gradient (3 steps and 1)
    "plain": (None, 3 * 1 + 16, 3 * 4 + 16),
    # level 1 is mxfp4, gradients and level 4 are bf16
    "all": (LADDERS["mx"], 3 * 16 + 256, 3 * 64 + 256),
    # the weight gradient reads its gradient and the activations
    "one role": (
        role_ladders(weight_gradient=LADDERS["mx"]),
        3 * 1 + 16,
        16 * (3 * 1 + 4),
    ),
}


@pytest.mark.parametrize("name", LADDER_BITOPS)
def test_count_bitops_prices_layers_by_ladder(name):
    ladder, forward, weight = LADDER_BITOPS[name]
    model, x = two_layers(ladder)
    schedule = TableSchedule(((1, 3), (4, 1)))
    plan = cpt.count_bitops(model, (x,), schedule, convention="per_op")
    assert plan.bitops["0"] == {"forward": 60 * forward, "weight": 60 * weight}
    if name == "all":
        ace = 60 * (3 * (4 * 4 + 16 * 4) + 2 * 16 * 16)
        assert layer_prices(plan.tally)["0"]["ace"] == ace


def test_paper_convention_uses_widest_formats():
    """Price unquantised layers at the widest formats of every step."""
    levels = {1: "e2m1", 2: "affine2", 4: "bf16", 8: "affine8"}
    model = cpt.quantize_(
        three_layers(), QuantConfig(ladder=role_ladders(weight=FormatLadder(levels)))
    )
    schedules = {
        "0": TableSchedule(((1, 1), (4, 1))),
        "2": TableSchedule(((8, 1), (2, 1))),
    }
    x = torch.empty(5, 4)
    plan = cpt.count_bitops(model, (x,), schedules, convention="paper")
    # activations of 8, then 4 bits; weights of 8, then 16; gradients of 8
    expected = {"forward": 8 * 8 + 4 * 16, "error": 8 * (8 + 16), "weight": 8 * (8 + 4)}
    assert plan.bitops["1"] == {name: 100 * bits for name, bits in expected.items()}


def test_plan_equals_ledger_with_role_ladders():
    ladders = role_ladders(weight=LADDERS["minifloat"], error={6: "e5m2", 8: "e4m3"})
    model = cpt.quantize_(three_layers(), QuantConfig(ladder=ladders))
    x = torch.randn(5, 4)
    schedule = cpt.RoleSchedules(
        weight=TableSchedule(((4, 2), (8, 1))),
        activation=8,
        error=6,
        weight_gradient="float32",
    )
    scheduler = cpt.PrecisionScheduler(model, schedule)
    with cpt.BitOpsLedger(model) as ledger:
        for _ in range(schedule.total_steps):
            model(x).sum().backward()
            scheduler.step()
    operands = 80 * 8 * (2 * 4 + 8)
    for convention in CONVENTIONS:
        plan = cpt.count_bitops(model, (x,), schedule, convention=convention)
        expected = {"forward": operands, "error": operands, "weight": 80 * 32 * 3 * 8}
        assert plan.bitops["2"] == expected
        assert ledger.bitops(convention) == plan.bitops
        assert ledger.costs(convention) == pytest.approx(plan.costs)


def test_count_bitops_counts_float32_levels_by_bits():
    """Price levels of 24 to 32 bits by their bits in the paper's convention."""
    model, x = two_layers()
    schedule = TableSchedule(((24, 1), (31, 2), (32, 1)))
    plan = cpt.count_bitops(model, (x,), schedule, q_grad=27, convention="paper")
    expected = 90 * sum(q * q + 2 * q * 27 for q in (24, 31, 31, 32)) / 1024
    assert plan.total == expected


@pytest.mark.slow
def test_attention_macs_excluded_from_paper_convention():
    model = cpt.quantize_(bert(num_hidden_layers=2, num_labels=3))
    ids = torch.ones(3, 9, dtype=torch.int64)
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=40, n_cycles=2)
    per_op = cpt.count_bitops(model, (ids, ids), schedule, convention="per_op")
    bits = schedule.bits()
    expected = 2 * 3 * 9 * 9 * 16 * int((bits**2 + 2 * bits * 8).sum()) / 32**2
    assert per_op.by_layer["bert.encoder.layer.1.attention.self (matmuls)"] == expected
    paper = cpt.count_bitops(model, (ids, ids), schedule, convention="paper")
    assert not [name for name in paper.by_layer if "(matmuls)" in name]


def test_plan_names_share_of_normalisation():
    """State the share of what has no bits of the schedule: batch normalisation."""
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10)))
    x = (torch.randn(10, 4),)
    plan = cpt.count_bitops(model, x, cpt.StaticSchedule(8, 1), q_grad=8)
    linear, norm = plan.by_layer["0"], plan.by_layer["1"]
    assert plan.tally.never_quantized_share() == norm / (linear + norm)
    share = f"{norm / (linear + norm):.1%} of the BitOps are of normalisation, gates"
    assert share in str(plan)
    paper = cpt.count_bitops(model, x, cpt.StaticSchedule(8, 1), convention="paper")
    for other in (paper, cpt.count_bitops(model[:1], x)):
        assert "of normalisation" not in str(other)


def test_plan_lists_unpriced_matmuls():
    plan = count(parent_of_weights(), *sequences(), convention="paper")
    assert plan.total == 3 * 10 * 8 * (24 + 3)  # the child's weight is a layer's
    assert plan.unpriced == {"(matmuls)": 2 * 2 * 5 * 5 * 8}
    lines = str(plan).splitlines()
    assert lines[-6] == f"total     {2160:>15,}  {6480:>12}"
    assert lines[-1] == (
        "total is without 800 MACs per step (27.0% of the forward pass), "
        'which "paper" does not price: (matmuls) 800'
    )
    complete = [
        count(parent_of_weights(), *sequences()),
        count(nn.Linear(8, 3), *sequences(), convention="paper"),
    ]
    assert not any("total is without" in str(plan) for plan in complete)
    model, inputs = MODELS["GPT-2"].build()
    assert "7 more in .unpriced" in str(count(model, *inputs, convention="paper"))


def test_count_bitops_rejects_models_without_matmul():
    model = nn.Sequential(nn.ReLU())
    message = "nothing to count in Sequential"
    refused(message, cpt.count_bitops, model, (torch.empty(1, 4),))


# --- the copy that is counted -------------------------------------------------------


def state_of(model):
    tensors = (*model.state_dict().values(), torch.get_rng_state())
    return [t.clone() for t in tensors]


def is_unchanged(model, state):
    return all(torch.equal(a, b) for a, b in zip(state_of(model), state, strict=True))


@pytest.mark.parametrize(
    "make", [nn.LSTM, nn.GRU, nn.RNN, lambda *sizes: cpt.quantize_(nn.LSTM(*sizes))]
)
def test_count_bitops_accepts_packed_sequences(make):
    """Count 13 steps of 3 sequences."""
    model = make(5, 4)
    parts = [torch.randn(length, 5) for length in (4, 7, 2)]
    packed = pack_sequence(parts, enforce_sorted=False)
    for module in model.modules():
        if hasattr(module, "set_bits"):
            module.set_bits(None, None)
    with cpt.BitOpsLedger(model) as ledger:
        model(packed)[0].data.sum().backward()
    layer = "" if isinstance(model, nn.LSTM) else "(matmuls)"
    weights = [p for n, p in model.named_parameters() if n.startswith("weight")]
    for convention in CONVENTIONS:
        plan = count(model, packed, convention=convention)
        assert plan.by_pass["forward"] == ledger.by_pass(convention)["forward"]
        macs = {**plan.macs, **plan.unpriced}
        assert macs[layer] == 13 * sum(p.numel() for p in weights)
        gates = 4 * (27 * 13 + 5 * 3)
        assert plan.macs.get("(gates)", gates) == gates


COMPUTED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm of old torch": nn.utils.weight_norm,
    "spectral_norm of old torch": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm.:FutureWarning")
@pytest.mark.parametrize("name", COMPUTED)
def test_parametrised_layer_costs_like_plain_layer(name):
    x = torch.randn(3, 8, 8)
    expected = count(nn.Sequential(nn.Linear(8, 4)), x).bitops["0"]
    model = nn.Sequential(COMPUTED[name](nn.Linear(8, 4)))
    model(x)  # the old forms store the weight that they computed last
    before = state_of(model)
    assert count(model, x).bitops["0"] == expected
    assert is_unchanged(model, before)
    with cpt.BitOpsLedger(model) as ledger:
        model(x).sum().backward()
    assert ledger.by_layer("per_op")["0"] == sum(expected.values()) / 32**2


def caching(store):
    """Return a model that caches what it computed, as RAFT caches its pyramid."""

    def forward(model, x):
        y = model.layer(x)
        model.cache = store(y)
        return y

    return FunctionModule(forward, layer=nn.Linear(4, 4))


def test_count_bitops_copies_models_with_cached_tensors():
    model, x = caching(lambda y: [y, (y, {"a": y})]), torch.randn(2, 4)
    before = count(model, x)
    model(x)
    assert count(model, x) == before
    assert model.layer.weight.device.type == "cpu"


def test_count_bitops_rejects_uncopyable_models():
    model, x = caching(lambda y: SimpleNamespace(value=y)), torch.randn(2, 4)
    model(x)
    message = "cannot copy FunctionModule, .* remove what the model keeps from an "
    refused(message + "earlier forward", count, model, x)


def test_count_bitops_never_compiles_modules():
    def refuse(*_):
        raise AssertionError("compiled")

    model, (x,) = parent_of_weights(), sequences()
    expected = count(model, x)
    whole = count(torch.compile(model, backend=refuse), x)
    assert (whole.total, whole.forward_macs) == (expected.total, expected.forward_macs)
    model.out.compile(backend=refuse)
    assert count(model, x) == expected


# --- models that need data ----------------------------------------------------------


def conditional(more):
    """Return a model that computes more if its mask has a true entry."""

    def forward(m, x, mask):
        y = m.layer(x)
        return more(m, y) if mask.any() else y

    return FunctionModule(forward, layer=nn.Linear(8, 8))


def longformer():
    options = {
        "attention_window": 4,
        "pad_token_id": 1,
        "max_position_embeddings": 20,
        "sep_token_id": 2,
    }
    config = hf.LongformerConfig(**BERT_SIZES, **options)
    return hf.LongformerModel(config, add_pooling_layer=False)


ONE, NONE = torch.tensor([False, True]), torch.tensor([False, False])
GLOBAL_ATTENTION = torch.tensor([[2, 1, 1, 1, 1, 1, 1, 1]] * 2)
DATA_DEPENDENT = {
    "attends": (lambda: conditional(lambda m, y: y @ y.mT), sequences, ONE),
    "does not attend": (lambda: conditional(lambda m, y: y @ y.mT), sequences, NONE),
    "calls a layer again": (
        lambda: conditional(lambda m, y: m.layer(y)),
        sequences,
        ONE,
    ),
    "scales": (lambda: conditional(lambda m, y: 2 * y), sequences, ONE),
    "Longformer": (longformer, lambda: (torch.full((2, 8), 5),), GLOBAL_ATTENTION),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_count_bitops_counts_data_dependent_matmuls(name):
    make, make_inputs, mask = DATA_DEPENDENT[name]
    model, inputs = cpt.quantize_(make()).eval(), (*make_inputs(), mask)
    report = cpt.check(model, inputs, invariances=False)
    assert report.ok, str(report)
    plan = cpt.count_bitops(model, inputs)
    executed = sum(e.macs for e in report.operations if not e.backward)
    norms = sum(macs for layer, macs in plan.macs.items() if "Norm" in layer)
    assert executed == plan.forward_macs - norms
    on_meta = tuple(x.to("meta") for x in inputs)
    message = "does not run on shapes alone .*; give the model and its .* real data"
    refused(message, cpt.count_bitops, make().eval(), on_meta)
    refused(message, cpt.count_bitops, make().eval().to("meta"), inputs)


# --- models of other libraries ------------------------------------------------------


EDGES = ([0, 1, 2, 0], [1, 2, 0, 2])
# an edge is a step of a sequence, a node has a sequence: matmuls and gates
DGL_LSTM_MACS = 4 * 4 * 6 * (6 + 6) + 6 * (27 * 4 + 5 * 3)
DGL_LAYERS = {  # MACs of a forward pass on three nodes with six features each
    "SAGE pool": (lambda: dgl.nn.SAGEConv(6, 4, "pool"), 3 * (36 + 24 + 24)),
    "SAGE mean": (lambda: dgl.nn.SAGEConv(6, 4, "mean"), 3 * 48),
    "GAT": (lambda: dgl.nn.GATConv(6, 4, 2), 3 * 48),
    "SAGE lstm": (lambda: dgl.nn.SAGEConv(6, 4, "lstm"), DGL_LSTM_MACS + 2 * 3 * 24),
}


@pytest.mark.parametrize("name", DGL_LAYERS)
def test_dgl_layer_has_expected_macs(name):
    make, macs = DGL_LAYERS[name]
    layer, graph, x = make(), dgl.graph(EDGES), torch.randn(3, 6)
    plan = count(layer, graph, x, convention="paper")
    assert plan.forward_macs == macs
    with cpt.BitOpsLedger(layer) as ledger:
        layer(graph, x)
    assert ledger.by_pass("paper")["forward"] == macs
    assert ledger.unpriced == plan.unpriced


def test_dgl_graph_conv_counts_aggregation_once_converted():
    layer, graph, x = dgl.nn.GraphConv(6, 4), dgl.graph(EDGES), torch.randn(3, 6)
    plan = count(layer, graph, x, convention="paper")
    # its sum is no function of torch
    assert (plan.forward_macs, plan.unpriced) == (0, {"(matmuls)": 3 * 24})
    plan = count(cpt.quantize_(layer), graph, x, convention="paper")
    assert (plan.forward_macs, plan.unpriced) == (3 * 24, {"(aggregation)": 4 * 4})


# the narrower side is summed
@pytest.mark.parametrize(("sizes", "sums"), [((6, 9), 3 * 6), ((9, 6), 4 * 9)])
def test_dgl_sage_accepts_bipartite_features(sizes, sums):
    layer = cpt.quantize_(dgl.nn.SAGEConv(sizes, 7, "mean"))
    graph = dgl.create_block(([0, 1, 3, 0], [1, 2, 0, 2]))
    nodes = torch.randn(4, sizes[0]), torch.randn(3, sizes[1])
    plan = cpt.count_bitops(layer, (graph, nodes))
    assert plan.macs[""] == 7 * (sums + 3 * sizes[1])
    assert cpt.check(layer, (graph, nodes)).ok
