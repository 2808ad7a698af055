"""The precision range test: how few bits does this training bear?  The original CPT paper, section 3.3.

Short trainings at 2, 3, 4, ... bits are compared with one at q_max, from the same weights and on the same batches:

    f(q) = (L_start - L_q) / (L_start - L_qmax)        q_min = the lowest q with f(q) >= 0.8

L_q is the mean training loss over the second half of a short training at q bits. It works on every recipe, and on a
training loop of one's own:

>>> import torch
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
>>> batches = [(x, (x.sum(1) > 0).long()) for x in torch.randn(20, 64, 8, generator=torch.Generator().manual_seed(0))]
>>> def train_step(step):
...     x, y = batches[step % len(batches)]
...     loss = torch.nn.functional.cross_entropy(model(x), y)
...     loss.backward()
...     optimizer.step()
...     optimizer.zero_grad()
...     return loss
>>> found = precision_range_test(model, train_step, optimizer, bits=(2, 4, 6), dwell=60)
>>> found.q_min in (2, 4, 6)
True
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from cpt_core.checks import choose
from cpt_core.experiments.recipe import Recipe
from cpt_core.experiments.spec import run_spec
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_, restore_
from cpt_core.quantization.layers import QuantizedLayer
from cpt_core.quantization.quantizers import check_bits
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import StaticSchedule
from cpt_core.training.precision_range import MODES, PrecisionRange, cut, judge
from cpt_core.training.session import Session, task_of

TrainStep = Callable[[int], Any]


class RangeTestWarning(UserWarning):
    """The answer of a range test could have been another one."""


def precision_range_test(
    what: Recipe | nn.Module,
    train_step: TrainStep | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    q_max: int = 8,
    bits: Sequence[int] | None = None,
    dwell: int = 100,
    mode: str = "reset",
    threshold: float | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    config: QuantConfig | str | None = None,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> PrecisionRange:
    """Find the lowest precision that still trains.

    Args:
        what: a recipe (its data must be there), or a model of your own, which needs ``train_step`` and ``optimizer``.
            A model is converted for the test if it is not yet, and left with the weights, the optimizer state and the
            random state that it had before.
        train_step: ``train_step(step) -> loss`` does one whole optimizer step of your model on batch number ``step``,
            the same batch whenever the number is the same, and returns the loss.
        optimizer: the one that ``train_step`` uses.
        q_max: bits of the training that the others are compared with, and of all gradients.
        bits: precisions to try below q_max; None takes 2 to q_max - 1.
        dwell: optimizer steps at each precision; the second half is the window in which losses are averaged. Below 80
            the noise is large.
        mode: "reset": every precision starts from the same weights and sees the same batches. "continuing": one
            training through all precisions from the lowest up, as the CPT paper words it; its answer is the first
            precision at which the loss falls, which is nearly always the lowest.
        threshold: on the share of q_max's loss reduction (0.8), in mode "continuing" on the fall of the loss since the
            precision before as a share of the loss at the start (0.05).
        seeds: repetitions, to know the noise: of a recipe initial weights, batches and rounding noise; your own model
            keeps its weights and takes the batches from number ``seed * dwell`` on.
        config: of ``quantize_``, for a model of your own; None quantises all layers.
        device: of a recipe's model.
        progress: show a bar.

    Returns:
        q_min with the share of every precision. q_min is None, and ``reason`` says why, when training at q_max diverges
        or does not reduce the loss: then no precision can be judged.

    Raises:
        ValueError: for values that make no test, before anything is trained.

    Warns:
        RangeTestWarning: when a share is within two standard deviations over seeds of the threshold.

    Paper: section 4.1 (q_min is found by the precision range test of the CPT paper).
    Differs: "reset" compares losses of equally long trainings; the CPT paper raises the precision within one training
        and watches the training accuracy, with a threshold and a window that are not published.
    """
    choose("mode", mode, tuple(MODES))
    threshold = MODES[mode] if threshold is None else threshold
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must lie between 0 and 1, got {threshold!r}")
    if not isinstance(dwell, int) or dwell < 4:
        raise ValueError(f"dwell must be a whole number of at least 4 steps, got {dwell!r}")
    q_max = check_bits("q_max", q_max)
    tried = tuple(range(2, q_max)) if bits is None else tuple(sorted({check_bits("bits", b) for b in bits} - {q_max}))
    if not tried or tried[-1] > q_max:
        raise ValueError(f"bits must name precisions below q_max = {q_max}, got {bits!r}")
    seeds = tuple(seeds)
    if not seeds or any(not isinstance(s, int) or s < 0 for s in seeds):
        raise ValueError(f"seeds must be whole numbers from 0 on, at least one; got {seeds!r}")
    all_bits = (*tried, q_max)
    plan = [[q] * dwell for q in all_bits] if mode == "reset" else [[q for q in all_bits for _ in range(dwell)]]
    traces = []  # per seed: the losses of every precision
    with tqdm(total=len(seeds) * len(all_bits) * dwell, desc="range test", disable=not progress) as bar:
        for trial, first in _trials(what, train_step, optimizer, q_max, seeds, dwell, config, device):
            steps = [trial.losses(part, first, q_max, bar) for part in plan]
            traces.append(steps if mode == "reset" else cut(steps[0], len(all_bits), dwell))
            title = trial.title
    found = judge(traces, all_bits, mode, threshold, dwell, title)
    if found.warning:
        warnings.warn(found.warning, RangeTestWarning, stacklevel=2)
    return found


class _Trial:
    """A model that can be put back to where it started."""

    def __init__(self, model: nn.Module, train_step: TrainStep, optimizer: Any, q_max: int, title: str) -> None:
        self.model, self.train_step, self.optimizer, self.title = model, train_step, optimizer, title
        self.scheduler = PrecisionScheduler(model, StaticSchedule(q_max, 1))  # knows running ranges and rounding noise
        self.before = copy.deepcopy(self._state())

    def _state(self) -> tuple[Any, ...]:
        random = (torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)
        return self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict(), *random

    def put_back(self) -> None:
        """Restore weights, optimizer, running ranges and random numbers."""
        model, optimizer, scheduler, random, random_cuda = copy.deepcopy(self.before)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.load_state_dict(scheduler)
        torch.set_rng_state(random)
        if random_cuda is not None:
            torch.cuda.set_rng_state(random_cuda)

    def losses(self, bits: Sequence[int], first: int, q_grad: int, bar: Any) -> list[float]:
        """Train from the start, step i at ``bits[i]``; a diverged training ends with NaN."""
        self.put_back()
        out: list[float] = []
        for i, q in enumerate(bits):
            with precision(self.model, bits=q, q_grad=q_grad):
                loss = self.train_step(first + i)
            out.append(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
            bar.update()
            if not math.isfinite(out[-1]):
                bar.update(len(bits) - len(out))
                return out + [math.nan] * (len(bits) - len(out))
        return out


def _trials(
    what: Recipe | nn.Module,
    train_step: TrainStep | None,
    optimizer: Any,
    q_max: int,
    seeds: Sequence[int],
    dwell: int,
    config: QuantConfig | str | None,
    device: str | torch.device,
) -> Iterator[tuple[_Trial, int]]:
    """Yield for every seed what to train, and the number of its first batch."""
    if isinstance(what, Recipe):
        if train_step is not None or optimizer is not None:
            raise ValueError("a recipe brings its own train_step and optimizer; give them for a model of your own")
        for seed in seeds:
            yield _of_recipe(what, q_max, seed, device), 0
    elif isinstance(what, nn.Module):
        if not callable(train_step) or not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError("a model of your own needs train_step(step) -> loss and the optimizer it uses")
        convert = not any(isinstance(m, QuantizedLayer) for m in what.modules())
        if convert:
            quantize_(what, config)
        layers = layer_precisions(what).values()
        former = [(layer, layer.in_force, layer.q_max) for layer in layers]
        trial = _Trial(what, train_step, optimizer, q_max, type(what).__name__)
        try:
            for seed in seeds:
                yield trial, seed * dwell
        finally:
            trial.put_back()
            for layer, in_force, top in former:
                layer.in_force, layer.q_max = in_force, top
            if convert:
                restore_(what)
    else:
        raise ValueError(f"give a Recipe or a torch module, got {what!r}")


def _of_recipe(recipe: Recipe, q_max: int, seed: int, device: str | torch.device) -> _Trial:
    spec = run_spec(recipe, f"static {q_max}", q_max=q_max, seed=seed)
    session = Session(task_of(spec), spec, device)
    batches: Iterator[Any] = iter(())

    def train_step(step: int) -> torch.Tensor:
        nonlocal batches
        if step == 0:
            batches = session.task.batches(0)
            session.reset()  # another precision may have diverged
        return session.step(next(batches), session.lr_at(0, []))  # the learning rate of the start throughout

    return _Trial(session.model, train_step, session.optimizer, q_max, session.task.title)
