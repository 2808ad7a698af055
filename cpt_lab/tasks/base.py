"""What a task is: the verbs that the one training loop calls.  See ``cpt_lab.training.train``."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from cpt_extras.optional_libraries import import_optional
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import RunSpec, run_spec

Batch = Any
Metrics = dict[str, float]
Evaluation = dict[str, Any]  # step, precision, bits, and the metrics of every split
LearningRate = Callable[
    [int, Sequence[Evaluation]], float
]  # of the optimizer step and of the evaluations so far


def make_optimizer(
    kind: Any, parameters: Iterable[nn.Parameter], recipe: Recipe, **more: Any
) -> torch.optim.Optimizer:
    """Return a recipe's optimizer; fused on a GPU, on the CPU the plain one, which results were made with."""
    wanted = list(parameters)
    fused = any(p.device.type != "cpu" for p in wanted)
    return kind(
        wanted, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=fused, **more
    )


def sum_batches(parts: Iterable[tuple[Tensor, ...]]) -> list[float]:
    """Sum what every batch of a split yields (0-d each), in order and in float64, on the device: one read at the end.

    >>> sums((torch.tensor(count), torch.tensor(0.5)) for count in (3, 4))
    [7.0, 1.0]
    """
    total: Tensor | float = 0.0
    for part in parts:
        total = total + torch.stack([value.double() for value in part])
    return cast(Tensor, total).tolist()


@torch.no_grad()
def accuracy_and_loss(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> Metrics:
    """Return accuracy (0..1) and mean cross entropy of ``count`` answers: logits (B, classes) and labels (B,)."""
    right, loss = sum_batches(
        (
            (logits.argmax(1) == labels).sum(),
            nn.functional.cross_entropy(logits, labels, reduction="sum"),
        )
        for logits, labels in batches
    )
    return {"accuracy": right / count, "loss": loss / count}


class Task(Protocol):
    """A data set with a model, a loss and metrics. Making one loads the data."""

    title: str  # what is measured on which data, for figures and rows
    data: Any  # what was loaded; its ``checksum`` tells other data of the same name
    cost_batches: int  # over how many batches operations are averaged: 1 where all steps do the same work
    # whether every step runs the same operations on the same shapes, so that a GPU can replay one; the last batch of an
    # epoch may be smaller
    fixed_shape: bool

    def __init__(
        self, spec: RunSpec, device: torch.device, stand_in: bool = False
    ) -> None:
        """Load the data; with ``stand_in`` make random data of the same shapes, so that nothing need be there."""

    def model(self) -> nn.Module:
        """Return a float32 model, initialised from torch's global random state, on the device."""

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield the training batches from optimizer step ``start`` on: a pure function of (seed, step)."""

    def shared_batches(
        self, start: int, share: Callable[[Any], Any]
    ) -> Iterator[Batch]:
        """Yield a process's part of the same batches; only of tasks whose batches several processes can share."""

    def loss(self, model: nn.Module, batch: Batch, carry: Any) -> tuple[Tensor, Any]:
        """Return the training loss (0-d) of a batch, and what the next step needs of this one; nothing waits for a GPU.

        The latter is None, a tensor, or tensors in tuples.
        """

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments that the model is called with for a batch, to count operations."""

    def evaluate(self, model: nn.Module) -> dict[str, Metrics]:
        """Return the metrics on "valid" and "test"; a split that does not exist is left out."""

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LearningRate]:
        """Return the optimizer, and the learning rate as a function of the step and the evaluations so far.

        On a GPU the optimizer is a fused one: it reads there whether a loss was not finite, and then does nothing.
        """


def load_task_class(spec: RunSpec) -> type[Task]:
    """Import the task class of a spec; ImportError names the extra that it needs."""
    experiment = EXPERIMENTS[spec.recipe.task]
    return import_optional(experiment.task, experiment.extra)


def load_data(recipe: Recipe) -> Any:
    """Return the data of a recipe as its task loads them; their ``report`` says what was left out and changed."""
    spec = run_spec(recipe, "static 8", q_max=8, seed=0)
    return load_task_class(spec)(spec, torch.device("cpu")).data


def read_all_data(recipe: Recipe) -> float | None:
    """Read all data of a recipe, so that what is wrong in a file is said now; what was read last stays in memory.

    Returns:
        The share of the test data that are of the commonest class, of tasks that have one answer of several.
    """
    answers = getattr(load_data(recipe), "test_labels", None)
    return None if answers is None else float(answers.bincount().max() / len(answers))


# --- rules of the learning rate -------------------------------------------------------------------
def constant(lr: float) -> LearningRate:
    """``lr`` at every step."""
    return lambda step, evaluations: lr


def milestones(lr: float, at: Sequence[float], steps: int) -> LearningRate:
    """Times 0.1 at every milestone, a share of ``steps``, rounded to a whole step."""
    drops = [round(share * steps) for share in at]
    return lambda step, evaluations: lr * 0.1 ** sum(step >= drop for drop in drops)


def linear(lr: float, final: float, steps: int) -> LearningRate:
    """A line from ``lr`` to ``final`` times that after ``steps`` steps."""
    return lambda step, evaluations: lr * (1 - (1 - final) * step / steps)


def cosine(lr: float, final: float, steps: int) -> LearningRate:
    """Half a cosine from ``lr`` to ``final`` times that after ``steps`` steps.

    >>> [round(cosine(0.1, final=0.5, steps=100)(step, []), 3) for step in (0, 50, 100)]
    [0.1, 0.075, 0.05]
    """
    return lambda step, evaluations: (
        lr * (final + (1 - final) * (1 + math.cos(math.pi * step / steps)) / 2)
    )


def plateau(lr: float, division: float) -> LearningRate:
    """Divided by ``division`` after every evaluation whose validation loss is not the best so far."""

    def rate(step: int, evaluations: Sequence[Evaluation]) -> float:
        best, cuts = math.inf, 0
        for evaluation in evaluations:
            loss = evaluation["valid"]["loss"]
            cuts += not loss < best
            best = min(best, loss)
        return lr / division**cuts

    return rate
