"""Precision search with a user's model and training loop.  Beyond the paper.

``try_precision`` runs the search of ``search_loop`` on a model and a ``train_step`` of the user: every training starts
from the same weights, and a file can store the trainings, so that an interrupted search continues.

>>> import torch
>>> _ = torch.manual_seed(0)
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
>>> optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(100, 64, 8)
>>> def compute_loss(x):
...     return (model(x) - x[:, :2]).square().mean()
>>> def train_step(step):
...     loss = compute_loss(batches[step % 100])
...     loss.backward(), optimizer.step(), optimizer.zero_grad()
...     return loss
>>> answer = try_precision(model, train_step, optimizer, lambda: -compute_loss(batches[0]), steps=40, seeds=1)
>>> print(answer)  # doctest: +ELLIPSIS
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
from cpt_core.schedules.schedule import MAX_TOTAL_STEPS
from cpt_core.validation import check_int
from cpt_extras.files import nan_to_none
from cpt_extras.progress import progress_bar
from cpt_extras.search.restartable import (
    RestartableTraining,
    TrainStep,
    restartable_trainings,
)
from cpt_extras.search.search_loop import run_precision_search
from cpt_extras.search.search_result import (
    STATIC_BITS,
    Arm,
    PrecisionSearchResult,
    Result,
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
    """Find the fewest bits that train a model as well as float32, and whether a schedule helps.

    Trained are float32, static 8, 6, 5, 4, 3 and 2 bits; at the fewest bits that lose no more than the margin, two
    schedules of the same cost, and 6, 5 and 4 bits for gradients. From three seeds on, only what is not clear is
    repeated. An interval is that of one comparison which is looked at once. Here some are looked at after every seed:
    "clear" is a good hint, not a test.

    Args:
        model: converted for the trainings if it is not yet, and left as it was.
        train_step: ``train_step(step) -> loss`` does one whole optimizer step on batch number ``step``, the same batch
            whenever the number is the same. Numbers go on from one seed to the next.
        optimizer: the one that ``train_step`` uses, made for this model.
        evaluate: called after every training, at the bits with which it ended; returns a quality, larger is better.
            The model is in the mode in which the training left it: call ``model.eval()`` where that matters.
        steps: optimizer steps of a training.
        minutes: after which no training is begun that would end too late.
        seeds: at most so many; the model keeps its weights and takes the batches from number ``seed * steps`` on,
            which must be others.
        margin: largest difference that is too small to matter, in units of ``evaluate``; None takes 1 % of what
            float32 reaches.
        cycles: of a schedule.
        store: a file of JSON lines; trainings that it holds are not repeated, so that an interrupted search continues.
            It knows the model, the quantised layers, the optimizer, ``stateful``, torch's random numbers and ``steps``,
            as they are at the start: take another file when the data, ``train_step`` or ``evaluate`` change.
        stateful: objects that every training begins with as they are now, such as LR schedulers: with ``state_dict``
            and ``load_state_dict``.
        config: of ``quantize_``, for a model that is not converted yet; None quantises all layers. Like a model that is
            converted already, it must have no ladder of number formats.
        progress: show a progress bar; None shows it in a terminal or a notebook only.

    Raises:
        ValueError: for wrong values and ladders, before anything is trained; when training diverges in float32; when
            two seeds are the same training; for a store of another training.
    """
    if not callable(evaluate):
        raise ValueError(
            f"evaluate must be a function without arguments that returns a number, got {evaluate!r}"
        )
    path = _check_store(store)
    title, steps = type(model).__name__, check_int("steps", steps, 1, MAX_TOTAL_STEPS)
    trainings = restartable_trainings(
        model, train_step, optimizer, STATIC_BITS[0], (0,), steps, config, stateful
    )
    conversion = (
        "cpt.quantize_(model)" if config is None else "cpt.quantize_(model, config)"
    )

    with closing(trainings):
        if isinstance(model, nn.Module) and is_converted(model):
            conversion = "# the model is quantised already"
        training, _ = next(trainings)
        _check_grids(training)
        weights = sum(float(p.detach().double().sum()) for p in model.parameters())
        rates = ", ".join(f"{group['lr']:g}" for group in optimizer.param_groups)
        description = (
            f"{title}, {steps} steps, {cycles} cycles, {type(optimizer).__name__} with rate {rates}, "
            f"weights that sum to {weights:.9g}, {config=}, hash of model, quantised layers, optimizer, stateful and "
            f"random numbers of torch: {training.start_digest()}"
        )
        trainer = _ArmTrainer(training, evaluate, steps, path, description)
        answer = run_precision_search(
            trainer,
            title,
            steps,
            cycles=cycles,
            margin=margin,
            minutes=minutes,
            seeds=seeds,
            progress=progress,
        )
    return replace(answer, conversion=conversion)


def _check_grids(training: RestartableTraining) -> None:
    """Raise ValueError for a layer with a ladder of number formats, whose levels have other costs than bits."""
    for name, layer in training.precisions.items():
        if layer.grids.to_dict():  # {} for the paper's grids
            raise ValueError(
                f"layer {name!r} has a ladder of number formats, and try_precision compares the cost of bits: convert "
                "the model without ladder=, or compare levels of the ladder with cpt.search.precision_range_test"
            )


def _check_store(store: Any) -> Path | None:
    """Return the path of a store; ValueError unless it can be a file in an existing folder."""
    if store is None:
        return None

    is_path = isinstance(store, (str, Path))
    path = Path(store) if is_path else Path()
    if not is_path or path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"store must be a file in a folder that is there, got {store!r}"
        )
    return path


class _ArmTrainer:
    """Trains one arm from one seed with the user's loop, unless a store holds its result.

    Args:
        training: the model, which every training resets.
        evaluate: returns the quality after a training.
        steps: optimizer steps of a training.
        path: of the store; None stores nothing.
        description: of the trainings, which the store has to share.
    """

    def __init__(
        self,
        training: RestartableTraining,
        evaluate: Callable[[], float],
        steps: int,
        path: Path | None,
        description: str,
    ) -> None:
        self.training = training
        self.evaluate = evaluate
        self.steps = steps
        self.path = path
        self.description = description
        self.stored_results = (
            {} if path is None else _read_stored_results(path, description)
        )
        self.losses_by_arm: dict[str, list[list[float]]] = defaultdict(list)
        self.no_bar = progress_bar("", progress=False)

    def __call__(self, arms: Sequence[Arm], seed: int) -> dict[str, Result]:
        """Train the one arm of ``arms`` on the batches of a seed."""
        (arm,) = arms
        stored_result = self.stored_results.get((arm.name, seed))
        if stored_result:
            return {arm.name: stored_result}

        start_time = time.perf_counter()
        value = self._train_and_evaluate(arm, seed)
        result = Result(value, time.perf_counter() - start_time)
        if self.path is not None:
            self._store(self.path, arm, seed, result)
        return {arm.name: result}

    def _train_and_evaluate(self, arm: Arm, seed: int) -> float:
        """Return the quality of an arm; NaN if its training diverges."""
        bits = [int(b) for b in arm.schedule.bits()]
        first_batch = seed * self.steps
        losses = self.training.losses(bits, first_batch, arm.q_grad, self.no_bar)
        if not math.isfinite(losses[-1]):
            return math.nan

        if losses in self.losses_by_arm[arm.name]:
            raise ValueError(
                f"seed {seed} is the same training as one before; train_step must take other batches from "
                f"number {first_batch} on, or seeds must be 1"
            )
        self.losses_by_arm[arm.name].append(losses)
        with precision(self.training.model, bits=bits[-1], q_grad=arm.q_grad):
            return check_float("evaluate must return a quality", self.evaluate())

    def _store(self, path: Path, arm: Arm, seed: int, result: Result) -> None:
        record = {
            "of": self.description,
            "arm": arm.name,
            "seed": seed,
            **nan_to_none(result._asdict()),
        }
        with path.open("a", encoding="utf-8") as file:
            # begins a new line, as the line before may have been cut off
            file.write("\n" + json.dumps(record))


def _read_stored_results(path: Path, description: str) -> dict[tuple[str, int], Result]:
    """Read the results of a store, by arm and seed.

    A line that was cut off when its process died does not count.

    Raises:
        ValueError: if the store holds trainings of another description.
    """
    if not path.exists():
        return {}

    results = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(text)
        except ValueError:
            continue
        stored_description = record.get("of") if isinstance(record, dict) else record
        if not isinstance(record, dict) or stored_description != description:
            raise ValueError(
                f"{path} holds trainings of {stored_description!r}, this is {description!r}; take another file as store"
            )
        value = math.nan if record["value"] is None else record["value"]
        results[record["arm"], record["seed"]] = Result(value, record["seconds"])
    return results
