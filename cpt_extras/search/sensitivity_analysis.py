"""Sensitivity analysis: where one bit less costs quality, by part of the training and layer.  Beyond the paper.

``sensitivity`` measures a model with the training loop of a user, ``run_sensitivity`` trainings of any other origin.
Trainings with one bit less in one window of time, or in one group of layers, are compared with one at ``base`` bits
throughout, from the same weights and on the same batches. ``cpt.search.allocate`` makes a schedule of the answer.

>>> import torch
>>> _ = torch.manual_seed(0)
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
>>> def train_step(step, x=torch.randn(64, 8)):
...     loss = (model(x) - x[:, :2]).square().mean()
...     loss.backward(), optimizer.step(), optimizer.zero_grad()
...     return loss
>>> measured = sensitivity(model, train_step, optimizer, base=3, windows=2, steps=20, seeds=(0, 1))
>>> measured.windows, measured.groups, measured.macs
(((0, 10), (10, 20)), (('0',), ('2',)), (16384, 4096))
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from cpt_core.bitops.conventions import priced_passes, row_name
from cpt_core.bitops.counting import report_operations
from cpt_core.quantization.convert import QuantConfig, layer_precisions
from cpt_core.quantization.op_interception import Operation
from cpt_core.quantization.precision import is_recomputing
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import MAX_TOTAL_STEPS, RoleLevels
from cpt_core.validation import check_bits, check_int, check_types
from cpt_extras.progress import progress_bar
from cpt_extras.search.restartable import (
    Bits,
    Judge,
    RestartableTraining,
    TrainStep,
    restartable_trainings,
)
from cpt_extras.search.sensitivity_estimate import gradients_recorded
from cpt_extras.search.sensitivity_result import Sensitivity
from cpt_extras.validation import check_float

ESTIMATE_STEPS = 5  # of every window, from which the estimate is made
LOSS = Judge("loss", -1, lambda: math.nan)  # of trainings without a judge

Layers = tuple[str, ...]  # names of the layers of a group, or patterns of such names


def sensitivity(
    model: nn.Module,
    train_step: TrainStep,
    optimizer: torch.optim.Optimizer,
    *,
    base: int = 4,
    q_max: int = 8,
    windows: int = 8,
    layers: int | Sequence[Sequence[str] | str] = 4,
    steps: int = 100,
    quality: Callable[[], float] | None = None,
    estimate: bool = True,
    roles: bool = False,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    stateful: Sequence[Any] = (),
    config: QuantConfig | str | None = None,
    progress: bool | None = None,
) -> Sensitivity:
    """Measure the quality lost by one bit less in every window of time and in every group of layers.

    It takes ``1 + windows + groups`` trainings a seed, and one for an estimate from gradients: minutes at demo
    scale. What is lost in windows and in layers is measured, what is lost in both at once is taken to be their product.

    Args:
        model: converted for the trainings if it is not yet, and left as it was.
        train_step: ``train_step(step) -> loss`` does one whole optimizer step of your model on batch number ``step``,
            the same batch whenever the number is the same, and returns the loss. Numbers do not begin at 0: they go on
            from one seed to the next.
        optimizer: the one that ``train_step`` uses.
        base: bits of the training that the others are compared with. Near the bits you can afford; where one bit less
            costs nothing, there is nothing to measure.
        q_max: bits of all gradients, and of the evaluation.
        windows: number of parts of equal length into which the training is cut.
        layers: largest number of groups of layers, cut in the order of the model; or the groups, each a pattern of
            layer names or several, of which the first that matches a layer decides.
        steps: optimizer steps of a training.
        quality: called after every training, at q_max bits, larger is better. None takes the mean loss of some further
            steps at q_max bits, an eighth as many as there were.
        estimate: estimate the losses from gradients, too, see ``search.sensitivity_estimate``.
        roles: measure one bit less in weights, in activations and in gradients, too. That takes four trainings more, in
            all of which gradients have ``base`` bits.
        seeds: repetitions, to know the noise: the model keeps its weights and takes other batches.
        stateful: further objects that are reset before every training, such as an LR scheduler or a GradScaler, with
            ``state_dict`` and ``load_state_dict``.
        config: of ``quantize_``; None quantises all layers.
        progress: show a progress bar; None shows it in a terminal or a notebook only.

    Raises:
        ValueError: for values that make no measurement, before anything is trained; when training at ``base`` bits
            diverges; when trainings differ in more than bits, their learning rates.
    """
    if quality is not None and not callable(quality):
        raise ValueError(
            f"quality must be a function without arguments that returns a number, got {quality!r}"
        )

    def evaluate() -> float:
        assert quality is not None
        with precision(model, bits=q_max):
            return check_float(
                "quality must return what is larger when better", quality()
            )

    judge = None if quality is None else Judge("quality", 1, evaluate)
    start = partial(
        restartable_trainings,
        model,
        train_step,
        optimizer,
        config=config,
        stateful=stateful,
        judge=judge,
    )
    return run_sensitivity(
        start,
        judge is None,
        base,
        q_max,
        windows,
        layers,
        steps,
        estimate,
        roles,
        seeds,
        progress,
    )


def run_sensitivity(
    start: Callable[..., Generator[tuple[RestartableTraining, int]]],
    by_loss: bool,
    base: int = 4,
    q_max: int = 8,
    windows: int = 8,
    layers: int | Sequence[Sequence[str] | str] = 4,
    steps: int = 100,
    estimate: bool = True,
    roles: bool = False,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    progress: bool | None = None,
) -> Sensitivity:
    """Measure the sensitivity with the trainings that ``start(q_max, seeds, batches)`` yields.

    Args:
        start: yields a training and the number of its first batch, for every seed.
        by_loss: the trainings have no judge, the mean loss of some further steps at q_max bits is measured.
        base: see ``sensitivity``, as all further arguments.
        q_max: bits of all gradients, and of the evaluation.
        windows: number of parts of equal length into which the training is cut.
        layers: largest number of groups of layers, or patterns of names by group.
        steps: optimizer steps of a training.
        estimate: estimate the losses from gradients, too.
        roles: measure one bit less in weights, in activations and in gradients, too.
        seeds: repetitions.
        progress: show a progress bar; None shows it in a terminal or a notebook only.
    """
    check_types(
        run_sensitivity, {"estimate": estimate, "roles": roles, "progress": progress}
    )
    base, q_max = check_bits("base", base), check_bits("q_max", q_max)
    check_int("base, up to q_max,", base, 2, q_max)
    seeds = _check_seeds(seeds)
    steps = check_int("steps", steps, 1, MAX_TOTAL_STEPS)
    windows = check_int("windows, at most one a step,", windows, 1, steps)
    edges = [steps * i // windows for i in range(windows + 1)]
    spans = tuple(itertools.pairwise(edges))
    grouping = (
        check_int("layers", layers, 1) if isinstance(layers, int) else _patterns(layers)
    )
    tail = max(1, steps // 8) if by_loss else 0

    groups: tuple[Layers, ...] = ()
    group_macs: tuple[int, ...] = ()
    measurements: list[_Measurement] = []
    estimated: list[tuple[float, ...]] = []
    bar = progress_bar("sensitivity", unit=" steps", progress=progress)
    trainings = start(q_max, seeds, steps + tail)
    # closing restores the model now, whatever happens, not when the traceback of an error is deleted
    with bar, closing(trainings):
        for training, first in trainings:
            judge = training.judge or LOSS
            if not measurements:
                macs = _count_macs(training, first, q_max)
                groups = _groups(list(layer_precisions(training.model)), grouping)
                group_macs = tuple(sum(macs[n] for n in group) for group in groups)

            trainer = _Trainer(training, judge, first, base, q_max, steps, tail, bar)
            measurement = _measure(trainer, spans, groups, roles)
            if math.isnan(measurement.reference):
                other = "" if by_loss else f", or {judge.name}= gave no finite number"
                raise ValueError(
                    f"training diverges at {base} bits; take a higher base, a lower learning rate or clip{other}"
                )
            measurements.append(measurement)
            if estimate and len(measurements) == 1:
                estimated = _estimate(training, first, base, q_max, spans, groups)
            title = training.title

    return Sensitivity(
        title,
        judge.name,
        base,
        steps,
        spans,
        groups,
        group_macs,
        seeds,
        tuple(m.reference for m in measurements),
        tuple(m.lost_in_windows for m in measurements),
        tuple(m.lost_in_groups for m in measurements),
        tuple(estimated),
        tuple(m.lost_in_roles for m in measurements if m.lost_in_roles),
    )


def _check_seeds(seeds: Any) -> tuple[int, ...]:
    """Return seeds as a tuple; ValueError unless there is one at least, and they differ."""
    is_iterable = isinstance(seeds, Iterable) and not isinstance(seeds, bytes)
    values = tuple(seeds) if is_iterable else ()
    if not values:
        raise ValueError(
            f"seeds must name at least one, as (0, 1, 2) does; got {seeds!r}"
        )
    values = tuple(check_int("each of seeds", seed, 0) for seed in values)
    if len(set(values)) < len(values):
        raise ValueError(
            f"seeds must differ, a seed twice is the same training; got {values}"
        )
    return values


class _Measurement(NamedTuple):
    """Quality of the trainings of one seed.

    Attributes:
        reference: quality at ``base`` bits throughout; NaN if that diverged.
        lost_in_windows: quality lost by one bit less in a window, by window.
        lost_in_groups: quality lost by one bit less in a group of layers, by group.
        lost_in_roles: quality lost by one bit less in weights, activations or gradients; () when not measured.
    """

    reference: float
    lost_in_windows: tuple[float, ...]
    lost_in_groups: tuple[float, ...]
    lost_in_roles: tuple[float, ...]


class _Trainer(NamedTuple):
    """Trains a model from one seed and returns the quality.

    Attributes:
        training: the model, which every training resets.
        judge: measures the quality.
        first: number of the first batch.
        base: bits of the reference.
        q_max: gradient bits, and those of the tail.
        steps: optimizer steps of a training.
        tail: further steps, of which the mean loss is the quality; 0 measures by the judge.
        bar: progress bar.
    """

    training: RestartableTraining
    judge: Judge
    first: int
    base: int
    q_max: int
    steps: int
    tail: int
    bar: Any

    def quality(self, bits: list[Bits]) -> float:
        """Return the quality after a training, step i at ``bits[i]``; NaN where it is not finite."""
        all_bits = [*bits, *[self.q_max] * self.tail]
        losses = self.training.losses(all_bits, self.first, self.q_max, self.bar)
        if not math.isfinite(losses[-1]):
            return math.nan

        if self.tail:
            quality = float(np.mean(losses[self.steps :]))
        else:
            quality = self.judge.measure()
        return quality if math.isfinite(quality) else math.nan


def _measure(
    trainer: _Trainer,
    spans: Sequence[tuple[int, int]],
    groups: Sequence[Layers],
    roles: bool,
) -> _Measurement:
    """Train at ``base`` bits, and with one bit less in every window, group and, with ``roles``, role."""
    base, steps, better = trainer.base, trainer.steps, trainer.judge.better
    reference = trainer.quality([base] * steps)
    if math.isnan(reference):
        return _Measurement(reference, (), (), ())

    in_windows = []
    for start, stop in spans:
        bits: list[Bits] = [base] * steps
        bits[start:stop] = [base - 1] * (stop - start)
        in_windows.append(trainer.quality(bits))

    in_groups = []
    for group in groups:
        names = layer_precisions(trainer.training.model)
        by_layer = {name: base - 1 if name in group else base for name in names}
        in_groups.append(trainer.quality([by_layer] * steps))

    lost_in_roles: tuple[float, ...] = ()
    if roles:
        # gradients have base bits here, so that these trainings have a reference of their own
        role_reference = trainer.quality([_role_levels(base, base, base)] * steps)
        lower = base - 1
        lost_in_roles = tuple(
            better * (role_reference - trainer.quality([levels] * steps))
            for levels in (
                _role_levels(lower, base, base),
                _role_levels(base, lower, base),
                _role_levels(base, base, lower),
            )
        )
    return _Measurement(
        reference,
        tuple(better * (reference - quality) for quality in in_windows),
        tuple(better * (reference - quality) for quality in in_groups),
        lost_in_roles,
    )


def _role_levels(weight: int, activation: int, gradient: int) -> RoleLevels:
    return RoleLevels(
        activation=activation,
        weight=weight,
        error=gradient,
        weight_gradient=gradient,
    )


def _count_macs(training: RestartableTraining, first: int, bits: int) -> Counter[str]:
    """Count the forward multiply-accumulates of every quantised layer in one step."""
    operations: list[Operation] = []

    def report(operation: Operation) -> None:
        # activation checkpointing runs operations again in the backward pass
        if not is_recomputing():
            operations.append(operation)

    training.reset()
    with (
        precision(training.model, bits=bits, q_grad=bits),
        report_operations(training.model, report),
    ):
        training.train_step(first)

    names = layer_precisions(training.model)
    layer_macs = Counter[str]()  # as the paper counts
    other_macs = Counter[str]()  # of matmuls for which the paper has no layer
    for operation in operations:
        if row_name(operation) in names and priced_passes(operation, "paper"):
            layer_macs[operation.layer] += operation.macs
        elif operation.owner in names:
            other_macs[operation.owner] += operation.macs

    macs = Counter({**other_macs, **layer_macs})
    idle_layers = [name for name in names if not macs[name]]
    if idle_layers:
        raise ValueError(
            f"layer {idle_layers[0]!r} did nothing in a step of train_step; "
            "leave it in float32 (config=), then it has no bits"
        )
    return macs


def _patterns(layers: Any) -> list[Layers]:
    """Return the patterns of every group as tuples; ValueError for anything else."""
    try:
        groups = [(g,) if isinstance(g, str) else tuple(g) for g in layers]
        patterns = list(itertools.chain.from_iterable(groups))
        if not groups or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError
    except TypeError:
        raise ValueError(
            f"layers must be a whole number, or patterns of layer names by group; got {layers!r}"
        ) from None
    return groups


def _groups(names: list[str], layers: int | Sequence[Layers]) -> tuple[Layers, ...]:
    """Cut layers into so many groups of about one size, in their order, or into groups by patterns."""
    if isinstance(layers, int):
        parts = np.array_split(np.array(names), min(layers, len(names)))
        return tuple(tuple(part.tolist()) for part in parts)

    groups: list[list[str]] = [[] for _ in layers]
    for name in names:
        group = _first_match(name, layers)
        if group is None:
            raise ValueError(
                f"layer {name!r} is in none of the groups; layers: {', '.join(names)}"
            )
        groups[group].append(name)
    for patterns, group_names in zip(layers, groups, strict=True):
        if not group_names:
            raise ValueError(
                f"group {patterns!r} has no layer that is left; layers: {', '.join(names)}"
            )
    return tuple(map(tuple, groups))


def _first_match(name: str, groups: Sequence[Layers]) -> int | None:
    """Return the index of the first group with a pattern that matches a name; None without such a group."""
    for index, patterns in enumerate(groups):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return index
    return None


def _estimate(
    training: RestartableTraining,
    first: int,
    base: int,
    q_max: int,
    spans: Sequence[tuple[int, int]],
    groups: Sequence[Layers],
) -> list[tuple[float, ...]]:
    """Train once at ``base`` bits and return the mean estimate of every window and group."""
    training.reset()
    estimates = []
    for start, stop in spans:
        sums: dict[str, float] = defaultdict(float)  # by layer
        stride = max(1, (stop - start) // ESTIMATE_STEPS)
        for step in range(start, stop):
            is_recorded = (step - start) % stride == 0
            recording = (
                gradients_recorded(training.model, training.optimizer, sums)
                if is_recorded
                else nullcontext()
            )
            with precision(training.model, bits=base, q_grad=q_max), recording:
                training.train_step(first + step)

        recorded_steps = math.ceil((stop - start) / stride)
        estimates.append(
            tuple(sum(sums[n] for n in group) / recorded_steps for group in groups)
        )
    return estimates
