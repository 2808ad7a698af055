"""Trainings that are repeated from one start: what the range test and sensitivities have in common."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cpt_core.checks import number
from cpt_core.experiments.recipe import Recipe
from cpt_core.experiments.spec import run_spec
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_, restore_
from cpt_core.quantization.layers import QuantizedLayer
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import StaticSchedule
from cpt_core.training.session import Session, task_of

TrainStep = Callable[[int], Any]
Bits = int | Mapping[str, int]  # of all layers, or by patterns of their names


class Trial:
    """A model that can be put back to where it started.

    Attributes:
        session: of a recipe; None for a model of the user's own.
        stateful: what else is put back, by ``state_dict`` and ``load_state_dict``.
        rates: learning rates after every step, which all trainings have in common.
    """

    def __init__(
        self, model: nn.Module, train_step: TrainStep, optimizer: Any, q_max: int, title: str,
        session: Session | None = None, stateful: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self.model, self.train_step, self.optimizer, self.title = model, train_step, optimizer, title
        self.session, self.stateful = session, tuple(stateful)
        self.rates: list[list[float]] = []
        self.modes = [(module, module.training) for module in model.modules()]
        self.scheduler = PrecisionScheduler(model, StaticSchedule(q_max, 1))  # knows running ranges and rounding noise
        self.before = copy.deepcopy(self._state())

    def _state(self) -> tuple[Any, ...]:
        random = (torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)
        others = [s.state_dict() for s in self.stateful]
        return self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict(), others, *random

    def put_back(self) -> None:
        """Restore weights, train or eval mode, optimizer, running ranges, what else was named, and random numbers."""
        model, optimizer, scheduler, others, random, random_cuda = copy.deepcopy(self.before)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.load_state_dict(scheduler)
        for other, state in zip(self.stateful, others, strict=True):
            other.load_state_dict(state)
        for module, training in self.modes:
            module.training = training
        torch.set_rng_state(random)
        if random_cuda is not None:
            torch.cuda.set_rng_state(random_cuda)

    def losses(self, bits: Sequence[Bits], first: int, q_grad: int, bar: Any) -> list[float]:
        """Train from the start, step i at ``bits[i]``; a diverged training ends with NaN.

        Raises:
            ValueError: when the loss is no number, and when a learning rate is not that of the trainings before.
        """
        self.put_back()
        out: list[float] = []
        for i, q in enumerate(bits):
            with precision(self.model, bits=q, q_grad=q_grad):
                loss = self.train_step(first + i)
            out.append(number("train_step must return the loss", loss))
            self._check_rates(i)
            bar.update()
            if not math.isfinite(out[-1]):
                bar.update(len(bits) - len(out))
                return out + [math.nan] * (len(bits) - len(out))
        return out

    def _check_rates(self, step: int) -> None:
        """Compare the learning rates after a step with those of other trainings: only bits may differ."""
        now = [float(group["lr"]) for group in self.optimizer.param_groups]
        if step == len(self.rates):
            self.rates.append(now)
        elif now != self.rates[step]:
            raise ValueError(
                f"after step {step} one training has the learning rates {self.rates[step]}, another {now}; "
                "name the LR scheduler in stateful=, so that every training begins with it anew, or set the rate by "
                "how many steps a training has made, not by the number of the batch"
            )


def trials(
    what: Recipe | nn.Module,
    train_step: TrainStep | None,
    optimizer: Any,
    q_max: int,
    seeds: Sequence[int],
    batches: int,
    config: QuantConfig | str | None,
    device: str | torch.device,
    falling: bool = False,
    stateful: Sequence[Any] = (),
) -> Generator[tuple[Trial, int]]:
    """Yield for every seed what to train, and the number of its first batch; see ``precision_range_test``.

    A model of one's own takes the batches from number ``seed * batches`` on. The learning rate of a recipe is that of
    the start throughout, or with ``falling`` that of its training.
    """
    if isinstance(what, Recipe):
        if train_step is not None or optimizer is not None:
            raise ValueError("a recipe brings its own train_step and optimizer; give them for a model of your own")
        if stateful:
            raise ValueError("a recipe keeps nothing else; give stateful= for a model of your own")
        for seed in seeds:
            yield _of_recipe(what, q_max, seed, device, falling), 0
    elif isinstance(what, nn.Module):
        if not callable(train_step) or not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError("a model of your own needs train_step(step) -> loss and the optimizer it uses")
        listed = isinstance(stateful, Iterable) and not isinstance(stateful, (str, bytes, Mapping))
        others = tuple(stateful) if listed else (None,)
        if not all(hasattr(s, "state_dict") and hasattr(s, "load_state_dict") for s in others):
            raise ValueError(f"stateful must list objects with state_dict and load_state_dict, got {stateful!r}")
        convert = not any(isinstance(m, QuantizedLayer) for m in what.modules())
        if convert:
            quantize_(what, config)
        layers = layer_precisions(what).values()
        former = [(layer, layer.in_force, layer.highest) for layer in layers]
        trial = Trial(what, train_step, optimizer, q_max, type(what).__name__, stateful=stateful)
        try:
            for seed in seeds:
                yield trial, seed * batches
        finally:
            trial.put_back()
            for layer, in_force, top in former:
                layer.in_force, layer.highest = in_force, top
            if convert:
                restore_(what)
    else:
        raise ValueError(f"give a Recipe or a torch module, got {what!r}")


def _of_recipe(recipe: Recipe, q_max: int, seed: int, device: str | torch.device, falling: bool) -> Trial:
    spec = run_spec(recipe, f"static {q_max}", q_max=q_max, seed=seed)
    session = Session(task_of(spec), spec, device)
    batches: Iterator[Any] = iter(())

    def train_step(step: int) -> torch.Tensor:
        nonlocal batches
        if step == 0:
            batches = session.task.batches(0)
            session.reset()  # another precision may have diverged
        return session.step(next(batches), session.lr_at(step if falling else 0, []))

    return Trial(session.model, train_step, session.optimizer, q_max, session.task.title, session)
