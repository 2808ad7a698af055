"""Progress of a reproduction: one updated line on a terminal, plain lines elsewhere."""

import html
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tqdm import tqdm

# Seconds between two plain lines where nobody watches a terminal.
PLAIN_LINE_SECONDS = 60.0


@dataclass
class Place:
    """Position of a running notebook: its cell, and the progress bars of that cell.

    The thread that runs the notebook writes, another one reads; both do so in single steps.
    """

    notebook: str
    start_time: float | None = None  # None before and after the run
    cell: int = 0  # the number that the page shows beside it
    cells: int = 0  # number of code cells
    bars: dict[str, str] = field(default_factory=dict)  # by widget
    kernel: int | None = None  # its process
    stopped: bool = False
    messages: list[str] = field(default_factory=list)  # what is still to be shown

    def enter(self, cell: int, cells: int) -> None:
        """Note that a cell starts, of so many code cells."""
        self.cell, self.cells, self.bars = cell, cells, {}

    def show(self, widget: str, text: object) -> None:
        """Note what a widget of the cell says; other values than text are positions of bars."""
        if isinstance(text, str):
            self.bars[widget] = " ".join(
                html.unescape(text).replace("\u2007", " ").split()
            )

    def stop(self) -> None:
        """Interrupt the notebook: the runs of its sweep write their checkpoints."""
        self.stopped = True
        self._signal(signal.SIGINT)

    def check_running(self) -> None:
        """Raise KeyboardInterrupt when the notebook was stopped."""
        if self.stopped:
            raise KeyboardInterrupt("stopped")

    def kill(self) -> None:
        """Kill the kernel; the processes of its runs notice, write their checkpoints and end."""
        self.stopped = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.kernel is not None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.kernel, number)

    def __str__(self) -> str:
        """Return "03 image classification: training, 12 of 85 runs done"."""
        return f"{self.notebook.replace('_', ' ')}: {self._activity()}"

    def _activity(self) -> str:
        """Return what the notebook is doing: its progress bar in words, else the cell that runs."""
        bar_text = " ".join(filter(None, list(self.bars.values())))
        if runs := re.match(r"runs\b.*?(\d+)/(\d+)", bar_text):
            return f"training, {runs[1]} of {runs[2]} runs done"
        if bar_text:
            return bar_text
        return f"cell {self.cell} of {self.cells}" if self.cell else "starting"


AT_ONCE = 2  # notebooks that run at a time


class Progress:
    """The state of all notebooks of a reproduction, of which so many run at once; not shown, it is silent.

    ``expected``: seconds that they took elsewhere, by name; {} where nothing was measured.
    """

    def __init__(
        self,
        places: Sequence[Place],
        expected: Mapping[str, float],
        at_once: int,
        is_shown: bool,
    ) -> None:
        self.places = {place.notebook: place for place in places}
        self.expected, self.at_once = expected, at_once
        self.took: dict[str, float] = {}  # of what ran, not of what was up to date
        self.todo = set(self.places)
        self.is_shown = is_shown
        self.plain = is_shown and not sys.stderr.isatty()
        self.messages = time.monotonic()
        self.begun: set[str] = set()
        line = "{desc} {n_fmt}/{total_fmt} |{bar:10}| {elapsed}{postfix}"
        self.bar = tqdm(
            total=len(places),
            desc="notebooks",
            disable=not is_shown or self.plain,
            bar_format=line,
        )

    def record_end(
        self, name: str, status: str, seconds: float, error: str = ""
    ) -> None:
        """Note what became of a notebook."""
        self._say_what_is_new()
        self.todo.discard(name)
        if status == "done":
            self.took[name] = seconds
        self.bar.update()
        self._say(
            f"{name} {status}, {seconds:.0f} s" + (f": {error}" if error else ""),
            always=bool(error),
        )

    def seconds_left(self) -> float | None:
        """Return the estimated seconds until the last notebook ends, None if unknown."""
        timed = [name for name in self.took if self.expected.get(name)]
        pace = (
            sum(self.took[n] for n in timed) / sum(self.expected[n] for n in timed)
            if timed
            else 1.0
        )
        now, remaining = time.monotonic(), []
        for name in self.todo:
            if name not in self.expected:
                return None
            start_time = self.places[name].start_time
            remaining.append(
                max(
                    0.0,
                    pace * self.expected[name]
                    - (now - start_time if start_time is not None else 0.0),
                )
            )
        total = max(sum(remaining) / self.at_once, max(remaining, default=0.0))
        return total or None  # what takes longer than expected has no known end

    def refresh(self) -> None:
        """Redraw the line, or write a plain line after ``PLAIN_LINE_SECONDS``."""
        self._say_what_is_new()
        self.bar.set_postfix_str(self._where())
        if time.monotonic() - self.messages >= PLAIN_LINE_SECONDS:
            self._say(self._where())

    def announce_stop(self) -> None:
        """Print that Ctrl-C was received and what happens next."""
        line = "stopping: running trainings write their checkpoints; press Ctrl-C again to stop at once"
        if self.is_shown:
            self.bar.clear()
            sys.stderr.write(f"\n{line}\n")
            sys.stderr.flush()

    def _where(self) -> str:
        parts = [
            str(p)
            for p in self.places.values()
            if p.start_time is not None and p.notebook in self.todo
        ]
        seconds = self.seconds_left()
        # first, for a terminal cuts the line at its width
        return "; ".join(
            [f"about {max(seconds / 60, 0.1):.1f} min left", *parts]
            if seconds
            else parts
        )

    def _say_what_is_new(self) -> None:
        for name, place in self.places.items():
            if place.start_time is not None and name not in self.begun:
                self.begun.add(name)
                self._say(f"{name} starts")
            while place.messages:
                self._say(f"{name}: {place.messages.pop(0)}", always=True)

    def _say(self, text: str, always: bool = False) -> None:
        """Write a line; on a terminal only if ``always``."""
        self.messages = time.monotonic()
        done = len(self.places) - len(self.todo)
        line = f"notebooks {done}/{len(self.places)}: {text}"
        if self.plain and text:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        elif always and not self.bar.disable:
            self.bar.write(line, sys.stderr)
