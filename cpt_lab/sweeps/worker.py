"""Runs of a sweep: claimed, trained, stored - in this process, or in one of their own that may die alone.

>>> job = Job(spec, Path("runs/demo/image.jsonl"))  # doctest: +SKIP
>>> [outcome.row["status"] for outcome in run_all(job)]  # doctest: +SKIP
['ok']
"""

import itertools
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cpt_extras.kernels.backend import backend
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.provenance import machine, versions
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.stores import Row, StoreError
from cpt_lab.tasks.base import task_of
from cpt_lab.training import processes
from cpt_lab.training.batched_runs import Steps, alone, together
from cpt_lab.training.device import (
    choose_device,
    cuda_provenance,
    device_name,
    fix_order_of_sums,
    peak_memory,
)
from cpt_lab.training.train import Run, Stopped, steps_of

WAIT_SECONDS = (
    60.0  # for a run that another sweep has, before a worker looks after its other runs
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A run, or several of a seed, and how to run them."""

    spec: RunSpec
    store: Path  # the file its row goes to
    options: SweepOptions = field(default_factory=SweepOptions)  # of its sweep
    gpu: int | None = (
        None  # which of the visible GPUs the process sees; None for all of them
    )
    sharing: int = 1  # how many runs share the cores and the memory of its machine
    wait: bool = False  # while another sweep has the run, wait for it a while before returning "busy"
    beside: tuple[
        RunSpec, ...
    ] = ()  # runs that train side by side with it, in the same process

    def each(self) -> list["Job"]:
        """Return a job for every run, beside the others."""
        runs = (self.spec, *self.beside)
        return [
            replace(self, spec=spec, beside=(*runs[:i], *runs[i + 1 :]))
            for i, spec in enumerate(runs)
        ]


@dataclass(frozen=True)
class Outcome:
    """What became of a job: "ran" or "held" (the store has it) with its row; "busy" elsewhere, or "stopped"."""

    key: str
    status: Literal["ran", "held", "busy", "stopped"]
    row: Row | None = None


def run_all(
    job: Job,
    should_stop: Callable[[], bool] = lambda: False,
    on_start: Callable[[str], None] = lambda key: None,
) -> list[Outcome]:
    """Run a job in this process and append its rows; a run that raises becomes a row with status "failed".

    The row is the last thing that is written and the checkpoint goes only after it, so a process that dies anywhere
    loses nothing but the time since its last checkpoint. The claim on the run is held until the end.

    Args:
        should_stop: asked after every step; the run then writes its checkpoint and ends.
        on_start: called with the key of a run that is this process's to do.

    Raises:
        StoreError: when the store cannot be written; checkpoints are kept.
    """
    runs = [_steps(one, should_stop, on_start) for one in job.each()]
    return together(runs) if job.beside else [alone(runs[0])]


def _steps(
    job: Job, should_stop: Callable[[], bool], on_start: Callable[[str], None]
) -> Steps[Outcome]:
    key, store = job.spec.key, job.store
    try:
        with stores.claim(
            store, key, WAIT_SECONDS if job.wait else 0.0, should_stop
        ) as mine:
            if not mine:
                return Outcome(key, "stopped" if should_stop() else "busy")
            on_start(key)
            held = stores.find_row(
                store, key
            )  # only now: it may have come while this process waited
            if held is not None and job.options.accepts(held):
                return Outcome(key, "held", held)
            stores.check_free(store)
            stores.clean(store, key)
            row = stores.append_row(store, (yield from _row(job, should_stop)))
            if row["status"] != "failed":
                stores.remove_checkpoints(store, {key})
            return Outcome(key, "ran", row)
    except Stopped:
        return Outcome(key, "stopped")
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot write beside {store}: {error.strerror or error}; checkpoints are kept"
        ) from error


def _row(job: Job, should_stop: Callable[[], bool]) -> Steps[Row]:
    spec = job.spec
    row = stores.describe(spec)
    device = job.options.device
    fix_order_of_sums()
    try:
        device = choose_device(device, spec)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            row["provenance"]["cuda"] = cuda_provenance(spec.recipe)
        row["provenance"] |= {
            "machine": machine(),
            "kernels": getattr(backend(), device),
        }
        if device == "cpu":
            row["provenance"]["products"] = backend().products
        log.info("%s: %s seed %d, %s", spec.key, spec.arm, spec.seed, device)
        if job.beside:
            row["provenance"]["beside"] = len(job.beside)
        if processes.count() > 1:
            row["provenance"]["processes"] = processes.count()
            processes.tell((job, device))
        run = yield from _trained(job, device, should_stop)
        row["provenance"]["versions"] = versions()
        stores.write_curve(job.store, spec.key, run.history)
        stores.write_data_report(job.store, run.report)
    except (Stopped, StoreError):
        raise
    except Exception:
        log.exception("failed")
        row["provenance"]["versions"] = versions()
        return {
            **row,
            "status": "failed",
            "error": traceback.format_exc(),
            "device": device_name(device),
        }
    log.info("%s after %.1f s", run.error or run.status, run.seconds)
    return {**row, **_results(run, device)}


def _trained(job: Job, device: str, should_stop: Callable[[], bool]) -> Steps[Run]:
    told = job.options.on_step
    with processes.agreed():
        return (
            yield from steps_of(
                task_of(job.spec),
                job.spec,
                device=device,
                checkpoint=stores.place(job.store, "checkpoints", job.spec.key),
                checkpoint_seconds=job.options.checkpoint_seconds,
                on_step=told and (lambda step, model, loss: told(job.spec, step, loss)),
                should_stop=should_stop,
            )
        )


def follow() -> int:
    """Train along with the first process, run after run, until it has no more; return 0: it counts what failed."""
    fix_order_of_sums()
    while (told := processes.tell(None)) is not None:
        job, device = told
        torch.set_num_threads(job.options.threads)
        try:
            alone(_trained(job, device, lambda: False))
        except (
            Exception
        ):  # what stopped or ended it, the first process, which has it too, says
            log.info("ended", exc_info=True)
    return 0


def _results(run: Run, device: str) -> Row:
    return {
        **{
            name: getattr(run, name)
            for name in ("status", "metrics", "bitops", "title")
        },
        **({"error": run.error} if run.error else {}),
        "steps": len(run.history["step"]),
        "loss": _curve(run.history["loss"]),
        "evaluations": _spread(run.history["evaluations"]),
        "seconds": round(run.seconds, 3),
        "device": device_name(device),
        "peak_memory": peak_memory(device),
        **(
            {"captured": {"steps": run.captured, "why_not": run.why_not_captured}}
            if device == "cuda"
            else {}
        ),
        "data_checksum": run.checksum,
        "data_report": run.report.digest,
    }


def _spread(
    evaluations: list[dict[str, Any]], points: int = 20
) -> list[dict[str, Any]]:
    """At most ``points`` of the evaluations, evenly spread, with the last; the curve file has all."""
    every = -(-len(evaluations) // points) or 1
    return evaluations[::-1][::every][::-1]


def _curve(losses: list[float], points: int = 20) -> list[float]:
    """Mean training loss in ``points`` equal parts of the run: enough to see whether it fell."""
    finite = [x for x in losses if x == x and abs(x) != float("inf")]
    edges = [round(i * len(finite) / points) for i in range(points + 1)]
    return [
        round(sum(finite[a:b]) / (b - a), 5)
        for a, b in itertools.pairwise(edges)
        if b > a
    ]
