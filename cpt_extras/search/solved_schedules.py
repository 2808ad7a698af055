"""Schedules that ``solve_schedule`` returns: a warped profile, single steps changed, a delay.  Beyond the paper.

This module loads when ``schedule_from_dict`` reads such a schedule.

>>> schedule = CyclicSchedule(Warped("linear", 0.5), q_min=3, q_max=8, total_steps=6, n_cycles=1)
>>> schedule.bits().tolist(), DelayedSchedule(schedule, hold=2).bits().tolist()
([3, 5, 6, 7, 7, 8], [8, 8, 3, 5, 6, 7, 7, 8])
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cpt_core.schedules.make import SCHEDULE_KINDS, schedule_from_dict
from cpt_core.schedules.profiles import PROFILES, Array, Profile
from cpt_core.schedules.schedule import (
    FLOAT32_LEVEL,
    MAX_TOTAL_STEPS,
    CyclicSchedule,
    RoleLevels,
    Schedule,
    check_pairs,
    set_integers,
    set_range,
)
from cpt_core.validation import check_choice, check_int, check_types
from cpt_extras.formats.prices import role_prices


@dataclass(frozen=True)
class Warped(Profile):
    """Profile f(x) = g(x**power) of a profile g, whose rise moves earlier (power < 1) or later (power > 1).

    One number takes every profile from static ``q_max`` (power to 0) to static ``q_min`` (power to infinity);
    ``solve_schedule`` chooses it.

    Args:
        base: name of g, with its standard constants.
        power: positive; 1 is g itself.
    """

    base: str = "linear"
    power: float = 1.0

    def __post_init__(self) -> None:
        bases = [name for name, kind in PROFILES.items() if kind is not Warped]
        check_choice("profile", self.base, bases)
        check_types(type(self), vars(self))
        if not 0 < self.power < math.inf:
            raise ValueError(f"power must be positive, got {self.power}")
        object.__setattr__(self, "power", float(self.power))

    def growth(self, x: Array) -> Array:
        """Return g(x**power)."""
        return PROFILES[self.base]().growth(x**self.power)

    def vertical(self, x: Array) -> Array:
        """Return 1 - g(x**(1/power)), so that a larger power makes falling cycles cheaper, as it does rising ones."""
        return PROFILES[self.base]().vertical(x ** (1 / self.power))


@dataclass(frozen=True)
class AdjustedSchedule(Schedule):
    """A cyclic schedule with the bits of a few steps changed, ``((step, bits), ...)``.

    A short schedule meets a budget this way, where rounding makes the cost of the cycles too coarse.
    """

    schedule: CyclicSchedule
    changes: tuple[tuple[int, int], ...]
    kind: ClassVar[str] = "adjusted"

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        set_range(
            self, self.schedule.q_min, self.schedule.q_max, self.schedule.total_steps
        )
        checked = []
        for step, bits in check_pairs("changes", self.changes, "(step, bits)"):
            step = self.schedule._check_step(step)
            checked.append((step, check_int("bits", bits, self.q_min, self.q_max)))
        changes = tuple(sorted(checked))
        object.__setattr__(self, "changes", changes)
        if len({step for step, _ in changes}) < len(changes):
            raise ValueError(f"a step is changed once, got {changes}")

    def values(self) -> Array:
        """Return the schedule's values, whole numbers where it was changed."""
        values = self.schedule.values()
        for step, bits in self.changes:
            values[step] = bits
        return values


@dataclass(frozen=True)
class DelayedSchedule(Schedule):
    """A schedule after ``hold`` steps at ``q_max``, or without quantisation: low precision, but not at the start.

    Args:
        schedule: the schedule of the steps after the delay.
        hold: number of steps of the delay.
        level: of the steps of the delay, gradients included: None for ``q_max``, or ``FLOAT32``.

    Paper: section 5 (the closing remark, that a delay of low precision avoids the damage; not tested there).
    """

    schedule: CyclicSchedule | AdjustedSchedule
    hold: int
    level: int | None = None
    kind: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        set_integers(self, "hold")
        check_int("hold", self.hold, 0, MAX_TOTAL_STEPS)
        set_range(
            self,
            self.schedule.q_min,
            self.schedule.q_max,
            self.hold + self.schedule.total_steps,
        )
        if self.level not in (None, FLOAT32_LEVEL):
            raise ValueError(
                f"a delay holds q_max (level None) or float32 (level {FLOAT32_LEVEL}), got {self.level!r}"
            )

    def values(self) -> Array:
        """Return the precision of every step before rounding, shape (total_steps,)."""
        delay = np.full(self.hold, float(self.level or self.q_max))
        return np.concatenate([delay, self.schedule.values()])

    def levels(self, q_grad: int | None = None) -> RoleLevels:
        """Return the levels of every step and role; in a delay in float32 gradients are not quantised either."""
        levels = super().levels(q_grad)
        if self.level is None:
            return levels
        in_delay = np.arange(self.total_steps) < self.hold
        gradients = np.where(in_delay, self.level, levels.error)
        return levels._replace(error=gradients, weight_gradient=gradients)

    def _relative_cost(self, q_max: int, q_grad: int | None, *priced: Any) -> float:
        if self.level is None:
            return super()._relative_cost(q_max, q_grad, *priced)
        levels = self.levels(q_max if q_grad is None else q_grad)
        prices, baseline_price = role_prices(levels, q_max, *priced)
        return float(prices.mean() / baseline_price)


def delay_steps(delay: float, total_steps: int) -> int:
    """Return the number of steps of a delay, a share of the training; ValueError unless 0 <= delay < 1."""
    is_number = isinstance(delay, (int, float)) and not isinstance(delay, bool)
    if not is_number or not 0 <= delay < 1:
        raise ValueError(
            f"delay is a share of the training, 0 <= delay < 1; got {delay!r}"
        )
    steps = round(delay * check_int("total_steps", total_steps))
    if steps and steps == total_steps:
        raise ValueError(
            f"a delay of {delay} leaves none of {total_steps} steps to cycle in"
        )
    return steps


def _adjusted_from_dict(schedule: dict[str, Any], **fields: Any) -> Schedule:
    inner: Any = schedule_from_dict(schedule)
    return AdjustedSchedule(inner, **fields)


def _delayed_from_dict(schedule: dict[str, Any], **fields: Any) -> Schedule:
    inner: Any = schedule_from_dict(schedule)
    return DelayedSchedule(inner, **fields)


PROFILES["warped"] = Warped
SCHEDULE_KINDS["adjusted"] = _adjusted_from_dict
SCHEDULE_KINDS["delayed"] = _delayed_from_dict
