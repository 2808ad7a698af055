"""Speed-up of runs that train side by side in one process: ``python -m bench.batched_runs [RECIPE ...]``.

It measures two ratios for the demo recipes whose runs are batched by default. *R=2, R=11*: CPU seconds of 2 or 11 runs
that train one after the other, divided by those of a batch of the same runs, on one thread, from their start to their
metrics. *sweep*:
wall seconds of a sweep with one process for every run, divided by those of the sweep with its default batches; the
sweep has the schedules and static 8 on two seeds, with two workers. All are medians of three interleaved measurements.
Writes ``data/results/together.json``; recipes that are not named stay as they are.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpt_core.schedules.profiles import SUITE
from cpt_extras.files import write_text
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.spec import RunSpec, run_spec
from cpt_lab.paths import results_dir
from cpt_lab.provenance import machine, source, versions
from cpt_lab.sweeps.process import ALLOCATOR
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.batched_runs import run_batched
from cpt_lab.training.train import train, training_steps

RECIPES = {
    f"{r.dataset}/{r.model}": r
    for experiment in EXPERIMENTS.values()
    for data in experiment.datasets
    for r in data.recipes.get("demo", ())
}
EMBEDDED = ("digits/mlp6", "digits/resnet8_w8", "digits-graph/gcn", "pydoc/lstm")
BATCH_SIZES, REPEATS, WORKERS = (2, 11), 3, 2


def specs(name: str, seed: int) -> list[RunSpec]:
    """Return the schedules of the suite and static 8."""
    return [
        run_spec(RECIPES[name], arm, q_max=8, seed=seed, scale="demo")
        for arm in (*SUITE, "static 8")
    ]


def median_seconds(
    clock: Callable[[], float], *functions: Callable[[], object]
) -> list[float]:
    """Return the median time of every function; the functions take turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(REPEATS):
        for function, function_times in zip(functions, times, strict=True):
            start = clock()
            function()
            function_times.append(clock() - start)
    return [statistics.median(function_times) for function_times in times]


def measure_recipe(name: str) -> dict[str, float]:
    """Return seconds of a single run and of a sweep, and the speed-ups of batching."""
    arms = specs(name, 0)
    train(load_task_class(arms[0]), arms[0])  # loads data and kernels

    def train_alone(count: int) -> None:
        for spec in arms[:count]:
            train(load_task_class(spec), spec)

    def train_batch(count: int) -> None:
        run_batched(
            [training_steps(load_task_class(spec), spec) for spec in arms[:count]]
        )

    seconds = median_seconds(
        time.process_time,
        *(partial(train_alone, count) for count in BATCH_SIZES),
        *(partial(train_batch, count) for count in BATCH_SIZES),
    )
    alone_seconds = dict(zip(BATCH_SIZES, seconds[: len(BATCH_SIZES)], strict=True))
    batch_seconds = dict(zip(BATCH_SIZES, seconds[len(BATCH_SIZES) :], strict=True))

    all_specs = [spec for seed in range(2) for spec in specs(name, seed)]

    def sweep(runs_per_process: int | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_grid(
                all_specs,
                Path(folder) / "rows.jsonl",
                workers=WORKERS,
                together=runs_per_process,
                progress=False,
            )

    unbatched_seconds, default_seconds = median_seconds(
        time.monotonic, partial(sweep, 1), partial(sweep, None)
    )

    speedups = {
        f"R={count}": round(alone_seconds[count] / batch_seconds[count], 2)
        for count in BATCH_SIZES
    }
    largest = max(BATCH_SIZES)
    return {
        "alone_s": round(alone_seconds[largest] / largest, 2),
        "sweep_s": round(unbatched_seconds, 1),
        **speedups,
        "sweep": round(unbatched_seconds / default_seconds, 2),
    }


def main(names: list[str]) -> None:
    """Measure the recipes, print the ratios and write them."""
    if missing := {
        name: value for name, value in ALLOCATOR.items() if not os.environ.get(name)
    }:  # as runs have it
        os.execve(
            sys.executable,
            [sys.executable, "-m", "bench.batched_runs", *names],
            {**os.environ, **missing},
        )
    torch.set_num_threads(1)
    recipes: dict[str, dict[str, Any]] = {}
    for name in names or EMBEDDED:
        ratios = measure_recipe(name)
        print(name, ratios, flush=True)
        where = {**source(), "machine": machine(), "versions": versions()}
        recipes[name] = {**ratios, "provenance": where}
    path = results_dir() / "together.json"
    content = {
        "command": "python -m bench.batched_runs",
        "recipes": {**read_recipes(path), **recipes},
    }
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_recipes(path: Path) -> dict[str, dict[str, Any]]:
    """Return the stored ratios by recipe, each with its provenance; that of older files is common to all."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    where = content.get("provenance", {})
    recipes = content["recipes"].items()
    return {name: {"provenance": where, **ratios} for name, ratios in recipes}


if __name__ == "__main__":
    main(sys.argv[1:])
