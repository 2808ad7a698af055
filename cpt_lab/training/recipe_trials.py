"""Range test and sensitivity of a recipe: its data, model and learning rates instead of a training loop of one's own.

>>> from cpt_lab.experiments.registry import recipe
>>> trial, first = next(of_recipe(recipe("smoke", "digits"), "cpu", 8, (0,), 0))
>>> trial.title, first
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
from cpt_lab.tasks.base import task_of
from cpt_lab.training.session import Session


def recipe_range_test(
    recipe: Recipe, *, device: str | torch.device = "cpu", **options: Any
) -> PrecisionRange:
    """Find the lowest precision at which a recipe still trains.

    Args:
        recipe: its data must be there. Every seed has initial weights, batches and rounding noise of its own.
        **options: ``q_max bits dwell mode threshold seeds progress`` of ``cpt_extras.search.precision_range_test``.
    """
    check_types(recipe_range_test, {"recipe": recipe, "device": device})
    return run_range_test(partial(of_recipe, recipe, device), **options)


def recipe_sensitivity(
    recipe: Recipe,
    *,
    metric: str | None = None,
    steps: int | None = None,
    device: str | torch.device = "cpu",
    **options: Any,
) -> Sensitivity:
    """Measure where a bit less costs the quality of a recipe.

    Args:
        recipe: its data must be there. Every seed has initial weights, batches and rounding noise of its own.
        metric: None takes the main one of the task, on held-out data; "loss" is less noisy.
        steps: optimizer steps of a training; None takes the recipe's.
        **options: ``base q_max windows layers estimate roles seeds progress`` of ``cpt_extras.search.sensitivity``.

    Raises:
        ValueError: for a recipe whose learning rate waits for evaluations, or that holds out no data; and as there.
    """
    check_types(recipe_sensitivity, {"recipe": recipe, "device": device})
    if getattr(recipe, "lr_rule", "") == "plateau":
        raise ValueError(
            "the learning rate of this recipe waits for evaluations; give one with lr_rule='cosine'"
        )
    recipe = recipe if steps is None else replace(recipe, steps=steps)
    start = partial(of_recipe, recipe, device, falling=True, metric=metric, judged=True)
    return run_sensitivity(start, False, steps=recipe.steps, **options)


def of_recipe(
    recipe: Recipe,
    device: str | torch.device,
    q_max: int,
    seeds: Sequence[int],
    batches: int,
    falling: bool = False,
    metric: str | None = None,
    judged: bool = False,
) -> Generator[tuple[RestartableTraining, int]]:
    """Yield for every seed what to train, and 0: each has batches of its own.

    The learning rate is that of the start throughout, or with ``falling`` that of the recipe's training.
    """
    for seed in seeds:
        spec = run_spec(recipe, f"static {q_max}", q_max=q_max, seed=seed)
        session = Session(task_of(spec), spec, device)
        step = _stepper(session, falling)
        judge = _judge(session, q_max, metric) if judged else None
        yield (
            RestartableTraining(
                session.model, step, session.optimizer, q_max, session.task.title, judge
            ),
            0,
        )


def _stepper(session: Session, falling: bool) -> Any:
    batches: Iterator[Any] = iter(())

    def train_step(step: int) -> torch.Tensor:
        nonlocal batches
        if step == 0:
            batches = session.task.batches(0)
            session.reset()  # another precision may have diverged
        return session.step(next(batches), session.lr_at(step if falling else 0, []))

    return train_step


def _judge(session: Session, q_max: int, metric: str | None) -> Judge:
    main = session.metric
    name = (
        main.name
        if metric is None
        else check_choice("metric", metric, (main.name, "loss"))
    )

    def held_out() -> float:
        session.model.eval()
        with precision(session.model, bits=q_max), session.arithmetic():
            found = session.task.evaluate(session.model)
        if "valid" not in found:
            raise ValueError(
                "a sensitivity needs held-out data; give the recipe some, such as valid_images=200"
            )
        return float(found["valid"][name])

    return Judge(name, -1 if metric == "loss" else main.better, held_out)
