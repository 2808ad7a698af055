"""Runs of H6 in ``docs/preregistration.md``: the paper's schedules on ladders of other number formats.  No torch.

>>> len(on_ladders("digits"))
248
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from cpt_core.schedules.deficit import DeficitSchedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_core.validation import check_choice
from cpt_extras.formats.ladder import LADDERS
from cpt_lab.experiments.spec import RunSpec, run_spec
from cpt_lab.studies.case import FACEBOOK, Case
from cpt_lab.studies.h5.arms import SWITCH_TIME

LATE = "low then high"
LADDER_NAMES = ("minifloat", "mx")
CASES = {
    "digits": Case("digits", "image", margin=1.0),
    "facebook": Case(FACEBOOK, "graph", margin=0.2, changes={"steps": 64}),
    "characters": Case(
        "pydoc",
        "language_model",
        margin=2.0,
        changes={"steps": 160, "lr_rule": "cosine"},
    ),
}


def on_ladders(
    case: str = "digits", seeds: Sequence[int] | None = None
) -> list[RunSpec]:
    """Return the runs of a task of H6: on each ladder the suite's ten, one late rise, and every format alone."""
    task = CASES[check_choice("case", case, CASES)]
    seeds = range(100, 100 + task.seeds) if seeds is None else seeds
    specs = []
    for name in LADDER_NAMES:
        levels = LADDERS[name].levels
        low, high = levels[0], levels[-1]
        recipe = replace(task.recipe, ladder=name, q_min=low)
        steps = recipe.steps
        late = DeficitSchedule(low, high, ((0, round(SWITCH_TIME * steps)),), steps)
        arms = [*SUITE, *(f"static {level}" for level in levels)]
        for seed in seeds:
            # REX rises late: in 64 steps it ends one level below the highest.
            with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
                for arm in arms:
                    specs.append(run_spec(recipe, arm, q_max=high, seed=seed))
            specs.append(RunSpec(recipe, late, high, high, seed, LATE, "demo"))
    return specs


GRIDS = {
    f"h6/{case}": (
        partial(on_ladders, case),
        f"schedules and static formats on two ladders, {case}",
    )
    for case in CASES
}
