"""Run a list of specs: skip what the store holds, keep going after a failure, resume what was interrupted.

>>> from cpt_core import grids
>>> rows = run_grid(grids.image("smoke", schedules=["CR"], static=[]), store=Path("runs/x.jsonl"))  # doctest: +SKIP
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm.auto import tqdm

from cpt_core import results
from cpt_core.results import Row
from cpt_core.specs import RunSpec
from cpt_core.train import task_of, train

EXECUTORS = ("inline", "processes")


def run_grid(
    specs: Sequence[RunSpec],
    store: Path,
    *,
    executor: str = "inline",
    workers: int | None = None,
    device: str = "auto",
    isolate: bool = False,
    retry_failed: bool = False,
    progress: bool = False,
    checkpoint_seconds: float = 60.0,
) -> list[Row]:
    """Run what the store does not hold yet and return the rows of all specs, in order.

    A run that raises becomes a row with status "failed" and its traceback, and the others go on. Interrupted runs
    continue from their checkpoint, which lies beside the store.

    Args:
        specs: the runs.
        store: a file of JSON lines; made when it does not exist.
        executor: "inline" in this process, one after the other; "processes" in ``workers`` processes of one thread.
        workers: None takes the number of cores.
        device: "auto" takes CUDA where there is one, but always the CPU at smoke scale.
        isolate: give every run a fresh process (with "processes"), so that no run can harm another.
        retry_failed: run specs again whose newest row says "failed".
        progress: show a bar.
        checkpoint_seconds: time between checkpoints of a run.

    Raises:
        ValueError: for an unknown executor or task, before anything runs.
        DataNotFoundError: when the data of a run are not there, before anything runs.
    """
    if executor not in EXECUTORS:
        raise ValueError(f"unknown executor {executor!r}; choose from {', '.join(EXECUTORS)}")
    for spec in specs:
        task_of(spec)
    store = Path(store)
    done = {row["key"] for row in results.load_rows(store) if row["status"] != "failed" or not retry_failed}
    todo = list({spec.key: spec for spec in specs if spec.key not in done}.values())
    jobs = [(spec, store, _device(device, spec), checkpoint_seconds) for spec in todo]
    for data in {spec.recipe: spec for spec in todo}.values():  # missing data must stop the sweep, not fail every run
        task_of(data)(data, torch.device("cpu"))
    produced = _inline(jobs) if executor == "inline" else _processes(jobs, workers or os.cpu_count() or 1, isolate)
    for row in tqdm(produced, total=len(jobs), desc="runs", disable=not progress or not jobs):
        results.append_row(store, row)
    held = {row["key"]: row for row in results.load_rows(store)}
    return [held[spec.key] for spec in specs]


Job = tuple[RunSpec, Path, str, float]


def run_one(job: Job) -> Row:
    """Run one spec and return its row, also when it fails."""
    spec, store, device, checkpoint_seconds = job
    row = results.describe(spec)
    try:
        folder = store.parent / f"{store.stem}.checkpoints" / spec.key
        run = train(task_of(spec), spec, device=device, folder=folder, checkpoint_seconds=checkpoint_seconds)
    except Exception:
        return {**row, "status": "failed", "error": traceback.format_exc(), "device": device}
    return {
        **row,
        "status": run.status,
        "metrics": run.metrics,
        "bitops": run.bitops,
        "steps": len(run.history["step"]),
        "loss": _curve(run.history["loss"]),
        "seconds": round(run.seconds, 3),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "title": run.title,
        "data_checksum": run.checksum,
    }


def _curve(losses: list[float], points: int = 20) -> list[float]:
    """Mean training loss in ``points`` equal parts of the run: enough to see whether it fell."""
    finite = [x for x in losses if x == x and abs(x) != float("inf")]
    edges = [round(i * len(finite) / points) for i in range(points + 1)]
    return [round(sum(finite[a:b]) / (b - a), 5) for a, b in itertools.pairwise(edges) if b > a]


def _inline(jobs: Iterable[Job]) -> Iterator[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the small networks are faster on one thread, and then a row does not depend on it
    try:
        yield from map(run_one, jobs)
    finally:
        torch.set_num_threads(threads)


def _processes(jobs: list[Job], workers: int, isolate: bool) -> Iterator[Row]:
    finished: set[str] = set()
    try:
        for row in _pool(jobs, workers, 1 if isolate else None):
            finished.add(row["key"])
            yield row
    except BrokenProcessPool:
        # a run killed its process and with it the pool: run the rest one by one, so that only the culprit fails
        for job in jobs:
            if job[0].key not in finished:
                try:
                    yield from _pool([job], 1, 1)
                except BrokenProcessPool as error:
                    yield {**results.describe(job[0]), "status": "failed", "error": repr(error), "device": job[2]}


def _pool(jobs: list[Job], workers: int, tasks_per_child: int | None) -> Iterator[Row]:
    if not jobs:
        return
    with ProcessPoolExecutor(
        min(workers, len(jobs)), get_context("spawn"), torch.set_num_threads, (1,), max_tasks_per_child=tasks_per_child
    ) as pool:
        futures: list[Future[Row]] = [pool.submit(run_one, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _device(device: str, spec: RunSpec) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; choose from auto, cpu, cuda")
    if spec.scale == "smoke" or device == "cpu":
        return "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device")
    return "cuda" if torch.cuda.is_available() else "cpu"
