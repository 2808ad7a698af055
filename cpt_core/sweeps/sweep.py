"""Run a list of specs: skip what the store holds, keep going after a failure, resume what was interrupted.

Any number of sweeps may share a store, on one machine or several: each run is done by one of them.

>>> from cpt_core.experiments import designs
>>> specs = designs.quality_cost("smoke", schedules=["CR"], static=[])
>>> rows = run_grid(specs, store=Path("runs/x.jsonl"))  # doctest: +SKIP
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from cpt_core.experiments.spec import RunSpec
from cpt_core.sweeps import stores
from cpt_core.sweeps.calibration import measure, runs_per_gpu
from cpt_core.sweeps.process import supervise
from cpt_core.sweeps.progress import Live, Signals, interactive
from cpt_core.sweeps.stores import Row
from cpt_core.sweeps.worker import Job, Outcome, run_one
from cpt_core.training.device import DEVICES, choose_device
from cpt_core.training.session import task_of

EXECUTORS = ("local", "dask")


def run_grid(
    specs: Sequence[RunSpec],
    store: Path | str,
    *,
    executor: str = "local",
    workers: int | None = None,
    threads: int = 1,
    device: str = "auto",
    per_gpu: int | None = None,
    scheduler: str | None = None,
    timeout: float | None = None,
    retry_failed: bool = False,
    checkpoint_seconds: float = 60.0,
    progress: bool | None = None,
) -> list[Row]:
    """Run what the store does not hold yet and return the rows of all specs, in order.

    Every run has a process of its own and a claim on its spec, which other sweeps respect. A run that raises, dies or
    takes too long becomes a row with status "failed", and the others go on. Interrupted runs continue from their
    checkpoint. Ctrl-C once: the runs write their checkpoints and the sweep ends with KeyboardInterrupt; twice: at once.

    Args:
        specs: the runs.
        store: a file of JSON lines; made when it does not exist.
        executor: "local" for the cores or GPUs of this machine; "dask" for a cluster (needs the extra "cluster").
        workers: runs at a time; 0 runs them here, in this process. None takes as many as the CPU cores or the memory
            of the GPUs allow. With ``scheduler`` the cluster decides.
        threads: CPU threads of a run. Results depend on it in the last digits.
        device: "auto" takes CUDA where there is one, but always the CPU at smoke scale; or "cpu", "cuda".
        per_gpu: runs that share a GPU; None takes as many as fit, measured before they start (one on a cluster that
            is there already).
        scheduler: address of a Dask scheduler such as "tcp://10.0.0.5:8786"; None starts a cluster on this machine.
        timeout: seconds after which a run is failed; not with ``workers=0``.
        retry_failed: run specs again whose newest row says "failed"; they go on from their last checkpoint.
        checkpoint_seconds: time between checkpoints of a run.
        progress: show a line with what is done and how long the rest takes; None shows it to people only.

    Raises:
        ValueError: for a wrong value or an unknown task, before anything runs.
        DataNotFoundError: when the data of a run are not there, before anything runs.
        StoreError: when the store cannot be written, before anything runs or as soon as it is noticed.
    """
    _check(executor, workers, threads, device, per_gpu, scheduler, timeout, checkpoint_seconds)
    for spec in specs:
        task_of(spec)
    store = Path(store).absolute()
    stores.check_writable(store)
    done = {row["key"] for row in stores.load_rows(store) if row["status"] != "failed" or not retry_failed}
    todo = list({spec.key: spec for spec in specs if spec.key not in done}.values())
    if todo:
        jobs = [Job(spec, store, device, None, threads, checkpoint_seconds, timeout, retry_failed) for spec in todo]
        execute: Execute
        if executor == "dask":
            from cpt_core.sweeps.dask_cluster import dask_outcomes

            slots = [] if scheduler is not None else _slots(todo, workers, threads, device, per_gpu)
            execute = partial(dask_outcomes, scheduler=scheduler, slots=slots, per_gpu=per_gpu or 1)
        else:
            for spec in {spec.recipe: spec for spec in todo}.values():  # missing data stop the sweep, not every run
                choose_device(device, spec)
                task_of(spec)(spec, torch.device("cpu"))
            if workers == 0:
                execute = _here
            else:
                execute = partial(_local, slots=_slots(todo, workers, threads, device, per_gpu))
        _sweep(jobs, execute, progress)
    held = {row["key"]: row for row in stores.load_rows(store)}
    for spec in specs:  # a process that was killed between its row and its checkpoint
        if held[spec.key]["status"] != "failed":
            stores.place(store, "checkpoints", spec.key).unlink(missing_ok=True)
    return [held[spec.key] for spec in specs]


Execute = Callable[[list[Job], "Signals", "Live"], Iterator[Outcome]]


def _sweep(jobs: list[Job], execute: Execute, progress: bool | None) -> None:
    with Signals() as signals, Live(jobs, interactive() if progress is None else progress) as live:
        while jobs and not signals.stop.is_set():
            again = set()
            for outcome in execute(jobs, signals, live):
                live.ended(outcome)
                if outcome.row is None:
                    again.add(outcome.key)
            # Another sweep has these (wait for it, and take over if it dies), or somebody ended their processes.
            jobs = [replace(job, wait=True) for job in jobs if job.spec.key in again]
            live.note("waiting for another sweep" if jobs else "")
        if signals.stop.is_set():
            raise KeyboardInterrupt(f"stopped with {live.summary()}; the same command goes on from here")


def _check(
    executor: str,
    workers: int | None,
    threads: int,
    device: str,
    per_gpu: int | None,
    scheduler: str | None,
    timeout: float | None,
    checkpoint_seconds: float,
) -> None:
    if executor not in EXECUTORS:
        raise ValueError(f"unknown executor {executor!r}; choose from {', '.join(EXECUTORS)}")
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; choose from {', '.join(DEVICES)}")
    if scheduler is not None and executor != "dask":
        raise ValueError(f"scheduler={scheduler!r} is for executor 'dask', not {executor!r}")
    if scheduler is not None and workers is not None:
        raise ValueError(f"workers={workers} is for this machine; the cluster at {scheduler} has its own")
    for name, value, least in (("workers", workers, 0), ("threads", threads, 1), ("per_gpu", per_gpu, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")
    if workers == 0 and executor == "dask":
        raise ValueError("workers=0 runs everything in this process; executor 'dask' needs at least 1")
    if workers == 0 and timeout is not None:
        raise ValueError(f"timeout={timeout} needs runs in processes of their own; got workers=0")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds; got {timeout!r}")
    if not checkpoint_seconds >= 0:
        raise ValueError(f"checkpoint_seconds must be 0 or more; got {checkpoint_seconds!r}")


def _here(jobs: list[Job], signals: Signals, live: Live) -> Iterator[Outcome]:
    """One run after the other in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(jobs[0].threads)
    try:
        for job in jobs:
            if signals.stop.is_set():
                return
            yield run_one(job, signals.stop.is_set, partial(live.report, job.spec.key))
    finally:
        torch.set_num_threads(before)


def _local(jobs: list[Job], signals: Signals, live: Live, slots: list[int | None]) -> Iterator[Outcome]:
    """Several runs at a time, each in a process of its own; a slot is the GPU of a run, or None."""
    todo = deque(jobs)
    outcomes: queue.Queue[Outcome | Exception | None] = queue.Queue()

    def work(gpu: int | None) -> None:
        try:
            while todo and not signals.stop.is_set():
                try:
                    job = todo.popleft()
                except IndexError:  # another thread was quicker
                    break
                outcomes.put(
                    supervise(
                        replace(job, gpu=gpu),
                        should_stop=signals.stop.is_set,
                        should_kill=signals.kill.is_set,
                        report=partial(live.report, job.spec.key),
                    )
                )
        except Exception as error:  # the store cannot be written: nothing more is started, the others stop
            signals.stop.set()
            outcomes.put(error)
        finally:
            outcomes.put(None)

    threads = [threading.Thread(target=work, args=(gpu,), daemon=True) for gpu in slots[: len(jobs)]]
    for thread in threads:
        thread.start()
    running, problem = len(threads), None
    try:
        while running:
            live.refresh()
            try:
                outcome = outcomes.get(timeout=0.2)
            except queue.Empty:
                continue
            if outcome is None:
                running -= 1
            elif isinstance(outcome, Exception):
                problem = outcome
            else:
                yield outcome
    finally:
        if running:  # the second Ctrl-C, or an error in this thread
            signals.kill.set()
            signals.stop.set()
            for thread in threads:
                thread.join()
    if problem is not None:
        raise problem


def _slots(
    specs: Sequence[RunSpec], workers: int | None, threads: int, device: str, per_gpu: int | None
) -> list[int | None]:
    """Return one entry per run at a time: the number of its GPU, round robin, or None for the CPU."""
    cores = max(1, (os.cpu_count() or 1) // threads)
    gpus = torch.cuda.device_count()
    if gpus == 0 or all(choose_device(device, spec) == "cpu" for spec in specs):
        return [None] * (workers or cores)
    if workers is None:
        workers = gpus * (per_gpu or _fitting(specs, device, gpus, cores))
    return [i % gpus for i in range(workers)]


def _fitting(specs: Sequence[RunSpec], device: str, gpus: int, cores: int) -> int:
    total = min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus))
    try:
        peak = max(measure(spec, device).peak_memory for spec in {s.recipe: s for s in specs}.values())
    except RuntimeError:
        return 1  # one of them does not run at all: it will fail alone, with its reason
    return runs_per_gpu(peak, total, max(1, cores // gpus))
