"""Measure where a bit less costs quality: in which part of the training, and in which layers.  Beyond the paper.

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
>>> found = sensitivity(model, train_step, optimizer, base=3, windows=2, steps=20, seeds=(0, 1))
>>> found.windows, found.groups, found.macs
(((0, 10), (10, 20)), (('0',), ('2',)), (16384, 4096))
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from cpt_core.bitops.conventions import priced_passes, row_name
from cpt_core.bitops.counting import report_operations
from cpt_core.quantization.convert import QuantConfig, layer_precisions
from cpt_core.quantization.op_interception import Operation
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import MAX_STEPS, RoleLevels
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

RECORDED = 5  # steps of every window from which the estimate is made
LOSS = Judge(
    "loss", -1, lambda: math.nan
)  # what trials without a judge are measured by


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

    It takes ``1 + windows + groups`` trainings a seed, and one to estimate the same from gradients: minutes at demo
    scale. What is lost in windows and in layers is measured, what is lost in both at once is taken to be their product.

    Other arguments are those of ``precision_range_test``.

    Args:
        train_step: ``train_step(step) -> loss`` does one whole optimizer step of your model on batch number ``step``,
            the same batch whenever the number is the same, and returns the loss. Numbers do not begin at 0: they go on
            from one seed to the next.
        base: bits of the training that the others are compared with. Near the bits you can afford; where one bit less
            costs nothing, there is nothing to measure.
        q_max: bits of all gradients, and of the evaluation.
        windows: into how many the training is cut.
        layers: at most how many groups of layers, cut in the order of the model; or the groups, each a pattern of layer
            names or several, of which the first that matches a layer decides.
        steps: optimizer steps of a training.
        quality: called after every training, at q_max bits, larger is better. None takes the mean loss of some further
            steps at q_max bits, an eighth as many as there were.
        estimate: make the estimate too, see ``search.sensitivity_estimate``.
        roles: measure one bit less in weights, in activations and in gradients, too. That takes four trainings more, in
            all of which gradients have ``base`` bits.
        seeds: repetitions, to know the noise: the model keeps its weights and takes other batches.

    Raises:
        ValueError: for values that make no measurement, before anything is trained; when training at ``base`` bits
            diverges; when trainings differ in more than bits, their learning rates.
    """
    if quality is not None and not callable(quality):
        raise ValueError(
            f"quality must be a function without arguments that returns a number, got {quality!r}"
        )

    def judged() -> float:
        assert quality is not None
        with precision(model, bits=q_max):
            return check_float(
                "quality must return what is larger when better", quality()
            )

    judge = None if quality is None else Judge("quality", 1, judged)
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
    """Do what ``sensitivity`` does with the trials that ``start(q_max, seeds, batches)`` yields.

    With ``by_loss`` they have no judge: the mean loss of some further steps at q_max bits is measured.
    """
    check_types(
        run_sensitivity, {"estimate": estimate, "roles": roles, "progress": progress}
    )
    base, q_max = check_bits("base", base), check_bits("q_max", q_max)
    check_int("base, up to q_max,", base, 2, q_max)
    if (
        not isinstance(seeds, Iterable)
        or isinstance(seeds, bytes)
        or not (found := tuple(seeds))
    ):
        raise ValueError(
            f"seeds must name at least one, as (0, 1, 2) does; got {seeds!r}"
        )
    seeds = tuple(check_int("each of seeds", s, 0) for s in found)
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"seeds must differ, a seed twice is the same training; got {seeds}"
        )
    steps = check_int("steps", steps, 1, MAX_STEPS)
    windows = check_int("windows, at most one a step,", windows, 1, steps)
    edges = [steps * i // windows for i in range(windows + 1)]
    spans = tuple(itertools.pairwise(edges))
    cut = (
        check_int("layers", layers, 1) if isinstance(layers, int) else _patterns(layers)
    )
    tail = max(1, steps // 8) if by_loss else 0
    references: list[float] = []
    in_windows, in_groups, in_roles, estimates = [], [], [], []
    bar = progress_bar("sensitivity", unit=" steps", progress=progress)
    started = start(q_max, seeds, steps + tail)
    with (
        bar,
        closing(started),
    ):  # whatever happens, the model is put back now, not when an error is forgotten
        for trial, first in started:
            name, better, judge = trial.judge or LOSS
            if not references:
                macs_of = _macs(trial, first, q_max)
                groups = _groups(list(layer_precisions(trial.model)), cut)

            def run(
                bits: list[Bits],
                trial: RestartableTraining = trial,
                first: int = first,
                judge: Any = judge,
            ) -> float:
                losses = trial.losses([*bits, *[q_max] * tail], first, q_max, bar)
                if not math.isfinite(losses[-1]):
                    return math.nan
                value = float(np.mean(losses[steps:])) if tail else judge()
                return value if math.isfinite(value) else math.nan

            reference = run([base] * steps)
            if math.isnan(reference):
                said = "" if by_loss else f", or {name}= gave no finite number"
                raise ValueError(
                    f"training diverges at {base} bits; take a higher base, a lower learning rate or clip{said}"
                )
            over_time = [
                run([base - (a <= t < b) for t in range(steps)]) for a, b in spans
            ]
            less: list[Bits] = [
                {n: base - (n in g) for n in layer_precisions(trial.model)}
                for g in groups
            ]
            over_layers = [run([bits] * steps) for bits in less]
            if roles:
                even, *lower = (
                    run(
                        [RoleLevels(activation=a, weight=w, error=g, weight_gradient=g)]
                        * steps
                    )
                    for w, a, g in base - np.eye(4, 3, k=-1, dtype=int)
                )
                in_roles.append(tuple(better * (even - x) for x in lower))
            references.append(reference)
            in_windows.append(tuple(better * (reference - x) for x in over_time))
            in_groups.append(tuple(better * (reference - x) for x in over_layers))
            if estimate and len(references) == 1:
                estimates = _estimate(trial, first, base, q_max, spans, groups)
            title = trial.title
    return Sensitivity(
        title,
        name,
        base,
        steps,
        spans,
        groups,
        tuple(sum(macs_of[n] for n in g) for g in groups),
        seeds,
        tuple(references),
        tuple(in_windows),
        tuple(in_groups),
        tuple(estimates),
        tuple(in_roles),
    )


def _macs(trial: RestartableTraining, first: int, bits: int) -> Counter[str]:
    """Count the forward multiply-accumulates of every quantised layer in one step, and put the model back."""
    operations: list[Operation] = []
    trial.reset()
    with (
        precision(trial.model, bits=bits, q_grad=bits),
        report_operations(trial.model, operations.append),
    ):
        trial.train_step(first)
    names = layer_precisions(trial.model)
    layers, others = (
        Counter[str](),
        Counter[str](),
    )  # as the paper counts, and matmuls that it has no layer for
    for operation in operations:
        if row_name(operation) in names and priced_passes(operation, "paper"):
            layers[operation.layer] += operation.macs
        elif operation.owner in names:
            others[operation.owner] += operation.macs
    found = Counter({**others, **layers})
    if idle := [n for n in names if not found[n]]:
        said = "leave it in float32 (config=), then it has no bits"
        raise ValueError(
            f"layer {idle[0]!r} did nothing in a step of train_step; {said}"
        )
    return found


def _patterns(layers: Any) -> list[tuple[str, ...]]:
    try:
        found = [(g,) if isinstance(g, str) else tuple(g) for g in layers]
        if not found or any(not isinstance(p, str) for g in found for p in g):
            raise TypeError
    except TypeError:
        wanted = "layers must be a whole number, or patterns of layer names by group"
        raise ValueError(f"{wanted}; got {layers!r}") from None
    return found


def _groups(
    names: list[str], layers: int | Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    """Cut layers into groups: into so many of about one size, in their order, or by patterns."""
    if isinstance(layers, int):
        count = min(layers, len(names))
        return tuple(
            tuple(str(n) for n in part)
            for part in np.array_split(np.array(names), count)
        )
    found: list[list[str]] = [[] for _ in layers]
    for name in names:
        group = next(
            (i for i, ps in enumerate(layers) if any(fnmatchcase(name, p) for p in ps)),
            None,
        )
        if group is None:
            raise ValueError(
                f"layer {name!r} is in none of the groups; layers: {', '.join(names)}"
            )
        found[group].append(name)
    if empty := [ps for ps, g in zip(layers, found, strict=True) if not g]:
        raise ValueError(
            f"group {empty[0]!r} has no layer that is left; layers: {', '.join(names)}"
        )
    return tuple(map(tuple, found))


def _estimate(
    trial: RestartableTraining,
    first: int,
    base: int,
    q_max: int,
    spans: Sequence[tuple[int, int]],
    groups: Sequence[Sequence[str]],
) -> list[tuple[float, ...]]:
    """Train once at ``base`` bits and return the mean estimate of every window and group."""
    trial.reset()
    found = []
    for start, stop in spans:
        of_layers: dict[str, float] = defaultdict(float)
        every = max(1, (stop - start) // RECORDED)
        for step in range(start, stop):
            recorded = gradients_recorded(trial.model, trial.optimizer, of_layers)
            with (
                precision(trial.model, bits=base, q_grad=q_max),
                nullcontext() if (step - start) % every else recorded,
            ):
                trial.train_step(first + step)
        steps = -(-(stop - start) // every)
        found.append(tuple(sum(of_layers[n] for n in g) / steps for g in groups))
    return found
