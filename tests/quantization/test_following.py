"""A scheduler that follows an optimizer in loops that know nothing of it; a forgotten ``step()`` is noticed, once."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from helpers import Does, refused
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions
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


@pytest.mark.parametrize("fused", [False, True])  # GradScaler calls the step of a fused one, which leaves itself out
def test_only_updates_count(fused):
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


def test_a_second_scheduler_takes_the_place_of_the_first():
    model, optimizer, first = made()
    second = cpt.PrecisionScheduler(model, SCHEDULE, optimizer=optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    assert (first.last_step, second.last_step) == (0, 1)
    assert optimizer.state_dict()[KEY]["last_step"] == 1


def test_two_models_of_one_optimizer_have_one_scheduler():
    (encoder, *_), (decoder, _, its_own) = made(follow=False), made(follow=False)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    first = cpt.PrecisionScheduler(encoder, SCHEDULE, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"followed already.*PrecisionScheduler\(nn.ModuleList\(\[first, second\]\)"):
        cpt.PrecisionScheduler(decoder, SCHEDULE, optimizer=optimizer)
    assert all(p.driver is its_own for p in layer_precisions(decoder).values())
    loss_of(encoder, 0).backward()
    optimizer.step()
    assert first.last_step == 1
    both = cpt.PrecisionScheduler(nn.ModuleList([encoder, decoder]), SCHEDULE, optimizer=optimizer)
    assert both.follows
    assert not first.follows


@pytest.mark.filterwarnings("error")
def test_a_restored_model_is_followed_no_longer_and_may_be_quantised_again():
    model, optimizer, first = made()
    their_loop(model, optimizer, 0, 3)
    cpt.restore_(model)
    their_loop(model, optimizer, 0, STEPS + 2)  # past the end of the schedule
    assert first.last_step == 3
    assert KEY not in optimizer.state_dict()
    optimizer.load_state_dict({**optimizer.state_dict(), KEY: {}})  # of somebody who is gone
    second = cpt.PrecisionScheduler(cpt.quantize_(model), SCHEDULE, optimizer=optimizer)
    their_loop(model, optimizer, 0, 4)
    assert (first.last_step, second.last_step) == (3, 4)
    assert optimizer.state_dict()[KEY]["last_step"] == 4


def test_of_two_that_follow_the_newest_drives():
    model, optimizer, first = made()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    second = cpt.PrecisionScheduler(model, cpt.StaticSchedule(6, STEPS), optimizer=other)
    for stepped in (optimizer, other, optimizer):
        loss_of(model, 0).backward()
        stepped.step()
        assert {layer.bits for layer in layer_precisions(model).values()} == {6}
    assert (first.follows, second.follows, second.last_step) == (False, True, 1)


@pytest.mark.parametrize(("trained", "before"), [("aaa", ""), ("ab", "a"), ("ab", "")])
def test_a_layer_that_has_not_run_yet_is_in_the_checkpoint(trained, before):
    def made():
        parts = {"body": nn.Linear(8, 8), "a": nn.Linear(8, 2), "b": nn.Linear(8, 3)}
        model = cpt.quantize_(Does(lambda m, x, task: getattr(m, task)(m.body(x)), **parts))
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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_follows_nothing_and_says_so(copied):
    with pytest.warns(UserWarning, match=r"the copy of a PrecisionScheduler follows no optimizer: call its step\(\)"):
        model, _, scheduler = copied(made())
    scheduler.step()
    assert repr(scheduler) == f"PrecisionScheduler(step 1 of {STEPS}, bits [{SCHEDULE(1)}])"
    assert all(p.bits == SCHEDULE(1) for p in layer_precisions(model).values())
    copied(made(follow=False))  # a warning would be an error here


@pytest.mark.parametrize("follow", [True, False])
def test_a_block_keeps_its_bits_while_the_model_trains(follow):
    model, optimizer, scheduler = made(follow)
    ran = []
    model[0].register_forward_hook(lambda layer, *_: ran.append((layer.precision.bits, layer.precision.q_grad)))

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
    refused(r"every optimizer\.step\(\) calls step\(\) already", follower.step, error=RuntimeError)
    plain = copy.deepcopy(optimizer).state_dict()
    refused("make it after load_state_dict; with torch", optimizer.load_state_dict, plain)
    other = cpt.make_schedule("LR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=2)
    saved = optimizer.state_dict()
    cpt.PrecisionScheduler(model, other, optimizer=optimizer)
    refused("the checkpoint has schedules", optimizer.load_state_dict, saved)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got list"):
        cpt.PrecisionScheduler(model, SCHEDULE, optimizer=[])

    late = torch.optim.Adam(model.parameters())
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    late.step()
    with pytest.raises(UserWarning, match=r"begins at step 0: to resume .* before optimizer\.load_state_dict"):
        cpt.PrecisionScheduler(model, SCHEDULE, optimizer=late)
    late.step()  # the error has left no hook
    born_with_a_state = torch.optim.Adagrad(model.parameters())
    cpt.PrecisionScheduler(model, SCHEDULE, optimizer=born_with_a_state)

    class Lookahead(torch.optim.Optimizer):
        def __init__(self):
            """As timm's: without torch's constructor."""

    with pytest.raises(TypeError, match="Lookahead takes no hooks; give the optimizer inside of it"):
        cpt.PrecisionScheduler(model, SCHEDULE, optimizer=Lookahead())


# --- a forgotten step; loops that call it in time never hear of it ------------------------------------

CR = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=40, n_cycles=2)


def net():
    torch.manual_seed(0)
    return cpt.quantize_(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))


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
    """Train in a loop that calls no ``step()``."""
    for _ in range(updates):
        for _ in range(accumulated):
            loss(run or model).backward()
        update(model)
        model.zero_grad()


def said_in(loop, *given):
    with warnings.catch_warnings(record=True, action="always") as seen:
        loop(*given)
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
    scheduler = cpt.PrecisionScheduler(model, CR)
    for _ in range(last):
        scheduler.step()
    run = torch.compile(model, backend="eager") if compiled else model
    optimizer = OPTIMIZERS[way](model.parameters()) if isinstance(way, str) else None
    how = (lambda _: optimizer.step()) if optimizer else way, accumulated, run
    assert said_in(forgetting, model, after, *how) == []
    said = said_in(forgetting, model, after + 6, *how)
    assert len(said) == 1
    assert f"{after} updates of the weights at step {last} of the schedule: call step()" in said[0]
    torch._dynamo.reset()


def accumulation(model, optimizer, scheduler):
    for _ in range(3):
        for _ in range(60):
            loss(model).backward()
            with torch.no_grad(), cpt.precision(model, "q_max"):  # and evaluated in between
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
        forgetting(model, 2, lambda model: optimizer.step())
        loss(model).backward()
        scheduler.step()


def gradients_alone(model, optimizer, scheduler):
    forgetting(model, 12, lambda model: None)


def inside_a_block(model, optimizer, scheduler):
    with cpt.precision(model, 6):
        forgetting(model, 12)


def after_the_last_step(model, optimizer, scheduler):
    while scheduler.last_step < scheduler.total_steps - 1:
        scheduler.step()
    forgetting(model, 12)


def by_another_scheduler(model, optimizer, scheduler):
    own = cpt.PrecisionScheduler(model, cpt.make_schedule("CR", q_min=3, q_max=6, total_steps=40, n_cycles=2))
    for _ in range(12):
        forgetting(model, 1)
        own.step()


LEGAL = [
    accumulation, sharpness_aware, closures, adversarial, gradients_alone, inside_a_block,
    after_the_last_step, by_another_scheduler,
]  # fmt: skip


@pytest.mark.parametrize("loop", LEGAL, ids=lambda loop: loop.__name__)
def test_loops_that_forget_nothing_hear_nothing(loop):
    model = net()
    scheduler = cpt.PrecisionScheduler(model, CR)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert said_in(loop, model, optimizer, scheduler) == []
    assert len(said_in(forgetting, model, 6)) == (loop is not after_the_last_step)  # it is still listening


@pytest.mark.parametrize("schedule", ["STATIC", "CR"])
def test_a_schedule_that_never_changes_has_nothing_to_miss(schedule):
    model = net()
    cycle = {"STATIC": {}, "CR": {"q_min": 8, "n_cycles": 2}}[schedule]
    scheduler = cpt.PrecisionScheduler(model, cpt.make_schedule(schedule, q_max=8, total_steps=40, **cycle))
    assert said_in(forgetting, model) == []
    assert scheduler.last_step == 0


def test_frozen_layers_and_copies_are_no_obstacle():
    cpt.PrecisionScheduler(net().requires_grad_(False), CR)
    model = net()
    model[2].requires_grad_(False)
    scheduler = cpt.PrecisionScheduler(model, CR)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with cpt.precision(twin, 4):  # the hook stays with the original
            forgetting(twin)
    assert scheduler.last_step == 0
    assert len(said_in(forgetting, model)) == 1


def test_an_optimizer_that_does_not_step_is_said():
    model, _, follower = made()
    other = torch.optim.SGD(model.parameters(), lr=0.1)  # as a loop makes that switches to another one, or wraps it
    with pytest.warns(
        UserWarning, match="3 updates .* the optimizer that the PrecisionScheduler follows has not stepped"
    ):
        their_loop(model, other, stop=6)
    assert follower.last_step == 0


def test_gradients_that_a_hook_has_put_away_disturb_nobody():
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    scheduler = cpt.PrecisionScheduler(model, SCHEDULE)
    for _ in range(STEPS):
        model(torch.ones(3, 4)).square().sum().backward()
        scheduler.step()
    assert scheduler.last_step == STEPS
