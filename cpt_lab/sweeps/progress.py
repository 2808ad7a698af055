"""What a person sees and does while a sweep runs: the bar of progress, Ctrl-C and other signals."""

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
    """Ctrl-C once sets ``stop``, twice ``kill``; so does SIGTERM, which clusters send before they end a job.

    Those of ``PASSED_ON`` set ``stop`` alone, however often they come: terminals and batch systems send several at
    once. One that is ignored, as SIGHUP under ``nohup``, stays so.
    """

    def __init__(self) -> None:
        self.stop, self.kill = threading.Event(), threading.Event()
        self.asked = 0.0
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
            number in PASSED_ON or time.monotonic() - self.asked < 0.5
        ):
            return  # one Ctrl-C often arrives twice, from the terminal and from a program around this one
        if self.stop.is_set():
            self.kill.set()
            raise KeyboardInterrupt(
                "stopped at once; the runs go on from their last checkpoints"
            )
        self.stop.set()
        self.asked = time.monotonic()
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
def _to_somebody() -> Iterator[None]:
    """Write to stderr inside a ``with`` block, unless nobody can read it any more."""
    try:
        yield
    except OSError:
        silence(sys.stderr)


def note(text: str) -> None:
    """Write a line to stderr, above a bar that is shown there."""
    with _to_somebody():
        tqdm.write(text, sys.stderr)


class Live:
    """The bar of a sweep: runs done, running and failed, a remark, and tqdm's estimate of the time left.

    With ``progress`` None it is shown to people only, in a terminal or a notebook.
    """

    def __init__(self, total: int, progress: bool | None) -> None:
        self.total, self.done, self.failed = total, 0, 0
        self.running: set[str] = set()
        self.steps = self.of_steps = (
            0  # that the run in this process has done, where runs go one by one
        )
        self.at_once = 0  # runs at a time, where they do not say that they have started
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
        with _to_somebody():
            self.bar.close()

    def started(self, key: str) -> None:
        """Note that a run has started."""
        self.running.add(key)
        self.steps = 0

    def stepped(self, steps: int) -> None:
        """Note that the run in this process, of at most ``steps`` steps, has done one more; who waits does none."""
        if self.running:
            self.steps, self.of_steps = self.steps + 1, steps
            self.refresh()

    def ended(self, outcome: Outcome) -> None:
        """Note what became of a run; one without a row is not done yet."""
        self.running.discard(outcome.key)
        self.steps = 0
        if outcome.row is not None:
            self.done += 1
            self.failed += outcome.row["status"] == "failed"
        self.refresh(ended=outcome.row is not None)

    def summary(self) -> str:
        """Return the counts in words."""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.done - self.failed} of {self.total} missing runs done{failed}"

    def refresh(self, ended: int = 0) -> None:
        """Draw the bar anew, twice a second at most, with so many runs more that have ended."""
        if self.bar.disable:
            return
        running = len(self.running) or min(self.at_once, self.total - self.done)
        step = f"step {self.steps} of {self.of_steps}" if self.steps else ""
        parts = [
            f"{running} running",
            f"{self.failed} failed",
            *filter(None, [step, self.note]),
        ]
        with _to_somebody():
            self.bar.set_postfix_str(", ".join(parts), refresh=False)
            self.bar.update(ended)
