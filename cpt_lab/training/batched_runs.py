"""Training of several runs of one recipe and seed side by side in one process, with the results of training each alone.

``run_batched`` drives runs, ``run_alone`` a single one. A run is a generator: it yields a ``StepRequest`` for the loss
of a step, is sent that loss, and does the rest by itself (learning rate, evaluation, checkpoints, loss curve). Runs
that request the same step execute it together, which saves time in three ways:

- they share the batch and everything else that does not depend on their bits;
- their forward and backward passes are replayed from one recording, see ``replay``;
- as long as runs have had the same bits, one of them executes the step and the others copy its state.

A run whose loss is not finite, or that raises, ends alone.

>>> from cpt_lab.experiments.registry import recipe
>>> from cpt_lab.experiments.spec import run_spec
>>> from cpt_lab.tasks.image import ImageTask
>>> from cpt_lab.training.train import training_steps
>>> specs = [run_spec(recipe("smoke"), arm, q_max=8, seed=0, scale="smoke") for arm in ("CR", "static 8")]
>>> [run.status for run in run_batched([training_steps(ImageTask, spec) for spec in specs])]
['ok', 'ok']
"""

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only, tree_structure

from cpt_lab.experiments.graph import GraphRecipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.training.cuda_graphs import structure_key
from cpt_lab.training.replay import PassResult, Replay, session_tensors, tensors_in
from cpt_lab.training.session import Session

REPLAY_WARM_UP_STEPS = (
    2  # steps before one is recorded, in which layers fill their caches of constants
)
T = TypeVar("T")
log = logging.getLogger(__name__)


class StepRequest(NamedTuple):
    """Request of a run for the loss of a step of its session, at a learning rate."""

    session: Session
    step: int
    lr: float


StepResult = tuple[Tensor, float]  # loss of the step (0-d), and its duration in seconds
RunSteps = Generator[StepRequest, StepResult, T]


def run_alone(run: RunSteps[T]) -> T:
    """Execute the steps that one run requests; return the run's result."""
    try:
        session, step, lr = next(run)
        batches = session.batches(step)
        while True:
            start_time = time.monotonic()
            try:
                loss = session.step(next(batches), lr)
            except Exception as error:
                run.throw(error)
            session, step, lr = run.send((loss, time.monotonic() - start_time))
    except StopIteration as end:
        return end.value


def run_batched(runs: Sequence[RunSteps[T]]) -> list[T]:
    """Execute the steps that several runs of one recipe and seed request; return their results."""
    batched_runs = [_BatchedRun(run) for run in runs]
    stepper = _BatchedStepper()

    while active_runs := [run for run in batched_runs if run.request is not None]:
        # A run that was resumed from a later checkpoint waits until the others reach its step.
        first = min(active_runs, key=lambda run: run.request.step)
        group = [
            run
            for run in active_runs
            if run.request.step == first.request.step
            and torch.equal(run.rng_state, first.rng_state)
        ]
        try:
            step_results = stepper.step(group)
        except Exception as error:
            step_results = [error] * len(group)
        for run, step_result in zip(group, step_results, strict=True):
            run.send(step_result)

    return [run.result for run in batched_runs]


def batching_is_faster(spec: RunSpec) -> bool:
    """Return whether runs of a recipe end sooner side by side, as ``python -m bench.batched_runs`` measured."""
    recipe = spec.recipe
    if isinstance(recipe, GraphRecipe):
        return not recipe.batch
    return recipe.task in ("image", "language_model")


class _BatchedRun:
    """A run with its own state of torch's random numbers, independent of other runs.

    Attributes:
        request: the step that the run waits for; None when it has ended.
        result: the value that the run returned, once it has ended.
        rng_state: state of torch's CPU random numbers when the run last stopped.
        state: equal in runs whose tensors are equal.
        versions: sum of the tensors' version counters at the last step: a write changes it.
        tensors: everything that training changes, except the optimizer's state.
    """

    request: Any
    result: Any = None

    def __init__(self, run: RunSteps[Any]) -> None:
        self.run, self.rng_state = run, torch.get_rng_state()
        self.state: Hashable = object()
        self.versions = -1
        self.tensors: list[Tensor] = []
        self.send(None)
        if self.request is not None:
            tensors = session_tensors(self.request.session)
            self.tensors = [
                value
                for name, value in tensors.items()
                if not name.endswith("num_steps")
            ]
            self.set_state(self._digest())

    def send(self, step_result: StepResult | Exception | None) -> None:
        """Let the run continue to its next request or its end; raise an error inside of it."""
        torch.set_rng_state(self.rng_state)
        resume: Callable[[Any], Any] = (
            self.run.throw if isinstance(step_result, Exception) else self.run.send
        )
        try:
            self.request = resume(step_result)
        except StopIteration as end:
            self.request, self.result = None, end.value
        new_state = torch.get_rng_state()
        if not torch.equal(new_state, self.rng_state):
            self.rng_state = new_state

    def _digest(self) -> str:
        session = self.request.session
        optimizer_values = [
            value
            for state in session.optimizer.state.values()
            for value in state.values()
        ]
        digest = hashlib.sha256()
        for value in [*self.tensors, *tensors_in((optimizer_values, session.carry))]:
            flat = value.detach().reshape(-1).contiguous()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _count_versions(self) -> int:
        return sum(value._version for value in self.tensors)

    def set_state(self, state: Hashable) -> None:
        """Record the state that a step has led to."""
        self.state, self.versions = state, self._count_versions()

    def step_inputs(self) -> Hashable:
        """Return all that determines the next step besides its batch: equal values mean equal steps."""
        if self.versions != self._count_versions():  # a probe may write to a model
            self.set_state(object())
        session, _, lr = self.request
        session.step_key()
        return self.state, tuple(session.active_levels), lr

    def copy_from(self, leader: "_BatchedRun") -> None:
        """Copy weights, optimizer state and carried state of a run that has executed the step."""
        session, leader_session = self.request.session, leader.request.session
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, leader.tensors)
            for parameter, leader_parameter in zip(
                session.trained, leader_session.trained, strict=True
            ):
                optimizer_state = session.optimizer.state[parameter]
                for name, value in leader_session.optimizer.state[
                    leader_parameter
                ].items():
                    if isinstance(value, Tensor) and name in optimizer_state:
                        optimizer_state[name].copy_(value)
                    else:
                        optimizer_state[name] = (
                            value.clone() if isinstance(value, Tensor) else value
                        )
        session.carry = tree_map_only(Tensor, torch.clone, leader_session.carry)
        self.rng_state = leader.rng_state
        session.diverged.copy_(leader_session.diverged)


class _BatchedStepper:
    """Executes steps of several runs: reads the batches that they share, and keeps the recordings of steps.

    Attributes:
        batches: batches from the step ``next_step`` on.
        next_step: the step after the last one; -1 before the first.
        num_steps: steps that were executed.
        replays: recordings by the kind of a step; None where it cannot be recorded.
        passes: passes of runs, by the ids of recording and session.
        merged_sessions: sessions whose optimizers ``merged_optimizer`` stands for.
        merged_optimizer: one optimizer for all sessions, None where they cannot be merged.
    """

    def __init__(self) -> None:
        self.batches: Iterator[Any] = iter(())
        self.next_step, self.num_steps = -1, 0
        self.replays: dict[Hashable, Replay | None] = {}
        self.passes: dict[tuple[int, int], Callable[..., PassResult]] = {}
        self.merged_sessions: list[Session] = []
        self.merged_optimizer: torch.optim.Optimizer | None = None

    def step(self, runs: list[_BatchedRun]) -> list[StepResult | Exception]:
        """Execute one step of every run; return losses and durations, or errors."""
        start_time = time.monotonic()
        batch = self._next_batch(runs[0])
        rng_state = torch.get_rng_state()

        # Runs with equal inputs of the step: the first of them executes it for all.
        equal_runs: dict[Hashable, list[_BatchedRun]] = {}
        for run in runs:
            equal_runs.setdefault(run.step_inputs(), []).append(run)
        losses = self._execute(
            [leader for leader, *_ in equal_runs.values()], batch, rng_state
        )

        for leader, *followers in equal_runs.values():
            state = object()
            for run in followers:
                run.copy_from(leader)
                losses[id(run)] = losses[id(leader)]
            for run in (leader, *followers):
                run.set_state(state)

        seconds = (time.monotonic() - start_time) / len(runs)
        step_results: list[StepResult | Exception] = []
        for run in runs:
            loss = losses[id(run)]
            step_results.append(
                loss if isinstance(loss, Exception) else (loss, seconds)
            )
        return step_results

    def _next_batch(self, run: _BatchedRun) -> Any:
        """Return the batch of the step that a run requests, drawn with its random numbers."""
        torch.set_rng_state(run.rng_state)
        session, step, _ = run.request
        if step != self.next_step:
            self.batches = session.batches(step)
        batch = next(self.batches)
        self.next_step = step + 1
        self.num_steps += 1
        return batch

    def _execute(
        self, runs: list[_BatchedRun], batch: Any, rng_state: Tensor
    ) -> dict[int, Tensor | Exception]:
        """Execute a step of runs with different inputs; return losses or errors by the id of the run."""
        batch_key = structure_key(batch)
        runs_by_kind: dict[Hashable, list[_BatchedRun]] = {}
        for run in runs:
            session = run.request.session
            kind: Hashable = (
                batch_key,
                session.step_key(),
                tree_structure(session.carry),
            )
            runs_by_kind.setdefault(kind, []).append(run)

        losses: dict[int, Tensor | Exception] = {}
        for kind, runs_of_kind in runs_by_kind.items():
            for run in runs_of_kind:
                run.rng_state = rng_state
            replay = self._replay(kind, runs_of_kind[0], batch)
            if replay is None:
                losses |= self._run_one_by_one(runs_of_kind, batch)
            else:
                losses |= self._run_replayed(replay, runs_of_kind, batch)
        return losses

    def _replay(self, kind: Hashable, run: _BatchedRun, batch: Any) -> Replay | None:
        """Return the recording of such a step; None if there is none, and runs execute the step one by one."""
        if kind not in self.replays and self.num_steps > REPLAY_WARM_UP_STEPS:
            torch.set_rng_state(run.rng_state)
            run.request.session.model.train()
            try:
                self.replays[kind] = Replay(run.request.session, batch)
            except (
                Exception
            ) as error:  # operations that cannot be recorded raise anything
                log.info(
                    "steps are not replayed: %s: %s",
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )
                self.replays[kind] = None
        return self.replays.get(kind)

    def _run_one_by_one(
        self, runs: list[_BatchedRun], batch: Any
    ) -> dict[int, Tensor | Exception]:
        losses: dict[int, Tensor | Exception] = {}
        for run in runs:
            torch.set_rng_state(run.rng_state)
            try:
                losses[id(run)] = run.request.session.step(batch, run.request.lr)
            except Exception as error:
                losses[id(run)] = error
            run.rng_state = torch.get_rng_state()
        return losses

    def _run_replayed(
        self, replay: Replay, runs: list[_BatchedRun], batch: Any
    ) -> dict[int, Tensor | Exception]:
        torch.set_rng_state(runs[0].rng_state)
        batch_tensors = tensors_in(batch)
        shared_values = replay.run_shared(batch_tensors)
        rng_state = torch.get_rng_state()

        pass_results = []
        for run in runs:
            session, run.rng_state = run.request.session, rng_state
            if not session.model.training:  # an evaluation came before
                session.model.train()
            key = id(replay), id(session)
            if key not in self.passes:
                self.passes[key] = replay.pass_of(session)
            pass_results.append(self.passes[key](batch_tensors, shared_values))

        losses = torch.stack([pass_result.loss for pass_result in pass_results])
        updates = []
        for run, pass_result, is_finite in zip(
            runs, pass_results, losses.isfinite().tolist(), strict=True
        ):
            run.request.session.carry = pass_result.carry
            run.request.session.diverged.fill_(not is_finite)
            if is_finite:
                updates.append((run.request, pass_result.gradients))
        self._update(updates)
        return {
            id(run): pass_result.loss
            for run, pass_result in zip(runs, pass_results, strict=True)
        }

    def _update(
        self, updates: list[tuple[StepRequest, Sequence[Tensor | None]]]
    ) -> None:
        """Let the optimizers of sessions apply gradients, clipped as the recipe has it."""
        for (session, _, lr), gradients in updates:
            for group in session.optimizer.param_groups:
                group["lr"] = lr
            trained = session.trained
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
            if session.spec.recipe.clip is not None:
                with torch.inference_mode():  # in which these gradients were computed
                    nn.utils.clip_grad_norm_(trained, session.spec.recipe.clip)

        requests = [request for request, _ in updates]
        merged = self._merge_optimizers([request.session for request in requests])
        if merged is not None and len({request.lr for request in requests}) == 1:
            merged.param_groups[0]["lr"] = requests[0].lr
            merged.step()
        else:
            for request in requests:
                request.session.optimizer.step()

        for request in requests:
            for parameter in request.session.trained:
                parameter.grad = None

    def _merge_optimizers(
        self, sessions: list[Session]
    ) -> torch.optim.Optimizer | None:
        """Return one optimizer for the weights and the optimizer states of all sessions, if its results are equal.

        They are for SGD: with ``foreach`` it calls the same operation for every weight as without. Other optimizers
        give None.
        """
        if self.merged_sessions != sessions:
            self.merged_sessions, self.merged_optimizer = sessions, None
            optimizers = [session.optimizer for session in sessions]
            all_simple_sgd = all(
                type(optimizer) is torch.optim.SGD and len(optimizer.param_groups) == 1
                for optimizer in optimizers
            )
            if optimizers and all_simple_sgd:
                self.merged_optimizer = _merge_sgd(optimizers)
        return self.merged_optimizer


def _merge_sgd(optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return one SGD optimizer for the weights of all optimizers, sharing their states."""
    weights = [
        p for optimizer in optimizers for p in optimizer.param_groups[0]["params"]
    ]
    merged = torch.optim.SGD(weights, **{**optimizers[0].defaults, "foreach": True})
    for optimizer in optimizers:
        states = {p: optimizer.state[p] for p in optimizer.param_groups[0]["params"]}
        merged.state.update(states)
    return merged
