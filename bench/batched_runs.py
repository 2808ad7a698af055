"""Speed-up of runs that train side by side in one process: ``python -m bench.batched_runs [RECIPE ...]``.

It measures two ratios for the demo recipes whose runs are batched by default. *R=2, R=11*: CPU seconds of a run that
trains alone, divided by those of a run in a batch of 2 or 11, on one thread, from its start to its metrics. *sweep*:
wall seconds of a sweep with one process for every run, divided by those of the sweep with its default batches; the
sweep has the schedules and static 8 on two seeds, with two workers. All are medians of three interleaved measurements.
Writes ``data/results/together.json``.
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

    def train_batch(count: int) -> None:
        run_batched(
            [training_steps(load_task_class(spec), spec) for spec in arms[:count]]
        )

    single_seconds, *batch_seconds = median_seconds(
        time.process_time,
        lambda: train(load_task_class(arms[2]), arms[2]),
        *(partial(train_batch, count) for count in BATCH_SIZES),
    )

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
        f"R={count}": round(single_seconds * count / seconds, 2)
        for count, seconds in zip(BATCH_SIZES, batch_seconds, strict=True)
    }
    return {
        "alone_s": round(single_seconds, 2),
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
    ratios_by_recipe = {}
    for name in names or EMBEDDED:
        ratios_by_recipe[name] = measure_recipe(name)
        print(name, ratios_by_recipe[name], flush=True)
    where = {**source(), "machine": machine(), "versions": versions()}
    content = {
        "command": "python -m bench.batched_runs",
        "recipes": ratios_by_recipe,
        "provenance": where,
    }
    write_text(results_dir() / "together.json", json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
