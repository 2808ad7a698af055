"""One run of a sweep: claimed, trained, stored - in this process, or in one of its own that may die alone.

>>> job = Job(spec, Path("runs/demo/image.jsonl"))  # doctest: +SKIP
>>> run_one(job).row["status"]  # doctest: +SKIP
'ok'
"""

from __future__ import annotations

import itertools
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cpt_core.experiments.spec import RunSpec
from cpt_core.sweeps import stores
from cpt_core.sweeps.stores import Row, StoreError
from cpt_core.training.device import choose_device, device_name, peak_memory
from cpt_core.training.session import task_of
from cpt_core.training.train import Run, Stopped, train

log = logging.getLogger(__name__)
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


def _curve(losses: list[float], points: int = 20) -> list[float]:
    """Mean training loss in ``points`` equal parts of the run: enough to see whether it fell."""
    finite = [x for x in losses if x == x and abs(x) != float("inf")]
    edges = [round(i * len(finite) / points) for i in range(points + 1)]
    return [round(sum(finite[a:b]) / (b - a), 5) for a, b in itertools.pairwise(edges) if b > a]
