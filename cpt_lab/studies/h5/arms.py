"""The runs of H5 in ``docs/preregistration.md``: bits where they matter against static ones of equal cost.  No torch.

The schedules are made from sensitivities measured before, on other seeds, and kept in ``data/results``; the same file
gives the same runs.

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

FILE = "sensitivity.json"  # under data/results, written by ``python -m bench.sensitivities``
Q_MAX = 8
SWITCH = 0.45  # of the training: a twentieth before the learning rate falls first (steps), or is half (cosine)
STATIC, LATE = "static", "low then high"


@dataclass(frozen=True, kw_only=True)
class MeasuredCase(Case):
    """A task of H5; its seeds are from 100 on."""

    # static precision at whose cost all arms are. Sensitivities are measured with one bit less than that, and nothing
    # runs lower than what was measured
    bits: int
    measured: int  # how many seeds the sensitivities have, from 50 on

    @property
    def recipe(self) -> Recipe:
        """What is trained; its schedules have no cycles."""
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
    """Return the runs of a task of H5: every way to spend one BitOps budget, and static 8 in full beside them.

    Static precision; bits allocated over time, over layers, over both; and one step lower than static until shortly
    before the learning rate falls, then as high as the budget allows.

    No seeds take those of the preregistration.

    Raises:
        NotMeasuredError: when no sensitivity is stored.
    """
    c = CASES[check_choice("case", case, CASES)]
    r, s = c.recipe, stored_sensitivity(case)
    arms: dict[str, Schedule] = {STATIC: StaticSchedule(c.bits, r.steps)}
    arms |= {
        f"over {over}": allocate(s, c.budget, r.q_min, Q_MAX, over, total_steps=r.steps)
        for over in OVER
    }
    arms[LATE] = low_then_high(c.bits, r.steps)
    named = {f"{arm} at {c.budget:.3f}": schedule for arm, schedule in arms.items()}
    named[f"static {Q_MAX}"] = StaticSchedule(Q_MAX, r.steps)
    return [
        RunSpec(r, schedule, Q_MAX, Q_MAX, seed, arm, "demo")
        for arm, schedule in named.items()
        for seed in (range(100, 100 + c.seeds) if seeds is None else seeds)
    ]


def low_then_high(static: int, total_steps: int) -> TableSchedule:
    """Return the schedule that is one bit below static until ``SWITCH``, and spends what is left evenly after it."""
    low, first = static - 1, round(SWITCH * total_steps)
    left = cost.relative_cost(
        [static], Q_MAX
    ) * total_steps - first * cost.relative_cost([low], Q_MAX)
    high = static_of_cost(
        min(1.0, left / (total_steps - first)), Q_MAX, total_steps - first
    )
    runs = (
        high.runs
        if isinstance(high, TableSchedule)
        else ((high.q_max, total_steps - first),)
    )
    return TableSchedule(((low, first), *runs))


@cache
def stored_sensitivity(case: str) -> Sensitivity:
    """Return the stored sensitivity of a case; NotMeasuredError says how it is measured when there is none."""
    path = results_dir() / FILE
    held = (
        json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else {}
    )
    if case not in held:
        raise NotMeasuredError(
            f"{path} has no sensitivity of {case!r}; measure it: python -m bench.sensitivities --only {case}"
        )
    return Sensitivity.from_dict(held[case])


# name of a grid -> what makes its runs, what they are
GRIDS: dict[str, tuple[Callable[..., list[RunSpec]], str]] = {
    f"h5/{name}": (
        partial(allocated, name),
        f"bits allocated by sensitivity against static precision, {name}",
    )
    for name in CASES
}
