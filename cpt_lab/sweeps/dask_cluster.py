"""The same runs on a Dask cluster: an existing scheduler, or one inside this process that takes work from nobody else.

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
from cpt_lab.tasks.base import task_of
from cpt_lab.training.device import choose_device

with explain_missing_extra("cluster"):
    import distributed

STOP_SECONDS = 2.0  # how often a worker asks whether the sweep was stopped
CONNECT_SECONDS = 20


def dask_outcomes(
    jobs: list[Job], signals: Signals, live: Live, slots: list[int | None]
) -> Iterator[Outcome]:
    """Send the jobs to a cluster and yield what becomes of them.

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
    sign = store.with_name(f"{store.stem}.{uuid.uuid4().hex}.sweep")
    sign.write_text("go", encoding="utf-8")
    try:
        with _client(options.scheduler, len(slots)) as client:
            submit = partial(client.submit, pure=False)
            recipes = {job.spec.recipe: job.spec for job in jobs}
            # before any worker is there: a cluster that grows with its work starts none for a sweep that only waits
            checks = {
                submit(
                    _check,
                    spec,
                    options.device,
                    str(sign),
                    resources=_share(client, options),
                ): spec
                for spec in recipes.values()
            }
            if not client.nthreads():
                live.note, at = "waiting for workers", client.scheduler.address
                said = f"{len(jobs)} runs wait for workers of the Dask scheduler at {at}: none yet"
                tqdm.write(said, sys.stderr)  # a log shows no bar
            rows = load_rows(store)
            for check, spec in _results(client, checks, signals, live, sign):
                live.note = ""
                check_same_data(
                    store, rows, spec, check.result()
                )  # raises what was raised there, too
            if not signals.stop.is_set():
                share = _share(client, options)
                futures = {
                    submit(_work, job, str(sign), slots, resources=share): job
                    for job in jobs
                }
                for future, job in _results(client, futures, signals, live, sign):
                    live.at_once = sum(client.nthreads().values())
                    died = isinstance(future.exception(), distributed.KilledWorker)
                    why = "its workers died again and again"
                    yield from (
                        [record_loss(one, why) for one in job.each()]
                        if died
                        else future.result()
                    )
    finally:
        with suppress(OSError):
            sign.write_text(
                "stop", encoding="utf-8"
            )  # to the runs that a second Ctrl-C or an error leaves behind
            sign.unlink()


def _results(
    client: Any, futures: dict[Any, Any], signals: Signals, live: Live, sign: Path
) -> Iterator[tuple[Any, Any]]:
    """Yield the futures as they end, all of them: a sweep that stops waits for the checkpoints of its runs."""
    pending = set(futures)
    while pending:
        live.refresh()
        if signals.stop.is_set() and sign.read_text(encoding="utf-8") != "stop":
            sign.write_text("stop", encoding="utf-8")
        for future in [f for f in pending if f.done()]:
            pending.discard(future)
            yield future, futures[future]
        if signals.stop.is_set() and not client.nthreads():
            return  # no worker is there who could end the rest
        time.sleep(0.1)


def _share(client: Any, options: SweepOptions) -> dict[str, float] | None:
    """Return what a run takes of the GPUs of a cluster whose workers say that they have some."""
    workers = client.scheduler_info()["workers"].values()
    gpus = options.scheduler is not None and any(
        worker["resources"].get("GPU") for worker in workers
    )
    return {"GPU": 1 / (options.per_gpu or 1)} if gpus else None


def _check(spec: RunSpec, device: str, sign: str) -> str:
    _told_to_stop(sign)
    choose_device(device, spec)
    return task_of(spec)(spec, torch.device("cpu")).data.checksum


def _told_to_stop(sign: str) -> bool:
    try:
        return Path(sign).read_text(encoding="utf-8") == "stop"
    except FileNotFoundError:
        raise ValueError(
            f"the worker at {distributed.get_worker().address} does not see {Path(sign).parent}: the store must be on "
            "a file system that all workers share (set CPT_RUNS_DIR)"
        ) from None


def _work(job: Job, sign: str, slots: list[int | None]) -> list[Outcome]:
    """What a worker does: one job in a process of its own."""
    if _told_to_stop(sign):
        return [Outcome(one.spec.key, "stopped") for one in job.each()]
    # Dask's nannies mark their workers as daemons, which may not start processes; ours end by themselves when the
    # worker dies.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    asked, told = time.monotonic(), False

    def stopped() -> bool:
        nonlocal asked, told
        if not told and time.monotonic() - asked > STOP_SECONDS:
            with suppress(OSError):
                told = (
                    not Path(sign).exists()
                    or Path(sign).read_text(encoding="utf-8") == "stop"
                )
                asked = time.monotonic()
        return told

    worker = distributed.get_worker()
    if slots:  # a cluster of this machine, whose workers are numbered
        job = replace(job, gpu=slots[worker.name], sharing=len(slots))
    else:
        job = replace(job, sharing=worker.state.nthreads)
    return supervise(job, should_stop=stopped)


@contextmanager
def _client(scheduler: str | None, workers: int) -> Iterator[Any]:
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
                gone = f"the Dask scheduler at {scheduler} is gone; its runs write checkpoints"
                raise ConnectionError(
                    f"{gone}, and the same command goes on from there"
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
