"""Runs of H12 in ``docs/preregistration.md``: a deficit early, in the middle or late.  No torch.

In one design training goes on equally long after every deficit, in the other, the paper's, all trainings are equally
long. Every deficit has a control: the same training without it.

>>> windows("gcn")[:3]
[(48, (0, 16)), (64, (16, 32)), (80, (32, 48))]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from cpt_core.schedules.deficit import DeficitSchedule
from cpt_core.validation import check_choice
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.studies import tuned
from cpt_lab.studies.h11 import arms as h11

FIRST_SEED = 600


@dataclass(frozen=True)
class Design:
    """Deficits of a task.

    Attributes:
        q_min: bits in a deficit.
        window: steps of a deficit.
        starts: first steps of the deficits of equal recovery.
        recovery: steps after each of these.
        fixed_steps: length of all trainings of the paper's design.
        fixed_starts: first steps of its deficits.
    """

    q_min: int
    window: int
    starts: tuple[int, int, int]
    recovery: int
    fixed_steps: int
    fixed_starts: tuple[int, int, int]


DESIGNS = {
    "digits": Design(3, 150, (0, 150, 300), 300, 600, (0, 225, 450)),
    "gcn": Design(2, 16, (0, 16, 32), 32, 64, (0, 24, 48)),
}


def windows(task: str) -> list[tuple[int, tuple[int, int]]]:
    """Return (length of the training, deficit) of equal recovery, and then of the paper's design."""
    d = DESIGNS[check_choice("task", task, DESIGNS)]
    equal = [(start + d.window + d.recovery, start) for start in d.starts]
    fixed = [(d.fixed_steps, start) for start in d.fixed_starts]
    return [(steps, (start, start + d.window)) for steps, start in (*equal, *fixed)]


def arm_name(steps: int, window: tuple[int, int] | None, rule: str) -> str:
    """Return the name of a training of ``steps`` steps with a deficit, or None, under a rule of the learning rate."""
    deficit = "no deficit" if window is None else f"[{window[0]}, {window[1]})"
    return f"{deficit} of {steps}, {rule}"


def runs(task: str = "digits", seeds: Sequence[int] | None = None) -> list[RunSpec]:
    """Return the runs of a task: deficits and controls under every rule, at the learning rate of static 8 bits in H11.

    Raises:
        NotMeasuredError: if rows that choose the rates of H11 are missing.
    """
    case, design = h11.TASKS[task][0], DESIGNS[task]
    if seeds is None:
        seeds = range(FIRST_SEED, FIRST_SEED + case.seeds)
    specs = []
    for rule in h11.RULES:
        name = h11.case_name(task, rule)
        factor, _ = tuned.settings(h11.STUDY, name)[tuned.FULL_BITS_ARM]
        recipe = h11.CASES[name].recipe
        trainings: dict[str, DeficitSchedule] = {}
        for steps, window in windows(task):
            for deficits in ((), (window,)):
                schedule = DeficitSchedule(design.q_min, h11.Q_MAX, deficits, steps)
                arm = arm_name(steps, window if deficits else None, rule)
                trainings[arm] = schedule
        for arm, schedule in trainings.items():
            r = replace(recipe, lr=factor * recipe.lr, steps=schedule.total_steps)
            specs += [
                RunSpec(r, schedule, h11.Q_MAX, h11.Q_MAX, seed, arm, "demo")
                for seed in seeds
            ]
    return specs


def num_runs(task: str) -> int:
    """Return the number of runs of a task, which does not depend on the learning rates."""
    trainings = {steps for steps, _ in windows(task)} | set(windows(task))
    return len(trainings) * len(h11.RULES) * h11.TASKS[task][0].seeds


GRIDS = {
    f"h12/{task}": (
        partial(runs, task),
        f"deficits at three dates under three rules, {task}",
    )
    for task in DESIGNS
}
