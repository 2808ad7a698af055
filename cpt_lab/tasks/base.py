"""Interface of a task, which the training loop calls, and rules of the learning rate.

``Task`` is the interface, ``load_task_class`` imports the task of a spec, ``make_optimizer``, ``sum_batches`` and
``accuracy_and_loss`` are shared by tasks. The loop is ``cpt_lab.training.train``.
"""

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
# (optimizer step, evaluations so far) -> learning rate
LearningRate = Callable[[int, Sequence[Evaluation]], float]
ADAMW_BETAS = (0.9, 0.95)  # of most language models


def make_optimizer(
    optimizer_class: Any,
    parameters: Iterable[nn.Parameter],
    recipe: Recipe,
    **options: Any,
) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe: fused on a GPU, not fused on the CPU, as for the committed results.

    Args:
        optimizer_class: of the task, which a recipe with ``optimizer="adamw"`` replaces by AdamW.
        parameters: what is trained.
        recipe: learning rate, weight decay and optimizer.
        options: further arguments of ``optimizer_class``.
    """
    trained = list(parameters)
    if getattr(recipe, "optimizer", "sgd") == "adamw":
        optimizer_class, options = torch.optim.AdamW, {"betas": ADAMW_BETAS}
    fused = any(p.device.type != "cpu" for p in trained)
    return optimizer_class(
        trained, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=fused, **options
    )


def sum_batches(parts: Iterable[tuple[Tensor, ...]]) -> list[float]:
    """Sum the values (0-d) of every batch of a split, in order and in float64.

    The sum stays on the device until the end, so a GPU is read once.

    >>> sum_batches((torch.tensor(count), torch.tensor(0.5)) for count in (3, 4))
    [7.0, 1.0]
    """
    total: Tensor | float = 0.0
    for part in parts:
        total = total + torch.stack([value.double() for value in part])
    return cast(Tensor, total).tolist()


@torch.no_grad()
def accuracy_and_loss(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> Metrics:
    """Return accuracy (0..1) and mean cross entropy of ``count`` samples, from batches of logits and labels.

    Args:
        batches: logits (B, classes) and labels (B,) of every batch.
        count: samples in all batches.
    """
    correct, loss = sum_batches(
        (
            (logits.argmax(1) == labels).sum(),
            nn.functional.cross_entropy(logits, labels, reduction="sum"),
        )
        for logits, labels in batches
    )
    return {"accuracy": correct / count, "loss": loss / count}


class Task(Protocol):
    """A data set with a model, a loss and metrics. Creating a task loads the data.

    Attributes:
        title: what is measured on which data, for figures and rows.
        data: the loaded data; its ``checksum`` differs for other data of the same name.
        cost_batches: batches over which operations are averaged: 1 where all steps do the same work.
        fixed_shape: whether every step runs the same operations on the same shapes, so that a GPU can replay one; the
            last batch of an epoch may be smaller.
    """

    title: str
    data: Any
    cost_batches: int
    fixed_shape: bool

    def __init__(
        self, spec: RunSpec, device: torch.device, stand_in: bool = False
    ) -> None:
        """Load the data; with ``stand_in`` make random data of their shapes, which needs no files."""

    def build_model(self) -> nn.Module:
        """Build a float32 model, initialised from torch's global random state, on the device."""

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield training batches from optimizer step ``start`` on, as a pure function of (seed, step)."""

    def shared_batches(
        self, start: int, share: Callable[[Any], Any]
    ) -> Iterator[Batch]:
        """Yield this process's part of every training batch; tasks that cannot share batches lack this method."""

    def loss(self, model: nn.Module, batch: Batch, carry: Any) -> tuple[Tensor, Any]:
        """Return the training loss (0-d) of a batch, and the state to carry to the next step; never waits for a GPU.

        The state is None, a tensor, or tensors in tuples.
        """

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the model's arguments for a batch, to count operations."""

    def evaluate(self, model: nn.Module) -> dict[str, Metrics]:
        """Return the metrics on "valid" and "test"; a split that does not exist is left out."""

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LearningRate]:
        """Return the optimizer, and the learning rate as a function of the step and the evaluations so far.

        On a GPU the optimizer is fused: it reads there whether a loss was not finite, and skips the update then.
        """


def load_task_class(spec: RunSpec) -> type[Task]:
    """Return the task class of a spec, importing its module; ImportError names a missing extra."""
    experiment = EXPERIMENTS[spec.recipe.task]
    return import_optional(experiment.task, experiment.extra)


def load_data(recipe: Recipe) -> Any:
    """Return the data of a recipe as its task loads them; their ``report`` says what was left out and changed."""
    spec = run_spec(recipe, "static 8", q_max=8, seed=0)
    return load_task_class(spec)(spec, torch.device("cpu")).data


def read_all_data(recipe: Recipe) -> float | None:
    """Read all data of a recipe, so that errors in files are raised now; the data stay in memory.

    Returns:
        The share of test data that belong to the most frequent class; None for tasks without classes.
    """
    labels = getattr(load_data(recipe), "test_labels", None)
    return None if labels is None else float(labels.bincount().max() / len(labels))


# --- rules of the learning rate -------------------------------------------------------------------
def constant(lr: float) -> LearningRate:
    """Return the rule ``lr`` at every step."""
    return lambda step, evaluations: lr


def milestones(lr: float, shares: Sequence[float], steps: int) -> LearningRate:
    """Return the rule ``lr`` times 0.1 at every milestone, a share of ``steps`` rounded to a whole step."""
    drops = [round(share * steps) for share in shares]
    return lambda step, evaluations: lr * 0.1 ** sum(step >= drop for drop in drops)


def linear(lr: float, final: float, steps: int) -> LearningRate:
    """Return the rule of a line from ``lr`` to ``final * lr`` after ``steps`` steps."""
    return lambda step, evaluations: lr * (1 - (1 - final) * step / steps)


def cosine(lr: float, final: float, steps: int) -> LearningRate:
    """Return the rule of half a cosine from ``lr`` to ``final * lr`` after ``steps`` steps.

    >>> [round(cosine(0.1, final=0.5, steps=100)(step, []), 3) for step in (0, 50, 100)]
    [0.1, 0.075, 0.05]
    """
    return lambda step, evaluations: (
        lr * (final + (1 - final) * (1 + math.cos(math.pi * step / steps)) / 2)
    )


def warmup_stable_decay(lr: float, steps: int) -> LearningRate:
    """Return the rule "wsd": up to ``lr`` in a twentieth of the steps, ``lr``, down to 0 in the last fifth.

    >>> [round(warmup_stable_decay(0.1, 40)(step, []), 3) for step in (0, 1, 2, 31, 32, 36, 39)]
    [0.05, 0.1, 0.1, 0.1, 0.1, 0.05, 0.013]
    """
    warmup, decay = max(1, round(0.05 * steps)), max(1, round(0.2 * steps))
    return lambda step, evaluations: (
        lr * min(1.0, (step + 1) / warmup, (steps - step) / decay)
    )


def cyclic(lr: float, n_cycles: int, steps: int, rising: bool = False) -> LearningRate:
    """Return the rule of half a cosine from ``lr`` to 0 in every cycle; with ``rising`` reversed in time.

    >>> [round(cyclic(0.1, 2, 8)(step, []), 3) for step in range(8)]
    [0.1, 0.085, 0.05, 0.015, 0.1, 0.085, 0.05, 0.015]
    >>> [round(cyclic(0.1, 2, 8, rising=True)(step, []), 3) for step in range(8)]
    [0.015, 0.05, 0.085, 0.1, 0.015, 0.05, 0.085, 0.1]
    """

    def rate(step: int, evaluations: Sequence[Evaluation]) -> float:
        falling_step = steps - 1 - step if rising else step
        position = falling_step * n_cycles / steps % 1.0
        return lr * (1 + math.cos(math.pi * position)) / 2

    return rate


def plateau(lr: float, division: float) -> LearningRate:
    """Return the rule ``lr``, divided by ``division`` after every evaluation without a new lowest validation loss."""

    def rate(step: int, evaluations: Sequence[Evaluation]) -> float:
        lowest_loss, cuts = math.inf, 0
        for evaluation in evaluations:
            loss = evaluation["valid"]["loss"]
            if not loss < lowest_loss:  # true also of NaN
                cuts += 1
            lowest_loss = min(lowest_loss, loss)
        return lr / division**cuts

    return rate
