"""Matmuls outside layers: many models against torch's FLOP counter, and plan against ledger."""

import copy
from itertools import product

import pytest
import torch
import transformers as hf
from helpers import FunctionModule, refused
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cpt_core.bitops.conventions import CONVENTIONS
from cpt_core.bitops.counting import tensors_in
from cpt_core.bitops.plan import count_bitops, count_step
from cpt_core.models.lstm_lm import LanguageModel
from cpt_core.quantization.convert import is_convertible, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule
from cpt_extras.diagnostics.check import check
from cpt_extras.diagnostics.ledger import BitOpsLedger
from cpt_extras.search.custom_schedules import FunctionSchedule

# that some of these stay in float32 is what they are here for
pytestmark = pytest.mark.filterwarnings("ignore::cpt_core.QuantizationWarning")

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
DISENTANGLED = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
}


def plain(function, *shape):
    """Return a model that applies a function to the output of a layer and a parameter."""
    parts = {"layer": nn.Linear(8, 8), "weight": nn.Parameter(torch.randn(shape))}
    return FunctionModule(lambda m, x: function(m.layer(x), m.weight), **parts)


def borrowed():
    """Return a parent that computes the matmuls of its children, as Swin does."""

    def forward(m, x):
        q, k, v = F.linear(x, m.attn.qkv.weight, m.attn.qkv.bias).chunk(3, -1)
        return m.out(F.scaled_dot_product_attention(q, k, v))

    return FunctionModule(
        forward, attn=FunctionModule(None, qkv=nn.Linear(8, 24)), out=nn.Linear(8, 3)
    )


def sequences():
    return torch.randn(2, 5, 8)


def tokens():
    return torch.ones(2, 7, dtype=torch.int64)


def encoder():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2
    )


def bert(attention):
    return hf.BertForSequenceClassification._from_config(
        hf.BertConfig(**SMALL), attn_implementation=attention
    )


# name -> (model, inputs): torch's counter sees all its products
ZOO = {
    "bert": (lambda: bert("eager"), tokens),
    "bert, fused": (lambda: bert("sdpa"), tokens),
    "matmul": (lambda: plain(torch.matmul, 8, 3), sequences),
    "bmm": (lambda: plain(torch.bmm, 2, 8, 3), sequences),
    "baddbmm": (
        lambda: plain(lambda x, w: torch.baddbmm(w, x, x.mT), 2, 5, 5),
        sequences,
    ),
    "addmm": (
        lambda: plain(lambda x, w: torch.addmm(w, x[0], x[1].T), 5, 5),
        sequences,
    ),
    "einsum": (
        lambda: plain(lambda x, w: torch.einsum("btc,cd->bdt", x, w), 8, 3),
        sequences,
    ),
    "attention": (
        lambda: plain(lambda x, w: F.scaled_dot_product_attention(x @ w, x, x), 8, 8),
        sequences,
    ),
    "functional convolution": (
        lambda: plain(lambda x, w: F.conv1d(x, w), 3, 5, 2),
        sequences,
    ),
    "borrowed weights": (borrowed, sequences),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2),
        lambda: torch.randn(2, 3, 6, 6),
    ),
    "ConvTranspose1d, groups": (
        lambda: nn.ConvTranspose1d(6, 4, 3, groups=2),
        lambda: torch.randn(2, 6, 5),
    ),
    "TransformerEncoder": (encoder, sequences),
    "GRU": (lambda: nn.GRU(8, 6, num_layers=2, bidirectional=True), sequences),
    "RNN": (lambda: nn.RNN(8, 6, batch_first=True), sequences),
    "LSTM, projections": (
        lambda: nn.LSTM(8, 6, proj_size=2, num_layers=3, bidirectional=True),
        sequences,
    ),
    "GRUCell": (lambda: nn.GRUCell(8, 6), lambda: torch.randn(5, 8)),
    "LSTMCell": (lambda: nn.LSTMCell(8, 6), lambda: torch.randn(5, 8)),
    "deberta": (
        lambda: hf.DebertaV2Model(hf.DebertaV2Config(**SMALL, **DISENTANGLED)),
        tokens,
    ),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)
        ),
        tokens,
    ),
    "llama": (
        lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**SMALL | {"num_attention_heads": 4}, num_key_value_heads=2)
        ),
        tokens,
    ),
}
# what torch's counter does not know, by hand: MACs of a forward pass
BY_HAND = {
    "vector": (lambda: plain(torch.matmul, 8), sequences, 10 * 8 * 8 + 10 * 8),
    "Bilinear": (
        lambda: nn.Bilinear(8, 8, 3),
        lambda: (sequences(), sequences()),
        10 * (3 * 8 * 8 + 3 * 8),
    ),
    "language model": (
        lambda: LanguageModel(11, 6, 8),
        lambda: (tokens(), None),
        14 * (4 * 8 * (6 + 8) + 8 * 11),
    ),
    "MultiheadAttention, three widths": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4),
        lambda: (torch.randn(5, 2, 8), torch.randn(3, 2, 6), torch.randn(3, 2, 4)),
        2 * (5 * 8 * 8 + 3 * 6 * 8 + 3 * 4 * 8 + 2 * 5 * 3 * 8 + 5 * 8 * 8),
    ),
    "Mixtral, two of four experts": (
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
        ),
        tokens,
        # per token: four attention layers, router, experts of three layers; products of attention; vocabulary
        14 * (4 * 16 * 16 + 4 * 16 + 2 * 3 * 16 * 24)
        + 2 * 2 * 7 * 7 * 16
        + 14 * 16 * 50,
    ),
}
ELEMENTWISE = ("norm", "gates")  # counted by both conventions; no products


def made(make, given, *_):
    torch.manual_seed(0)
    model, inputs = make(), given()
    return model, inputs if isinstance(inputs, tuple) else (inputs,)


def loss_of(output):
    output = dict(output) if hasattr(output, "keys") else output
    return sum(t.float().square().sum() for t in tensors_in(output) if t.requires_grad)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", [*ZOO, *BY_HAND])
def test_bitops_count_every_matmul(name):
    """Compare the plan with torch's FLOP counter or hand counts, and the ledger with the plan."""
    entry = {**ZOO, **BY_HAND}[name]
    model, inputs = made(*entry)
    with FlopCounterMode(display=False) as flops:
        model(*inputs)
    expected = flops.get_total_flops() / 2 if name in ZOO else entry[2]
    assert (
        sum(c.macs for c in count_step(model, inputs) if c.part not in ELEMENTWISE)
        == expected
    )

    quantised = any(map(is_convertible, model.modules()))
    schedule, scheduler = (
        FunctionSchedule(lambda u: 3 + 5 * u if quantised else 32, 2, "progress"),
        None,
    )
    if quantised:
        scheduler = PrecisionScheduler(quantize_(model), schedule)
    with BitOpsLedger(model) as ledger:
        for _ in range(2):
            loss_of(model(*inputs)).backward()
            if scheduler is not None:
                scheduler.step()
    paper, per_op = plans = [
        count_bitops(model, inputs, schedule, convention=c) for c in CONVENTIONS
    ]
    assert not per_op.unpriced
    assert not [layer for layer in paper.macs if layer.endswith("(products)")]
    assert per_op.forward_macs == paper.forward_macs + sum(paper.unpriced.values())
    for plan in plans:
        assert ledger.by_layer(plan.convention) == plan.by_layer
        assert ledger.by_pass(plan.convention) == plan.by_pass
    assert ledger.unpriced == {
        layer: 2 * macs for layer, macs in paper.unpriced.items()
    }


def test_plan_lists_unpriced_matmuls():
    plan = count_bitops(borrowed(), (sequences(),), convention="paper")
    assert plan.total == 3 * 10 * 8 * (24 + 3)  # the borrowed weight is a layer's
    assert plan.unpriced == {"(products)": 2 * 2 * 5 * 5 * 8}
    lines = str(plan).splitlines()
    assert [lines[-6], lines[-1]] == [
        f"total     {2160:>15,}  {6480:>12}",
        'total is without 800 MACs per step (27.0% of the forward pass), which "paper" does not price: (products) 800',
    ]
    assert "total is without" not in str(count_bitops(borrowed(), (sequences(),)))
    assert "total is without" not in str(
        count_bitops(nn.Linear(8, 3), (sequences(),), convention="paper")
    )
    assert "7 more in .unpriced" in str(
        count_bitops(*made(*ZOO["gpt2"]), convention="paper")
    )


@pytest.mark.parametrize(
    ("function", "passes"),
    [
        (lambda layer, w, x: x @ w, {"forward": 80, "weight": 80}),  # data
        (
            lambda layer, w, x: layer(x) @ w,
            {"forward": 80, "weight": 80},
        ),  # the matrix has dy w', which sums nothing
        (lambda layer, w, x: layer(x) @ w.detach(), {"forward": 80}),
        (
            lambda layer, w, x: layer(x)[0] @ w[:, None],
            {"forward": 40, "error": 40, "weight": 40},
        ),
        (
            lambda layer, w, x: layer(x)[0] @ w[:, None].detach(),
            {"forward": 40, "error": 40},
        ),
        (lambda layer, w, x: layer(x)[0, 0].dot(w), {"forward": 8}),
        (lambda layer, w, x: layer(x).detach() @ w.detach(), {"forward": 80}),
        (
            lambda layer, w, x: torch.no_grad()(torch.matmul)(layer(x), w),
            {"forward": 80},
        ),
        (
            lambda layer, w, x: F.scaled_dot_product_attention(x, layer(x), x),
            {"forward": 800, "error": 400, "weight": 400},
        ),
    ],
)
def test_ledger_prices_only_executed_gradients(function, passes):
    parts = {"layer": nn.Linear(8, 8), "weight": nn.Parameter(torch.randn(8))}
    model = FunctionModule(
        lambda m, x: function(m.layer, m.weight, x) + 0 * m.layer(x).sum(), **parts
    )
    x = sequences()
    with BitOpsLedger(model) as ledger:
        model(x).sum().backward()
    for found in (ledger, count_bitops(model, (x,), convention="per_op")):
        bitops = (
            found.bitops("per_op") if isinstance(found, BitOpsLedger) else found.bitops
        )
        assert {k: v / 32**2 for k, v in bitops["(products)"].items()} == passes


class Adapted(nn.Linear):
    """Linear layer with an extra matmul, as in adapters."""

    def __init__(self, *lengths):
        super().__init__(*lengths)
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
    plan = count_bitops(nn.Sequential(adapted, Conditioned()), (sequences(),))
    norm = {"1": 2 * 5 * 8 * 5}
    assert plan.macs == {
        "0 (products)": 10 * 8 * (8 + 2),
        "0.up": 10 * 2 * 8,
        "1.scale": 10 * 8 * 8,
        **norm,
    }
    assert check(quantize_(nn.Sequential(adapted, Conditioned())), (sequences(),)).ok


# --- the ledger -----------------------------------------------------------------------------------


def test_ledger_leaves_training_unchanged():
    def run(watched):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv1d(5, 5, 3, padding=1)),
            encoder(),
        )
        if watched:
            with BitOpsLedger(model) as ledger:
                model(sequences()).square().sum().backward()
            assert ledger.total("per_op") > 0
        else:
            model(sequences()).square().sum().backward()
        return [
            *model.state_dict().values(),
            *(p.grad for p in model.parameters()),
        ], model

    (plain, _), (watched, model) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("reentrant", [True, False])
def test_ledger_counts_recomputed_matmuls(reentrant):
    totals = []
    for forward in (
        lambda m, x: m.block(m.first(x)),
        lambda m, x: checkpoint(m.block, m.first(x), use_reentrant=reentrant),
    ):
        model = FunctionModule(forward, first=nn.Linear(8, 8), block=borrowed())
        with BitOpsLedger(model) as ledger:
            model(sequences()).sum().backward()
        totals.append((ledger.unpriced["block (products)"], ledger.by_pass("per_op")))
    (once, before), (twice, after) = totals
    assert twice == 2 * once
    assert (after["error"], after["weight"]) == (before["error"], before["weight"])


def test_ledger_survives_failing_forward():
    def refuse(module, inputs):
        if isinstance(module, nn.Linear):
            raise RuntimeError("no Linear")

    model = plain(lambda x, w: x @ w, 8, 3)
    with BitOpsLedger(model) as ledger:
        refused(
            "shapes cannot be multiplied", model, torch.randn(5, 7), error=RuntimeError
        )
        handle = register_module_forward_pre_hook(
            refuse
        )  # such hooks run before those of a module
        refused("no Linear", model, torch.randn(5, 8), error=RuntimeError)
        handle.remove()
        model(torch.randn(5, 8)).sum().backward()
        torch.randn(5, 8) @ torch.randn(8, 3)  # not in the model
    assert ledger.unpriced == {"(products)": 5 * 8 * 3}


def test_ledger_ignores_copies_of_model():
    """Count a `check` inside a ledger as a step of the model, but not a step of a copy."""
    model, x = quantize_(nn.Sequential(borrowed())), sequences()
    with precision(model, 8), BitOpsLedger(model) as ledger:
        model(x).sum().backward()
        before, average = ledger.total(), copy.deepcopy(model)
        with precision(average, 8):
            average(x).sum().backward()
        assert ledger.total() == before
        check(model, (x,))
    assert ledger.total() > before  # it is a step of the model


def test_ledger_ignores_count_bitops_calls():
    model, x = borrowed(), sequences()
    with BitOpsLedger(model) as ledger:
        model(x).sum().backward()
        before = ledger.total("per_op")
        assert count_bitops(model, (x,), convention="paper").unpriced == ledger.unpriced
        assert ledger.total("per_op") == before


def test_ledger_reports_compiled_modules_as_unseen():
    model = borrowed()
    assert BitOpsLedger(model).compiled_modules == ()
    assert BitOpsLedger(torch.compile(model, backend="eager")).compiled_modules == ("",)
    model.out.compile(backend="eager")
    assert BitOpsLedger(model).compiled_modules == ("out",)


def test_count_bitops_never_compiles_modules():
    def refuse(*_):
        raise AssertionError("compiled")

    model, x = borrowed(), sequences()
    expected = count_bitops(model, (x,), convention="per_op")
    whole = count_bitops(
        torch.compile(model, backend=refuse), (x,), convention="per_op"
    )
    assert (whole.total, whole.forward_macs) == (expected.total, expected.forward_macs)
    model.out.compile(backend=refuse)
    assert count_bitops(model, (x,), convention="per_op") == expected


@pytest.mark.parametrize(
    "make", [lambda: nn.MultiheadAttention(8, 2, batch_first=True), encoder]
)
def test_ledger_prices_fused_attention_by_parts(make):
    def forward(m, x):
        y = m.frozen(*(x,) * (3 if isinstance(m.frozen, nn.MultiheadAttention) else 1))
        return m.head(y[0] if isinstance(y, tuple) else y)

    model, x = (
        FunctionModule(
            forward, frozen=make().requires_grad_(False), head=nn.Linear(8, 3)
        ),
        sequences(),
    )
    totals = []
    for frozen in (False, True):
        model.frozen.train(not frozen)
        with BitOpsLedger(model) as ledger:
            model(x).sum().backward()
        totals.append(ledger.total("per_op"))
    assert (
        totals[0] == totals[1] == count_bitops(model, (x,), convention="per_op").total
    )


def test_plan_equals_ledger_for_single_layer():
    model, x = quantize_(nn.Linear(4, 3)), torch.randn(2, 4)
    schedule = make_schedule("STATIC", q_max=4, total_steps=1)
    PrecisionScheduler(model, schedule)
    with BitOpsLedger(model) as ledger:
        model(x).sum().backward()
    assert (
        ledger.total()
        == count_bitops(model, (x,), schedule).total
        == 2 * 24 * 16 / 1024
    )
    unconverted = count_bitops(nn.Linear(4, 3), (x,), schedule)
    assert (unconverted.total, unconverted.by_convention["paper"]) == (
        2 * 24,
        3 * 24 * 16 / 1024,
    )


# --- products that depend on data -----------------------------------------------------------------


def asks(more):
    """Return a model that computes more if its mask has a true entry, as Longformer does for global tokens."""

    def forward(m, x, mask):
        y = m.layer(x)
        return more(m, y) if mask.any() else y

    return FunctionModule(forward, layer=nn.Linear(8, 8))


def longformer():
    sizes = {
        "attention_window": 4,
        "pad_token_id": 1,
        "max_position_embeddings": 20,
        "sep_token_id": 2,
    }
    return hf.LongformerModel(
        hf.LongformerConfig(**SMALL, **sizes), add_pooling_layer=False
    )


GLOBAL = torch.tensor([[2, 1, 1, 1, 1, 1, 1, 1]] * 2)
ASKING = {
    "attends": (lambda: asks(lambda m, y: y @ y.mT), sequences),
    "calls a layer again": (lambda: asks(lambda m, y: m.layer(y)), sequences),
    "only moves": (lambda: asks(lambda m, y: 2 * y), sequences),
    "Longformer": (longformer, lambda: torch.full((2, 8), 5)),
}


@pytest.mark.parametrize(
    ("name", "some"), [*product(list(ASKING)[:3], [True, False]), ("Longformer", True)]
)
def test_count_bitops_counts_data_dependent_matmuls(name, some):
    make, given = ASKING[name]
    model = quantize_(make()).eval()
    inputs = given(), GLOBAL if name == "Longformer" else torch.tensor([False, some])
    found = check(model, inputs, invariances=False)
    assert found.ok, str(found)
    plan = count_bitops(model, inputs)
    ran = sum(e.macs for e in found.operations if not e.backward)
    assert ran == plan.forward_macs - sum(
        macs for layer, macs in plan.macs.items() if "Norm" in layer
    )
    without_data = make().eval().to("meta"), tuple(x.to("meta") for x in inputs)
    refused("does not run on shapes alone .* real data", count_bitops, *without_data)
