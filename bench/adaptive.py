"""Bits that rise when the loss stalls, beside CR and static bits of the same cost: ``python -m bench.adaptive``.

For every seed a task is trained under ``AdaptiveScheduler`` (3, 4, 6 and 8 bits, all else as by default), which says
afterwards what it cost; then under CR bent to that cost, and at static bits of it (the two next to it, interleaved).
All three start alike, see the same batches, and are evaluated at 8 bits on the test data. The rule: a difference counts
when its 95 % interval, paired by seed, lies beyond 0. Two differences a task, uncorrected: a look, no registered test.
Writes ``data/results/adaptive.json``.
"""

from __future__ import annotations

import json
import math
import warnings

import torch

from cpt_core.checks import write_text
from cpt_core.choosing.adaptive import AdaptiveScheduler
from cpt_core.choosing.allocation import static_of_cost
from cpt_core.choosing.solver import solve_schedule
from cpt_core.schedules.schedule import Schedule, ShortCycleWarning, StaticSchedule
from cpt_lab.experiments.recipe import Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.provenance import machine, source, versions
from cpt_lab.studies.h7.arms import CASES
from cpt_lab.tasks.base import task_of
from cpt_lab.training.session import Session
from cpt_lab.training.train import evaluate, train

LEVELS, SEEDS = (3, 4, 6, 8), range(500, 516)
EPOCH = {"digits": 14, "characters": 20}  # optimizer steps; of characters, whose text is read in 20 columns, a choice


def adaptive(recipe: Recipe, seed: int, epoch: int) -> tuple[Schedule, dict[str, float]]:
    """Train under the rule; return the schedule that ran, and the test metrics."""
    spec = RunSpec(recipe, StaticSchedule(LEVELS[-1], recipe.steps), LEVELS[-1], LEVELS[-1], seed, "adaptive", "demo")
    session = Session(task_of(spec), spec)
    scheduler, batches = AdaptiveScheduler(session.model, LEVELS, steps_per_epoch=epoch), session.task.batches(0)
    for step in range(recipe.steps):
        scheduler.step(session.step(next(batches), session.lr_at(step, [])))
    return scheduler.ran, evaluate(session, recipe.steps, "q_max")["test"]


def compared(name: str, seed: int) -> dict[str, object]:
    """Return cost, schedule and qualities of one seed: points, or -100 times the logarithm of the perplexity."""
    recipe = CASES[name].recipe
    ran, found = adaptive(recipe, seed, EPOCH[name])
    cost = ran.relative_cost(LEVELS[-1], LEVELS[-1])
    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        cr = solve_schedule(cost, LEVELS[0], LEVELS[-1], recipe.steps, recipe.n_cycles, "cosine")
    static = static_of_cost(cost, LEVELS[-1], recipe.steps)
    metrics = {"adaptive": found}
    for arm, schedule in (("CR", cr), ("static", static)):
        spec = RunSpec(recipe, schedule, LEVELS[-1], LEVELS[-1], seed, arm, "demo")
        run = train(task_of(spec), spec)
        metrics[arm] = {m["name"]: m["value"] for m in run.metrics
                        if (m["split"], m["when"], m["precision"]) == ("test", "final", "q_max")}  # fmt: skip
    costs = {arm: s.relative_cost(LEVELS[-1], LEVELS[-1]) for arm, s in (("CR", cr), ("static", static))}
    return {
        "seed": seed, "cost": cost, "costs": costs, "runs": ran.to_dict()["runs"],
        **{arm: 100 * m["accuracy"] if "accuracy" in m else -100 * math.log(m["perplexity"])
           for arm, m in metrics.items()},
    }  # fmt: skip


def main() -> None:
    """Train, print, write."""
    torch.set_num_threads(1)
    found = {}
    for name in EPOCH:
        found[name] = []
        for seed in SEEDS:
            found[name].append(compared(name, seed))
            print(name, found[name][-1], flush=True)
    where = {**source(), "machine": machine(), "versions": versions()}
    kept = {"command": "python -m bench.adaptive", "tasks": found, "provenance": where}
    write_text(results_dir() / "adaptive.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
