"""What a sweep adds to the training itself, per run, and what a second worker gains.

    python -m bench.sweep

The same runs as bare calls of ``train``, in this process with a store, and in processes of their own; interleaved,
medians of the repeats.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from cpt_lab.experiments import designs
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.tasks.base import task_of
from cpt_lab.training.train import train


def bare(specs: list[RunSpec], store: Path) -> None:
    """Train and keep nothing."""
    for spec in specs:
        train(task_of(spec), spec)


def sweep(workers: int) -> Callable[[list[RunSpec], Path], None]:
    """Return a sweep with a number of workers."""
    return lambda specs, store: run_grid(specs, store, workers=workers) and None


WAYS = {"bare train()": bare, "workers=0": sweep(0), "workers=1": sweep(1), "workers=2": sweep(2)}


def main() -> None:
    """Print seconds per run and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    specs = designs.quality_cost(
        "smoke", schedules=["CR", "ER", "LR", "RR"], static_bits=[], seeds=[0, 1], steps=given.steps
    )
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        run_grid(specs[:1], Path(folder) / "first.jsonl", workers=1)
        print(f"first run of a session, with the start of the process server: {time.monotonic() - began:.1f} s")
        for repeat in range(given.repeats):
            for number, (name, way) in enumerate(WAYS.items()):
                began = time.monotonic()
                way(specs, Path(folder) / f"{repeat}-{number}.jsonl")
                times[name].append((time.monotonic() - began) / len(specs))
    base = median(times["bare train()"])
    for name, seconds in times.items():
        per_run = median(seconds)
        print(f"{name:<14} {per_run:6.3f} s per run of {given.steps} steps, {1000 * (per_run - base):+7.0f} ms")
    print(f"two workers against one: {median(times['workers=1']) / median(times['workers=2']):.2f} x")


if __name__ == "__main__":
    main()
