"""Progress bar of a sweep, and its reaction to Ctrl-C and other signals."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from tqdm.auto import tqdm

from cpt_extras.progress import progress_bar
from cpt_lab.signals import PASSED_ON, handle_signals, say, silence
from cpt_lab.sweeps.worker import Outcome


class Signals:
    """Signal handlers of a sweep: Ctrl-C or SIGTERM sets ``stop``, a second one ``kill``.

    Clusters send SIGTERM before they end a job. The signals in ``PASSED_ON`` set ``stop`` alone, however often they
    come: terminals and batch systems send several at once. One that is ignored, as SIGHUP under ``nohup``, stays so.
    """

    def __init__(self) -> None:
        self.stop, self.kill = threading.Event(), threading.Event()
        self._stop_time = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = handle_signals(self._handle)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.stop.is_set() and (
            number in PASSED_ON or time.monotonic() - self._stop_time < 0.5
        ):
            return  # one Ctrl-C often arrives twice, from the terminal and from a program around this one
        if self.stop.is_set():
            self.kill.set()
            raise KeyboardInterrupt(
                "stopped at once; the runs go on from their last checkpoints"
            )
        self.stop.set()
        self._stop_time = time.monotonic()
        _announce(
            "\nstopping: the runs write their checkpoints; press Ctrl-C again to stop at once\n"
        )


def _announce(text: str) -> None:
    """Write to stderr, and from a kernel of papermill also to papermill's terminal, which shows no outputs."""
    say(text)
    terminal = getattr(
        sys.stderr, "_original_stdstream_copy", None
    )  # of ipykernel, before it redirected stderr
    # Jupyter's servers set the variable: they show the outputs of a cell themselves.
    if terminal is not None and "JPY_SESSION_NAME" not in os.environ:
        with suppress(OSError):
            os.write(terminal, text.encode())


@contextmanager
def _ignoring_closed_terminal() -> Iterator[None]:
    """Silence stderr if writing to it fails in a ``with`` block, as after the terminal was closed."""
    try:
        yield
    except OSError:
        silence(sys.stderr)


def note(text: str) -> None:
    """Write a line to stderr, above a bar that is shown there."""
    with _ignoring_closed_terminal():
        tqdm.write(text, sys.stderr)


class Live:
    """Progress bar of a sweep: runs done, running and failed, a note, and tqdm's estimate of the time left.

    With ``progress`` None it is shown in a terminal or a notebook, but not in a log file.
    """

    def __init__(self, total: int, progress: bool | None) -> None:
        self.total = total
        self.finished_runs = 0
        self.failed = 0
        self.running: set[str] = set()
        # Steps of the run in this process, where runs go one by one.
        self.steps = 0
        self.total_steps = 0
        self.concurrent_runs = 0  # for executors that do not report the start of a run
        self.note = ""
        self.bar = progress_bar(
            "runs",
            total=total,
            unit="run",
            progress=progress,
            smoothing=0,  # the speed of the whole sweep: runs that go side by side end in bunches
            mininterval=0.5,
            miniters=0,  # the time goes on, also while no run ends
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.refresh()
        with _ignoring_closed_terminal():
            self.bar.close()

    def start(self, key: str) -> None:
        """Count a run as running."""
        self.running.add(key)
        self.steps = 0

    def count_step(self, total_steps: int) -> None:
        """Count one more step of the run in this process; a run that waits for another sweep does none."""
        if self.running:
            self.steps += 1
            self.total_steps = total_steps
            self.refresh()

    def finish(self, outcome: Outcome) -> None:
        """Count a run as finished or failed; a run without a row goes on later."""
        self.running.discard(outcome.key)
        self.steps = 0
        if outcome.row is None:
            self.refresh()
            return
        self.finished_runs += 1
        if outcome.row["status"] == "failed":
            self.failed += 1
        self.refresh(finished=1)

    def summary(self) -> str:
        """Return the counts in words."""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.finished_runs - self.failed} of {self.total} missing runs done{failed}"

    def refresh(self, finished: int = 0) -> None:
        """Draw the bar again, at most twice a second, after ``finished`` more runs."""
        if self.bar.disable:
            return
        running = len(self.running) or min(
            self.concurrent_runs, self.total - self.finished_runs
        )
        step = f"step {self.steps} of {self.total_steps}" if self.steps else ""
        parts = [
            f"{running} running",
            f"{self.failed} failed",
            *filter(None, [step, self.note]),
        ]
        with _ignoring_closed_terminal():
            self.bar.set_postfix_str(", ".join(parts), refresh=False)
            self.bar.update(finished)
