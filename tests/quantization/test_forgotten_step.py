"""A forgotten ``PrecisionScheduler.step()`` is noticed, once; loops that call it in time never hear of it."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule

CR = make_schedule("CR", q_min=3, q_max=8, total_steps=40, n_cycles=2)


def net(classes=2):
    torch.manual_seed(0)
    return quantize_(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, classes)))


def loss(model):
    return model(torch.ones(4, 3)).square().sum()


def by_hand(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p -= 0.01 * p.grad


def through_data(model):  # no version of a tensor moves, nor does it in a fused optimizer
    for p in model.parameters():
        p.data -= 0.01 * p.grad


def forgetting(model, updates=9, update=by_hand, accumulated=1, run=None):
    """Return a loop that calls no ``step()``."""

    def loop():
        for _ in range(updates):
            for _ in range(accumulated):
                loss(run or model).backward()
            update(model)
            model.zero_grad()

    return loop


def said_in(loop):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loop()
    return [str(w.message) for w in seen]


OPTIMIZERS = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.01),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01),
    "fused": lambda weights: torch.optim.AdamW(weights, lr=0.01, fused=True),
}


@pytest.mark.parametrize(
    ("way", "accumulated", "compiled", "last", "after"),
    [("SGD", 1, False, 7, 3), ("SGD", 3, False, 0, 3), ("AdamW", 3, True, 0, 3), (by_hand, 1, False, 7, 3),
     ("fused", 2, False, 0, 50), (through_data, 2, False, 0, 50)],
)  # fmt: skip
def test_a_forgotten_step_is_said_once(way, accumulated, compiled, last, after):
    model = net()
    scheduler = PrecisionScheduler(model, CR)
    for _ in range(last):
        scheduler.step()
    run = torch.compile(model, backend="eager") if compiled else model
    optimizer = OPTIMIZERS[way](model.parameters()) if isinstance(way, str) else None
    how = (lambda _: optimizer.step()) if optimizer else way, accumulated, run
    assert said_in(forgetting(model, after, *how)) == []
    said = said_in(forgetting(model, after + 6, *how))
    assert len(said) == 1
    assert f"{after} updates of the weights at step {last} of the schedule: call step()" in said[0]
    torch._dynamo.reset()


def accumulation(model, optimizer, scheduler):
    for _ in range(3):
        for _ in range(60):
            loss(model).backward()
            with torch.no_grad(), precision(model, "q_max"):  # and evaluated in between
                loss(model.eval())
            model.train()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def sharpness_aware(model, optimizer, scheduler):
    for _ in range(12):
        for away in (0.01, -0.01):
            optimizer.zero_grad()
            loss(model).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p += away
        optimizer.step()
        scheduler.step()


def closures(model, _, scheduler):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=12)

    def closure():
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    for _ in range(4):
        optimizer.step(closure)
        scheduler.step()


def adversarial(model, optimizer, scheduler):
    """A discriminator: two updates of its own, and gradients on the way to a generator, in one step."""
    for _ in range(12):
        forgetting(model, 2, lambda model: optimizer.step())()
        loss(model).backward()
        scheduler.step()


def gradients_alone(model, optimizer, scheduler):
    forgetting(model, 12, lambda model: None)()


def inside_a_block(model, optimizer, scheduler):
    with precision(model, 6):
        forgetting(model, 12)()


def after_the_last_step(model, optimizer, scheduler):
    while scheduler.last_step < scheduler.total_steps - 1:
        scheduler.step()
    forgetting(model, 12)()


def by_another_scheduler(model, optimizer, scheduler):
    own = PrecisionScheduler(model, make_schedule("CR", q_min=3, q_max=6, total_steps=40, n_cycles=2))
    for _ in range(12):
        forgetting(model, 1)()
        own.step()


LEGAL = [
    accumulation, sharpness_aware, closures, adversarial, gradients_alone, inside_a_block,
    after_the_last_step, by_another_scheduler,
]  # fmt: skip


@pytest.mark.parametrize("loop", LEGAL, ids=lambda loop: loop.__name__)
def test_loops_that_forget_nothing_hear_nothing(loop):
    model = net()
    scheduler = PrecisionScheduler(model, CR)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert said_in(lambda: loop(model, optimizer, scheduler)) == []
    assert len(said_in(forgetting(model, 6))) == (loop is not after_the_last_step)  # it is still listening


@pytest.mark.parametrize("schedule", ["STATIC", "CR"])
def test_a_schedule_that_never_changes_has_nothing_to_miss(schedule):
    model = net()
    cycle = {"STATIC": {}, "CR": {"q_min": 8, "n_cycles": 2}}[schedule]
    scheduler = PrecisionScheduler(model, make_schedule(schedule, q_max=8, total_steps=40, **cycle))
    assert said_in(forgetting(model)) == []
    assert scheduler.last_step == 0


def test_frozen_layers_and_copies_are_no_obstacle():
    PrecisionScheduler(net().requires_grad_(False), CR)
    model = net()
    model[2].requires_grad_(False)
    scheduler = PrecisionScheduler(model, CR)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with precision(twin, 4):  # the hook stays with the original
            forgetting(twin)()
    assert scheduler.last_step == 0
    assert len(said_in(forgetting(model))) == 1
