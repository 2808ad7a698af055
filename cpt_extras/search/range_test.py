"""Precision range test: the lowest precision that still trains.  The original CPT paper, section 3.3.

``precision_range_test`` tests a model with the training loop of a user, ``run_range_test`` trainings of any other
origin. Short trainings at 2, 3, 4, ... bits are compared with one at q_max, from the same weights and on the same
batches:

    f(q) = (L_start - L_q) / (L_start - L_qmax)        q_min = the lowest q with f(q) >= 0.8

L_q is the mean training loss over the second half of a short training at q bits. It takes any training loop:

>>> import torch
>>> _ = torch.manual_seed(0)
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> batches = torch.randn(25, 64, 8)
>>> def train_step(step):
...     x = batches[step % 25]
...     loss = (model(x) - x[:, :2]).square().mean()
...     loss.backward(), optimizer.step(), optimizer.zero_grad()
...     return loss
>>> tested = precision_range_test(model, train_step, optimizer, bits=(4, 6), dwell=60)
>>> tested.q_min
4
"""

import itertools
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import nn

from cpt_core.quantization.convert import QuantConfig
from cpt_core.schedules.schedule import MAX_TOTAL_STEPS
from cpt_core.validation import check_bits, check_choice, check_int, check_types
from cpt_extras.progress import progress_bar
from cpt_extras.search.range_test_result import (
    THRESHOLDS,
    PrecisionRange,
    evaluate_range_test,
)
from cpt_extras.search.restartable import (
    RestartableTraining,
    TrainStep,
    restartable_trainings,
)


class RangeTestWarning(UserWarning):
    """Warning that the noise of a range test could have changed its answer."""


def precision_range_test(
    model: nn.Module,
    train_step: TrainStep,
    optimizer: torch.optim.Optimizer,
    *,
    q_max: int = 8,
    bits: Sequence[int] | None = None,
    dwell: int = 100,
    mode: str = "reset",
    threshold: float | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    stateful: Sequence[Any] = (),
    config: QuantConfig | str | None = None,
    progress: bool | None = None,
) -> PrecisionRange:
    """Find the lowest precision that still trains.

    Args:
        model: converted for the test if it is not yet, and left with the weights, the optimizer state and the random
            state that it had before.
        train_step: ``train_step(step) -> loss`` does one whole optimizer step of your model on batch number ``step``,
            the same batch whenever the number is the same, and returns the loss.
        optimizer: the one that ``train_step`` uses.
        stateful: further objects that ``train_step`` changes and that are reset before every training, such as an LR
            scheduler or a GradScaler, with ``state_dict`` and ``load_state_dict``.
        q_max: bits of the training that the others are compared with, and of all gradients.
        bits: precisions to try below q_max; None takes 2 to q_max - 1.
        dwell: optimizer steps at each precision; the second half is the window in which losses are averaged. Below 80
            the noise is large.
        mode: "reset": every precision starts from the same weights and sees the same batches. "continuing": one
            training through all precisions from the lowest up, as the CPT paper words it; its answer is the first
            precision at which the loss falls, which is nearly always the lowest.
        threshold: on the share of q_max's loss reduction (0.8), in mode "continuing" on the fall of the loss since the
            precision before as a share of the loss at the start (0.05).
        seeds: repetitions, to know the noise: the model keeps its weights and takes other batches. A training of seed s
            begins with batch number s * steps, where steps is ``dwell``, times the number of precisions in mode
            "continuing". If batches come round every so many steps, all seeds are the same training.
        config: of ``quantize_``; None quantises all layers.
        progress: show a progress bar; None shows it in a terminal or a notebook only.

    Returns:
        q_min with the share of every precision. q_min is None, and ``reason`` says why, when training at q_max diverges
        or does not reduce the loss: then no precision can be judged.

    Raises:
        ValueError: for values that make no test, before anything is trained; when trainings differ in learning rate.

    Warns:
        RangeTestWarning: when a share is within two standard deviations over seeds of the threshold, and when there is
            no such deviation: for one seed, or several that are the same training.

    Paper: section 4.1 (q_min is found by the precision range test of the CPT paper).
    Differs: "reset" compares losses of equally long trainings; the CPT paper raises the precision within one training
        and watches the training accuracy, with a threshold and a window that are not published.
    """
    start = partial(
        restartable_trainings,
        model,
        train_step,
        optimizer,
        config=config,
        stateful=stateful,
    )
    return run_range_test(start, q_max, bits, dwell, mode, threshold, seeds, progress)


def run_range_test(
    start: Callable[..., Generator[tuple[RestartableTraining, int]]],
    q_max: int = 8,
    bits: Sequence[int] | None = None,
    dwell: int = 100,
    mode: str = "reset",
    threshold: float | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    progress: bool | None = None,
) -> PrecisionRange:
    """Run the range test with the trainings that ``start(q_max, seeds, batches)`` yields.

    Args:
        start: yields a training and the number of its first batch, for every seed; a training takes ``batches``.
        q_max: see ``precision_range_test``, as all further arguments.
        bits: precisions to try below q_max.
        dwell: optimizer steps at each precision.
        mode: "reset" or "continuing".
        threshold: on the shares.
        seeds: repetitions.
        progress: show a progress bar; None shows it in a terminal or a notebook only.
    """
    check_types(
        run_range_test,
        {"bits": bits, "threshold": threshold, "seeds": seeds, "progress": progress},
    )
    check_choice("mode", mode, tuple(THRESHOLDS))
    threshold = THRESHOLDS[mode] if threshold is None else threshold
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must lie between 0 and 1, got {threshold!r}")
    dwell = check_int("dwell", dwell, 4, MAX_TOTAL_STEPS)
    q_max = check_bits("q_max", q_max)
    all_bits = (*_check_tested_bits(bits, q_max), q_max)
    seeds = tuple(dict.fromkeys(check_int("each of seeds", s, 0) for s in seeds))
    if not seeds:
        raise ValueError(f"seeds must name at least one, got {seeds!r}")

    trainings_bits = [[q] * dwell for q in all_bits]  # of every step of every training
    if mode == "continuing":
        trainings_bits = [list(itertools.chain.from_iterable(trainings_bits))]
    losses_by_seed = []  # [seed][precision][step]
    total = len(seeds) * len(all_bits) * dwell
    bar = progress_bar("range test", total=total, progress=progress)
    # closing restores the model now, whatever happens, not when the traceback of an error is deleted
    batches = len(trainings_bits[0])
    with bar, closing(start(q_max, seeds, batches)) as trainings:
        for training, first in trainings:
            losses: list[float] = []
            for training_bits in trainings_bits:
                losses += training.losses(training_bits, first, q_max, bar)
            losses_by_seed.append(
                [losses[i : i + dwell] for i in range(0, len(losses), dwell)]
            )
            title = training.title

    answer = evaluate_range_test(
        losses_by_seed, all_bits, mode, threshold, dwell, title
    )
    if answer.warning:
        warnings.warn(answer.warning, RangeTestWarning, stacklevel=3)
    return answer


def _check_tested_bits(bits: Any, q_max: int) -> tuple[int, ...]:
    """Return the precisions to try, rising; ValueError unless there is one below ``q_max``, and none above."""
    if bits is None:
        if q_max < 3:
            raise ValueError(
                f"q_max must be at least 3, as 2 to q_max - 1 are tried; got {q_max}"
            )
        return tuple(range(2, q_max))

    tested_bits = tuple(sorted({check_bits("bits", b) for b in bits} - {q_max}))
    if not tested_bits or tested_bits[-1] > q_max:
        raise ValueError(
            f"bits must name precisions below q_max = {q_max}, got {bits!r}"
        )
    return tested_bits
