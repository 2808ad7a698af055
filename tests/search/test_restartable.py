"""Repeated trainings of one model: equal starts for every training, everything restored at the end."""

import random
from contextlib import nullcontext

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
    options = {"bits": (2, 4), "dwell": 8, "seeds": (0, 1), **options}
    return cpt.search.precision_range_test(*given, **options)


def sensitivity(*given, **options):
    options = {"base": 3, "windows": 1, "steps": 8, "seeds": (0,), **options}
    return cpt.search.sensitivity(*given, **options)


def precision_search(*given, **options):
    options = {"steps": 8, "cycles": 1, "seeds": 1, **options}
    return cpt.search.try_precision(*given, lambda: 1.0, **options)


SEARCHES = pytest.mark.parametrize(
    "search", [range_test, sensitivity, precision_search]
)


class Counter(nn.Module):
    """Module that counts its passes in a non-persistent buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x):
        return x + 0 * self.passes.add_(1)


@SEARCHES
def test_restartable_training_starts_equal_and_is_undone(search):
    """Restore parameters, gradients, buffers, optimizer and random generators, before every training and at the end."""
    model, train_step, optimizer, _ = problem(dropout=0.5)
    model.append(Counter())
    for step in range(3):  # the optimizer has a momentum by then
        train_step(step)
    # parameters of another optimizer, whose gradients nobody removes
    model[0].requires_grad_(False)
    model.append(nn.Linear(2, 2))
    model[-1].weight.grad = gradient = torch.ones(2, 2)
    starts = []

    def watched(number):
        if number == 0:  # of every training of the first seed
            momentum = [s["momentum_buffer"] for s in optimizer.state.values()]
            weights = [
                float(t.detach().sum()) for t in (*model.parameters(), *momentum)
            ]
            numbers = random.random(), np.random.randint(1 << 30)  # noqa: NPY002
            passes, grad = float(model[5].passes), model[-1].weight.grad
            starts.append((*numbers, *weights, passes, grad))
        return train_step(number)

    def state():
        momentum = [s["momentum_buffer"] for s in optimizer.state.values()]
        tensors = [*model.parameters(), *model.buffers(), *momentum]
        numpy_state = str(np.random.get_state())  # noqa: NPY002
        return (
            [t.clone() for t in (*tensors, torch.get_rng_state())],
            ([type(m) for m in model], random.getstate(), numpy_state),
        )

    tensors, others = state()
    search(model, watched, optimizer)
    assert len(starts) > 2
    assert len(set(starts)) == 1
    assert starts[0][-2:] == (3.0, None)
    tensors_after, others_after = state()
    assert all(map(torch.equal, tensors_after, tensors))
    assert others_after == others
    assert model[-1].weight.grad is gradient
    assert not any(p._backward_hooks for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model[4].weight is optimizer.param_groups[0]["params"][-2]


@SEARCHES
@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_restartable_training_keeps_scheduler_attached(search, follows, in_block):
    """Leave layers to their scheduler, also if it sets its bits after a block, and does not follow the optimizer."""
    model, train_step, optimizer, _ = problem()
    quantize_(model)
    schedule = cpt.make_schedule("CR", q_min=3, q_max=6, total_steps=10, n_cycles=2)
    with cpt.precision(model, 7) if in_block else nullcontext():
        scheduler = cpt.PrecisionScheduler(
            model, schedule, optimizer=optimizer if follows else None, eval_bits="q_max"
        )
        search(model, train_step, optimizer)
        assert model[0].precision.bits == (7 if in_block else 3)

    for training, bits in ((True, 3), (False, 6), (True, 3)):
        model.train(training)
        with cpt.precision(model, 8):  # which nothing changes
            pass
        for layer in layer_precisions(model).values():
            assert layer.owning_scheduler is scheduler
            assert layer.bits == bits
            assert int(layer.num_steps) == 2**bits - 1
            assert layer.highest == (6, 6, 6, 6)
            assert layer.is_untrained


@SEARCHES
def test_restartable_training_keeps_bits_without_scheduler(search):
    model, train_step, optimizer, _ = problem()
    quantize_(model)[0].precision.set_bits(5, 7)
    search(model, train_step, optimizer)
    with cpt.precision(model, 8):
        pass
    layers = layer_precisions(model).values()
    assert [(p.bits, p.q_grad) for p in layers] == [(5, 7), (None, None)]
    assert [p.highest for p in layers] == [None, None]


def hold_group(optimizer):
    return optimizer.param_groups[0].__setitem__


def hold_list(optimizer):
    groups = optimizer.param_groups
    return lambda name, value: groups[0].__setitem__(name, value)


def hold_tensor(optimizer):
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
    return lambda _, value: rate.fill_(value)


@SEARCHES
@pytest.mark.parametrize("hold", [hold_group, hold_list, hold_tensor])
def test_restartable_training_keeps_parameter_groups(search, hold):
    """Let a training loop set the learning rate where it holds a parameter group, during the trainings and after."""
    model, train_step, optimizer, _ = problem()
    set_rate = hold(optimizer)
    weight = model[0].weight.detach().clone()
    rates = []

    def decays(step):
        rate = 1 / 2 ** (1 + step % 8)
        set_rate("lr", rate)
        rates.append((float(optimizer.param_groups[0]["lr"]), rate))
        return train_step(step)

    search(model, decays, optimizer)
    assert all(used == rate for used, rate in rates)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.2)
    assert torch.equal(model[0].weight, weight)
    set_rate("lr", 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5


@SEARCHES
def test_restartable_training_removes_added_parameter_groups(search):
    model, train_step, optimizer, _ = problem()
    del optimizer.param_groups[0]["params"][:2]  # of the first layer

    def unfreezes(step):
        if step % 8 == 4:
            group = {"params": list(model[0].parameters()), "lr": 0.05}
            optimizer.add_param_group(group)
        return train_step(step)

    search(model, unfreezes, optimizer)
    assert len(optimizer.param_groups) == 1


class MovingAverage(nn.Module):
    """Module that assigns a new tensor to its buffer in every pass."""

    def __init__(self, start, persistent):
        super().__init__()
        self.register_buffer("mean", start, persistent=persistent)

    def forward(self, x):
        mean = 1 if self.mean is None else self.mean
        self.mean = 0.9 * mean + x.detach().mean(0)
        return x + 0 * self.mean


@SEARCHES
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("start", [None, torch.zeros(()), torch.zeros(2)])
def test_restartable_training_restores_assigned_buffers(search, start, persistent):
    model, train_step, optimizer, _ = problem()
    model.append(MovingAverage(start, persistent))
    starts = []

    def watched(number):
        if number == 0:
            starts.append(model[5].mean)
        return train_step(number)

    search(model, watched, optimizer)
    assert len(starts) > 2
    assert all(mean is start for mean in [*starts, model[5].mean])
    assert start is None or not start.any()


@SEARCHES
@pytest.mark.parametrize("unfreezes", [False, True])
def test_restartable_training_restores_requires_grad(search, unfreezes):
    model, train_step, optimizer, _ = problem()
    model[0].requires_grad_(not unfreezes)
    starts = []

    def changes(number):
        if number == 0:
            starts.append(model[0].weight.requires_grad)
        if number % 8 == 4:
            model[0].requires_grad_(unfreezes)
        return train_step(number)

    search(model, changes, optimizer)
    assert len(starts) > 2
    assert {*starts, model[0].weight.requires_grad} == {not unfreezes}


class Attention(nn.Module):
    """Module without weights, whose precision is no child module."""

    def forward(self, x):
        x = x[:, None]
        return nn.functional.scaled_dot_product_attention(x, x, x)[:, 0]


@SEARCHES
@pytest.mark.parametrize("ends_in_training", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_restartable_training_restores_empty_ranges(search, training, ends_in_training):
    """Evaluate a model that was never trained as before, although the trainings filled its ranges."""
    model, train_step, optimizer, _ = problem()
    quantize_(model.append(Attention()))
    x = torch.randn(4, 8)

    def validates(step):
        model.train()
        loss = train_step(step)
        model.eval()(x)
        model.train(ends_in_training)
        return loss

    def evaluated():
        with cpt.precision(model, 8), torch.no_grad():
            return model(x)

    model.eval()
    expected = evaluated()
    model.train(training)
    layers = layer_precisions(model).values()
    modes = [p.training for p in layers]
    search(model, validates, optimizer)
    assert [p.training for p in layers] == modes
    if training:
        model.eval()
    assert torch.equal(evaluated(), expected)
    assert not any(p.filled_roles for p in layers)


@SEARCHES
def test_restartable_training_restores_model_after_error(search):
    """Restore at once, although a notebook keeps the error alive."""
    model, train_step, optimizer, seen = problem()
    weight = model[0].weight.detach().clone()

    def fails(step):
        if len(seen) > 11:
            raise RuntimeError("no more data")
        return train_step(step)

    with pytest.raises(RuntimeError, match="no more data") as error:
        search(model, fails, optimizer)
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight, weight)
    assert error.value.__traceback__ is not None


@SEARCHES
def test_restartable_training_restarts_lr_scheduler(search):
    model, train_step, optimizer, _ = problem()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    weight = model[0].weight.detach().clone()
    rates = []

    def decays(step):
        rates.append(optimizer.param_groups[0]["lr"])
        loss = train_step(step)
        scheduler.step()
        return loss

    search(model, decays, optimizer, stateful=[scheduler])
    assert rates.count(0.2) >= 5 * 3  # three trainings at least
    assert sorted(set(rates)) == pytest.approx([0.02, 0.2])
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.2)
    assert torch.equal(model[0].weight, weight)

    message = r"another \[.*name the LR scheduler in stateful="
    refused(message, search, model, decays, optimizer)
    assert torch.equal(model[0].weight, weight)


STATEFUL = "stateful must list objects with state_dict and load_state_dict"


@SEARCHES
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_step": None}, "needs train_step"),
        ({"model": "digits"}, "must be a torch module"),
        ({"stateful": [1]}, STATEFUL),
        ({"stateful": torch.optim.SGD([torch.ones(1)])}, STATEFUL),
        (
            {"config": cpt.QuantConfig(ladder={2: "e2m1", 3: "e4m3"})},
            "the ladder has a hole at level",
        ),
    ],
)
def test_restartable_training_rejects_invalid_arguments(search, changes, message):
    model, train_step, optimizer, _ = problem()
    options = {"model": model, "train_step": train_step, **changes}
    given = options.pop("model"), options.pop("train_step"), optimizer
    refused(message, search, *given, **options)
    assert type(model[0]) is nn.Linear
