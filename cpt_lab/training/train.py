"""One training loop for all tasks: quantised training under a precision schedule, checkpointed and resumable.

>>> from cpt_lab.experiments.registry import recipe
>>> from cpt_lab.experiments.spec import run_spec
>>> from cpt_lab.tasks.base import task_of
>>> spec = run_spec(recipe("smoke"), "CR", q_max=8, seed=0, scale="smoke")
>>> train(task_of(spec), spec).status
'ok'
"""

import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cpt_core.bitops.conventions import CONVENTIONS
from cpt_core.bitops.plan import count_bitops
from cpt_core.quantization.scheduler import precision
from cpt_extras.files import nan_to_none
from cpt_extras.search.layered import LayeredSchedule
from cpt_lab.data.report import DataReport
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.training import processes
from cpt_lab.training.batched_runs import RunRequest, Steps, alone
from cpt_lab.training.checkpoint import State, resume, save_checkpoint
from cpt_lab.training.session import Session

if TYPE_CHECKING:
    from cpt_lab.tasks.base import Task

READ_EVERY = 50  # optimizer steps whose losses a GPU keeps until they are read together: reading waits for it
log = logging.getLogger(__name__)


class Stopped(Exception):
    """A run was asked to stop and has written its checkpoint."""


@dataclass(kw_only=True)
class Run(State):
    """The result of a training run: its last state, and what came of it."""

    spec: RunSpec  # what was run
    # one dict per number: name, split, value, ``when`` ("final", "best_valid" or "best_test"), and the ``precision``
    # ("q_max" or "current") and ``bits`` of the evaluation
    metrics: list[dict[str, Any]]
    bitops: dict[str, float]  # BitOps of the steps that ran, by convention
    model: nn.Module  # the trained model, still converted
    # title, checksum: of the data
    title: str
    checksum: str
    why_not_captured: str  # why steps were not replayed, or ""
    report: DataReport  # what was read, left out and changed of the data

    def metric(
        self,
        name: str,
        split: str = "test",
        when: str = "final",
        precision: str = "q_max",
    ) -> float:
        """Return one metric; KeyError when the run has no such number."""
        wanted = {"name": name, "split": split, "when": when, "precision": precision}
        for m in self.metrics:
            if all(m[k] == v for k, v in wanted.items()):
                return m["value"]
        raise KeyError(f"no metric {wanted}")


def train(task_class: "type[Task]", spec: RunSpec, **options: Any) -> Run:
    """Train one run from start to end and return its result; ``options`` are those of ``steps_of``."""
    return alone(steps_of(task_class, spec, **options))


def steps_of(
    task_class: "type[Task]",
    spec: RunSpec,
    *,
    device: str | torch.device = "cpu",
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    on_step: Callable[[int, nn.Module, float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Steps[Run]:
    """Train one run from start to end: all but its optimizer steps, which it asks for, see ``together``.

    Initial weights, data order and augmentation depend on the seed alone, so the arms of one seed are paired.

    Args:
        task_class: as ``task_of`` returns it.
        checkpoint: a file; a run that finds it goes on from it, on the CPU bit for bit; one that is damaged is set
            aside. It is written every ``checkpoint_seconds`` and left there, as is the one before it, also when the
            run raises: remove both when the result is safe. None keeps none.
        on_step: ``on_step(step, model, loss)`` after every optimizer step, for probes; every loss is then read at once.
        should_stop: asked after every step; when it says so, the checkpoint is written and ``Stopped`` raised.

    Paper: section 4 (all experiments share this loop).
    """
    make, recipe = partial(Session, task_class, spec, device), spec.recipe
    session, state = (
        (make(), State()) if checkpoint is None else resume(checkpoint, make)
    )
    if state.step:
        log.info("goes on from step %d of %d", state.step, recipe.steps)

    if processes.count() > 1:
        session.parallel = nn.parallel.DistributedDataParallel(session.model)
        if (
            processes.rank() and not state.step
        ):  # what is dropped out is another thing in every process
            torch.manual_seed(spec.seed + (processes.rank() << 32))

    def assessed(work: Callable[[Session, State], Any]) -> Any:
        found, state.status, state.error = processes.by_first(
            lambda: (work(session, state), state.status, state.error)
        )
        return found

    look = partial(assessed, partial(assess, policy=recipe.eval_bits))
    saved = time.monotonic()
    started, captured = saved - state.seconds, state.captured
    losses: list[Tensor] = []  # of the last steps, not read yet
    at_once = session.device.type == "cpu" or on_step is not None
    while state.step < recipe.steps:
        lr = session.lr_at(state.step, state.history["evaluations"])
        asked = time.monotonic()
        loss, seconds = yield RunRequest(session, state.step, lr)
        losses.append(loss)
        started += (
            time.monotonic() - asked - seconds
        )  # what others did meanwhile is no time of this run
        entries = {
            "step": state.step,
            "bits": max(session.scheduler.get_last_bits()),
            "lr": lr,
        }
        for column, entry in entries.items():
            state.history[column].append(entry)
        done = state.step + 1
        evaluates = (
            recipe.evaluate_every
            and done % recipe.evaluate_every == 0
            and done < recipe.steps
        )
        stop = should_stop is not None and should_stop()
        saves = checkpoint is not None and (
            stop or time.monotonic() - saved > checkpoint_seconds
        )
        stop, saves = map(any, zip(*processes.gathered((stop, saves)), strict=True))
        if (
            at_once
            or evaluates
            or stop
            or saves
            or done == recipe.steps
            or len(losses) == READ_EVERY
        ):
            read(losses, state)
            if state.status != "ok":
                break
        session.scheduler.step()
        state.step = done
        if on_step is not None:
            on_step(state.step - 1, session.model, state.history["loss"][-1])
        if evaluates:
            found = look()
            state.history["evaluations"].append(found)
            log.info(
                "step %d of %d: loss %.4f, %s",
                state.step,
                recipe.steps,
                state.history["loss"][-1],
                found,
            )
            if state.status != "ok":
                break
        state.seconds, state.captured = (
            time.monotonic() - started,
            captured + session.captured,
        )
        if checkpoint is not None and saves:
            try:
                save_checkpoint(checkpoint, session, state)
            except (
                OSError,
                RuntimeError,
            ) as error:  # torch raises RuntimeError when the disk is full
                # the run may still end well, and the last checkpoint is still there
                log.error("step %d: cannot write %s: %s", state.step, checkpoint, error)
            saved = time.monotonic()
        if stop:
            raise Stopped(f"at step {state.step} of {recipe.steps}")

    # the last evaluation is not in the loop, so that a run which died after its last step needs no other one
    if state.status == "ok":
        state.history["evaluations"].append(look())
    metrics = assessed(metrics_of)
    state.seconds, state.captured = (
        time.monotonic() - started,
        captured + session.captured,
    )
    return Run(
        **vars(state),
        spec=spec,
        metrics=metrics,
        model=session.model,
        title=session.task.title,
        bitops=processes.by_first(
            partial(bitops_of, session)
        ),  # takes its time too, which is none of training
        checksum=session.task.data.checksum,
        why_not_captured=session.why_not_captured,
        report=session.task.data.report,
    )


def read(losses: list[Tensor], state: State) -> None:
    """Move the losses of the last steps from the device into the history, the one at ``state.step`` last.

    The run ends at the first one that is not finite, as if nothing had come after it: that step is in the history, but
    it is no step done.
    """
    values = torch.stack(losses).tolist()
    losses.clear()
    end = next(
        (i for i, value in enumerate(values, 1) if not math.isfinite(value)), None
    )
    if end is not None:
        late = len(values) - end
        state.step -= late
        state.diverge("the training loss")
        for column in ("step", "bits", "lr"):
            del state.history[column][state.step + 1 :]
        del values[end:]
    state.history["loss"] += values


# --- evaluation at a stated precision, and the numbers of a finished run --------------------------
def evaluate(session: Session, step: int, policy: str) -> dict[str, Any]:
    """Evaluate both splits after ``step`` steps at one precision ("q_max" or "current"); the row says which.

    ``bits`` of a layered schedule are the highest of any layer. A metric that is not finite is None, and
    ``not_finite`` then names it, or the weights that are not: an evaluation may be blind to them.
    """
    spec, last = session.spec, min(step, session.spec.recipe.steps) - 1
    bits = spec.q_max if policy == "q_max" else spec.schedule(last)
    by_layer = (
        policy != "q_max"
        and isinstance(spec.schedule, LayeredSchedule)
        and spec.schedule.at(last)
    )
    session.model.eval()
    with precision(session.model, bits=by_layer or bits), session.arithmetic():
        found = session.task.evaluate(session.forward)
    kept = session.model.state_dict().items()
    lost = [
        name
        for name, x in kept
        if x.is_floating_point() and not bool(x.isfinite().all())
    ]
    row = {"step": step, "precision": policy, "bits": bits, **nan_to_none(found, lost)}
    return {**row, "not_finite": lost} if lost else row


def assess(session: Session, state: State, policy: str) -> dict[str, Any]:
    """Return an evaluation of now; where anything of it is not finite, the run has diverged."""
    found = evaluate(session, state.step, policy)
    if lost := found.get("not_finite"):
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        state.diverge(f"the evaluation at {policy}: {', '.join(lost[:3])}{more}")
    return found


def metrics_of(session: Session, state: State) -> list[dict[str, Any]]:
    """Final numbers at q_max and at the current bits, and the test number at the best evaluation.

    None of a run that has diverged, which may be seen only now.
    """
    if state.status != "ok":
        return []
    rows = []
    last = state.history["evaluations"][-1]
    finals = {last["precision"]: last}
    other = "current" if last["precision"] == "q_max" else "q_max"
    finals[other] = assess(session, state, other)
    if state.status != "ok":
        return []
    for policy in ("q_max", "current"):
        for split in ("valid", "test"):
            for name, value in finals[policy].get(split, {}).items():
                rows.append(_metric(name, split, "final", finals[policy], value))
    # chosen on held-out data; without any, on the test set, and then it is called so
    split = "valid" if "valid" in last else "test"
    metric = session.metric
    best = max(
        state.history["evaluations"],
        key=lambda e: metric.better * e[split][metric.name],
    )
    rows.append(
        _metric(metric.name, "test", f"best_{split}", best, best["test"][metric.name])
    )
    return rows


def _metric(
    name: str, split: str, when: str, evaluation: dict[str, Any], value: float
) -> dict[str, Any]:
    where = {column: evaluation[column] for column in ("step", "precision", "bits")}
    return {"name": name, "split": split, "when": when, **where, "value": value}


def bitops_of(session: Session) -> dict[str, float]:
    """BitOps of the whole run, from the first batches of the task."""
    task, model, spec = session.task, session.model, session.spec
    model.train()
    batches = list(itertools.islice(task.batches(0), task.cost_batches))

    plans = [
        count_bitops(model, task.inputs(b), spec.schedule, q_grad=spec.q_grad)
        for b in batches
    ]
    return {
        name: sum(plan.by_convention[name] for plan in plans) / len(plans)
        for name in CONVENTIONS
    }
