"""Runs of H10 in ``docs/preregistration.md``: matmuls that switch to 8 bits, and the time of the switch.  No torch.

Bits are forward/gradient bits; every arm but "4/4", "5/4" and "8/8" costs a third of "8/8".

>>> [round(s.relative_cost(g, 8), 3) for s, g in arms(CASES["digits"]).values()]
[0.25, 0.333, 0.339, 0.333, 0.333, 0.333, 0.334, 1.0]
"""

import itertools

from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_extras.formats.ladder import LADDERS
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.role_schedules import RoleSchedules
from cpt_lab.studies.case import Case
from cpt_lab.studies.tuned import FULL_BITS_ARM, TunedStudy

LATE_DIVISOR = 5  # the last fifth: the learning rate falls by ten at its start, and again in its middle
DECAY_MILESTONES, STEP_DECAY = {"milestones": (0.8, 0.9)}, {"lr_rule": "step"}
CASES = {
    "characters": Case(
        "pydoc", "language_model", None, 16, 1.0, STEP_DECAY | {"steps": 640}
    ),
    "digits": Case("digits", "image", None, 40, 1.0, DECAY_MILESTONES),
    "cifar10-jpeg": Case(
        "cifar10-jpeg/",
        "image",
        None,
        20,
        1.0,
        DECAY_MILESTONES,
        title="CIFAR-10 copies",
    ),
    "ptb": Case(
        "ptb",
        "language_model",
        None,
        10,
        1.0,
        STEP_DECAY | {"steps": 300},
        title="Penn Treebank, small",
    ),
    "digits-mx": Case(
        "digits",
        "image",
        None,
        24,
        1.0,
        DECAY_MILESTONES | {"ladder": "mx", "q_min": 1},
        3,
        "digits, MX formats",
    ),
}
STATIC, LATE = ("4/6", "5/4"), "forward late"


def arms(case: Case) -> dict[str, tuple[Schedule, int | None]]:
    """Return (forward bits or bits of every role, gradient bits) of every arm.

    "forward late" has 8 forward bits in the last fifth; "forward spread" in every fifth step; "gradients late" has 8
    gradient bits in the last half, "both late" 8 bits of both in the last ninth, at equal cost.
    """
    steps, level = case.recipe.steps, {4: 4, 5: 5, 6: 6, 8: 8}
    if case.recipe.ladder == "mx":
        level = {LADDERS["mx"].bits(n): n for n in (1, 2, 3)}
    low, high = level[4], level[8]

    def late(share: int) -> TableSchedule:
        last = round(steps / share)
        return TableSchedule(((low, steps - last), (high, last)))

    def static(bits: int) -> StaticSchedule:
        return StaticSchedule(level[bits], steps)

    repeated_cycles = itertools.repeat(
        ((low, LATE_DIVISOR - 1), (high, 1)), steps // LATE_DIVISOR
    )
    return {
        **{
            f"{q}/{g}": (static(q), level[g])
            for q, g in ((4, 4), (4, 6), (5, 4))
            if {q, g} <= set(level)
        },
        LATE: (late(LATE_DIVISOR), low),
        "forward spread": (
            TableSchedule(tuple(itertools.chain(*repeated_cycles))),
            low,
        ),
        "gradients late": (
            RoleSchedules(weight=static(4), activation=static(4), gradient=late(2)),
            None,
        ),
        "both late": (
            RoleSchedules(weight=late(9), activation=late(9), gradient=late(9)),
            None,
        ),
        FULL_BITS_ARM: (static(8), high),
    }


STUDY = TunedStudy(
    "h10",
    "which matmuls switch to 8 bits, and when",
    CASES,
    arms,
    tuning_seeds=range(50, 52),
    first_seed=400,
)
GRIDS = STUDY.grids()

EXTENDED_STUDY = STUDY.with_extended_rates()
EXTENDED_GRIDS = EXTENDED_STUDY.grids()
