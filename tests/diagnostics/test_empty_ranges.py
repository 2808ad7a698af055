"""Warning, once per model, about evaluation with running ranges that are still empty."""

import copy
import warnings

import pytest
import torch
from helpers import FunctionModule
from torch import nn
from torch.optim.swa_utils import AveragedModel

import cpt_core as cpt

STATIC = cpt.StaticSchedule(4, total_steps=6)


def recurrent():
    return FunctionModule(
        lambda m, x: m.head(m.layer(x)[0]), layer=nn.LSTM(4, 6), head=nn.Linear(6, 2)
    )


def linear():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def convolution():
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))


def range_warnings(call, *args):
    with warnings.catch_warnings(record=True, action="always") as caught:
        call(*args)
    texts = [str(w.message) for w in caught]
    return [text for text in texts if "has no running range of its" in text]


def evaluate(model, x, bits=4):
    for _ in range(2):
        with torch.no_grad(), cpt.precision(model.eval(), bits):
            model(x)


@pytest.mark.parametrize(
    ("make", "shape", "place"),
    [
        (linear, (5, 8), "layer '0' has no running range of its input"),
        (convolution, (5, 3, 8), "layer '0' has no running range of its input"),
        (recurrent, (3, 5, 4), "layer 'layer' has no running range of its "),
    ],
)
def test_empty_range_warning_after_loading(make, shape, place):
    """Warn once per model that was loaded without the state of its scheduler."""
    model, x = cpt.quantize_(make()), torch.randn(shape)
    scheduler = cpt.PrecisionScheduler(model, STATIC)
    for _ in range(STATIC.total_steps):
        model(x).sum().backward()
        scheduler.step()
    assert range_warnings(evaluate, model, x) == []

    loaded = cpt.quantize_(make())
    loaded.load_state_dict(model.state_dict())
    (text,) = range_warnings(evaluate, loaded, x)
    assert text.startswith(place)
    assert "else run some batches in training mode first" in text
    assert range_warnings(evaluate, loaded.train(), x) == []

    scheduled = cpt.quantize_(make())
    cpt.PrecisionScheduler(scheduled, STATIC, eval_bits="q_max")
    scheduled.load_state_dict(model.state_dict())
    assert len(range_warnings(scheduled.eval(), x)) == 1

    complete = cpt.quantize_(make())
    complete.load_state_dict(model.state_dict())
    cpt.PrecisionScheduler(complete, STATIC).load_state_dict(scheduler.state_dict())
    assert range_warnings(evaluate, complete, x) == []


def run_in_training_mode(model, x):
    with torch.no_grad(), cpt.precision(model.train(), 4):
        model(x)
    evaluate(model, x)


def dry_run(model, x):
    cpt.check(model.eval(), (x,))
    cpt.summary(model, (x,))
    cpt.count_bitops(model, (x,), STATIC)


def evaluate_before_training(model, x):
    cpt.PrecisionScheduler(model, STATIC)
    evaluate(model, x)


SILENT = {  # what is done with a model without ranges, and its config
    "batches in training mode": (run_in_training_mode, None),
    "ranges start at zero": (evaluate, cpt.QuantConfig(running_start="zero")),
    "float32": (lambda model, x: evaluate(model, x, bits="float"), None),
    "dry runs": (dry_run, None),
    "evaluation before training": (evaluate_before_training, None),
    "meta device": (lambda model, x: evaluate(model.to("meta"), x.to("meta")), None),
}


@pytest.mark.parametrize("case", SILENT)
def test_empty_range_warning_is_not_needed(case):
    run, config = SILENT[case]
    model = cpt.quantize_(linear(), config)
    assert range_warnings(run, model, torch.randn(5, 8)) == []


def test_empty_range_warning_survives_dry_run():
    model, x = cpt.quantize_(linear()), torch.randn(5, 8)
    dry_run(model, x)
    assert len(range_warnings(evaluate, model, x)) == 1
    assert range_warnings(evaluate, copy.deepcopy(model), x) == []


def train_with_frozen_layer(model, x, follows_mode):
    """Train for two steps with the first layer in evaluation mode, set in every step or once."""
    scheduler = cpt.PrecisionScheduler(model, STATIC)
    model[0].eval()
    for _ in range(2):
        if follows_mode:
            model.train()
            model[0].eval()
        model(x).sum().backward()
        scheduler.step()
    model(x)


@pytest.mark.parametrize("follows_mode", [True, False])
def test_empty_range_warning_of_frozen_layer(follows_mode):
    model, x = cpt.quantize_(linear()), torch.randn(5, 8)
    (text,) = range_warnings(train_with_frozen_layer, model, x, follows_mode)
    assert text.startswith("layer '0' has no running range of its input")
    assert "a frozen part" in text


def test_empty_range_warning_spares_prepared_frozen_layer():
    model, x = cpt.quantize_(linear()), torch.randn(5, 8)
    with torch.no_grad(), cpt.precision(model, 4):
        model(x)
    assert range_warnings(train_with_frozen_layer, model, x, True) == []


@pytest.mark.parametrize("copy_model", [copy.deepcopy, AveragedModel])
def test_empty_range_warning_of_copy_before_training(copy_model):
    model, x = cpt.quantize_(linear()), torch.randn(5, 8)
    scheduler = cpt.PrecisionScheduler(model, STATIC)
    copied = copy_model(model)
    for _ in range(2):
        model(x).sum().backward()
        scheduler.step()
    (text,) = range_warnings(evaluate, copied, x, "q_max")
    assert "copy_ranges" in text
    prepared = copy_model(model)
    cpt.quantization.copy_ranges(model, prepared)
    assert range_warnings(evaluate, prepared, x, "q_max") == []


def test_empty_range_warning_spares_copied_scheduler():
    """A scheduler that is copied with its model drives the copy, which may be evaluated before training, too."""
    model = cpt.quantize_(linear())
    pair = copy.deepcopy((model, cpt.PrecisionScheduler(model, STATIC)))
    assert range_warnings(evaluate, pair[0], torch.randn(5, 8)) == []
