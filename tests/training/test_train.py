"""Training loop: results, metrics, divergence, and checkpoints that survive kills and damage."""

import itertools
import json
import math
import os
from dataclasses import replace

import pytest
import torch
from helpers import refused, same_parameters, smoke_spec
from torch import nn

from cpt_core.numerics import NUMERICS
from cpt_extras.files import write_atomically
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks.base import load_task_class
from cpt_lab.tasks.image import ImageTask
from cpt_lab.training.checkpoint import RunState, previous_path, resume, save_checkpoint
from cpt_lab.training.session import Session
from cpt_lab.training.train import Stopped, evaluate, train


def spec_of(arm="CR", seed=0, model="mlp6", **changes):
    settings = {"steps": 190, "evaluate_every": 50, **changes}
    return smoke_spec("digits", arm, seed, model, **settings)


@pytest.fixture(scope="session")
def run():
    """Return a run of the digits with four evaluations."""
    return train(ImageTask, spec_of())


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_follows_schedule_and_learns(run):
    assert (run.status, run.error) == ("ok", "")
    assert run.history["bits"] == run.spec.schedule.bits().tolist()
    rates = [run.history["lr"][step] for step in (94, 95, 142)]
    assert rates == pytest.approx([0.03, 0.003, 0.0003])
    assert [e["step"] for e in run.history["evaluations"]] == [50, 100, 150, 190]
    first, last = run.history["loss"][:10], run.history["loss"][-10:]
    assert sum(last) < 0.5 * sum(first)
    assert run.metric("accuracy") > 0.6


@pytest.mark.slow
def test_train_counts_bitops(run):
    layers = 64 * 32 + 5 * 32 * 32 + 32 * 10
    squares = sum(q * q + 16 * q for q in run.spec.schedule.bits().tolist())
    assert run.bitops["paper"] == 64 * layers * squares / 1024
    # The classifier alone, in float32.
    assert run.bitops["per_op"] > 64 * 3 * 320 * run.spec.recipe.steps


def test_train_metrics_state_split_moment_and_precision(run):
    places = {(m["split"], m["when"], m["precision"]) for m in run.metrics}
    final = itertools.product(("valid", "test"), ("final",), ("q_max", "current"))
    assert places == {*final, ("test", "best_valid", "q_max")}
    assert all(m["bits"] == 8 for m in run.metrics if m["precision"] == "q_max")
    best = max(run.history["evaluations"], key=lambda e: e["valid"]["accuracy"])
    assert run.metric("accuracy", when="best_valid") == best["test"]["accuracy"]
    refused("no metric", run.metric, "f1", error=KeyError)


def test_evaluate_uses_eval_mode_and_last_bits(monkeypatch):
    session, is_training = Session(ImageTask, spec_of("CR")), []

    def note(model):
        is_training.append(model.training)
        return {}

    monkeypatch.setattr(session.task, "evaluate", note)
    bits = session.spec.schedule.bits().tolist()
    steps = [t for t in range(1, 190) if bits[t - 1] != bits[t]]  # where bits change
    for step in (*steps, 190):
        assert evaluate(session, step, "current")["bits"] == bits[step - 1]
    assert evaluate(session, 1, "q_max")["bits"] == 8
    assert not any(is_training)


def test_image_task_accuracy_and_loss():
    task = ImageTask(spec_of(), torch.device("cpu"))
    weight = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    metrics = task.evaluate(lambda images: images.flatten(1) @ weight)
    for split in ("valid", "test"):
        part = getattr(task.data, split)
        logits = part.images.flatten(1) / 16 @ weight  # pixels from 0 to 16
        log_probabilities = logits.log_softmax(1)
        hits = log_probabilities.argmax(1) == part.labels
        loss = -log_probabilities[range(len(part)), part.labels].mean()
        expected = {"accuracy": float(hits.float().mean()), "loss": float(loss)}
        assert metrics[split] == pytest.approx(expected, rel=1e-4)


def test_session_initial_weights_follow_seed():
    first, again, other = (
        Session(ImageTask, spec_of(seed=seed)).model.fc.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_session_step_clips_gradient_norm():
    session = Session(ImageTask, spec_of(clip=0.01, weight_decay=0.0))
    before = [p.detach().clone() for p in session.model.parameters()]
    # The first step: momentum has gathered nothing yet.
    session.step(next(session.task.batches(0)), lr=0.5)
    parameters = zip(session.model.parameters(), before, strict=True)
    change = nn.utils.get_total_norm([p.detach() - b for p, b in parameters])
    assert float(change) == pytest.approx(0.5 * 0.01, rel=1e-3)


@pytest.mark.filterwarnings("error")
def test_session_does_not_warn_of_tiny_gradients(monkeypatch):
    session = Session(ImageTask, spec_of("CR"))
    task_loss = session.task.loss

    def tiny_loss(*arguments):
        loss, carry = task_loss(*arguments)
        return 1e-12 * loss, carry

    monkeypatch.setattr(session.task, "loss", tiny_loss)
    assert 0 < float(session.step(next(session.batches(0)), 0.1)) < 1e-9


def test_run_spec_rejects_unknown_task():
    chess = replace(recipe("demo"), task="chess")
    message = "unknown task 'chess'; choose from image"
    refused(message, run_spec, chess, "CR", q_max=8, seed=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_train_on_cuda_learns_like_cpu(run):
    accuracy = train(ImageTask, spec_of(), device="cuda").metric("accuracy")
    assert accuracy == pytest.approx(run.metric("accuracy"), abs=0.1)


# --- divergence -----------------------------------------------------------------------------------


# Number of the evaluation, the number that it breaks, and the value: the first, second and last evaluation, and the
# last at the current bits.
BROKEN = [
    (0, "valid.loss", math.nan),
    (1, "bn1.running_var", -math.inf),
    (2, "body.2.weight", math.nan),
    (3, "test.accuracy", -math.inf),
]


@pytest.mark.parametrize(("number", "place", "value"), BROKEN)
def test_train_reports_non_finite_evaluation(number, place, value, monkeypatch):
    model = "resnet8_w8" if place.startswith("bn") else "mlp6"
    calls, task_evaluate = itertools.count(), ImageTask.evaluate

    def broken(task, net):
        """Set a metric of a split, or the first number of a tensor of the model."""
        metrics = task_evaluate(task, net)
        if next(calls) == number:
            if place in net.state_dict():
                net.state_dict()[place].view(-1)[0] = value
            else:
                split, name = place.split(".")
                metrics[split][name] = value
        return metrics

    monkeypatch.setattr(ImageTask, "evaluate", broken)
    run = train(ImageTask, spec_of("static 8", model=model, steps=6, evaluate_every=2))
    steps, policy = (2, 4, 6, 6)[number], "current" if number == 3 else "q_max"
    error = f"diverged at step {steps}, in the evaluation at {policy}: {place}"
    assert (run.status, run.error, run.metrics) == ("diverged", error, [])
    assert run.history["step"] == list(range(steps))
    evaluations = run.history["evaluations"]
    assert [e["step"] for e in evaluations] == [2, 4, 6][: number + 1]
    # The one at the current bits is no point of the curve.
    assert evaluations[-1].get("not_finite") == (None if number == 3 else [place])
    json.dumps(evaluations, allow_nan=False)


# --- checkpoints ----------------------------------------------------------------------------------

SHORT = spec_of(steps=20, n_cycles=1)


def stop_at(step, spec, checkpoint, **options):
    """Train until a number of steps are done, like an interrupted run."""
    asked = itertools.count(1)
    with pytest.raises(Stopped, match=f"at step {step} of {spec.recipe.steps}"):
        train(
            load_task_class(spec),
            spec,
            checkpoint=checkpoint,
            should_stop=lambda: next(asked) == step,
            **options,
        )


def train_from(checkpoint, task=ImageTask, spec=SHORT):
    """Return the run that goes on from a checkpoint, and the first step that it does."""
    steps = []
    run = train(
        task,
        spec,
        checkpoint=checkpoint,
        on_step=lambda step, *_: steps.append(step),
    )
    return run, steps[0]


@pytest.fixture(scope="session")
def straight():
    """Return the short run without an interruption."""
    return train(ImageTask, SHORT)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Return the newest and the previous checkpoint of the short run when stopped at step 11."""
    path = tmp_path_factory.mktemp("stopped") / "run.pt"
    stop_at(11, SHORT, path, checkpoint_seconds=0.0)
    return path.read_bytes(), previous_path(path).read_bytes()


@pytest.fixture
def path(tmp_path, checkpoints):
    """Return the newest of the two checkpoints in a new folder."""
    newer, older = checkpoints
    path = tmp_path / "run.pt"
    path.write_bytes(newer)
    previous_path(path).write_bytes(older)
    return path


def names_beside(path):
    return sorted(os.listdir(path.parent))


@pytest.mark.slow
def test_train_resumes_bit_for_bit(tmp_path):
    # Batches of two sizes; three stops, one of them in the middle of an epoch.
    spec = spec_of(steps=40, n_cycles=2, crop=1, evaluate_every=15, train_images=100)
    straight, checkpoint = train(ImageTask, spec), tmp_path / "run.pt"
    for step, total in ((2, 2), (14, 16), (21, 37)):
        asked = itertools.count(1)
        with pytest.raises(Stopped, match=f"at step {total} of 40"):
            train(
                ImageTask,
                spec,
                checkpoint=checkpoint,
                should_stop=lambda asked=asked, step=step: next(asked) == step,
            )
    # The second time from the checkpoint after the last step, as after a death in the evaluation.
    for _ in range(2):
        run = train(ImageTask, spec, checkpoint=checkpoint, checkpoint_seconds=0.0)
        assert (run.history, run.metrics) == (straight.history, straight.metrics)
        assert run.bitops == straight.bitops
        assert same_parameters(run.model, straight.model)


def test_checkpoint_of_different_run_is_rejected(path):
    other = spec_of(steps=20, n_cycles=1, seed=5)
    message = f"belongs to run {SHORT.key}, not to {other.key}"
    refused(message, train, ImageTask, other, checkpoint=path)
    assert names_beside(path) == ["run.previous.pt", "run.pt"]


class OtherDataTask(ImageTask):
    """The task on data with another checksum."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.data = replace(self.data, checksum="other")


@pytest.mark.slow
def test_checkpoint_of_different_data_is_set_aside(path, caplog):
    assert train_from(path, OtherDataTask)[1] == 0
    assert names_beside(path) == ["run.damaged.pt", "run.previous.damaged.pt"]
    text = "run.pt was trained on other data than is there now: kept as run.damaged.pt"
    assert text in caplog.text


def test_checkpoint_of_different_numerics_is_set_aside(path, caplog, monkeypatch):
    """Restart a run interrupted under different numerics, with a warning."""
    monkeypatch.setattr("cpt_lab.training.checkpoint.NUMERICS", NUMERICS + 1)
    assert train_from(path)[1] == 0
    names = ["run.other_numerics.pt", "run.previous.other_numerics.pt"]
    assert names_beside(path) == names
    text = f"run.pt was written with numerics {NUMERICS}, and today's is {NUMERICS + 1}"
    assert f"{text}: kept as run.other_numerics.pt" in caplog.text


DAMAGES = {
    "a bit": lambda content: content[:999] + bytes([content[999] ^ 1]) + content[1000:],
    "a bit of the digest": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "a gap": lambda content: content[:999] + content[1999:],
    "cut off": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "longer": lambda content: content + b"x",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_checkpoint_damage_falls_back_to_previous(damage, path, straight, caplog):
    """Resume from the previous checkpoint with the results of an uninterrupted run."""
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    run, first_step = train_from(path)
    assert first_step == 10
    assert names_beside(path) == ["run.damaged.pt", "run.previous.pt"]
    assert (run.history, run.metrics) == (straight.history, straight.metrics)
    assert run.bitops == straight.bitops
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    aside = "kept as run.damaged.pt; the run goes back to the checkpoint"
    assert warning.startswith(f"{path} is damaged: {aside}")


def test_checkpoint_damage_of_both_starts_again(path):
    for file in (path, previous_path(path)):
        file.write_bytes(DAMAGES["a gap"](file.read_bytes()))
    assert train_from(path)[1] == 0
    assert names_beside(path) == ["run.damaged.pt", "run.previous.damaged.pt"]


def test_checkpoint_is_synced_before_renaming(tmp_path, monkeypatch):
    """Leave the older or the newer checkpoint if the machine stops in between."""
    events, fsync, rename = [], os.fsync, os.replace

    def note_sync(number):
        events.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def note_rename(source, target):
        events.append((str(source), str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    checkpoint = tmp_path / "run.pt"
    stop_at(3, SHORT, checkpoint)
    temporary = f"{checkpoint}.{os.getpid()}.tmp"
    assert events == [temporary, (temporary, str(checkpoint)), str(tmp_path)]


class Killed(BaseException):
    """Exception that simulates a killed process."""


def die_at(number, patch):
    """Make every file operation from a number on raise, as if the process had been killed."""
    count = itertools.count()

    def dying(function):
        def call(*arguments, **options):
            if next(count) >= number:
                raise Killed
            return function(*arguments, **options)

        return call

    for name in ("replace", "fsync", "link", "unlink", "open"):
        patch.setattr(os, name, dying(getattr(os, name)))


def no_links(*_):
    raise OSError("no links here")


@pytest.mark.parametrize("has_links", [True, False])
def test_checkpoint_survives_kill_at_every_operation(
    has_links, checkpoints, tmp_path, monkeypatch
):
    """Kill before each file operation of saving step 11 over step 10, and after the last."""
    newer, older = checkpoints
    if not has_links:  # then the older one is alone for a moment
        monkeypatch.setattr(os, "link", no_links)
    session = Session(ImageTask, SHORT)
    content = newer[:-32]  # without its digest
    monkeypatch.setattr("torch.save", lambda _, file: file.write_bytes(content))
    has_ended = False
    for number in itertools.count():
        path = tmp_path / str(number) / "run.pt"
        path.parent.mkdir()
        path.write_bytes(older)
        previous_path(path).write_bytes(b"the one before")
        with pytest.MonkeyPatch.context() as patch:
            die_at(number, patch)
            try:
                save_checkpoint(path, session, RunState())
                has_ended = True
            except Killed:
                pass
        assert path.exists() or not has_links
        _, state = resume(path, lambda: session)
        assert state.step in (10, 11)
        if has_ended:
            break
    assert number >= 5
    assert state.step == 11
    assert (path.read_bytes(), previous_path(path).read_bytes()) == (newer, older)
    assert names_beside(path) == ["run.previous.pt", "run.pt"]


@pytest.mark.parametrize("is_second", [False, True])
def test_write_atomically_replaces_previous_copy(is_second, tmp_path):
    """Accept a previous file that is a link to the new one, as left by a killed writer."""
    path, before = tmp_path / "x", tmp_path / "x.before"
    path.write_text("old")
    if is_second:
        os.link(path, before)
    write_atomically(path, lambda temporary: temporary.write_text("new"), before)
    assert (path.read_text(), before.read_text()) == ("new", "old")
    assert names_beside(path) == ["x", "x.before"]


def test_train_continues_if_checkpoint_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").touch()
    checkpoint = tmp_path / "file" / "run.pt"
    run = train(ImageTask, SHORT, checkpoint=checkpoint, checkpoint_seconds=0.0)
    assert run.status == "ok"
    assert "cannot write" in caplog.text
