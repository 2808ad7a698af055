"""What a person sees and does while a sweep runs: the line of progress, Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

from tqdm.auto import tqdm

from cpt_core.sweeps.worker import Job, Outcome


class Signals:
    """Ctrl-C once sets ``stop``, twice ``kill``; so does SIGTERM, which clusters send before they end a job."""

    def __init__(self) -> None:
        self.stop, self.kill = threading.Event(), threading.Event()
        self.asked = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.stop.is_set() and time.monotonic() - self.asked < 0.5:
            return  # one Ctrl-C often arrives twice, from the terminal and from a program around this one
        if self.stop.is_set():
            self.kill.set()
            raise KeyboardInterrupt("stopped at once; the runs go on from their last checkpoints")
        self.stop.set()
        self.asked = time.monotonic()
        sys.stderr.write("\nstopping: the runs write their checkpoints; once more stops at once\n")


def interactive() -> bool:
    """Whether a person is looking: a terminal, or a notebook."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return sys.stderr.isatty() or getattr(shell, "kernel", None) is not None


class Live:
    """The line of a sweep: done, running and failed runs, and the time left from the speeds measured so far."""

    def __init__(self, jobs: list[Job], shown: bool) -> None:
        self.steps = {job.spec.key: job.spec.recipe.steps for job in jobs}
        self.kind = {job.spec.key: (job.spec.recipe, job.spec.q_max) for job in jobs}
        self.first: dict[str, tuple[int, float]] = {}  # step and time at which a run started or went on
        self.now: dict[str, tuple[int, float]] = {}
        self.speeds: dict[Any, list[float]] = {}  # seconds per step of finished runs, by recipe
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.text = ""
        self.at_once = 0  # runs at a time, where they do not report how far they are
        self.drawn = 0.0
        line = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"
        self.bar = tqdm(total=len(jobs), desc="runs", disable=not shown, bar_format=line)

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.drawn = 0.0
        self.refresh()
        self.bar.close()

    def report(self, key: str, step: int) -> None:
        """Note how far a run is."""
        moment = (step, time.monotonic())
        self.now[key] = moment
        if step:  # the step at which it went on from a checkpoint, with the data read
            self.first.setdefault(key, moment)

    def ended(self, outcome: Outcome) -> None:
        """Note what became of a run."""
        self.first.pop(outcome.key, None)
        self.now.pop(outcome.key, None)
        if outcome.row is not None:
            self.done.add(outcome.key)
            if outcome.row["status"] == "failed":
                self.failed.add(outcome.key)
            elif outcome.status == "ran" and outcome.row.get("steps"):
                speed = outcome.row["seconds"] / outcome.row["steps"]
                self.speeds.setdefault(self.kind[outcome.key], []).append(speed)
            self.bar.update()
        self.refresh()

    def note(self, text: str) -> None:
        """Show a remark."""
        self.text = text

    def seconds_left(self) -> float | None:
        """Return the estimated time until the last run ends; None while nothing was measured."""
        speeds = {kind: sorted(v)[len(v) // 2] for kind, v in self.speeds.items()}
        now, first = dict(self.now), dict(self.first)
        for key, (step, moment) in now.items():
            start = first.get(key, (step, moment))
            if self.kind[key] not in speeds and step > start[0]:
                speeds[self.kind[key]] = (moment - start[1]) / (step - start[0])
        if not speeds:
            return None
        usual = sum(speeds.values()) / len(speeds)
        left = [
            (steps - now.get(key, (0, 0.0))[0]) * speeds.get(self.kind[key], usual)
            for key, steps in self.steps.items()
            if key not in self.done
        ]
        return max(sum(left) / max(1, len(now), self.at_once), max(left, default=0.0)) if left else 0.0

    def summary(self) -> str:
        """Return the counts in words."""
        words = [f"{len(self.done) - len(self.failed)} of {len(self.steps)} missing runs done"]
        words += [f"{len(self.now)} running"] if self.now else []
        words += [f"{len(self.failed)} failed"] if self.failed else []
        return ", ".join(words)

    def refresh(self) -> None:
        """Draw the line anew, twice a second at most."""
        if self.bar.disable or time.monotonic() - self.drawn < 0.5:
            return
        self.drawn = time.monotonic()
        left = self.seconds_left()
        running = len(self.now) or min(self.at_once, len(self.steps) - len(self.done))
        parts = [f"{running} running" if running or self.done else "starting", f"{len(self.failed)} failed"]
        parts += [f"about {_words(left)} left"] if left and running else []
        parts += [self.text] if self.text else []
        self.bar.set_postfix_str(", ".join(parts))


def _words(seconds: float) -> str:
    for size, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"
