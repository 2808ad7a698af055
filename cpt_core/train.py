"""One training loop for all tasks: quantised training under a precision schedule, checkpointed and resumable.

>>> from cpt_core.recipes import recipe
>>> from cpt_core.specs import run_spec
>>> spec = run_spec(recipe("smoke"), "CR", q_max=8, seed=0, scale="smoke")
>>> train(TASKS["image"], spec).status
'ok'
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from cpt_core.bitops import CONVENTIONS, count_bitops
from cpt_core.convert import PRESETS, QuantConfig, quantize_
from cpt_core.recipes import GraphRecipe, Recipe
from cpt_core.scheduler import PrecisionScheduler, precision
from cpt_core.specs import RunSpec
from cpt_core.tasks import TASKS, Task

OnStep = Callable[[int, nn.Module, float], None]
log = logging.getLogger(__name__)


class Stopped(Exception):
    """A run was asked to stop and has written its checkpoint."""


@dataclass
class Run:
    """The result of a training run.

    Attributes:
        spec: what was run.
        status: "ok", or "diverged" when the loss became non-finite (training stops there).
        metrics: one dict per number: name, split, value, ``when`` ("final", "best_valid" or "best_test"), and the
            ``precision`` ("q_max" or "current") and ``bits`` of the evaluation.
        history: columns ``step``, ``loss``, ``bits``, ``lr`` of every step, and ``evaluations``, a list of dicts.
        bitops: BitOps of the steps that ran, by convention.
        seconds: time spent training and evaluating, over all sessions of a resumed run.
        model: the trained model, still converted.
        title, checksum: of the data.
    """

    spec: RunSpec
    status: str
    metrics: list[dict[str, Any]]
    history: dict[str, list[Any]]
    bitops: dict[str, float]
    seconds: float
    model: nn.Module
    title: str
    checksum: str

    def metric(self, name: str, split: str = "test", when: str = "final", precision: str = "q_max") -> float:
        """Return one metric; KeyError when the run has no such number."""
        wanted = {"name": name, "split": split, "when": when, "precision": precision}
        for m in self.metrics:
            if all(m[k] == v for k, v in wanted.items()):
                return m["value"]
        raise KeyError(f"no metric {wanted}")


@dataclass
class _State:
    """Everything that changes during training; what a checkpoint holds."""

    step: int = 0
    seconds: float = 0.0
    status: str = "ok"
    carry: Any = None
    history: dict[str, list[Any]] = field(
        default_factory=lambda: {"step": [], "loss": [], "bits": [], "lr": [], "evaluations": []}
    )


def train(
    task_class: type[Task],
    spec: RunSpec,
    *,
    device: str | torch.device = "cpu",
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    progress: bool = False,
    on_step: OnStep | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Run:
    """Train one run from start to end and return its result.

    Initial weights, data order and augmentation depend on the seed alone, so the arms of one seed are paired.

    Args:
        task_class: a value of ``TASKS``.
        spec: what to run.
        device: "cpu" or "cuda".
        checkpoint: a file; a run that finds it goes on from it, on the CPU bit for bit. It is written every
            ``checkpoint_seconds`` and left there: remove it when the result is safe. None keeps none.
        checkpoint_seconds: see ``checkpoint``.
        progress: show a progress bar.
        on_step: ``on_step(step, model, loss)`` after every optimizer step, for probes.
        should_stop: asked after every step; when it says so, the checkpoint is written and ``Stopped`` raised.

    Paper: section 4 (all experiments share this loop).
    """
    device = torch.device(device)
    torch.manual_seed(spec.seed)
    task = task_class(spec, device)
    recipe = spec.recipe
    model = task.model()
    quantize_(model, quant_config(recipe, spec.seed))
    optimizer, lr_at = task.optimizer(model)
    scheduler = PrecisionScheduler(model, spec.schedule, spec.q_grad)
    state = _State()
    if checkpoint is not None and checkpoint.exists():
        _load(checkpoint, spec, state, model, optimizer, scheduler)
        log.info("goes on from step %d of %d", state.step, recipe.steps)

    started = saved = time.monotonic()
    before = state.seconds
    batches = task.batches(state.step)
    bar = tqdm(total=recipe.steps, initial=state.step, desc=f"{spec.arm} seed {spec.seed}", disable=not progress)
    with bar:
        while state.step < recipe.steps and state.status == "ok":
            lr = lr_at(state.step, state.history["evaluations"])
            for group in optimizer.param_groups:
                group["lr"] = lr
            batch = next(batches)
            model.train()
            loss, state.carry = task.loss(model, batch, state.carry)
            value = float(loss.detach())
            for column, entry in zip(
                ("step", "loss", "bits", "lr"), (state.step, value, scheduler.get_last_bits()[0], lr), strict=True
            ):
                state.history[column].append(entry)
            if not math.isfinite(value):
                state.status = "diverged"
                break
            loss.backward()
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            state.step += 1
            bar.update()
            if on_step is not None:
                on_step(state.step - 1, model, value)
            due = recipe.evaluate_every and state.step % recipe.evaluate_every == 0
            if due and state.step < recipe.steps:
                state.history["evaluations"].append(_evaluate(task, model, state.step, recipe.eval_bits, spec))
                log.info(
                    "step %d of %d: loss %.4f, %s", state.step, recipe.steps, value, state.history["evaluations"][-1]
                )
            state.seconds = before + time.monotonic() - started
            stop = should_stop is not None and should_stop()
            if checkpoint is not None and (stop or time.monotonic() - saved > checkpoint_seconds):
                try:
                    _save(checkpoint, spec, state, model, optimizer, scheduler)
                except (OSError, RuntimeError) as error:  # torch raises RuntimeError when the disk is full
                    # the run may still end well, and the last checkpoint is still there
                    log.error("step %d: cannot write %s: %s", state.step, checkpoint, error)
                saved = time.monotonic()
            if stop:
                raise Stopped(f"at step {state.step} of {recipe.steps}")

    if state.status == "ok":
        state.history["evaluations"].append(_evaluate(task, model, state.step, recipe.eval_bits, spec))
    metrics = _metrics(task, model, state, spec)
    state.seconds = before + time.monotonic() - started
    run = Run(spec, state.status, metrics, state.history, {}, state.seconds, model, task.title, task.checksum)
    run.bitops = _bitops(task, model, spec)
    return run


def quant_config(recipe: Recipe, seed: int) -> QuantConfig:
    """Return what a recipe quantises, and how."""
    base = PRESETS[recipe.quantized]
    aggregation = recipe.aggregation if isinstance(recipe, GraphRecipe) else "fp"
    return QuantConfig(base.float32, base.quantizers, recipe.running_start, seed, aggregation)


# --- evaluation -----------------------------------------------------------------------------------


def _evaluate(task: Task, model: nn.Module, step: int, policy: str, spec: RunSpec) -> dict[str, Any]:
    """Evaluate both splits at one precision; the row says which."""
    bits = spec.q_max if policy == "q_max" else spec.schedule(min(step, spec.recipe.steps) - 1)
    model.eval()
    with precision(model, bits=bits):
        return {"step": step, "precision": policy, "bits": bits, **task.evaluate(model)}


def _metrics(task: Task, model: nn.Module, state: _State, spec: RunSpec) -> list[dict[str, Any]]:
    """Final numbers at q_max and at the current bits, and the test number at the best evaluation."""
    if state.status != "ok":
        return []
    rows = []
    last = state.history["evaluations"][-1]
    finals = {last["precision"]: last}
    other = "current" if last["precision"] == "q_max" else "q_max"
    finals[other] = _evaluate(task, model, state.step, other, spec)
    for policy in ("q_max", "current"):
        for split in ("valid", "test"):
            for name, value in finals[policy].get(split, {}).items():
                rows.append(_metric(name, split, "final", finals[policy], value))
    # chosen on held-out data; without any, on the test set, and then it is called so
    split = "valid" if "valid" in last else "test"
    best = max(state.history["evaluations"], key=lambda e: task.better * e[split][task.metric])
    rows.append(_metric(task.metric, "test", f"best_{split}", best, best["test"][task.metric]))
    return rows


def _metric(name: str, split: str, when: str, evaluation: dict[str, Any], value: float) -> dict[str, Any]:
    return {
        "name": name,
        "split": split,
        "when": when,
        "step": evaluation["step"],
        "precision": evaluation["precision"],
        "bits": evaluation["bits"],
        "value": value,
    }


def _bitops(task: Task, model: nn.Module, spec: RunSpec) -> dict[str, float]:
    """BitOps of the whole run, from the first batches of the task."""
    model.train()
    batches = list(itertools.islice(task.batches(0), task.cost_batches))

    def total(convention: str) -> float:
        plans = [
            count_bitops(model, task.inputs(b), spec.schedule, convention=convention, q_grad=spec.q_grad)
            for b in batches
        ]
        return sum(plan.total for plan in plans) / len(plans)

    return {convention: total(convention) for convention in CONVENTIONS}


# --- checkpoints ----------------------------------------------------------------------------------


def _save(
    path: Path, spec: RunSpec, state: _State, model: nn.Module, optimizer: Any, scheduler: PrecisionScheduler
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "key": spec.key,
        "state": vars(state),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "precision": scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # of this run's GPU
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        torch.save(content, temporary)
        os.replace(temporary, path)  # a reader sees the old checkpoint or the new one, never half of one
    finally:
        temporary.unlink(missing_ok=True)


def _load(
    path: Path, spec: RunSpec, state: _State, model: nn.Module, optimizer: Any, scheduler: PrecisionScheduler
) -> None:
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read; remove it to start the run again") from error
    if content["key"] != spec.key:
        raise ValueError(f"{path} belongs to run {content['key']}, not to {spec.key}")
    for name, value in content["state"].items():
        setattr(state, name, value)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    scheduler.load_state_dict(content["precision"])
    torch.set_rng_state(content["random"])
    if content["random_cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(content["random_cuda"])


def task_of(spec: RunSpec) -> type[Task]:
    """Return the task class of a spec; ValueError names the tasks there are."""
    if spec.recipe.task not in TASKS:
        raise ValueError(f"unknown task {spec.recipe.task!r}; choose from {', '.join(TASKS)}")
    return TASKS[spec.recipe.task]
