"""Runs of H5 in ``docs/preregistration.md``: bits allocated by sensitivity against static precision.  No torch.

The schedules are made from sensitivities that were measured earlier, on other seeds, and are stored in
``data/results``; the same file gives the same runs.

>>> [case.budget for case in CASES.values()]  # doctest: +ELLIPSIS
[0.41..., 0.29..., 0.29..., 0.29...]
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from cpt_core.schedules import cost
from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_core.validation import check_choice
from cpt_extras.search.allocation import allocate, static_of_cost
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.sensitivity_result import OVER, Sensitivity
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import NotMeasuredError, RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.studies.case import FACEBOOK, Case

SENSITIVITY_FILE = "sensitivity.json"  # under data/results, written by ``python -m bench.sensitivities``
Q_MAX = 8
SWITCH_TIME = 0.45  # of the training: a twentieth before the learning rate falls first (steps), or is half (cosine)
STATIC, LATE = "static", "low then high"


@dataclass(frozen=True, kw_only=True)
class MeasuredCase(Case):
    """A task of H5; its seeds start at 100."""

    # Static precision whose cost is the budget of all arms. Sensitivities are measured with one bit less, and no arm
    # uses fewer bits than were measured.
    bits: int
    measured: int  # number of seeds of the sensitivities, which start at 50

    @property
    def recipe(self) -> Recipe:
        """The trained recipe; its schedules have no cycles."""
        return replace(super().recipe, n_cycles=1, q_min=self.bits - 1)

    @property
    def budget(self) -> float:
        """Cost of every arm relative to static ``Q_MAX``."""
        return cost.relative_cost([self.bits], Q_MAX)


CASES = {
    "digits": MeasuredCase("digits", "image", bits=4, seeds=40, measured=40),
    "facebook": MeasuredCase(FACEBOOK, "graph", bits=3, seeds=16, measured=8),
    "characters": MeasuredCase(
        "pydoc", "language_model", bits=3, seeds=20, measured=16
    ),
    "cifar10-jpeg": MeasuredCase(
        "cifar10-jpeg/", "image", bits=3, seeds=10, measured=6
    ),
}


def allocated(
    case: str = "digits", seeds: Sequence[int] | None = None
) -> list[RunSpec]:
    """Return the runs of a task of H5: every way to spend one BitOps budget, and static 8 for comparison.

    The arms are static precision; bits allocated over time, over layers, over both; and one step lower than static
    until shortly before the learning rate falls, then as high as the budget allows.

    Args:
        case: a task of H5.
        seeds: None uses those of the preregistration.

    Raises:
        NotMeasuredError: when no sensitivity is stored.
    """
    task = CASES[check_choice("case", case, CASES)]
    seeds = range(100, 100 + task.seeds) if seeds is None else seeds
    recipe, sensitivity = task.recipe, stored_sensitivity(case)
    steps, budget = recipe.steps, task.budget

    arms: dict[str, Schedule] = {STATIC: StaticSchedule(task.bits, steps)}
    for dimension in OVER:
        arms[f"over {dimension}"] = allocate(
            sensitivity, budget, recipe.q_min, Q_MAX, dimension, total_steps=steps
        )
    arms[LATE] = low_then_high(task.bits, steps)

    schedules = {f"{arm} at {budget:.3f}": schedule for arm, schedule in arms.items()}
    schedules[f"static {Q_MAX}"] = StaticSchedule(Q_MAX, steps)
    return [
        RunSpec(recipe, schedule, Q_MAX, Q_MAX, seed, arm, "demo")
        for arm, schedule in schedules.items()
        for seed in seeds
    ]


def low_then_high(static: int, total_steps: int) -> TableSchedule:
    """Return a schedule of equal cost that is low first, then high.

    It has one bit less than static until ``SWITCH_TIME``, and spends the remaining budget evenly after it.
    """
    low, low_steps = static - 1, round(SWITCH_TIME * total_steps)
    high_steps = total_steps - low_steps
    budget = cost.relative_cost([static], Q_MAX) * total_steps
    remaining_budget = budget - low_steps * cost.relative_cost([low], Q_MAX)
    high = static_of_cost(min(1.0, remaining_budget / high_steps), Q_MAX, high_steps)
    if isinstance(high, TableSchedule):
        high_runs = high.runs
    else:
        high_runs = ((high.q_max, high_steps),)
    return TableSchedule(((low, low_steps), *high_runs))


@cache
def stored_sensitivity(case: str) -> Sensitivity:
    """Return the stored sensitivity of a case; NotMeasuredError with the command that measures it if there is none."""
    path = results_dir() / SENSITIVITY_FILE
    stored_cases = (
        json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else {}
    )
    if case not in stored_cases:
        raise NotMeasuredError(
            f"{path} has no sensitivity of {case!r}; measure it: python -m bench.sensitivities --only {case}"
        )
    return Sensitivity.from_dict(stored_cases[case])


# name of a grid -> function that makes its runs, description
GRIDS: dict[str, tuple[Callable[..., list[RunSpec]], str]] = {
    f"h5/{name}": (
        partial(allocated, name),
        f"bits allocated by sensitivity against static precision, {name}",
    )
    for name in CASES
}
