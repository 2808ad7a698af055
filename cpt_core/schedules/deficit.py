"""Schedules made for questions: a deficit, another schedule later, another schedule adjusted.  Paper: section 5."""

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cpt_core.checks import declared, shown, whole
from cpt_core.schedules.cost import role_prices
from cpt_core.schedules.profiles import Array
from cpt_core.schedules.schedule import FLOAT32, MOST_STEPS, CyclicSchedule, Levels, Schedule, set_integers, set_range


@dataclass(frozen=True)
class DeficitSchedule(Schedule):
    """``q_high`` bits, but ``q_low`` inside the windows: the schedule of a critical-period experiment.

    >>> DeficitSchedule(3, 8, windows=[(2, 4)], total_steps=6).bits().tolist()
    [8, 8, 3, 3, 8, 8]

    Args:
        q_low: bits inside the windows; also ``q_min``.
        q_high: bits elsewhere, and of the gradients; also ``q_max``.
        windows: pairs (start, stop) of 0-based steps, half-open: ``start <= t < stop``; none is no deficit. They are
            kept in order of time.

    Raises:
        ValueError: for windows that overlap, are empty, end before they start or lie outside the training.

    Paper: section 5.
    Differs: a deficit of R steps has R low steps; the authors' CIFAR script has R + 1, and one for R = 0.
    """

    q_low: int
    q_high: int
    windows: tuple[tuple[int, int], ...]
    total_steps: int
    kind: ClassVar[str] = "deficit"

    def __post_init__(self) -> None:
        set_integers(self, "q_low", "q_high", "total_steps")
        set_range(self, self.q_low, self.q_high, self.total_steps)
        windows = sorted(map(window_of, self.windows))
        for start, stop in windows:
            if not 0 <= start < stop <= self.total_steps:
                raise ValueError(
                    f"window {start, stop} must satisfy 0 <= start < stop <= total_steps = {self.total_steps}"
                )
        for a, b in itertools.pairwise(windows):
            if b[0] < a[1]:
                raise ValueError(f"windows {a} and {b} overlap")
        object.__setattr__(self, "windows", tuple(windows))

    def values(self) -> Array:
        """Return the bits of every step as floats."""
        values = np.full(self.total_steps, float(self.q_high))
        for start, stop in self.windows:
            values[start:stop] = self.q_low
        return values


@dataclass(frozen=True)
class AdjustedSchedule(Schedule):
    """A cyclic schedule with the bits of a few steps changed, ``((step, bits), ...)``: how short ones meet a budget."""

    schedule: CyclicSchedule
    changes: tuple[tuple[int, int], ...]
    kind: ClassVar[str] = "adjusted"

    def __post_init__(self) -> None:
        declared(type(self), vars(self))
        set_range(self, self.schedule.q_min, self.schedule.q_max, self.schedule.total_steps)
        ends = self.q_min, self.q_max
        changes = tuple(sorted((self.schedule._check_step(t), whole("bits", b, *ends)) for t, b in self.changes))
        object.__setattr__(self, "changes", changes)
        if len({t for t, _ in changes}) < len(changes):
            raise ValueError(f"a step is changed once, got {changes}")

    def values(self) -> Array:
        """Return the schedule's values, whole numbers where it was changed."""
        values = self.schedule.values()
        for step, bits in self.changes:
            values[step] = bits
        return values


@dataclass(frozen=True)
class DelayedSchedule(Schedule):
    """``hold`` steps at ``q_max``, or without quantisation, then another schedule: low precision, but not at the start.

    Args:
        schedule: the other one.
        hold: steps before it.
        level: of these steps, gradients included: None for ``q_max``, or ``FLOAT32``.

    Paper: section 5 (the closing remark, that a delay of low precision avoids the damage; not tested there).
    """

    schedule: CyclicSchedule | AdjustedSchedule
    hold: int
    level: int | None = None
    kind: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        set_integers(self, "hold")
        whole("hold", self.hold, 0, MOST_STEPS)
        set_range(self, self.schedule.q_min, self.schedule.q_max, self.hold + self.schedule.total_steps)
        if self.level not in (None, FLOAT32):
            raise ValueError(f"a delay holds q_max (level None) or float32 (level {FLOAT32}), got {self.level!r}")

    def values(self) -> Array:
        """Return the precision of every step before rounding, shape (total_steps,)."""
        return np.concatenate([np.full(self.hold, float(self.level or self.q_max)), self.schedule.values()])

    def levels(self, q_grad: int | None = None) -> Levels:
        """Return the levels of every step and role; gradients are not quantised as long as nothing is."""
        found = super().levels(q_grad)
        if self.level is None:
            return found
        gradients = np.where(np.arange(self.total_steps) < self.hold, self.level, found.error)
        return found._replace(error=gradients, weight_gradient=gradients)

    def _relative_cost(self, q_max: int, q_grad: int | None, *priced: Any) -> float:
        if self.level is None:
            return super()._relative_cost(q_max, q_grad, *priced)
        spent, top = role_prices(self.levels(q_max if q_grad is None else q_grad), q_max, *priced)
        return float(spent.mean() / top)


def window_of(window: Any) -> tuple[int, int]:
    """Return a pair (start, stop) of integers; ValueError for anything else."""
    try:
        start, stop = window
    except (TypeError, ValueError):
        raise ValueError(f"windows: a window is a pair (start, stop) of steps, got {shown(window)}") from None
    return whole("start of a window", start), whole("stop of a window", stop)
