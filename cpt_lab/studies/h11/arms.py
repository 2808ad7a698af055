"""Runs of H11 in ``docs/preregistration.md``: orders of the same bits under rules of the learning rate.  No torch.

A case is a task under a rule, such as "digits/constant". Every arm but "8/8" costs what static 4 bits cost.

>>> [round(s.relative_cost(g, 8), 3) for s, g in arms(CASES["digits/step"]).values()]
[0.417, 0.417, 0.417, 0.417, 0.417, 1.0]
"""

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from cpt_core.schedules.schedule import Schedule, ShortCycleWarning, StaticSchedule
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.solver import solve_schedule
from cpt_lab.experiments.schema import CYCLIC_RULES
from cpt_lab.studies.case import FACEBOOK, Case
from cpt_lab.studies.tuned import FULL_BITS_ARM, TunedStudy

STATIC_BITS, LOW_BITS, HIGH_BITS, Q_MAX = 4, 3, 6, 8
STATIC, RISING, FALLING, EVEN, CYCLIC = "static 4", "rising", "falling", "even", "CR"
CONSTANT, DECAYS = "constant", ("step", "cosine")
RULES = (CONSTANT, *DECAYS)

# task -> the task under its own rule of the learning rate, and the rules under which it is trained
TASKS: dict[str, tuple[Case, Sequence[str]]] = {
    "digits": (Case("digits", "image", None, 40, 1.0), (*RULES, *CYCLIC_RULES)),
    "gcn": (
        Case(FACEBOOK, "graph", "gcn", 24, 0.25, title="Facebook GCN"),
        (*RULES, *CYCLIC_RULES),
    ),
    "characters": (
        Case("pydoc", "language_model", None, 16, 1.0, {"steps": 640}),
        RULES,
    ),
    "cifar10-jpeg": (
        Case(
            "cifar10-jpeg/",
            "image",
            None,
            20,
            1.0,
            {"steps": 1600},
            title="CIFAR-10 copies",
        ),
        RULES,
    ),
}


def _under(task: str, rule: str) -> Case:
    """Return a task under a rule of the learning rate."""
    case, _ = TASKS[task]
    fields = {"lr_rule": rule}
    if rule not in CYCLIC_RULES:
        fields = case.recipe.decay_fields(rule)
    title = f"{case.title or task}, {rule.replace('_', ' ')}"
    return replace(case, changes=case.changes | fields, title=title)


def case_name(task: str, rule: str) -> str:
    """Return the key of a task under a rule in ``CASES``."""
    return f"{task}/{rule}"


CASES = {
    case_name(task, rule): _under(task, rule)
    for task, (_, rules) in TASKS.items()
    for rule in rules
}


@cache
def _schedules(steps: int) -> dict[str, Schedule]:
    """Return the schedules of equal cost: the first four have static bits, or 3 and 6 bits at different times."""
    low, middle, high = (_step_cost(q) for q in (LOW_BITS, STATIC_BITS, HIGH_BITS))
    num_high = round(steps * (middle - low) / (high - low))
    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        cyclic = solve_schedule(
            middle / _step_cost(Q_MAX), LOW_BITS, Q_MAX, steps, 2, "cosine"
        )
    return {
        STATIC: StaticSchedule(STATIC_BITS, steps),
        RISING: TableSchedule(((LOW_BITS, steps - num_high), (HIGH_BITS, num_high))),
        FALLING: TableSchedule(((HIGH_BITS, num_high), (LOW_BITS, steps - num_high))),
        EVEN: _spread(num_high, steps),
        CYCLIC: cyclic,
    }


def _step_cost(bits: int) -> int:
    """Return the BitOps of a step with gradients of ``Q_MAX`` bits, in units of one multiplication of each matmul."""
    return bits * bits + 2 * bits * Q_MAX


def _spread(num_high: int, steps: int) -> TableSchedule:
    """Return the schedule whose steps of ``HIGH_BITS`` are spread evenly."""
    counts = np.arange(steps + 1) * num_high // steps
    bits = np.where(np.diff(counts) > 0, HIGH_BITS, LOW_BITS).tolist()
    runs = [(q, len(list(group))) for q, group in itertools.groupby(bits)]
    return TableSchedule(tuple(runs))


def arms(case: Case) -> dict[str, tuple[Schedule, int | None]]:
    """Return (forward bits, gradient bits) of every arm."""
    steps = case.recipe.steps
    schedules = _schedules(steps) | {FULL_BITS_ARM: StaticSchedule(Q_MAX, steps)}
    return {arm: (schedule, Q_MAX) for arm, schedule in schedules.items()}


STUDY = TunedStudy(
    "h11",
    "orders of the same bits under rules of the learning rate",
    CASES,
    arms,
    tuning_seeds=range(50, 53),
    first_seed=500,
    rate_factors=tuple(2 ** (k / 2) for k in range(-2, 4)),
    extends_rates=True,
)


GRIDS = STUDY.grids(
    {
        task: [case_name(task, rule) for rule in rules]
        for task, (_, rules) in TASKS.items()
    }
)
