"""A job in a process of its own, which may die alone."""

import faulthandler
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch

from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.resources import share_with
from cpt_lab.signals import PASSED_ON
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.row_index import StoreIndex, index_part, remember
from cpt_lab.sweeps.stores import StoreError
from cpt_lab.sweeps.worker import Job, Outcome, run_all

GRACE_SECONDS = 60.0  # for the checkpoint of a run whose time is up
PREFIX = "run-"  # of the names of the processes of runs
NO_GUARD = 86  # exit status of such a process in which the main script starts a sweep when it is imported

# Keep freed memory instead of faulting it in again for every temporary tensor: 10-30 % faster steps on a CPU.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}


class StartError(ChildProcessError):
    """The process of a run cannot start; the message says why. It is no result of the run."""


def supervise(
    job: Job,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    should_kill: Callable[[], bool] = lambda: False,
    on_start: Callable[[str], None] = lambda key: None,
    work: Callable[..., list[Outcome]] = run_all,
) -> list[Outcome]:
    """Run a job in a new process and wait for it; a process that dies or takes too long leaves a failed row.

    Runs that had trained side by side there are no failures: each may try again alone. Nor is a process that ends
    before it has begun with its job: that says nothing of the run.

    Args:
        should_stop: asked all the time; the run then writes its checkpoint and ends.
        should_kill: the same, but the process is killed.
        on_start: called with the key of a run that has started: the time that it may take counts from there.
        work: what the process does; for tests.

    Raises:
        StoreError: when the store cannot be written.
        StartError: when the process cannot start.
    """
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    known = index_part(job.store, [one.spec.key for one in job.each()])
    given = (job, sender, work, dict(os.environ), known)
    process = context.Process(target=_child, args=given, name=f"{PREFIX}{job.spec.key}")
    with _importable_main():
        process.start()
    sender.close()  # the last writing end is the child's now, so the pipe ends with it
    said: dict[str, Any] = {}
    started = asked = math.inf
    timeout = job.options.timeout or math.inf
    late = False
    try:
        # A pipe may end before its process (which closes it at exit) and a process before its pipe is read: wait for
        # both. The 0.2 seconds are how soon this process notices that it should stop the other.
        talking = True
        while talking or process.is_alive():
            connection.wait([receiver if talking else process.sentinel], timeout=0.2)
            while talking and receiver.poll():
                try:
                    kind, content = receiver.recv()
                except (
                    EOFError,
                    OSError,
                ):  # the end, or the middle of a message at which the process was killed
                    talking = False
                    continue
                said[kind] = content
                if kind == "started":
                    started = time.monotonic()
                    on_start(content)
            now = time.monotonic()
            late = late or now - started > timeout
            if asked == math.inf and (late or should_stop()):
                process.terminate()  # the run writes its checkpoint at the end of the step
                asked = now
            # a run that hangs never comes to the end of its step; one that was stopped may take its time to write
            if should_kill() or (late and now - asked > GRACE_SECONDS):
                process.kill()
    finally:
        if (
            process.is_alive()
        ):  # an error in this process; nobody would look after the other
            process.kill()
        process.join()
        receiver.close()
    if "error" in said:
        raise StoreError(said["error"])
    outcomes = said.get("outcomes")
    if outcomes and not (late and outcomes[0].status == "stopped"):
        return outcomes  # what it said counts, however it ended after that
    stopped = should_kill() or (outcomes is None and should_stop() and not late)
    begun = "begun" in said
    if not begun and not stopped and (process.exitcode or 0) >= 0:
        raise StartError(_why_no_start(process.exitcode))
    if job.beside or stopped or not begun:
        return [
            Outcome(one.spec.key, "stopped") for one in job.each()
        ]  # died because it was told to: no failure
    return [
        record_loss(
            job,
            f"took longer than {timeout:g} s" if late else _cause_of(process.exitcode),
        )
    ]


def check_start() -> None:
    """Refuse to start processes in one that is only just starting: its script is imported again.

    Raises:
        StartError: naming the guard that the script lacks. In a process of a run, which says it to the sweep, this
            ends the process instead.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    if process.name.startswith(PREFIX):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(NO_GUARD)
    raise StartError(_why_no_start(NO_GUARD))


def _why_no_start(exitcode: int | None) -> str:
    script = getattr(sys.modules["__main__"], "__file__", None)
    guard = f'put what the script does under `if __name__ == "__main__":`{f" in {script}" if script else ""}'
    if exitcode == NO_GUARD:
        why = "every process of a run imports the script again, and there it starts the sweep again"
    else:
        why = f"the process of a run ended with status {exitcode} before it had begun; what it printed is above"
        if script:
            guard = f"such a process imports the script again: if the error comes from there, {guard}"
        else:
            guard = "mend what it names"
    return f"a run could not be started, and nothing of it was stored: {why}; {guard}, or take workers=0"


@contextmanager
def _importable_main() -> Iterator[None]:
    """Hide the path of a main script that is in no file, as one from stdin, for a ``with`` block.

    A new process would look for it. What a run does comes from modules alone.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    with _starting:
        hidden = (
            getattr(main, "__spec__", None) is None
            and path is not None
            and not os.path.exists(path)
        )
        if hidden:
            del main.__file__
        try:
            yield
        finally:
            if hidden:
                main.__file__ = path


def record_loss(job: Job, why: str) -> Outcome:
    """Store a failed row for a process that ended without one, unless it had appended its row or another has it."""
    key, store = job.spec.key, job.store
    with stores.claim(store, key) as mine:
        if not mine:
            return Outcome(key, "busy")
        log_file = stores.place(store, "logs", key)
        last = _end_of(log_file)
        with suppress(OSError), open(log_file, "a", encoding="utf-8") as f:
            f.write(f"{why}\n")
        row: ResultRow = {
            **stores.describe(job.spec),
            "status": "failed",
            "error": f"{why}\n{last}",
        }
        return Outcome(key, "ran", stores.append_row(store, row))


def _end_of(path: Path, lines: int = 40) -> str:
    """Return the last lines of a log, without the list of modules that a crash dump ends with."""
    if not path.exists():
        return ""
    said = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(
        [line for line in said if not line.startswith("Extension modules:")][-lines:]
    )


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
        # a task whose extra is not installed is left out there, and missed by its own runs only
        tasks = [
            experiment.task.partition(":")[0] for experiment in EXPERIMENTS.values()
        ]
        context.set_forkserver_preload(
            ["cpt_lab.sweeps.worker", *tasks, "sklearn.datasets", "sklearn.neighbors"]
        )
        # A terminal and a batch system send their signals to the server, too, and to the runs that are forked from it:
        # they block those that only the sweep answers. Ctrl-C the server ignores later by itself; while it starts,
        # nothing there would catch it. The tracker of resources goes before that: it ends a block of Ctrl-C.
        for_sweep = {
            number
            for number in PASSED_ON
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, for_sweep)
        try:
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            with unless_set(ALLOCATOR):
                forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(
                signal.SIG_UNBLOCK, {signal.SIGINT, *for_sweep} - blocked
            )
    return context


@contextmanager
def unless_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Give values to variables of the environment for a ``with`` block, to those that have none."""
    missing = {
        name: value for name, value in variables.items() if not os.environ.get(name)
    }
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _child(
    job: Job,
    sender: Any,
    work: Callable[..., list[Outcome]],
    environment: dict[str, str],
    known: StoreIndex | None,
) -> None:
    def send(kind: str, content: Any) -> None:
        with suppress(OSError):  # the sweep is gone; the row is in the store
            sender.send((kind, content))

    send("begun", None)
    os.environ.update(
        environment
    )  # the server that this process comes from may be older than a change of it
    remember(job.store, known)
    stop = threading.Event()
    for number in (
        signal.SIGINT,
        *PASSED_ON,
    ):  # they are for the sweep, which then asks with SIGTERM
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_watch_parent, args=(stop,), daemon=True).start()
    _log_to(stores.place(job.store, "logs", job.spec.key))
    for spec in job.beside:
        with suppress(OSError):
            said = f"trains beside {job.spec.key}, whose log is of both\n"
            stores.place(job.store, "logs", spec.key).write_text(said, encoding="utf-8")
    if job.gpu is not None:  # before CUDA starts
        visible = [
            v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v
        ]
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            visible[job.gpu] if visible else str(job.gpu)
        )
    torch.set_num_threads(job.options.threads)
    share_with(job.sharing)
    try:
        send("outcomes", work(job, stop.is_set, partial(send, "started")))
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
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(message)s",
        force=True,
    )
    faulthandler.enable()
