"""Quality of trained models at other evaluation bits: ``python -m bench.evaluation_bits``.

Four tasks are trained at static 3, 4, 5, 6 and 8 bits, with gradients of 8, on eight seeds; every trained model is
evaluated on its test data at each of these bits and in float32, on the running ranges that training left. The rule:
evaluation at other bits than those of training is better or worse where the 95 % interval of its difference, paired by
seed, lies beyond 0. The differences, 25 per task, are not corrected for their number: this is an exploration, not a
preregistered test. Writes ``data/results/evaluated_at.json``.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.files import write_text
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.provenance import machine, source, versions
from cpt_lab.studies.h7.arms import CASES
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.train import train

TASKS, BITS, SEEDS = (
    ("digits", "characters", "gcn", "ptb"),
    (3, 4, 5, 6, 8),
    range(600, 608),
)


def qualities(name: str, trained: int, seed: int) -> dict[str, float]:
    """Train one model; return its quality by evaluation bits: points, or -100 log(perplexity)."""
    recipe = CASES[name].recipe
    spec = RunSpec(
        recipe,
        StaticSchedule(trained, recipe.steps),
        8,
        8,
        seed,
        f"static {trained}",
        "demo",
    )
    task = load_task_class(spec)
    run = train(task, spec)
    model, data = run.model.eval(), task(spec, torch.device("cpu"))
    quality_by_bits: dict[str, float] = {}
    for bits in (*BITS, "float"):
        with precision(model, bits):
            metrics: dict[str, Any] = data.evaluate(model)["test"]
        accuracy, perplexity = metrics.get("accuracy"), metrics.get("perplexity")
        quality_by_bits[str(bits)] = (
            -100 * math.log(perplexity) if accuracy is None else 100 * accuracy
        )
    return quality_by_bits


def main() -> None:
    """Train and evaluate all models, and write the results."""
    torch.set_num_threads(1)
    rows = []
    for name in TASKS:
        for seed in SEEDS:
            for trained in BITS:
                rows.append(
                    {
                        "task": name,
                        "seed": seed,
                        "trained": trained,
                        "quality": qualities(name, trained, seed),
                    }
                )
                print(rows[-1], flush=True)
    where = {**source(), "machine": machine(), "versions": versions()}
    content = {
        "command": "python -m bench.evaluation_bits",
        "rows": rows,
        "provenance": where,
    }
    write_text(
        results_dir() / "evaluated_at.json", json.dumps(content, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
