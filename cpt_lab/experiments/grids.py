"""Which runs a figure of the paper needs: a function per kind of artefact, a name per grid.  Needs no torch.

>>> len(grid_specs("cifar10/resnet74"))
66
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_core.validation import suggest_names
from cpt_lab.experiments import designs
from cpt_lab.experiments.parameters import checked
from cpt_lab.experiments.registry import DATASETS, EXPERIMENTS, task_of_dataset
from cpt_lab.experiments.schema import SCALES, Dataset, Recipe
from cpt_lab.experiments.spec import RunSpec, savings_of
from cpt_lab.experiments.stand_ins import STAND_INS


@dataclass(frozen=True)
class Grid:
    """A named list of runs: one panel of a figure, or one part of a table."""

    artefact: str  # of the paper, such as "figure_3"
    about: str  # what it is, and how many runs the paper has
    make: Callable[..., list[RunSpec]]  # (scale, **choices) -> specs
    scales: tuple[str, ...]  # at which it exists, the one to take first
    choices: tuple[str, ...] = (
        "seeds",
    )  # the parameters that may be given other values


_OF_ALL = ("dataset", "model", "steps", "learning_rate", "q_max", "seeds")
_OF_FIGURES = ("preset", "schedules", "static_bits", "q_min", "q_grad", "n_cycles")
_OF_DEFICITS = (
    "deficit_bits",
    "deficit_lengths",
    "deficit_starts",
    "deficit_window",
    "decay",
    "controls",
    "q_grad",
)

# function of ``designs`` -> the parameters that it takes; those that are not named here take the parameters of a figure
CHOICES: dict[str, tuple[str, ...]] = {
    "deficit_scan": _OF_ALL + _OF_DEFICITS,
    "deficit_length": _OF_ALL + _OF_DEFICITS,
    "deficit_window": _OF_ALL + _OF_DEFICITS,
    "equal_cost": (*_OF_ALL, "q_min", "n_cycles"),
    "execution": (
        "dataset",
        "model",
        "steps",
        "learning_rate",
        "q_min",
        "n_cycles",
        "seeds",
    ),
}


def _choices(design: str) -> tuple[str, ...]:
    return CHOICES.get(design, _OF_ALL + _OF_FIGURES)


DESIGNS: dict[
    str, tuple[Callable[..., list[RunSpec]], str]
] = {  # beside quality against cost
    "aggregation": (designs.aggregation, "FP-Agg and Q-Agg at static 8 bits"),
    "q_agg": (designs.q_agg, "quality against cost with Q-Agg"),
    "fanout": (
        designs.fanout,
        "8 to 64 sampled neighbours at static 8 bits, with FP-Agg and Q-Agg",
    ),
    "cycles": (designs.cycles, "one and two cycles"),
    "deficit_length": (designs.deficit_length, "deficits at the start, with controls"),
    "deficit_window": (
        designs.deficit_window,
        "windows of low precision, with controls",
    ),
    "equal_cost": (
        designs.equal_cost,
        "RR, delayed RR, ER and static precisions at one cost; not in the paper",
    ),
}


def _make(
    function: Callable[..., list[RunSpec]], dataset: str, model: str
) -> Callable[..., list[RunSpec]]:
    """Fill in data set and model of a design; with another data set the model is its first, unless one is named."""
    task = task_of_dataset(dataset)

    def make(scale: str, **choices: Any) -> list[RunSpec]:
        if "dataset" in choices:
            return function(scale, **{"task": task, **choices})
        return function(scale, **{"dataset": dataset, "model": model, **choices})

    return _without_warnings(make)


def _without_warnings(
    function: Callable[..., list[RunSpec]],
) -> Callable[..., list[RunSpec]]:
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
                runs = (
                    "66 runs: 10 schedules + static, q_max 6 and 8, 3 seeds"
                    if "paper" in recipes
                    else "small scale"
                )
                if rates := len(getattr(largest, "learning_rates", ())):
                    runs += f", each at {rates} learning rates: {66 * rates} in all"
                about, make = (
                    f"{d.about}, {model}; {runs}",
                    _make(designs.quality_cost, d.name, model),
                )
                takes = _choices("quality_cost")
                yield (
                    f"{d.name}/{model}",
                    Grid(experiment.artefact, about, make, tuple(recipes), takes),
                )


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
            about = f"{d.about}, {model}: {what}"
            yield (
                f"{d.name}/{design}",
                Grid(artefact, about, make, tuple(recipes), _choices(design)),
            )


def _stand_in_grids() -> Iterator[tuple[str, Grid]]:
    """Yield the grids on stand-in data, with the first line of their function as description."""
    for name, stand_in in STAND_INS.items():
        about = (
            (stand_in.function.__doc__ or "")
            .splitlines()[0]
            .removeprefix("Return the runs of ")
            .rstrip(".")
        )
        make = _without_warnings(stand_in.function)
        yield (
            name,
            Grid(
                stand_in.artefact,
                about,
                make,
                (stand_in.scale,),
                _choices(stand_in.design),
            ),
        )


# Every figure and table of the paper that rests on training runs; table 1 and figure 8 as in their captions.
# Those of the paper come first.
GRIDS: dict[str, Grid] = dict(
    sorted(
        [*_quality_cost_grids(), *_design_grids(), *_stand_in_grids()],
        key=lambda named: "paper" not in named[1].scales,
    )
)

STUDIES = (
    "h1_to_h4",
    "h5",
    "h6",
    "h7",
    "h10",
)  # folders of ``cpt_lab.studies``, opened by name: nothing imports them


def studies(part: str) -> list[ModuleType]:
    """Return a part of every study: "arms" or "outcome"; ``cpt_lab.studies`` says what they have."""
    return [import_module(f"cpt_lab.studies.{name}.{part}") for name in STUDIES]


def _question(name: str, make: Callable[..., list[RunSpec]], about: str) -> Grid:
    question = name.split("/")[0]
    return Grid(
        question,
        f"preregistration, {question.upper()}: {about}",
        lambda scale, **c: make(**c),
        ("demo",),
    )


# Models of digits, characters and synthetic sentence pairs whose products are computed in several ways.
_EXECUTED = {
    "mlp6": "digits",
    "resnet8_w8": "digits",
    "lstm": "pydoc",
    "bert_small": "templates",
}
_WAYS = "CR simulated and on codes, with the paper's steps and shared ones, ten seeds"

# Questions beyond the paper, those of docs/preregistration.md and how products are computed; a name or "h1" finds them.
# Their runs are pooled with no others.
QUESTIONS: dict[str, Grid] = {
    **{
        name: _question(name, *asked)
        for study in studies("arms")
        for name, asked in study.GRIDS.items()
    },
    **{
        f"execution/{model}": Grid(
            "execution",
            f"{d}, {model}: {_WAYS}",
            _make(designs.execution, d, model),
            ("demo",),
            _choices("execution"),
        )
        for model, d in _EXECUTED.items()
    },
}


def find_grids(name: str | None = None) -> dict[str, Grid]:
    """Return the grids of a name or of an artefact such as "figure_3" or "h1"; of no name all, the paper's first."""
    known = {**GRIDS, **QUESTIONS}
    found = {
        key: grid for key, grid in known.items() if name in (None, key, grid.artefact)
    }
    if not found:
        names = [*known, *sorted({grid.artefact for grid in known.values()})]
        raise ValueError(
            f"no grid {name!r}; {suggest_names(name, names)}; `plan` lists them all"
        )
    return found


def grid_specs(
    name: str,
    scale: str | None = None,
    seeds: Sequence[int] | None = None,
    **choices: Any,
) -> list[RunSpec]:
    """Return the runs of one grid.

    Args:
        name: of the grid.
        scale: None takes the first of the grid.
        seeds: None takes the grid's.
        choices: other values for parameters that the grid takes, such as ``schedules=["CR"]``.

    Raises:
        ValueError: for an unknown grid, scale or parameter; it says what there is instead.
    """
    if (grid := {**GRIDS, **QUESTIONS}.get(name)) is None:
        find_grids(name)  # names what there is, unless it is an artefact
        raise ValueError(
            f"{name!r} is several grids; choose one of {', '.join(find_grids(name))}"
        )
    if scale is not None and scale not in grid.scales:
        raise ValueError(
            f"grid {name!r} has no scale {scale!r}; {suggest_names(scale, grid.scales)}"
        )
    given = choices if seeds is None else {"seeds": seeds, **choices}
    check_choices({name: grid}, given)
    return grid.make(scale or grid.scales[0], **given)


@dataclass(frozen=True)
class Selection:
    """Other values for the parameters of grids, and which of their runs to take."""

    choices: Mapping[str, Any] = field(
        default_factory=dict
    )  # parameter -> value, for the designs of the grids
    arms: Sequence[
        str
    ] = ()  # such as "CR", "static 8", "no deficit, 600"; () takes all
    savings: Sequence[
        str
    ] = ()  # "large", "medium", "small", "static", ...; () takes all

    def specs(
        self, grids: Mapping[str, Grid], scale: str | None = None
    ) -> dict[str, list[RunSpec]]:
        """Return the selected runs of grids; a grid of which no run is selected is left out.

        Args:
            grids: by name.
            scale: None takes the first of each grid. A grid without this scale is left out.

        Raises:
            ValueError: for parameters that a grid does not take, wrong values, and when no run is selected.
        """
        check_choices(grids, self.choices)
        made = {}
        for name, grid in grids.items():
            if scale is None or scale in grid.scales:
                made[name] = grid.make(scale or grid.scales[0], **self.choices)
        if not self.arms and not self.savings:
            return {name: specs for name, specs in made.items() if specs}
        every_spec = [spec for specs in made.values() for spec in specs]
        keys = {spec.key for spec in select(every_spec, self.arms, self.savings)}
        found = {
            name: [spec for spec in specs if spec.key in keys]
            for name, specs in made.items()
        }
        return {name: specs for name, specs in found.items() if specs}


def check_choices(grids: Mapping[str, Grid], choices: Mapping[str, Any]) -> None:
    """Check that grids take parameters with these values.

    Raises:
        ValueError: for a parameter that one of the grids does not take, a wrong value, and a data set or a model for
            several grids.
    """
    for name, value in choices.items():
        for key, grid in grids.items():
            if name not in grid.choices:
                raise ValueError(
                    f"grid {key!r} takes no {name}; it takes {', '.join(grid.choices)}"
                )
        if name in ("dataset", "model") and len(grids) > 1:
            raise ValueError(
                f"{name} {value!r} is for one grid, and these are {len(grids)}: {', '.join(grids)}"
            )
        if name != "seeds":
            checked(name, value)


def select(
    specs: Sequence[RunSpec], arms: Sequence[str] = (), savings: Sequence[str] = ()
) -> list[RunSpec]:
    """Return the runs of some arms and savings groups; none of either takes all.

    Args:
        specs: the runs to choose from.
        arms: such as "CR", "static 8" or "no deficit, 600".
        savings: "large", "medium", "small", "static", ...

    Raises:
        ValueError: for an arm or a group that no run has, and when no run is left.

    >>> len(select(designs.quality_cost("demo"), arms=["CR", "RR"]))
    10
    """
    filters: list[tuple[str, Sequence[str], Callable[[RunSpec], str]]] = [
        ("arm", arms, lambda spec: spec.arm),
        ("savings", savings, lambda spec: savings_of(spec.arm)),
    ]
    selected = list(specs)
    for name, wanted, value_of in filters:
        there = list(dict.fromkeys(map(value_of, specs)))
        for value in wanted:
            if value not in there:
                raise ValueError(
                    f"no {name} {value!r} in this grid; {suggest_names(value, there)}"
                )
        if wanted:
            selected = [spec for spec in selected if value_of(spec) in wanted]
    if not selected:
        raise ValueError(
            f"no run has one of the arms {', '.join(arms)} and savings {', '.join(savings)}"
        )
    return selected
