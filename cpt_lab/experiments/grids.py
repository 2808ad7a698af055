"""Which runs a figure of the paper needs: a function per kind of artefact, a name per grid.  Needs no torch.

>>> len(grid_specs("cifar10/resnet74"))
66
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from cpt_core.checks import offer
from cpt_core.schedules.profiles import savings_of
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_lab.experiments import designs
from cpt_lab.experiments.recipe import SCALES, Dataset, Recipe
from cpt_lab.experiments.recipes import DATASETS, EXPERIMENTS
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.experiments.stand_ins import STAND_INS


@dataclass(frozen=True)
class Grid:
    """A named list of runs: one panel of a figure, or one part of a table."""

    artefact: str  # of the paper, such as "figure_3"
    about: str  # what it is, and how many runs the paper has
    make: Callable[..., list[RunSpec]]  # (scale, **choices) -> specs
    scales: tuple[str, ...]  # at which it exists, the one to take first


DESIGNS: dict[str, tuple[Callable[..., list[RunSpec]], str]] = {  # beside quality against cost
    "aggregation": (designs.aggregation, "FP-Agg and Q-Agg at static 8 bits"),
    "q_agg": (designs.q_agg, "quality against cost with Q-Agg"),
    "fanout": (designs.fanout, "8 to 64 sampled neighbours at static 8 bits, with FP-Agg and Q-Agg"),
    "cycles": (designs.cycles, "one and two cycles"),
    "deficit_length": (designs.deficit_length, "deficits at the start, with controls"),
    "deficit_window": (designs.deficit_window, "windows of low precision, with controls"),
    "equal_cost": (designs.equal_cost, "RR, delayed RR, ER and static precisions at one cost; not in the paper"),
}


def _make(function: Callable[..., list[RunSpec]], dataset: str, model: str) -> Callable[..., list[RunSpec]]:
    """Fill in data set and model of a design. Its settings are given: that some cycles are short is no news."""

    return _without_warnings(lambda scale, **choices: function(scale, dataset, model, **choices))


def _without_warnings(function: Callable[..., list[RunSpec]]) -> Callable[..., list[RunSpec]]:
    """Return a design that does not warn of short cycles."""

    def make(scale: str, **choices: Any) -> list[RunSpec]:
        with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
            return function(scale, **choices)

    return make


def _quality_cost_grids() -> Iterator[tuple[str, Grid]]:
    """One grid for every data set and model that has a recipe, with the scales it has."""
    for experiment in EXPERIMENTS.values():
        for d in experiment.named.values():
            for model, recipes in _models(d).items():
                largest, *_ = recipes.values()
                runs = "66 runs: 10 schedules + static, q_max 6 and 8, 3 seeds" if "paper" in recipes else "small scale"
                if rates := len(getattr(largest, "learning_rates", ())):
                    runs += f", each at {rates} learning rates: {66 * rates} in all"
                about, make = f"{d.about}, {model}; {runs}", _make(designs.quality_cost, d.name, model)
                yield f"{d.name}/{model}", Grid(experiment.artefact, about, make, tuple(recipes))


def _models(d: Dataset) -> dict[str, dict[str, Recipe]]:
    """Return the models of a data set with their recipes by scale, the largest scale first."""
    found: dict[str, dict[str, Recipe]] = {}
    for scale in reversed(SCALES):
        for r in d.recipes.get(scale, ()):
            found.setdefault(r.model, {})[scale] = r
    return found


def _design_grids() -> Iterator[tuple[str, Grid]]:
    """One grid for every further design of a data set, with its first model."""
    for d in DATASETS.values():
        for design, artefact in d.designs.items():
            function, what = DESIGNS[design]
            model, recipes = next(iter(_models(d).items()))
            make = _make(function, d.name, model)
            yield f"{d.name}/{design}", Grid(artefact, f"{d.about}, {model}: {what}", make, tuple(recipes))


def _stand_in_grids() -> Iterator[tuple[str, Grid]]:
    """Yield the grids on stand-in data, with the first line of their function as description."""
    for name, (function, artefact, scale) in STAND_INS.items():
        about = (function.__doc__ or "").splitlines()[0].removeprefix("Return the runs of ").rstrip(".")
        yield name, Grid(artefact, about, _without_warnings(function), (scale,))


# Every figure and table of the paper that rests on training runs; table 1 and figure 8 as in their captions.
# Those of the paper come first.
GRIDS: dict[str, Grid] = dict(
    sorted(
        [*_quality_cost_grids(), *_design_grids(), *_stand_in_grids()], key=lambda named: "paper" not in named[1].scales
    )
)

STUDIES = ("h1_to_h4", "h5", "h6", "h7", "h10")  # folders of ``cpt_lab.studies``, opened by name: nothing imports them


def studies(part: str) -> list[ModuleType]:
    """Return a part of every study: "arms" or "outcome"; ``cpt_lab.studies`` says what they have."""
    return [import_module(f"cpt_lab.studies.{name}.{part}") for name in STUDIES]


def _question(name: str, make: Callable[..., list[RunSpec]], about: str) -> Grid:
    question = name.split("/")[0]
    return Grid(question, f"preregistration, {question.upper()}: {about}", lambda scale, **c: make(**c), ("demo",))


# Models of digits, characters and synthetic sentence pairs whose products are computed in several ways.
_EXECUTED = {"mlp6": "digits", "resnet8_w8": "digits", "lstm": "pydoc", "bert_small": "templates"}
_WAYS = "CR simulated and on codes, with the paper's steps and shared ones, ten seeds"

# Questions beyond the paper, those of docs/preregistration.md and how products are computed; a name or "h1" finds them.
# Their runs are pooled with no others.
QUESTIONS: dict[str, Grid] = {
    **{name: _question(name, *asked) for study in studies("arms") for name, asked in study.GRIDS.items()},
    **{
        f"execution/{model}": Grid("execution", f"{d}, {model}: {_WAYS}", _make(designs.execution, d, model), ("demo",))
        for model, d in _EXECUTED.items()
    },
}


def find_grids(name: str | None = None) -> dict[str, Grid]:
    """Return the grids of a name or of an artefact such as "figure_3" or "h1"; of no name all, the paper's first."""
    known = {**GRIDS, **QUESTIONS}
    found = {key: grid for key, grid in known.items() if name in (None, key, grid.artefact)}
    if not found:
        names = [*known, *sorted({grid.artefact for grid in known.values()})]
        raise ValueError(f"no grid {name!r}; {offer(name, names)}; `plan` lists them all")
    return found


def grid_specs(name: str, scale: str | None = None, seeds: Sequence[int] | None = None) -> list[RunSpec]:
    """Return the runs of one grid; ValueError says what there is instead of an unknown grid or scale."""
    if (grid := {**GRIDS, **QUESTIONS}.get(name)) is None:
        find_grids(name)  # names what there is, unless it is an artefact
        raise ValueError(f"{name!r} is several grids; choose one of {', '.join(find_grids(name))}")
    if scale is not None and scale not in grid.scales:
        raise ValueError(f"grid {name!r} has no scale {scale!r}; {offer(scale, grid.scales)}")
    return grid.make(scale or grid.scales[0], **({} if seeds is None else {"seeds": seeds}))


FILTERS: dict[str, Callable[[RunSpec], str]] = {
    "schedule": lambda spec: spec.arm,
    "savings": lambda spec: savings_of(spec.arm),
    "q_max": lambda spec: str(spec.q_max),
}


def keep(specs: Sequence[RunSpec], only: Sequence[str]) -> list[RunSpec]:
    """Keep the runs that meet every condition, such as "schedule=CR,RR" or "q_max=8"; ValueError names what there is.

    >>> len(keep(designs.quality_cost("demo"), ["schedule=CR,RR"]))
    10
    """
    kept = list(specs)
    for condition in only:
        name, _, text = condition.partition("=")
        if name not in FILTERS or not text:
            raise ValueError(f"--only takes NAME=VALUE with {', '.join(FILTERS)}; got {condition!r}")
        wanted = [value.strip() for value in text.split(",")]
        there = {FILTERS[name](spec): None for spec in specs}
        unknown = [value for value in wanted if value not in there]
        if unknown:
            raise ValueError(f"no {name} {unknown[0]!r} in this grid; {offer(unknown[0], list(there))}")
        kept = [spec for spec in kept if FILTERS[name](spec) in wanted]
    if not kept:
        raise ValueError(f"no run meets {' and '.join(only)}")
    return kept
