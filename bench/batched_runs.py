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
GROUP_SIZES, REPEATS, WORKERS = (2, 11), 3, 2


def specs(name: str, seed: int) -> list[RunSpec]:
    """Return the schedules of the suite and static 8."""
    return [
        run_spec(RECIPES[name], arm, q_max=8, seed=seed, scale="demo")
        for arm in (*SUITE, "static 8")
    ]


def median_seconds(
    clock: Callable[[], float], *timed: Callable[[], object]
) -> list[float]:
    """Return the median time of every function; the functions take turns."""
    taken: list[list[float]] = [[] for _ in timed]
    for _ in range(REPEATS):
        for work, of in zip(timed, taken, strict=True):
            start = clock()
            work()
            of.append(clock() - start)
    return [statistics.median(of) for of in taken]


def measure_recipe(name: str) -> dict[str, float]:
    """Return seconds of a single run and of a sweep, and the speed-ups of batching."""
    arms = specs(name, 0)
    train(load_task_class(arms[0]), arms[0])  # data, kernels

    def side_by_side(count: int) -> None:
        run_batched(
            [training_steps(load_task_class(spec), spec) for spec in arms[:count]]
        )

    alone, *beside = median_seconds(
        time.process_time,
        lambda: train(load_task_class(arms[2]), arms[2]),
        *(lambda n=n: side_by_side(n) for n in GROUP_SIZES),
    )
    whole = [spec for seed in range(2) for spec in specs(name, seed)]

    def sweep(beside: int | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_grid(
                whole,
                Path(folder) / "rows.jsonl",
                workers=WORKERS,
                together=beside,
                progress=False,
            )

    apart, by_default = median_seconds(
        time.monotonic, lambda: sweep(1), lambda: sweep(None)
    )
    found = {
        f"R={n}": round(alone * n / taken, 2)
        for n, taken in zip(GROUP_SIZES, beside, strict=True)
    }
    times = {"alone_s": round(alone, 2), "sweep_s": round(apart, 1)}
    return {**times, **found, "sweep": round(apart / by_default, 2)}


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
