"""Which runs a figure of the paper needs: a function per kind of artefact, a name per grid.  Needs no torch.

>>> len(grid_specs("cifar10/resnet74"))
66
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from cpt_core.experiments.designs import aggregation, deficit_length, deficit_window, equal_cost, quality_cost
from cpt_core.experiments.recipes import RECIPES
from cpt_core.experiments.spec import RunSpec
from cpt_core.schedules.profiles import SUITE


@dataclass(frozen=True)
class Grid:
    """A named list of runs: one panel of a figure, or one part of a table.

    Attributes:
        artefact: of the paper, such as "figure_3".
        about: what it is, and how many runs the paper has.
        make: (scale, **choices) -> specs.
        scales: at which it exists, the one to take first.
    """

    artefact: str
    about: str
    make: Callable[..., list[RunSpec]]
    scales: tuple[str, ...]


ABOUT = {
    "digits": "scikit-learn's digits, embedded: shows the mechanism, stands for nothing in the paper",
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "imagenet": "ImageNet",
    "digit-scenes": "synthetic scenes of scikit-learn's digits, embedded: stand for nothing in the paper",
    "voc2012": "Pascal VOC 2012",
    "digits-graph": "a nearest-neighbour graph over scikit-learn's digits, embedded: shows the mechanics only",
    "ogbn-arxiv": "OGBN-Arxiv", "ogbn-products": "OGBN-Products",
    "pydoc": "characters of Python's reference text, embedded: stands for nothing in the paper",
    "ptb": "Penn Treebank",
    "templates": "synthetic sentence pairs, embedded: stand for nothing in the paper",
    "xnli": "XNLI",
}  # fmt: skip

ARTEFACTS = {  # by task
    "image": "figure_3",
    "detection": "figure_4",
    "graph": "figure_6",
    "language_model": "figure_7",
    "entailment": "figure_7",
}


def _quality_cost_grids() -> dict[str, Grid]:
    """One grid for every data set and model of the recipes that is named, with the scales it has."""
    scales: dict[str, tuple[str, ...]] = {}
    tasks: dict[str, str] = {}
    for scale in ("paper", "demo", "smoke"):
        for key, r in RECIPES[scale].items():
            if r.dataset in ABOUT and not key.startswith("own"):
                scales[key], tasks[key] = (*scales.get(key, ()), scale), r.task
    out = {}
    for key, found in scales.items():
        dataset, model = key.split("/")
        paper = "66 runs: 10 schedules + static, q_max 6 and 8, 3 seeds" if "paper" in found else "small scale"
        if rates := len(getattr(RECIPES[found[0]][key], "learning_rates", ())):
            paper += f", each at {rates} learning rates: {66 * rates} in all"
        about = f"{ABOUT[dataset]}, {model}; {paper}"
        out[key] = Grid(ARTEFACTS[tasks[key]], about, _Make(quality_cost, dataset, model), found)
    return out


@dataclass(frozen=True)
class _Make:
    """A function of this module with data set and model filled in."""

    function: Callable[..., list[RunSpec]]
    dataset: str
    model: str

    def __call__(self, scale: str, **choices: Any) -> list[RunSpec]:
        return self.function(scale, self.dataset, self.model, **choices)


def _aggregation_grid(dataset: str, model: str, scales: tuple[str, ...]) -> Grid:
    about = f"{ABOUT[dataset]}, {model}: FP-Agg and Q-Agg at static 8 bits"
    return Grid("figure_5", about, _Make(aggregation, dataset, model), scales)


def _section_5(artefact: str, function: Callable[..., list[RunSpec]], dataset: str, model: str) -> Grid:
    about = {
        deficit_length: "deficits at the start, with controls",
        deficit_window: "windows of low precision, with controls",
        equal_cost: "RR, delayed RR, ER and static precisions at one cost; not in the paper",
    }[function]
    scales = ("paper",) if f"{dataset}/{model}" in RECIPES["paper"] else ("demo", "smoke")
    return Grid(artefact, f"{ABOUT[dataset].split(',')[0]}, {model}: {about}", _Make(function, dataset, model), scales)


# Every figure and table of the paper that rests on training runs. Counts are the paper's: 10 schedules + static, q_max
# 6 and 8, 3 seeds; XNLI chooses among three learning rates; table 1 and figure 8 as in their captions.
GRIDS: dict[str, Grid] = {
    **_quality_cost_grids(),
    "ogbn-arxiv/aggregation": _aggregation_grid("ogbn-arxiv", "gcn", ("paper",)),
    "ogbn-products/aggregation": _aggregation_grid("ogbn-products", "sage", ("paper",)),
    "digits-graph/aggregation": _aggregation_grid("digits-graph", "gcn", ("demo", "smoke")),
    "cifar10/deficit_length": _section_5("table_1", deficit_length, "cifar10", "resnet74"),
    "cifar10/deficit_window": _section_5("table_1", deficit_window, "cifar10", "resnet74"),
    "imagenet/deficit_length": _section_5("table_1", deficit_length, "imagenet", "resnet18"),
    "ogbn-arxiv/deficit_length": _section_5("figure_8", deficit_length, "ogbn-arxiv", "gcn"),
    "ogbn-arxiv/deficit_window": _section_5("figure_8", deficit_window, "ogbn-arxiv", "gcn"),
    "digits/deficit_length": _section_5("figure_8", deficit_length, "digits", "mlp6"),
    "digits/deficit_window": _section_5("figure_8", deficit_window, "digits", "mlp6"),
    "digits/equal_cost": _section_5("section_5", equal_cost, "digits", "mlp6"),
    "digits-graph/deficit_length": _section_5("figure_8", deficit_length, "digits-graph", "gcn"),
    "digits-graph/deficit_window": _section_5("figure_8", deficit_window, "digits-graph", "gcn"),
    "digits-graph/equal_cost": _section_5("section_5", equal_cost, "digits-graph", "gcn"),
}


def find_grids(name: str | None = None) -> dict[str, Grid]:
    """Return the grids of a name or of an artefact such as "figure_3"; all without a name. ValueError says what is."""
    found = {key: grid for key, grid in GRIDS.items() if name in (None, key, grid.artefact)}
    if not found:
        artefacts = sorted({grid.artefact for grid in GRIDS.values()})
        near = get_close_matches(name or "", [*GRIDS, *artefacts], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no grid {name!r}{hint} Grids: {', '.join(GRIDS)}; or one of {', '.join(artefacts)}")
    return found


def grid_specs(name: str, scale: str | None = None, seeds: Sequence[int] | None = None) -> list[RunSpec]:
    """Return the runs of one grid.

    Raises:
        ValueError: for an unknown grid or scale.
    """
    if name not in GRIDS:
        find_grids(name)  # names what there is, unless it is an artefact
        raise ValueError(f"{name!r} is several grids; choose one of {', '.join(find_grids(name))}")
    grid = GRIDS[name]
    if scale is not None and scale not in grid.scales:
        raise ValueError(f"grid {name!r} has no scale {scale!r}; choose from {', '.join(grid.scales)}")
    return grid.make(scale or grid.scales[0], **({} if seeds is None else {"seeds": seeds}))


FILTERS: dict[str, Callable[[RunSpec], str]] = {
    "schedule": lambda spec: spec.arm,
    "savings": lambda spec: SUITE[spec.arm].savings if spec.arm in SUITE else "static",
    "q_max": lambda spec: str(spec.q_max),
}


def choose(specs: Sequence[RunSpec], only: Sequence[str]) -> list[RunSpec]:
    """Keep the runs that meet every condition, such as "schedule=CR,RR" or "q_max=8"; ValueError names what there is.

    >>> len(choose(quality_cost("demo"), ["schedule=CR,RR"]))
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
            raise ValueError(f"no {name} {unknown[0]!r} in this grid; choose from {', '.join(there)}")
        kept = [spec for spec in kept if FILTERS[name](spec) in wanted]
    if not kept:
        raise ValueError(f"no run meets {' and '.join(only)}")
    return kept
