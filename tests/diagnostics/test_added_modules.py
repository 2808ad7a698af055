"""Modules added to a converted model: one warning if they run in float32, a reason."""

import copy
import pickle
import warnings

import pytest
import torch
from helpers import FunctionModule
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import cpt_core as cpt
from cpt_core.bitops.conventions import CONVENTIONS
from cpt_core.quantization.convert import precision_of
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.diagnostics.added_modules import added_modules

NUM_STEPS = 40
ADDED = "added after quantize_, and in float32: "
X = torch.ones(2, 8)


def flat():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def nested():
    inner = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(8, 8)))
    return nn.Sequential(nn.Linear(8, 8), inner)


def custom():
    """Return a model with a forward of its own."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    return FunctionModule(
        lambda m, x: m.head(m.body(x)), body=body, head=nn.Linear(8, 8)
    )


def adapter(base):
    """Return a layer with a parallel branch, as in PEFT adapters."""
    branch = {"down": nn.Linear(8, 2, bias=False), "up": nn.Linear(2, 8, bias=False)}
    return FunctionModule(lambda m, x: m.base(x) + m.up(m.down(x)), base=base, **branch)


def replace(model, name, module):
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def schedule(model, config=None, filter_fn=None):
    """Convert a model and return its scheduler."""
    cpt.quantize_(model, config, filter_fn)
    return cpt.PrecisionScheduler(model, StaticSchedule(4, NUM_STEPS))


def train(model, scheduler, steps):
    for _ in range(steps):
        model(X).sum().backward()
        scheduler.step()


def warnings_of(call, *args):
    """Return the texts of the warnings of a call."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        call(*args)
    return [str(warning.message) for warning in caught]


def enter_precision(model, scheduler=None):
    cpt.precision(model, 4).__enter__()


CHANGES = {  # name -> model, place, what is put there, name of the new layer
    "head": (flat, "2", lambda old: nn.Linear(8, 3), "2"),
    "convolution": (flat, "2", lambda old: nn.Conv1d(2, 2, 3), "2"),
    "nested layer": (nested, "1.1.0", lambda old: nn.Linear(8, 5), "1.1.0"),
    "nested part": (nested, "1.1", lambda old: nn.Sequential(nn.Linear(8, 2)), "1.1.0"),
    "adapter": (flat, "2", adapter, "2.down"),
}


@pytest.mark.parametrize(
    ("change", "steps"),
    [*((change, 3) for change in CHANGES), ("head", 0), ("head", 1), ("head", 10)],
)
def test_added_layer_warning_appears_within_few_steps(change, steps):
    make, place, new, name = CHANGES[change]
    model = make()
    scheduler = schedule(model)
    train(model, scheduler, steps)
    replace(model, place, new(model.get_submodule(place)))
    (message,) = warnings_of(train, model, scheduler, max(2, steps))
    assert f"{ADDED}'{name}" in message
    remedy = "restore_(model), quantize_(model), and make a new PrecisionScheduler"
    assert remedy in message
    assert warnings_of(train, model, scheduler, NUM_STEPS // 4) == []
    reasons = {row.name: row.reason for row in cpt.summary(model).rows}
    assert reasons[name] == "added after quantize_"
    assert warnings_of(lambda: cpt.quantize_(cpt.restore_(model))) == []
    assert precision_of(model.get_submodule(name)) is not None


OCCASIONS = {
    "precision block": enter_precision,
    "evaluation": lambda model, scheduler: model.eval(),
    "scheduler": lambda model, scheduler: cpt.PrecisionScheduler(
        model, StaticSchedule(4, NUM_STEPS)
    ),
    "check": lambda model, scheduler: cpt.check(model, (X,)),
}


@pytest.mark.parametrize("occasion", OCCASIONS)
def test_added_layer_warning_on_mode_change(occasion):
    """Warn of an added layer once the mode or the bits change."""
    model = flat()
    scheduler = schedule(model)
    train(model, scheduler, 3)
    model[2] = nn.Linear(8, 3)
    (message,) = warnings_of(OCCASIONS[occasion], model, scheduler)
    assert ADDED in message
    assert warnings_of(OCCASIONS[occasion], model, scheduler) == []


def test_added_layer_inherits_bits_of_parent():
    model = custom()
    scheduler = schedule(model)
    train(model, scheduler, 3)
    model.head = nn.Linear(8, 3)
    assert warnings_of(train, model, scheduler, 6) == []
    assert warnings_of(model.eval) == []
    assert added_modules(model) == {"head": ""}
    row = "quantised, with the bits of (model): added after quantize_"
    assert str(cpt.summary(model)).count(row) == 1
    x = torch.randn(4, 8)
    with torch.no_grad():
        with cpt.precision(model, "float"):
            expected = model(x)
        with cpt.precision(model, 2):
            assert not torch.allclose(model(x), expected, atol=1e-3)
    assert cpt.check(model.train(), (x,)).quantized_share == 1.0


def own_matmul(old):
    weight = nn.Parameter(torch.randn(8, 3))
    return FunctionModule(lambda m, x: x @ m.w, w=weight)


def attention(old):
    return FunctionModule(lambda m, x: x @ x.mT)


ADDED_LATER = {  # parts with matmuls that run with the bits of the model around them
    "linear": lambda old: nn.Linear(8, 3),
    "convolution": lambda old: nn.Conv1d(2, 2, 3),
    "bilinear": lambda old: FunctionModule(
        lambda m, x: m.layer(x, x), layer=nn.Bilinear(8, 8, 3)
    ),
    "own matmul": own_matmul,
    "without weights": attention,
    "adapter": adapter,
    "layers": lambda old: nn.Sequential(old, nn.LayerNorm(8), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("name", ADDED_LATER)
def test_added_layer_has_one_price_in_all_reports(name, is_wrapped):
    """Compare ``check``, ``summary``, the plan and the ledger."""
    model, x, steps = cpt.quantize_(custom()), torch.randn(2, 8), StaticSchedule(4, 1)
    model.head = ADDED_LATER[name](model.head)
    if is_wrapped:
        model = nn.Sequential(model)
    cpt.PrecisionScheduler(model, steps)
    checked = cpt.check(model, (x,), invariances=False).forward
    report = cpt.summary(model, (x,))
    assert report.float32_shares == checked.float32_shares()
    reported = {row.name: row.quantized for row in report.rows if row.share}
    executed = {
        layer: checked.quantized[layer] > 0
        for layer in checked.shares()
        if layer in reported
    }
    assert reported == executed

    with cpt.BitOpsLedger(model) as ledger:
        model(x).sum().backward()
    assert ledger.float32 == checked.float32_shares()
    for convention in CONVENTIONS:
        plan = cpt.count_bitops(model, (x,), steps, convention=convention)
        assert plan.float32 == ledger.float32
        assert plan.bitops == ledger.bitops(convention)


def test_added_layer_warning_below_float32_parent():
    """Warn if only layers were selected, so that their parent has no bits to give."""
    model = custom()
    scheduler = schedule(model, filter_fn=lambda m, name: isinstance(m, nn.Linear))
    model.head = nn.Linear(8, 3)
    (message,) = warnings_of(train, model, scheduler, 1)
    assert f"{ADDED}'head' (Linear)" in message
    assert cpt.check(model, (X,)).quantized_share < 1.0


@pytest.mark.parametrize(
    ("config", "filter_fn"),
    [(cpt.QuantConfig(float32=("2",)), None), (None, lambda module, name: name == "0")],
)
def test_added_layer_warning_spares_excluded_layers(config, filter_fn):
    model = flat()
    scheduler = schedule(model, config, filter_fn)
    model[2] = nn.Sequential(nn.Linear(8, 3))
    assert warnings_of(train, model, scheduler, 3) == []
    assert warnings_of(model.eval) == []
    reasons = [row.reason for row in cpt.summary(model).float32]
    assert reasons == ["not selected by quantize_"]


@pytest.mark.parametrize(
    ("config", "filter_fn"),
    [
        (cpt.QuantConfig(float32=("head",)), None),
        (cpt.QuantConfig(float32=("h*",)), None),
        (None, lambda module, name: name != "head"),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_added_layer_stays_in_float32_if_excluded(config, filter_fn, is_nested):
    """A replaced layer under an excluded name is in float32 at once, although the parent is quantised."""
    model = custom()
    scheduler = schedule(model, config, filter_fn)
    train(model, scheduler, 3)
    head = nn.Linear(8, 3)
    model.head = nn.Sequential(head) if is_nested and filter_fn is None else head
    x = torch.randn(4, 8)

    def check_head():
        with torch.no_grad():
            expected = F.linear(model.body(x), head.weight, head.bias)
            assert torch.equal(model(x), expected)

    check_head()
    assert warnings_of(train, model, scheduler, 6) == []
    check_head()
    (row,) = cpt.summary(model, (x,)).float32
    assert (row.reason, row.share > 0) == ("not selected by quantize_", True)
    assert cpt.check(model, (x,)).quantized_share < 1
    restored = cpt.restore_(model)
    assert not any("_interception" in vars(m) for m in restored.modules())


def compile_part(model):
    model[2] = torch.compile(model[2], backend="eager")
    return model


def parametrise(model):
    parametrizations.weight_norm(model[2])
    return model


HARMLESS = {
    "part without weights": lambda model: model.append(nn.Dropout(0.5)),
    "normalisation": lambda model: model.append(nn.LayerNorm(8)),
    "identity": lambda model: model.insert(0, nn.Identity()),
    "parametrisation": parametrise,
    "larger model around it": lambda model: nn.Sequential(model, nn.Linear(8, 8)),
    "compiled part": compile_part,
    "layer once more": lambda model: model.append(model[0]),
    "deep copy": copy.deepcopy,
    "pickled copy": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("change", HARMLESS)
def test_added_layer_warning_spares_harmless_changes(change):
    model = flat()
    schedule(model)
    changed = HARMLESS[change](model)

    def step():
        cpt.PrecisionScheduler(changed, StaticSchedule(4, 9)).step()

    assert warnings_of(step) == []
    assert added_modules(changed) == {}


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Linear(8, 8), nn.Parameter(torch.eye(8))

    def forward(self, x):
        y = F.linear(self.layer(x), self.own)
        return y.matmul(y.transpose(0, 1))


def test_traced_graph_warning_names_float32_matmuls():
    model = cpt.quantize_(Functional())
    with cpt.precision(model, 4):
        traced = torch.fx.symbolic_trace(model)
    (message,) = warnings_of(enter_precision, traced)
    expected = "its matmuls linear, matmul run in float32: trace the model first"
    assert expected in message
    assert warnings_of(enter_precision, traced) == []
