"""Runs of H13 in ``docs/preregistration.md``: matmuls that switch from four bits to MXFP8 late.  No torch.

A case is a task in a recipe of four bits, such as "llama/nvfp4". Both operands of a matmul have one format, so what an
arm costs more than "4/4" is its share of matmuls in MXFP8, at any price per multiply-accumulate. It is a fifteenth in
``EQUAL_COST_ARMS``, where all matmuls have one size.

>>> case = CASES["llama/nvfp4"]
>>> for arm in ("4/4", *EQUAL_COST_ARMS, "8/8"):
...     schedule, q_grad = arms(case)[arm]
...     print(arm, round(schedule.relative_cost(q_grad, 8, ladder=case.recipe.formats), 3))
4/4 0.25
forward late 0.3
input gradient late 0.3
weight gradient late 0.3
all late 0.3
forward spread 0.3
8/8 1.0
"""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.role_schedules import RoleSchedules
from cpt_lab.experiments.schema import EIGHT_BITS, RECIPE_LADDER
from cpt_lab.studies.case import Case
from cpt_lab.studies.tuned import FULL_BITS_ARM, TunedStudy

LOW, HIGH = 4, 8  # levels: four bits and MXFP8
STATIC_ARM, WIDE_ARM = "4/4", "last layers wide"
FORWARD_ARM, ALL_ARM, SPREAD_ARM = "forward late", "all late", "forward spread"
INPUT_GRADIENT_ARM, WEIGHT_GRADIENT_ARM = "input gradient late", "weight gradient late"
EQUAL_COST_ARMS = (
    FORWARD_ARM,
    INPUT_GRADIENT_ARM,
    WEIGHT_GRADIENT_ARM,
    ALL_ARM,
    SPREAD_ARM,
)
NVFP4, MXFP4, INT4 = "nvfp4", "mxfp4", "int4"  # keys of ``cpt.recipes``
LOW_BIT_RECIPES = (NVFP4, MXFP4, INT4)
DECAY_DIVISOR = 5  # the learning rate decays in the last fifth of the steps
NUM_MATMULS = 3  # of a linear layer in a step, all of one size
WIDE_SHARE = 0.15  # of the linear layers, in NVIDIA's recipe
MODELS_WITH_WIDE_LAYERS = ("llama", "vit")  # in the MLP it is the last layer alone

TRAINING = {
    "optimizer": "adamw",
    "weight_decay": 0.1,
    "clip": 1.0,
    "lr_rule": "wsd",
    "q_min": LOW,
    "steps": 450,
}
LLAMA = TRAINING | {
    "model": "llama",
    "hidden": 64,
    "layers": 2,
    "length": 32,
    "batch": 8,
    "lr": 0.003,
}
DIGITS = TRAINING | {"lr": 0.002, "train_images": 896}  # a multiple of both batches
VIT = DIGITS | {"model": "vit", "batch": 32}
MLP = DIGITS | {"model": "mlp4", "batch": 64}


class TaskSettings(NamedTuple):
    """A task without its low-bit recipe: data set, kind of task, changed fields of its demo recipe, printed name."""

    dataset: str
    kind: str
    changes: Mapping[str, Any]
    title: str


TASKS = {
    "llama": TaskSettings("pydoc", "language_model", LLAMA, "Llama, characters"),
    "vit": TaskSettings("digits", "image", VIT, "ViT, digits"),
    "mlp": TaskSettings("digits", "image", MLP, "MLP, digits"),
}


def case_name(task: str, recipe: str) -> str:
    """Return the key of a task in a low-bit recipe in ``CASES``."""
    return f"{task}/{recipe}"


def _case(task: str, recipe: str) -> Case:
    settings = TASKS[task]
    return Case(
        settings.dataset,
        settings.kind,
        seeds=16,
        margin=1.0,
        changes={**settings.changes, "ladder": f"{RECIPE_LADDER}{recipe}"},
        q_max=HIGH,
        title=f"{settings.title}, {recipe}",
    )


CASES = {
    case_name(task, recipe): _case(task, recipe)
    for task in TASKS
    for recipe in LOW_BIT_RECIPES
}


def _late_switch(steps: int, divisor: int) -> TableSchedule:
    """Return the schedule with MXFP8 in the last ``1 / divisor`` of the steps."""
    num_high, rest = divmod(steps, divisor)
    if rest:
        raise ValueError(f"steps: expected a multiple of {divisor}, got {steps}")
    return TableSchedule(((LOW, steps - num_high), (HIGH, num_high)))


def arms(case: Case) -> dict[str, tuple[Schedule, int | None]]:
    """Return (forward levels or levels of every role, gradient level) of every arm.

    One of the three matmuls of a layer is in MXFP8 in the last fifth of the steps ("forward late", "input gradient
    late", "weight gradient late"), the forward matmul in every fifth step ("forward spread"), or all three are in the
    last fifteenth ("all late").
    """
    steps = case.recipe.steps
    static = StaticSchedule(LOW, steps)
    late = _late_switch(steps, DECAY_DIVISOR)
    all_late = _late_switch(steps, NUM_MATMULS * DECAY_DIVISOR)
    every_fifth = itertools.repeat(
        ((LOW, DECAY_DIVISOR - 1), (HIGH, 1)), steps // DECAY_DIVISOR
    )
    by_role = partial(RoleSchedules, weight=static, activation=static)
    schedules: dict[str, tuple[Schedule, int | None]] = {
        STATIC_ARM: (static, LOW),
        FORWARD_ARM: (late, LOW),
        INPUT_GRADIENT_ARM: (by_role(error=late, weight_gradient=static), None),
        WEIGHT_GRADIENT_ARM: (by_role(error=static, weight_gradient=late), None),
        ALL_ARM: (RoleSchedules(all_late, all_late, all_late), None),
        SPREAD_ARM: (TableSchedule(tuple(itertools.chain(*every_fifth))), LOW),
    }
    is_nvfp4 = case.recipe.ladder == f"{RECIPE_LADDER}{NVFP4}"
    if is_nvfp4 and case.recipe.model in MODELS_WITH_WIDE_LAYERS:
        schedules[WIDE_ARM] = static, LOW
    return schedules | {FULL_BITS_ARM: (StaticSchedule(HIGH, steps), HIGH)}


def changes(case: Case, arm: str) -> Mapping[str, Any]:
    """Return the fields of a case's recipe that an arm changes.

    All recipes have the same MXFP8: its runs are those of ``nvfp4``.
    """
    if arm == WIDE_ARM:
        return {"wide_share": WIDE_SHARE}
    return {"ladder": f"{RECIPE_LADDER}{NVFP4}"} if arm == FULL_BITS_ARM else {}


def tuned_as(arm: str) -> str:
    """Return the arm whose learning rate an arm takes: up to its switch, a late arm is the training of 4/4."""
    return arm if arm == FULL_BITS_ARM else STATIC_ARM


STUDY = TunedStudy(
    "h13",
    "which matmuls switch from four bits to MXFP8, and when",
    CASES,
    arms,
    tuning_seeds=range(60, 66),
    first_seed=700,
    rate_factors=(0.25, 0.5, 1.0, 2.0),
    extends_rates=True,
    changes=changes,
    tuned_as=tuned_as,
    evaluations=(EIGHT_BITS,),
)


GRIDS = STUDY.grids(
    {task: [case_name(task, recipe) for recipe in LOW_BIT_RECIPES] for task in TASKS}
)
