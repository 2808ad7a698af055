"""PrecisionScheduler: steps, checkpoints, the precision context manager, evaluation bits."""

import copy
import warnings

import pytest
import torch
from helpers import pictures, refused, small, state_of
from torch import nn

from cpt_core.numerics import NUMERICS
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.kernels.backend import reference
from cpt_extras.search.custom_schedules import FunctionSchedule, TableSchedule

STEPS = 24


def schedule_of(name="CR", total_steps=STEPS, **changes):
    return make_schedule(
        name,
        **{"q_min": 3, "q_max": 8, "total_steps": total_steps, "n_cycles": 2} | changes,
    )


def in_force(model):
    """Return bits and gradient bits of all layers, checked against the numbers that matmuls use."""
    layers = list(layer_precisions(model).values())
    for p in layers:
        assert p.bits is None or p.num_steps == 2**p.bits - 1
        assert p.q_grad is None or p.grad_num_steps == 2**p.q_grad - 1
    return [(p.bits, p.q_grad) for p in layers]


# --- the scheduler --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        schedule_of("CR"),
        schedule_of("ETV"),
        StaticSchedule(5, 7),
        FunctionSchedule(
            lambda u: 2 + 30 * u, total_steps=40
        ),  # up to 32 bits, where quantisation is off
    ],
    ids=["CR", "ETV", "static", "function"],
)
def test_scheduler_steps_follow_schedule(schedule, device):
    model = quantize_(small().to(device))
    scheduler = PrecisionScheduler(model, schedule)
    layers = layer_precisions(model).values()
    numbers = [
        t for p in layers for t in (p.num_steps, p.grad_num_steps, *p.ranges().values())
    ]
    places = [t.data_ptr() for t in numbers]
    for bits in schedule.bits().tolist():
        assert scheduler.get_last_bits() == [bits]
        assert in_force(model) == [(bits, schedule.q_max)] * 3
        now = [
            t
            for p in layers
            for t in (p.num_steps, p.grad_num_steps, *p.ranges().values())
        ]
        assert [
            t.data_ptr() for t in now
        ] == places  # filled in place, as recorded graphs need it
        scheduler.step()


def test_scheduler_takes_schedules_per_layer():
    model = quantize_(small())
    first, rest = schedule_of("LR", q_max=6), schedule_of("ETV")
    scheduler = PrecisionScheduler(model, {"0": first, "*": rest})
    for t in range(STEPS):
        assert scheduler.get_last_bits() == [first(t), rest(t)]
        assert in_force(model) == [(first(t), 6), (rest(t), 8), (rest(t), 8)]
        scheduler.step()
    with precision(model, "q_max", q_grad="q_max"):
        assert in_force(model) == [(6, 6), (8, 8), (8, 8)]


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
    refused(
        message,
        PrecisionScheduler,
        model,
        {p: schedule_of(total_steps=t) for p, t in patterns.items()},
    )
    assert in_force(model) == [(None, None)] * 3


@pytest.mark.parametrize(
    "use",
    [
        lambda m: PrecisionScheduler(m, schedule_of()),
        lambda m: precision(m, 8).__enter__(),
    ],
)
def test_scheduler_and_precision_reject_unconverted_models(use):
    refused(r"no quantised layers; call quantize_\(model\) first", use, small())


def test_scheduler_warns_once_past_the_end():
    model = quantize_(small())
    scheduler = PrecisionScheduler(model, schedule_of())
    for _ in range(STEPS):  # as many as there are steps: all is well
        scheduler.step()
    with pytest.warns(
        UserWarning, match=f"after the schedule's {STEPS} steps; the last bits are kept"
    ):
        scheduler.step()
    scheduler.step()
    assert in_force(model) == [(8, 8)] * 3
    assert scheduler.get_last_bits() == [8]


# --- checkpoints ----------------------------------------------------------------------------------


def run_from(model, schedule, steps, state=None):
    """Train from a checkpoint or from the start; return the losses and the next checkpoint."""
    scheduler = PrecisionScheduler(model, schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["precision"])
    losses = []
    for seed in steps:
        optimizer.zero_grad()
        loss = model(pictures(seed)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    parts = {"model": model, "optimizer": optimizer, "precision": scheduler}
    return losses, {k: v.state_dict() for k, v in parts.items()}


@pytest.mark.parametrize(
    ("schedule", "start"),
    [
        (lambda: schedule_of("ETH"), "zero"),
        (lambda: {"0": StaticSchedule(4, STEPS), "*": schedule_of("ER")}, "corrected"),
        (
            lambda: FunctionSchedule(lambda u: 3 + 5 * u, total_steps=STEPS),
            "corrected",
        ),  # which continues by its table
    ],
)
def test_scheduler_resumes_bit_for_bit(schedule, start, tmp_path):
    config = QuantConfig(running_start=start, seed=3)
    straight = quantize_(small(), config)
    expected, _ = run_from(straight, schedule(), range(STEPS))

    half = STEPS // 2
    losses, state = run_from(quantize_(small(), config), schedule(), range(half))
    torch.save(state, tmp_path / "state.pt")
    resumed = quantize_(small(seed=1), config)  # everything comes from the checkpoint
    more, _ = run_from(
        resumed,
        schedule(),
        range(half, STEPS),
        torch.load(tmp_path / "state.pt", weights_only=True),
    )

    assert losses + more == expected
    assert all(
        torch.equal(a, b)
        for a, b in zip(straight.parameters(), resumed.parameters(), strict=True)
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(state_of(straight), state_of(resumed), strict=True)
    )
    with precision(straight.eval(), "q_max"), precision(resumed.eval(), "q_max"):
        assert torch.equal(straight(pictures(99)), resumed(pictures(99)))


def test_scheduler_error_shortens_long_schedules():
    model, schedule = (
        quantize_(small()),
        FunctionSchedule(lambda u: 3 + round(1e4 * u) % 2, total_steps=10_001),
    )
    state, said = (
        PrecisionScheduler(model, schedule).state_dict(),
        r"schedules .* characters\), this scheduler .*'CR'",
    )
    with pytest.raises(ValueError, match=said) as found:
        PrecisionScheduler(model, schedule_of()).load_state_dict(state)
    assert len(str(found.value)) < 3_000


@pytest.mark.parametrize(
    ("schedule", "q_grad", "config", "message"),
    [
        (
            schedule_of("LR"),
            None,
            None,
            "the checkpoint has schedules .* this scheduler",
        ),
        (schedule_of("CR", total_steps=STEPS + 1), None, None, "schedules"),
        ({"0": schedule_of("CR"), "*": schedule_of("CR")}, None, None, "schedules"),
        (schedule_of("CR"), 6, None, "q_grad"),
        (
            schedule_of("CR"),
            None,
            QuantConfig(float32=("0",)),
            "quantised layers differ from the model's: 0",
        ),
    ],
)
def test_scheduler_rejects_checkpoints_of_different_runs(
    schedule, q_grad, config, message
):
    source = PrecisionScheduler(quantize_(small()), schedule_of("CR"))
    source.step()
    model = quantize_(small(), config)
    scheduler = PrecisionScheduler(model, schedule, q_grad)
    before = in_force(model)
    refused(message, scheduler.load_state_dict, source.state_dict())
    assert scheduler.last_step == 0
    assert in_force(model) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda state: state.update(last_step=-3),
            "last_step must be a whole number of at least 0, got -3",
        ),
        (
            lambda state: state["layers"]["0"].pop("noise_key"),
            "of layer '0', which has",
        ),
        (
            lambda state: state["layers"]["0"].update(other=torch.ones(3)),
            "holds .*'other'.* of layer '0', which has",
        ),
    ],
)
def test_scheduler_rejects_damaged_state_unchanged(damage, message):
    model = quantize_(small())
    scheduler = PrecisionScheduler(model, schedule_of())
    scheduler.step()
    state, before = copy.deepcopy(scheduler.state_dict()), in_force(model)
    damage(state)
    with pytest.raises(ValueError, match=message):
        scheduler.load_state_dict(state)
    assert scheduler.last_step == 1
    assert in_force(model) == before


def test_scheduler_trains_model_converted_in_inference_mode():
    model = small()
    with torch.inference_mode():
        quantize_(model)
    scheduler = PrecisionScheduler(model, schedule_of())
    model(pictures()).sum().backward()
    scheduler.step()


def named(**parts):
    return nn.ModuleDict(parts)


# Names of layers as DDP and ``torch.compile`` make them; for themselves: test_processes, test_compiled.
WRAPPED = {
    "bare": lambda m: m,
    "ddp": lambda m: named(module=m),
    "compiled": lambda m: named(_orig_mod=m),
    "ddp, compiled": lambda m: named(module=named(_orig_mod=m)),
    "compiled average of ddp": lambda m: named(_orig_mod=named(module=named(module=m))),
    "a part compiled": lambda m: named(
        **{name: named(_orig_mod=part) for name, part in m.named_children()}
    ),
}
MODELS = {
    "layers": small,
    "a part named module": lambda: named(module=nn.Linear(2, 2), head=nn.Linear(2, 2)),
    "one layer": lambda: nn.Linear(2, 2),  # without a name, and without parts
}


# What goes to the bare model and what comes from it: the names of the one are those of the other, so any fits any.
PAIRS = [(way, "bare") for way in WRAPPED] + [
    ("bare", way) for way in WRAPPED if way != "bare"
]


@pytest.mark.parametrize(
    ("model", "source", "target"),
    [
        (m, *p)
        for m in MODELS
        for p in PAIRS
        if not (m == "one layer" and "a part compiled" in p)
    ],
)
def test_scheduler_state_is_independent_of_wrappers(model, source, target):
    schedulers = []
    for wrapper in (source, target):
        wrapped = WRAPPED[wrapper](quantize_(MODELS[model]()))
        first, *rest = layer_precisions(wrapped)
        patterns = {first: schedule_of("CR")} | (
            {"*": schedule_of("LR")} if rest else {}
        )
        schedulers.append(PrecisionScheduler(wrapped, patterns))
    theirs, mine = (list(scheduler._layers.values()) for scheduler in schedulers)
    for number, layer in enumerate(theirs):
        layer.running_input.fill_(number + 1)
    schedulers[0].step()
    schedulers[1].load_state_dict(schedulers[0].state_dict())
    assert schedulers[1].last_step == 1
    assert [layer.running_input[0] for layer in mine] == list(range(1, len(theirs) + 1))


# --- the context manager --------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [False, True])
def test_precision_block_restores_scheduler_bits(broken):
    model = quantize_(small())
    scheduler = PrecisionScheduler(model, schedule_of(), q_grad=7)
    expected = model(pictures())
    try:
        with precision(model, 5, q_grad=2) as same:
            assert same is model
            assert in_force(model) == [(5, 2)] * 3
            assert not torch.equal(model(pictures()), expected)
            with precision(model, "float"):
                assert in_force(model) == [(None, None)] * 3
                with precision(model, "q_max", q_grad="float"):
                    assert in_force(model) == [(8, None)] * 3
            assert in_force(model) == [(5, 2)] * 3
            if broken:
                raise KeyError("an error in the block")
    except KeyError:
        assert broken
    assert in_force(model) == [(3, 7)] * 3
    assert torch.equal(model(pictures()), expected)
    scheduler.step()
    assert scheduler.get_last_bits() == [in_force(model)[0][0]]


def test_precision_block_without_scheduler_leaves_no_bits():
    model = quantize_(small())
    with precision(model, 6):
        assert in_force(model) == [(6, 6)] * 3
    refused(
        "no precision yet: make a PrecisionScheduler",
        model,
        pictures(),
        error=RuntimeError,
    )
    with pytest.raises(
        ValueError, match="layer '0' has no q_max yet: make a PrecisionScheduler first"
    ):
        precision(model, "q_max").__enter__()


@pytest.mark.parametrize(
    ("bits", "more"),
    [(33, ""), ("8", ", 'q_max' or 'float'"), ("max", ", 'q_max' or 'float'")],
)
def test_precision_rejects_invalid_bits(bits, more):
    model = quantize_(small())
    PrecisionScheduler(model, schedule_of())
    for given in ({"bits": bits}, {"bits": 8, "q_grad": bits}):
        with pytest.raises(ValueError, match=f"an integer from 1 to 32{more}, got"):
            precision(model, **given).__enter__()
    assert in_force(model) == [(3, 8)] * 3


@pytest.mark.parametrize("training", [True, False])
def test_precision_float_equals_unconverted_model(training, device):
    plain, model = (small().to(device).train(training) for _ in range(2))
    PrecisionScheduler(quantize_(model), schedule_of())
    x = pictures().to(device)
    for bits in ("float", 24, 32):
        with precision(
            model, bits, q_grad=None if bits == "float" else "float"
        ):  # it switches gradients off, too
            y = model(x)
            y.square().sum().backward()
        expected = plain(x)
        expected.square().sum().backward()
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
        model.zero_grad()
        plain.zero_grad()


# --- bits of evaluation ---------------------------------------------------------------------------


def num_steps(model):
    return {layer.active_levels for layer in layer_precisions(model).values()}


def test_scheduler_eval_bits_apply_in_eval_mode():
    model = quantize_(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    ).eval()
    schedule = TableSchedule(((3, 2), (6, 2)))
    scheduler = PrecisionScheduler(model, schedule, q_grad=5, eval_bits="q_max")
    assert num_steps(model) == {(6, 6, 5, 5)}
    model.train()
    assert num_steps(model) == {(3, 3, 5, 5)}
    scheduler.step()
    with precision(model, 2):
        model.eval()
        assert num_steps(model) == {(2, 2, 5, 5)}
    assert num_steps(model) == {(6, 6, 5, 5)}
    scheduler.eval_bits = 4
    assert num_steps(model) == {(4, 4, 5, 5)}
    scheduler.step()
    assert num_steps(model) == {(4, 4, 5, 5)}
    scheduler.eval_bits = "float"
    assert num_steps(model) == {(None,) * 4}
    model[1].train()  # a part by itself
    assert [layer.active_levels[0] for layer in layer_precisions(model).values()] == [
        None,
        6,
    ]
    with pytest.raises(
        ValueError,
        match="eval_bits: expected 'q_max', 'current', 'float' or an integer",
    ):
        scheduler.eval_bits = "max"
    scheduler.eval_bits = "current"
    assert num_steps(model) == {(6, 6, 5, 5)}
    both = copy.deepcopy((model, scheduler))
    both[1].eval_bits = 7
    both[0].eval()
    assert (num_steps(both[0]), num_steps(model)) == ({(7, 7, 5, 5)}, {(6, 6, 5, 5)})


# --- gradients that are too small for a grid ------------------------------------------------------


@pytest.mark.parametrize(("factor", "layers"), [(1.0, 0), (1e-8, 2)])
def test_scheduler_warns_of_gradients_below_smallest_step(factor, layers):
    """Warn once, at the first backward pass, of gradients below the smallest step."""
    model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    PrecisionScheduler(model, StaticSchedule(8, 9))

    def said():
        with warnings.catch_warnings(record=True, action="always") as caught:
            (factor * model(torch.randn(6, 4)).square().mean()).backward()
        return [str(w.message) for w in caught]

    with (
        reference(),
        precision(model, 8),
    ):  # as what looks at a model does; C++ has no such hook there
        assert said() == []
    first = said()
    assert len(first) == layers
    assert len(set(first)) <= 1  # one text: Python shows it once
    assert all(
        "no grid has a step below 1e-08. Multiply the loss, and divide" in text
        for text in first
    )
    assert said() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"noise": torch.zeros(2)},
            "entries that this release does not know: 'noise'. It is of another release",
        ),
        ({"epoch": 3, "amax": {}}, "does not know: 'amax', 'epoch'"),
        ({"numerics": "2"}, "numerics must be a whole number of at least 1, got '2'"),
        ({"numerics": 0}, "numerics must be a whole number of at least 1, got 0"),
    ],
)
def test_scheduler_rejects_unknown_state_entries(change, message):
    scheduler = PrecisionScheduler(quantize_(small()), schedule_of())
    state = copy.deepcopy(scheduler.state_dict())
    scheduler.step()
    refused(message, scheduler.load_state_dict, {**state, **change})
    assert scheduler.last_step == 1


def test_scheduler_warns_of_state_with_different_numerics():
    scheduler = PrecisionScheduler(quantize_(small()), schedule_of())
    state = copy.deepcopy(scheduler.state_dict())
    assert state.pop("numerics") == NUMERICS
    scheduler.step()
    scheduler.load_state_dict(state)  # as releases wrote it before states had a version
    assert scheduler.last_step == 0
    for other in (1, NUMERICS + 1):
        with pytest.warns(
            UserWarning,
            match=f"the state is of numerics {other}, and this release has {NUMERICS}",
        ):
            scheduler.load_state_dict({**state, "numerics": other})
