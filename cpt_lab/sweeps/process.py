"""Processes of runs: start a job in a new process, watch it, and record a failure if it dies.

``supervise`` starts the process, passes on requests to stop, and enforces the timeout of a run. The process reports
over a pipe that it has begun, that a run has started, and the outcomes. New processes are forked from a server
that has torch imported, so that a run starts in milliseconds.
"""

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
from cpt_lab.sweeps.worker import Job, Outcome, ignore_start, never_stop, run_all

GRACE_SECONDS = 60.0  # time for the last checkpoint of a run that took too long
PREFIX = "run-"  # start of the names of run processes
NO_GUARD = (
    86  # exit status of a run process whose import of the main script starts a sweep
)

# Keep freed memory instead of faulting it in again for every temporary tensor: 10-30 % faster steps on a CPU.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}


class StartError(ChildProcessError):
    """Error for a run process that cannot start; it is no result of the run."""


def supervise(
    job: Job,
    *,
    should_stop: Callable[[], bool] = never_stop,
    should_kill: Callable[[], bool] = never_stop,
    on_start: Callable[[str], None] = ignore_start,
    work: Callable[..., list[Outcome]] = run_all,
) -> list[Outcome]:
    """Run a job in a new process and wait for it; a process that dies or takes too long leaves a failed row.

    Runs that trained in lockstep in a process that died have not failed: each may try again alone. Neither has the run
    of a process that ends before it has begun with its job.

    Args:
        job: the run, or the runs that train side by side.
        should_stop: asked several times a second; the run then writes its checkpoint and ends.
        should_kill: asked as often; the process is killed.
        on_start: called with the key of a run that has started: its timeout counts from there.
        work: function that the process calls; for tests.

    Raises:
        StoreError: when the store cannot be written.
        StartError: when the process cannot start.
    """
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    index = index_part(job.store, [single.spec.key for single in job.each()])
    process = context.Process(
        target=_child,
        args=(job, sender, work, _environment(), index),
        name=f"{PREFIX}{job.spec.key}",
    )
    with _importable_main():
        process.start()
    sender.close()  # the child has the last writing end now, so the pipe ends with the child

    supervision = _Supervision(process, receiver, job.options.timeout, on_start)
    supervision.wait(should_stop, should_kill)
    return _job_outcomes(job, supervision, should_stop, should_kill)


class _Supervision:
    """Wait for the process of a job: its messages, its timeout, and requests to end it.

    Attributes:
        messages: content of the last message of every kind: "begun", "started", "outcomes", "error".
        is_late: the run took longer than its timeout.
    """

    def __init__(
        self,
        process: Any,
        receiver: Any,
        timeout: float | None,
        on_start: Callable[[str], None],
    ) -> None:
        self.process = process
        self.receiver = receiver
        self.timeout = timeout or math.inf
        self.on_start = on_start
        self.messages: dict[str, Any] = {}
        self.is_late = False
        self._start_time = math.inf
        self._stop_time = math.inf  # when the process was asked to end
        self._is_pipe_open = True

    def wait(
        self, should_stop: Callable[[], bool], should_kill: Callable[[], bool]
    ) -> None:
        """Wait until the process has ended and all its messages are read.

        A pipe may end before its process (which closes it at exit) and a process before its pipe is read. The 0.2
        seconds are how soon this process notices that it should stop the other.
        """
        process, receiver = self.process, self.receiver
        try:
            while self._is_pipe_open or process.is_alive():
                source = receiver if self._is_pipe_open else process.sentinel
                connection.wait([source], timeout=0.2)
                while self._is_pipe_open and receiver.poll():
                    self._receive()
                self._end_if_needed(should_stop, should_kill)
        finally:
            if (
                process.is_alive()
            ):  # an error in this process: nobody would look after the other
                process.kill()
            process.join()
            receiver.close()

    def _receive(self) -> None:
        """Read one message."""
        try:
            kind, content = self.receiver.recv()
        except (
            EOFError,
            OSError,
        ):  # the end, or the process was killed in the middle of a message
            self._is_pipe_open = False
            return
        self.messages[kind] = content
        if kind == "started":
            self._start_time = time.monotonic()
            self.on_start(content)

    def _end_if_needed(
        self, should_stop: Callable[[], bool], should_kill: Callable[[], bool]
    ) -> None:
        """Ask the process to end, or kill it."""
        now = time.monotonic()
        self.is_late = self.is_late or now - self._start_time > self.timeout
        if self._stop_time == math.inf and (self.is_late or should_stop()):
            self.process.terminate()  # the run writes its checkpoint at the end of the step
            self._stop_time = now

        # A run that hangs never comes to the end of its step; one that was stopped may take its time to write.
        grace_is_over = self.is_late and now - self._stop_time > GRACE_SECONDS
        if should_kill() or grace_is_over:
            self.process.kill()


def _job_outcomes(
    job: Job,
    supervision: _Supervision,
    should_stop: Callable[[], bool],
    should_kill: Callable[[], bool],
) -> list[Outcome]:
    """Return the outcomes of a job whose process has ended."""
    messages, is_late = supervision.messages, supervision.is_late
    exitcode = supervision.process.exitcode
    if "error" in messages:
        raise StoreError(messages["error"])

    outcomes = messages.get("outcomes")
    if outcomes and not (is_late and outcomes[0].status == "stopped"):
        return outcomes  # valid however the process ended after that

    stopped = should_kill() or (outcomes is None and should_stop() and not is_late)
    begun = "begun" in messages
    if not begun and not stopped and (exitcode or 0) >= 0:
        raise StartError(_explain_failed_start(exitcode))

    if job.beside or stopped or not begun:  # no failure of the runs
        return [Outcome(single.spec.key, "stopped") for single in job.each()]

    reason = _cause_of(exitcode)
    if is_late:
        reason = f"took longer than {supervision.timeout:g} s"
    return [record_loss(job, reason)]


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
    raise StartError(_explain_failed_start(NO_GUARD))


def _explain_failed_start(exitcode: int | None) -> str:
    """Return why a run process could not start, and what to change in the script."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    guard = 'put what the script does under `if __name__ == "__main__":`'
    if script:
        guard += f" in {script}"

    if exitcode == NO_GUARD:
        reason = "every process of a run imports the script again, and there it starts the sweep again"
    else:
        reason = f"the process of a run ended with status {exitcode} before it had begun; what it printed is above"
        if script:
            guard = f"such a process imports the script again: if the error comes from there, {guard}"
        else:
            guard = "mend what it names"
    return f"a run could not be started, and nothing of it was stored: {reason}; {guard}, or take workers=0"


@contextmanager
def _importable_main() -> Iterator[None]:
    """Hide the path of a main script that is no file, such as stdin, for a ``with`` block.

    A new process would try to import it, although a run needs only modules.
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


def record_loss(job: Job, reason: str) -> Outcome:
    """Store a failed row for a process that ended without one, unless it had appended its row or another has it."""
    key, store = job.spec.key, job.store
    with stores.claim(store, key) as is_mine:
        if not is_mine:
            return Outcome(key, "busy")
        log_file = stores.place(store, "logs", key)
        last_lines = _end_of(log_file)
        with suppress(OSError), open(log_file, "a", encoding="utf-8") as f:
            f.write(f"{reason}\n")
        row: ResultRow = {
            **stores.describe(job.spec),
            "status": "failed",
            "error": f"{reason}\n{last_lines}",
        }
        return Outcome(key, "ran", stores.append_row(store, row))


def _end_of(path: Path, lines: int = 40) -> str:
    """Return the last lines of a log, without the list of modules that a crash dump ends with."""
    if not path.exists():
        return ""
    log_lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    informative = [
        line for line in log_lines if not line.startswith("Extension modules:")
    ]
    return "\n".join(informative[-lines:])


def _cause_of(exitcode: int | None) -> str:
    """Return how a run process ended: by a signal, or with a status."""
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return f"the process of the run was ended by {name}{hint}"
    return f"the process of the run ended with status {exitcode} and no result"


_starting = threading.Lock()


def _context() -> Any:
    """Return the multiprocessing context of runs: a fork server with torch imported, or spawn."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    with _starting:
        # A task whose extra is not installed is skipped there; only its own runs need it.
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
    """Set environment variables that have no value for a ``with`` block."""
    missing = {
        name: value for name, value in variables.items() if not os.environ.get(name)
    }
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


_passed_names: set[str] = set()  # of variables that run processes ever got


def _environment() -> dict[str, str | None]:
    """Return the environment of this process for a run process; None stands for a variable that was unset.

    The fork server still has such a variable. It also has variables that imports set there; those are left alone.
    """
    with _starting:
        _passed_names.update(os.environ)
        return {name: os.environ.get(name) for name in _passed_names}


def _set_environment(environment: Mapping[str, str | None]) -> None:
    """Set and unset environment variables of this process."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _child(
    job: Job,
    sender: Any,
    work: Callable[..., list[Outcome]],
    environment: Mapping[str, str | None],
    index: StoreIndex | None,
) -> None:
    """Run a job in the new process, and send its progress and its outcomes."""

    def send(kind: str, content: Any) -> None:
        with suppress(OSError):  # the sweep is gone; the row is in the store
            sender.send((kind, content))

    def request_stop(number: int, frame: Any) -> None:
        stop.set()

    send("begun", None)
    _set_environment(environment)
    remember(job.store, index)
    stop = threading.Event()
    for number in (
        signal.SIGINT,
        *PASSED_ON,
    ):  # they are for the sweep, which then asks with SIGTERM
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, request_stop)
    threading.Thread(target=_watch_parent, args=(stop,), daemon=True).start()
    _log_to(stores.place(job.store, "logs", job.spec.key))
    for spec in job.beside:
        with suppress(OSError):
            note = f"trains beside {job.spec.key}, whose log is of both\n"
            stores.place(job.store, "logs", spec.key).write_text(note, encoding="utf-8")
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
    """Request a stop when the sweep that started this process has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        stop.set()


def _log_to(path: Path) -> None:
    """Redirect stdout, stderr, the log and Python's crash dump of this process to a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return  # a missing log must not lose a run; the store was checked before
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
