"""Training of the runs of a job: claim each run, train it, append its result row.

``Job`` names one run, or several of one seed that train side by side; ``run_all`` trains them in the calling process.
``cpt_lab.sweeps.process`` calls it in a process of its own, which may die without harm to other runs. ``follow`` is the
part of the processes that torchrun started beside the first one.

>>> job = Job(spec, Path("runs/demo/image.jsonl"))  # doctest: +SKIP
>>> [outcome.row["status"] for outcome in run_all(job)]  # doctest: +SKIP
['ok']
"""

import itertools
import logging
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from cpt_extras.kernels.backend import backend
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.provenance import machine, versions
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.result_row import MetricValue, ResultRow, Status
from cpt_lab.sweeps.stores import StoreError
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training import process_group
from cpt_lab.training.batched_runs import RunSteps, run_alone, run_batched
from cpt_lab.training.device import (
    choose_device,
    cuda_provenance,
    device_name,
    enforce_determinism,
    peak_memory,
)
from cpt_lab.training.train import Run, Stopped, training_steps

# How long a worker waits for a run that another sweep has claimed, before it goes on with its other runs.
WAIT_SECONDS = 60.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One run, or several of one seed, and how to run them."""

    spec: RunSpec
    store: Path  # the file that the result row is appended to
    options: SweepOptions = field(default_factory=SweepOptions)  # options of the sweep
    gpu: int | None = None  # index of the only visible GPU; None leaves all visible
    sharing: int = (
        1  # number of runs that share the cores and the memory of the machine
    )
    wait: bool = (
        False  # wait for a run that another sweep has claimed, before returning "busy"
    )
    beside: tuple[
        RunSpec, ...
    ] = ()  # runs that train in lockstep with it, in one process

    def each(self) -> list["Job"]:
        """Split the job into one job per run; each lists the other runs in ``beside``."""
        specs = (self.spec, *self.beside)
        return [
            replace(self, spec=spec, beside=specs[:i] + specs[i + 1 :])
            for i, spec in enumerate(specs)
        ]


@dataclass(frozen=True)
class Outcome:
    """Result of one run of a job: its status, and the row that counts if there is one.

    "ran": trained here, also if it failed; "held": the store had its row already; "busy": another process has claimed
    it; "stopped": interrupted, with a checkpoint.
    """

    key: str
    status: Literal["ran", "held", "busy", "stopped"]
    row: ResultRow | None = None
    measurement: dict[str, Any] | None = None  # for ``step_timing`` alone


def never_stop() -> bool:
    """Return False: the ``should_stop`` of a run that nobody interrupts."""
    return False


def ignore_start(key: str) -> None:
    """Do nothing: the ``on_start`` of a run whose start nobody waits for."""


def run_all(
    job: Job,
    should_stop: Callable[[], bool] = never_stop,
    on_start: Callable[[str], None] = ignore_start,
) -> list[Outcome]:
    """Run a job in this process and append its rows; a run that raises becomes a row with status "failed".

    The row is the last thing that is written and the checkpoint goes only after it, so a process that dies anywhere
    loses nothing but the time since its last checkpoint. The claim on the run is held until the end.

    Args:
        job: the run, or the runs that train side by side.
        should_stop: asked after every step; the run then writes its checkpoint and ends.
        on_start: called with the key of a run that this process has claimed and is about to train.

    Raises:
        StoreError: when the store cannot be written; checkpoints remain on disk.
    """
    runs = [_claimed_run(single, should_stop, on_start) for single in job.each()]
    return run_batched(runs) if job.beside else [run_alone(runs[0])]


def _claimed_run(
    job: Job, should_stop: Callable[[], bool], on_start: Callable[[str], None]
) -> RunSteps[Outcome]:
    """Claim one run, train it step by step and append its row."""
    key, store = job.spec.key, job.store
    seconds = WAIT_SECONDS if job.wait else 0.0
    try:
        with stores.claim(store, key, seconds, should_stop) as is_mine:
            if not is_mine:
                return Outcome(key, "stopped" if should_stop() else "busy")

            on_start(key)
            # The store is read only now: the row may have come while this process waited.
            stored_row = stores.find_row(store, key)
            if stored_row is not None and job.options.accepts(stored_row):
                return Outcome(key, "held", stored_row)

            stores.check_free(store)
            stores.clean(store, key)
            new_row = yield from _trained_row(job, should_stop)
            row = stores.append_row(store, new_row)
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


def _trained_row(job: Job, should_stop: Callable[[], bool]) -> RunSteps[ResultRow]:
    """Train one run and assemble its result row, with status "failed" if the run raises."""
    spec = job.spec
    row = stores.describe(spec)
    device = job.options.device
    enforce_determinism()
    try:
        device = choose_device(device, spec)
        _add_execution(row["provenance"], job, device)
        log.info("%s: %s seed %d, %s", spec.key, spec.arm, spec.seed, device)
        if process_group.size() > 1:
            process_group.broadcast((job, device))
        run = yield from _train(job, device, should_stop)
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
    return {**row, **_result_fields(run, device)}


def _add_execution(provenance: dict[str, Any], job: Job, device: str) -> None:
    """Add the machine, the kernels and the company of a run to its provenance."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        provenance["cuda"] = cuda_provenance(job.spec.recipe)

    provenance["machine"] = machine()
    provenance["kernels"] = getattr(backend(), device)
    if device == "cpu":
        provenance["products"] = backend().products

    if job.beside:
        provenance["beside"] = len(job.beside)
    if process_group.size() > 1:
        provenance["processes"] = process_group.size()


def _train(job: Job, device: str, should_stop: Callable[[], bool]) -> RunSteps[Run]:
    """Train one run on a device, in agreement with the other processes of torchrun."""
    spec, options = job.spec, job.options

    def report_step(step: int, model: Any, loss: float) -> None:
        assert options.on_step is not None
        options.on_step(spec, step, loss)

    with process_group.global_ranges():
        return (
            yield from training_steps(
                load_task_class(spec),
                spec,
                device=device,
                checkpoint=stores.place(job.store, "checkpoints", spec.key),
                checkpoint_seconds=options.checkpoint_seconds,
                on_step=report_step if options.on_step else None,
                should_stop=should_stop,
            )
        )


def follow() -> int:
    """Train along with the first process of torchrun, run after run, until it has no more.

    Returns:
        0, the exit status: the first process counts the failures.
    """
    enforce_determinism()
    while (message := process_group.broadcast(None)) is not None:
        job, device = message
        torch.set_num_threads(job.options.threads)
        try:
            run_alone(_train(job, device, never_stop))
        except Exception:  # the first process has the same one, and reports it
            log.info("ended", exc_info=True)
    return 0


def _result_fields(run: Run, device: str) -> ResultRow:
    """Return the fields of a result row that training gives."""
    fields: ResultRow = {
        "status": cast(Status, run.status),
        "metrics": cast(list[MetricValue], run.metrics),
        "bitops": run.bitops,
        "title": run.title,
    }
    if run.error:
        fields["error"] = run.error

    fields["steps"] = len(run.history["step"])
    fields["loss"] = _mean_losses(run.history["loss"])
    fields["evaluations"] = _spaced_evaluations(run.history["evaluations"])

    fields["seconds"] = round(run.seconds, 3)
    fields["device"] = device_name(device)
    fields["peak_memory"] = peak_memory(device)
    if device == "cuda":
        fields["captured"] = {"steps": run.captured, "why_not": run.uncaptured_reason}

    fields["data_checksum"] = run.checksum
    fields["data_report"] = run.report.digest
    return fields


def _spaced_evaluations(
    evaluations: list[dict[str, Any]], max_count: int = 20
) -> list[dict[str, Any]]:
    """Return at most ``max_count`` evaluations, evenly spaced, with the last; the curve file has all."""
    stride = math.ceil(len(evaluations) / max_count) or 1
    return evaluations[::-1][::stride][::-1]


def _mean_losses(losses: list[float], parts: int = 20) -> list[float]:
    """Return the mean training loss of equal parts of a run: enough to see whether it fell."""
    finite_losses = [loss for loss in losses if math.isfinite(loss)]
    edges = [round(i * len(finite_losses) / parts) for i in range(parts + 1)]

    means = []
    for start, stop in itertools.pairwise(edges):
        if stop > start:
            mean = sum(finite_losses[start:stop]) / (stop - start)
            means.append(round(mean, 5))
    return means
