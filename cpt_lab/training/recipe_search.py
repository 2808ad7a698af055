"""Precision range test and sensitivity of a recipe: its data, model and learning rates replace a hand-written loop.

>>> from cpt_lab.experiments.registry import recipe
>>> training, first_batch = next(recipe_trainings(recipe("smoke", "digits"), "cpu", 8, (0,), 0))
>>> training.title, first_batch
('mlp6 on scikit-learn digits, 8 x 8', 0)
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cpt_core.quantization.scheduler import precision
from cpt_core.validation import check_choice, check_types
from cpt_extras.search.range_test import run_range_test
from cpt_extras.search.range_test_result import PrecisionRange
from cpt_extras.search.restartable import Judge, RestartableTraining
from cpt_extras.search.sensitivity_analysis import run_sensitivity
from cpt_extras.search.sensitivity_result import Sensitivity
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.session import Session


def recipe_range_test(
    recipe: Recipe, *, device: str | torch.device = "cpu", **options: Any
) -> PrecisionRange:
    """Find the lowest precision at which a recipe still trains.

    Args:
        recipe: recipe whose data must be on this machine. Every seed has its own initial weights, batches and noise.
        device: device to train on.
        **options: ``q_max bits dwell mode threshold seeds progress`` of ``cpt_extras.search.precision_range_test``.
    """
    check_types(recipe_range_test, {"recipe": recipe, "device": device})
    return run_range_test(partial(recipe_trainings, recipe, device), **options)


def recipe_sensitivity(
    recipe: Recipe,
    *,
    metric: str | None = None,
    steps: int | None = None,
    device: str | torch.device = "cpu",
    **options: Any,
) -> Sensitivity:
    """Measure how much quality each role, layer or window of a recipe loses with fewer bits.

    Args:
        recipe: recipe whose data must be on this machine. Every seed has its own initial weights, batches and noise.
        metric: None takes the main metric of the task, on held-out data; "loss" is less noisy.
        steps: optimizer steps of a training; None takes the recipe's.
        device: device to train on.
        **options: ``base q_max windows layers estimate roles seeds progress`` of ``cpt_extras.search.sensitivity``.

    Raises:
        ValueError: for a recipe whose learning rate waits for evaluations, for one that holds out no data, and for
            options that ``cpt_extras.search.sensitivity`` refuses.
    """
    check_types(recipe_sensitivity, {"recipe": recipe, "device": device})
    if getattr(recipe, "lr_rule", "") == "plateau":
        raise ValueError(
            "the learning rate of this recipe waits for evaluations; give one with lr_rule='cosine'"
        )

    if steps is not None:
        recipe = replace(recipe, steps=steps)
    make_trainings = partial(
        recipe_trainings, recipe, device, follow_lr=True, metric=metric, with_judge=True
    )
    return run_sensitivity(make_trainings, False, steps=recipe.steps, **options)


def recipe_trainings(
    recipe: Recipe,
    device: str | torch.device,
    q_max: int,
    seeds: Sequence[int],
    batches: int,
    follow_lr: bool = False,
    metric: str | None = None,
    with_judge: bool = False,
) -> Generator[tuple[RestartableTraining, int]]:
    """Yield a restartable training of the recipe and the number 0 for every seed.

    The number is the first batch of the training: every seed has its own batches, so all begin at 0.

    Args:
        recipe: what is trained.
        device: device to train on.
        q_max: bits of the static schedule.
        seeds: seeds of the trainings.
        batches: not used; batches come from the task.
        follow_lr: use the recipe's learning rate of every step; False keeps that of step 0.
        metric: metric of the judge; None takes the main one of the task.
        with_judge: evaluate the training on held-out data.
    """
    for seed in seeds:
        spec = run_spec(recipe, f"static {q_max}", q_max=q_max, seed=seed)
        session = Session(load_task_class(spec), spec, device)
        train_step = _make_train_step(session, follow_lr)
        judge = _make_judge(session, q_max, metric) if with_judge else None
        training = RestartableTraining(
            session.model,
            train_step,
            session.optimizer,
            q_max,
            session.task.title,
            judge,
        )
        yield training, 0


def _make_train_step(session: Session, follow_lr: bool) -> Any:
    batches: Iterator[Any] = iter(())

    def train_step(step: int) -> torch.Tensor:
        nonlocal batches
        if step == 0:
            batches = session.task.batches(0)
            session.reset()  # a training at another precision may have diverged before
        return session.step(next(batches), session.lr_at(step if follow_lr else 0, []))

    return train_step


def _make_judge(session: Session, q_max: int, metric: str | None) -> Judge:
    main_metric = session.metric
    if metric is None:
        name = main_metric.name
    else:
        name = check_choice("metric", metric, (main_metric.name, "loss"))

    def evaluate_held_out() -> float:
        session.model.eval()
        with precision(session.model, bits=q_max), session.arithmetic():
            metrics = session.task.evaluate(session.model)
        if "valid" not in metrics:
            raise ValueError(
                "a sensitivity needs held-out data; give the recipe some, such as valid_images=200"
            )
        return float(metrics["valid"][name])

    better = -1 if metric == "loss" else main_metric.better
    return Judge(name, better, evaluate_held_out)
