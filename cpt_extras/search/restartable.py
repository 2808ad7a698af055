"""Trainings that are repeated from one start: what the range test and sensitivities have in common."""

import copy
import math
import random as python_random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from cpt_core.quantization.convert import (
    QuantConfig,
    all_precisions,
    is_converted,
    quantize_,
    restore_,
)
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import RoleLevels, StaticSchedule
from cpt_extras.validation import check_float

TrainStep = Callable[[int], Any]
Bits = (
    int | Mapping[str, int] | RoleLevels
)  # of all layers, by patterns of their names, or of all layers by role


class Judge(NamedTuple):
    """What is measured after a training, +1 if larger is better or -1, and the function that measures it."""

    name: str
    better: int
    measure: Callable[[], float]


class RestartableTraining:
    """A model that can be put back to where it started; without a judge its loss is what a training gave.

    ``stateful``: what else is put back, by ``state_dict`` and ``load_state_dict``.
    """

    def __init__(
        self,
        model: nn.Module,
        train_step: TrainStep,
        optimizer: Any,
        q_max: int,
        title: str,
        judge: Judge | None = None,
        stateful: Sequence[Any] = (),
    ) -> None:
        self.model, self.train_step, self.optimizer, self.title = (
            model,
            train_step,
            optimizer,
            title,
        )
        self.judge, self.stateful = judge, tuple(stateful)
        self.rates: list[
            list[float]
        ] = []  # after every step, which all trainings have in common
        self.modes = [(module, module.training) for module in model.modules()]
        self.scheduler = PrecisionScheduler(model, StaticSchedule(q_max, 1))
        self.precisions = all_precisions(model)  # also of layers that have not run yet
        self.buffers = [
            (buffer, buffer.detach().clone()) for buffer in model.buffers()
        ]  # also those of no state_dict
        random = (
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
        )
        random_python = (python_random.getstate(), np.random.get_state())  # noqa: NPY002
        others = [s.state_dict() for s in self.stateful]
        running = {
            name: p.get_running() for name, p in self.precisions.items()
        }  # ranges and keys of the noise
        states = (model.state_dict(), optimizer.state_dict(), running, others)
        self.before = copy.deepcopy((*states, *random, *random_python))

    def put_back(self) -> None:
        """Restore weights, train or eval mode, optimizer, running ranges, what else was named, and random numbers."""
        model, optimizer, running, others, random, random_cuda, pythons, numpys = (
            copy.deepcopy(self.before)
        )
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        for parameter in self.model.parameters():
            parameter.grad = None
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        for name, precision_state in running.items():
            self.precisions[name].set_running(precision_state)
        for other, state in zip(self.stateful, others, strict=True):
            other.load_state_dict(state)
        for module, training in self.modes:
            module.training = training
        torch.set_rng_state(random)
        if random_cuda is not None:
            torch.cuda.set_rng_state_all(random_cuda)
        python_random.setstate(pythons)
        np.random.set_state(numpys)  # noqa: NPY002

    def losses(
        self, bits: Sequence[Bits], first: int, q_grad: int, bar: Any
    ) -> list[float]:
        """Train from the start, step i at ``bits[i]``, gradients at ``q_grad`` bits unless these are ``RoleLevels``.

        A diverged training ends with NaN.

        ValueError when the loss is no number, and when a learning rate is not that of the trainings before.
        """
        self.put_back()
        out: list[float] = []
        for i, q in enumerate(bits):
            with precision(
                self.model, q_grad if isinstance(q, RoleLevels) else q, q_grad
            ):
                if isinstance(q, RoleLevels):
                    for layer in self.precisions.values():
                        layer.set_levels(q)
                loss = self.train_step(first + i)
            out.append(check_float("train_step must return the loss", loss))
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
                "how many steps a training has made, not by the number of the batch or by the loss"
            )


def restartable_trainings(
    model: nn.Module,
    train_step: TrainStep,
    optimizer: torch.optim.Optimizer,
    q_max: int,
    seeds: Sequence[int],
    batches: int,
    config: QuantConfig | str | None = None,
    stateful: Sequence[Any] = (),
    judge: Judge | None = None,
) -> Generator[tuple[RestartableTraining, int]]:
    """Yield for every seed what to train, and the number of its first batch, ``seed * batches``.

    The model is converted if it is not yet; closing the generator leaves it as it was.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch module, got {model!r}")
    if not callable(train_step) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            "a model needs train_step(step) -> loss and the optimizer it uses"
        )
    listed = isinstance(stateful, Iterable) and not isinstance(
        stateful, (str, bytes, Mapping)
    )
    others = tuple(stateful) if listed else (None,)
    if not all(
        hasattr(s, "state_dict") and hasattr(s, "load_state_dict") for s in others
    ):
        raise ValueError(
            f"stateful must list objects with state_dict and load_state_dict, got {stateful!r}"
        )
    convert = not is_converted(model)
    if convert:
        quantize_(model, config)
    elif config is not None:
        raise ValueError(
            "the model is quantised already, so that config= would change nothing"
        )
    layers, trial = all_precisions(model).values(), None
    former = [
        (layer, layer.active_levels, layer.highest, layer.owning_scheduler)
        for layer in layers
    ]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        trial = RestartableTraining(
            model, train_step, optimizer, q_max, type(model).__name__, judge, stateful
        )
        for seed in seeds:
            yield trial, seed * batches
    finally:
        if trial is not None:
            trial.put_back()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for layer, in_force, top, driver in former:
            layer.active_levels, layer.highest, layer.owning_scheduler = (
                in_force,
                top,
                driver,
            )
        if convert:
            restore_(model)
