"""Runs trained side by side: bit for bit equal to single runs; unsupported steps run one by one."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers import identical, quietly, refused, smoke_spec

import cpt_core as cpt
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.tasks.base import load_task_class
from cpt_lab.tasks.image import ImageTask
from cpt_lab.training import batched_runs
from cpt_lab.training.batched_runs import batching_is_faster, run_batched
from cpt_lab.training.replay import Replay, ReplayError
from cpt_lab.training.session import Session
from cpt_lab.training.train import Stopped, train, training_steps

pytestmark = pytest.mark.slow
STEPS = 12
WARM_UP = batched_runs.REPLAY_WARM_UP_STEPS


def arms_of(dataset, model=None, count=5, **changes):
    """Return schedules of one seed: cycles, static bits, different q_max, separate gradient bits, float32."""
    short = {"steps": STEPS, "n_cycles": 2, "evaluate_every": 5, **changes}
    first = quietly(smoke_spec, dataset, "CR", 0, model, **short)
    steps = first.recipe.steps
    static = {q: cpt.StaticSchedule(q, steps) for q in (3, 5, 8, 32)}
    roles = cpt.RoleSchedules(
        weight=static[3],
        activation=static[5],
        error=static[8],
        weight_gradient=static[8],
    )
    limits = {"q_min": 3, "q_max": 6, "total_steps": steps, "n_cycles": 2}
    to_six = quietly(cpt.make_schedule, "RR", **limits)
    arms = [
        first,
        replace(first, schedule=static[8], arm="static 8"),
        replace(first, schedule=to_six, q_max=6),
        replace(first, schedule=static[5], q_grad=5),
        replace(first, schedule=static[3], q_grad=4),
        replace(first, schedule=static[32], q_max=32, q_grad=32),
        RunSpec(first.recipe, roles, 8, None, 0, "roles", "smoke"),
    ]
    return arms[:count]


def are_equal(run, single):
    """Return whether two runs agree in everything but seconds, and in every bit of their weights."""
    names = ("status", "error", "history", "metrics", "bitops", "checksum")
    weights, single_weights = run.model.state_dict(), single.model.state_dict()
    return (
        [getattr(run, name) for name in names]
        == [getattr(single, name) for name in names]
        and list(weights) == list(single_weights)
        and all(map(torch.equal, weights.values(), single_weights.values()))
    )


def run_both_ways(specs, probes=(None,) * 7, task=None):
    """Return runs trained side by side, and the runs trained alone."""
    arguments = [
        (task or load_task_class(spec), spec, probe)
        for spec, probe in zip(specs, probes, strict=False)
    ]
    batched = run_batched(
        [training_steps(task, spec, on_step=probe) for task, spec, probe in arguments]
    )
    return batched, [train(task, spec, on_step=p) for task, spec, p in arguments]


@pytest.fixture
def replayed(monkeypatch):
    """Return the numbers of runs of the steps that were replayed."""
    counts, run_replayed = [], batched_runs._BatchedStepper._run_replayed

    def note(self, replay, arms, batch):
        counts.append(len(arms))
        return run_replayed(self, replay, arms, batch)

    monkeypatch.setattr(batched_runs._BatchedStepper, "_run_replayed", note)
    return counts


IMAGES = {"batch": 16, "valid_images": 40, "test_images": 40}
PLATEAU = {"dropout": 0.3, "lr_rule": "plateau", "lr": 30.0, "evaluate_every": 1}
TOKENS = {"valid_tokens": 200, "test_tokens": 200}
PAIRS = {"padding": "max", "layers": 1, "valid_pairs": 60, "test_pairs": 60}
# Data set, model, number of arms, changes of the recipe.
TASKS = {
    "mlp": ("digits", "mlp6", 7, {}),
    "resnet": ("digits", "resnet8_w8", 3, IMAGES),
    "lstm": ("pydoc", None, 3, PLATEAU | TOKENS),
    "bert": ("templates", None, 2, {"steps": 5, **PAIRS}),
    "gcn": ("digits-graph", "gcn", 3, {"dropout": 0.3}),
    "gcn, Q-Agg": ("digits-graph", "gcn", 2, {"aggregation": "quantized"}),
    "sage": ("digits-graph", "sage", 2, {}),
}


@pytest.mark.parametrize("name", TASKS)
def test_batched_runs_equal_single_runs(name, replayed):
    """Train arms of every task side by side, and each alone."""
    dataset, model, count, changes = TASKS[name]
    specs = arms_of(dataset, model, count, **changes)
    runs, singles = run_both_ways(specs)
    for run, single in zip(runs, singles, strict=True):
        assert are_equal(run, single), run.spec.arm
    rates = {tuple(run.history["lr"]) for run in runs}
    assert (len(rates) > 1) == (name == "lstm")  # of a plateau, each run has its own
    assert sum(replayed) == (specs[0].recipe.steps - WARM_UP) * count


@pytest.mark.parametrize("name", ["mlp", "gcn", "lstm"])
def test_batched_runs_replay_plain_kernels(name, replayed, monkeypatch):
    monkeypatch.setattr("cpt_extras.kernels.operators.active", torch.ops.cpt_reference)
    dataset, model, _, changes = TASKS[name]
    assert all(map(are_equal, *run_both_ways(arms_of(dataset, model, 2, **changes))))
    assert sum(replayed) == 2 * (STEPS - WARM_UP)


def test_batched_runs_share_common_steps(replayed):
    """Separate runs at the first step with different bits, or if a probe changes a model."""
    first = arms_of("digits", "mlp6", 2)[1]
    windows = [((start, start + 2),) for start in (6, 9)]
    schedules = [cpt.DeficitSchedule(3, 8, window, STEPS) for window in windows]
    deficits = [replace(first, schedule=schedule) for schedule in schedules]
    specs = [first, *deficits, replace(first, arm="the same")]

    def scale_weight(step, model, loss):
        if step == 10:
            with torch.no_grad():
                next(model.parameters()).mul_(1.5)

    probes = [None, None, None, scale_weight]
    assert all(map(are_equal, *run_both_ways(specs, probes)))
    assert replayed == [1] * 4 + [2] * 3 + [3] * 2 + [4]


def test_batched_run_that_diverges_ends_alone(replayed):
    def break_weight(step, model, loss):
        if step == 6:
            with torch.no_grad():
                next(model.parameters()).fill_(math.inf)

    specs = arms_of("digits", "mlp6", 3)
    runs, singles = run_both_ways(specs, [None, break_weight, None])
    assert [run.status for run in runs] == ["ok", "diverged", "ok"]
    # NaN is not NaN.
    assert list(map(are_equal, runs, singles)) == [True, False, True]
    assert runs[1].error == singles[1].error
    assert identical(runs[1].model.parameters(), singles[1].model.parameters())
    assert sum(replayed) == 3 * (STEPS - 2) - (STEPS - 8)


@pytest.mark.parametrize("where", ["a probe", "a step"])
def test_batched_run_that_raises_ends_alone(where, monkeypatch):
    specs, step = arms_of("digits", "mlp6", 3), Session.step

    def fail_at_probe(step, model, loss):
        if step == 6:
            model.body[0].precision.active_levels = None
            raise ArithmeticError("no luck")

    def fail_at_step(self, batch, lr):
        if self.spec is specs[1]:
            raise ArithmeticError("no luck")
        return step(self, batch, lr)

    def caught(spec, probe):
        try:
            return (yield from training_steps(ImageTask, spec, on_step=probe))
        except ArithmeticError as error:
            return str(error)

    probe = fail_at_probe if where == "a probe" else None
    with monkeypatch.context() as patch:
        if probe is None:
            patch.setattr(Session, "step", fail_at_step)
        probes = [None, probe, None]
        runs = run_batched([caught(*p) for p in zip(specs, probes, strict=True)])
    assert runs[1] == "no luck"
    assert all(are_equal(runs[i], train(ImageTask, specs[i])) for i in (0, 2))


def test_batched_runs_have_separate_random_draws():
    def draw(step, model, loss):
        if step == 4:
            torch.rand(3)

    specs = arms_of("pydoc", None, 3, dropout=0.3, **TOKENS)
    assert all(map(are_equal, *run_both_ways(specs, [draw, None, None])))


def test_batched_runs_resume_together_or_alone(tmp_path):
    """Resume each from its checkpoint; a run ahead waits for the rest."""
    specs = arms_of("pydoc", None, 3, dropout=0.3, **TOKENS)
    task = load_task_class(specs[0])
    files = [tmp_path / f"{i}.pt" for i in range(3)]

    def stopped(spec, file, steps):
        asked = itertools.count(1)
        try:
            yield from training_steps(
                task, spec, checkpoint=file, should_stop=lambda: next(asked) == steps
            )
        except Stopped as stop:
            return str(stop)

    steps = (7, 9, 7)
    stops = run_batched([stopped(*s) for s in zip(specs, files, steps, strict=True)])
    assert stops == [f"at step {n} of {STEPS}" for n in steps]
    alone = train(task, specs[2], checkpoint=files[2])
    together = run_batched(
        [training_steps(task, specs[i], checkpoint=files[i]) for i in (0, 1)]
    )
    for run, spec in zip([*together, alone], specs, strict=True):
        assert are_equal(run, train(task, spec))


# --- recordings -----------------------------------------------------------------------------------

COUNT = torch.zeros(())


def unseen(task, model):
    """Compute a factor of the loss without torch noticing."""
    scale = torch.ones(1)
    scale.numpy()[0] = float(model.body[0].precision.num_steps)
    return scale[0]


def constant(task, model):
    """Compute a factor of the loss from the active bits, a number of Python."""
    return model.body[0].precision.active_bits.formats.activation


def counts(task, model):
    """Write to a tensor that belongs to no run."""
    COUNT.add_(1)
    return 1


def draws(task, model):
    """Draw random numbers in an operation on a computed value."""
    return 1 + 0 * torch.bernoulli(model.body[0].weight.detach().sigmoid()).sum()


def keeps(task, model):
    """Keep a part of a weight."""
    if not hasattr(task, "part"):
        task.part = model.body[0].weight.detach()[1:]
    return 1 + 0 * task.part.sum()


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (unseen, "not all that the step does"),
        (constant, "not all that the step does"),
        (counts, "add_.Tensor writes to"),
        (draws, "draws"),
        (keeps, "keeps a part"),
    ],
)
def test_batched_runs_fall_back_to_single_steps(factor, message, replayed, caplog):
    class OddTask(ImageTask):
        def loss(self, model, batch, carry):
            loss, carry = super().loss(model, batch, carry)
            return loss * factor(self, model), carry

    specs = arms_of("digits", "mlp6", 2)
    session = Session(OddTask, specs[0])
    batches = session.batches(0)
    session.step(next(batches), 0.01)
    refused(message, Replay, session, next(batches), error=ReplayError)
    with caplog.at_level("INFO"):
        assert all(map(are_equal, *run_both_ways(specs, task=OddTask)))
    assert message in caplog.text
    assert replayed == []


def test_batched_runs_recording_keeps_session_state():
    (spec,) = arms_of("digits", "resnet8_w8", 1, batch=16)
    session, other = Session(ImageTask, spec), Session(ImageTask, spec)
    for one in (session, other):
        batches = one.batches(0)
        one.step(next(batches), 0.01)
    rng_state, batch = torch.get_rng_state(), next(batches)
    Replay(session, batch)
    assert torch.equal(rng_state, torch.get_rng_state())
    assert torch.equal(session.step(batch, 0.01), other.step(batch, 0.01))
    states = [one.model.state_dict().values() for one in (session, other)]
    assert all(map(torch.equal, *states))


def test_batching_pays_for_measured_tasks():
    for name, (dataset, model, _, changes) in TASKS.items():
        spec = smoke_spec(dataset, "static 8", 0, model, **changes)
        assert batching_is_faster(spec) == (name not in ("bert", "sage")), name
