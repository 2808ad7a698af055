"""Runs of H1 to H4 in ``docs/preregistration.md``: fixed arms, seeds, lengths.  Beyond the paper.  No torch.

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
from cpt_lab.experiments import registry
from cpt_lab.experiments.graph import GraphRecipe
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.studies.case import FACEBOOK

Q_MIN, Q_MAX = 2, 8
FIRST_SEED = 100  # earlier runs had smaller seeds
STEPS_BY_MODEL = {"gcn": 160, "sage": 120, "lstm": 160}  # H1 and H2, by model

# H1: number of steps, of 160, of two cycles at 2, 3, ... 8 bits. Computed by ``bench/twelve_schedules.py``.
EQUAL_COST_CYCLES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
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

    Args:
        dataset: a graph of the user, or "pydoc".
        seeds: None uses those of the preregistration, here and in all functions below.
    """
    r = _recipe(dataset)
    # Runs on characters differ more by seed, and cost less.
    n = 8 if r.task == "graph" else 16
    return [
        _spec(r, schedule, f"schedule {i}", seed)
        for i, schedule in enumerate(equal_cost_schedules(), 1)
        for seed in _seeds(seeds, n)
    ]


def equal_cost_schedules() -> list[TableSchedule]:
    """Return the twelve schedules of H1, the least noisy first, 160 steps each."""
    schedules = []
    for cycles in EQUAL_COST_CYCLES:
        runs = []
        for steps_by_bits in cycles:
            runs += [(q, n) for q, n in enumerate(steps_by_bits, Q_MIN) if n]
        schedules.append(TableSchedule(tuple(runs)))
    return schedules


def mean_noise_time(schedule: Schedule) -> float:
    """Return the mean time of rounding noise: 0 at the start, 1 at the end.

    It is the mean time of the steps, weighted by 4**-q.
    """
    bits = schedule.bits()
    return float(
        np.average((np.arange(len(bits)) + 0.5) / len(bits), weights=4.0**-bits)
    )


def against_static(
    dataset: str = FACEBOOK,
    model: str | None = None,
    seeds: Sequence[int] | None = None,
) -> list[RunSpec]:
    """Return the runs of H2: static 5 and 3 bits, and the least noisy cyclic schedule of equal cost.

    There are 10 seeds, 20 for GraphSAGE and characters.

    Args:
        dataset: a graph of the user, or "pydoc".
        model: None uses the first model of the data set.
        seeds: None uses those of the preregistration.
    """
    r = _recipe(dataset, model=model)
    arms: dict[str, Schedule] = {}
    for bits in (5, 3):
        arms[f"static {bits}"] = StaticSchedule(bits, r.steps)
        arms[f"cyclic at the cost of static {bits}"] = min_noise_schedule(bits, r.steps)
    return [
        _spec(r, schedule, arm, seed)
        for arm, schedule in arms.items()
        for seed in _seeds(seeds, 10 if r.model == "gcn" else 20)
    ]


@cache
def min_noise_schedule(
    bits: int, total_steps: int, q_grad: int = Q_MAX, lowest: int = Q_MIN
) -> Schedule:
    """Return the least noisy of the suite's ten shapes that costs what static ``bits`` costs, in two cycles.

    Every shape is bent to the cost from every lowest precision below ``bits`` and at least ``lowest``. Shapes that
    cannot be bent to the cost, or do not end at 8 bits, are left out. Gradients have ``q_grad`` bits on both sides.
    """
    budget = cost.relative_cost([bits], Q_MAX, q_grad)
    candidates = []
    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        for q_min in range(lowest, bits):
            for shape in SUITE.values():
                # With few steps some shapes cannot have this cost.
                with suppress(ValueError):
                    schedule = solve_schedule(
                        budget,
                        q_min,
                        Q_MAX,
                        total_steps,
                        2,
                        shape.profile,
                        triangular=shape.triangular,
                        mirror=shape.mirror,
                        q_grad=q_grad,
                    )
                    candidates.append(schedule)
    ending_high = [s for s in candidates if s.bits()[-1] == Q_MAX]
    return min(ending_high, key=lambda schedule: schedule.noise_exposure())


def deficit_dates(
    dataset: str = FACEBOOK, seeds: Sequence[int] | None = None
) -> list[RunSpec]:
    """Return the runs of H3: a deficit of 16 steps at five dates under three learning-rate rules, 10 seeds.

    Training continues for 32 steps after every deficit. Each has a control of its length and rule without a deficit.
    """
    specs = []
    for rule in LR_RULES:
        for start in STARTS:
            r = replace(_recipe(dataset, start + WINDOW + RECOVERY), lr_rule=rule)  # type: ignore[call-arg]
            for windows in ((), ((start, start + WINDOW),)):
                schedule = DeficitSchedule(Q_MIN, Q_MAX, windows, r.steps)
                arm = f"[{start}, {start + WINDOW})" if windows else "no deficit"
                specs += [
                    _spec(r, schedule, f"{arm} of {r.steps}, {rule}", s)
                    for s in _seeds(seeds, 10)
                ]
    return specs


def learning_rate_sums(spec: RunSpec) -> tuple[float, float]:
    """Return the sums of the relative learning rate over the deficit of a run of H3, and over the steps after it."""
    recipe = cast(GraphRecipe, spec.recipe)
    steps = recipe.steps
    t = np.arange(steps)
    num_decays = (t >= round(0.5 * steps)) + (t >= round(0.75 * steps)).astype(float)
    cosine = 1 + np.cos(np.pi * t / steps)
    rates_by_rule = {
        "constant": np.ones(steps),
        "step": 0.1**num_decays,
        "cosine": recipe.final_lr + (1 - recipe.final_lr) * cosine / 2,
    }
    rates = rates_by_rule[recipe.lr_rule]
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
    demo_recipe = registry.recipe("demo", dataset, model, task="graph")
    return replace(
        demo_recipe,
        steps=steps or STEPS_BY_MODEL[demo_recipe.model],
        n_cycles=2,
        q_min=Q_MIN,
        evaluate_every=0,
    )


def _spec(r: Recipe, schedule: Schedule, arm: str, seed: int) -> RunSpec:
    return RunSpec(r, schedule, Q_MAX, Q_MAX, seed, arm, "demo")


# name of a grid -> function that makes its runs, description
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
