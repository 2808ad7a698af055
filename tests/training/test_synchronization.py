"""Training on a simulated GPU (``fake_gpu.py``): results, and waits of the host for the device."""

import inspect
import math
import warnings
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from fake_gpu import Phantom, PhantomTensor
from helpers import refused, smoke_spec
from training.test_train import stop_at

from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.scheduler import precision
from cpt_extras.search.range_test import RangeTestWarning
from cpt_lab.tasks.base import load_task_class
from cpt_lab.tasks.image import ImageTask
from cpt_lab.training import train as loop
from cpt_lab.training.recipe_search import recipe_range_test
from cpt_lab.training.session import Session
from cpt_lab.training.train import train

GPU = "cuda:0"
# torch's loader pins nothing where there is no GPU, and says so
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:'pin_memory' argument is set as true but no accelerator"
    ),
]

# Data set and fields of a small run; waits of one optimizer step, and of the evaluation of both splits. Sampling and
# detection (of one picture each) depend on their data at many places: theirs may fall, and then these numbers are to
# be lowered.
DETECTION = {"valid_images": 0, "test_images": 1, "evaluate_every": 0}
TOKENS = {"train_tokens": 500, "valid_tokens": 100, "test_tokens": 100}
PAIRS = {"train_pairs": 40, "valid_pairs": 10, "test_pairs": 10}
QUANTIZED_SUMS = {"model": "gcn", "aggregation": "quantized"}
EXACT_SAGE = {"model": "sage", "inference": "exact"}
CONVOLUTIONS = {"model": "resnet8_w8", "crop": 1, "flip": True, "train_images": 100}
RUNS = {
    "mlp": ("digits", {"model": "mlp6", "train_images": 200}, (0, 2)),
    "images": ("digits", CONVOLUTIONS, (0, 2)),
    "detection": (
        "digit-scenes",
        {"batch": 1, "size": 32, "train_images": 3} | DETECTION,
        (8, 31),
    ),
    "gcn": ("digits-graph", {"model": "gcn"}, (0, 2)),
    "gcn, Q-Agg": ("digits-graph", QUANTIZED_SUMS, (0, 2)),
    "sage": ("digits-graph", {"model": "sage"}, (8, 18)),
    "sage, exact": ("digits-graph", EXACT_SAGE, (8, 5)),
    "lstm": ("pydoc", {"length": 3, "hidden": 8} | TOKENS, (0, 2)),
    "bert": ("templates", {"layers": 1, "hidden": 16} | PAIRS, (0, 2)),
}


def spec_of(name, **changes):
    dataset, fields, _ = RUNS[name]
    short = {"steps": 4, "q_min": 5, "n_cycles": 1, "evaluate_every": 2}
    return smoke_spec(dataset, "CR", **{**short, **fields, **changes})


def start(spec, **options):
    return train(load_task_class(spec), spec, device=GPU, **options)


def on_cpu(x):
    return x.values_on_cpu if isinstance(x, PhantomTensor) else x


def values(model):
    return {name: on_cpu(x) for name, x in model.state_dict().items()}


def outcome_of(run):
    return run.status, run.metrics, run.bitops, run.history


@pytest.mark.parametrize("name", ["images", "gcn, Q-Agg", "sage", "lstm"])
def test_gpu_training_stops_and_resumes(name, tmp_path):
    spec = spec_of(name)
    with Phantom():
        whole = start(spec)
        stop_at(3, spec, tmp_path / "run.pt", device=GPU)
        resumed = start(spec, checkpoint=tmp_path / "run.pt")
        assert outcome_of(resumed) == outcome_of(whole)
        assert all(isinstance(p, PhantomTensor) for p in resumed.model.parameters())
        one, other = values(whole.model), values(resumed.model)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert whole.status == "ok"
    # the numbers of a GPU are not those of the CPU, but near to them
    session = Session(load_task_class(spec), spec)
    loss = session.step(next(session.task.batches(0)), spec.recipe.lr)
    assert whole.history["loss"][0] == pytest.approx(float(loss), rel=1e-3)


@pytest.mark.parametrize("name", RUNS)
def test_gpu_steps_never_wait_for_host(name):
    """Let the host wait for no training step, and once per evaluation."""
    spec = spec_of(name, steps=8)
    with Phantom() as gpu:
        session = Session(load_task_class(spec), spec, GPU)
        batches = session.task.batches(0)
        session.step(next(batches), 0.01)  # makes what is made once
        gpu.clear()
        session.step(next(batches), 0.01)
        session.scheduler.step()
        step = Counter(gpu.waits)
        session.model.eval()
        with precision(session.model, bits=8):
            gpu.clear()
            session.task.evaluate(session.model)
    assert (step.total(), gpu.waits.total()) == RUNS[name][2], (
        f"step: {dict(step)}, evaluation: {dict(gpu.waits)}"
    )


def disturb(monkeypatch, at, value):
    """Replace the loss of call number ``at`` of the image task by ``value``."""
    calls, loss = iter(range(1000)), ImageTask.loss

    def disturbed(*args):
        found, carry = loss(*args)
        return (found * value if next(calls) == at else found), carry

    monkeypatch.setattr(ImageTask, "loss", disturbed)


@pytest.mark.parametrize("changes", [{}, {"evaluate_every": 4}])
def test_gpu_losses_are_read_in_batches(changes, monkeypatch):
    monkeypatch.setattr(loop, "LOSS_READ_INTERVAL", 3)
    spec = spec_of("mlp", **{"steps": 11, "evaluate_every": 0, **changes})
    with Phantom() as gpu:
        together = start(spec)
        lines, first = inspect.getsourcelines(loop.read_losses)
        places = tuple(f"training/train.py:{first + i}" for i in range(len(lines)))
        reads = sum(n for place, n in gpu.waits.items() if place.endswith(places))
        seen = []
        assert (
            start(spec, on_step=lambda step, model, loss: seen.append(loss)).history
            == together.history
        )
    # steps 3, 6, 9 and 11; or 3, the evaluations at 4 and 8, 7, and 11
    assert reads == (5 if changes else 4)
    assert seen == together.history["loss"]
    assert all(isinstance(loss, float) for loss in seen)


# the first and the second of the steps whose losses are read together; the last step of all
@pytest.mark.parametrize(("at", "value"), [(0, math.nan), (4, math.inf), (7, math.inf)])
def test_gpu_divergence_is_independent_of_read_interval(
    at, value, monkeypatch, tmp_path
):
    spec = spec_of("mlp", steps=8, evaluate_every=0)

    def diverge(read_every, **options):
        monkeypatch.undo()
        monkeypatch.setattr(loop, "LOSS_READ_INTERVAL", read_every)
        disturb(monkeypatch, at, value)
        run = start(spec, **options)
        losses = run.history.pop("loss")
        return (
            outcome_of(run),
            losses,
            [p.values_on_cpu for p in run.model.parameters()],
        )

    with Phantom():
        outcome, losses, weights = diverge(3)
        outcome_at_once, losses_at_once, weights_at_once = diverge(1)
        # every step leaves a checkpoint, but none of a run that has diverged
        diverge(3, checkpoint=tmp_path / "run.pt", checkpoint_seconds=0.0)
    status, _, _, history = outcome
    assert outcome == outcome_at_once
    assert status == "diverged"
    assert history["step"] == list(range(at + 1))
    assert [len(column) for column in history.values()] == [at + 1] * 3 + [0]
    assert losses[:at] == losses_at_once[:at]
    assert len(losses) == at + 1
    assert not math.isfinite(losses[at])
    assert all(map(torch.equal, weights, weights_at_once))
    assert all(w.isfinite().all() for w in weights)
    if at:
        state = torch.load(tmp_path / "run.pt", weights_only=True)["state"]
        assert (state["step"], state["status"]) == (at, "ok")


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("model", ["mlp", "gcn", "bert"])  # SGD, Adam, AdamW
def test_non_finite_loss_changes_no_weight(model, device, monkeypatch):
    spec = spec_of(model)
    with Phantom() if device == GPU else nullcontext():
        session = Session(load_task_class(spec), spec, device)
        batches, loss = session.task.batches(0), session.task.loss
        session.step(next(batches), 0.1)
        before = {name: x.clone() for name, x in values(session.model).items()}
        parameters = dict(session.model.named_parameters())

        def not_a_number(*args):
            return loss(*args)[0] * math.nan, None

        def are_unchanged():
            after = values(session.model)
            return [torch.equal(before[name], after[name]) for name in parameters]

        monkeypatch.setattr(session.task, "loss", not_a_number)
        session.step(next(batches), 0.1)
        monkeypatch.setattr(session.task, "loss", loss)
        session.step(next(batches), 0.1)
        assert all(are_unchanged())
        session.reset()
        session.step(next(batches), 0.1)
        assert not all(are_unchanged())


def test_range_test_continues_after_diverged_precision(monkeypatch):
    recipe, loss = spec_of("mlp").recipe, ImageTask.loss

    def fails_at_3_bits(task, model, batch, carry):
        found, carry = loss(task, model, batch, carry)
        layer, *_ = layer_precisions(model).values()
        return (found * math.nan if layer.bits == 3 else found), carry

    options = {"dwell": 8, "seeds": (0,), "device": GPU}
    with Phantom(), warnings.catch_warnings(action="ignore", category=RangeTestWarning):
        whole = recipe_range_test(recipe, bits=(6,), **options)
        monkeypatch.setattr(ImageTask, "loss", fails_at_3_bits)
        disturbed = recipe_range_test(recipe, bits=(3, 6), **options)
    assert math.isnan(disturbed.losses[0][0])
    assert disturbed.losses[0][1:] == whole.losses[0]


def test_gpu_session_needs_fused_optimizer(monkeypatch):
    def unfused(task, model):
        return torch.optim.SGD(model.parameters()), None

    spec = spec_of("mlp")
    arguments = load_task_class(spec), spec
    with Phantom():
        Session(*arguments, GPU)
        monkeypatch.setattr(ImageTask, "optimizer", unfused)
        message = "on cuda:0 a task's optimizer must be fused, got SGD"
        refused(message, Session, *arguments, GPU)
        Session(*arguments, "cpu")


@pytest.mark.parametrize(("first", "second"), [("cpu", GPU), (GPU, "cpu")])
def test_gpu_run_resumes_on_different_device(first, second, tmp_path):
    spec = spec_of("gcn")  # Adam counts its steps where it computes
    with Phantom() as gpu:
        gpu.puts_gradients_on_gpu = first == GPU
        stop_at(3, spec, tmp_path / "run.pt", device=first)
        gpu.puts_gradients_on_gpu = second == GPU
        run = train(
            load_task_class(spec), spec, device=second, checkpoint=tmp_path / "run.pt"
        )
        assert {str(p.device) for p in run.model.parameters()} == {second}
    assert run.history["loss"] == pytest.approx(
        train(load_task_class(spec), spec).history["loss"], rel=0.05
    )
