"""What the callbacks share: the bits of training and of evaluation, and what is logged of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from cpt_core.checks import check_bits
from cpt_core.formats.ladder import AFFINE
from cpt_core.inspecting.recording import Recording
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.scheduler import PrecisionScheduler, Schedules, resolve
from cpt_core.schedules import cost
from cpt_core.schedules.schedule import Levels

EvalBits = int | str
EVAL_BITS = ("q_max", "current", "float")
LOGGED = ("level", "snr_db", "underflow", "gradient_to_noise")  # of what a recording knows


def check_eval_bits(value: Any) -> EvalBits:
    """Return ``value`` when a model can be evaluated at it, else raise ValueError."""
    if isinstance(value, str) and value in EVAL_BITS:
        return value
    return check_bits(f"eval_bits, if not {' or '.join(map(repr, EVAL_BITS))},", value)


class TrainerPrecision(PrecisionScheduler):
    """A ``PrecisionScheduler`` that knows when its model is being evaluated, and at which bits.

    Args:
        model: a model converted by ``quantize_``.
        schedule: one schedule, or a mapping from patterns of layer names to schedules.
        q_grad: gradient bits; None takes each schedule's ``q_max``.
        total_steps: optimizer steps that the Trainer will take; None when it is not about to train.

    Raises:
        ValueError: when the model is not converted, or the schedule has another number of steps.
    """

    _eval_bits: EvalBits | None = None  # None while the model trains
    recording: Recording | None = None

    def __init__(
        self, model: nn.Module, schedule: Schedules, q_grad: int | None, total_steps: float | None = None
    ) -> None:
        """Assign layers to schedules and apply step 0."""
        if not any(isinstance(m, LayerPrecision) for m in model.modules()):
            raise ValueError("the model has no quantised layers; call quantize_(model) before the Trainer is made")
        super().__init__(model, schedule, q_grad)
        if total_steps not in (None, self.total_steps):
            raise ValueError(
                f"the schedule has total_steps = {self.total_steps}, but the Trainer will take {total_steps} "
                "optimizer steps; the two must be equal"
            )
        self.model = model
        self._relative_cost = {p: self._so_far(p) for p in self.schedules}

    def start_recording(self, every: int | None, step: int) -> None:
        """Record one step of so many from a step on, None for none; ``stop_recording`` ends it."""
        self.stop_recording()
        self._told = -1
        if every is not None:
            self.recording = Recording(self.model, every, step).__enter__()

    def stop_recording(self) -> None:
        """Take recording off the model; what it found stays."""
        if self.recording is not None and self.recording.open:
            self.recording.__exit__()

    def recorded(self) -> dict[str, float]:
        """Return the scalars of the last recorded step, once: of every role the median over layers."""
        steps = self.recording.steps if self.recording is not None else []
        if self.recording is None or not steps or steps[-1] == self._told:
            return {}
        self._told = steps[-1]
        of_roles: dict[str, list[float]] = {}
        for name, value in self.recording.scalars().items():
            _, role, statistic = name.rsplit("/", 2)
            if statistic in LOGGED:
                of_roles.setdefault(f"{role}/{statistic}", []).append(value)
        return {name: float(np.median(values)) for name, values in of_roles.items()}

    def evaluate_at(self, eval_bits: EvalBits | None) -> None:
        """Set the bits of an evaluation; None goes back to those of training."""
        self._eval_bits = None if eval_bits is None else check_eval_bits(eval_bits)
        self._apply()

    def _apply(self) -> None:
        super()._apply()
        if self._eval_bits is not None:
            for layers, levels in zip(self._groups.values(), self._levels_of_evaluation(), strict=True):
                for layer in layers:
                    gradients = levels if levels.activation is None else layer.in_force
                    layer.set_levels(Levels(*levels[:2], *gradients[2:]), self)  # type: ignore[index]

    def _levels_of_evaluation(self) -> list[Levels]:
        """Return the levels of every schedule, of which those of gradients do not count; None for float32."""
        if self._eval_bits is None or self._eval_bits == "current":
            step = min(self.last_step, self.total_steps - 1)
            return [schedule.levels_at(step, self.q_grad) for schedule, _ in self.schedules.values()]
        return [resolve("eval_bits", self._eval_bits, layers[0], pattern) for pattern, layers in self._groups.items()]

    def _so_far(self, pattern: str) -> NDArray[np.float64]:
        """Return ``relative_cost`` of the first 1, 2, ... steps, shape (total_steps,), on the layers' ladders."""
        schedule, ladders = self.schedules[pattern][0], self._groups[pattern][0].ladders
        on = None if set(ladders) == {AFFINE} else tuple(ladders)
        spent, top = cost.role_prices(schedule.levels(self.q_grad), schedule.q_max, ladder=on)
        return np.cumsum(spent) / np.arange(1, schedule.total_steps + 1) / top

    def logs(self, steps: int) -> dict[str, float]:
        """Return what to log after so many optimizer steps; nothing after none.

        ``bits`` are those of the last step, ``relative_cost`` is the cost of all steps so far divided by that of the
        same steps at static ``q_max``, gradients too. Several schedules give one pair each: ``bits/PATTERN``.
        """
        entries: dict[str, float] = {}
        for pattern, (schedule, _) in self.schedules.items() if steps else ():
            last = min(steps, self.total_steps) - 1
            entries[self._name("bits", pattern)] = schedule(last)
            entries[self._name("relative_cost", pattern)] = float(self._relative_cost[pattern][last])
        return entries

    def eval_logs(self) -> dict[str, float]:
        """Return the ``eval_bits`` in force, 32 for float32; nothing while the model trains."""
        if self._eval_bits is None:
            return {}
        levels = zip(self.schedules, self._levels_of_evaluation(), strict=True)
        return {self._name("eval_bits", pattern): x.activation or cost.FULL_PRECISION for pattern, x in levels}

    def _name(self, what: str, pattern: str) -> str:
        return what if len(self.schedules) == 1 else f"{what}/{pattern}"
