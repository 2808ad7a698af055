"""A scheduler that follows an optimizer, in loops that know nothing of it."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.scheduler import KEY

STEPS, EVERY = 24, 10
SCHEDULE = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=2)


def made(follow=True):
    """A model, an optimizer and the scheduler, which follows."""
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, cpt.PrecisionScheduler(model, SCHEDULE, optimizer=optimizer if follow else None)


def loss_of(model, step):
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def their_loop(model, optimizer, start=0, stop=STEPS):
    """Train as somebody does who has not heard of precision; return the losses and what he would save halfway."""
    losses, saved = [], io.BytesIO()
    for step in range(start, stop):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == EVERY:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    return losses, saved


def resumed(saved):
    model, optimizer, _ = made()
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer


@pytest.mark.filterwarnings("error")
def test_it_steps_as_if_it_were_called():
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


def test_a_checkpoint_of_theirs_resumes_bit_for_bit():
    model, optimizer, _ = made()
    losses, saved = their_loop(model, optimizer)
    again, _ = their_loop(*resumed(saved), start=EVERY)
    assert again == losses[EVERY:]
    assert again != their_loop(*made()[:2], start=EVERY)[0]


def test_only_updates_count():
    model, optimizer, follower = made()
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


def test_a_second_scheduler_takes_the_place_of_the_first():
    model, optimizer, first = made()
    second = cpt.PrecisionScheduler(model, SCHEDULE, optimizer=optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    assert (first.last_step, second.last_step) == (0, 1)
    assert optimizer.state_dict()[KEY]["last_step"] == 1


def test_wrapped_optimizers_are_followed():
    accelerate = pytest.importorskip("accelerate")
    model, optimizer, _ = made(follow=False)
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    follower = cpt.PrecisionScheduler(model, SCHEDULE, optimizer=wrapped)
    their_loop(model, optimizer, stop=3)
    assert follower.last_step == 3


def test_nobody_is_kept_alive():
    model, optimizer, follower = made()
    gone = weakref.ref(follower)
    del model, optimizer, follower
    gc.collect()
    assert gone() is None


def test_what_would_go_wrong_without_a_word_is_an_error():
    model, optimizer, follower = made()
    with pytest.raises(RuntimeError, match=r"every optimizer\.step\(\) calls step\(\) already"):
        follower.step()
    plain = copy.deepcopy(optimizer).state_dict()
    with pytest.raises(ValueError, match="make it after load_state_dict; with torch"):
        optimizer.load_state_dict(plain)
    other = cpt.make_schedule("LR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=2)
    saved = optimizer.state_dict()
    cpt.PrecisionScheduler(model, other, optimizer=optimizer)
    with pytest.raises(ValueError, match="the checkpoint has schedules"):
        optimizer.load_state_dict(saved)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got list"):
        cpt.PrecisionScheduler(model, SCHEDULE, optimizer=[])


def test_a_wrapper_that_takes_no_hooks_is_named():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self):
            """As timm's: without torch's constructor."""

    model = cpt.quantize_(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="Lookahead takes no hooks; give the optimizer inside of it"):
        cpt.PrecisionScheduler(model, cpt.StaticSchedule(4, 9), optimizer=Lookahead())
