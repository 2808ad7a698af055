"""Which runs a figure of the paper needs: a function per kind of artefact, a name per grid.  Needs no torch.

>>> len(grid_specs("cifar10/resnet74"))
66
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

from cpt_core.recipes import RECIPES, recipe
from cpt_core.schedules import SUITE
from cpt_core.specs import RunSpec, run_spec


def quality_cost(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    task: str | None = None,
    schedules: Sequence[str] = tuple(SUITE),
    static: Sequence[int] | None = None,
    q_max: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    preset: str = "ours",
    **changes: Any,
) -> list[RunSpec]:
    """Return the runs of a figure of quality against cost: every arm with every seed, for every q_max.

    At paper scale 66 per model: 10 schedules + static, q_max 6 and 8, 3 seeds; where a recipe leaves the learning rate
    to be chosen among several, as many times that. They need a GPU.

    Args:
        scale: "smoke", "demo" or "paper".
        dataset: see ``recipes.recipe``.
        model: None takes the recipe's.
        task: a key of ``TASKS``; needed for data of your own unless it is images.
        schedules: names of the suite.
        static: bits of the static baselines; None takes q_max alone at paper scale, as the paper does, 2..q_max at
            demo scale, an equal-cost baseline that the paper lacks, and 2 and q_max at smoke scale.
        q_max: None takes 6 and 8 at paper scale, 8 elsewhere.
        seeds: None takes the recipe's.
        preset: "ours" or "authors".
        changes: other values for fields of the recipe, such as ``steps=2_000`` or ``aggregation="quantized"``.

    Raises:
        ValueError: for unknown names, before anything runs.

    Paper: sections 4.2 to 4.4, figures 3, 4, 6 and 7.
    """
    r = recipe(scale, dataset, model, preset, task or "image")
    if task is not None and r.task != task:
        raise ValueError(f"dataset {r.dataset!r} is for task {r.task!r}, not {task!r}")
    unknown = sorted(set(changes) - set(asdict(r)))
    if unknown:
        raise ValueError(f"a recipe has no {', '.join(unknown)}; it has {', '.join(asdict(r))}")
    if "lr" in changes and hasattr(r, "learning_rates"):  # nothing is left to be chosen
        changes = {"learning_rates": (), **changes}
    r = replace(r, **changes)
    # the authors' CIFAR sweeps keep 8-bit gradients also at q_max = 6
    q_grad = 8 if preset == "authors" and r.dataset.startswith("cifar") else None
    tops = tuple(q_max) if q_max is not None else ((6, 8) if scale == "paper" else (8,))
    specs = []
    for top in tops:
        default = {"smoke": (2, top), "demo": tuple(range(2, top + 1)), "paper": (top,)}[scale]
        bits = default if static is None else tuple(static)
        for arm in (*schedules, *(f"static {b}" for b in bits)):
            for lr in getattr(r, "learning_rates", ()) or (r.lr,):
                at = replace(r, lr=lr)
                for seed in r.seeds if seeds is None else seeds:
                    specs.append(run_spec(at, arm, q_max=top, seed=seed, scale=scale, preset=preset, q_grad=q_grad))
    return specs


def aggregation(
    scale: str = "demo",
    dataset: str = "digits-graph",
    model: str | None = None,
    *,
    bits: Sequence[int] = (8,),
    seeds: Sequence[int] | None = None,
    **changes: Any,
) -> list[RunSpec]:
    """Return the runs that compare FP-Agg with Q-Agg at static precision: both at all ``bits``, 3 seeds.

    Paper: section 4.3, figure 5 (8 bits, OGBN-Arxiv and OGBN-Products).
    """
    return [
        spec
        for kind in ("fp", "quantized")
        for spec in quality_cost(
            scale, dataset, model, task="graph", schedules=(), static=bits, q_max=(max(bits),), seeds=seeds,
            aggregation=kind, **changes,
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """A named list of runs: one panel of a figure, or one part of a table.

    Attributes:
        artefact: of the paper, such as "figure_3".
        about: what it is, and how many runs the paper has.
        make: (scale, **choices) -> specs; None while its task is not there yet.
        scales: at which it exists, the one to take first.
        runs: at paper scale, for grids without a task.
    """

    artefact: str
    about: str
    make: Callable[..., list[RunSpec]] | None = None
    scales: tuple[str, ...] = ("paper",)
    runs: int | None = None


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


# Every figure and table of the paper that rests on training runs. Counts are the paper's: 10 schedules + static, q_max
# 6 and 8, 3 seeds; XNLI chooses among three learning rates; table 1 and figure 8 as in their captions.
GRIDS: dict[str, Grid] = {
    **_quality_cost_grids(),
    "ogbn-arxiv/aggregation": _aggregation_grid("ogbn-arxiv", "gcn", ("paper",)),
    "ogbn-products/aggregation": _aggregation_grid("ogbn-products", "sage", ("paper",)),
    "digits-graph/aggregation": _aggregation_grid("digits-graph", "gcn", ("demo", "smoke")),
    "cifar10/deficit_length": Grid("table_1", "deficits of 0 to 256,000 steps, ResNet-74", runs=18),
    "cifar10/deficit_window": Grid("table_1", "windows of 128,000 steps, ResNet-74", runs=12),
    "imagenet/deficit_length": Grid("table_1", "deficits of 0, 25, 100 epochs, ResNet-18", runs=9),
    "ogbn-arxiv/deficit_length": Grid("figure_8", "deficits of 0 to 1,000 epochs", runs=33),
    "ogbn-arxiv/deficit_window": Grid("figure_8", "windows of 500 epochs", runs=15),
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
        ValueError: for an unknown grid or scale, or when its task is not there yet.
    """
    if name not in GRIDS:
        find_grids(name)  # names what there is, unless it is an artefact
        raise ValueError(f"{name!r} is several grids; choose one of {', '.join(find_grids(name))}")
    grid = GRIDS[name]
    if grid.make is None:
        raise ValueError(f"grid {name!r} ({grid.artefact}) cannot run yet: its task is not there")
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
