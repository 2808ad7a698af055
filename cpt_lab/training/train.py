"""Training loop of all tasks: quantised training under a precision schedule, with checkpoints from which it resumes.

``training_steps`` is the loop as a generator, which ``train`` runs to its end and ``batched_runs`` interleaves with
others; ``evaluate`` measures a model at a stated precision.

>>> from cpt_lab.experiments.registry import recipe
>>> from cpt_lab.experiments.spec import run_spec
>>> from cpt_lab.tasks.base import load_task_class
>>> spec = run_spec(recipe("smoke"), "CR", q_max=8, seed=0, scale="smoke")
>>> train(load_task_class(spec), spec).status
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
from cpt_lab.training import process_group
from cpt_lab.training.batched_runs import RunSteps, StepRequest, run_alone
from cpt_lab.training.checkpoint import RunState, resume, save_checkpoint
from cpt_lab.training.session import Session

if TYPE_CHECKING:
    from cpt_lab.tasks.base import Task

LOSS_READ_INTERVAL = 50  # optimizer steps after which losses are read together, as reading one waits for the GPU
MAX_NAMES_IN_ERROR = 3  # metrics and weights that the error of a diverged run names
log = logging.getLogger(__name__)


class Stopped(Exception):
    """Signal that a run was asked to stop and has written its checkpoint."""


@dataclass(kw_only=True)
class Run(RunState):
    """Result of a training run: its last state, metrics, cost, and the data that it used.

    Attributes:
        spec: what was run.
        metrics: one dict per number: name, split, value, ``when`` ("final", "best_valid" or "best_test"), and the
            ``precision`` ("q_max" or "current") and ``bits`` of the evaluation.
        bitops: BitOps of the steps that ran, by convention.
        model: the trained model, still converted.
        title: title of the data.
        checksum: checksum of the data.
        uncaptured_reason: why steps were not replayed, or "".
        report: what was read, left out and changed of the data.
    """

    spec: RunSpec
    metrics: list[dict[str, Any]]
    bitops: dict[str, float]
    model: nn.Module
    title: str
    checksum: str
    uncaptured_reason: str
    report: DataReport

    def metric(
        self,
        name: str,
        split: str = "test",
        when: str = "final",
        precision: str = "q_max",
    ) -> float:
        """Return the value of one metric; KeyError when the run has no such number."""
        key = {"name": name, "split": split, "when": when, "precision": precision}
        for row in self.metrics:
            if all(row[column] == value for column, value in key.items()):
                return row["value"]
        raise KeyError(f"no metric {key}")


def train(task_class: "type[Task]", spec: RunSpec, **options: Any) -> Run:
    """Train one run from start to end; return its result.

    Args:
        task_class: task class of the spec, as ``load_task_class`` returns it.
        spec: what is trained.
        **options: keyword arguments of ``training_steps``.
    """
    return run_alone(training_steps(task_class, spec, **options))


def training_steps(
    task_class: "type[Task]",
    spec: RunSpec,
    *,
    device: str | torch.device = "cpu",
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    on_step: Callable[[int, nn.Module, float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> RunSteps[Run]:
    """Train one run as a generator: it yields a request for every optimizer step and returns the result.

    Initial weights, data order and augmentation depend on the seed alone, so the arms of one seed are paired.

    Args:
        task_class: task class of the spec, as ``load_task_class`` returns it.
        spec: what is trained.
        device: device to train on.
        checkpoint: a file. If it exists, the run resumes from it, on the CPU bit for bit; a damaged one is set aside.
            It is written every ``checkpoint_seconds`` and left there, as is the one before it, also when the run
            raises: remove both when the result is stored. None writes none.
        checkpoint_seconds: seconds between two checkpoints.
        on_step: ``on_step(step, model, loss)`` after every optimizer step, for probes; every loss is then read at once.
        should_stop: called after every step; if it returns True, the checkpoint is written and ``Stopped`` raised.

    Paper: section 4 (all experiments share this loop).
    """
    loop = _TrainingLoop(task_class, spec, device, checkpoint, checkpoint_seconds)
    session, state, recipe = loop.session, loop.state, spec.recipe
    read_every_loss = session.device.type == "cpu" or on_step is not None

    while state.step < recipe.steps:
        lr = session.lr_at(state.step, state.history["evaluations"])
        request_time = time.monotonic()
        loss, seconds = yield StepRequest(session, state.step, lr)
        # Time that other runs took meanwhile does not count for this run.
        loop.start_time += time.monotonic() - request_time - seconds
        loop.record_step(loss, lr)

        steps_done = state.step + 1
        evaluates = bool(
            recipe.evaluate_every
            and steps_done % recipe.evaluate_every == 0
            and steps_done < recipe.steps
        )
        stops, saves = loop.agree_to_stop_or_save(should_stop)
        is_last = steps_done == recipe.steps
        reads_losses = read_every_loss or evaluates or stops or saves or is_last
        if reads_losses or len(loop.unread_losses) == LOSS_READ_INTERVAL:
            read_losses(loop.unread_losses, state)
            if state.status != "ok":
                break

        session.scheduler.step()
        state.step = steps_done
        if on_step is not None:
            on_step(state.step - 1, session.model, state.history["loss"][-1])
        if evaluates:
            loop.evaluate()
            if state.status != "ok":
                break
        loop.update_totals()
        if saves:
            loop.save()
        if stops:
            raise Stopped(f"at step {state.step} of {recipe.steps}")

    return loop.finish()


class _TrainingLoop:
    """State of a training loop, and the parts of it that need no optimizer step.

    Attributes:
        session: set-up of the run.
        state: progress and history.
        start_time: time at which the run would have started, had it run without interruption.
        unread_losses: losses of the last steps, still on the device.
    """

    def __init__(
        self,
        task_class: "type[Task]",
        spec: RunSpec,
        device: str | torch.device,
        checkpoint: Path | None,
        checkpoint_seconds: float,
    ) -> None:
        self.spec, self.checkpoint, self.checkpoint_seconds = (
            spec,
            checkpoint,
            checkpoint_seconds,
        )
        make_session = partial(Session, task_class, spec, device)
        if checkpoint is None:
            self.session, self.state = make_session(), RunState()
        else:
            self.session, self.state = resume(checkpoint, make_session)
        if self.state.step:
            log.info("goes on from step %d of %d", self.state.step, spec.recipe.steps)

        if process_group.size() > 1:
            self.session.parallel = nn.parallel.DistributedDataParallel(
                self.session.model
            )
            # Every process draws its own dropout masks.
            if process_group.rank() and not self.state.step:
                torch.manual_seed(spec.seed + (process_group.rank() << 32))

        self._save_time = time.monotonic()
        self.start_time = self._save_time - self.state.seconds
        self._captured_before = self.state.captured
        self.unread_losses: list[Tensor] = []

    def record_step(self, loss: Tensor, lr: float) -> None:
        """Add a step to the history; its loss is read later."""
        self.unread_losses.append(loss)
        entries = {
            "step": self.state.step,
            "bits": max(self.session.scheduler.get_last_bits()),
            "lr": lr,
        }
        for column, entry in entries.items():
            self.state.history[column].append(entry)

    def agree_to_stop_or_save(
        self, should_stop: Callable[[], bool] | None
    ) -> tuple[bool, bool]:
        """Return whether to stop, and whether to write a checkpoint: if any of the processes does."""
        stops = should_stop is not None and should_stop()
        is_due = stops or time.monotonic() - self._save_time > self.checkpoint_seconds
        saves = self.checkpoint is not None and is_due
        all_stops, all_saves = zip(*process_group.gather((stops, saves)), strict=True)
        return any(all_stops), any(all_saves)

    def evaluate(self) -> None:
        """Evaluate with the bits of the recipe; add the evaluation to the history."""
        evaluation = self._on_first(
            partial(evaluate_and_check, policy=self.spec.recipe.eval_bits)
        )
        self.state.history["evaluations"].append(evaluation)
        if self.state.step < self.spec.recipe.steps:
            log.info(
                "step %d of %d: loss %.4f, %s",
                self.state.step,
                self.spec.recipe.steps,
                self.state.history["loss"][-1],
                evaluation,
            )

    def _on_first(self, work: Callable[[Session, RunState], Any]) -> Any:
        """Call ``work`` in the first process; return its result and take over the status in all processes."""
        state = self.state
        value, state.status, state.error = process_group.run_on_first(
            lambda: (work(self.session, state), state.status, state.error)
        )
        return value

    def update_totals(self) -> None:
        """Update the time and the number of captured steps."""
        self.state.seconds = time.monotonic() - self.start_time
        self.state.captured = self._captured_before + self.session.captured

    def save(self) -> None:
        """Write a checkpoint; log an error where that fails, as the run may still end well without one."""
        if self.checkpoint is None:
            return
        try:
            save_checkpoint(self.checkpoint, self.session, self.state)
        except (
            OSError,
            RuntimeError,
        ) as error:  # torch raises RuntimeError when the disk is full
            log.error(
                "step %d: cannot write %s: %s", self.state.step, self.checkpoint, error
            )
        self._save_time = time.monotonic()

    def finish(self) -> Run:
        """Evaluate for the last time, unless the run has diverged; return its result.

        This evaluation is not part of the loop, so a run that died after its last step repeats no other one.
        """
        if self.state.status == "ok":
            self.evaluate()
        metrics = self._on_first(final_metrics)
        self.update_totals()

        # Counting BitOps takes time, too, which is not part of the training time.
        bitops = process_group.run_on_first(partial(run_bitops, self.session))
        return Run(
            **vars(self.state),
            spec=self.spec,
            metrics=metrics,
            model=self.session.model,
            title=self.session.task.title,
            bitops=bitops,
            checksum=self.session.task.data.checksum,
            uncaptured_reason=self.session.uncaptured_reason,
            report=self.session.task.data.report,
        )


def read_losses(losses: list[Tensor], state: RunState) -> None:
    """Move the losses of the last steps from the device into the history; mark a run that has diverged.

    The last loss is that of step ``state.step``. The run ends at the first loss that is not finite: that step is in the
    history, but does not count as done, and later ones are removed.
    """
    values = torch.stack(losses).tolist()
    losses.clear()
    count_until_divergence = None
    for count, value in enumerate(values, 1):
        if not math.isfinite(value):
            count_until_divergence = count
            break
    if count_until_divergence is not None:
        late = len(values) - count_until_divergence
        state.step -= late
        state.diverge("the training loss")
        for column in ("step", "bits", "lr"):
            del state.history[column][state.step + 1 :]
        del values[count_until_divergence:]
    state.history["loss"] += values


# --- evaluation at a stated precision, and the numbers of a finished run --------------------------
def evaluate(session: Session, step: int, policy: str) -> dict[str, Any]:
    """Evaluate all splits after ``step`` steps at the precision of a policy ("q_max" or "current").

    Returns:
        step, precision, bits (the highest of any layer for a layered schedule) and the metrics of every split. A metric
        that is not finite is None, and ``not_finite`` names it, as it names weights that are not finite: an evaluation
        may be blind to them.
    """
    spec, last = session.spec, min(step, session.spec.recipe.steps) - 1
    bits = spec.q_max if policy == "q_max" else spec.schedule(last)
    bits_by_layer = None
    if policy != "q_max" and isinstance(spec.schedule, LayeredSchedule):
        bits_by_layer = spec.schedule.at(last)

    session.model.eval()
    with precision(session.model, bits=bits_by_layer or bits), session.arithmetic():
        metrics = session.task.evaluate(session.forward)

    not_finite = []
    for name, value in session.model.state_dict().items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            not_finite.append(name)
    row = {
        "step": step,
        "precision": policy,
        "bits": bits,
        **nan_to_none(metrics, not_finite),
    }
    return {**row, "not_finite": not_finite} if not_finite else row


def evaluate_and_check(
    session: Session, state: RunState, policy: str
) -> dict[str, Any]:
    """Return an evaluation of the current weights; mark the run as diverged if anything in it is not finite."""
    evaluation = evaluate(session, state.step, policy)
    names = evaluation.get("not_finite")
    if names:
        description = ", ".join(names[:MAX_NAMES_IN_ERROR])
        if len(names) > MAX_NAMES_IN_ERROR:
            description += f" and {len(names) - MAX_NAMES_IN_ERROR} more"
        state.diverge(f"the evaluation at {policy}: {description}")
    return evaluation


def final_metrics(session: Session, state: RunState) -> list[dict[str, Any]]:
    """Return final metrics at q_max and at the current bits, and the test metric at the best evaluation.

    A run that has diverged, which its last evaluation may be the first to show, has none.
    """
    if state.status != "ok":
        return []
    last = state.history["evaluations"][-1]
    final_evaluations = {last["precision"]: last}
    other_policy = "current" if last["precision"] == "q_max" else "q_max"
    final_evaluations[other_policy] = evaluate_and_check(session, state, other_policy)
    if state.status != "ok":
        return []

    rows = []
    for policy in ("q_max", "current"):
        for split in ("valid", "test"):
            for name, value in final_evaluations[policy].get(split, {}).items():
                rows.append(
                    _metric_row(name, split, "final", final_evaluations[policy], value)
                )

    # The best evaluation is chosen on held-out data; without any, on the test set, and is then named so.
    split = "valid" if "valid" in last else "test"
    metric = session.metric
    best = max(
        state.history["evaluations"],
        key=lambda evaluation: metric.better * evaluation[split][metric.name],
    )
    rows.append(
        _metric_row(
            metric.name, "test", f"best_{split}", best, best["test"][metric.name]
        )
    )
    return rows


def _metric_row(
    name: str, split: str, when: str, evaluation: dict[str, Any], value: float
) -> dict[str, Any]:
    origin = {column: evaluation[column] for column in ("step", "precision", "bits")}
    return {"name": name, "split": split, "when": when, **origin, "value": value}


def run_bitops(session: Session) -> dict[str, float]:
    """Return the BitOps of the whole run by convention, counted on the first batches of the task."""
    task, model, spec = session.task, session.model, session.spec
    model.train()
    batches = list(itertools.islice(task.batches(0), task.cost_batches))

    plans = [
        count_bitops(model, task.inputs(batch), spec.schedule, q_grad=spec.q_grad)
        for batch in batches
    ]
    return {
        name: sum(plan.by_convention[name] for plan in plans) / len(plans)
        for name in CONVENTIONS
    }
