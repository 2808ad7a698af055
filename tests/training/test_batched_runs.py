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
from cpt_lab.training import batched_runs as module
from cpt_lab.training.batched_runs import batching_is_faster, run_batched
from cpt_lab.training.replay import Replay, ReplayError
from cpt_lab.training.session import Session
from cpt_lab.training.train import Stopped, train, training_steps

pytestmark = pytest.mark.slow

STEPS = 12


def arms_of(dataset, model=None, count=5, **changes):
    """Return schedules of one seed: cycles, static bits, different q_max, separate gradient bits, float32."""
    short = {"steps": STEPS, "n_cycles": 2, "evaluate_every": 5, **changes}
    first = quietly(smoke_spec, dataset, "CR", 0, model, **short)
    steps = first.recipe.steps
    low, middle, high = (cpt.StaticSchedule(q, steps) for q in (3, 5, 8))
    roles = cpt.RoleSchedules(
        weight=low, activation=middle, error=high, weight_gradient=high
    )
    to_six = quietly(
        cpt.make_schedule, "RR", q_min=3, q_max=6, total_steps=steps, n_cycles=2
    )
    several = [
        first,
        replace(first, schedule=high, arm="static 8"),
        replace(first, schedule=to_six, q_max=6),
        replace(first, schedule=middle, q_grad=5),
        replace(first, schedule=low, q_grad=4),
        replace(first, schedule=cpt.StaticSchedule(32, steps), q_max=32, q_grad=32),
        RunSpec(first.recipe, roles, 8, None, 0, "roles", "smoke"),
        *(replace(first, schedule=cpt.StaticSchedule(q, steps)) for q in range(4, 8)),
    ]
    return several[:count]


def outcome(run):
    """Return all of a run except seconds, and its weights."""
    return run.status, run.error, run.history, run.metrics, run.bitops, run.checksum


def equal(run, alone):
    weights = zip(
        run.model.state_dict().items(), alone.model.state_dict().items(), strict=True
    )
    return outcome(run) == outcome(alone) and all(
        a == b and torch.equal(x, y) for (a, x), (b, y) in weights
    )


def both_ways(specs, hooks=(None,) * 11, task=None):
    """Return runs trained side by side, and the runs trained alone."""
    given = [
        (task or load_task_class(spec), spec, hook)
        for spec, hook in zip(specs, hooks, strict=False)
    ]
    side_by_side = run_batched(
        [training_steps(task, spec, on_step=hook) for task, spec, hook in given]
    )
    return side_by_side, [train(task, spec, on_step=hook) for task, spec, hook in given]


@pytest.fixture
def replayed(monkeypatch):
    """Return the list of step counts that were replayed."""
    counted, do = [], module._BatchedStepper._run_replayed

    def noted(self, replay, arms, batch):
        counted.append(len(arms))
        return do(self, replay, arms, batch)

    monkeypatch.setattr(module._BatchedStepper, "_run_replayed", noted)
    return counted


TASKS = {
    "mlp": ("digits", "mlp6", {}),
    "resnet": (
        "digits",
        "resnet8_w8",
        {"batch": 16, "valid_images": 40, "test_images": 40},
    ),
    "lstm": (
        "pydoc",
        None,
        {
            "dropout": 0.3,
            "lr_rule": "plateau",
            "lr": 30.0,
            "evaluate_every": 1,
            "valid_tokens": 200,
            "test_tokens": 200,
        },
    ),
    "bert": (
        "templates",
        None,
        {
            "padding": "max",
            "steps": 5,
            "layers": 1,
            "valid_pairs": 60,
            "test_pairs": 60,
        },
    ),
    "gcn": ("digits-graph", "gcn", {"dropout": 0.3}),
    "gcn, Q-Agg": ("digits-graph", "gcn", {"aggregation": "quantized"}),
    "sage": ("digits-graph", "sage", {}),
}


@pytest.mark.parametrize("name", TASKS)
def test_batched_runs_equal_single_runs(name, replayed):
    """Compare runs trained side by side with single runs; the quick tasks have eleven arms."""
    dataset, model, changes = TASKS[name]
    count = {"mlp": 11, "resnet": 7, "bert": 3}.get(name, 5)
    specs = arms_of(dataset, model, count, **changes)
    runs, alone = both_ways(specs)
    assert [
        run.spec.arm
        for run, other in zip(runs, alone, strict=True)
        if not equal(run, other)
    ] == []
    rates = {tuple(run.history["lr"]) for run in runs}
    assert (len(rates) > 1) == (name == "lstm")  # that of a plateau is each run's own
    assert (
        sum(replayed) == (specs[0].recipe.steps - module.REPLAY_WARM_UP_STEPS) * count
    )


def test_batched_runs_share_common_steps(replayed):
    """Separate runs at the first step with different bits, or if a probe changes a model."""
    first = arms_of("digits", "mlp6", 2)[1]
    schedules = [
        cpt.DeficitSchedule(3, 8, ((start, start + 2),), STEPS) for start in (6, 9)
    ]
    specs = [
        first,
        *(replace(first, schedule=s) for s in schedules),
        replace(first, arm="the same"),
    ]

    def shaken(step, model, loss):
        if step == 10:
            with torch.no_grad():
                next(model.parameters()).mul_(1.5)

    assert all(map(equal, *both_ways(specs, [None, None, None, shaken])))
    assert replayed == [1] * 4 + [2] * 3 + [3] * 2 + [4]


def test_batched_run_that_diverges_ends_alone(replayed):
    specs = arms_of("digits", "mlp6", 3)

    def poisoned(step, model, loss):
        if step == 6:
            with torch.no_grad():
                next(model.parameters()).fill_(math.inf)

    runs, alone = both_ways(specs, [None, poisoned, None])
    assert [run.status for run in runs] == ["ok", "diverged", "ok"]
    assert list(map(equal, runs, alone)) == [True, False, True]  # NaN is not NaN
    assert runs[1].error == alone[1].error
    assert identical(runs[1].model.parameters(), alone[1].model.parameters())
    assert sum(replayed) == 3 * (STEPS - 2) - (STEPS - 8)


@pytest.mark.parametrize("where", ["a probe", "a step"])
def test_batched_run_that_raises_ends_alone(where, monkeypatch):
    specs, step = arms_of("digits", "mlp6", 3), Session.step

    def broken(step, model, loss):
        if step == 6:
            model.body[0].precision.active_levels = None
            raise ArithmeticError("no luck")

    def failing(self, batch, lr):
        if self.spec is specs[1]:
            raise ArithmeticError("no luck")
        return step(self, batch, lr)

    def caught(spec):
        try:
            return (
                yield from training_steps(
                    ImageTask,
                    spec,
                    on_step=broken if probed and spec is specs[1] else None,
                )
            )
        except ArithmeticError as error:
            return str(error)

    probed = where == "a probe"
    with monkeypatch.context() as patch:
        if not probed:
            patch.setattr(Session, "step", failing)
        runs = run_batched([caught(spec) for spec in specs])
    assert runs[1] == "no luck"
    assert all(equal(runs[i], train(ImageTask, specs[i])) for i in (0, 2))


def test_batched_runs_have_separate_random_draws():
    specs = arms_of("pydoc", None, 3, dropout=0.3)

    def draws(step, model, loss):
        if step == 4:
            torch.rand(3)

    assert all(map(equal, *both_ways(specs, [draws, None, None])))


@pytest.mark.parametrize("name", ["mlp", "gcn", "lstm"])
def test_batched_runs_replay_plain_kernels(name, replayed, monkeypatch):
    monkeypatch.setattr("cpt_extras.kernels.operators.active", torch.ops.cpt_reference)
    dataset, model, changes = TASKS[name]
    assert all(map(equal, *both_ways(arms_of(dataset, model, 2, **changes))))
    assert sum(replayed) == 2 * (STEPS - module.REPLAY_WARM_UP_STEPS)


def test_batched_runs_resume_together_or_alone(tmp_path):
    """Resume each from its checkpoint; a run ahead waits for the rest."""
    specs = arms_of("pydoc", None, 3, dropout=0.3)
    files = [tmp_path / f"{i}.pt" for i in range(3)]

    def stopped(spec, file, after):
        asked = itertools.count(1)
        try:
            yield from training_steps(
                load_task_class(spec),
                spec,
                checkpoint=file,
                should_stop=lambda: next(asked) == after,
            )
        except Stopped as stop:
            return str(stop)

    said = run_batched(
        [
            stopped(spec, file, after)
            for spec, file, after in zip(specs, files, (7, 9, 7), strict=True)
        ]
    )
    assert said == [f"at step {n} of {STEPS}" for n in (7, 9, 7)]
    lone = train(load_task_class(specs[2]), specs[2], checkpoint=files[2])
    runs = run_batched(
        [
            training_steps(load_task_class(s), s, checkpoint=f)
            for s, f in zip(specs[:2], files[:2], strict=True)
        ]
    )
    for run, spec in zip([*runs, lone], specs, strict=True):
        assert equal(run, train(load_task_class(spec), spec))


def test_batched_runs_report_separate_seconds():
    specs = arms_of("digits", "mlp6", 3)
    runs = run_batched([training_steps(ImageTask, spec) for spec in specs])
    assert all(0 < run.seconds < 10 for run in runs)
    first, *rest = (run.seconds for run in runs)
    assert max(rest) < 3 * first + 1


SEEN = torch.zeros(())


def unseen(task, model):
    """Compute a factor of the loss without torch noticing."""
    scale = torch.ones(1)
    scale.numpy()[0] = float(model.body[0].precision.num_steps)
    return scale[0]


def counts(task, model):
    """Write to a tensor that belongs to no run."""
    SEEN.add_(1)
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
    ("factor", "words"),
    [
        (unseen, "not all that the step does"),
        (counts, "add_.Tensor writes to"),
        (draws, "draws"),
        (keeps, "keeps a part"),
    ],
)
def test_batched_runs_fall_back_to_single_steps(factor, words, replayed, caplog):
    class Spoilt(ImageTask):
        def loss(self, model, batch, carry):
            loss, carry = super().loss(model, batch, carry)
            return loss * factor(self, model), carry

    specs = arms_of("digits", "mlp6", 2)
    session = Session(Spoilt, specs[0])
    batches = session.batches(0)
    session.step(next(batches), 0.01)
    refused(words, Replay, session, next(batches), error=ReplayError)
    with caplog.at_level("INFO"):
        assert all(map(equal, *both_ways(specs, task=Spoilt)))
    assert words in caplog.text
    assert replayed == []


def test_batched_runs_recording_keeps_session_state():
    spec = arms_of("digits", "resnet8_w8", 1, batch=16)[0]
    session, other = Session(ImageTask, spec), Session(ImageTask, spec)
    for one in (session, other):
        batches = one.batches(0)
        one.step(next(batches), 0.01)
    random = torch.get_rng_state()
    batch = next(batches)
    Replay(session, batch)
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(session.step(batch, 0.01), other.step(batch, 0.01))
    assert all(
        map(
            torch.equal,
            session.model.state_dict().values(),
            other.model.state_dict().values(),
        )
    )


def test_batching_pays_for_measured_tasks():
    found = {
        name: batching_is_faster(smoke_spec(d, "static 8", 0, m, **changes))
        for name, (d, m, changes) in TASKS.items()
    }
    assert [name for name, yes in found.items() if not yes] == ["bert", "sage"]
