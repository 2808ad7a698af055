"""Grids: the runs of every figure and table of the paper, by name.  Needs no torch.

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
    description: str  # what it is, and how many runs the paper has
    make: Callable[..., list[RunSpec]]  # (scale, **choices) -> specs
    scales: tuple[str, ...]  # at which it exists, the one to take first
    choices: tuple[str, ...] = (
        "seeds",
    )  # the parameters that may be given other values


_COMMON_CHOICES = ("dataset", "model", "steps", "learning_rate", "q_max", "seeds")
_FIGURE_CHOICES = ("preset", "schedules", "static_bits", "q_min", "q_grad", "n_cycles")
_DEFICIT_CHOICES = (
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
    "deficit_scan": _COMMON_CHOICES + _DEFICIT_CHOICES,
    "deficit_length": _COMMON_CHOICES + _DEFICIT_CHOICES,
    "deficit_window": _COMMON_CHOICES + _DEFICIT_CHOICES,
    "equal_cost": (*_COMMON_CHOICES, "q_min", "n_cycles"),
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
    return CHOICES.get(design, _COMMON_CHOICES + _FIGURE_CHOICES)


GRID_DESIGNS: dict[
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
    """Yield a grid of quality against cost for every data set and model with a recipe."""
    for experiment in EXPERIMENTS.values():
        for d in experiment.named_datasets.values():
            for model, recipes in _models(d).items():
                largest, *_ = recipes.values()
                runs = (
                    "66 runs: 10 schedules + static, q_max 6 and 8, 3 seeds"
                    if "paper" in recipes
                    else "small scale"
                )
                if rates := len(getattr(largest, "learning_rates", ())):
                    runs += f", each at {rates} learning rates: {66 * rates} in all"
                description, make = (
                    f"{d.description}, {model}; {runs}",
                    _make(designs.quality_cost, d.name, model),
                )
                takes = _choices("quality_cost")
                yield (
                    f"{d.name}/{model}",
                    Grid(experiment.artefact, description, make, tuple(recipes), takes),
                )


def _models(d: Dataset) -> dict[str, dict[str, Recipe]]:
    """Return the models of a data set with their recipes by scale, the largest scale first."""
    recipes_by_model: dict[str, dict[str, Recipe]] = {}
    for scale in reversed(SCALES):
        for r in d.recipes.get(scale, ()):
            recipes_by_model.setdefault(r.model, {})[scale] = r
    return recipes_by_model


def _design_grids() -> Iterator[tuple[str, Grid]]:
    """Yield a grid for every entry of ``Dataset.designs``, with the first model."""
    for d in DATASETS.values():
        for design, artefact in d.designs.items():
            function, design_text = GRID_DESIGNS[design]
            model, recipes = next(iter(_models(d).items()))
            make = _make(function, d.name, model)
            description = f"{d.description}, {model}: {design_text}"
            yield (
                f"{d.name}/{design}",
                Grid(artefact, description, make, tuple(recipes), _choices(design)),
            )


def _stand_in_grids() -> Iterator[tuple[str, Grid]]:
    """Yield the grids on stand-in data, with the first line of their function as description."""
    for name, stand_in in STAND_INS.items():
        description = (
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
                description,
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
    "h11",
    "h12",
    "h13",
)  # folders of ``cpt_lab.studies``, opened by name: nothing imports them


def studies(part: str) -> list[ModuleType]:
    """Return a part of every study: "arms" or "outcome"; ``cpt_lab.studies`` says what they have."""
    return [import_module(f"cpt_lab.studies.{name}.{part}") for name in STUDIES]


def _question(name: str, make: Callable[..., list[RunSpec]], description: str) -> Grid:
    question = name.split("/")[0]
    return Grid(
        question,
        f"preregistration, {question.upper()}: {description}",
        lambda scale, **c: make(**c),
        ("demo",),
    )


# Models of digits, characters and synthetic sentence pairs whose products are computed in several ways.
_EXECUTION_MODELS = {
    "mlp6": "digits",
    "resnet8_w8": "digits",
    "lstm": "pydoc",
    "bert_small": "templates",
}
_EXECUTION_ARMS = (
    "CR simulated and on codes, with the paper's steps and shared ones, ten seeds"
)

# Questions beyond the paper, those of docs/preregistration.md and how products are computed; a name or "h1" finds them.
# Their runs are pooled with no others.
QUESTIONS: dict[str, Grid] = {
    **{
        name: _question(name, *asked)
        for study in studies("arms")
        for name, asked in [
            *study.GRIDS.items(),
            *getattr(study, "EXTENDED_GRIDS", {}).items(),
        ]
    },
    **{
        f"execution/{model}": Grid(
            "execution",
            f"{d}, {model}: {_EXECUTION_ARMS}",
            _make(designs.execution, d, model),
            ("demo",),
            _choices("execution"),
        )
        for model, d in _EXECUTION_MODELS.items()
    },
}


def find_grids(name: str | None = None) -> dict[str, Grid]:
    """Return the grids of a name or of an artefact such as "figure_3" or "h1"; of no name all, the paper's first."""
    all_grids = {**GRIDS, **QUESTIONS}
    matches = {
        key: grid
        for key, grid in all_grids.items()
        if name in (None, key, grid.artefact)
    }
    if not matches:
        names = [*all_grids, *sorted({grid.artefact for grid in all_grids.values()})]
        raise ValueError(
            f"no grid {name!r}; {suggest_names(name, names)}; `plan` lists them all"
        )
    return matches


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
    values = choices if seeds is None else {"seeds": seeds, **choices}
    check_choices({name: grid}, values)
    return grid.make(scale or grid.scales[0], **values)


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
        specs_by_grid = {}
        for name, grid in grids.items():
            if scale is None or scale in grid.scales:
                specs_by_grid[name] = grid.make(scale or grid.scales[0], **self.choices)
        if not self.arms and not self.savings:
            return {name: specs for name, specs in specs_by_grid.items() if specs}
        every_spec = [spec for specs in specs_by_grid.values() for spec in specs]
        keys = {spec.key for spec in select(every_spec, self.arms, self.savings)}
        selected = {
            name: [spec for spec in specs if spec.key in keys]
            for name, specs in specs_by_grid.items()
        }
        return {name: specs for name, specs in selected.items() if specs}


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
    for name, allowed, value_of in filters:
        available = list(dict.fromkeys(map(value_of, specs)))
        for value in allowed:
            if value not in available:
                raise ValueError(
                    f"no {name} {value!r} in this grid; {suggest_names(value, available)}"
                )
        if allowed:
            selected = [spec for spec in selected if value_of(spec) in allowed]
    if not selected:
        raise ValueError(
            f"no run has one of the arms {', '.join(arms)} and savings {', '.join(savings)}"
        )
    return selected
