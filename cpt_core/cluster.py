"""The same runs on a Dask cluster: an existing scheduler, or workers of this machine that listen on loopback only.

Workers need this package, the data, and the folder of the store on a file system that all of them share. Every run is
a process of its own beside its worker, so a run that dies does not take the worker with it; when a worker dies, its
run writes a checkpoint, and another worker goes on from there. Needs the extra ``cluster``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cpt_core import stores
from cpt_core.specs import RunSpec
from cpt_core.train import task_of
from cpt_core.worker import Job, Outcome, record_loss, supervise

try:
    import distributed
except ImportError as error:  # pragma: no cover
    raise ImportError("executor 'dask' needs the extra: pip install 'cpt-core[cluster]'") from error

STOP_SECONDS = 2.0  # how often a worker asks whether the sweep was stopped
CONNECT_SECONDS = 20


def dask_outcomes(
    jobs: list[Job],
    signals: Any,
    live: Any,
    *,
    scheduler: str | None,
    workers: int | None,
    per_gpu: int | None,
) -> Iterator[Outcome]:
    """Send the jobs to a cluster and yield what becomes of them.

    One job takes one thread of a worker. Where workers have a resource ``GPU``, it takes ``1 / per_gpu`` of it.

    Raises:
        ValueError: when the scheduler cannot be reached, or the workers do not see the folder of the store.
        DataNotFoundError: when a worker does not find the data of a run.
    """
    token = stores.place(jobs[0].store, "leases", f"sweep-{uuid.uuid4().hex}")
    token.parent.mkdir(parents=True, exist_ok=True)
    token.touch()  # workers that do not see it do not share the file system
    try:
        with _client(scheduler, workers, per_gpu or 1) as client:
            gpus = any(w["resources"].get("GPU") for w in client.scheduler_info()["workers"].values())
            resources = {"GPU": 1 / (per_gpu or 1)} if gpus else None
            recipes = {job.spec.recipe: job.spec for job in jobs}
            for check in client.map(_check, list(recipes.values()), [str(token)] * len(recipes), pure=False):
                check.result()
            futures = {
                client.submit(_work, job, str(token), key=f"{job.spec.key}-{token.stem}", resources=resources): job
                for job in jobs
            }
            yield from _collect(client, futures, signals, live, token)
    finally:
        token.unlink(missing_ok=True)


def _collect(client: Any, futures: dict[Any, Job], signals: Any, live: Any, token: Path) -> Iterator[Outcome]:
    pending = set(futures)
    while pending:
        live.refresh()
        if signals.stop.is_set() and token.exists():
            token.unlink()  # the workers' sign to stop
            client.cancel([f for f in pending if f.status == "pending"], force=False)
        if signals.kill.is_set():
            client.cancel(list(pending), force=True)
            return
        with suppress(TimeoutError, distributed.TimeoutError):
            distributed.wait(list(pending), timeout=0.5, return_when="FIRST_COMPLETED")
        for future in [f for f in pending if f.status != "pending"]:
            pending.discard(future)
            job = futures[future]
            if future.status == "finished":
                yield future.result()
            elif future.status == "cancelled":
                yield Outcome(job.spec.key, "stopped")
            else:
                error = future.exception()
                if not isinstance(error, distributed.KilledWorker):
                    signals.stop.set()
                    token.unlink(missing_ok=True)
                    raise error
                yield record_loss(job, f"its workers died again and again: {error}")


def _check(spec: RunSpec, token: str) -> None:
    _see(token)
    task_of(spec)(spec, torch.device("cpu"))


def _see(token: str) -> None:
    if not Path(token).exists():
        raise ValueError(
            f"the worker at {distributed.get_worker().address} does not see {Path(token).parent}: the store must be on "
            "a file system that all workers share (set CPT_RUNS_DIR)"
        )


def _work(job: Job, token: str) -> Outcome:
    """What a worker does: one run in a process of its own."""
    # Dask's nannies mark their workers as daemons, which may not start processes; ours end by themselves when the
    # worker dies.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    asked = [time.monotonic(), False]

    def stopped() -> bool:
        if not asked[1] and time.monotonic() - asked[0] > STOP_SECONDS:
            asked[:] = [time.monotonic(), not Path(token).exists()]
        return bool(asked[1])

    worker = distributed.get_worker()
    if isinstance(worker.name, int) and torch.cuda.device_count():  # one of a cluster on this machine
        job = replace(job, gpu=worker.name % torch.cuda.device_count())
    return supervise(job, should_stop=stopped)


@contextmanager
def _client(scheduler: str | None, workers: int | None, per_gpu: int) -> Iterator[Any]:
    if scheduler is not None:
        try:
            client = distributed.Client(scheduler, timeout=CONNECT_SECONDS)
        except (OSError, ValueError) as error:
            raise ValueError(f"no Dask scheduler at {scheduler!r}: {error}") from error
        with client:
            yield client
        return
    gpus = torch.cuda.device_count()
    with (
        distributed.LocalCluster(
            n_workers=workers or gpus or os.cpu_count(),
            threads_per_worker=per_gpu if gpus else 1,
            resources={"GPU": 1} if gpus else None,
            host="127.0.0.1",  # nobody else can reach it
            dashboard_address=None,
            silence_logs=logging.ERROR,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client
