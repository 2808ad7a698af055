"""One run of a sweep: claimed, trained, stored - in this process, or in one of its own that may die alone.

>>> job = Job(spec, Path("runs/demo/image.jsonl"))  # doctest: +SKIP
>>> supervise(job).row["status"]  # doctest: +SKIP
'ok'
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, Literal

import torch

from cpt_core import stores
from cpt_core.specs import RunSpec
from cpt_core.stores import Row, StoreError
from cpt_core.train import Run, Stopped, task_of, train

log = logging.getLogger(__name__)
DEVICES = ("auto", "cpu", "cuda")
GRACE_SECONDS = 60.0  # for the checkpoint of a run whose time is up
# Keep freed memory instead of faulting it in again for every temporary tensor: 10-30 % faster steps on a CPU.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
Report = Callable[[int], None]  # optimizer steps done


@dataclass(frozen=True)
class Job:
    """A run, and how to run it.

    Attributes:
        spec: the run.
        store: the file its row goes to.
        device: "cpu", "cuda", or "auto" for CUDA where there is one, but always the CPU at smoke scale.
        gpu: which of the visible GPUs the process sees; None for all of them.
        threads: CPU threads; the small networks are faster on one, and results depend on it in the last digits.
        checkpoint_seconds: time between checkpoints.
        timeout: seconds after which a run is failed, or None.
        retry_failed: run again what failed before.
        wait: while another sweep has the run, wait for it a while before returning "busy".
    """

    spec: RunSpec
    store: Path
    device: str = "auto"
    gpu: int | None = None
    threads: int = 1
    checkpoint_seconds: float = 60.0
    timeout: float | None = None
    retry_failed: bool = False
    wait: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a job: "ran" or "held" (the store has it) with its row; "busy" elsewhere, or "stopped"."""

    key: str
    status: Literal["ran", "held", "busy", "stopped"]
    row: Row | None = None


def run_one(job: Job, should_stop: Callable[[], bool] | None = None, report: Report | None = None) -> Outcome:
    """Run a job in this process and append its row; a run that raises becomes a row with status "failed".

    The row is the last thing that is written and the checkpoint goes only after it, so a process that dies anywhere
    loses nothing but the time since its last checkpoint. The claim on the run (its lease) is held until the end.

    Raises:
        StoreError: when the store cannot be written; the checkpoint is kept.
    """
    key, store = job.spec.key, job.store
    lease = stores.lease(store, key)

    def stop() -> bool:
        return lease.lost or (should_stop is not None and should_stop())

    try:
        if not lease.acquire(2 * lease.seconds if job.wait else 0.0, stop):
            return Outcome(key, "stopped" if stop() else "busy")
        try:
            if report is not None:
                report(0)
            held = stores.find_row(store, key)
            if held is not None and not (held["status"] == "failed" and job.retry_failed):
                return Outcome(key, "held", held)
            stores.check_free(store)
            stores.clean(store, key)
            row = _row(job, stop, report)
            row = stores.append_row(store, row)
            if row["status"] != "failed":
                stores.place(store, "checkpoints", key).unlink(missing_ok=True)
            return Outcome(key, "ran", row)
        finally:
            lease.release()
    except Stopped:
        return Outcome(key, "busy" if lease.lost else "stopped")
    except StoreError:
        raise
    except OSError as error:  # the claim itself could not be written
        raise StoreError(f"cannot write beside {store}: {error.strerror or error}; checkpoints are kept") from error


def _row(job: Job, stop: Callable[[], bool], report: Report | None) -> Row:
    spec = job.spec
    row = stores.describe(spec)
    device = job.device
    reported = time.monotonic()

    def on_step(step: int, model: Any, loss: float) -> None:
        nonlocal reported
        if report is not None and time.monotonic() - reported > 1.0:
            reported = time.monotonic()
            report(step + 1)

    try:
        device = choose_device(job.device, spec)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        log.info("%s: %s seed %d, %s", spec.key, spec.arm, spec.seed, device)
        run = train(
            task_of(spec),
            spec,
            device=device,
            checkpoint=stores.place(job.store, "checkpoints", spec.key),
            checkpoint_seconds=job.checkpoint_seconds,
            on_step=on_step,
            should_stop=stop,
        )
        stores.write_curve(job.store, spec.key, run.history)
    except (Stopped, StoreError):
        raise
    except Exception:
        log.exception("failed")
        return {**row, "status": "failed", "error": traceback.format_exc(), "device": device_name(device)}
    log.info("%s after %.1f s", run.status, run.seconds)
    return {**row, **_results(run, device)}


def _results(run: Run, device: str) -> Row:
    return {
        "status": run.status,
        "metrics": run.metrics,
        "bitops": run.bitops,
        "steps": len(run.history["step"]),
        "loss": _curve(run.history["loss"]),
        "evaluations": _spread(run.history["evaluations"]),
        "seconds": round(run.seconds, 3),
        "device": device_name(device),
        "peak_memory": peak_memory(device),
        "title": run.title,
        "data_checksum": run.checksum,
    }


def _spread(evaluations: list[dict[str, Any]], points: int = 20) -> list[dict[str, Any]]:
    """At most ``points`` of the evaluations, evenly spread, with the last; the curve file has all."""
    every = -(-len(evaluations) // points) or 1
    return evaluations[::-1][::every][::-1]


def device_name(device: str) -> str:
    """Return the name of the GPU, or the word itself."""
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device


def peak_memory(device: str) -> int:
    """Return the bytes that torch has reserved on the GPU, or the largest resident size of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    import resource  # not on Windows

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def _curve(losses: list[float], points: int = 20) -> list[float]:
    """Mean training loss in ``points`` equal parts of the run: enough to see whether it fell."""
    finite = [x for x in losses if x == x and abs(x) != float("inf")]
    edges = [round(i * len(finite) / points) for i in range(points + 1)]
    return [round(sum(finite[a:b]) / (b - a), 5) for a, b in itertools.pairwise(edges) if b > a]


def choose_device(device: str, spec: RunSpec) -> str:
    """Return "cpu" or "cuda"; ValueError for an unknown name, or for CUDA where there is none."""
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; choose from {', '.join(DEVICES)}")
    if spec.scale == "smoke" or device == "cpu":
        return "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device")
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- in a process of its own ----------------------------------------------------------------------


def supervise(
    job: Job,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    should_kill: Callable[[], bool] = lambda: False,
    report: Report | None = None,
    work: Callable[..., Outcome] = run_one,
) -> Outcome:
    """Run a job in a new process and wait for it; a process that dies or takes too long leaves a failed row.

    Args:
        job: the run.
        should_stop: asked all the time; the run then writes its checkpoint and ends.
        should_kill: the same, but the process is killed.
        report: called with the number of steps done, about once a second.
        work: what the process does; for tests.

    Raises:
        StoreError: when the store cannot be written.
    """
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, sender, work, dict(os.environ)), name=f"run-{job.spec.key}")
    process.start()
    sender.close()
    outcome: Outcome | None = None
    error: str | None = None
    started: float | None = None
    asked: float | None = None
    late = False
    try:
        talking = True
        while talking or process.is_alive():
            connection.wait([receiver if talking else process.sentinel], timeout=0.2)
            while talking and receiver.poll():
                try:
                    kind, *content = receiver.recv()
                except (EOFError, OSError):  # the end, or the middle of a message at which the process was killed
                    talking = False
                    continue
                if kind == "step":
                    started = started or time.monotonic()
                    if report is not None:
                        report(*content)
                elif kind == "outcome":
                    (outcome,) = content
                else:
                    (error,) = content
            now = time.monotonic()
            if job.timeout is not None and started is not None and now - started > job.timeout:
                late = True
            if asked is None and (late or should_stop()):
                process.terminate()  # the run writes its checkpoint at the end of the step
                asked = now
            if should_kill() or (late and asked is not None and now - asked > GRACE_SECONDS):
                process.kill()
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        receiver.close()
    if error is not None:
        raise StoreError(error)
    if outcome is not None and not (late and outcome.status == "stopped"):
        return outcome
    if should_kill() or (outcome is None and should_stop() and not late):
        return Outcome(job.spec.key, "stopped")
    return record_loss(job, f"took longer than {job.timeout:g} s" if late else _cause_of(process.exitcode))


def record_loss(job: Job, why: str) -> Outcome:
    """Store a failed row for a process that ended without one, unless it had appended its row or another has it."""
    key, store = job.spec.key, job.store
    lease = stores.lease(store, key)
    if not lease.acquire():
        return Outcome(key, "busy")
    try:
        log_file = stores.place(store, "logs", key)
        last = _end_of(log_file)
        with suppress(OSError), open(log_file, "a") as f:
            f.write(f"{why}\n")
        row = {**stores.describe(job.spec), "status": "failed", "error": f"{why}\n{last}"}
        return Outcome(key, "ran", stores.append_row(store, row))
    finally:
        lease.release()


def _end_of(path: Path, lines: int = 40) -> str:
    """Return the last lines of a log, without the list of modules that a crash dump ends with."""
    if not path.exists():
        return ""
    said = path.read_text(errors="replace").splitlines()
    return "\n".join([line for line in said if not line.startswith("Extension modules:")][-lines:])


def _cause_of(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return f"the process of the run was ended by {name}{hint}"
    return f"the process of the run ended with status {exitcode} and no result"


_starting = threading.Lock()


def _context() -> Any:
    """Return how processes start: forked from a server that has torch imported, so that a run starts in no time."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    with _starting:
        context.set_forkserver_preload(["cpt_core.worker"])
        before = {name: os.environ.get(name) for name in ALLOCATOR}
        os.environ.update({name: value for name, value in ALLOCATOR.items() if before[name] is None})
        # Ctrl-C in a terminal reaches the server too; while it starts, nothing there would catch it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
    return context


def _child(job: Job, sender: Any, work: Callable[..., Outcome], environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the server that this process comes from may be older than a change of it
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the sweep, which then asks with SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_watch_parent, args=(stop,), daemon=True).start()
    _log_to(stores.place(job.store, "logs", job.spec.key))
    if job.gpu is not None:  # before CUDA starts
        visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[job.gpu] if visible else str(job.gpu)
    torch.set_num_threads(job.threads)

    def send(*message: Any) -> None:
        with suppress(OSError):  # the sweep is gone; the row is in the store
            sender.send(message)

    try:
        send("outcome", work(job, stop.is_set, lambda step: send("step", step)))
    except StoreError as error:
        send("error", str(error))


def _watch_parent(stop: threading.Event) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        stop.set()


def _log_to(path: Path) -> None:
    """Send everything this process writes, and what Python says when it crashes, to a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return  # a log is no reason to lose a run; the store itself was tried before
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    faulthandler.enable()
