"""Sweeps on a Dask cluster: an existing scheduler, or one inside this process that only this sweep uses.

Workers need this package, the data, and the folder of the store on a file system that all of them share. Every run is
a process of its own beside its worker, so a run that dies does not take the worker with it; when a worker dies, its
run writes a checkpoint, and another worker goes on from there. A file beside the store tells the workers to go on or
to stop. Needs the extra ``cluster``.
"""

import logging
import multiprocessing
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from cpt_extras.optional_libraries import explain_missing_extra
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.process import record_loss, supervise
from cpt_lab.sweeps.progress import Live, Signals
from cpt_lab.sweeps.stores import check_same_data, load_rows
from cpt_lab.sweeps.worker import Job, Outcome
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.device import choose_device

with explain_missing_extra("cluster"):
    import distributed

STOP_SECONDS = 2.0  # how often a worker reads whether the sweep was stopped
CONNECT_SECONDS = 20


def dask_outcomes(
    jobs: list[Job], signals: Signals, live: Live, slots: list[int | None]
) -> Iterator[Outcome]:
    """Send jobs to a cluster and yield their outcomes.

    One job takes one thread of a worker. Where workers of an existing cluster have a resource ``GPU``, it takes
    ``1 / per_gpu`` of it. ``slots`` are the runs at a time on this machine, each with its GPU or None.

    Raises:
        ConnectionError: when the scheduler goes away.
        ValueError: when the scheduler cannot be reached, or a worker does not see the folder of the store, or sees
            other data than those of the rows in it.
        DataNotFoundError: when a worker does not find the data of a run.
        DeviceNotFoundError: when the worker that was asked has no GPU for runs that want one.
    """
    options, store = jobs[0].options, jobs[0].store
    flag_file = store.with_name(f"{store.stem}.{uuid.uuid4().hex}.sweep")
    flag_file.write_text("go", encoding="utf-8")
    try:
        with _client(options.scheduler, len(slots)) as client:
            submit = partial(client.submit, pure=False)
            recipes = {job.spec.recipe: job.spec for job in jobs}
            # Submitted before any worker exists: a cluster that grows with its work starts none for a waiting sweep.
            checks = {
                submit(
                    _check,
                    spec,
                    options.device,
                    str(flag_file),
                    resources=_gpu_share(client, options),
                ): spec
                for spec in recipes.values()
            }
            if not client.nthreads():
                live.note = "waiting for workers"
                address = client.scheduler.address
                message = f"{len(jobs)} runs wait for workers of the Dask scheduler at {address}: none yet"
                tqdm.write(message, sys.stderr)  # a log shows no bar
            rows = load_rows(store)
            for check, spec in _finished(client, checks, signals, live, flag_file):
                live.note = ""
                checksum = check.result()  # raises what the worker raised
                check_same_data(store, rows, spec, checksum)
            if not signals.stop.is_set():
                share = _gpu_share(client, options)
                futures = {
                    submit(_work, job, str(flag_file), slots, resources=share): job
                    for job in jobs
                }
                for future, job in _finished(client, futures, signals, live, flag_file):
                    live.concurrent_runs = sum(client.nthreads().values())
                    if isinstance(future.exception(), distributed.KilledWorker):
                        reason = "its workers died again and again"
                        for single in job.each():
                            yield record_loss(single, reason)
                    else:
                        yield from future.result()
    finally:
        with suppress(OSError):
            # For the runs that a second Ctrl-C or an error leaves behind.
            flag_file.write_text("stop", encoding="utf-8")
            flag_file.unlink()


def _finished(
    client: Any, futures: dict[Any, Any], signals: Signals, live: Live, flag_file: Path
) -> Iterator[tuple[Any, Any]]:
    """Yield all futures with their values as they end; a stopped sweep waits for the checkpoints of its runs."""
    pending = set(futures)
    while pending:
        live.refresh()
        if signals.stop.is_set() and flag_file.read_text(encoding="utf-8") != "stop":
            flag_file.write_text("stop", encoding="utf-8")
        for future in [f for f in pending if f.done()]:
            pending.discard(future)
            yield future, futures[future]
        if signals.stop.is_set() and not client.nthreads():
            return  # no worker is left that could end the others
        time.sleep(0.1)


def _gpu_share(client: Any, options: SweepOptions) -> dict[str, float] | None:
    """Return the Dask resources of a run: a share of a GPU, on a cluster whose workers have the resource."""
    workers = client.scheduler_info()["workers"].values()
    gpus = options.scheduler is not None and any(
        worker["resources"].get("GPU") for worker in workers
    )
    return {"GPU": 1 / (options.per_gpu or 1)} if gpus else None


def _check(spec: RunSpec, device: str, flag_file: str) -> str:
    """Check store, device and data on a worker; return the checksum of the data."""
    _should_stop(flag_file)
    choose_device(device, spec)
    return load_task_class(spec)(spec, torch.device("cpu")).data.checksum


def _should_stop(flag_file: str) -> bool:
    """Return whether the sweep has asked its workers to stop.

    Raises:
        ValueError: when the worker does not see the folder of the store.
    """
    try:
        return Path(flag_file).read_text(encoding="utf-8") == "stop"
    except FileNotFoundError:
        raise ValueError(
            f"the worker at {distributed.get_worker().address} does not see {Path(flag_file).parent}: "
            "the store must be on a file system that all workers share (set CPT_RUNS_DIR)"
        ) from None


def _work(job: Job, flag_file: str, slots: list[int | None]) -> list[Outcome]:
    """Run one job on a worker, in a process of its own."""
    if _should_stop(flag_file):
        return [Outcome(single.spec.key, "stopped") for single in job.each()]
    # Dask's nannies mark their workers as daemons, which may not start processes; the processes of runs end by
    # themselves when the worker dies.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    read_time = time.monotonic()
    is_stopped = False

    def stopped() -> bool:
        nonlocal read_time, is_stopped
        if not is_stopped and time.monotonic() - read_time > STOP_SECONDS:
            with suppress(OSError):
                file = Path(flag_file)
                is_stopped = (
                    not file.exists() or file.read_text(encoding="utf-8") == "stop"
                )
                read_time = time.monotonic()
        return is_stopped

    worker = distributed.get_worker()
    if slots:  # a cluster of this machine, whose workers are numbered
        job = replace(job, gpu=slots[worker.name], sharing=len(slots))
    else:
        job = replace(job, sharing=worker.state.nthreads)
    return supervise(job, should_stop=stopped)


@contextmanager
def _client(scheduler: str | None, workers: int) -> Iterator[Any]:
    """Connect to a scheduler, or start one in this process, for a ``with`` block."""
    if scheduler is not None:
        try:
            client = distributed.Client(scheduler, timeout=CONNECT_SECONDS)
        except (OSError, ValueError) as error:
            raise ValueError(f"no Dask scheduler at {scheduler!r}: {error}") from error
        with client:
            try:
                yield client
            except (distributed.client.FutureCancelledError, OSError) as error:
                if client.status == "running" and not isinstance(
                    error, distributed.comm.CommClosedError
                ):
                    raise  # a worker's error, or the store's
                raise ConnectionError(
                    f"the Dask scheduler at {scheduler} is gone; its runs write checkpoints, "
                    "and the same command goes on from there"
                ) from None
        return
    with (
        distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=False,  # the runs are processes; and so Ctrl-C reaches nobody but this one
            protocol="inproc://",  # no port that takes work: Dask has no passwords, and loopback is everybody's here
            # the status pages only show things; without an address they take port 8787, or listen to the network
            dashboard_address="127.0.0.1:0",
            worker_dashboard_address="127.0.0.1:0",
            silence_logs=logging.ERROR,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client
