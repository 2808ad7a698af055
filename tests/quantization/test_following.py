"""Schedulers attached to an optimizer, in training loops that never call ``scheduler.step()``."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from helpers import FunctionModule, refused
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions
from cpt_extras.integrations.optimizer_hooks import KEY

STEPS, EVERY = 24, 10
SCHEDULE = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=2)


def made(follow=True):
    """Return a model, an optimizer and the scheduler that follows it."""
    torch.manual_seed(0)
    model = cpt.quantize_(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return (
        model,
        optimizer,
        cpt.PrecisionScheduler(
            model, SCHEDULE, optimizer=optimizer if follow else None
        ),
    )


def loss_of(model, step):
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def their_loop(model, optimizer, start=0, stop=STEPS):
    """Train in a loop unaware of precision; return the losses and a checkpoint saved halfway."""
    losses, saved = [], io.BytesIO()
    for step in range(start, stop):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == EVERY:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                saved,
            )
    return losses, saved


def resumed(saved):
    model, optimizer, _ = made()
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer


@pytest.mark.filterwarnings("error")
def test_scheduler_following_optimizer_equals_explicit_steps():
    model, optimizer, follower = made()
    losses, _ = their_loop(model, optimizer)
    theirs, beside, scheduler = made(follow=False)
    for step, found in enumerate(losses):
        loss = loss_of(theirs, step)
        assert loss.item() == found
        loss.backward()
        beside.step()
        beside.zero_grad()
        scheduler.step()
    assert follower.last_step == scheduler.last_step == STEPS


def test_scheduler_following_optimizer_resumes_bit_for_bit():
    model, optimizer, _ = made()
    losses, saved = their_loop(model, optimizer)
    again, _ = their_loop(*resumed(saved), start=EVERY)
    assert again == losses[EVERY:]
    assert again != their_loop(*made()[:2], start=EVERY)[0]


@pytest.mark.parametrize(
    "fused", [False, True]
)  # GradScaler calls the step of a fused one, which leaves itself out
def test_scheduler_following_optimizer_counts_only_updates(fused):
    model, optimizer, _ = made(follow=False)
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    follower = cpt.PrecisionScheduler(model, SCHEDULE, optimizer=optimizer)
    for step in range(3):  # accumulated
        loss_of(model, step).backward()
    assert follower.last_step == 0
    optimizer.step()
    assert follower.last_step == 1
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 4) * float("inf")).backward()
    scaler.step(optimizer)  # it leaves out what is not finite
    assert follower.last_step == 1
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 5)).backward()
    scaler.step(optimizer)
    assert follower.last_step == 2


def test_scheduler_replaces_earlier_follower_of_optimizer():
    model, optimizer, first = made()
    second = cpt.PrecisionScheduler(model, SCHEDULE, optimizer=optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    assert (first.last_step, second.last_step) == (0, 1)
    assert optimizer.state_dict()[KEY]["last_step"] == 1


def test_scheduler_rejects_second_model_of_one_optimizer():
    (encoder, *_), (decoder, _, its_own) = made(follow=False), made(follow=False)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    first = cpt.PrecisionScheduler(encoder, SCHEDULE, optimizer=optimizer)
    with pytest.raises(
        ValueError,
        match=r"followed already.*PrecisionScheduler\(nn.ModuleList\(\[first, second\]\)",
    ):
        cpt.PrecisionScheduler(decoder, SCHEDULE, optimizer=optimizer)
    assert all(
        p.owning_scheduler is its_own for p in layer_precisions(decoder).values()
    )
    loss_of(encoder, 0).backward()
    optimizer.step()
    assert first.last_step == 1
    both = cpt.PrecisionScheduler(
        nn.ModuleList([encoder, decoder]), SCHEDULE, optimizer=optimizer
    )
    assert both.follows
    assert not first.follows


@pytest.mark.filterwarnings("error")
def test_scheduler_stops_following_after_restore():
    """Allow quantising a restored model again with a new scheduler."""
    model, optimizer, first = made()
    their_loop(model, optimizer, 0, 3)
    cpt.restore_(model)
    their_loop(model, optimizer, 0, STEPS + 2)  # past the end of the schedule
    assert first.last_step == 3
    assert KEY not in optimizer.state_dict()
    optimizer.load_state_dict(
        {**optimizer.state_dict(), KEY: {}}
    )  # of somebody who is gone
    second = cpt.PrecisionScheduler(cpt.quantize_(model), SCHEDULE, optimizer=optimizer)
    their_loop(model, optimizer, 0, 4)
    assert (first.last_step, second.last_step) == (3, 4)
    assert optimizer.state_dict()[KEY]["last_step"] == 4


def test_scheduler_newest_follower_sets_the_bits():
    model, optimizer, first = made()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    second = cpt.PrecisionScheduler(
        model, cpt.StaticSchedule(6, STEPS), optimizer=other
    )
    for stepped in (optimizer, other, optimizer):
        loss_of(model, 0).backward()
        stepped.step()
        assert {layer.bits for layer in layer_precisions(model).values()} == {6}
    assert (first.follows, second.follows, second.last_step) == (False, True, 1)


@pytest.mark.parametrize(("trained", "before"), [("aaa", ""), ("ab", "a"), ("ab", "")])
def test_scheduler_state_covers_layers_not_yet_run(trained, before):
    def made():
        parts = {"body": nn.Linear(8, 8), "a": nn.Linear(8, 2), "b": nn.Linear(8, 3)}
        model = cpt.quantize_(
            FunctionModule(lambda m, x, task: getattr(m, task)(m.body(x)), **parts)
        )
        return model, cpt.PrecisionScheduler(model, SCHEDULE)

    model, scheduler = made()
    for task in trained:
        model(torch.ones(4, 8), task).sum().backward()
        scheduler.step()
    model, again = made()
    for task in before:
        model(torch.ones(4, 8), task)
    again.load_state_dict(scheduler.state_dict())
    assert again.last_step == len(trained)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_scheduler_copy_follows_no_optimizer_and_warns(copied):
    with pytest.warns(
        UserWarning,
        match=r"the copy of a PrecisionScheduler follows no optimizer: call its step\(\)",
    ):
        model, _, scheduler = copied(made())
    scheduler.step()
    assert (
        repr(scheduler)
        == f"PrecisionScheduler(step 1 of {STEPS}, bits [{SCHEDULE(1)}])"
    )
    assert all(p.bits == SCHEDULE(1) for p in layer_precisions(model).values())
    copied(made(follow=False))  # a warning would be an error here


@pytest.mark.parametrize("follow", [True, False])
def test_precision_block_keeps_bits_while_training(follow):
    model, optimizer, scheduler = made(follow)
    ran = []
    model[0].register_forward_hook(
        lambda layer, *_: ran.append((layer.precision.bits, layer.precision.q_grad))
    )

    def train(steps):
        for _ in range(steps):
            loss_of(model, scheduler.last_step).backward()
            optimizer.step()
            if not follow:
                scheduler.step()

    with cpt.precision(model, 6, 7):
        train(2)
        with cpt.precision(model, "float"):
            train(2)
            within = copy.deepcopy(model)
        train(1)
    train(1)
    assert ran == [(6, 7)] * 2 + [(None, None)] * 2 + [(6, 7), (SCHEDULE(5), 8)]
    assert model[0].precision.bits == SCHEDULE(6)
    cpt.PrecisionScheduler(within, SCHEDULE)
    assert within[0].precision.bits == SCHEDULE(0)


def test_scheduler_follows_wrapped_optimizers():
    accelerate = pytest.importorskip("accelerate")
    model, optimizer, _ = made(follow=False)
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    follower = cpt.PrecisionScheduler(model, SCHEDULE, optimizer=wrapped)
    their_loop(model, optimizer, stop=3)
    assert follower.last_step == 3


def test_scheduler_and_optimizer_are_garbage_collected():
    model, optimizer, follower = made()
    gone = weakref.ref(follower)
    del model, optimizer, follower
    gc.collect()
    assert gone() is None


def test_scheduler_rejects_invalid_following():
    """Reject silent errors: double steps, missing or different states, unsupported optimizers."""
    model, optimizer, follower = made()
    refused(
        r"every optimizer\.step\(\) calls step\(\) already",
        follower.step,
        error=RuntimeError,
    )
    plain = copy.deepcopy(optimizer).state_dict()
    refused(
        "make it after load_state_dict; with torch", optimizer.load_state_dict, plain
    )
    other = cpt.make_schedule("LR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=2)
    saved = optimizer.state_dict()
    cpt.PrecisionScheduler(model, other, optimizer=optimizer)
    refused("the checkpoint has schedules", optimizer.load_state_dict, saved)
    with pytest.raises(
        TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got list"
    ):
        cpt.PrecisionScheduler(model, SCHEDULE, optimizer=[])

    late = torch.optim.Adam(model.parameters())
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    late.step()
    with pytest.raises(
        UserWarning,
        match=r"begins at step 0: to resume .* before optimizer\.load_state_dict",
    ):
        cpt.PrecisionScheduler(model, SCHEDULE, optimizer=late)
    late.step()  # the error has left no hook
    born_with_a_state = torch.optim.Adagrad(model.parameters())
    cpt.PrecisionScheduler(model, SCHEDULE, optimizer=born_with_a_state)

    class Lookahead(torch.optim.Optimizer):
        def __init__(self):
            """As timm's: without torch's constructor."""

    with pytest.raises(
        TypeError, match="Lookahead takes no hooks; give the optimizer inside of it"
    ):
        cpt.PrecisionScheduler(model, SCHEDULE, optimizer=Lookahead())
