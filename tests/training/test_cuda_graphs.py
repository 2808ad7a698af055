"""Captured steps: equal to the steps they replace over a whole schedule, or a reason against capture."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from fake_cuda_graph import TapeRecorder
from helpers import smoke_spec
from training.test_train import stop_at

from cpt_extras.int8 import convolution
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training import cuda_graphs, session
from cpt_lab.training.session import Session
from cpt_lab.training.train import evaluate, train

pytestmark = pytest.mark.slow

# batches of two sizes; milestones, a cosine, and a rate that follows the evaluations
RUNS = {
    "images": partial(
        smoke_spec,
        "digits",
        model="resnet8_w8",
        train_images=90,
        batch=16,
        crop=1,
        valid_images=40,
        test_images=40,
    ),
    "words": partial(
        smoke_spec,
        "pydoc",
        dropout=0.2,
        train_tokens=2_000,
        batch=8,
        length=9,
        embedding=8,
        hidden=8,
        valid_tokens=600,
        test_tokens=600,
        lr_rule="plateau",
    ),
    "graph": partial(smoke_spec, "digits-graph", model="gcn", dropout=0.3, hidden=8),
    "quantised sums": partial(
        smoke_spec, "digits-graph", model="gcn", aggregation="quantized", hidden=8
    ),
    "sums on codes": partial(
        smoke_spec,
        "digits-graph",
        model="gcn",
        hidden=8,
        execution="integer",
        shared_steps=True,
    ),
    "sentences": partial(
        smoke_spec,
        "templates",
        padding="max",
        train_pairs=90,
        valid_pairs=20,
        test_pairs=20,
        batch=16,
        length=20,
        hidden=16,
        layers=1,
    ),
    "images on codes": partial(
        smoke_spec,
        "digits",
        model="resnet8_w8",
        train_images=90,
        batch=16,
        valid_images=40,
        test_images=40,
        execution="integer",
        shared_steps=True,
    ),
}


@pytest.fixture
def recorders(monkeypatch):
    """Let sessions on the CPU capture their steps; return the recorders."""
    made = []

    def recorder(device):
        made.append(TapeRecorder())
        return made[-1]

    monkeypatch.setattr(
        session,
        "unsupported_reason",
        lambda device, fixed_shape: "" if fixed_shape else "shapes differ",
    )
    monkeypatch.setattr(session, "CudaRecorder", recorder)
    on_device = classmethod(
        lambda cls, x: cls(
            *(v.reshape(()) for v in (x.zero_point, x.zero_value, x.scale))
        )
    )
    monkeypatch.setattr(
        convolution.CodeGrid, "from_tensor", on_device
    )  # as on a GPU: on a CPU the host reads these numbers
    monkeypatch.setattr(
        convolution, "has_onednn_convolution", lambda device: False
    )  # nor are there weights that a library packs
    return made


@pytest.fixture
def eager(monkeypatch):
    """Return a context in which no step repeats often enough to be recorded."""

    def run(call, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(cuda_graphs, "CAPTURE_WARM_UP_STEPS", 10**9)
            return call(*args, **kwargs)

    return run


def spec_of(name, **changes):
    steps = (
        60 if "sums" in name else 18
    )  # sums, or their codes, are kept for every q, and so are recordings
    return RUNS[name](
        arm="LR", q_min=3, evaluate_every=7, **{"steps": steps, "n_cycles": 1} | changes
    )


@pytest.mark.parametrize("name", RUNS)
def test_captured_steps_equal_eager_bit_for_bit(name, recorders, eager):
    spec = spec_of(name)
    plain = eager(train, load_task_class(spec), spec)
    bits = set(plain.history["bits"])
    assert bits == {3, 4, 5, 6, 7, 8}
    run = train(load_task_class(spec), spec)
    assert (plain.captured, run.captured > 8) == (0, True)
    assert (run.history, run.metrics) == (plain.history, plain.metrics)
    steps, answers = (len(recorder.tapes) for recorder in recorders[2:])
    assert (steps, answers) == (len(bits) if "sums" in name else 1, 1)


@pytest.mark.parametrize(
    "name", ["images", "words", "sentences", "quantised sums", "sums on codes"]
)
def test_captured_evaluation_follows_weights_and_bits(name, recorders):
    spec = spec_of(name)
    one = Session(load_task_class(spec), spec)
    forward, batches = one.forward, one.task.batches(0)
    for step in (*[1] * 5, *[spec.recipe.steps] * 5, 1):
        one.step(next(batches), 0.1)
        replayed, one.forward = evaluate(one, step, "current"), one.model
        assert evaluate(one, step, "current") == replayed
        one.forward = forward
    assert recorders[1].tapes
    assert (replayed["bits"], spec.schedule(spec.recipe.steps - 1)) == (3, 8)


@pytest.mark.parametrize(
    "name", ["words", "graph"]
)  # a state that is carried; Adam, which counts its steps
def test_captured_run_records_again_when_resumed(name, recorders, tmp_path):
    spec, file = spec_of(name), tmp_path / "run.pt"
    whole = train(load_task_class(spec), spec)
    stop_at(11, spec, file)
    resumed = train(load_task_class(spec), spec, checkpoint=file)
    assert (resumed.history, resumed.metrics) == (whole.history, whole.metrics)
    assert resumed.captured > 4


@pytest.mark.parametrize(
    ("name", "ladder", "runs"),
    [
        ("images on codes", "affine", ((7, 6), (10, 6), (7, 6))),
        ("images", "mx", ((1, 6), (2, 6), (1, 4), (2, 2))),
    ],
)
def test_captured_steps_recorded_per_execution_and_format(
    name, ladder, runs, recorders, eager
):
    """Record steps beyond 8 bits, and of each ladder format, separately."""
    spec, top = spec_of(name), min(8, max(bits for bits, _ in runs))
    recipe = replace(spec.recipe, ladder=ladder)
    spec = replace(
        spec, schedule=TableSchedule(runs), q_max=top, q_grad=top, recipe=recipe
    )
    plain, run = (
        eager(train, load_task_class(spec), spec),
        train(load_task_class(spec), spec),
    )
    assert run.history == plain.history
    assert run.captured > 4
    assert len(recorders[2].tapes) == 2


@pytest.mark.parametrize("name", ["images", "words"])
def test_captured_steps_follow_learning_rate_and_nan(name, recorders):
    spec = spec_of(name, clip=0.1)
    one = Session(load_task_class(spec), spec)
    batches = one.task.batches(0)
    for _ in range(4):
        one.step(next(batches), 0.1)
    for lr in (0.05, 0.0):
        before = [p.detach().clone() for p in one.model.parameters()]
        one.step(next(batches), lr)
        stays = [
            torch.equal(a, b)
            for a, b in zip(before, one.model.parameters(), strict=True)
        ]
        assert (
            all(stays) if lr == 0 else not any(stays[-2:])
        )  # the last layer: others may have no gradient
    assert one.captured >= 2
    with torch.no_grad():
        *others, last = one.model.parameters()
        last.fill_(float("nan"))
    before = [p.detach().clone() for p in others]
    assert not one.step(next(batches), 0.1).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, others, strict=True))


def test_captured_steps_update_weights_for_callers(recorders, monkeypatch):
    """Advance tensor versions as the replaced step does, and use no stale weights."""
    spec = spec_of("images")
    one, other = (
        Session(load_task_class(spec), spec),
        Session(load_task_class(spec), spec),
    )
    monkeypatch.setattr(other.capture, "_repeats", lambda *_: False)
    losses: list = [[], []]
    for each, seen in zip((one, other), losses, strict=True):
        for batch in itertools.islice(each.task.batches(0), 5):
            *_, last = each.model.parameters()
            version, replayed = last._version, each.captured
            seen.append(each.step(batch, 0.1))
            assert last._version > version or each.captured == replayed
            each.model(batch[0])
    assert torch.equal(*map(torch.stack, losses))
    assert (one.captured > 0, other.captured) == (True, 0)


def test_captured_losses_are_not_overwritten(recorders):
    spec = spec_of("images")
    one = Session(load_task_class(spec), spec)
    batches = one.task.batches(0)
    losses = [one.step(next(batches), 0.1) for _ in range(4)]
    kept = [float(loss) for loss in losses]
    one.step(next(batches), 0.1)
    assert one.captured > 1
    assert list(map(float, losses)) == kept


def test_capture_falls_back_and_gives_reason(recorders, eager, monkeypatch, caplog):
    spec = spec_of("images")
    task = load_task_class(spec)
    plain = eager(train, task, spec)

    class Reads(task):
        def loss(self, model, batch, carry):
            loss, carry = super().loss(model, batch, carry)
            assert float(loss.detach()) > 0
            return loss, carry

    run = train(Reads, spec)
    assert (run.captured, run.history) == (0, plain.history)
    assert (
        "_local_scalar_dense.default reads a number on the host"
        in run.uncaptured_reason
    )
    (line,) = [r.getMessage() for r in caplog.records if r.name == cuda_graphs.__name__]
    assert line.startswith(
        "the steps of this run cannot be captured and go on one launch at a time: RuntimeError"
    )


def test_captured_python_state_is_frozen(recorders, eager):
    """Show as a control that a recorded step with Python state gives different losses."""
    spec = spec_of("words")

    class Drifts(load_task_class(spec)):
        calls = 0

        def loss(self, model, batch, carry):
            self.calls += 1
            loss, carry = super().loss(model, batch, carry)
            return loss * (1 + 0.01 * self.calls), carry

    frozen, plain = train(Drifts, spec), eager(train, Drifts, spec)
    assert frozen.history["loss"][:4] == plain.history["loss"][:4]
    assert frozen.history["loss"][-1] != plain.history["loss"][-1]


@pytest.mark.parametrize(
    ("device", "fixed", "value", "reason"),
    [
        ("cpu", True, "1", "the device is cpu"),
        ("cuda", True, "1", ""),
        ("cuda", True, "0", "CPT_CAPTURE=0"),
        ("cuda", False, "1", "shapes differ from step to step"),
    ],
)
def test_capture_unsupported_reason(device, fixed, value, reason, monkeypatch):
    monkeypatch.setenv("CPT_CAPTURE", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda_graphs.unsupported_reason(torch.device(device), fixed) == reason
