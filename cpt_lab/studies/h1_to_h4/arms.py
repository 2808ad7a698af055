"""The runs of the questions in ``docs/preregistration.md``: fixed arms, seeds, lengths.  Beyond the paper.  No torch.

>>> len(noise("pydoc"))
192
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import cast

import numpy as np

from cpt_core.schedules import cost
from cpt_core.schedules.deficit import DeficitSchedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import Schedule, ShortCycleWarning, StaticSchedule
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.solver import solve_schedule
from cpt_lab.experiments.graph import GraphRecipe
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.studies.case import FACEBOOK

Q_MIN, Q_MAX = 2, 8
FIRST_SEED = 100  # no run before these had such seeds
STEPS = {"gcn": 160, "sage": 120, "lstm": 160}  # H1 and H2, by model

# H1: how many of 160 steps two cycles spend at 2, 3, ... 8 bits. Found by ``bench/twelve_schedules.py``.
TWELVE: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((3, 6, 41, 18, 3, 1, 8), (0, 4, 20, 38, 1, 1, 16)),
    ((4, 3, 7, 57, 1, 0, 8), (0, 10, 40, 13, 0, 1, 16)),
    ((0, 6, 62, 1, 0, 1, 10), (5, 1, 32, 10, 3, 13, 16)),
    ((0, 3, 31, 31, 4, 2, 9), (8, 5, 30, 15, 6, 0, 16)),
    ((10, 7, 16, 24, 15, 0, 8), (0, 2, 35, 27, 0, 0, 16)),
    ((0, 4, 11, 56, 0, 0, 9), (14, 1, 25, 23, 1, 0, 16)),
    ((1, 50, 2, 18, 1, 0, 8), (0, 30, 0, 5, 3, 13, 29)),
    ((1, 41, 0, 4, 3, 2, 29), (0, 50, 2, 3, 1, 8, 16)),
    ((1, 41, 2, 0, 1, 3, 32), (0, 54, 0, 5, 0, 1, 20)),
    ((3, 58, 0, 1, 0, 0, 18), (0, 39, 1, 0, 0, 2, 38)),
    ((0, 54, 0, 2, 2, 3, 19), (9, 32, 3, 1, 0, 0, 35)),
    ((14, 37, 1, 0, 0, 1, 27), (0, 46, 1, 1, 0, 3, 29)),
)

WINDOW, RECOVERY = 16, 32  # H3: steps of low precision, and steps after them
STARTS = (0, 12, 24, 36, 48)
LR_RULES = ("constant", "step", "cosine")

DEGREES = (0, 5, 12, 30)  # H4: in-degrees at which strata begin, self-loops counted


def noise(dataset: str = FACEBOOK, seeds: Sequence[int] | None = None) -> list[RunSpec]:
    """Return the runs of H1: twelve schedules of exactly one cost, 8 seeds of a graph, 16 of characters.

    Noise exposure, share of steps at 2 bits and mean date of the noise are uncorrelated over the schedules, which all
    end with a tenth of their steps at 8 bits.

    The data set is a graph of one's own, or "pydoc"; here and below, no seeds take those of the preregistration.
    """
    r = _recipe(dataset)
    n = (
        8 if r.task == "graph" else 16
    )  # runs on characters differ more by seed, and cost less
    return [
        _spec(r, schedule, f"schedule {i}", seed)
        for i, schedule in enumerate(twelve(), 1)
        for seed in _seeds(seeds, n)
    ]


def twelve() -> list[TableSchedule]:
    """Return the twelve schedules of H1, the least noisy first, 160 steps each."""
    rising = [
        [(q, n) for cycle in cycles for q, n in enumerate(cycle, Q_MIN) if n]
        for cycles in TWELVE
    ]
    return [TableSchedule(tuple(runs)) for runs in rising]


def noise_date(schedule: Schedule) -> float:
    """Return when a schedule is noisy: the mean time of its steps weighted by 4**-q, 0 the start and 1 the end."""
    bits = schedule.bits()
    return float(
        np.average((np.arange(len(bits)) + 0.5) / len(bits), weights=4.0**-bits)
    )


def against_static(
    dataset: str = FACEBOOK,
    model: str | None = None,
    seeds: Sequence[int] | None = None,
) -> list[RunSpec]:
    """Return the runs of H2: static 5 and 3 and the least noisy cyclic schedule of each one's cost.

    10 seeds, 20 of GraphSAGE and characters. Without a model it takes the data set's first.
    """
    r = _recipe(dataset, model=model)
    arms: dict[str, Schedule] = {}
    for bits in (5, 3):
        arms[f"static {bits}"] = StaticSchedule(bits, r.steps)
        arms[f"cyclic at the cost of static {bits}"] = least_noisy(bits, r.steps)
    return [
        _spec(r, schedule, arm, seed)
        for arm, schedule in arms.items()
        for seed in _seeds(seeds, 10 if r.model == "gcn" else 20)
    ]


@cache
def least_noisy(
    bits: int, total_steps: int, q_grad: int = Q_MAX, lowest: int = Q_MIN
) -> Schedule:
    """Return the least noisy of the suite's ten shapes that costs what static ``bits`` costs, in two cycles.

    Every shape is bent to the cost from every lowest precision below ``bits``, ``lowest`` or higher; those that cannot
    be, and those that do not end at 8 bits, are left out. Gradients have ``q_grad`` bits on both sides.
    """
    budget = cost.relative_cost([bits], Q_MAX, q_grad)
    found = []
    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        for low in range(lowest, bits):
            for e in SUITE.values():
                with suppress(
                    ValueError
                ):  # a shape that so few steps cannot bend to the cost
                    found.append(
                        solve_schedule(
                            budget,
                            low,
                            Q_MAX,
                            total_steps,
                            2,
                            e.profile,
                            triangular=e.triangular,
                            mirror=e.mirror,
                            q_grad=q_grad,
                        )
                    )
    return min(
        (s for s in found if s.bits()[-1] == Q_MAX), key=lambda s: s.noise_exposure()
    )


def deficit_dates(
    dataset: str = FACEBOOK, seeds: Sequence[int] | None = None
) -> list[RunSpec]:
    """Return the runs of H3: a deficit of 16 steps at five dates under three rules of the learning rate, 10 seeds.

    Training goes on for 32 steps after every deficit. Each has a control of its length and rule without a deficit.
    """
    specs = []
    for rule in LR_RULES:
        for start in STARTS:
            r = replace(_recipe(dataset, start + WINDOW + RECOVERY), lr_rule=rule)  # type: ignore[call-arg]
            for windows in ((), ((start, start + WINDOW),)):
                schedule = DeficitSchedule(Q_MIN, Q_MAX, windows, r.steps)
                what = f"[{start}, {start + WINDOW})" if windows else "no deficit"
                specs += [
                    _spec(r, schedule, f"{what} of {r.steps}, {rule}", s)
                    for s in _seeds(seeds, 10)
                ]
    return specs


def learning_rate_sums(spec: RunSpec) -> tuple[float, float]:
    """Return the learning rate, relative to its start, summed over the deficit of a run of H3 and over what follows."""
    r = cast(GraphRecipe, spec.recipe)
    t = np.arange(r.steps)
    rates = {
        "constant": np.ones(r.steps),
        "step": 0.1
        ** ((t >= round(0.5 * r.steps)) + (t >= round(0.75 * r.steps)).astype(float)),
        "cosine": r.final_lr + (1 - r.final_lr) * (1 + np.cos(np.pi * t / r.steps)) / 2,
    }[r.lr_rule]
    ((start, stop),) = cast(DeficitSchedule, spec.schedule).windows
    return float(rates[start:stop].sum()), float(rates[stop:].sum())


def gradients(
    dataset: str = "ptb", seeds: Sequence[int] | None = None
) -> list[RunSpec]:
    """Return the runs of H4a: static 8 and 6 bits forward, each with gradients of 8 and 6 bits, 13 seeds."""
    r = _recipe(dataset, 300)
    return [
        replace(
            _spec(
                r, StaticSchedule(q, r.steps), f"static {q}, {g}-bit gradients", seed
            ),
            q_grad=g,
        )
        for q in (8, 6)
        for g in (8, 6)
        for seed in _seeds(seeds, 13)
    ]


def aggregation_by_degree(
    dataset: str = FACEBOOK, seeds: Sequence[int] | None = None
) -> list[RunSpec]:
    """Return the runs of H4b: FP-Agg and Q-Agg at static 8, 4 and 3 bits, accuracy by in-degree, 20 seeds."""
    r = _recipe(dataset, 64)
    return [
        _spec(
            replace(r, aggregation=kind, degrees=DEGREES),  # type: ignore[call-arg]
            StaticSchedule(q, r.steps),
            f"static {q}",
            seed,
        )
        for q in (8, 4, 3)
        for kind in ("fp", "quantized")
        for seed in _seeds(seeds, 20)
    ]


def _seeds(seeds: Sequence[int] | None, n: int) -> Sequence[int]:
    return range(FIRST_SEED, FIRST_SEED + n) if seeds is None else seeds


def _recipe(dataset: str, steps: int | None = None, model: str | None = None) -> Recipe:
    found = recipe("demo", dataset, model, task="graph")
    return replace(
        found,
        steps=steps or STEPS[found.model],
        n_cycles=2,
        q_min=Q_MIN,
        evaluate_every=0,
    )


def _spec(r: Recipe, schedule: Schedule, arm: str, seed: int) -> RunSpec:
    return RunSpec(r, schedule, Q_MAX, Q_MAX, seed, arm, "demo")


# name of a grid -> what makes its runs, what they are
GRIDS: dict[str, tuple[Callable[..., list[RunSpec]], str]] = {
    "h1/facebook": (
        partial(noise, FACEBOOK),
        "twelve schedules of one cost, GCN on the Facebook graph",
    ),
    "h1/characters": (
        partial(noise, "pydoc"),
        "twelve schedules of one cost, LSTM on characters",
    ),
    "h2/facebook": (
        partial(against_static, FACEBOOK),
        "static and cyclic at equal cost, GCN on the Facebook graph",
    ),
    "h2/characters": (
        partial(against_static, "pydoc"),
        "static and cyclic at equal cost, LSTM on characters",
    ),
    "h2/sage": (
        partial(against_static, FACEBOOK, "sage"),
        "static and cyclic at equal cost, GraphSAGE on that graph",
    ),
    "h3/facebook": (
        partial(deficit_dates, FACEBOOK),
        "deficits at five dates under three rules of the learning rate",
    ),
    "h4/gradients": (
        partial(gradients, "ptb"),
        "8 and 6 bits, forward and of gradients, LSTM on Penn Treebank",
    ),
    "h4/aggregation": (
        partial(aggregation_by_degree, FACEBOOK),
        "FP-Agg and Q-Agg by in-degree, GCN",
    ),
}
