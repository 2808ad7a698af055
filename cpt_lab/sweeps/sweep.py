"""Run a list of specs: skip what the store holds, keep going after a failure, resume what was interrupted.

Any number of sweeps may share a store, on one machine or several: each run is done by one of them.

>>> from cpt_lab.experiments import designs
>>> specs = designs.quality_cost("smoke", schedules=["CR"], static_bits=[])
>>> rows = run_grid(specs, store=Path("runs/x.jsonl"))  # doctest: +SKIP
"""

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
from cpt_lab.numerics import OtherNumericsWarning, count_numerics, describe_counts
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
from cpt_lab.tasks.base import task_of
from cpt_lab.training import processes
from cpt_lab.training.batched_runs import batching_pays
from cpt_lab.training.device import choose_device, lay_out

MAX_BATCHED_RUNS = 11  # runs side by side: of more each gains little, and all begin anew where their process dies
Execute = Callable[[list[Job], Signals, Live], Iterator[Outcome]]


def run_grid(
    specs: Iterable[RunSpec],
    store: Path | str,
    options: SweepOptions | None = None,
    **changes: Any,
) -> list[ResultRow]:
    """Run what the store does not hold yet and return the rows of all specs, in order.

    A run, or several of a seed side by side, has a process of its own, and every run a claim that other sweeps respect
    (see ``stores.claim``). A run that raises, dies or takes too long becomes a row with status "failed", and the others
    go on. Interrupted runs continue from their checkpoint. Ctrl-C once: the runs write their checkpoints and the sweep
    ends with KeyboardInterrupt; twice: at once.

    Rows of other numerics (``cpt_core.numerics``) count as done, with a warning: a long sweep does not start anew
    because the package was updated. ``rerun_old`` runs them again.

    Args:
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
        if processes.count() > 1:
            _check_shared(spec, options)
        task_of(spec)
    store = linked_file(
        Path(store).absolute()
    )  # the runs are other processes, maybe in another folder
    stores.check_writable(store)
    held = {row["key"]: row for row in stores.load_rows(store)}
    done = {key for key, row in held.items() if options.accepts(row)}
    todo = list({spec.key: spec for spec in specs if spec.key not in done}.values())
    _check_data(specs, todo, held.values(), store, options)
    _warn_of_old_rows(
        store, [held[spec.key] for spec in specs if spec.key in done], len(todo)
    )
    if todo:
        check_sweep(store.parent, starts=options.workers != 0)
        stores.check_source(store, commit())
        _sweep(_jobs(todo, store, options), _executor(todo, options), options.progress)
        # read again instead of collected: another sweep may have done some, and what counts is what lies in the store
        held = {row["key"]: row for row in stores.load_rows(store)}
    rows = [held[spec.key] for spec in specs]
    # also of a process that was killed between its row and its checkpoint
    stores.remove_checkpoints(
        store, {row["key"] for row in rows if row["status"] != "failed"}
    )
    return rows


def _warn_of_old_rows(store: Path, rows: list[ResultRow], missing: int) -> None:
    """Warn that rows of other numerics answer for their runs, and say how to make them again."""
    counts = count_numerics(rows)
    if set(counts) <= {NUMERICS}:
        return
    others = (
        f"; the {missing} missing runs will have numerics {NUMERICS}" if missing else ""
    )
    warnings.warn(
        f"{store} answers for {len(rows)} of these runs with {describe_counts(counts)}, and numerics {NUMERICS} are "
        f"today's{others}: equal seeds gave other noise, so do not compare across numerics. The rows are used as they "
        "are; rerun_old=True (`cpt run GRID --rerun-old`) runs the old ones again and keeps both, and another store "
        "(CPT_RUNS_DIR) starts afresh",
        OtherNumericsWarning,
        stacklevel=3,
    )


def _check_shared(spec: RunSpec, options: SweepOptions) -> None:
    """Refuse what several processes that torchrun started cannot train together."""
    recipe, among = spec.recipe, processes.count()
    if not hasattr(task_of(spec), "shared_batches") or recipe.batch % among:
        what = f"batches of {recipe.batch} of {recipe.dataset} ({recipe.task}): images and sentence pairs alone"
        raise ValueError(
            f"{among} processes cannot share {what}, and a number that divides the batch"
        )
    if options.executor == "dask" or options.workers:
        raise ValueError(
            "the processes of torchrun train one run at a time; leave out workers and executor"
        )


def _executor(specs: list[RunSpec], options: SweepOptions) -> Execute:
    if options.executor == "dask":
        from cpt_lab.sweeps.dask_cluster import dask_outcomes

        return partial(
            dask_outcomes,
            slots=_slots(specs, options) if options.scheduler is None else [],
        )
    return (
        _here
        if options.workers == 0 or processes.count() > 1
        else partial(_local, slots=_slots(specs, options))
    )


def _check_data(
    specs: list[RunSpec],
    todo: list[RunSpec],
    rows: Iterable[ResultRow],
    store: Path,
    options: SweepOptions,
) -> None:
    """Refuse missing and changed data here, and not in every run alone; the workers of a cluster look for themselves.

    Where nothing is to be run the rows are enough, but one's own data are looked at if they are there.
    """
    here = set() if options.executor == "dask" else {spec.recipe for spec in todo}
    for spec in _recipes(specs):
        if spec.recipe in here:
            choose_device(options.device, spec)
            check_data(spec.recipe)
        elif not is_own(spec.recipe.dataset):
            continue
        try:
            task = task_of(spec)(spec, torch.device("cpu"))
        except FileNotFoundError:
            if spec.recipe in here:
                raise
        else:
            stores.check_same_data(store, rows, spec, task.data.checksum)
            if spec.recipe in here:
                _print_data_report(spec, task.data.report)
            if spec.recipe.channels_last:
                lay_out(task.model(), spec.recipe)


_printed: set[tuple[str, str]] = (
    set()
)  # data sets and digests whose report this process has printed


def _print_data_report(spec: RunSpec, report: DataReport) -> None:
    """Print a data report to stderr before training, once per process; embedded data always have the same."""
    dataset = spec.recipe.dataset
    named = EXPERIMENTS[spec.recipe.task].named.get(dataset)
    if (dataset, report.digest) in _printed or (named is not None and named.embedded):
        return
    _printed.add((dataset, report.digest))
    note(str(report))


def _recipes(specs: Iterable[RunSpec]) -> list[RunSpec]:
    """Return a spec of every recipe: its runs share data, memory and devices."""
    return list({spec.recipe: spec for spec in specs}.values())


def _sweep(jobs: list[Job], execute: Execute, progress: bool | None) -> None:
    with (
        Signals() as signals,
        Live(sum(1 + len(job.beside) for job in jobs), progress) as live,
    ):
        while jobs and not signals.stop.is_set():
            again = set()
            for outcome in execute(jobs, signals, live):
                live.ended(outcome)
                if outcome.row is None:
                    again.add(outcome.key)
            # Another sweep has these (wait for it, and take over if it dies), or somebody ended their processes.
            each = [
                replace(one, wait=True, beside=()) for job in jobs for one in job.each()
            ]
            jobs = [job for job in each if job.spec.key in again]
            if (
                jobs and not live.note and not signals.stop.is_set()
            ):  # a log shows no bar
                first = stores.place(jobs[0].store, "locks", jobs[0].spec.key)
                said = "runs of another sweep, or of processes that somebody ended"
                note(f"{said}: {len(jobs)}; waiting for {first}")
            live.note = "waiting for another sweep" if jobs else ""
        if signals.stop.is_set():
            raise KeyboardInterrupt(
                f"stopped with {live.summary()}; the same command goes on from here"
            )


def _jobs(specs: list[RunSpec], store: Path, options: SweepOptions) -> list[Job]:
    """Return the jobs of these runs: of one recipe and seed as many to a process as the options say."""
    alike: dict[Any, list[RunSpec]] = {}
    for spec in specs:
        alike.setdefault((spec.recipe, spec.seed), []).append(spec)
    jobs = []
    for part in alike.values():
        count = -(
            -len(part) // _together(part[0], len(specs), options)
        )  # of processes, as even as can be
        for first, *rest in (part[i::count] for i in range(count)):
            jobs.append(Job(first, store, options, beside=tuple(rest)))
    return jobs


def _together(spec: RunSpec, count: int, options: SweepOptions) -> int:
    """Return how many runs of a recipe train side by side, of ``count`` that are to be done."""
    on_gpu = choose_device(options.device, spec) != "cpu"
    if options.together is not None:
        if on_gpu and options.together > 1:
            raise ValueError(
                f"together={options.together} is for the CPU; a GPU replays the steps of every run"
            )
        return options.together
    elsewhere = on_gpu or options.executor != "local" or processes.count() > 1
    if (
        elsewhere
        or options.workers == 0
        or options.timeout
        or spec.scale == "paper"
        or not batching_pays(spec)
    ):
        return 1
    workers = options.workers or max(1, usable_cores() // options.threads)
    return min(MAX_BATCHED_RUNS, -(-count // workers))


def _here(jobs: list[Job], signals: Signals, live: Live) -> Iterator[Outcome]:
    before = torch.get_num_threads()
    torch.set_num_threads(jobs[0].options.threads)
    try:
        for job in jobs:
            if signals.stop.is_set():
                return

            def should_stop(
                steps: int = job.spec.recipe.steps * (1 + len(job.beside)),
            ) -> bool:
                live.stepped(steps)  # it is asked after every step
                return signals.stop.is_set()

            yield from run_all(job, should_stop, live.started)
    finally:
        torch.set_num_threads(before)


def _local(
    jobs: list[Job], signals: Signals, live: Live, slots: list[int | None]
) -> Iterator[Outcome]:
    """Several jobs at a time, each in a process of its own; a slot is the GPU of a run, or None."""
    free = deque(slots)  # one for every thread

    def work(job: Job) -> list[Outcome]:
        if signals.stop.is_set():
            return [Outcome(one.spec.key, "stopped") for one in job.each()]
        gpu = free.popleft()
        try:
            return supervise(
                replace(job, gpu=gpu, sharing=len(slots)),
                should_stop=signals.stop.is_set,
                should_kill=signals.kill.is_set,
                on_start=live.started,
            )
        except (
            Exception
        ):  # the store cannot be written: nothing more is started, the others stop
            signals.stop.set()
            raise
        finally:
            free.append(gpu)

    problem: BaseException | None = None
    with ThreadPoolExecutor(len(slots)) as pool:
        pending = {pool.submit(work, job) for job in jobs}
        try:
            while pending:
                ended, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                live.refresh()
                for future in ended:
                    problem = future.exception() or problem
                    if future.exception() is None:
                        yield from future.result()
        finally:
            if pending:  # the second Ctrl-C, or an error in this thread
                signals.kill.set()
                signals.stop.set()
    if problem is not None:
        raise problem  # only now: the other runs have written their checkpoints


def _slots(specs: Sequence[RunSpec], options: SweepOptions) -> list[int | None]:
    """Return one entry per run at a time: the number of its GPU, round robin, or None for the CPU."""
    cores = max(1, usable_cores() // options.threads)
    gpus = torch.cuda.device_count()
    if gpus == 0 or all(choose_device(options.device, spec) == "cpu" for spec in specs):
        return [None] * (options.workers or cores)
    workers = options.workers or gpus * (
        options.per_gpu or _fitting(specs, options.device, gpus, cores)
    )
    return [i % gpus for i in range(workers)]


def _fitting(specs: Sequence[RunSpec], device: str, gpus: int, cores: int) -> int:
    total = min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus))
    try:
        found = [
            cached_timing(spec, device) or measure(spec, device)
            for spec in _recipes(specs)
        ]
    except RuntimeError:
        return 1  # one of them does not run at all: it will fail alone, with its reason
    on_gpu, on_host = (
        max(f.peak_memory for f in found),
        max(f.host_memory for f in found),
    )
    return runs_per_gpu(
        on_gpu, total, on_host, usable_memory() // gpus, max(1, cores // gpus)
    )
