"""Modules added to a converted model: one warning if they run in float32, and their row in ``summary``."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import cpt_core as cpt
from cpt_core.quantization.convert import precision_of
from cpt_extras.diagnostics.added_modules import added_modules

STEPS = 40
ADDED = "added after quantize_, and in float32: "
X = torch.ones(2, 8)


class Block(nn.Module):
    """Module that computes its forward pass without calling its children."""

    def __init__(self, *parts):
        super().__init__()
        self.body, self.head = parts

    def forward(self, x):
        return self.head(self.body(x))


class Adapted(nn.Module):
    """Layer with a parallel branch, as in PEFT adapters."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = (
            base,
            nn.Linear(8, 2, bias=False),
            nn.Linear(2, 8, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def flat():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def nested():
    return nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(8, 8)))
    )


def custom():
    torch.manual_seed(0)
    return Block(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))


def replace(model, name, new):
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def scheduled(model, config=None, filter_fn=None):
    cpt.quantize_(model, config, filter_fn)
    return cpt.PrecisionScheduler(model, cpt.StaticSchedule(4, total_steps=STEPS))


def train(model, scheduler, steps):
    for _ in range(steps):
        model(X).sum().backward()
        scheduler.step()


def said(call, *args):
    with warnings.catch_warnings(record=True, action="always") as seen:
        call(*args)
    return [str(w.message) for w in seen]


CHANGES = {  # what is added -> model, name of the new layer, the module that is put there, and where
    "head of a sequence": (flat, "2", lambda old: nn.Linear(8, 3), "2"),
    "convolution": (flat, "2", lambda old: nn.Conv1d(2, 2, 3), "2"),
    "nested sequence": (nested, "1.1.0", lambda old: nn.Linear(8, 5), "1.1.0"),
    "whole part": (nested, "1.1.0", lambda old: nn.Sequential(nn.Linear(8, 2)), "1.1"),
    "adapter": (flat, "2.down", Adapted, "2"),
}


@pytest.mark.parametrize("steps", [0, 1, 3, 10])
@pytest.mark.parametrize("change", list(CHANGES))
def test_added_layer_warning_appears_within_few_steps(change, steps):
    make, name, new, place = CHANGES[change]
    model = make()
    scheduler = scheduled(model)
    train(model, scheduler, steps)
    replace(model, place, new(model.get_submodule(place)))
    messages = said(train, model, scheduler, max(2, steps))
    assert [f"{ADDED}'{name}" in message for message in messages] == [True]
    assert (
        "restore_(model), quantize_(model), and make a new PrecisionScheduler"
        in messages[0]
    )
    assert said(train, model, scheduler, STEPS // 4) == []
    reasons = {row.name: row.reason for row in cpt.summary(model).rows}
    assert reasons[name] == "added after quantize_"
    assert said(lambda: cpt.quantize_(cpt.restore_(model))) == []
    assert precision_of(model.get_submodule(name)) is not None


TIMES = {
    "precision block": lambda model, scheduler: cpt.precision(model, 8).__enter__(),
    "evaluation": lambda model, scheduler: model.eval(),
    "scheduler": lambda model, scheduler: cpt.PrecisionScheduler(
        model, cpt.StaticSchedule(4, STEPS)
    ),
    "check": lambda model, scheduler: cpt.check(model, (X,)),
}


@pytest.mark.parametrize("time", list(TIMES))
def test_added_layer_warning_on_mode_change(time):
    """Warn of an added layer once the mode or the bits change."""
    model = flat()
    scheduler = scheduled(model)
    train(model, scheduler, 3)
    model[2] = nn.Linear(8, 3)
    assert [ADDED in message for message in said(TIMES[time], model, scheduler)] == [
        True
    ]
    assert said(TIMES[time], model, scheduler) == []


def test_added_layer_warning_every_64_steps():
    model = flat()
    cpt.quantize_(model)
    scheduler = cpt.PrecisionScheduler(model, cpt.StaticSchedule(4, total_steps=1000))
    train(model, scheduler, 130)
    model[2] = nn.Linear(8, 3)
    assert [len(said(train, model, scheduler, 1)) for _ in range(64)].index(1) == 61


def test_added_layer_inherits_bits_of_parent():
    model = custom()
    scheduler = scheduled(model)
    train(model, scheduler, 3)
    model.head = nn.Linear(8, 3)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    assert said(train, model, scheduler, 6) == said(model.eval) == []
    assert added_modules(model) == {"head": ""}
    assert (
        str(cpt.summary(model)).count(
            "quantised, with the bits of (model): added after quantize_"
        )
        == 1
    )
    with torch.no_grad():
        with cpt.precision(model, "float"):
            plain = model(x)
        with cpt.precision(model, 2):
            assert not torch.allclose(model.head(model.body(x)), plain, atol=1e-3)
    assert cpt.check(model.train(), (x,)).quantized_share == 1.0


def test_added_layer_warning_below_float32_parent():
    """Warn if only layers were selected, so that their parent has no bits to pass on."""
    model = custom()
    scheduler = scheduled(
        model, filter_fn=lambda module, name: isinstance(module, nn.Linear)
    )
    model.head = nn.Linear(8, 3)
    assert [
        f"{ADDED}'head' (Linear)" in message
        for message in said(train, model, scheduler, 1)
    ] == [True]
    assert cpt.check(model, (X,)).quantized_share < 1.0


@pytest.mark.parametrize(
    ("config", "filter_fn"),
    [(cpt.QuantConfig(float32=("2",)), None), (None, lambda module, name: name == "0")],
)
def test_added_layer_warning_spares_excluded_layers(config, filter_fn):
    model = flat()
    scheduler = scheduled(model, config, filter_fn)
    model[2] = nn.Sequential(nn.Linear(8, 3))
    assert said(train, model, scheduler, 3) == said(model.eval) == []
    assert [row.reason for row in cpt.summary(model).float32] == [
        "not selected by quantize_"
    ]


def in_a_larger_model(model):
    return nn.Sequential(model, nn.Linear(8, 8))


def compiled_part(model):
    model[2] = torch.compile(model[2], backend="eager")
    return model


HARMLESS = {
    "a part without weights": lambda model: model.append(nn.Dropout(0.5)),
    "a normalisation": lambda model: model.append(nn.LayerNorm(8)),
    "an embedding": lambda model: model.insert(0, nn.Identity()),
    "a parametrisation": lambda model: parametrizations.weight_norm(model[2]) and model,
    "a larger model around it": in_a_larger_model,
    "a compiled part": compiled_part,
    "a layer of the model once more": lambda model: model.append(model[0]),
    "a deep copy": copy.deepcopy,
    "a pickled copy": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("change", list(HARMLESS))
def test_added_layer_warning_spares_harmless_changes(change):
    model = flat()
    scheduled(model)
    changed = HARMLESS[change](model)
    assert (
        said(lambda: cpt.PrecisionScheduler(changed, cpt.StaticSchedule(4, 9)).step())
        == []
    )
    assert added_modules(changed) == {}


def test_scheduler_copy_skips_added_layer_search():
    model = flat()
    pair = copy.deepcopy((model, scheduled(model)))
    again = pickle.loads(pickle.dumps(pair))
    for changed, scheduler in (pair, again):
        changed[2] = nn.Linear(8, 3)
        assert said(train, changed, scheduler, 2) == []
        assert (
            len(said(lambda model: cpt.precision(model, 4).__enter__(), changed)) == 1
        )


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Linear(8, 8), nn.Parameter(torch.eye(8))

    def forward(self, x):
        y = functional.linear(self.layer(x), self.own)
        return y.matmul(y.transpose(0, 1))


def test_traced_graph_warning_names_float32_matmuls():
    model = cpt.quantize_(Functional())
    with cpt.precision(model, 4):
        traced = torch.fx.symbolic_trace(model)
    messages = said(lambda: cpt.precision(traced, 4).__enter__())
    assert len(messages) == 1
    assert (
        "its matmuls linear, matmul run in float32: trace the model first"
        in messages[0]
    )
    assert said(lambda: cpt.precision(traced, 4).__enter__()) == []
