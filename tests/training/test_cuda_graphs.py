"""Captured steps: equal to the steps they replace over a whole schedule, or a reason against capture."""

import itertools
from dataclasses import replace

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
ON_INT8 = {"execution": "integer", "shared_steps": True}
IMAGES = {
    "model": "resnet8_w8",
    "train_images": 90,
    "valid_images": 40,
    "test_images": 40,
    "batch": 16,
}
WORDS = {
    "train_tokens": 2_000,
    "valid_tokens": 600,
    "test_tokens": 600,
    "batch": 8,
    "length": 9,
    "embedding": 8,
    "hidden": 8,
    "dropout": 0.2,
    "lr_rule": "plateau",
}
SENTENCES = {
    "train_pairs": 90,
    "valid_pairs": 20,
    "test_pairs": 20,
    "batch": 16,
    "length": 20,
    "hidden": 16,
    "layers": 1,
    "padding": "max",
}
GCN = {"model": "gcn", "hidden": 8}
RUNS = {
    "images": ("digits", IMAGES | {"crop": 1}),
    "words": ("pydoc", WORDS),
    "graph": ("digits-graph", GCN | {"dropout": 0.3}),
    "quantised sums": ("digits-graph", GCN | {"aggregation": "quantized"}),
    "int8 sums": ("digits-graph", GCN | ON_INT8),
    "sentences": ("templates", SENTENCES),
    "images on int8": ("digits", IMAGES | ON_INT8),
}


def make_spec(name, **changes):
    # sums, or their codes, are kept for every q, and so are recordings
    steps = 60 if "sums" in name else 18
    dataset, options = RUNS[name]
    schedule = {"arm": "LR", "q_min": 3, "n_cycles": 1, "steps": steps}
    return smoke_spec(dataset, evaluate_every=7, **{**schedule, **options, **changes})


def make_session(name, **changes):
    """Return a session and its batches."""
    spec = make_spec(name, **changes)
    one = Session(load_task_class(spec), spec)
    return one, one.task.batches(0)


@pytest.fixture
def recorders(monkeypatch):
    """Let sessions on the CPU capture their steps as on a GPU; return the recorders."""
    made = []

    def make_recorder(device):
        made.append(TapeRecorder())
        return made[-1]

    def unsupported_reason(device, has_fixed_shape):
        return "" if has_fixed_shape else "shapes differ"

    def from_tensor(cls, x):  # on a CPU the host reads these numbers
        return cls(*(v.reshape(()) for v in (x.zero_point, x.zero_value, x.scale)))

    monkeypatch.setattr(session, "unsupported_reason", unsupported_reason)
    monkeypatch.setattr(session, "CudaRecorder", make_recorder)
    monkeypatch.setattr(convolution.CodeGrid, "from_tensor", classmethod(from_tensor))
    # nor does a library pack weights
    monkeypatch.setattr(convolution, "has_onednn_convolution", lambda device: False)
    return made


@pytest.fixture
def train_eagerly(monkeypatch):
    """Return ``train`` without captures: no step repeats often enough."""

    def run(*args):
        with monkeypatch.context() as patch:
            patch.setattr(cuda_graphs, "CAPTURE_WARM_UP_STEPS", 10**9)
            return train(*args)

    return run


@pytest.mark.parametrize("name", RUNS)
def test_captured_steps_equal_eager_bit_for_bit(name, recorders, train_eagerly):
    spec = make_spec(name)
    task = load_task_class(spec)
    plain = train_eagerly(task, spec)
    bits = set(plain.history["bits"])
    assert bits == {3, 4, 5, 6, 7, 8}
    assert plain.captured == 0
    run = train(task, spec)
    assert run.captured > 8
    assert (run.history, run.metrics) == (plain.history, plain.metrics)
    step_tapes, evaluation_tapes = (len(recorder.tapes) for recorder in recorders[2:])
    assert step_tapes == (len(bits) if "sums" in name else 1)
    assert evaluation_tapes == 1


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, None),
        ({"cells": None, "count": 3}, {"cells": None, "count": 3}),
    ],
    ids=["none", "mixed"],
)
def test_capture_replays_results_without_tensors(state, expected):
    """Replay a step whose result holds other objects than tensors, such as the state that a transformer lacks."""
    recorder = TapeRecorder()
    capture = cuda_graphs.Capture(
        lambda batch, carry: ((batch * 2, state), None), recorder, lambda: 0
    )
    for step in range(6):
        batch = torch.full((3,), float(step))
        (values, result), _ = capture(batch, None)
        assert values.tolist() == [2 * step] * 3
        assert result == expected
    assert capture.replayed > 1


@pytest.mark.parametrize(
    "name", ["images", "words", "sentences", "quantised sums", "int8 sums"]
)
def test_captured_evaluation_follows_weights_and_bits(name, recorders):
    one, batches = make_session(name)
    last_step = one.spec.recipe.steps
    for step in (*[1] * 5, *[last_step] * 5, 1):
        one.step(next(batches), 0.1)
        captured = one.forward
        replayed = evaluate(one, step, "current")
        one.forward = one.model
        assert evaluate(one, step, "current") == replayed
        one.forward = captured
    assert recorders[1].tapes
    assert replayed["bits"] == 3
    assert one.spec.schedule(last_step - 1) == 8


# a state that is carried; Adam, which counts its steps
@pytest.mark.parametrize("name", ["words", "graph"])
def test_captured_run_records_again_when_resumed(name, recorders, tmp_path):
    spec, file = make_spec(name), tmp_path / "run.pt"
    whole = train(load_task_class(spec), spec)
    stop_at(11, spec, file)
    resumed = train(load_task_class(spec), spec, checkpoint=file)
    assert (resumed.history, resumed.metrics) == (whole.history, whole.metrics)
    assert resumed.captured > 4


@pytest.mark.parametrize(
    ("name", "ladder", "steps_at_bits", "q_max"),
    [
        ("images on int8", "affine", ((7, 6), (10, 6), (7, 6)), 8),
        ("images", "mx", ((1, 6), (2, 6), (1, 4), (2, 2)), 2),
    ],
)
def test_captured_steps_recorded_per_execution_and_format(
    name, ladder, steps_at_bits, q_max, recorders, train_eagerly
):
    """Record steps beyond 8 bits, and of each ladder format, separately."""
    spec, schedule = make_spec(name), TableSchedule(steps_at_bits)
    recipe = replace(spec.recipe, ladder=ladder)
    spec = replace(spec, schedule=schedule, q_max=q_max, q_grad=q_max, recipe=recipe)
    task = load_task_class(spec)
    plain, run = train_eagerly(task, spec), train(task, spec)
    assert run.history == plain.history
    assert run.captured > 4
    assert len(recorders[2].tapes) == 2


@pytest.mark.parametrize("name", ["images", "words"])
def test_captured_steps_follow_learning_rate_and_nan(name, recorders):
    one, batches = make_session(name, clip=0.1)
    parameters = list(one.model.parameters())

    def step(lr):
        before = [p.detach().clone() for p in parameters]
        loss = one.step(next(batches), lr)
        return loss, [
            torch.equal(*pair) for pair in zip(before, parameters, strict=True)
        ]

    for _ in range(4):
        step(0.1)
    _, is_unchanged = step(0.05)
    assert not any(is_unchanged[-2:])  # others than the last may have no gradient
    _, is_unchanged = step(0.0)
    assert all(is_unchanged)
    assert one.captured >= 2
    with torch.no_grad():
        parameters[-1].fill_(float("nan"))
    loss, is_unchanged = step(0.1)
    assert not loss.isfinite()
    assert all(is_unchanged[:-1])


def test_captured_steps_update_weights_for_callers(recorders, monkeypatch):
    """Advance tensor versions as the replaced step does, and use no stale weights."""
    losses, counts = [], []
    for is_captured in (True, False):
        one, batches = make_session("images")
        if not is_captured:
            monkeypatch.setattr(one.capture, "_repeats", lambda *_: False)
        *_, last = one.model.parameters()
        for batch in itertools.islice(batches, 5):
            version, count = last._version, one.captured
            losses.append(one.step(batch, 0.1))
            assert last._version > version or one.captured == count
            one.model(batch[0])
        counts.append(one.captured)
    assert losses[:5] == losses[5:]
    assert counts[0] > 0
    assert counts[1] == 0


def test_captured_losses_are_not_overwritten(recorders):
    one, batches = make_session("images")
    losses = [one.step(next(batches), 0.1) for _ in range(4)]
    values = list(map(float, losses))
    one.step(next(batches), 0.1)
    assert one.captured > 1
    assert list(map(float, losses)) == values


def test_capture_falls_back_and_gives_reason(recorders, train_eagerly, caplog):
    spec = make_spec("images")
    task = load_task_class(spec)
    plain = train_eagerly(task, spec)

    class ReadsLoss(task):
        def loss(self, model, batch, carry):
            loss, carry = super().loss(model, batch, carry)
            assert float(loss.detach()) > 0
            return loss, carry

    run = train(ReadsLoss, spec)
    assert (run.captured, run.history) == (0, plain.history)
    reason = "_local_scalar_dense.default reads a number on the host"
    assert reason in run.uncaptured_reason
    records = [r for r in caplog.records if r.name == cuda_graphs.__name__]
    (message,) = (record.getMessage() for record in records)
    assert message.startswith(
        "the steps of this run cannot be captured and go on one launch at a time: RuntimeError"
    )


@pytest.mark.parametrize(
    ("device", "has_fixed_shape", "value", "reason"),
    [
        ("cpu", True, "1", "the device is cpu"),
        ("cuda", True, "1", ""),
        ("cuda", True, "0", "CPT_CAPTURE=0"),
        ("cuda", False, "1", "shapes differ from step to step"),
    ],
)
def test_capture_unsupported_reason(
    device, has_fixed_shape, value, reason, monkeypatch
):
    monkeypatch.setenv("CPT_CAPTURE", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = torch.device(device)
    assert cuda_graphs.unsupported_reason(device, has_fixed_shape) == reason
