"""Scheduler of the trainer callbacks, with the bits of training and evaluation, and the entries of their logs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import nn

from cpt_core.quantization.convert import is_converted
from cpt_core.quantization.scheduler import EvalBits, PrecisionScheduler, Schedules
from cpt_core.schedules import cost
from cpt_extras.diagnostics.recording import Recording
from cpt_extras.formats.matmul_rounding import FLOAT32_LADDERS
from cpt_extras.formats.prices import role_prices

# statistics of a recording that trainers log
LOGGED_STATISTICS = ("level", "snr_db", "underflow", "gradient_to_noise")


class TrainerPrecision(PrecisionScheduler):
    """A ``PrecisionScheduler`` with the log entries of a trainer.

    ``total_steps`` is the number of optimizer steps that the trainer will take; None when it is not about to train.
    """

    recording: Recording | None = None

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedules,
        q_grad: int | None,
        total_steps: float | None = None,
        eval_bits: EvalBits = "current",
    ) -> None:
        if not is_converted(model):
            raise ValueError(
                "the model has no quantised layers; call quantize_(model) before the Trainer is made"
            )
        super().__init__(model, schedule, q_grad, eval_bits=eval_bits)
        if total_steps not in (None, self.total_steps):
            raise ValueError(
                f"the schedule has total_steps = {self.total_steps}, but the Trainer will take {total_steps} "
                "optimizer steps; the two must be equal"
            )
        self.model = model
        self._relative_cost = {
            p: self._running_relative_cost(p) for p in self.schedules
        }

    def start_recording(self, every: int | None, step: int) -> None:
        """Start to record every ``every``-th step, the first one included; None records nothing."""
        self.stop_recording()
        self._last_logged_step = -1
        if every is not None:
            self.recording = Recording(self.model, every, step).__enter__()

    def stop_recording(self) -> None:
        """Stop recording; its results stay."""
        if self.recording is not None and self.recording.open:
            self.recording.__exit__()

    def recorded(self) -> dict[str, float]:
        """Return the scalars of the last recorded step, medians over layers by role; nothing if returned before."""
        steps = self.recording.steps if self.recording is not None else []
        if self.recording is None or not steps or steps[-1] == self._last_logged_step:
            return {}
        self._last_logged_step = steps[-1]
        by_role: dict[str, list[float]] = {}
        for name, value in self.recording.scalars().items():
            _, role, statistic = name.rsplit("/", 2)
            # a bias of zeros has no finite signal-to-noise ratio
            if statistic in LOGGED_STATISTICS and np.isfinite(value):
                by_role.setdefault(f"{role}/{statistic}", []).append(value)
        return {name: float(np.median(values)) for name, values in by_role.items()}

    def evaluate_as_it_trains(self) -> None:
        """Keep the bits of training in ``eval()`` from now on."""
        if all(
            layer.owning_scheduler is self
            for layers in self._groups.values()
            for layer in layers
        ):  # not another's
            self.eval_bits = "current"

    def _running_relative_cost(self, pattern: str) -> NDArray[np.float64]:
        """Return ``relative_cost`` of the first 1, 2, ... steps, shape (total_steps,), on the layers' ladders."""
        schedule = self.schedules[pattern][0]
        ladders = [
            getattr(layer.grids, "ladders", None) for layer in self._groups[pattern]
        ]
        # recipes have float32 ladders in all layers that are not linear
        ladder = min(ladders, key=lambda ladders: ladders == FLOAT32_LADDERS)
        levels = schedule.levels(self.q_grad)
        costs, max_cost = role_prices(levels, schedule.q_max, ladder=ladder)
        num_steps = np.arange(1, schedule.total_steps + 1)
        return np.cumsum(costs) / num_steps / max_cost

    def logs(self, steps: int) -> dict[str, float]:
        """Return what to log after so many optimizer steps; nothing after none.

        ``bits`` are those of the last step, ``relative_cost`` is the cost of all steps so far divided by that of the
        same steps at static ``q_max``, gradients too. Several schedules give one pair each: ``bits/PATTERN``.
        """
        entries: dict[str, float] = {}
        for pattern, (schedule, _) in self.schedules.items() if steps else ():
            last = min(steps, self.total_steps) - 1
            entries[self._name("bits", pattern)] = schedule(last)
            entries[self._name("relative_cost", pattern)] = float(
                self._relative_cost[pattern][last]
            )
        return entries

    def eval_logs(self) -> dict[str, float]:
        """Return the active bits of evaluation, 32 for float32; nothing while the model trains."""
        entries: dict[str, float] = {}
        for pattern, layers in () if self.model.training else self._groups.items():
            layer = min(
                layers, key=lambda layer: not layer.always_runs_matmul
            )  # others hear of the mode when they run
            levels = layer.active_levels
            bits = None if levels is None else levels.activation
            entries[self._name("eval_bits", pattern)] = bits or cost.FULL_PRECISION
        return entries

    def _name(self, entry: str, pattern: str) -> str:
        return entry if len(self.schedules) == 1 else f"{entry}/{pattern}"
