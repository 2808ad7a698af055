"""Plan and ledger for every cost: hand-computed elements and totals, equality, and ladders."""

import pytest
import torch
from helpers import FunctionModule
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

import cpt_core as cpt
from cpt_core.bitops.conventions import CONVENTIONS
from cpt_core.bitops.plan import count_step
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.formats.costs import COSTS, Operands
from cpt_extras.formats.ladder import LADDERS, FormatLadder
from cpt_extras.formats.prices import layer_prices
from cpt_extras.search.custom_schedules import TableSchedule


def ring():
    """Return a graph of four nodes with an edge from the neighbour and a self-loop each."""
    return cpt.Graph(torch.arange(0, 9, 2), torch.tensor([0, 3, 0, 1, 1, 2, 2, 3]))


ATTENTION = BertConfig(hidden_size=6, num_attention_heads=2)
LSTM_CALLS = [
    (480, 30, 48, 160),
    (640, 40, 64, 160),
    (4 * (27 * 10 + 5 * 2), 160, 0, 80),
]
HAND = {  # a model, its inputs, and of every call operations, and elements of both operands and the result
    "linear": (
        lambda: nn.Linear(7, 3),
        lambda: (torch.empty(2, 5, 7),),
        [(210, 70, 21, 30)],
    ),
    # outputs x kernel x input channels per group
    "conv": (
        lambda: nn.Conv2d(4, 6, 3, padding=1),
        lambda: (torch.empty(2, 4, 5, 5),),
        [(300 * 9 * 4, 200, 216, 300)],
    ),
    "grouped conv, stride 2": (
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        lambda: (torch.empty(2, 4, 6, 6),),
        [(108 * 9 * 2, 288, 108, 108)],
    ),
    "1-d conv": (
        lambda: nn.Conv1d(3, 5, 4),
        lambda: (torch.empty(2, 3, 10),),
        [(70 * 4 * 3, 60, 60, 70)],
    ),
    "layer norm": (
        lambda: nn.LayerNorm(7),
        lambda: (torch.empty(2, 7),),
        [(4 * 14, 14, 7, 14)],
    ),
    "batch norm": (
        lambda: nn.BatchNorm1d(3),
        lambda: (torch.empty(5, 3),),
        [(5 * 15, 15, 3, 15)],
    ),
    # 5 steps of 2 sequences, 3 wide in, 4 units: input products, products with states, gates
    "lstm": (lambda: nn.LSTM(3, 4), lambda: (torch.empty(5, 2, 3),), LSTM_CALLS),
    "lstm, batches first": (
        lambda: nn.LSTM(3, 4, batch_first=True),
        lambda: (torch.empty(2, 5, 3),),
        LSTM_CALLS,
    ),
    # two layers both ways: products with the inputs of both layers, then 4 with states
    "deep lstm": (
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
        lambda: (torch.empty(5, 2, 3),),
        [
            (960, 30, 96, 320),
            (10 * 2 * 16 * 8, 10 * 8, 2 * 16 * 8, 10 * 2 * 16),
            *[(10 * 64, 10 * 4, 64, 10 * 16)] * 4,
            (16 * (27 * 10 + 5 * 2), 640, 0, 320),
        ],
    ),
    # its first step's product with a hidden state has no error
    "gru": (
        lambda: nn.GRU(3, 4),
        lambda: (torch.empty(5, 2, 3),),
        [(360, 30, 36, 120), (480 * 4 // 5, 40, 48, 120), (480 // 5, 0, 0, 0)],
    ),
    # the narrower side is summed: behind the product, and before it
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
    "function": (
        lambda: FunctionModule(lambda _, x: x @ x.T),
        lambda: (torch.empty(3, 4),),
        [(36, 12, 12, 9)],
    ),
    # 3 linear layers of 6 x 6 on 2 x 5 tokens; scores of 2 heads
    "attention": (
        lambda: BertSelfAttention(ATTENTION),
        lambda: (torch.empty(2, 5, 6),),
        [*[(360, 60, 36, 60)] * 3, (300, 60, 60, 100), (300, 100, 60, 60)],
    ),
}


@pytest.mark.parametrize("case", HAND)
def test_count_step_matches_macs_and_elements(case):
    """Count multiply-accumulates and elements as worked out by hand."""
    make, inputs, expected = HAND[case]
    calls = count_step(make(), inputs())
    assert [(c.macs, *c.elements) for c in calls if c.macs] == expected


def model_and_input(ladder=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return cpt.quantize_(
        model, cpt.QuantConfig(float32=("2",), ladder=ladder)
    ), torch.randn(5, 4)


def only(**ladders):
    """Return ladders by role, with None for the default of the remaining roles."""
    return dict.fromkeys(Operands._fields) | ladders


def test_count_bitops_matches_hand_totals():
    model, x = model_and_input()
    plan = cpt.count_bitops(
        model, (x,), TableSchedule(((4, 3), (8, 1))), convention="per_op"
    )
    assert plan.costs.keys() == COSTS.keys()
    # the first layer needs no error product: activations x weights, then gradients of 8 bits x activations
    first = {
        q: (20 * q / 8 + 12 * q / 8 + 15 * 4) + (15 + 20 * q / 8 + 12 * 4)
        for q in (4, 8)
    }
    second = 4 * 3 * (15 + 6 + 10)  # in float32, three products
    assert plan.costs["traffic"] == 3 * first[4] + first[8] + 4 * second
    assert layer_prices(plan.tally)["0"]["traffic"] == 3 * first[4] + first[8]
    adders = 60 * (3 * (16 + 32 + 32 + 32) + (64 + 32) * 2) + 4 * 3 * 30 * (
        24 * 24 + 8 + 32
    )
    assert plan.costs["multiplier"] == adders
    assert plan.costs["ace"] == 1024 * plan.total == 1024 * plan.costs["bitops"]
    assert layer_prices(plan.tally)["2"]["energy"] == pytest.approx(4 * 3 * 30 * 4.6)
    table = plan.table()
    assert list(table.index) == ["0", "2", "total"]
    assert list(table.columns) == [
        f"{name} ({cost.unit})" for name, cost in COSTS.items()
    ]
    assert table.loc["total"].tolist() == pytest.approx(list(plan.costs.values()))
    assert table.loc["0"].tolist() == list(layer_prices(plan.tally)["0"].values())


def test_count_bitops_prices_layers_by_ladder():
    schedule, ladder = TableSchedule(((1, 3), (4, 1))), LADDERS["mx"]
    plans = {}
    for name, given in {
        "plain": None,
        "all": ladder,
        "one": only(weight_gradient=ladder),
    }.items():
        model, x = model_and_input(given)
        plans[name] = cpt.count_bitops(model, (x,), schedule, convention="per_op")
    # level 1 is mxfp4, gradients and level 4 are bf16
    assert layer_prices(plans["all"].tally)["0"]["ace"] == 60 * (
        3 * (4 * 4 + 16 * 4) + 2 * 16 * 16
    )
    assert plans["all"].bitops["0"] == {
        "forward": 60 * (3 * 16 + 256),
        "weight": 60 * (3 * 64 + 256),
    }
    assert plans["plain"].bitops["0"] == {
        "forward": 60 * (3 * 1 + 16),
        "weight": 60 * (3 * 4 + 16),
    }
    # a role of its own: the weight-gradient product reads its gradient and the activations
    assert plans["one"].bitops["0"] == {
        "forward": 60 * (3 * 1 + 16),
        "weight": 60 * 16 * (3 * 1 + 4),
    }


def test_paper_convention_uses_widest_formats():
    """Price unquantised layers at the widest formats of every step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    ladders = only(
        weight=FormatLadder({1: "e2m1", 2: "affine2", 4: "bf16", 8: "affine8"})
    )
    cpt.quantize_(model, cpt.QuantConfig(ladder=ladders))
    schedules = {
        "0": TableSchedule(((1, 1), (4, 1))),
        "2": TableSchedule(((8, 1), (2, 1))),
    }
    plan = cpt.count_bitops(model, (torch.empty(5, 4),), schedules, convention="paper")
    # activations of 1, then 4 bits in one layer, 8, then 2 in the other; weights 4, 16 and 8, 2; gradients 4 and 8
    expected = {"forward": 8 * 8 + 4 * 16, "error": 8 * (8 + 16), "weight": 8 * (8 + 4)}
    assert plan.bitops["1"] == {name: 100 * bits for name, bits in expected.items()}


def test_plan_equals_ledger_with_role_ladders():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    cpt.quantize_(
        model,
        cpt.QuantConfig(
            ladder=only(weight=LADDERS["minifloat"], error={6: "e5m2", 8: "e4m3"})
        ),
    )
    x, cycle = torch.randn(5, 4), TableSchedule(((4, 2), (8, 1)))
    schedule = cpt.RoleSchedules(
        weight=cycle, activation=8, error=6, weight_gradient="float32"
    )
    scheduler = cpt.PrecisionScheduler(model, schedule)
    with cpt.BitOpsLedger(model) as ledger:
        for _ in range(schedule.total_steps):
            model(x).sum().backward()
            scheduler.step()
    for convention in CONVENTIONS:
        plan = cpt.count_bitops(model, (x,), schedule, convention=convention)
        assert plan.bitops["2"] == {
            "forward": 80 * 8 * (2 * 4 + 8),
            "error": 80 * 8 * (2 * 4 + 8),
            "weight": 80 * 32 * 3 * 8,
        }
        assert ledger.bitops(convention) == plan.bitops
        assert ledger.costs(convention) == pytest.approx(plan.costs)


def test_count_bitops_rejects_ladder_holes():
    model, x = model_and_input(only(error=LADDERS["minifloat"]))
    with pytest.raises(
        ValueError, match="the ladder has a hole at level 3: its levels are 4, 5"
    ):
        cpt.count_bitops(model, (x,), StaticSchedule(6, 2), q_grad=3)
    assert cpt.count_bitops(model, (x,), StaticSchedule(6, 2), q_grad=4).total > 0


def test_count_bitops_counts_float32_levels_by_bits():
    """Price levels of 24 to 32 bits by their bits in the paper's convention."""
    model, x = model_and_input()
    plan = cpt.count_bitops(
        model,
        (x,),
        TableSchedule(((24, 1), (31, 2), (32, 1))),
        q_grad=27,
        convention="paper",
    )
    assert plan.total == 90 * sum(q * q + 2 * q * 27 for q in (24, 31, 31, 32)) / 1024
