"""Trainings that are repeated from one start, for precision searches, range tests and sensitivities.

A ``RestartableTraining`` stores the state of a model, its optimizer and the random numbers, and trains from that state
at other bits; ``restartable_trainings`` converts a model for such trainings and restores it afterwards.
"""

import copy
import hashlib
import math
import random as python_random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from cpt_core.numerics import NUMERICS
from cpt_core.quantization.convert import (
    QuantConfig,
    all_precisions,
    is_converted,
    quantize_,
    restore_,
)
from cpt_core.quantization.scheduler import PrecisionScheduler, SavedBits, precision
from cpt_core.schedules.schedule import RoleLevels, StaticSchedule
from cpt_extras.validation import check_float

TrainStep = Callable[[int], Any]
# of all layers, by patterns of layer names, or of all layers by role
Bits = int | Mapping[str, int] | RoleLevels


class Judge(NamedTuple):
    """A quality that is measured after a training.

    Attributes:
        name: of the quality.
        better: +1 if larger values are better, -1 if smaller ones are.
        measure: returns the quality of the trained model.
    """

    name: str
    better: int
    measure: Callable[[], float]


class _RandomStates(NamedTuple):
    """States of the random number generators of torch, CUDA (None without it), Python and numpy."""

    torch: torch.Tensor
    cuda: list[torch.Tensor] | None
    python: Any
    numpy: Any

    @classmethod
    def current(cls) -> "_RandomStates":
        """Return the states as they are now."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        return cls(
            torch.get_rng_state(),
            cuda,
            python_random.getstate(),
            np.random.get_state(),  # noqa: NPY002
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        python_random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002


class _TrainingState(NamedTuple):
    """Everything that a training changes and a reset restores.

    Attributes:
        model: ``state_dict`` of the model.
        optimizer: ``state_dict`` of the optimizer.
        running: running ranges and keys of the rounding noise, by layer.
        stateful: ``state_dict`` of every further object.
        random: states of the random number generators.
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    running: Mapping[str, Any]
    stateful: list[Any]
    random: _RandomStates


class RestartableTraining:
    """A model with a training loop that can be reset to its start; without a judge its losses are the result.

    Args:
        model: the converted model.
        train_step: does one optimizer step on a numbered batch and returns the loss.
        optimizer: the one that ``train_step`` uses.
        q_max: highest bits of the trainings.
        title: name of the model.
        judge: measures the quality after a training; None takes the losses.
        stateful: further objects that are reset, by ``state_dict`` and ``load_state_dict``.
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
        self.model = model
        self.train_step = train_step
        self.optimizer = optimizer
        self.title = title
        self.judge = judge
        self.stateful = tuple(stateful)

        # learning rates after every step, equal in all trainings
        self.rates: list[list[float]] = []
        self.scheduler = PrecisionScheduler(model, StaticSchedule(q_max, 1))
        # includes layers that have not run yet, and buffers that no state_dict holds
        self.precisions = all_precisions(model)
        # precisions of modules without weights are no child modules
        modules = dict.fromkeys([*model.modules(), *self.precisions.values()])
        self.modes = [(module, module.training) for module in modules]
        self.buffers = [
            (module._buffers, dict(module._buffers))
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        self.buffer_values = [(b, b.detach().clone()) for b in model.buffers()]
        self.parameters = [(p, p.requires_grad) for p in model.parameters()]
        self.param_groups = optimizer.param_groups
        self.group_settings = [(group, dict(group)) for group in self.param_groups]

        random = _RandomStates.current()
        stateful_states = [s.state_dict() for s in self.stateful]
        running = {name: p.get_running() for name, p in self.precisions.items()}
        self.start = copy.deepcopy(
            _TrainingState(
                model.state_dict(),
                optimizer.state_dict(),
                running,
                stateful_states,
                random,
            )
        )

    def start_digest(self) -> str:
        """Return a hash of everything that decides the trainings, except for the user's functions and data.

        It covers the state of the start, the optimizer's class, and the settings of all quantised layers. Of the random
        numbers it covers torch's: others differ in every process that sets no seed.
        """
        layers = {}
        for name, layer in self.precisions.items():
            quantizers = {role: str(q) for role, q in layer.quantizers.items()}
            layers[name] = {
                "kind": layer.kind,
                "key": layer.key,
                "execution": layer.execution,
                "has_bias_correction": layer.has_bias_correction,
                "quantizers": quantizers,
                "ladders": layer.grids.to_dict(),
            }
        content = {
            "numerics": NUMERICS,
            "layers": layers,
            "optimizer class": type(self.optimizer).__name__,
            "modes": [training for _, training in self.modes],
            "requires_grad": [requires_grad for _, requires_grad in self.parameters],
            "buffers": [value for _, value in self.buffer_values],
            **self.start._asdict(),
            "random": [self.start.random.torch, self.start.random.cuda],
        }
        digest = hashlib.sha256()
        _update_digest(digest, content)
        return digest.hexdigest()[:16]

    def reset(self) -> None:
        """Restore the state before the first training.

        It covers weights, buffers, ``requires_grad``, train or eval mode, optimizer, running ranges, the further
        objects and the random numbers.
        """
        start = copy.deepcopy(self.start)
        for module, training in self.modes:
            module.training = training
        # a forward pass may have assigned other tensors to the buffers
        for buffers, original_buffers in self.buffers:
            buffers.clear()
            buffers.update(original_buffers)
        self.model.load_state_dict(start.model)
        self._reset_optimizer(start.optimizer)
        for parameter, requires_grad in self.parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = None
        self.optimizer.zero_grad(set_to_none=True)

        with torch.no_grad():
            for buffer, value in self.buffer_values:
                buffer.copy_(value)
        for name, running in start.running.items():
            self.precisions[name].set_running(running)
        for item, state in zip(self.stateful, start.stateful, strict=True):
            item.load_state_dict(state)
        start.random.restore()

    def _reset_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load the state of the start.

        Its values go into the list and dicts of parameter groups, and the tensors in them, that a training loop may
        hold: ``load_state_dict`` makes new ones.
        """
        self.param_groups[:] = [group for group, _ in self.group_settings]
        self.optimizer.param_groups = self.param_groups
        self.optimizer.load_state_dict(state)
        loaded_groups = self.optimizer.param_groups
        for (group, original), loaded in zip(
            self.group_settings, loaded_groups, strict=True
        ):
            group.clear()
            group.update(loaded)
            for name, value in original.items():
                if isinstance(value, torch.Tensor):
                    group[name] = value.copy_(loaded[name])
        self.optimizer.param_groups = self.param_groups

    def losses(
        self, bits: Sequence[Bits], first: int, q_grad: int, bar: Any
    ) -> list[float]:
        """Train from the start and return the loss of every step, NaN after a step that diverged.

        Args:
            bits: of every step.
            first: number of the first batch.
            q_grad: gradient bits; ``RoleLevels`` have their own.
            bar: progress bar, updated after every step.

        Raises:
            ValueError: when the loss is no number, and when a learning rate is not that of the trainings before.
        """
        self.reset()
        losses: list[float] = []
        for i, step_bits in enumerate(bits):
            if isinstance(step_bits, RoleLevels):
                with precision(self.model, q_grad, q_grad):
                    for layer in self.precisions.values():
                        layer.set_levels(step_bits)
                    loss = self.train_step(first + i)
            else:
                with precision(self.model, step_bits, q_grad):
                    loss = self.train_step(first + i)
            losses.append(check_float("train_step must return the loss", loss))
            self._check_rates(i)
            bar.update()
            if not math.isfinite(losses[-1]):
                skipped_steps = len(bits) - len(losses)
                bar.update(skipped_steps)
                return losses + [math.nan] * skipped_steps
        return losses

    def _check_rates(self, step: int) -> None:
        """Raise ValueError unless the learning rates after a step equal the rates of former trainings there."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        if step == len(self.rates):
            self.rates.append(rates)
        elif rates != self.rates[step]:
            raise ValueError(
                f"after step {step} one training has the learning rates {self.rates[step]}, another {rates}; "
                "name the LR scheduler in stateful=, so that every training begins with it anew, or set the rate by "
                "how many steps a training has made, not by the number of the batch or by the loss"
            )


def _update_digest(digest: Any, value: Any) -> None:
    """Add nested values and tensors to a hash; of objects of other classes it covers the class."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        is_plain = type(value) in (torch.Tensor, nn.Parameter)
        if is_plain and value.layout == torch.strided and not value.is_meta:
            flat = value.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
            digest.update(flat.contiguous().view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        digest.update(f"mapping of {len(value)}".encode())
        for name, item in value.items():
            digest.update(repr(name).encode())
            _update_digest(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"list of {len(value)}".encode())
        for item in value:
            _update_digest(digest, item)
    elif isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__qualname__.encode())


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
    """Yield for every seed a training, and the number of its first batch: ``seed * batches``.

    The model is converted if it is not yet; closing the generator restores it.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch module, got {model!r}")
    if not callable(train_step) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            "a model needs train_step(step) -> loss and the optimizer it uses"
        )
    _check_stateful(stateful)
    convert = not is_converted(model)
    if convert:
        quantize_(model, config)
    elif config is not None:
        raise ValueError(
            "the model is quantised already, so that config= would change nothing"
        )

    training = None
    layers = all_precisions(model).values()
    former_bits = [SavedBits.current(layer) for layer in layers]
    former_gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        training = RestartableTraining(
            model, train_step, optimizer, q_max, type(model).__name__, judge, stateful
        )
        for seed in seeds:
            yield training, seed * batches
    finally:
        if training is not None:
            training.reset()
        for parameter, gradient in former_gradients:
            parameter.grad = gradient
        for saved in former_bits:
            saved.restore()
        if convert:
            restore_(model)


def _check_stateful(stateful: Any) -> None:
    """Raise ValueError unless ``stateful`` lists objects with ``state_dict`` and ``load_state_dict``."""
    no_list = (str, bytes, Mapping)
    is_list = isinstance(stateful, Iterable) and not isinstance(stateful, no_list)
    items = tuple(stateful) if is_list else (None,)
    for item in items:
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise ValueError(
                f"stateful must list objects with state_dict and load_state_dict, got {stateful!r}"
            )
