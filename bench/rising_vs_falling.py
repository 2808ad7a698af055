"""Comparison of rising with falling bits of equal cost: ``python -m bench.rising_vs_falling``.

Text is trained at 3 and at 5 forward bits, with gradients of 5, at the cost of static 4/5: first 3 then 5 (*rising*),
first 5 then 3 (*falling*), or mixed evenly over the training (*even*), beside *static* 4/5. On characters the output
layer has 6 bits throughout, for which the LSTM pays; on Penn Treebank all layers change. Characters have an LSTM of 64,
128 or 256 and 160 or 640 steps, twelve seeds each; all models are judged at 8 bits.

The rule, written before the runs: *rising minus even* and *rising minus falling* of every case, paired by seed, by a
two-sided t test with Holm's correction over the fourteen, at .05; a percent of the perplexity is too little to name.
*Rising minus static* and *even minus static* are shown beside it, with no test. A model that diverged counts as chance.
Differences have a standard deviation of about 2 %: then twelve seeds find 2.5 % with power .9 at .05 / 14. Writes
``data/results/rising_vs_falling.json`` after every seed, and goes on from there on the
same commit and machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import torch

from bench.resume import check_same_provenance
from cpt_core.bitops.plan import count_bitops
from cpt_core.quantization.convert import quantize_
from cpt_core.schedules.cost import relative_cost
from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_extras.files import write_text
from cpt_extras.search.custom_schedules import TableSchedule
from cpt_extras.search.layered import LayeredSchedule
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.provenance import machine, source, versions
from cpt_lab.studies.case import NUM_OUTPUTS
from cpt_lab.studies.h7.arms import CASES
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.train import train

LOW, HIGH, OUTPUT, STATIC, GRADIENTS, Q_MAX, SEEDS = 3, 5, 6, 4, 5, 8, range(700, 712)
ORDERS = ("rising", "even", "falling")
RECIPES: dict[str, Recipe] = {
    f"characters, LSTM of {hidden}, {steps} steps": replace(
        CASES["characters"].recipe, hidden=hidden, steps=steps
    )
    for hidden in (64, 128, 256)
    for steps in (160, 640)
} | {"Penn Treebank, small": CASES["ptb"].recipe}


def order_bits(order: str, high: int, steps: int) -> TableSchedule:
    """Return a schedule with ``high`` of ``steps`` at ``HIGH`` bits, the rest at ``LOW``, in an order."""
    if order == "even":
        entries = []
        for step in range(steps):
            is_high = (step + 1) * high // steps > step * high // steps
            entries.append((HIGH if is_high else LOW, 1))
        return TableSchedule(tuple(entries))

    rising = ((LOW, steps - high), (HIGH, high))
    return TableSchedule(rising if order == "rising" else rising[::-1])


def arms(recipe: Recipe) -> dict[str, Schedule]:
    """Return the schedules of a task; all cost as much as static 4/5, to half a step."""
    static = StaticSchedule(STATIC, recipe.steps)
    spec = RunSpec(recipe, static, Q_MAX, GRADIENTS, 0, "", "demo")
    task = load_task_class(spec)(spec, torch.device("cpu"))
    model = quantize_(task.build_model())
    macs = count_bitops(
        model, task.inputs(next(iter(task.batches(0)))), static, q_grad=GRADIENTS
    ).macs
    output = (
        {name: n for name, n in macs.items() if name == "decoder"}
        if recipe.dataset == "pydoc"
        else {}
    )
    rest = {name: n for name, n in macs.items() if name not in output}
    cost = {
        q: relative_cost([q], Q_MAX, q_grad=GRADIENTS)
        for q in (LOW, STATIC, HIGH, OUTPUT)
    }
    budget_of_rest = (
        sum(macs.values()) * cost[STATIC] - sum(output.values()) * cost[OUTPUT]
    ) / sum(rest.values())
    high = round(recipe.steps * (budget_of_rest - cost[LOW]) / (cost[HIGH] - cost[LOW]))
    schedules: dict[str, Schedule] = {
        order: order_bits(order, high, recipe.steps) for order in ORDERS
    }
    if output:
        fixed = (
            tuple(output),
            StaticSchedule(OUTPUT, recipe.steps),
            sum(output.values()),
        )
        names = tuple(
            dict.fromkeys(name.split()[0] for name in rest)
        )  # the gates of an LSTM run at its bits
        schedules = {
            o: LayeredSchedule((fixed, (names, s, sum(rest.values()))))
            for o, s in schedules.items()
        }
    return {"static": static, **schedules}


def quality(spec: RunSpec) -> float:
    """Train a run; return -100 log(test perplexity) at 8 bits, in which a difference of 1 is a percent."""
    run = train(load_task_class(spec), spec)
    test_metrics: list[dict[str, Any]] = [
        m for m in run.metrics if m["split"] == "test"
    ]
    perplexity = (
        test_metrics[-1]["value"]
        if run.status == "ok"
        else NUM_OUTPUTS[spec.recipe.dataset]
    )
    return -100 * math.log(perplexity)


def main() -> None:
    """Train all runs, print and write them."""
    torch.set_num_threads(1)
    path = results_dir() / "rising_vs_falling.json"
    rows = []
    where = {**source(), "machine": machine(), "versions": versions()}
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        check_same_provenance(path, content["provenance"], where)
        rows = content["rows"]
    schedules_by_task = {name: arms(recipe) for name, recipe in RECIPES.items()}
    for seed in [s for s in SEEDS if s not in {row["seed"] for row in rows}]:
        for name, recipe in RECIPES.items():
            for arm, schedule in schedules_by_task[name].items():
                spec = RunSpec(recipe, schedule, Q_MAX, GRADIENTS, seed, arm, "demo")
                cost = schedule.relative_cost(q_max=Q_MAX, q_grad=GRADIENTS)
                rows.append(
                    {
                        "task": name,
                        "seed": seed,
                        "arm": arm,
                        "cost": cost,
                        "quality": quality(spec),
                    }
                )
                print(rows[-1], flush=True)
        content = {
            "command": "python -m bench.rising_vs_falling",
            "rows": rows,
            "provenance": where,
        }
        write_text(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
