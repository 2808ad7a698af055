"""Sweeps: run a list of specs, skipping stored runs, continuing after failures and resuming interrupted runs.

``run_grid`` is the entry point. It checks the data and the store, splits the missing specs into jobs, and gives them to
an executor: this process, several processes on this machine, or a Dask cluster. Any number of sweeps may share a
store, on one machine or several: every run is claimed, and trained, by one of them.

>>> from cpt_lab.experiments import designs
>>> specs = designs.quality_cost("smoke", schedules=["CR"], static_bits=[])
>>> rows = run_grid(specs, store=Path("runs/x.jsonl"))  # doctest: +SKIP
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpt_core.numerics import NUMERICS
from cpt_lab.data.files import check_data
from cpt_lab.data.report import DataReport
from cpt_lab.doctor import check_sweep
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.schema import is_own
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.numerics import (
    OtherNumericsWarning,
    count_numerics,
    describe_counts,
    is_comparable,
)
from cpt_lab.provenance import commit
from cpt_lab.resources import usable_cores, usable_memory
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.process import check_start, supervise
from cpt_lab.sweeps.progress import Live, Signals, note
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.row_format import linked_file
from cpt_lab.sweeps.step_timing import cached_timing, measure, runs_per_gpu
from cpt_lab.sweeps.worker import Job, Outcome, run_all
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training import process_group
from cpt_lab.training.batched_runs import batching_is_faster
from cpt_lab.training.device import choose_device, set_memory_format

# Runs that train in lockstep in one process: more gain little, and all start again if their process dies.
MAX_BATCHED_RUNS = 11
Execute = Callable[[list[Job], Signals, Live], Iterator[Outcome]]


def run_grid(
    specs: Iterable[RunSpec],
    store: Path | str,
    options: SweepOptions | None = None,
    **changes: Any,
) -> list[ResultRow]:
    """Run the specs that the store has no row of, and return the rows of all specs, in order.

    A run, or several of one seed in lockstep, has a process of its own, and every run a claim that other sweeps respect
    (see ``stores.claim``). A run that raises, dies or takes too long becomes a row with status "failed", and the others
    go on. Interrupted runs continue from their checkpoint. Ctrl-C once: the runs write their checkpoints and the sweep
    ends with KeyboardInterrupt; twice: at once.

    Rows of other numerics (``cpt_core.numerics``) count as done, with a warning: a long sweep does not start anew
    because the package was updated. ``rerun_old`` runs them again; the row of one that fails is returned, while the old
    row goes on to count in the store.

    Args:
        specs: the runs; equal specs are run once.
        store: a file of JSON lines; made when it does not exist.
        options: how to run them; None takes ``SweepOptions()``.
        **changes: single options, such as ``workers=2``; see ``SweepOptions``.

    Raises:
        ValueError: for a wrong value, an unknown task, or data that are not those of the rows in the store, before
            anything runs.
        DataNotFoundError: when the data of a run are not there, before anything runs.
        StoreError: when the store cannot be written, before anything runs or as soon as it is noticed; also for one
            under ``data/results`` when the tree differs from its commit.
        MachineError: when this machine cannot do it, before anything runs; see ``cpt doctor``.
        StartError: when processes of runs cannot start, as from a script without ``if __name__ == "__main__":``.

    Warns:
        MachineWarning: of what this machine lacks, once in a process; see ``cpt doctor``.
        OtherNumericsWarning: when rows of other numerics answer for some of the runs.
    """
    check_start()
    options, specs = replace(options or SweepOptions(), **changes), list(specs)
    for spec in specs:
        if not isinstance(spec, RunSpec):
            raise TypeError(
                f"specs must be a list of RunSpec, as the designs return it; got {spec!r} in it"
            )
        if process_group.size() > 1:
            _check_shared(spec, options)
        load_task_class(spec)
    # Runs are other processes, maybe with another working directory: they need the absolute path.
    store = linked_file(Path(store).absolute())
    stores.check_writable(store)
    row_by_key = {row["key"]: row for row in stores.load_rows(store)}
    accepted_keys = {key for key, row in row_by_key.items() if options.accepts(row)}
    missing_by_key = {spec.key: spec for spec in specs if spec.key not in accepted_keys}
    missing = list(missing_by_key.values())
    _check_data(specs, missing, row_by_key.values(), store, options)
    accepted_rows = [
        row_by_key[spec.key] for spec in specs if spec.key in accepted_keys
    ]
    _warn_of_old_rows(store, accepted_rows, len(missing))

    if missing:
        check_sweep(store.parent, starts=options.workers != 0)
        stores.check_source(store, commit())
        jobs = _jobs(missing, store, options)
        failed_rows = _sweep(jobs, _executor(missing, options), options.progress)
        # The store is read again, because another sweep may have trained some of the runs.
        row_by_key = {row["key"]: row for row in stores.load_rows(store)}
        for row in failed_rows:
            # In the store a finished row of other numerics counts before this failure.
            if not options.accepts(row_by_key[row["key"]]):
                row_by_key[row["key"]] = row

    rows = [row_by_key[spec.key] for spec in specs]
    # A process may have been killed between its row and the removal of its checkpoint. Beside a row of other numerics
    # the checkpoint is that of a rerun, which goes on from it.
    finished_keys = {
        row["key"] for row in rows if row["status"] != "failed" and is_comparable(row)
    }
    stores.remove_checkpoints(store, finished_keys)
    return rows


def _warn_of_old_rows(store: Path, rows: list[ResultRow], missing: int) -> None:
    """Warn that rows of other numerics are used, and name the option that trains their runs again."""
    counts = count_numerics(rows)
    if set(counts) <= {NUMERICS}:
        return
    mixture = ""
    if missing:
        mixture = f"; the {missing} missing runs will have numerics {NUMERICS}"
    warnings.warn(
        f"{store} answers for {len(rows)} of these runs with {describe_counts(counts)}, and numerics {NUMERICS} are "
        f"today's{mixture}: equal seeds gave other noise, so do not compare across numerics. The rows are used as they "
        "are; rerun_old=True (`cpt run GRID --rerun-old`) runs the old ones again and keeps both, and another store "
        "(CPT_RUNS_DIR) starts afresh",
        OtherNumericsWarning,
        stacklevel=3,
    )


def _check_shared(spec: RunSpec, options: SweepOptions) -> None:
    """Refuse runs and options that several processes of torchrun cannot train together.

    Raises:
        ValueError: names the reason.
    """
    recipe, process_count = spec.recipe, process_group.size()
    can_share = hasattr(load_task_class(spec), "shared_batches")
    if not can_share or recipe.batch % process_count:
        raise ValueError(
            f"{process_count} processes cannot share batches of {recipe.batch} of {recipe.dataset} ({recipe.task}): "
            "images and sentence pairs alone, and a number that divides the batch"
        )
    if options.executor == "dask" or options.workers:
        raise ValueError(
            "the processes of torchrun train one run at a time; leave out workers and executor"
        )


def _executor(specs: list[RunSpec], options: SweepOptions) -> Execute:
    """Return the function that runs jobs: on a Dask cluster, in this process, or in several."""
    if options.executor == "dask":
        from cpt_lab.sweeps.dask_cluster import dask_outcomes

        slots = _slots(specs, options) if options.scheduler is None else []
        return partial(dask_outcomes, slots=slots)

    if options.workers == 0 or process_group.size() > 1:
        return _in_this_process
    return partial(_in_processes, slots=_slots(specs, options))


def _check_data(
    specs: list[RunSpec],
    missing: list[RunSpec],
    rows: Iterable[ResultRow],
    store: Path,
    options: SweepOptions,
) -> None:
    """Refuse missing and changed data once, before every run would; the workers of a cluster check theirs.

    A recipe whose runs are all stored needs no data, but the user's own files are checked if they exist.
    """
    local_recipes = set()
    if options.executor != "dask":
        local_recipes = {spec.recipe for spec in missing}

    for spec in _recipes(specs):
        if spec.recipe in local_recipes:
            choose_device(options.device, spec)
            check_data(spec.recipe)
        elif not is_own(spec.recipe.dataset):
            continue
        try:
            task = load_task_class(spec)(spec, torch.device("cpu"))
        except FileNotFoundError:
            if spec.recipe in local_recipes:
                raise
        else:
            stores.check_same_data(store, rows, spec, task.data.checksum)
            if spec.recipe in local_recipes:
                _print_data_report(spec, task.data.report)
            if spec.recipe.channels_last:
                set_memory_format(task.build_model(), spec.recipe)


_printed: set[tuple[str, str]] = (
    set()
)  # data sets and digests whose report this process has printed


def _print_data_report(spec: RunSpec, report: DataReport) -> None:
    """Print a data report to stderr before training, once per process; embedded data sets need none."""
    dataset = spec.recipe.dataset
    description = EXPERIMENTS[spec.recipe.task].named_datasets.get(dataset)
    is_embedded = description is not None and description.embedded
    if is_embedded or (dataset, report.digest) in _printed:
        return
    _printed.add((dataset, report.digest))
    note(str(report))


def _recipes(specs: Iterable[RunSpec]) -> list[RunSpec]:
    """Return one spec per recipe: runs of one recipe share data, memory and devices."""
    return list({spec.recipe: spec for spec in specs}.values())


def _sweep(jobs: list[Job], execute: Execute, progress: bool | None) -> list[ResultRow]:
    """Run jobs until every run has a row; wait for the runs that other sweeps have claimed.

    Returns:
        The rows of the runs that failed.

    Raises:
        KeyboardInterrupt: when the sweep was stopped, after the runs have written their checkpoints.
    """
    run_count = sum(1 + len(job.beside) for job in jobs)
    failed_rows = []
    with Signals() as signals, Live(run_count, progress) as live:
        while jobs and not signals.stop.is_set():
            unfinished_keys = set()
            for outcome in execute(jobs, signals, live):
                live.finish(outcome)
                if outcome.row is None:
                    unfinished_keys.add(outcome.key)
                elif outcome.row["status"] == "failed":
                    failed_rows.append(outcome.row)

            # Another sweep has these runs (wait for it, and take over if it dies), or somebody ended their processes.
            single_jobs = [
                replace(single, wait=True, beside=())
                for job in jobs
                for single in job.each()
            ]
            jobs = [job for job in single_jobs if job.spec.key in unfinished_keys]
            if jobs and not live.note and not signals.stop.is_set():
                # A log file shows no progress bar, so it needs this line.
                first = stores.place(jobs[0].store, "locks", jobs[0].spec.key)
                note(
                    "runs of another sweep, or of processes that somebody ended: "
                    f"{len(jobs)}; waiting for {first}"
                )
            live.note = "waiting for another sweep" if jobs else ""
        if signals.stop.is_set():
            raise KeyboardInterrupt(
                f"stopped with {live.summary()}; the same command goes on from here"
            )
    return failed_rows


def _jobs(specs: list[RunSpec], store: Path, options: SweepOptions) -> list[Job]:
    """Split runs into jobs: runs of one recipe and seed share a process, as many as the options say."""
    groups: dict[Any, list[RunSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.recipe, spec.seed), []).append(spec)

    jobs = []
    for group in groups.values():
        runs_per_job = _runs_per_job(group[0], len(specs), options)
        job_count = math.ceil(len(group) / runs_per_job)
        for i in range(job_count):  # jobs of sizes as equal as possible
            first, *others = group[i::job_count]
            jobs.append(Job(first, store, options, beside=tuple(others)))
    return jobs


def _runs_per_job(spec: RunSpec, count: int, options: SweepOptions) -> int:
    """Return how many runs of a recipe train in lockstep, if the sweep has ``count`` runs."""
    on_gpu = choose_device(options.device, spec) != "cpu"
    if options.together is not None:
        if on_gpu and options.together > 1:
            raise ValueError(
                f"together={options.together} is for the CPU; a GPU replays the steps of every run"
            )
        return options.together
    is_distributed = options.executor != "local" or process_group.size() > 1
    if (
        on_gpu
        or is_distributed
        or options.workers == 0
        or options.timeout
        or spec.scale == "paper"
        or not batching_is_faster(spec)
    ):
        return 1
    workers = options.workers or max(1, usable_cores() // options.threads)
    return min(MAX_BATCHED_RUNS, math.ceil(count / workers))


def _in_this_process(
    jobs: list[Job], signals: Signals, live: Live
) -> Iterator[Outcome]:
    """Run jobs one after the other in this process."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(jobs[0].options.threads)
    try:
        for job in jobs:
            if signals.stop.is_set():
                return

            def should_stop(
                steps: int = job.spec.recipe.steps * (1 + len(job.beside)),
            ) -> bool:
                live.count_step(steps)  # this function is called after every step
                return signals.stop.is_set()

            yield from run_all(job, should_stop, live.start)
    finally:
        torch.set_num_threads(threads_before)


def _in_processes(
    jobs: list[Job], signals: Signals, live: Live, slots: list[int | None]
) -> Iterator[Outcome]:
    """Run several jobs at a time, each in a process of its own; a slot is the GPU of a run, or None."""
    free_slots = deque(slots)  # one per thread

    def work(job: Job) -> list[Outcome]:
        if signals.stop.is_set():
            return [Outcome(single.spec.key, "stopped") for single in job.each()]
        gpu = free_slots.popleft()
        try:
            return supervise(
                replace(job, gpu=gpu, sharing=len(slots)),
                should_stop=signals.stop.is_set,
                should_kill=signals.kill.is_set,
                on_start=live.start,
            )
        except (
            Exception
        ):  # such as a full disk: no further run starts, and the others stop
            signals.stop.set()
            raise
        finally:
            free_slots.append(gpu)

    problem: BaseException | None = None
    with ThreadPoolExecutor(len(slots)) as pool:
        pending = {pool.submit(work, job) for job in jobs}
        try:
            while pending:
                finished, pending = wait(
                    pending, timeout=0.2, return_when=FIRST_COMPLETED
                )
                live.refresh()
                for future in finished:
                    problem = future.exception() or problem
                    if future.exception() is None:
                        yield from future.result()
        finally:
            if pending:  # the second Ctrl-C, or an error in this thread
                signals.kill.set()
                signals.stop.set()
    if problem is not None:
        raise problem  # after the other runs have written their checkpoints


def _slots(specs: Sequence[RunSpec], options: SweepOptions) -> list[int | None]:
    """Return one entry per concurrent run: the index of its GPU, round robin, or None for the CPU."""
    cores = max(1, usable_cores() // options.threads)
    gpu_count = torch.cuda.device_count()
    if gpu_count == 0 or all(
        choose_device(options.device, spec) == "cpu" for spec in specs
    ):
        worker_count = options.workers or cores
        return [None] * worker_count

    if options.workers:
        worker_count = options.workers
    else:
        per_gpu = options.per_gpu or _fitting(specs, options.device, gpu_count, cores)
        worker_count = gpu_count * per_gpu
    return [i % gpu_count for i in range(worker_count)]


def _fitting(specs: Sequence[RunSpec], device: str, gpu_count: int, cores: int) -> int:
    """Return how many runs of the most demanding recipe fit on each GPU."""
    total = min(
        torch.cuda.get_device_properties(i).total_memory for i in range(gpu_count)
    )
    try:
        timings = [
            cached_timing(spec, device) or measure(spec, device)
            for spec in _recipes(specs)
        ]
    except RuntimeError:
        return 1  # a recipe that does not run at all will fail alone, with its reason
    return runs_per_gpu(
        on_gpu=max(timing.peak_memory for timing in timings),
        gpu_memory=total,
        on_host=max(timing.host_memory for timing in timings),
        memory=usable_memory() // gpu_count,
        cores=max(1, cores // gpu_count),
    )
