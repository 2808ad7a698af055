"""PrecisionScheduler: steps, checkpoints, followed optimizers, the precision context manager, evaluation bits."""

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from helpers import FunctionModule, identical, pictures, refused, small, state_of
from torch import nn
from transformers.pytorch_utils import Conv1D

from cpt_core.bitops.plan import count_bitops
from cpt_core.numerics import NUMERICS
from cpt_core.quantization.convert import (
    QuantConfig,
    layer_precisions,
    quantize_,
    restore_,
)
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.integrations.optimizer_hooks import KEY
from cpt_extras.kernels.backend import reference
from cpt_extras.search.custom_schedules import FunctionSchedule, TableSchedule

STEPS = 24


def schedule_of(name="CR", total_steps=STEPS, **changes):
    settings = {"q_min": 3, "q_max": 8, "n_cycles": 2} | changes
    return make_schedule(name, total_steps=total_steps, **settings)


def active_bits(model):
    """Return bits and gradient bits of all layers, checked against the numbers that matmuls use."""
    layers = list(layer_precisions(model).values())
    for p in layers:
        assert p.bits is None or p.num_steps == 2**p.bits - 1
        assert p.q_grad is None or p.grad_num_steps == 2**p.q_grad - 1
    return [(p.bits, p.q_grad) for p in layers]


def range_tensors(model):
    tensors = []
    for p in layer_precisions(model).values():
        tensors += [p.num_steps, p.grad_num_steps, *p.ranges().values()]
    return tensors


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        schedule_of("CR"),
        schedule_of("ETV"),
        StaticSchedule(5, 7),
        FunctionSchedule(lambda u: 2 + 30 * u, total_steps=40),  # up to 32 bits: off
    ],
    ids=["CR", "ETV", "static", "function"],
)
def test_scheduler_steps_follow_schedule(schedule, device):
    """Fill the numbers of all layers in place, as recorded graphs need it."""
    model = quantize_(small().to(device))
    scheduler = PrecisionScheduler(model, schedule)
    places = [t.data_ptr() for t in range_tensors(model)]
    for bits in schedule.bits().tolist():
        assert scheduler.get_last_bits() == [bits]
        assert active_bits(model) == [(bits, schedule.q_max)] * 3
        assert [t.data_ptr() for t in range_tensors(model)] == places
        scheduler.step()


def test_scheduler_takes_schedules_per_layer():
    model = quantize_(small())
    first, rest = schedule_of("LR", q_max=6), schedule_of("ETV")
    scheduler = PrecisionScheduler(model, {"0": first, "*": rest})
    for t in range(STEPS):
        assert scheduler.get_last_bits() == [first(t), rest(t)]
        assert active_bits(model) == [(first(t), 6), (rest(t), 8), (rest(t), 8)]
        scheduler.step()
    with precision(model, "q_max", q_grad="q_max"):
        assert active_bits(model) == [(6, 6), (8, 8), (8, 8)]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"0": 24}, r"layer '3' matches none of the patterns of schedule, 0; add '\*'"),
        (
            {"0": 24, "layer*": 24, "*": 24},
            r"pattern 'layer\*' matches no layer that is left; layers: 0, 3, 5",
        ),
        ({"*": 24, "0": 24}, "pattern '0' matches no layer that is left"),
        ({"0": 24, "*": 48}, r"one length, got \[24, 48\] steps"),
        ({}, "schedule must name one for every layer"),
    ],
)
def test_scheduler_rejects_patterns_without_match(patterns, message):
    model = quantize_(small())
    schedules = {p: schedule_of(total_steps=t) for p, t in patterns.items()}
    refused(message, PrecisionScheduler, model, schedules)
    assert active_bits(model) == [(None, None)] * 3


def holder(*shape, function=torch.matmul):
    """Return a module that holds a parameter, and applies a function to it."""
    weight = nn.Parameter(torch.randn(shape))
    return FunctionModule(lambda m, x: function(x, m.weight), weight=weight)


UNCOVERED = {  # layer that no pattern matches, whether it needs bits
    "linear": (lambda: nn.Linear(4, 4), True),
    "own matmul": (lambda: holder(4, 4), True),
    "GPT-2": (lambda: Conv1D(4, 4), True),
    "linear, one output": (lambda: nn.Linear(4, 1), True),
    "position": (lambda: holder(1, 3, 4, function=torch.add), False),
    "scale": (lambda: holder(4, function=torch.mul), False),
    "scale of a row": (lambda: holder(1, 4, function=torch.mul), False),
}


@pytest.mark.parametrize("name", UNCOVERED)
def test_scheduler_patterns_cover_layers_with_weights(name):
    """Reject them in the scheduler, in a precision block and in a count."""
    make, needs_bits = UNCOVERED[name]
    model = quantize_(nn.Sequential(nn.Linear(4, 4), make()))
    x, schedules = torch.randn(2, 3, 4), {"0": schedule_of()}
    message = r"layer '1' matches none of the patterns of {}, 0; add '\*' for the rest"
    uses = [
        ("schedule", lambda: count_bitops(model, (x,), schedules)),
        ("bits", lambda: precision(model, {"0": 8}).__enter__()),
        ("schedule", lambda: PrecisionScheduler(model, schedules)),
    ]
    for argument, use in uses:
        if needs_bits:
            refused(message.format(argument), use)
        else:
            use()
    if not needs_bits:
        assert model(x).shape == x.shape
    PrecisionScheduler(model, schedules | {"1": schedule_of()})
    is_linear = name.startswith("linear")
    assert list(layer_precisions(model)) == ["0", "1"][: 1 + is_linear]


def test_count_bitops_rejects_matmul_without_pattern():
    """Name a module without weights of its own whose matmul no pattern covers."""
    products = FunctionModule(lambda m, x: x @ x.mT)
    weights = nn.ParameterList([torch.ones(4, 4)])
    listed = FunctionModule(lambda m, x: x @ m.weights[0], weights=weights)
    for layer in (products, listed):
        model = quantize_(nn.Sequential(nn.Linear(4, 4), layer))
        arguments = model, (torch.randn(2, 3, 4),), {"0": schedule_of()}
        message = "layer '1' matches none of the patterns of schedule, 0; add"
        refused(message, count_bitops, *arguments)
        PrecisionScheduler(model, arguments[2])
        refused(message, model, *arguments[1], error=RuntimeError)


def test_scheduler_precision_and_restore_reject_unconverted_models():
    message = r"no quantised layers; call quantize_\(model\) first"
    refused(message, PrecisionScheduler, small(), schedule_of())
    refused(message, precision(small(), 8).__enter__)
    refused("the model has no quantised layers", restore_, small())


def test_scheduler_warns_once_past_the_end():
    model = quantize_(small())
    scheduler = PrecisionScheduler(model, schedule_of())
    for _ in range(STEPS):  # a warning would be an error
        scheduler.step()
    message = f"after the schedule's {STEPS} steps; the last bits are kept"
    with pytest.warns(UserWarning, match=message):
        scheduler.step()
    scheduler.step()
    assert active_bits(model) == [(8, 8)] * 3
    assert scheduler.get_last_bits() == [8]


def test_scheduler_trains_model_converted_in_inference_mode():
    model = small()
    with torch.inference_mode():
        quantize_(model)
    scheduler = PrecisionScheduler(model, schedule_of())
    model(pictures()).sum().backward()
    scheduler.step()


@pytest.mark.parametrize(("factor", "layers"), [(1.0, 0), (1e-8, 2)])
def test_scheduler_warns_of_gradients_below_smallest_step(factor, layers):
    """Warn once, at the first backward pass, of gradients below the smallest step."""
    model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    PrecisionScheduler(model, StaticSchedule(8, 9))

    def backward_warnings():
        with warnings.catch_warnings(record=True, action="always") as caught:
            (factor * model(torch.randn(6, 4)).square().mean()).backward()
        return [str(w.message) for w in caught]

    # a pass that only inspects the model; C++ has no such hook there
    with reference(), precision(model, 8):
        assert backward_warnings() == []
    texts = backward_warnings()
    assert len(texts) == layers
    assert len(set(texts)) <= 1  # one text: Python shows it once
    advice = "no grid has a step below 1e-08. Multiply the loss, and divide"
    assert all(advice in text for text in texts)
    assert backward_warnings() == []


# --- checkpoints ----------------------------------------------------------------------------------


def train_from(model, schedule, steps, state=None):
    """Train from a checkpoint or from the start; return the losses and the next checkpoint."""
    scheduler = PrecisionScheduler(model, schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer, "precision": scheduler}
    for name, part in parts.items() if state else ():
        part.load_state_dict(state[name])
    losses = []
    for seed in steps:
        optimizer.zero_grad()
        loss = model(pictures(seed)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, {name: part.state_dict() for name, part in parts.items()}


@pytest.mark.parametrize(
    ("schedule", "start"),
    [
        (schedule_of("ETH"), "zero"),
        ({"0": StaticSchedule(4, STEPS), "*": schedule_of("ER")}, "corrected"),
        # which continues by its table
        (FunctionSchedule(lambda u: 3 + 5 * u, total_steps=STEPS), "corrected"),
    ],
)
def test_scheduler_resumes_bit_for_bit(schedule, start, tmp_path):
    config, half = QuantConfig(running_start=start, seed=3), STEPS // 2
    straight = quantize_(small(), config)
    expected, _ = train_from(straight, schedule, range(STEPS))
    losses, state = train_from(quantize_(small(), config), schedule, range(half))
    torch.save(state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = quantize_(small(seed=1), config)  # everything comes from the checkpoint
    more, _ = train_from(resumed, schedule, range(half, STEPS), state)

    assert losses + more == expected
    assert identical(state_of(straight), state_of(resumed))
    with precision(straight.eval(), "q_max"), precision(resumed.eval(), "q_max"):
        assert torch.equal(straight(pictures(99)), resumed(pictures(99)))


CR, NO_FIRST = schedule_of("CR"), QuantConfig(float32=("0",))
LAST_STEP = "last_step must be a whole number of at least 0, got -3"
NUMERICS_OF_STATE = "numerics must be a whole number of at least 1, got"
UNKNOWN = "entries that this release does not know: 'noise'. It is of another release"


def with_range(state, name):
    """Return a state with another range of layer 0, or without its noise key."""
    state = copy.deepcopy(state)
    if name == "noise_key":
        del state["layers"]["0"][name]
    else:
        state["layers"]["0"][name] = torch.ones(3)
    return state


@pytest.mark.parametrize(
    ("schedule", "q_grad", "config", "damage", "message"),
    [
        (schedule_of("LR"), None, None, {}, "the checkpoint has schedules .* this sch"),
        (schedule_of(total_steps=STEPS + 1), None, None, {}, "schedules"),
        ({"0": CR, "*": CR}, None, None, {}, "schedules"),
        (CR, 6, None, {}, "q_grad"),
        (CR, None, NO_FIRST, {}, "quantised layers differ from the model's: 0"),
        (CR, None, None, {"last_step": -3}, LAST_STEP),
        (CR, None, None, "noise_key", "of layer '0', which has"),
        (CR, None, None, "other", "holds .*'other'.* of layer '0', which has"),
        (CR, None, None, {"noise": torch.zeros(2)}, UNKNOWN),
        (CR, None, None, {"epoch": 3, "amax": {}}, "does not know: 'amax', 'epoch'"),
        (CR, None, None, {"numerics": "2"}, f"{NUMERICS_OF_STATE} '2'"),
        (CR, None, None, {"numerics": 0}, f"{NUMERICS_OF_STATE} 0"),
    ],
)
def test_scheduler_rejects_foreign_states_unchanged(
    schedule, q_grad, config, damage, message
):
    source = PrecisionScheduler(quantize_(small()), CR)
    for _ in range(3):
        source.step()
    state = source.state_dict()
    state = with_range(state, damage) if isinstance(damage, str) else state | damage
    model = quantize_(small(), config)
    scheduler = PrecisionScheduler(model, schedule, q_grad)
    scheduler.step()
    bits = active_bits(model)
    refused(message, scheduler.load_state_dict, state)
    assert scheduler.last_step == 1
    assert active_bits(model) == bits


def test_scheduler_error_shortens_long_schedules():
    long = FunctionSchedule(lambda u: 3 + round(1e4 * u) % 2, total_steps=10_001)
    state = PrecisionScheduler(quantize_(small()), long).state_dict()
    scheduler = PrecisionScheduler(quantize_(small()), schedule_of())
    message = r"schedules .* characters\), this scheduler .*'CR'"
    with pytest.raises(ValueError, match=message) as error:
        scheduler.load_state_dict(state)
    assert len(str(error.value)) < 3_000


def test_scheduler_warns_of_state_with_different_numerics():
    scheduler = PrecisionScheduler(quantize_(small()), schedule_of())
    state = copy.deepcopy(scheduler.state_dict())
    assert state.pop("numerics") == NUMERICS
    scheduler.step()
    scheduler.load_state_dict(state)  # as releases wrote it before states had a version
    assert scheduler.last_step == 0
    for other in (1, NUMERICS + 1):
        message = f"the state is of numerics {other}, and this release has {NUMERICS}"
        with pytest.warns(UserWarning, match=message):
            scheduler.load_state_dict({**state, "numerics": other})


def named(**parts):
    return nn.ModuleDict(parts)


def compile_parts(model):
    return named(**{n: named(_orig_mod=part) for n, part in model.named_children()})


# Names of layers as DDP and ``torch.compile`` make them.
WRAPPERS = {
    "bare": lambda m: m,
    "ddp": lambda m: named(module=m),
    "compiled": lambda m: named(_orig_mod=m),
    "ddp, compiled": lambda m: named(module=named(_orig_mod=m)),
    "compiled average of ddp": lambda m: named(_orig_mod=named(module=named(module=m))),
    "a part compiled": compile_parts,
}
MODELS = {
    "layers": small,
    "a part named module": lambda: named(module=nn.Linear(2, 2), head=nn.Linear(2, 2)),
    "one layer": lambda: nn.Linear(2, 2),  # without a name, and without parts
}


# a model of one layer has no parts that are compiled by themselves
CASES = [
    (m, w) for m in MODELS for w in WRAPPERS if m != "one layer" or "part" not in w
]


@pytest.mark.parametrize(("model", "wrapper"), CASES)
def test_scheduler_state_is_independent_of_wrappers(model, wrapper):
    """Load what a wrapped model saved into the bare model, and the other way round."""
    for names in ((wrapper, "bare"), ("bare", wrapper)):
        source, target = (WRAPPERS[n](quantize_(MODELS[model]())) for n in names)
        layers = [list(layer_precisions(m).values()) for m in (source, target)]
        for number, layer in enumerate(layers[0], start=1):
            layer.running_input.fill_(number)
        first, second = map(two_schedules, (source, target))
        first.step()
        second.load_state_dict(first.state_dict())
        assert second.last_step == 1
        ranges = [int(layer.running_input[0]) for layer in layers[1]]
        assert ranges == list(range(1, len(ranges) + 1))


def two_schedules(model):
    first, *rest = layer_precisions(model)
    schedules = {first: schedule_of("CR")}
    return PrecisionScheduler(
        model, schedules | {"*": schedule_of("LR")} if rest else schedules
    )


@pytest.mark.parametrize(("trained", "before"), [("aaa", ""), ("ab", "a"), ("ab", "")])
def test_scheduler_state_covers_layers_not_yet_run(trained, before):
    def run(model, *tasks):
        for task in tasks:
            model(torch.ones(4, 8), task).sum().backward()

    def build():
        parts = {"body": nn.Linear(8, 8), "a": nn.Linear(8, 2), "b": nn.Linear(8, 3)}
        model = FunctionModule(lambda m, x, task: getattr(m, task)(m.body(x)), **parts)
        return model, PrecisionScheduler(quantize_(model), schedule_of())

    model, scheduler = build()
    for task in trained:
        run(model, task)
        scheduler.step()
    model, resumed = build()
    run(model, *before)
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.last_step == len(trained)


# --- followed optimizers; tests/integrations/test_hosts.py trains and resumes by them -------------


def follower_of(schedule=None, follow=True):
    """Return a model, an optimizer and the scheduler that follows it."""
    model = quantize_(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    followed = optimizer if follow else None
    scheduler = PrecisionScheduler(model, schedule or schedule_of(), optimizer=followed)
    return model, optimizer, scheduler


def take_steps(model, *optimizers, steps=1):
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
            model(pictures(step)).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_scheduler_following_optimizer_counts_only_updates(fused):
    """Count no step that a GradScaler leaves out; it calls the step of a fused optimizer."""
    model = quantize_(small())
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    follower = PrecisionScheduler(model, schedule_of(), optimizer=optimizer)
    for step in range(3):  # accumulated
        model(pictures(step)).square().mean().backward()
    assert follower.last_step == 0
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor, last_step in ((float("inf"), 1), (1.0, 2)):
        optimizer.zero_grad()
        scaler.scale(model(pictures()).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert follower.last_step == last_step


def test_scheduler_replaces_earlier_follower_of_optimizer():
    model, optimizer, first = follower_of()
    second = PrecisionScheduler(model, schedule_of(), optimizer=optimizer)
    take_steps(model, optimizer)
    assert (first.last_step, second.last_step) == (0, 1)
    assert optimizer.state_dict()[KEY]["last_step"] == 1


def test_scheduler_newest_follower_sets_the_bits():
    model, optimizer, first = follower_of()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    second = PrecisionScheduler(model, StaticSchedule(6, STEPS), optimizer=other)
    for stepped in (optimizer, other, optimizer):
        take_steps(model, stepped)
        assert active_bits(model) == [(6, 6)] * 3
    assert (first.follows, second.follows, second.last_step) == (False, True, 1)


def test_scheduler_rejects_second_model_of_one_optimizer():
    (encoder, *_), (decoder, _, own) = (follower_of(follow=False) for _ in range(2))
    both = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    first = PrecisionScheduler(encoder, schedule_of(), optimizer=optimizer)
    refused(
        r"followed already.*PrecisionScheduler\(nn.ModuleList\(\[first, second\]\)",
        lambda: PrecisionScheduler(decoder, schedule_of(), optimizer=optimizer),
    )
    owners = {p.owning_scheduler for p in layer_precisions(decoder).values()}
    assert owners == {own}
    take_steps(encoder, optimizer)
    assert first.last_step == 1
    of_both = PrecisionScheduler(both, schedule_of(), optimizer=optimizer)
    assert (first.follows, of_both.follows) == (False, True)


@pytest.mark.filterwarnings("error")
def test_scheduler_stops_following_after_restore():
    """Allow quantising a restored model again with a new scheduler."""
    model, optimizer, first = follower_of()
    take_steps(model, optimizer, steps=3)
    restore_(model)
    take_steps(model, optimizer, steps=STEPS + 2)  # past the end of the schedule
    assert first.last_step == 3
    assert KEY not in optimizer.state_dict()
    optimizer.load_state_dict({**optimizer.state_dict(), KEY: {}})  # of a former one
    second = PrecisionScheduler(quantize_(model), schedule_of(), optimizer=optimizer)
    take_steps(model, optimizer, steps=4)
    assert (first.last_step, second.last_step) == (3, 4)
    assert optimizer.state_dict()[KEY]["last_step"] == 4


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_scheduler_copy_follows_no_optimizer_and_warns(copied):
    message = (
        r"the copy of a PrecisionScheduler follows no optimizer: call its step\(\)"
    )
    with pytest.warns(UserWarning, match=message):
        model, _, scheduler = copied(follower_of())
    scheduler.step()
    bits = schedule_of()(1)
    assert repr(scheduler) == f"PrecisionScheduler(step 1 of {STEPS}, bits [{bits}])"
    assert active_bits(model) == [(bits, 8)] * 3
    copied(follower_of(follow=False))  # a warning would be an error here


@pytest.mark.slow
def test_scheduler_and_optimizer_are_garbage_collected():
    model, optimizer, follower = follower_of()
    reference_to_it = weakref.ref(follower)
    del model, optimizer, follower
    gc.collect()
    assert reference_to_it() is None


class Lookahead(torch.optim.Optimizer):
    def __init__(self):
        """As timm's: without torch's constructor."""


def test_scheduler_rejects_invalid_following():
    """Reject silent errors: double steps, missing or different states, unsupported optimizers."""
    model, optimizer, follower = follower_of()

    def follow(optimizer):
        return PrecisionScheduler(model, schedule_of(), optimizer=optimizer)

    twice = r"every optimizer\.step\(\) calls step\(\) already"
    refused(twice, follower.step, error=RuntimeError)
    plain = copy.deepcopy(optimizer).state_dict()
    message = "make it after load_state_dict; with torch"
    refused(message, optimizer.load_state_dict, plain)
    saved = optimizer.state_dict()
    PrecisionScheduler(model, schedule_of("LR"), optimizer=optimizer)
    refused("the checkpoint has schedules", optimizer.load_state_dict, saved)
    for unsupported, message in (
        ([], r"optimizer must be a torch\.optim\.Optimizer, got list"),
        (Lookahead(), "Lookahead takes no hooks; give the optimizer inside of it"),
    ):
        refused(message, follow, unsupported, error=TypeError)

    late = torch.optim.Adam(model.parameters())
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    late.step()
    message = r"begins at step 0: to resume .* before optimizer\.load_state_dict"
    refused(message, follow, late, error=UserWarning)
    late.step()  # the error has left no hook
    follow(torch.optim.Adagrad(model.parameters()))  # it is born with a state


# --- the context manager --------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [False, True])
def test_precision_block_restores_scheduler_bits(broken):
    model = quantize_(small())
    scheduler = PrecisionScheduler(model, schedule_of(), q_grad=7)
    expected = model(pictures())
    try:
        with precision(model, 5, q_grad=2) as same:
            assert same is model
            assert active_bits(model) == [(5, 2)] * 3
            assert not torch.equal(model(pictures()), expected)
            with precision(model, "float"):
                assert active_bits(model) == [(None, None)] * 3
                with precision(model, "q_max", q_grad="float"):
                    assert active_bits(model) == [(8, None)] * 3
            assert active_bits(model) == [(5, 2)] * 3
            if broken:
                raise KeyError("an error in the block")
    except KeyError:
        assert broken
    assert active_bits(model) == [(3, 7)] * 3
    assert torch.equal(model(pictures()), expected)
    scheduler.step()
    assert scheduler.get_last_bits() == [active_bits(model)[0][0]]


@pytest.mark.parametrize("follow", [True, False])
def test_precision_block_keeps_bits_while_training(follow):
    model, optimizer, scheduler = follower_of(follow=follow)
    bits_of_passes = []
    model[0].register_forward_hook(
        lambda *_: bits_of_passes.append(active_bits(model)[0])
    )

    def train(steps):
        for _ in range(steps):
            take_steps(model, optimizer)
            if not follow:
                scheduler.step()

    with precision(model, 6, 7):
        train(2)
        with precision(model, "float"):
            train(2)
            twin = copy.deepcopy(model)
        train(1)
    train(1)
    after = (schedule_of()(5), 8)
    expected = [(6, 7)] * 2 + [(None, None)] * 2 + [(6, 7), after]
    assert bits_of_passes[: len(expected)] == expected
    assert active_bits(model) == [(schedule_of()(6), 8)] * 3
    PrecisionScheduler(twin, schedule_of())
    assert active_bits(twin) == [(3, 8)] * 3


@pytest.mark.parametrize("has_earlier", [False, True])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("steps", [0, 5])
def test_scheduler_made_in_precision_block_applies_after_it(
    steps, is_nested, has_earlier
):
    model = quantize_(small())
    bits_of_block = [(2, 7) if is_nested else (6, 7)] * 3
    if has_earlier:
        earlier = PrecisionScheduler(model, StaticSchedule(4, STEPS), q_grad=4)
    with precision(model, 6, 7):
        with precision(model, 2) if is_nested else nullcontext():
            scheduler = PrecisionScheduler(model, schedule_of())
            for _ in range(steps):
                scheduler.step()
            twin = copy.deepcopy(model)
            assert active_bits(twin) == active_bits(model) == bits_of_block
        assert active_bits(model) == [(6, 7)] * 3
    assert active_bits(model) == [(schedule_of()(steps), 8)] * 3
    scheduler.step()
    assert active_bits(model) == [(schedule_of()(steps + 1), 8)] * 3
    assert active_bits(twin) == bits_of_block
    with precision(model, 6):  # which nothing changes
        pass
    assert active_bits(model) == [(schedule_of()(steps + 1), 8)] * 3
    if has_earlier:  # the last one that asks decides, as outside of a block
        with precision(model, 6):
            earlier.step()
        assert active_bits(model) == [(4, 4)] * 3


def test_scheduler_made_in_block_keeps_layers_of_others():
    model = quantize_(small())
    PrecisionScheduler(model, StaticSchedule(4, STEPS), q_grad=4)
    with precision(model, 6):
        scheduler = PrecisionScheduler(model[0], StaticSchedule(5, STEPS))
    assert active_bits(model) == [(5, 5), (4, 4), (4, 4)]
    with precision(model, 6):
        model.eval()
        scheduler.eval_bits = 3
    assert active_bits(model) == [(3, 5), (4, 4), (4, 4)]


def test_precision_block_without_scheduler_leaves_no_bits():
    model = quantize_(small())
    with precision(model, 6):
        assert active_bits(model) == [(6, 6)] * 3
    message = "no precision yet: make a PrecisionScheduler"
    refused(message, model, pictures(), error=RuntimeError)
    message = "layer '0' has no q_max yet: make a PrecisionScheduler first"
    refused(message, precision(model, "q_max").__enter__)


@pytest.mark.parametrize(
    ("bits", "more"),
    [(33, ""), ("8", ", 'q_max' or 'float'"), ("max", ", 'q_max' or 'float'")],
)
def test_precision_rejects_invalid_bits(bits, more):
    model = quantize_(small())
    PrecisionScheduler(model, schedule_of())
    for options in ({"bits": bits}, {"bits": 8, "q_grad": bits}):
        block = precision(model, **options)
        refused(f"an integer from 1 to 32{more}, got", block.__enter__)
    assert active_bits(model) == [(3, 8)] * 3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bits", ["float", 24, 32])
def test_precision_float_equals_unconverted_model(bits, training, device):
    plain, model = (small().to(device).train(training) for _ in range(2))
    PrecisionScheduler(quantize_(model), schedule_of())
    x = pictures().to(device)
    # "float" alone switches off the rounding of gradients, too
    with precision(model, bits, q_grad=None if bits == "float" else "float"):
        y = model(x)
        y.square().sum().backward()
    expected = plain(x)
    expected.square().sum().backward()
    gradients = [[p.grad for p in m.parameters()] for m in (model, plain)]
    assert identical([y, *gradients[0]], [expected, *gradients[1]])


# --- bits of evaluation ---------------------------------------------------------------------------


def test_scheduler_eval_bits_apply_in_eval_mode():
    def levels(model):
        return {layer.active_levels for layer in layer_precisions(model).values()}

    layers = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
    model = quantize_(nn.Sequential(*layers)).eval()
    schedule = TableSchedule(((3, 2), (6, 2)))
    scheduler = PrecisionScheduler(model, schedule, q_grad=5, eval_bits="q_max")
    assert levels(model) == {(6, 6, 5, 5)}
    model.train()
    assert levels(model) == {(3, 3, 5, 5)}
    scheduler.step()
    with precision(model, 2):
        model.eval()
        assert levels(model) == {(2, 2, 5, 5)}
    assert levels(model) == {(6, 6, 5, 5)}
    scheduler.eval_bits = 4
    assert levels(model) == {(4, 4, 5, 5)}
    scheduler.step()
    assert levels(model) == {(4, 4, 5, 5)}
    scheduler.eval_bits = "float"
    assert levels(model) == {(None,) * 4}
    model[1].train()  # a part by itself
    assert [p.bits for p in layer_precisions(model).values()] == [None, 6]
    message = "eval_bits: expected 'q_max', 'current', 'float' or an integer"
    refused(message, setattr, scheduler, "eval_bits", "max")
    scheduler.eval_bits = "current"
    assert levels(model) == {(6, 6, 5, 5)}
    twin, its_scheduler = copy.deepcopy((model, scheduler))
    its_scheduler.eval_bits = 7
    twin.eval()
    assert (levels(twin), levels(model)) == ({(7, 7, 5, 5)}, {(6, 6, 5, 5)})


@pytest.mark.parametrize(
    ("last_bits", "eval_bits", "warns"),
    [
        (24, 8, True),
        (32, 8, True),
        (23, 8, False),
        (32, "current", False),
        (32, "q_max", False),
        (32, "float", False),
    ],
)
def test_scheduler_warns_of_stale_running_ranges(last_bits, eval_bits, warns):
    model = quantize_(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    schedule = FunctionSchedule(
        lambda step: 4 if step < 3 else last_bits, 6, argument="step"
    )
    with warnings.catch_warnings(record=True, action="always") as caught:
        PrecisionScheduler(model, schedule, eval_bits=eval_bits)
    texts = [str(w.message) for w in caught]
    assert [text.startswith("layer '0' is in float32") for text in texts] == [
        True
    ] * warns
