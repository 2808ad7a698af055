"""Runs of one recipe and seed, side by side in one process: each ends as it would have ended alone, sooner.

A run is a generator here: it says for which step it wants a loss, is sent it, and does all the rest by itself: learning
rate, evaluation, checkpoints, curve. Runs that stand at the same step take it together:

- they share the batch, and all else that does not depend on their bits;
- their forward and backward passes are replayed from one recording, see ``replay``;
- as long as runs have had the same bits, one of them does the step for all.

A run whose loss is not finite, or that raises, ends alone.

>>> from cpt_lab.experiments.registry import recipe
>>> from cpt_lab.experiments.spec import run_spec
>>> from cpt_lab.tasks.image import ImageTask
>>> from cpt_lab.training.train import steps_of
>>> specs = [run_spec(recipe("smoke"), arm, q_max=8, seed=0, scale="smoke") for arm in ("CR", "static 8")]
>>> [run.status for run in together([steps_of(ImageTask, spec) for spec in specs])]
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
from cpt_lab.training.cuda_graphs import kind_of
from cpt_lab.training.replay import Done, Replay, tensors_in, tensors_of
from cpt_lab.training.session import Session

WARM_UP = (
    2  # steps before one is recorded: what layers keep of constants is made in them
)
T = TypeVar("T")
log = logging.getLogger(__name__)


class RunRequest(NamedTuple):
    """What a run waits for: the loss of a step of its session, at a learning rate."""

    session: Session
    step: int
    lr: float


Answer = tuple[Tensor, float]  # the loss (0-d), and how many seconds the step took
Steps = Generator[RunRequest, Answer, T]


def alone(run: Steps[T]) -> T:
    """Do the steps of one run; return what it returns."""
    try:
        session, step, lr = next(run)
        batches = session.batches(step)
        while True:
            started = time.monotonic()
            try:
                loss = session.step(next(batches), lr)
            except Exception as error:
                run.throw(error)
            session, step, lr = run.send((loss, time.monotonic() - started))
    except StopIteration as end:
        return end.value


def together(runs: Sequence[Steps[T]]) -> list[T]:
    """Do the steps of several runs of one recipe and seed; return what each returns."""
    arms, side_by_side = [_Arm(run) for run in runs], _SideBySide()
    while waiting := [arm for arm in arms if arm.asked is not None]:
        first = min(
            waiting, key=lambda arm: arm.asked.step
        )  # who went on from a later checkpoint waits
        group = [
            arm
            for arm in waiting
            if arm.asked.step == first.asked.step
            and torch.equal(arm.random, first.random)
        ]
        try:
            answers = side_by_side.step(group)
        except Exception as error:
            answers = [error] * len(group)
        for arm, answer in zip(group, answers, strict=True):
            arm.send(answer)
    return [arm.result for arm in arms]


def batching_pays(spec: RunSpec) -> bool:
    """Whether runs of a recipe end sooner side by side, as ``python -m bench.batched_runs`` measured."""
    recipe = spec.recipe
    if isinstance(recipe, GraphRecipe):
        return not recipe.batch
    return recipe.task in ("image", "language_model")


class _Arm:
    """A run, with a state of its own of torch's random numbers: what one draws, no other misses."""

    asked: Any  # the step that it waits for, None when it has ended
    result: Any = None

    def __init__(self, run: Steps[Any]) -> None:
        self.run, self.random = run, torch.get_rng_state()
        self.state, self.versions = (
            object(),
            -1,
        )  # what is the same in arms that are alike; how often it was written to
        self.tensors: list[
            Tensor
        ] = []  # all that training changes, but what optimizers keep
        self.send(None)
        if self.asked is not None:
            found = tensors_of(self.asked.session)
            self.tensors = [
                value for name, value in found.items() if not name.endswith("num_steps")
            ]
            self.changed(self._digest())

    def send(self, answer: Answer | Exception | None) -> None:
        """Let it go on until it asks again, or ends; an error is raised where it waits."""
        torch.set_rng_state(self.random)
        go_on: Callable[[Any], Any] = (
            self.run.throw if isinstance(answer, Exception) else self.run.send
        )
        try:
            self.asked = go_on(answer)
        except StopIteration as end:
            self.asked, self.result = None, end.value
        now = torch.get_rng_state()
        self.random = self.random if torch.equal(now, self.random) else now

    def _digest(self) -> str:
        session = self.asked.session
        kept = [
            value
            for state in session.optimizer.state.values()
            for value in state.values()
        ]
        tensors, digest = (
            [*self.tensors, *tensors_in((kept, session.carry))],
            hashlib.sha256(),
        )
        for value in tensors:
            digest.update(
                value.detach()
                .reshape(-1)
                .contiguous()
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
        return digest.hexdigest()

    def changed(self, state: Hashable) -> None:
        """Note that a step has led to this state."""
        self.state, self.versions = state, sum(value._version for value in self.tensors)

    def stands(self) -> Hashable:
        """Return what decides the next step; where it is the same, the step is."""
        if self.versions != sum(
            value._version for value in self.tensors
        ):  # a probe may write to a model
            self.changed(object())
        session, _, lr = self.asked
        session.kind()
        return self.state, tuple(session.active_levels), lr

    def follow(self, leader: "_Arm") -> None:
        """Be where another arm is, which has done the same step."""
        own, other = self.asked.session, leader.asked.session
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, leader.tensors)
            for mine, theirs in zip(own.trained, other.trained, strict=True):
                kept = own.optimizer.state[mine]
                for name, value in other.optimizer.state[theirs].items():
                    if isinstance(value, Tensor) and name in kept:
                        kept[name].copy_(value)
                    else:
                        kept[name] = (
                            value.clone() if isinstance(value, Tensor) else value
                        )
        own.carry, self.random = (
            tree_map_only(Tensor, torch.clone, other.carry),
            leader.random,
        )
        own.diverged.copy_(other.diverged)


class _SideBySide:
    """The steps of arms: the batches that all of them see, and what was recorded."""

    def __init__(self) -> None:
        self.batches: Iterator[Any] = iter(())
        self.next_step, self.steps = -1, 0
        self.replays: dict[Hashable, Replay | None] = {}
        self.passes: dict[tuple[int, int], Callable[..., Done]] = {}
        self.merged: tuple[list[Session], torch.optim.Optimizer | None] = [], None

    def step(self, arms: list[_Arm]) -> list[Answer | Exception]:
        """Do one step of every arm."""
        started = time.monotonic()
        torch.set_rng_state(arms[0].random)
        session, step, _ = arms[0].asked
        if step != self.next_step:
            self.batches = session.batches(step)
        batch, self.next_step, self.steps = next(self.batches), step + 1, self.steps + 1
        drawn = torch.get_rng_state()
        alike: dict[
            Hashable, list[_Arm]
        ] = {}  # arms at the same bits from the start: one does the step for all
        for arm in arms:
            alike.setdefault(arm.stands(), []).append(arm)
        kind, parts = kind_of(batch), dict[Hashable, list[_Arm]]()
        for leader, *_ in alike.values():
            of = leader.asked.session
            parts.setdefault((kind, of.kind(), tree_structure(of.carry)), []).append(
                leader
            )
        losses: dict[int, Tensor | Exception] = {}
        for kind, part in parts.items():
            for arm in part:
                arm.random = drawn
            replay = self._replay(kind, part[0], batch)
            losses |= (
                self._one_by_one(part, batch)
                if replay is None
                else self._replayed(replay, part, batch)
            )
        for leader, *others in alike.values():
            state = object()
            for arm in others:
                arm.follow(leader)
                losses[id(arm)] = losses[id(leader)]
            for arm in (leader, *others):
                arm.changed(state)
        share = (time.monotonic() - started) / len(arms)
        found = [losses[id(arm)] for arm in arms]
        return [
            loss if isinstance(loss, Exception) else (loss, share) for loss in found
        ]

    def _replay(self, kind: Hashable, arm: _Arm, batch: Any) -> Replay | None:
        """Return what was recorded of such a step; None where nothing is, and a run does it as it would alone."""
        if kind not in self.replays and self.steps > WARM_UP:
            torch.set_rng_state(arm.random)
            arm.asked.session.model.train()
            try:
                self.replays[kind] = Replay(arm.asked.session, batch)
            except (
                Exception
            ) as error:  # whatever an operation that cannot be recorded raises
                log.info(
                    "steps are not replayed: %s: %s",
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )
                self.replays[kind] = None
        return self.replays.get(kind)

    def _one_by_one(
        self, arms: list[_Arm], batch: Any
    ) -> dict[int, Tensor | Exception]:
        losses: dict[int, Tensor | Exception] = {}
        for arm in arms:
            torch.set_rng_state(arm.random)
            try:
                losses[id(arm)] = arm.asked.session.step(batch, arm.asked.lr)
            except Exception as error:
                losses[id(arm)] = error
            arm.random = torch.get_rng_state()
        return losses

    def _replayed(
        self, replay: Replay, arms: list[_Arm], batch: Any
    ) -> dict[int, Tensor | Exception]:
        torch.set_rng_state(arms[0].random)
        given = tensors_in(batch)
        shared = replay.shared(given)
        random = torch.get_rng_state()
        done = []
        for arm in arms:
            session, arm.random = arm.asked.session, random
            if not session.model.training:  # an evaluation came before
                session.model.train()
            key = id(replay), id(session)
            if key not in self.passes:
                self.passes[key] = replay.of(session)
            done.append(self.passes[key](given, shared))
        finite = torch.stack([d.loss for d in done]).isfinite().tolist()
        for arm, of, sound in zip(arms, done, finite, strict=True):
            arm.asked.session.carry = of.carry
            arm.asked.session.diverged.fill_(not sound)
        self._update(
            [
                (arm.asked, d.gradients)
                for arm, d, sound in zip(arms, done, finite, strict=True)
                if sound
            ]
        )
        return {id(arm): d.loss for arm, d in zip(arms, done, strict=True)}

    def _update(self, arms: list[tuple[RunRequest, Sequence[Tensor | None]]]) -> None:
        for (session, _, lr), gradients in arms:
            for group in session.optimizer.param_groups:
                group["lr"] = lr
            trained = session.trained
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
            if session.spec.recipe.clip is not None:
                with torch.inference_mode():  # in which these gradients were made
                    nn.utils.clip_grad_norm_(trained, session.spec.recipe.clip)
        merged = self._merged([asked.session for asked, _ in arms])
        if merged is not None and len({asked.lr for asked, _ in arms}) == 1:
            merged.param_groups[0]["lr"] = arms[0][0].lr
            merged.step()
        else:
            for (session, _, _), _ in arms:
                session.optimizer.step()
        for (session, _, _), _ in arms:
            for parameter in session.trained:
                parameter.grad = None

    def _merged(self, sessions: list[Session]) -> torch.optim.Optimizer | None:
        """Return one optimizer of all weights, with the state of those that they have, where its numbers are the same.

        That is SGD, whose ``foreach`` calls for every weight what it calls without.
        """
        if self.merged[0] != sessions:
            found, own = None, [session.optimizer for session in sessions]
            if own and all(
                type(o) is torch.optim.SGD and len(o.param_groups) == 1 for o in own
            ):
                weights = [p for o in own for p in o.param_groups[0]["params"]]
                found = torch.optim.SGD(weights, **{**own[0].defaults, "foreach": True})
                for o in own:
                    found.state.update(
                        {p: o.state[p] for p in o.param_groups[0]["params"]}
                    )
            self.merged = sessions, found
        return self.merged[1]
