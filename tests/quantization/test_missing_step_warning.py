"""Warning for loops that never call ``scheduler.step()``: once for these loops, never for correct ones."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import cpt_core as cpt
from cpt_extras.diagnostics.missing_steps import MAX_UPDATES, remove_finished_hooks

CR = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=40, n_cycles=2)
ENOUGH = MAX_UPDATES + 1  # updates after which the warning comes


def scheduled_net(schedule=CR):
    torch.manual_seed(0)
    net = cpt.quantize_(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
    return net, cpt.PrecisionScheduler(net, schedule)


def loss(model):
    return model(torch.ones(4, 3)).square().sum()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def fused(model):
    return adamw(model, fused=True)


def train_without_steps(model, updates=ENOUGH, optimizer=None, accumulated=1, run=None):
    """Train in a loop that never calls ``step()``."""
    optimizer = optimizer or sgd(model)
    for _ in range(updates):
        for _ in range(accumulated):
            loss(run or model).backward()
        optimizer.step()
        optimizer.zero_grad()


def warnings_of(loop, *args):
    with warnings.catch_warnings(record=True, action="always") as seen:
        loop(*args)
    return [str(w.message) for w in seen]


@pytest.mark.parametrize(
    ("optimizer", "accumulated", "compiled", "last"),
    [
        (sgd, 1, False, 7),
        (sgd, 3, False, 0),
        (fused, 2, False, 0),
        pytest.param(adamw, 3, True, 0, marks=pytest.mark.slow),
    ],
)
def test_missing_step_warns_once(optimizer, accumulated, compiled, last):
    model, scheduler = scheduled_net()
    for _ in range(last):
        scheduler.step()
    run = torch.compile(model, backend="eager") if compiled else model
    options = optimizer(model), accumulated, run
    assert warnings_of(train_without_steps, model, MAX_UPDATES, *options) == []
    (message,) = warnings_of(train_without_steps, model, ENOUGH, *options)
    text = (
        f"{ENOUGH} updates of the weights at step {last} of the schedule: call step()"
    )
    assert text in message
    torch._dynamo.reset()


def test_missing_step_warning_points_at_loop():
    model, _ = scheduled_net()
    with pytest.warns(UserWarning, match="call step") as seen:
        train_without_steps(model)
    assert seen[0].filename == __file__


@pytest.mark.slow
def test_optimizer_step_may_be_compiled():
    model, scheduler = scheduled_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        loss(model).backward()
        step()
        scheduler.step()
    torch._dynamo.reset()


# --- loops that are not warned: each gets the model, an optimizer and the scheduler ---------------


def accumulation(model, optimizer, scheduler):
    """Accumulate many gradients, and evaluate in between."""
    for _ in range(3):
        for _ in range(60):
            loss(model).backward()
            with torch.no_grad(), cpt.precision(model, "q_max"):
                loss(model.eval())
            model.train()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def sharpness_aware(model, optimizer, scheduler):
    for _ in range(ENOUGH):
        for distance in (0.01, -0.01):
            optimizer.zero_grad()
            loss(model).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p += distance
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
    """Update a critic several times and pass gradients to a generator, in one step."""
    for _ in range(4):
        train_without_steps(model, 5, optimizer)
        loss(model).backward()
        scheduler.step()


def gradients_alone(model, optimizer, scheduler):
    for _ in range(ENOUGH):
        loss(model).backward()
        optimizer.zero_grad()


def another_model(model, optimizer, scheduler):
    train_without_steps(nn.Linear(3, 2))


def an_optimizer_per_parameter(model, optimizer, scheduler):
    optimizers = [torch.optim.SGD([p], lr=0.01) for p in model.parameters()]
    for _ in range(ENOUGH):
        loss(model).backward()
        for single in optimizers:
            single.step()
        scheduler.step()


def inside_a_block(model, optimizer, scheduler):
    with cpt.precision(model, 6):
        train_without_steps(model)


def after_the_last_step(model, optimizer, scheduler):
    while scheduler.last_step < scheduler.total_steps - 1:
        scheduler.step()
    train_without_steps(model)


def by_another_scheduler(model, optimizer, scheduler):
    later = cpt.PrecisionScheduler(model, CR)
    for _ in range(ENOUGH):
        train_without_steps(model, 1)
        later.step()


LOOPS = [
    accumulation,
    sharpness_aware,
    closures,
    adversarial,
    gradients_alone,
    another_model,
    an_optimizer_per_parameter,
    inside_a_block,
    after_the_last_step,
    by_another_scheduler,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_missing_step_not_reported_for_correct_loops(loop):
    model, scheduler = scheduled_net()
    assert warnings_of(loop, model, sgd(model), scheduler) == []
    still_counts = loop is not after_the_last_step
    assert len(warnings_of(train_without_steps, model)) == still_counts


@pytest.mark.parametrize("q_min", [None, 8])
def test_missing_step_not_reported_for_constant_schedules(q_min):
    name = "CR" if q_min else "STATIC"
    schedule = cpt.make_schedule(name, q_min, 8, 40, 2)
    model, _ = scheduled_net(schedule)
    assert warnings_of(train_without_steps, model) == []


def test_missing_step_ignores_frozen_layers_and_copies():
    model, _ = scheduled_net()
    cpt.PrecisionScheduler(model.requires_grad_(False), CR)
    model.requires_grad_(True)[2].requires_grad_(False)
    _scheduler = cpt.PrecisionScheduler(model, CR)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with cpt.precision(twin, 4):  # the original alone is counted
            assert warnings_of(train_without_steps, twin) == []
    assert len(warnings_of(train_without_steps, model)) == 1


def test_missing_step_warning_names_idle_followed_optimizer():
    model, _ = scheduled_net()
    scheduler = cpt.PrecisionScheduler(model, CR, optimizer=sgd(model))
    other = sgd(model)  # as a loop makes that switches to another one, or wraps it
    (message,) = warnings_of(train_without_steps, model, ENOUGH, other)
    assert "optimizer that the PrecisionScheduler follows has not stepped" in message
    assert scheduler.last_step == 0


@pytest.mark.slow
def test_missing_step_hook_is_removed_with_scheduler():
    """Compare hooks by key, since schedulers of earlier tests may be collected meanwhile."""
    remove_finished_hooks()
    before = set(torch_optimizer._global_optimizer_post_hooks)
    model, scheduler = scheduled_net()
    (added,) = set(torch_optimizer._global_optimizer_post_hooks) - before
    del model, scheduler
    gc.collect()
    remove_finished_hooks()
    assert added not in torch_optimizer._global_optimizer_post_hooks


@pytest.mark.slow
def test_missing_step_hooks_stay_while_optimizer_runs():
    """Collect a scheduler between two hooks of one optimizer step, and report the other."""
    others = []

    def collect_others(*_):
        if others:
            others.clear()
            gc.collect()

    hook = torch_optimizer.register_optimizer_step_post_hook(collect_others)
    model, scheduler = scheduled_net()
    others += [scheduled_net(), scheduled_net()]
    assert len(warnings_of(train_without_steps, model)) == 1
    hook.remove()
    assert scheduler.last_step == 0
