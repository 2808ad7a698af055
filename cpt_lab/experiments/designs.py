"""Designs: functions that return the runs of a kind of experiment.  Needs no torch.

>>> len(quality_cost("demo", schedules=["CR"], static_bits=[8], seeds=[0, 1]))
4
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from cpt_core.checks import declared, whole
from cpt_core.choosing.solver import solve_schedule
from cpt_core.schedules.cost import relative_cost
from cpt_core.schedules.deficit import DeficitSchedule, window_of
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import Schedule
from cpt_lab.experiments.image import ImageRecipe
from cpt_lab.experiments.recipe import EXECUTIONS, Deficits, Recipe
from cpt_lab.experiments.recipes import deficits, recipe
from cpt_lab.experiments.spec import RunSpec, run_spec


def quality_cost(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    task: str | None = None,
    schedules: Sequence[str] = tuple(SUITE),
    static_bits: Sequence[int] | None = None,
    q_max: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    preset: str = "ours",
    **changes: Any,
) -> list[RunSpec]:
    """Return the runs of a figure of quality against cost: every arm with every seed, for every q_max.

    At paper scale 66 per model: 10 schedules + static, q_max 6 and 8, 3 seeds; where a recipe leaves the learning rate
    to be chosen among several, as many times that. They need a GPU.

    Args:
        dataset: see ``recipes.recipe``.
        model: None takes the recipe's.
        task: a key of ``EXPERIMENTS``; needed for data of your own unless it is images.
        static_bits: bits of the static baselines, () for none; None takes q_max alone at paper scale, as the paper
            does, 2 and q_max at smoke scale, and elsewhere 2..q_max, an equal-cost baseline that the paper lacks.
        q_max: None takes 6 and 8 at paper scale, 8 elsewhere.
        seeds: None takes the recipe's.
        changes: other values for fields of the recipe, such as ``steps=2_000`` or ``aggregation="quantized"``.

    Raises:
        ValueError: for unknown names, before anything runs.

    Paper: sections 4.2 to 4.4, figures 3, 4, 6 and 7.
    """
    declared(quality_cost, {"seeds": seeds, "q_max": q_max})
    r = _changed(recipe(scale, dataset, model, preset, task or "image"), task, changes)
    # the authors' CIFAR sweeps keep 8-bit gradients also at q_max = 6
    q_grad = 8 if preset == "authors" and r.dataset.startswith("cifar") else None
    tops = tuple(q_max) if q_max is not None else ((6, 8) if scale == "paper" else (8,))
    specs = []
    for top in tops:
        bits = _usual_static_bits(scale, top) if static_bits is None else tuple(static_bits)
        for arm in (*schedules, *(f"static {b}" for b in bits)):
            for lr in getattr(r, "learning_rates", ()) or (r.lr,):
                at = replace(r, lr=lr)
                for seed in r.seeds if seeds is None else seeds:
                    specs.append(run_spec(at, arm, q_max=top, seed=seed, scale=scale, preset=preset, q_grad=q_grad))
    return specs


def _usual_static_bits(scale: str, q_max: int) -> tuple[int, ...]:
    """Return the static precisions that a scale trains beside the schedules."""
    if scale == "smoke":
        return (2, q_max)
    if scale == "paper":
        return (q_max,)
    return tuple(range(2, q_max + 1))


def aggregation(
    scale: str = "demo",
    dataset: str = "digits-graph",
    model: str | None = None,
    *,
    bits: Sequence[int] = (8,),
    **given: Any,
) -> list[RunSpec]:
    """Return the runs that compare FP-Agg with Q-Agg at static precision: both at all ``bits``, 3 seeds.

    Paper: section 4.3, figure 5 (8 bits, OGBN-Arxiv and OGBN-Products).
    """
    both = {"task": "graph", "schedules": (), "static_bits": bits, "q_max": (max(bits),), **given}
    return [s for kind in ("fp", "quantized") for s in quality_cost(scale, dataset, model, aggregation=kind, **both)]


def q_agg(scale: str = "demo", dataset: str = "digits-graph", model: str | None = None, **given: Any) -> list[RunSpec]:
    """Return the runs of ``quality_cost`` with Q-Agg: neighbours are summed at low precision too.

    Paper: section 4.3, the Q-Agg half of figure 6.
    """
    return quality_cost(scale, dataset, model, task="graph", aggregation="quantized", **given)


def fanout(
    scale: str = "demo",
    dataset: str = "ogbn-products",
    model: str | None = None,
    *,
    fanouts: Sequence[int] = (8, 16, 32, 64),
    **given: Any,
) -> list[RunSpec]:
    """Return the runs that compare numbers of sampled neighbours at static 8 bits, with FP-Agg and with Q-Agg.

    Raises:
        ValueError: for a recipe that trains on the full graph.

    Paper: section 4.3 (32 neighbours).
    Differs: the other numbers of neighbours are ours.
    """
    specs = [s for n in fanouts for s in aggregation(scale, dataset, model, fanout=n, **given)]
    if any(not s.recipe.batch for s in specs):
        raise ValueError(f"{specs[0].recipe.model} on {dataset} trains on the full graph: no neighbours are sampled")
    return specs


def cycles(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    n_cycles: Sequence[int] = (1, 2),
    **given: Any,
) -> list[RunSpec]:
    """Return the runs that compare numbers of cycles: the schedules that are not triangular, which need an even number.

    Paper: section 4.4 (one and two cycles on XNLI).
    """
    repeated = [name for name, entry in SUITE.items() if not entry.triangular]
    given = {"schedules": repeated, "static_bits": (), **given}
    return [s for n in n_cycles for s in quality_cost(scale, dataset, model, n_cycles=n, **given)]


def _changed(found: Recipe, task: str | None, changes: dict[str, Any]) -> Recipe:
    """Return a recipe with other values for some fields; ValueError for another task or unknown fields."""
    if task is not None and found.task != task:
        raise ValueError(f"dataset {found.dataset!r} is for task {found.task!r}, not {task!r}")
    unknown = sorted(set(changes) - set(asdict(found)))
    if unknown:
        raise ValueError(f"a recipe has no {', '.join(unknown)}; it has {', '.join(asdict(found))}")
    if "lr" in changes and hasattr(found, "learning_rates"):  # nothing is left to be chosen
        changes = {"learning_rates": (), **changes}
    return replace(found, **changes)


def deficit_scan(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    task: str | None = None,
    lengths: Sequence[int] | None = None,
    windows: Sequence[tuple[int, int]] | None = None,
    steps_per_epoch: int = 1,
    seeds: Sequence[int] | None = None,
    q_max: int = 8,
    controls: bool = True,
    **changes: Any,
) -> list[RunSpec]:
    """Return the runs of a critical-period experiment: training with a deficit, ``q_min`` instead of ``q_max`` bits.

    A deficit of R steps at the start makes the training R steps longer; a window lies within a training of fixed
    length. Each total length has two controls, without which lost training time passes for damage: the same training
    at ``q_max`` throughout, and the same number of low steps at its end.

    Other arguments are those of ``quality_cost``.

    Args:
        lengths: low steps at the start; 0 is no deficit. None takes those of ``Dataset.deficits``.
        windows: pairs (start, stop) of low steps, half-open. None takes those of ``Dataset.deficits``.
        steps_per_epoch: what one unit of ``lengths`` and ``windows`` is, when they are given in epochs.
        q_max: bits outside the deficit, and of the gradients.
        controls: also train the two controls; without them the arms are those of table 1, one of which has no deficit.
        changes: other values for fields of the recipe, such as ``q_min=3``; ``steps=`` is the training after a deficit
            at the start, and all of the training with a window.

    Raises:
        ValueError: for unknown names and for lengths and windows that do not fit, before anything runs.

    Paper: section 5, figure 8, table 1.
    Differs: both controls are ours.
    """
    declared(deficit_scan, {"seeds": seeds})
    found, settings = deficits(scale, dataset, model, task or "image")
    r = _changed(found, task, changes)
    total = changes.get("steps", settings.window_steps or r.steps)
    epoch = whole("steps_per_epoch", steps_per_epoch, 1)
    whole("steps", total, 1)
    starts = settings.lengths if lengths is None else [whole("the length of a deficit", n, 0) * epoch for n in lengths]
    inner = settings.windows if windows is None else [(a * epoch, b * epoch) for a, b in map(window_of, windows)]
    runs: dict[tuple[Recipe, DeficitSchedule], str] = {}  # a run that two experiments share is listed once

    def add(at: Recipe, *deficit: tuple[int, int]) -> None:
        schedule = DeficitSchedule(r.q_min, q_max, deficit, at.steps)
        runs[at, schedule] = _deficit_name(schedule, settings)

    for length in starts:
        at = replace(r, steps=length + r.steps)
        if settings.lr_after and isinstance(at, ImageRecipe):
            at = replace(at, milestones=tuple((length + m * r.steps) / at.steps for m in at.milestones))
        if controls or not length:
            add(at)
        if length:
            add(at, (0, length))
            if controls:
                add(at, (r.steps, at.steps))
    at = replace(r, steps=total)
    for start, stop in inner:
        if controls:
            add(at)
        add(at, (start, stop))
        if controls:
            add(at, (total - (stop - start), total))
    return [
        RunSpec(at, schedule, q_max, q_max, seed, name, scale)
        for (at, schedule), name in runs.items()
        for seed in (r.seeds if seeds is None else seeds)
    ]


def _deficit_name(schedule: DeficitSchedule, settings: Deficits) -> str:
    """Such as "[0, 16K) of 272K" or "no deficit, 272K", in the units of the experiment."""

    def count(steps: int) -> str:
        return f"{steps // settings.unit}{settings.suffix}" if steps and not steps % settings.unit else str(steps)

    total = count(schedule.total_steps)
    spans = ", ".join(f"[{count(start)}, {count(stop)})" for start, stop in schedule.windows)
    return f"{spans} of {total}" if spans else f"no deficit, {total}"


deficit_length = partial(deficit_scan, windows=())  # deficits at the start alone
deficit_window = partial(deficit_scan, lengths=())


def equal_cost(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    task: str | None = None,
    budget: float | None = None,
    delay: float = 0.1,
    seeds: Sequence[int] | None = None,
    q_max: int = 8,
    **changes: Any,
) -> list[RunSpec]:
    """Return runs that cost the same number of bit operations, spent in different ways, and static ``q_max`` in full.

    With the cost of RR, or of RR's profile bent to ``budget``: that schedule; the same profile delayed, and bent until
    it costs the same; ER, static ``q_max`` and the lowest static precision that costs at least 95 % of RR per step,
    each stopped when the money is spent (by whole steps: never later), its learning rate falling accordingly sooner.

    Other arguments are those of ``quality_cost``.

    Args:
        budget: cost relative to static ``q_max``; None takes RR's.
        delay: share of the steps that the delayed schedule holds at ``q_max`` first.

    Raises:
        ValueError: for unknown names, and for a budget or a delay that cannot be met.

    Paper: section 5 (the closing remark on delays).
    """
    declared(equal_cost, {"seeds": seeds})
    r = _changed(recipe(scale, dataset, model, task=task or "image"), task, changes)

    def solved(level: float, delay: float = 0.0) -> Schedule:
        return solve_schedule(level, r.q_min, q_max, r.steps, r.n_cycles, "rex", delay=delay)

    def price(spec: RunSpec) -> float:
        return spec.schedule.relative_cost(q_max=q_max)

    def make(arm: str, at: Recipe = r) -> RunSpec:
        return run_spec(at, arm, q_max=q_max, seed=0, scale=scale)

    def bent(schedule: Schedule, arm: str) -> RunSpec:
        return RunSpec(r, schedule, q_max, q_max, 0, arm, scale)

    def stopped(arm: str) -> RunSpec:
        steps = r.steps
        while (each := price(spec := make(arm, replace(r, steps=steps)))) * steps > spent + 1e-9:
            steps = min(steps - 1, int(spent / each))
        return spec if steps == r.steps else replace(spec, arm=f"{arm}, {steps} of {r.steps} steps")

    first = make("RR") if budget is None else bent(solved(budget), f"RR at {budget:.3f}")
    level = price(first)
    spent = level * r.steps
    static = next(b for b in range(r.q_min, q_max + 1) if relative_cost([b], q_max) >= 0.95 * level)
    arms = [
        first,
        bent(solved(level, delay), f"{first.arm} delayed {100 * delay:g} %"),
        stopped("ER"),
        stopped(f"static {q_max}"),
        stopped(f"static {static}"),
        make(f"static {q_max}"),
    ]
    arms = list({spec.key: spec for spec in arms}.values())
    return [replace(spec, seed=seed) for spec in arms for seed in (r.seeds if seeds is None else seeds)]


def execution(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    task: str | None = None,
    arm: str = "CR",
    seeds: Sequence[int] | None = None,
    **changes: Any,
) -> list[RunSpec]:
    """Return runs of one schedule with simulated products and with products on codes, each with two kinds of steps.

    The steps of the grids are those of the paper's code, or one per tensor, with which all products have an integer
    form. Runs of one seed differ in nothing else. The test set is looked at ten times, for curves.

    Other arguments are those of ``quality_cost``.

    Args:
        arm: a schedule's name, or "static 5".
        seeds: None takes 0 to 9.
    """
    declared(execution, {"seeds": seeds})
    r = recipe(scale, dataset, model, task=task or "image")
    r = _changed(r, task, {"evaluate_every": max(1, changes.get("steps", r.steps) // 10), **changes})
    return [
        run_spec(replace(r, execution=how, shared_steps=shared), arm, q_max=8, seed=seed, scale=scale)
        for shared in (False, True)
        for how in EXECUTIONS
        for seed in (range(10) if seeds is None else seeds)
    ]
