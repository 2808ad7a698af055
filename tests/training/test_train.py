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
    return smoke_spec(
        "digits", arm, seed, model, **{"steps": 190, "evaluate_every": 50, **changes}
    )


@pytest.fixture(scope="module")
def run():
    return train(ImageTask, spec_of())


def test_train_follows_schedule_and_learns(run):
    assert (run.status, run.error) == ("ok", "")
    assert run.history["bits"] == run.spec.schedule.bits().tolist()
    assert run.history["lr"][94] == pytest.approx(0.03)
    assert run.history["lr"][95] == pytest.approx(0.003)
    assert run.history["lr"][142] == pytest.approx(0.0003)
    assert [e["step"] for e in run.history["evaluations"]] == [50, 100, 150, 190]
    first, last = run.history["loss"][:10], run.history["loss"][-10:]
    assert sum(last) < 0.5 * sum(first)
    assert run.metric("accuracy") > 0.6


def test_train_metrics_state_split_moment_and_precision(run):
    wanted = {
        (s, w, p)
        for s in ("valid", "test")
        for w in ("final",)
        for p in ("q_max", "current")
    }
    assert {(m["split"], m["when"], m["precision"]) for m in run.metrics} == wanted | {
        ("test", "best_valid", "q_max")
    }
    assert all(m["bits"] == 8 for m in run.metrics if m["precision"] == "q_max")
    best = max(run.history["evaluations"], key=lambda e: e["valid"]["accuracy"])
    assert run.metric("accuracy", when="best_valid") == best["test"]["accuracy"]
    refused("no metric", run.metric, "f1", error=KeyError)


def test_train_evaluates_at_q_max_and_current():
    run = train(ImageTask, spec_of("static 3", steps=20))
    at = {
        m["precision"]: (m["bits"], m["value"])
        for m in run.metrics
        if m["name"] == "loss" and m["split"] == "test"
    }
    assert (at["q_max"][0], at["current"][0]) == (8, 3)
    assert at["q_max"][1] != at["current"][1]


def test_evaluate_uses_eval_mode_and_last_bits(
    monkeypatch,
):
    session, seen = Session(ImageTask, spec_of("CR")), []
    monkeypatch.setattr(
        session.task, "evaluate", lambda model: seen.append(model.training) or {}
    )
    bits = session.spec.schedule.bits().tolist()
    steps = [t for t in range(1, 190) if bits[t - 1] != bits[t]] + [
        190
    ]  # those before the bits change, and the last
    assert [evaluate(session, t, "current")["bits"] for t in steps] == [
        bits[t - 1] for t in steps
    ]
    assert evaluate(session, 1, "q_max")["bits"] == 8
    assert not any(seen)


def test_image_task_accuracy_and_loss():
    task = ImageTask(spec_of(), torch.device("cpu"))
    weight = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    found = task.evaluate(lambda images: images.flatten(1) @ weight)
    for name in ("valid", "test"):
        part = getattr(task.data, name)
        chances = (part.images.flatten(1) / 16 @ weight).log_softmax(
            1
        )  # pixels from 0 to 16
        accuracy = float((chances.argmax(1) == part.labels).float().mean())
        loss = -float(chances[range(len(part)), part.labels].mean())
        assert found[name] == pytest.approx(
            {"accuracy": accuracy, "loss": loss}, rel=1e-4
        )


def test_session_initial_weights_follow_seed():
    first, again, other = (
        Session(ImageTask, spec_of(seed=seed)).model.fc.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_train_counts_bitops(run):
    layers = 64 * 32 + 5 * 32 * 32 + 32 * 10
    squares = sum(int(q * q + 16 * q) for q in run.spec.schedule.bits())
    assert run.bitops["paper"] == 64 * layers * squares / 1024
    assert (
        run.bitops["per_op"] > 64 * 3 * 320 * run.spec.recipe.steps
    )  # the classifier alone, in float32


def test_session_step_clips_gradient_norm():
    session = Session(ImageTask, spec_of(clip=0.01, weight_decay=0.0))
    before = [p.detach().clone() for p in session.model.parameters()]
    session.step(
        next(session.task.batches(0)), lr=0.5
    )  # the first step: momentum has gathered nothing yet
    moved = [
        p.detach() - b for p, b in zip(session.model.parameters(), before, strict=True)
    ]
    assert float(nn.utils.get_total_norm(moved)) == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_train_reports_diverging_loss_as_status():
    run = train(ImageTask, spec_of(clip=None, lr=1e20))
    assert run.status == "diverged"
    assert run.metrics == []
    assert len(run.history["step"]) < 190
    assert (
        run.error == f"diverged at step {run.history['step'][-1]}, in the training loss"
    )


@pytest.mark.parametrize(
    (
        "at",
        "place",
        "value",
    ),  # the first, second and last evaluation, and the last at the current bits
    [
        (0, "valid.loss", math.nan),
        (1, "bn1.running_var", -math.inf),
        (2, "body.2.weight", math.nan),
        (3, "test.accuracy", -math.inf),
    ],
)
def test_train_reports_non_finite_evaluation_as_diverged(at, place, value, monkeypatch):
    model = "resnet8_w8" if place.startswith("bn") else "mlp6"
    calls, evaluate = itertools.count(), ImageTask.evaluate

    def disturbed(task, net):
        """Set ``place`` to the value at evaluation number ``at``: in a split's metric or in the model."""
        found = evaluate(task, net)
        if next(calls) == at:
            if place in net.state_dict():
                net.state_dict()[place].view(-1)[0] = value
            else:
                split, name = place.split(".")
                found[split][name] = value
        return found

    monkeypatch.setattr(ImageTask, "evaluate", disturbed)
    run = train(ImageTask, spec_of("static 8", model=model, steps=6, evaluate_every=2))
    steps, policy = (2, 4, 6, 6)[at], "current" if at == 3 else "q_max"
    assert run.status == "diverged"
    assert (
        run.error == f"diverged at step {steps}, in the evaluation at {policy}: {place}"
    )
    assert run.metrics == []
    assert run.history["step"] == list(range(steps))
    found = run.history["evaluations"][-1]
    assert found.get("not_finite") == (
        None if at == 3 else [place]
    )  # that one is no point of the curve
    assert [e["step"] for e in run.history["evaluations"]] == [2, 4, 6][: at + 1]
    json.dumps(run.history["evaluations"], allow_nan=False)


def stop_at(step, spec, checkpoint, **options):
    """Train until a number of steps are done, like an interrupted run."""
    asked = iter(range(step))
    with pytest.raises(Stopped, match=f"at step {step} of {spec.recipe.steps}"):
        train(
            load_task_class(spec),
            spec,
            checkpoint=checkpoint,
            should_stop=lambda: next(asked) == step - 1,
            **options,
        )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return a short run: its uninterrupted result, and its two checkpoints when stopped at step 11."""
    spec, checkpoint = (
        spec_of(steps=20, n_cycles=1),
        tmp_path_factory.mktemp("stopped") / "run.pt",
    )
    stop_at(11, spec, checkpoint, checkpoint_seconds=0.0)
    files = [
        checkpoint.read_bytes(),
        checkpoint.with_name("run.previous.pt").read_bytes(),
    ]
    return spec, train(load_task_class(spec), spec), files


def test_checkpoint_of_different_run_is_rejected(stopped, tmp_path):
    spec, _, (newer, _) = stopped
    (tmp_path / "run.pt").write_bytes(newer)
    other = spec_of(steps=20, n_cycles=1, seed=5)
    with pytest.raises(
        ValueError, match=f"belongs to run {spec.key}, not to {other.key}"
    ):
        train(load_task_class(other), other, checkpoint=tmp_path / "run.pt")
    assert os.listdir(tmp_path) == ["run.pt"]


def test_checkpoint_of_different_data_is_set_aside(stopped, tmp_path, caplog):
    spec, _, (newer, _) = stopped
    (tmp_path / "run.pt").write_bytes(newer)
    steps = []

    class Changed(load_task_class(spec)):
        def __init__(self, *given):
            super().__init__(*given)
            self.data = replace(self.data, checksum="other")

    train(
        Changed,
        spec,
        checkpoint=tmp_path / "run.pt",
        on_step=lambda step, *_: steps.append(step),
    )
    assert steps[0] == 0
    assert os.listdir(tmp_path) == ["run.damaged.pt"]
    assert (
        "run.pt was trained on other data than is there now: kept as run.damaged.pt"
        in caplog.text
    )


def test_checkpoint_of_different_numerics_is_set_aside(
    stopped, tmp_path, caplog, monkeypatch
):
    """Restart a run interrupted under different numerics, with a warning."""
    spec, _, (newer, _) = stopped
    (tmp_path / "run.pt").write_bytes(newer)
    (tmp_path / "run.previous.pt").write_bytes(newer)
    monkeypatch.setattr("cpt_lab.training.checkpoint.NUMERICS", NUMERICS + 1)
    steps = []
    train(
        load_task_class(spec),
        spec,
        checkpoint=tmp_path / "run.pt",
        on_step=lambda step, *_: steps.append(step),
    )
    assert steps[0] == 0
    assert sorted(os.listdir(tmp_path)) == [
        "run.other_numerics.pt",
        "run.previous.other_numerics.pt",
    ]
    said = f"run.pt was written with numerics {NUMERICS}, and today's is {NUMERICS + 1}: kept as run.other_numerics.pt"
    assert said in caplog.text


DAMAGES = {
    "a bit": lambda content: content[:999] + bytes([content[999] ^ 1]) + content[1000:],
    "a bit of the digest": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "a gap": lambda content: content[:999] + content[1999:],
    "cut off": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "longer": lambda content: content + b"x",
}


@pytest.mark.parametrize(
    ("damage", "both"), [*((damage, False) for damage in DAMAGES), ("a gap", True)]
)
def test_checkpoint_damage_falls_back_to_previous(
    damage, both, stopped, tmp_path, caplog
):
    """Resume from the previous checkpoint with the results of an uninterrupted run."""
    spec, straight, files = stopped
    checkpoint, steps = tmp_path / "run.pt", []
    for name, content, hurt in zip(
        ("run.pt", "run.previous.pt"), files, (True, both), strict=True
    ):
        (tmp_path / name).write_bytes(DAMAGES[damage](content) if hurt else content)
    run = train(
        load_task_class(spec),
        spec,
        checkpoint=checkpoint,
        on_step=lambda step, *_: steps.append(step),
    )
    assert set(os.listdir(tmp_path)) == {
        "run.damaged.pt",
        "run.previous.damaged.pt" if both else "run.previous.pt",
    }
    assert steps[0] == (0 if both else 10)
    assert (run.history, run.metrics, run.bitops) == (
        straight.history,
        straight.metrics,
        straight.bitops,
    )
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ]
    assert len(lines) == 1 + both
    assert lines[0].startswith(
        f"{checkpoint} is damaged: kept as run.damaged.pt; the run goes back to the checkpoint"
    )


def test_checkpoint_is_synced_before_renaming(tmp_path, monkeypatch):
    """Leave the older or the newer checkpoint if the machine stops in between."""
    events, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda n: events.append(os.readlink(f"/proc/self/fd/{n}")) or fsync(n),
    )
    monkeypatch.setattr(
        os, "replace", lambda a, b: events.append((str(a), str(b))) or rename(a, b)
    )
    checkpoint, spec = tmp_path / "run.pt", spec_of(steps=20, n_cycles=1)
    stop_at(11, spec, checkpoint)
    temporary = f"{checkpoint}.{os.getpid()}.tmp"
    assert events == [temporary, (temporary, str(checkpoint)), str(tmp_path)]


class Killed(BaseException):
    """Exception that simulates a killed process."""


OPERATIONS = ("replace", "fsync", "link", "unlink", "open")


def die_at(patch, number):
    """Make every file operation from number ``number`` on raise, as if the process had been killed."""
    count = itertools.count()

    def dying(do):
        def call(*args, **kwargs):
            if next(count) >= number:
                raise Killed
            return do(*args, **kwargs)

        return call

    for name in OPERATIONS:
        patch.setattr(os, name, dying(getattr(os, name)))


@pytest.mark.parametrize("links", [True, False])
def test_checkpoint_survives_kill_at_every_operation(
    links, stopped, tmp_path, monkeypatch
):
    """Kill before each file operation of saving step 11 over step 10, and after the last."""
    spec, _, (newer, older) = stopped
    if (
        not links
    ):  # a file system without second names: for a moment there is the older one alone
        monkeypatch.setattr(
            os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here"))
        )
    made = Session(load_task_class(spec), spec)
    monkeypatch.setattr(
        "torch.save", lambda content, file: file.write_bytes(newer[:-32])
    )
    for number in itertools.count():
        checkpoint, ended = tmp_path / str(number) / "run.pt", False
        checkpoint.parent.mkdir()
        checkpoint.write_bytes(older)
        previous_path(checkpoint).write_bytes(b"the one before")
        with pytest.MonkeyPatch.context() as patch:
            die_at(patch, number)
            try:
                save_checkpoint(checkpoint, made, RunState())
                ended = True
            except Killed:
                pass
        assert checkpoint.exists() or not links
        _, state = resume(checkpoint, lambda: made)
        assert state.step in (10, 11)
        if ended:
            break
    assert number >= 5
    assert (
        state.step,
        checkpoint.read_bytes(),
        previous_path(checkpoint).read_bytes(),
    ) == (
        11,
        newer,
        older,
    )
    assert sorted(os.listdir(checkpoint.parent)) == ["run.previous.pt", "run.pt"]


@pytest.mark.parametrize("again", [False, True])
def test_write_atomically_replaces_previous_copy(again, tmp_path):
    """Accept a previous file that is a link to the new one, as left by a killed writer."""
    path, before = tmp_path / "x", tmp_path / "x.before"
    path.write_text("old")
    if again:
        os.link(path, before)
    write_atomically(path, lambda temporary: temporary.write_text("new"), before)
    assert (path.read_text(), before.read_text()) == ("new", "old")
    assert sorted(os.listdir(tmp_path)) == ["x", "x.before"]


def test_train_resumes_bit_for_bit(tmp_path):
    spec = spec_of(
        steps=40, n_cycles=2, crop=1, evaluate_every=15, train_images=100
    )  # batches of two sizes
    straight, checkpoint = train(load_task_class(spec), spec), tmp_path / "run.pt"
    for stop_after in (1, 13, 20):  # three times, also in the middle of an epoch
        asked = iter(range(40))
        with pytest.raises(Stopped):
            train(
                load_task_class(spec),
                spec,
                checkpoint=checkpoint,
                should_stop=lambda n=stop_after, a=asked: next(a) == n,
            )
    for _ in range(
        2
    ):  # the second time from the checkpoint after the last step, as after a death in the evaluation
        resumed = train(
            load_task_class(spec), spec, checkpoint=checkpoint, checkpoint_seconds=0.0
        )
        assert (resumed.history, resumed.metrics) == (
            straight.history,
            straight.metrics,
        )
        assert resumed.bitops == straight.bitops
        assert same_parameters(resumed.model, straight.model)


def test_train_continues_if_checkpoint_cannot_be_written(tmp_path, caplog):
    spec = spec_of(steps=10, n_cycles=1)
    (tmp_path / "file").touch()
    run = train(
        load_task_class(spec),
        spec,
        checkpoint=tmp_path / "file" / "run.pt",
        checkpoint_seconds=0.0,
    )
    assert run.status == "ok"
    assert "cannot write" in caplog.text


def test_run_spec_rejects_unknown_task():
    chess = replace(recipe("demo"), task="chess")
    refused(
        "unknown task 'chess'; choose from image",
        run_spec,
        chess,
        "CR",
        q_max=8,
        seed=0,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_train_on_cuda_learns_like_cpu(run):
    assert train(ImageTask, spec_of(), device="cuda").metric(
        "accuracy"
    ) == pytest.approx(run.metric("accuracy"), abs=0.1)


@pytest.mark.filterwarnings("error")
def test_session_does_not_warn_of_tiny_gradients(
    monkeypatch,
):
    session = Session(ImageTask, spec_of("CR"))
    whole = session.task.loss
    monkeypatch.setattr(
        session.task,
        "loss",
        lambda *given: (1e-12 * (found := whole(*given))[0], found[1]),
    )
    assert 0 < float(session.step(next(session.batches(0)), 0.1)) < 1e-9
