"""Warning, once per model, about evaluation with running ranges that are still empty."""

import copy
import warnings

import pytest
import torch
from torch import nn

import cpt_core as cpt

EMPTY = "has no running range of its"
STEPS = 6


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))


MODELS = {  # model, shape of its inputs, and the layer and role that are named
    "linear": (net, (5, 8), "layer '0' has no running range of its input"),
    "convolution": (conv_net, (5, 3, 8), "layer '0' has no running range of its input"),
    "lstm": (
        lambda: Recurrent(nn.LSTM(4, 6)),
        (3, 5, 4),
        "layer 'layer' has no running range of its ",
    ),
}


def said(call, *args):
    with warnings.catch_warnings(record=True, action="always") as seen:
        call(*args)
    return [str(w.message) for w in seen if EMPTY in str(w.message)]


def evaluate(model, x, times=2, bits=4):
    for _ in range(times):
        with torch.no_grad(), cpt.precision(model.eval(), bits):
            model(x)


def trained(make, shape, config=None):
    """Return a quantised model after training, and its scheduler."""
    model = cpt.quantize_(make(), config)
    scheduler = cpt.PrecisionScheduler(model, cpt.StaticSchedule(4, total_steps=STEPS))
    for _ in range(STEPS):
        model(torch.randn(shape)).sum().backward()
        scheduler.step()
    return model, scheduler


@pytest.mark.parametrize("name", list(MODELS))
def test_empty_range_warning_appears_once_after_loading(name):
    make, shape, message = MODELS[name]
    model, scheduler = trained(make, shape)
    x = torch.randn(shape)
    assert said(evaluate, model, x) == []
    loaded = cpt.quantize_(make())
    loaded.load_state_dict(model.state_dict())
    assert [text.startswith(message) for text in said(evaluate, loaded, x)] == [True]
    assert said(evaluate, loaded.train(), x) == []  # once per model
    again = cpt.quantize_(make())
    again.load_state_dict(model.state_dict())
    own = cpt.PrecisionScheduler(again, cpt.StaticSchedule(4, total_steps=STEPS))
    own.load_state_dict(scheduler.state_dict())
    assert said(evaluate, again, x) == []


def test_empty_range_warning_with_fresh_scheduler():
    model, _ = trained(net, (5, 8))
    loaded = cpt.quantize_(net())
    cpt.PrecisionScheduler(
        loaded, cpt.StaticSchedule(4, total_steps=STEPS), eval_bits="q_max"
    )
    loaded.load_state_dict(model.state_dict())
    assert len(said(lambda: loaded.eval()(torch.randn(5, 8)))) == 1


def test_empty_range_warning_at_low_precision():
    """Warn that outputs depend on the batch if a model is evaluated before any training."""
    model = cpt.quantize_(net())
    x = torch.randn(5, 8)
    assert "else run some batches in training mode first" in said(evaluate, model, x)[0]


def run_in_training_mode(model, x):
    with torch.no_grad(), cpt.precision(model.train(), 4):
        model(x)
    evaluate(model, x)


def check_in_evaluation_mode(model, x):
    cpt.check(model.eval(), (x,))
    cpt.summary(model, (x,))
    cpt.count_bitops(model, (x,), cpt.StaticSchedule(4, total_steps=STEPS))


def before_training(model, x):
    cpt.PrecisionScheduler(model, cpt.StaticSchedule(4, total_steps=STEPS))
    evaluate(model, x)


SILENT = {  # what is done -> config, and what is done to a model without ranges
    "batches in training mode": (None, run_in_training_mode),
    "ranges of the authors, which start at zero": (
        cpt.QuantConfig(running_start="zero"),
        evaluate,
    ),
    "float32": (None, lambda model, x: evaluate(model, x, bits="float")),
    "dry runs": (None, check_in_evaluation_mode),
    "evaluation before a training": (None, before_training),
    "on meta": (None, lambda model, x: evaluate(model.to("meta"), x.to("meta"))),
}


@pytest.mark.parametrize("case", list(SILENT))
def test_empty_range_warning_spares_filled_ranges(case):
    config, run = SILENT[case]
    model = cpt.quantize_(net(), config)
    assert said(run, model, torch.randn(5, 8)) == []


def test_empty_range_warning_survives_dry_run():
    model, x = cpt.quantize_(net()), torch.randn(5, 8)
    check_in_evaluation_mode(model, x)
    assert len(said(evaluate, model, x)) == 1
    assert said(evaluate, copy.deepcopy(model), x) == []
