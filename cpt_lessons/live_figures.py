"""Runs that a class can watch: a figure of their bits and training losses, drawn anew while they train."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pandas as pd
from IPython.display import DisplayHandle

from cpt_lab.analysis.style import (
    COLORS,
    SMALL_FONT_SIZE,
    TEXT,
    integer_ticks,
    subplots,
)
from cpt_lab.experiments.spec import RunSpec, savings_of
from cpt_lab.sweeps.stores import load_rows
from cpt_lab.sweeps.sweep import SweepOptions, run_grid

REDRAW_SECONDS = 1.0  # between two pictures


def watch(specs: Sequence[RunSpec], store: Path) -> None:
    """Train the runs of a seed that a store does not hold side by side in this process, and draw them meanwhile.

    A bar counts the runs; at smoke scale it is left out of log files.
    """
    accepts = SweepOptions().accepts
    stored_keys = {row["key"] for row in load_rows(store) if accepts(row)}
    watched = Watched(specs, stored_keys)
    run_grid(
        specs,
        store,
        workers=0,
        together=len(specs),
        device="cpu",
        progress=None if specs[0].scale == "smoke" else True,
        on_step=watched,
    )
    if watched.losses:
        watched.draw()
    else:
        print(
            "these runs were there already: nothing trained, so there is nothing to watch"
        )


class Watched:
    """A figure of runs of one length, a line an arm; ``run_grid`` calls it after every step, as its ``on_step``.

    A loss is the mean over the last twentieth of the steps, at the bits of the step. Runs that are stored already have
    no losses; the title names their arms.
    """

    def __init__(
        self, specs: Sequence[RunSpec], stored_keys: Collection[str] = ()
    ) -> None:
        self.specs, self.steps = (
            {spec.key: spec for spec in specs},
            specs[0].recipe.steps,
        )
        self.warning = (
            "Smoke scale, not a result. " if specs[0].scale == "smoke" else ""
        )
        self.stored_arms = [spec.arm for spec in specs if spec.key in stored_keys]
        self.losses: dict[
            str, dict[int, float]
        ] = {}  # of the steps so far, after a stop those since then
        self.display_handle: DisplayHandle | None = None
        self.drawn_at = float("-inf")

    def __call__(self, spec: RunSpec, step: int, loss: float) -> None:
        """Take the loss of a step, and draw where the last picture is a second old."""
        self.losses.setdefault(spec.key, {})[step] = loss
        if time.monotonic() - self.drawn_at > REDRAW_SECONDS:
            self.draw()

    def draw(self) -> None:
        """Show where the runs are, those that have begun."""
        ends = []
        alt = "Bits, and below them training loss, against steps: a line for every arm that trains."
        with subplots(2, 1, alt, figsize=(8, 5), sharex=True, height_ratios=(1, 2)) as (
            figure,
            ((bits,), (loss,)),
        ):
            for key, losses in self.losses.items():
                spec = self.specs[key]
                mean = (
                    pd.Series(losses)
                    .rolling(max(1, self.steps // 20), min_periods=1)
                    .mean()
                )
                group = savings_of(spec.arm)
                bits.plot(
                    [*losses],
                    [spec.schedule(step) for step in losses],
                    color=COLORS[group],
                    linewidth=1,
                )
                loss.plot(mean, color=COLORS[group], linewidth=1)
                ends.append((mean.iloc[-1], spec.arm, TEXT[group]))
            bits.set(ylabel="bits", xlim=(0, self.steps))
            integer_ticks(bits.yaxis)
            loss.set(ylabel="training loss", xlabel="step")
            ends.sort()
            low, high = loss.get_ylim()
            label_height = low
            for value, arm, color in ends:  # beside the axes, in order of their losses
                label_height = max(value, label_height + 0.045 * (high - low))
                loss.text(
                    1.01,
                    label_height,
                    arm,
                    color=color,
                    fontsize=SMALL_FONT_SIZE,
                    va="center",
                    transform=loss.get_yaxis_transform(),
                )
            figure.suptitle(self._title(ends), fontsize=10)
        if self.display_handle is None:
            self.display_handle = DisplayHandle()
            figure.show_by(self.display_handle.display)
        else:
            figure.show_by(self.display_handle.update)
        self.drawn_at = time.monotonic()

    def _title(self, ends: Sequence[tuple[float, str, str]]) -> str:
        """Return the finding so far.

        Args:
            ends: training loss, arm and color of every drawn run, the lowest loss first.
        """
        step = max(map(max, self.losses.values()))
        seed = next(iter(self.specs.values())).seed
        (lowest_loss, lowest, _), (_, highest, _) = ends[0], ends[-1]
        finding = f"the training loss of {lowest} is lowest, of {highest} highest"
        if len(ends) == 1:
            finding = f"the training loss of {lowest} is {lowest_loss:.2f}"
        title = f"{self.warning}Step {step + 1} of {self.steps}, seed {seed} only: {finding}"
        if self.stored_arms:
            title += f"\nnot drawn, as stored already: {', '.join(self.stored_arms)}"
        return title
