"""Repeated trainings of one model: equal starts for every training, everything restored at the end."""

import random

import numpy as np
import pytest
import torch
from helpers import refused
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions, quantize_

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_extras.search.range_test.RangeTestWarning"
)


def problem(lr=0.2, seed=0, dropout=0.0):
    """Return a user's model, train_step and optimizer, and the numbers of the batches seen."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(32, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    inputs = torch.randn(16, 32, 8, generator=torch.Generator().manual_seed(1))
    seen = []

    def train_step(step):
        seen.append(step)
        x = inputs[step % 16]
        loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, train_step, optimizer, seen


def range_test(*given, **options):
    return cpt.search.precision_range_test(
        *given, **{"bits": (2, 4), "dwell": 8, "seeds": (0, 1), **options}
    )


def sensitivity(*given, **options):
    return cpt.search.sensitivity(
        *given, **{"base": 3, "windows": 2, "steps": 8, "seeds": (0, 1), **options}
    )


def tried(*given, **options):
    return cpt.search.try_precision(
        *given, lambda: 1.0, **{"steps": 8, "cycles": 1, "seeds": 1, **options}
    )


every_search = pytest.mark.parametrize("repeat", [range_test, sensitivity, tried])


@every_search
def test_restartable_training_restores_model_optimizer_and_rng(repeat):
    model, train_step, optimizer, _ = problem(dropout=0.5)
    for step in range(3):  # the optimizer has a momentum by then
        train_step(step)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    momentum = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
    layers, random = [type(m) for m in model], torch.get_rng_state()
    repeat(model, train_step, optimizer)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(
        torch.equal(s["momentum_buffer"], m)
        for s, m in zip(optimizer.state.values(), momentum, strict=True)
    )
    assert [type(m) for m in model] == layers
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert next(model.parameters()) is optimizer.param_groups[0]["params"][0]


class Counting(nn.Module):
    """Module that counts its passes in a non-persistent buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x):
        return x + 0 * self.passes.add_(1)


@every_search
def test_restartable_training_starts_equal_and_restores_buffers(repeat):
    """Restore random generators, non-persistent buffers and gradients before every training."""
    model, _, _, _ = problem()
    model.append(Counting())
    optimizer = torch.optim.SGD(
        model[4].parameters(), lr=0.1
    )  # the rest has gradients that nobody puts away
    model[0].weight.grad = kept = torch.ones(32, 8)
    starts = []

    def step(number):
        if number == 0:  # of every training of the first seed
            drawn = (
                random.random(),
                np.random.default_rng(np.random.randint(100)).random(),  # noqa: NPY002
            )
            starts.append((*drawn, float(model[-1].passes), model[0].weight.grad))
        loss = model(torch.ones(32, 8) * (number + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    repeat(model, step, optimizer)
    assert len(starts) > 2
    assert len(set(starts)) == 1
    assert starts[0][2:] == (0, None)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    assert model[-1].passes == 0
    assert model[0].weight.grad is kept
    assert model[0].bias.grad is None


@every_search
def test_restartable_training_keeps_rejected_model(repeat):
    model, train_step, optimizer, _ = problem()
    holes = cpt.QuantConfig(ladder={2: "e2m1", 3: "e4m3"})
    refused(
        "the ladder has a hole at level",
        repeat,
        model,
        train_step,
        optimizer,
        config=holes,
    )
    assert type(model[0]) is nn.Linear


@every_search
def test_restartable_training_keeps_precision_of_converted_model(repeat):
    model, train_step, optimizer, _ = problem()
    quantize_(model)
    cpt.PrecisionScheduler(model, cpt.make_schedule("STATIC", q_max=6, total_steps=10))
    repeat(model, train_step, optimizer)
    for layer in layer_precisions(model).values():
        assert layer.active_levels == layer.highest == (6, 6, 6, 6)
        assert int(layer.num_steps) == 63


@every_search
def test_restartable_training_keeps_scheduler_attached(repeat):
    model, train_step, optimizer, _ = problem()
    quantize_(model)
    schedule = cpt.make_schedule("CR", q_min=3, q_max=6, total_steps=10, n_cycles=2)
    cpt.PrecisionScheduler(model, schedule, optimizer=optimizer, eval_bits="q_max")
    repeat(model, train_step, optimizer)
    of_mode = []
    for training in (True, False):
        model.train(training)
        of_mode.append({layer.bits for layer in layer_precisions(model).values()})
    assert of_mode == [{3}, {6}]


@every_search
def test_restartable_training_restores_model_after_error(repeat):
    """Restore at once, although a notebook keeps the error alive."""
    model, train_step, optimizer, seen = problem()
    weight = model[0].weight.detach().clone()

    def breaks(step):
        if len(seen) > 11:
            raise RuntimeError("no more data")
        return train_step(step)

    with pytest.raises(RuntimeError, match="no more data") as kept:
        repeat(model, breaks, optimizer)
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight, weight)
    assert kept.value.__traceback__ is not None


def problem_with_lr_decay():
    """Return a problem whose train_step decays the rate, its LR scheduler, and the rates of the steps."""
    model, train_step, optimizer, _ = problem()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    rates = []

    def decays(step):
        rates.append(optimizer.param_groups[0]["lr"])
        loss = train_step(step)
        scheduler.step()
        return loss

    return model, decays, optimizer, scheduler, rates


@every_search
def test_restartable_training_restarts_lr_scheduler(repeat):
    model, decays, optimizer, scheduler, rates = problem_with_lr_decay()
    weight = model[0].weight.detach().clone()
    repeat(model, decays, optimizer, stateful=[scheduler])
    # six trainings at the least, of eight steps or more
    assert rates.count(0.2) >= 5 * 6
    assert sorted(set(rates)) == pytest.approx([0.02, 0.2])
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.2)
    assert torch.equal(model[0].weight, weight)


@every_search
def test_restartable_training_rejects_lr_scheduler_missing_from_stateful(repeat):
    model, decays, optimizer, _, _ = problem_with_lr_decay()
    weight = model[0].weight.detach().clone()
    refused(
        r"another \[.*name the LR scheduler in stateful=",
        repeat,
        model,
        decays,
        optimizer,
    )
    assert torch.equal(model[0].weight, weight)


@every_search
def test_restartable_training_rejects_wrong_arguments(repeat):
    model, train_step, optimizer, _ = problem()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for given, message in (
        ((model, None, optimizer), "needs train_step"),
        (("digits", train_step, optimizer), "must be a torch module"),
    ):
        refused(message, repeat, *given)
    for bad in (scheduler, [optimizer, 1]):
        with pytest.raises(
            ValueError,
            match="stateful must list objects with state_dict and load_state_dict",
        ):
            repeat(model, train_step, optimizer, stateful=bad)
