"""Designs: functions that return the runs of a kind of experiment.  Needs no torch.

Arguments have the names of ``parameters.PARAMETERS``; None takes the value of the recipe, or of the scale.

>>> len(quality_cost("demo", schedules=["CR"], static_bits=[8], seeds=[0, 1]))
4
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from cpt_core.schedules.cost import relative_cost
from cpt_core.schedules.deficit import DeficitSchedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import Schedule
from cpt_core.validation import check_bits, check_int, check_types
from cpt_extras.search.solver import solve_schedule
from cpt_lab.experiments.image import ImageRecipe
from cpt_lab.experiments.registry import deficits, recipe
from cpt_lab.experiments.schema import EXECUTIONS, Deficits, Recipe
from cpt_lab.experiments.spec import RunSpec, run_spec

# Fields of recipes that are parameters of experiments: None leaves them as they are.
RECIPE_PARAMETERS = ("q_min", "n_cycles", "steps")


def quality_cost(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    task: str | None = None,
    schedules: Sequence[str] = tuple(SUITE),
    static_bits: Sequence[int] | None = None,
    q_max: Sequence[int] | None = None,
    q_grad: int | None = None,
    learning_rate: float | None = None,
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
            does, 2 and q_max at smoke scale, and elsewhere 2..q_max, an equal-cost baseline that the paper lacks. A
            precision is trained at every q_max that it does not exceed.
        q_max: None takes 6 and 8 at paper scale, 8 elsewhere.
        q_grad: bits of the gradients; None takes q_max.
        learning_rate: one for all arms; None takes the recipe's, or those that it leaves to be chosen.
        seeds: None takes the recipe's.
        changes: other values for fields of the recipe: ``q_min``, ``n_cycles``, ``steps``, for which None takes the
            recipe's, and any other, such as ``aggregation="quantized"``.

    Raises:
        ValueError: for unknown names and for values that do not fit, before anything runs.

    Paper: sections 4.2 to 4.4, figures 3, 4, 6 and 7.
    """
    check_types(
        quality_cost,
        {
            "schedules": schedules,
            "static_bits": static_bits,
            "q_max": q_max,
            "q_grad": q_grad,
            "seeds": seeds,
        },
    )
    base_recipe = recipe(scale, dataset, model, preset, task or "image")
    r = _replace_fields(base_recipe, task, _with_learning_rate(changes, learning_rate))
    if q_grad is None and preset == "authors" and r.dataset.startswith("cifar"):
        q_grad = 8  # the authors' CIFAR sweeps keep 8-bit gradients also at q_max = 6
    if q_max is None:
        q_max = (6, 8) if scale == "paper" else (8,)
    tops = _q_max_values(q_max)
    if static_bits is not None:
        _check_static_bits(static_bits, tops)
    specs = []
    for top in tops:
        if len(schedules) and r.q_min > top:
            raise ValueError(
                f"q_min: expected an integer from 1 to q_max = {top}, got {r.q_min}"
            )
        arm_bits = (
            _default_static_bits(scale, top) if static_bits is None else static_bits
        )
        statics = [f"static {bits}" for bits in arm_bits if bits <= top]
        for arm in (*schedules, *statics):
            for lr in getattr(r, "learning_rates", ()) or (r.lr,):
                arm_recipe = replace(r, lr=lr)
                for seed in r.seeds if seeds is None else seeds:
                    specs.append(
                        run_spec(
                            arm_recipe,
                            arm,
                            q_max=top,
                            seed=seed,
                            scale=scale,
                            preset=preset,
                            q_grad=q_grad,
                        )
                    )
    return specs


def _default_static_bits(scale: str, q_max: int) -> tuple[int, ...]:
    """Return the default static precisions of a scale."""
    if scale == "smoke":
        return (2, q_max)
    if scale == "paper":
        return (q_max,)
    return tuple(range(2, q_max + 1))


def _q_max_values(q_max: Iterable[int]) -> list[int]:
    """Return the values of q_max, each once; ValueError for none, and for what is no number of bits."""
    tops = list(dict.fromkeys(check_bits("q_max", top) for top in q_max))
    if not tops:
        raise ValueError("q_max: expected at least one integer from 1 to 32, got none")
    return tops


def _check_static_bits(static_bits: Iterable[int], tops: Sequence[int]) -> None:
    for bits in static_bits:
        if check_bits("static_bits", bits) > max(tops):
            raise ValueError(
                f"static_bits: expected precisions up to q_max = {max(tops)}, got {bits}"
            )


def _with_learning_rate(
    changes: dict[str, Any], learning_rate: float | None
) -> dict[str, Any]:
    """Return changes of a recipe with a learning rate, which has the field ``lr``."""
    if learning_rate is None:
        return changes
    if "lr" in changes:
        raise ValueError(
            "learning_rate: expected None beside lr, its name in recipes, got both"
        )
    if isinstance(learning_rate, (bool, str)) or not 0 < learning_rate < math.inf:
        raise ValueError(
            f"learning_rate: expected a number above 0, got {learning_rate!r}"
        )
    return {**changes, "lr": learning_rate}


def aggregation(
    scale: str = "demo",
    dataset: str = "digits-graph",
    model: str | None = None,
    *,
    q_max: Sequence[int] = (8,),
    static_bits: Sequence[int] | None = None,
    **choices: Any,
) -> list[RunSpec]:
    """Return the runs that compare FP-Agg with Q-Agg at static precision: both at every q_max, 3 seeds.

    Args:
        static_bits: None takes q_max.

    Other arguments are those of ``quality_cost``.

    Paper: section 4.3, figure 5 (8 bits, OGBN-Arxiv and OGBN-Products).
    """
    specs = []
    for kind in ("fp", "quantized"):
        for top in q_max:
            bits = (top,) if static_bits is None else static_bits
            settings = {
                "task": "graph",
                "schedules": (),
                "static_bits": bits,
                "q_max": (top,),
                **choices,
            }
            specs += quality_cost(scale, dataset, model, aggregation=kind, **settings)
    return specs


def q_agg(
    scale: str = "demo",
    dataset: str = "digits-graph",
    model: str | None = None,
    **choices: Any,
) -> list[RunSpec]:
    """Return the runs of ``quality_cost`` with Q-Agg: neighbours are summed at low precision too.

    Paper: section 4.3, the Q-Agg half of figure 6.
    """
    return quality_cost(
        scale, dataset, model, **{"task": "graph", **choices}, aggregation="quantized"
    )


def fanout(
    scale: str = "demo",
    dataset: str = "ogbn-products",
    model: str | None = None,
    *,
    fanouts: Sequence[int] = (8, 16, 32, 64),
    **choices: Any,
) -> list[RunSpec]:
    """Return the runs that compare numbers of sampled neighbours at static 8 bits, with FP-Agg and with Q-Agg.

    Raises:
        ValueError: for a recipe that trains on the full graph.

    Paper: section 4.3 (32 neighbours).
    Differs: the other numbers of neighbours are ours.
    """
    specs = [
        s
        for n in fanouts
        for s in aggregation(scale, dataset, model, fanout=n, **choices)
    ]
    if any(not s.recipe.batch for s in specs):
        raise ValueError(
            f"{specs[0].recipe.model} on {dataset} trains on the full graph: no neighbours are sampled"
        )
    return specs


def cycles(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    n_cycles: Sequence[int] | int | None = None,
    **choices: Any,
) -> list[RunSpec]:
    """Return the runs that compare numbers of cycles: the schedules that are not triangular, which need an even number.

    Args:
        n_cycles: None takes 1 and 2.

    Other arguments are those of ``quality_cost``.

    Paper: section 4.4 (one and two cycles on XNLI).
    """
    schedules = [name for name, entry in SUITE.items() if not entry.triangular]
    choices = {"schedules": schedules, "static_bits": (), **choices}
    if n_cycles is None:
        n_cycles = (1, 2)
    counts = (n_cycles,) if isinstance(n_cycles, int) else n_cycles
    return [
        s
        for n in counts
        for s in quality_cost(scale, dataset, model, n_cycles=n, **choices)
    ]


def _replace_fields(
    base_recipe: Recipe, task: str | None, changes: dict[str, Any]
) -> Recipe:
    """Return a recipe with other values for some fields; ValueError for another task or unknown fields."""
    if task is not None and base_recipe.task != task:
        raise ValueError(
            f"dataset {base_recipe.dataset!r} is for task {base_recipe.task!r}, not {task!r}"
        )
    unknown = sorted(set(changes) - set(asdict(base_recipe)))
    if unknown:
        raise ValueError(
            f"a recipe has no {', '.join(unknown)}; it has {', '.join(asdict(base_recipe))}"
        )
    changes = {
        name: v
        for name, v in changes.items()
        if v is not None or name not in RECIPE_PARAMETERS
    }
    if "lr" in changes and hasattr(
        base_recipe, "learning_rates"
    ):  # nothing is left to be chosen
        changes = {"learning_rates": (), **changes}
    return replace(base_recipe, **changes)


def deficit_scan(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    task: str | None = None,
    deficit_bits: int | None = None,
    deficit_lengths: Sequence[int] | None = None,
    deficit_starts: Sequence[int] | None = None,
    deficit_window: int | None = None,
    decay: Sequence[str] = ("recipe",),
    controls: bool = True,
    q_max: Sequence[int] = (8,),
    q_grad: int | None = None,
    learning_rate: float | None = None,
    seeds: Sequence[int] | None = None,
    preset: str = "ours",
    **changes: Any,
) -> list[RunSpec]:
    """Return the runs of a critical-period experiment: training with a deficit, few bits instead of ``q_max``.

    A deficit of R steps at the start makes the training R steps longer (figure 8, left); a window lies within a
    training of fixed length (figure 8, right). Each total length has two controls, without which lost training time
    passes for damage: the same training at ``q_max`` throughout, and the same number of low steps at its end.

    Other arguments are those of ``quality_cost``.

    Args:
        deficit_bits: bits in the deficit; None takes the recipe's ``q_min``.
        deficit_lengths: low steps at the start; 0 is no deficit, () trains none of these. None takes those of
            ``Dataset.deficits``.
        deficit_starts: first steps of the windows, () for no windows. None takes those of ``Dataset.deficits``.
        deficit_window: low steps of every window. None takes those of ``Dataset.deficits``, else half the training.
        decay: of the learning rate, one or several of ``DECAYS``; each makes a set of runs. "recipe" changes nothing;
            what "step" is, ``decay_fields`` of the recipe says. A cosine spans the whole training with its deficit.
        controls: also train the two controls; without them the arms are those of table 1, one of which has no deficit.
        q_max: bits outside the deficit.
        preset: "ours"; in section 5 these are the settings of the authors' scripts.
        changes: other values for fields of the recipe; ``steps=`` is the training after a deficit at the start, and
            all of the training with a window.

    Raises:
        ValueError: for unknown names and for lengths and windows that do not fit, before anything runs.

    Paper: section 5, figure 8, table 1.
    Differs: both controls are ours.
    """
    check_types(
        deficit_scan,
        {
            "deficit_lengths": deficit_lengths,
            "deficit_starts": deficit_starts,
            "decay": decay,
            "controls": controls,
            "q_max": q_max,
            "q_grad": q_grad,
            "seeds": seeds,
        },
    )
    if preset != "ours":
        raise ValueError(
            f"preset: expected 'ours', which in section 5 are the authors' settings, got {preset!r}"
        )
    base_recipe, settings = deficits(scale, dataset, model, task or "image")
    r = _replace_fields(base_recipe, task, _with_learning_rate(changes, learning_rate))
    if deficit_bits is not None:
        if changes.get("q_min") is not None:
            raise ValueError(
                "deficit_bits: expected None beside q_min, its name in recipes, got both"
            )
        r = replace(r, q_min=check_bits("deficit_bits", deficit_bits))
    total = (
        r.steps
        if changes.get("steps") is not None
        else settings.window_steps or r.steps
    )
    lengths = [
        check_int("deficit_lengths", n, 0)
        for n in _value_or_default(deficit_lengths, settings.lengths)
    ]
    window = settings.window or total // 2
    if deficit_window is not None:
        window = check_int("deficit_window", deficit_window, 1)
    starts = [
        check_int("deficit_starts", n, 0)
        for n in _value_or_default(deficit_starts, settings.starts)
    ]
    for start in starts:
        _check_window(start, window, total)

    specs = []
    for top in _q_max_values(q_max):
        if r.q_min > top:
            raise ValueError(
                f"deficit_bits: expected an integer from 1 to q_max = {top}, got {r.q_min}"
            )
        arms: dict[
            tuple[Recipe, DeficitSchedule], str
        ] = {}  # a run that two experiments share is listed once
        for rule in dict.fromkeys(decay):
            decayed = replace(r, **r.decay_fields(rule))
            for arm_recipe, deficit in [
                *_arms_by_length(decayed, lengths, settings.lr_after, controls),
                *_arms_by_window(
                    replace(decayed, steps=total), starts, window, controls
                ),
            ]:
                schedule = DeficitSchedule(r.q_min, top, deficit, arm_recipe.steps)
                arms[arm_recipe, schedule] = _deficit_name(schedule, settings)
        for (arm_recipe, schedule), name in arms.items():
            for seed in r.seeds if seeds is None else seeds:
                specs.append(
                    RunSpec(arm_recipe, schedule, top, q_grad or top, seed, name, scale)
                )
    return specs


def _value_or_default(
    value: Sequence[int] | None, default: Sequence[int]
) -> Sequence[int]:
    return default if value is None else value


def _check_window(start: int, window: int, total: int) -> None:
    if start + window > total:
        last = total - window
        allowed = (
            f"from 0 to {last}" if last >= 0 else f"none, as deficit_window is {window}"
        )
        raise ValueError(
            f"deficit_starts: expected starts of windows of {window} steps within {total} steps, {allowed}; got {start}"
        )


def _arms_by_length(
    r: Recipe, lengths: Sequence[int], lr_after: bool, controls: bool
) -> list[tuple[Recipe, tuple[tuple[int, int], ...]]]:
    """Return recipes and windows of deficits at the start, and of their controls."""
    arms: list[tuple[Recipe, tuple[tuple[int, int], ...]]] = []
    for length in lengths:
        arm_recipe = replace(r, steps=length + r.steps)
        if lr_after and isinstance(arm_recipe, ImageRecipe):
            arm_recipe = replace(
                arm_recipe,
                milestones=tuple(
                    (length + m * r.steps) / arm_recipe.steps
                    for m in arm_recipe.milestones
                ),
            )
        if controls or not length:
            arms.append((arm_recipe, ()))
        if length:
            arms.append((arm_recipe, ((0, length),)))
        if length and controls:
            arms.append((arm_recipe, ((r.steps, arm_recipe.steps),)))
    return arms


def _arms_by_window(
    r: Recipe, starts: Sequence[int], window: int, controls: bool
) -> list[tuple[Recipe, tuple[tuple[int, int], ...]]]:
    """Return recipes and windows of deficits within a training of fixed length, and of their controls."""
    arms: list[tuple[Recipe, tuple[tuple[int, int], ...]]] = []
    for start in starts:
        if controls:
            arms.append((r, ()))
        arms.append((r, ((start, start + window),)))
        if controls:
            arms.append((r, ((r.steps - window, r.steps),)))
    return arms


def _deficit_name(schedule: DeficitSchedule, settings: Deficits) -> str:
    """Such as "[0, 16K) of 272K" or "no deficit, 272K", in the units of the experiment."""

    def count(steps: int) -> str:
        return (
            f"{steps // settings.unit}{settings.suffix}"
            if steps and not steps % settings.unit
            else str(steps)
        )

    total = count(schedule.total_steps)
    spans = ", ".join(
        f"[{count(start)}, {count(stop)})" for start, stop in schedule.windows
    )
    return f"{spans} of {total}" if spans else f"no deficit, {total}"


deficit_length = partial(deficit_scan, deficit_starts=())  # deficits at the start alone
deficit_window = partial(deficit_scan, deficit_lengths=())


def equal_cost(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    task: str | None = None,
    budget: float | None = None,
    delay: float = 0.1,
    q_max: Sequence[int] = (8,),
    learning_rate: float | None = None,
    seeds: Sequence[int] | None = None,
    **changes: Any,
) -> list[RunSpec]:
    """Return runs of equal bit operations, spent in different ways, and static ``q_max``.

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
    check_types(equal_cost, {"seeds": seeds, "q_max": q_max})
    base_recipe = recipe(scale, dataset, model, task=task or "image")
    r = _replace_fields(base_recipe, task, _with_learning_rate(changes, learning_rate))
    specs = []
    for top in _q_max_values(q_max):
        for spec in _equal_cost_arms(r, scale, budget, delay, top):
            specs += [
                replace(spec, seed=seed)
                for seed in (r.seeds if seeds is None else seeds)
            ]
    return specs


def _equal_cost_arms(
    r: Recipe, scale: str, budget: float | None, delay: float, q_max: int
) -> list[RunSpec]:
    """Return the arms of equal cost with one seed."""

    def schedule_at_cost(level: float, delay: float = 0.0) -> Schedule:
        return solve_schedule(
            level, r.q_min, q_max, r.steps, r.n_cycles, "rex", delay=delay
        )

    def price(spec: RunSpec) -> float:
        return spec.schedule.relative_cost(q_max=q_max)

    def make(arm: str, arm_recipe: Recipe = r) -> RunSpec:
        return run_spec(arm_recipe, arm, q_max=q_max, seed=0, scale=scale)

    def spec_of_schedule(schedule: Schedule, arm: str) -> RunSpec:
        return RunSpec(r, schedule, q_max, q_max, 0, arm, scale)

    def shortened_to_budget(arm: str) -> RunSpec:
        """Return the arm with as many steps as the budget pays for."""
        steps = r.steps
        spec = make(arm)
        step_cost = price(spec)
        while step_cost * steps > budget_in_steps + 1e-9:
            steps = min(steps - 1, int(budget_in_steps / step_cost))
            spec = make(arm, replace(r, steps=steps))
            step_cost = price(spec)
        if steps == r.steps:
            return spec
        return replace(spec, arm=f"{arm}, {steps} of {r.steps} steps")

    first = (
        make("RR")
        if budget is None
        else spec_of_schedule(schedule_at_cost(budget), f"RR at {budget:.3f}")
    )
    level = price(first)
    budget_in_steps = level * r.steps
    static = next(
        b
        for b in range(r.q_min, q_max + 1)
        if relative_cost([b], q_max) >= 0.95 * level
    )
    arms = [
        first,
        spec_of_schedule(
            schedule_at_cost(level, delay), f"{first.arm} delayed {100 * delay:g} %"
        ),
        shortened_to_budget("ER"),
        shortened_to_budget(f"static {q_max}"),
        shortened_to_budget(f"static {static}"),
        make(f"static {q_max}"),
    ]
    return list({spec.key: spec for spec in arms}.values())


def execution(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    task: str | None = None,
    arm: str = "CR",
    learning_rate: float | None = None,
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
    check_types(execution, {"seeds": seeds})
    r = recipe(scale, dataset, model, task=task or "image")
    changes = _with_learning_rate(changes, learning_rate)
    r = _replace_fields(
        r,
        task,
        {"evaluate_every": max(1, (changes.get("steps") or r.steps) // 10), **changes},
    )
    return [
        run_spec(
            replace(r, execution=how, shared_steps=shared),
            arm,
            q_max=8,
            seed=seed,
            scale=scale,
        )
        for shared in (False, True)
        for how in EXECUTIONS
        for seed in (range(10) if seeds is None else seeds)
    ]
