"""Comparison of bits allocated over roles with static bits of equal cost: ``python -m bench.roles``.

How much one bit less costs in weights, activations and gradients is measured on four small tasks, from 4 bits in all
three, on six seeds, and judged on held-out data (``sensitivity(..., roles=True)``).
``allocate(..., over="roles")`` spends the cost of static 3/8 by it, on at least 3 bits. On twelve other seeds that is
compared with static *3/8* and with *4/5*, the pair that H7 found, at 0.98 of the cost; all are judged at 8 bits.

The rule, written before the runs: *allocated minus 3/8* and *allocated minus 4/5* of every task, paired by seed, by a
two-sided t test with Holm's correction over the eight, at .05; a percent of the perplexity, a point, and .2 points on
the graph are too little to name. A model that diverged counts as chance. Writes ``data/results/roles.json`` after every
seed, and goes on from there on the same commit and machine.
"""

from __future__ import annotations

import json
import math

import torch

from bench.resume import check_same_provenance
from cpt_core.schedules.cost import relative_cost
from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_extras.files import write_text
from cpt_extras.search.allocation import allocate
from cpt_extras.search.sensitivity_result import Sensitivity
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.provenance import machine, source, versions
from cpt_lab.studies.case import NUM_OUTPUTS
from cpt_lab.studies.h7.arms import CASES, Q_MAX
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.recipe_search import recipe_sensitivity
from cpt_lab.training.train import train

TASKS = ("digits", "characters", "gcn", "ptb")
BASE, LOWEST, BUDGET = 4, 3, relative_cost([3], Q_MAX)
MEASURED, SEEDS = range(800, 806), range(820, 832)
Arms = dict[str, tuple[Schedule, int | None]]


def arms(measured: Sensitivity, steps: int) -> Arms:
    """Return the schedules and gradient bits that are compared."""
    allocated = allocate(measured, BUDGET, LOWEST, Q_MAX, "roles", total_steps=steps)
    return {
        "allocated": (allocated, None),
        "3/8": (StaticSchedule(3, steps), 8),
        "4/5": (StaticSchedule(4, steps), 5),
    }


def quality(spec: RunSpec) -> float:
    """Train a run; return its test quality at 8 bits: accuracy in points, or -100 log(perplexity)."""
    run, text = train(load_task_class(spec), spec), spec.recipe.task == "language_model"
    name, chance = (
        ("perplexity", NUM_OUTPUTS[spec.recipe.dataset])
        if text
        else ("accuracy", 1 / NUM_OUTPUTS[spec.recipe.dataset])
    )
    value = run.metric(name) if run.status == "ok" else chance
    return -100 * math.log(value) if text else 100 * value


def main() -> None:
    """Measure the sensitivities, train all runs, and write both."""
    torch.set_num_threads(1)
    path = results_dir() / "roles.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    where = {**source(), "machine": machine(), "versions": versions()}
    if content:
        check_same_provenance(path, content["provenance"], where)
    content = {
        "command": "python -m bench.roles",
        "measured": {},
        "rows": [],
        **content,
        "provenance": where,
    }
    for task in TASKS:
        recipe = CASES[task].recipe
        if task not in content["measured"]:
            measured = recipe_sensitivity(
                recipe,
                base=BASE,
                q_max=Q_MAX,
                windows=1,
                layers=1,
                estimate=False,
                roles=True,
                seeds=MEASURED,
            )
            print(measured, flush=True)
            content["measured"][task] = measured.to_dict()
        schedules = arms(Sensitivity.from_dict(content["measured"][task]), recipe.steps)
        finished_seeds = {row["seed"] for row in content["rows"] if row["task"] == task}
        for seed in [s for s in SEEDS if s not in finished_seeds]:
            for arm, (schedule, gradients) in schedules.items():
                spec = RunSpec(recipe, schedule, Q_MAX, gradients, seed, arm, "demo")
                row = {
                    "task": task,
                    "seed": seed,
                    "arm": arm,
                    "cost": spec.relative_cost,
                    "quality": quality(spec),
                }
                content["rows"].append(row)
                print(row, flush=True)
            write_text(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
