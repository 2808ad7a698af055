"""Try precisions with a model and a training loop of one's own.  Beyond the paper.

>>> import torch
>>> _ = torch.manual_seed(0)
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
>>> optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(100, 64, 8)
>>> def loss_of(x):
...     return (model(x) - x[:, :2]).square().mean()
>>> def train_step(step):
...     loss = loss_of(batches[step % 100])
...     loss.backward(), optimizer.step(), optimizer.zero_grad()
...     return loss
>>> found = try_precision(model, train_step, optimizer, lambda: -loss_of(batches[0]), steps=40, seeds=1)
>>> print(found)  # doctest: +ELLIPSIS
Sequential: 12 trainings, 1 seed; nothing is clear with so few; plus is better, 0.00073 is too little to matter
Bits:      With ... bits it is perhaps as good as in float32, which reaches -0.0... (...
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpt_core.quantization.convert import QuantConfig, is_converted
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import MAX_STEPS
from cpt_core.validation import check_int
from cpt_extras.files import nan_to_none
from cpt_extras.progress import progress_bar
from cpt_extras.search.restartable import TrainStep, restartable_trainings
from cpt_extras.search.search_result import (
    WIDTHS,
    Arm,
    PrecisionSearchResult,
    Result,
    run_precision_search,
)
from cpt_extras.validation import check_float


def try_precision(
    model: nn.Module,
    train_step: TrainStep,
    optimizer: torch.optim.Optimizer,
    evaluate: Callable[[], float],
    *,
    steps: int,
    minutes: float = 10,
    seeds: int = 10,
    margin: float | None = None,
    cycles: int = 4,
    store: str | Path | None = None,
    stateful: Sequence[Any] = (),
    config: QuantConfig | str | None = None,
    progress: bool | None = None,
) -> PrecisionSearchResult:
    """Say how few bits a model can be trained with, whether a schedule helps, and what that costs.

    Trained are float32, static 8, 6, 5, 4, 3 and 2 bits; at the fewest bits that lose no more than the margin, two
    schedules of the same cost, and 6, 5 and 4 bits for gradients. From three seeds on, only what is not clear is
    repeated. An interval is that of one comparison which is looked at once. Here some are looked at after every seed:
    "clear" is a good hint, not a test.

    Other arguments are those of ``precision_range_test``.

    Args:
        model: converted for the trainings if it is not yet, and left as it was.
        train_step: ``train_step(step) -> loss`` does one whole optimizer step on batch number ``step``, the same batch
            whenever the number is the same. Numbers go on from one seed to the next.
        evaluate: called after every training, at the bits with which it ended; what is larger when better. The model
            is in the mode in which the training left it: call ``model.eval()`` where that matters.
        steps: optimizer steps of a training.
        minutes: after which no training is begun that would end too late.
        seeds: at most so many; the model keeps its weights and takes the batches from number ``seed * steps`` on,
            which must be others.
        margin: what is too little to matter, in units of ``evaluate``; None takes 1 % of what float32 reaches.
        cycles: of a schedule.
        store: a file of JSON lines; trainings that it holds are not repeated, so that what was stopped goes on. It
            knows weights, rates, steps and ``config``: take another file when the data or ``evaluate`` change.

    Raises:
        ValueError: for wrong values, before anything is trained; when training diverges in float32; when two seeds are
            the same training; for a store of another training.
    """
    if not callable(evaluate):
        raise ValueError(
            f"evaluate must be a function without arguments that returns a number, got {evaluate!r}"
        )
    path = (
        None
        if store is None
        else Path(store)
        if isinstance(store, (str, Path))
        else Path()
    )
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(
            f"store must be a file in a folder that is there, got {store!r}"
        )
    title, steps = type(model).__name__, check_int("steps", steps, 1, MAX_STEPS)
    trials = restartable_trainings(
        model, train_step, optimizer, WIDTHS[0], (0,), steps, config, stateful
    )
    quiet = progress_bar("", progress=False)
    with closing(trials):
        conversion = (
            "cpt.quantize_(model)" if config is None else "cpt.quantize_(model, config)"
        )
        if isinstance(model, nn.Module) and is_converted(model):
            conversion = "# the model is quantised already"
        trial, _ = next(trials)
        weights = sum(float(p.detach().double().sum()) for p in model.parameters())
        rates = ", ".join(f"{group['lr']:g}" for group in optimizer.param_groups)
        what = f"{title}, {steps} steps, {cycles} cycles, rate {rates}, weights that sum to {weights:.9g}, {config=}"
        seen: dict[str, list[list[float]]] = defaultdict(list)  # losses by arm
        known = {} if path is None else _known(path, what)

        def run(arms: Sequence[Arm], seed: int) -> dict[str, Result]:
            (arm,) = arms
            if found := known.get((arm.name, seed)):
                return {arm.name: found}
            began, value, bits = (
                time.perf_counter(),
                math.nan,
                [int(b) for b in arm.schedule.bits()],
            )
            losses = trial.losses(bits, seed * steps, arm.q_grad, quiet)
            if math.isfinite(losses[-1]):
                if losses in seen[arm.name]:
                    raise ValueError(
                        f"seed {seed} is the same training as one before; train_step must take other batches from "
                        f"number {seed * steps} on, or seeds must be 1"
                    )
                seen[arm.name].append(losses)
                with precision(model, bits=bits[-1], q_grad=arm.q_grad):
                    value = check_float("evaluate must return a quality", evaluate())
            result = Result(value, time.perf_counter() - began)
            if path is not None:
                line = {
                    "of": what,
                    "arm": arm.name,
                    "seed": seed,
                    **nan_to_none(result._asdict()),
                }
                with path.open("a", encoding="utf-8") as file:
                    file.write(
                        "\n" + json.dumps(line)
                    )  # after a line that was cut off, too
            return {arm.name: result}

        found = run_precision_search(
            run,
            title,
            steps,
            cycles=cycles,
            margin=margin,
            minutes=minutes,
            seeds=seeds,
            progress=progress,
        )
    return replace(found, conversion=conversion)


def _known(path: Path, what: str) -> dict[tuple[str, int], Result]:
    """Read the trainings of a store; a line that was cut off when its process died does not count."""
    found = {}
    for text in (
        path.read_text(encoding="utf-8", errors="replace").splitlines()
        if path.exists()
        else ()
    ):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if not isinstance(line, dict) or line.get("of") != what:
            of = line.get("of") if isinstance(line, dict) else line
            raise ValueError(
                f"{path} holds trainings of {of!r}, this is {what!r}; take another file as store"
            )
        value = math.nan if line["value"] is None else line["value"]
        found[line["arm"], line["seed"]] = Result(value, line["seconds"])
    return found
