"""Runs of H13 in ``docs/preregistration.md``: matmuls that switch from four bits to MXFP8 late.  No torch.

A case is a task in a format of four bits, such as "llama/nvfp4". In a recipe both operands of a matmul have one format,
so what an arm costs more than "4/4" is its share of matmuls in MXFP8, whatever the price of MXFP8: a fifteenth in four
arms. The LSTM has no recipe. Its backward matmuls multiply a gradient by an operand of the forward pass, of another
format in these arms, so that costs are equal in bit operations alone.

>>> case = CASES["llama/nvfp4"]
>>> for arm, (schedule, q_grad) in arms(case).items():
...     print(arm, round(schedule.relative_cost(q_grad, 8, ladder=case.recipe.formats), 3))
4/4 0.25
forward late 0.3
gradients late 0.3
both late 0.3
forward spread 0.3
last layers wide 0.25
8/8 1.0
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.role_schedules import RoleSchedules
from cpt_lab.experiments.schema import RECIPE_LADDER
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.studies.case import Case
from cpt_lab.studies.tuned import TunedStudy

LOW, HIGH = 4, 8  # levels: four bits and MXFP8
STATIC, FORWARD, GRADIENTS, BOTH = "4/4", "forward late", "gradients late", "both late"
SPREAD, WIDE, FULL = "forward spread", "last layers wide", "8/8"
FP4_FORMATS, INTEGER_FORMATS = ("nvfp4", "mxfp4"), ("int4",)
FORMATS = FP4_FORMATS + INTEGER_FORMATS
FORWARD_DIVISOR = 5  # the last fifth of the steps, in which the learning rate decays
# the parts of the steps at the end in which gradients, or all operands, are in MXFP8: with a recipe, without
GRADIENT_DIVISORS, BOTH_DIVISORS = (10, 2), (15, 9)
WIDE_SHARE = 0.15  # of the linear layers, as in NVIDIA's recipe

WSD = {"lr_rule": "wsd", "q_min": LOW, "steps": 300}
TRANSFORMER = WSD | {"optimizer": "adamw", "weight_decay": 0.1, "clip": 1.0}
LLAMA = TRANSFORMER | {
    "model": "llama",
    "hidden": 128,
    "layers": 4,
    "length": 64,
    "batch": 8,
    "lr": 0.003,
    "steps": 240,
}
VIT = TRANSFORMER | {"model": "vit", "batch": 32, "lr": 0.0005}
# task -> the arguments of its case, and what the name of a ladder begins with: transformers are quantised by recipes,
# an LSTM, for which recipes have no rules, rounds every tensor once
TASKS: dict[str, tuple[tuple[str, str], Mapping[str, Any], str, str]] = {
    "llama": (("pydoc", "language_model"), LLAMA, RECIPE_LADDER, "Llama, characters"),
    "vit": (("cifar10-jpeg/", "image"), VIT, RECIPE_LADDER, "ViT, CIFAR-10 copies"),
    "lstm": (("ptb", "language_model"), WSD, "", "LSTM, small Penn Treebank"),
}


def case_name(task: str, format: str) -> str:
    """Return the key of a task in a format of four bits in ``CASES``."""
    return f"{task}/{format}"


def _case(task: str, format: str) -> Case:
    (dataset, kind), changes, prefix, title = TASKS[task]
    ladder = {"ladder": f"{prefix}{format}"}
    title = f"{title}, {format}"
    return Case(dataset, kind, None, 12, 1.0, {**changes, **ladder}, HIGH, title)


CASES = {
    case_name(task, format): _case(task, format) for task in TASKS for format in FORMATS
}


def arms(case: Case) -> dict[str, tuple[Schedule, int | None]]:
    """Return (forward levels or levels of every role, gradient level) of every arm.

    The forward matmuls are in MXFP8 in the last fifth of the steps ("forward late") or in every fifth step ("forward
    spread"); both backward matmuls in the last tenth ("gradients late"); all in the last fifteenth ("both late").
    For the LSTM, gradients are in MXFP8 in the last half, and all operands in the last ninth, as in H10.
    """
    steps = case.recipe.steps
    has_recipe = case.recipe.ladder.startswith(RECIPE_LADDER)

    def late(divisor: int) -> TableSchedule:
        last = round(steps / divisor)
        return TableSchedule(((LOW, steps - last), (HIGH, last)))

    static = StaticSchedule(LOW, steps)
    every_fifth = itertools.repeat(
        ((LOW, FORWARD_DIVISOR - 1), (HIGH, 1)), steps // FORWARD_DIVISOR
    )
    spread = TableSchedule(tuple(itertools.chain(*every_fifth)))
    gradient, both = (
        late(divisors[0 if has_recipe else 1])
        for divisors in (GRADIENT_DIVISORS, BOTH_DIVISORS)
    )
    gradients = RoleSchedules(weight=static, activation=static, gradient=gradient)
    schedules: dict[str, tuple[Schedule, int | None]] = {
        STATIC: (static, LOW),
        FORWARD: (late(FORWARD_DIVISOR), LOW),
        GRADIENTS: (gradients, None),
        BOTH: (RoleSchedules(both, both, both), None),
        SPREAD: (spread, LOW),
    }
    if has_recipe:
        schedules[WIDE] = static, LOW
    return schedules | {FULL: (StaticSchedule(HIGH, steps), HIGH)}


def changes(case: Case, arm: str) -> Mapping[str, Any]:
    """Return the fields of a case's recipe that an arm changes.

    All formats have the same MXFP8: its runs are those of the first format.
    """
    if arm == WIDE:
        return {"wide_share": WIDE_SHARE}
    if arm == FULL:
        prefix = RECIPE_LADDER if case.recipe.ladder.startswith(RECIPE_LADDER) else ""
        return {"ladder": f"{prefix}{FORMATS[0]}"}
    return {}


STUDY = TunedStudy(
    "h13",
    "which matmuls switch from four bits to MXFP8, and when",
    CASES,
    arms,
    tuning_seeds=range(50, 52),
    first_seed=700,
    rate_factors=(0.25, 0.5, 1.0, 2.0),
    extends_rates=True,
    changes=changes,
)


def _of_task(
    make: Callable[..., list[RunSpec]], task: str, seeds: Sequence[int] | None = None
) -> list[RunSpec]:
    """Return the runs of a task in all formats; runs that formats share come once."""
    specs: dict[str, RunSpec] = {}
    for format in FORMATS:
        for spec in make(case_name(task, format), seeds=seeds):
            specs.setdefault(spec.key, spec)
    return list(specs.values())


GRIDS = {}
for _task in TASKS:
    _title = f"learning rates of every arm of H13, {_task}"
    GRIDS[f"h13-rates/{_task}"] = (partial(_of_task, STUDY.rates, _task), _title)
for _task in TASKS:
    _title = f"{STUDY.description}, {_task}"
    GRIDS[f"h13/{_task}"] = (partial(_of_task, STUDY.runs, _task), _title)
