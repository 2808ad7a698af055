"""Schedules by group of layers, as one schedule that specs and result rows can store.  Beyond the paper."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cpt_core.schedules.make import SCHEDULE_KINDS, schedule_from_dict
from cpt_core.schedules.profiles import Array
from cpt_core.schedules.schedule import Schedule, set_range
from cpt_core.validation import check_int, check_types, short_repr


@dataclass(frozen=True)
class LayeredSchedule(Schedule):
    """Groups of layers, each with its own schedule: ``((patterns of layer names, schedule, MACs), ...)``.

    A group's MACs, multiply-accumulates of one forward pass, are its weight in ``relative_cost``, ``noise_exposure``
    and ``share_at``; ``count_bitops(...).macs`` has the MACs of every layer. ``bits`` are the highest of any layer, at
    which the convention "paper" prices the work outside the quantised layers; ``at(step)`` has the bits of every
    pattern; ``q_min`` and ``q_max`` are the lowest and highest bits of any layer. Without ``q_grad`` the gradients of
    a group have its own ``q_max``, as a ``PrecisionScheduler`` sets them.

    >>> from cpt_core.schedules.schedule import StaticSchedule
    >>> s = LayeredSchedule(((("conv*",), StaticSchedule(4, 10), 30), (("fc",), StaticSchedule(8, 10), 10)))
    >>> s(0), s.at(0), round(s.relative_cost(q_grad=8), 3)
    (8, {'conv*': 4, 'fc': 8}, 0.562)

    Raises:
        ValueError: for no group, a group without patterns, a pattern in two groups, schedules of several lengths, a
            schedule that is layered itself, or MACs below 1.
    """

    parts: tuple[tuple[tuple[str, ...], Schedule, int], ...]
    kind: ClassVar[str] = "layered"

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        try:
            groups = [(tuple(patterns), s, macs) for patterns, s, macs in self.parts]
        except (TypeError, ValueError):
            raise ValueError(
                f"parts must be groups (patterns, schedule, MACs), got {short_repr(self.parts)}"
            ) from None
        parts = tuple(
            (patterns, s, check_int("the MACs of a group", macs, 1))
            for patterns, s, macs in groups
        )
        object.__setattr__(self, "parts", parts)
        names = [name for patterns, _, _ in parts for name in patterns]
        has_patterns = [bool(patterns) for patterns, _, _ in parts]
        if not parts or not all(has_patterns):
            raise ValueError(
                f"parts: a layered schedule needs groups of layers, each with a pattern; got {self.parts!r}"
            )
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"pattern {duplicates[0]!r} is in two groups")
        schedules = [s for _, s, _ in parts]
        for schedule in schedules:
            is_schedule = isinstance(schedule, Schedule)
            if not is_schedule or isinstance(schedule, LayeredSchedule):
                raise ValueError(
                    f"a group has a schedule that is not layered itself, got {schedule!r}"
                )
        lengths = {s.total_steps for s in schedules}
        if len(lengths) > 1:
            raise ValueError(
                f"schedules must have one length, got {sorted(lengths)} steps"
            )
        q_min = min(s.q_min for s in schedules)
        q_max = max(s.q_max for s in schedules)
        set_range(self, q_min, q_max, *lengths)

    @property
    def by_pattern(self) -> dict[str, Schedule]:
        """Pattern -> schedule, as ``PrecisionScheduler`` takes it."""
        return {
            name: schedule for patterns, schedule, _ in self.parts for name in patterns
        }

    def at(self, step: int) -> dict[str, int]:
        """Return pattern -> bits at a 0-based optimizer step."""
        return {name: schedule(step) for name, schedule in self.by_pattern.items()}

    def by_group(self) -> NDArray[np.int64]:
        """Return the bits of every group and step, shape (groups, total_steps)."""
        return np.stack([s.bits() for _, s, _ in self.parts])

    def _mean(self, number: Callable[[Schedule], float]) -> float:
        """Return the mean over groups, weighted by MACs, of a number of each schedule."""
        numbers = [number(s) for _, s, _ in self.parts]
        macs = [macs for _, _, macs in self.parts]
        return float(np.average(numbers, weights=macs))

    def values(self) -> Array:
        """Return the highest bits of any group at every step as floats."""
        return self.by_group().max(0).astype(np.float64)

    def _relative_cost(self, q_max: int, q_grad: int | None, *priced: Any) -> float:
        def group_cost(s: Schedule) -> float:
            group_q_grad = s.q_max if q_grad is None else q_grad
            return s.relative_cost(group_q_grad, q_max, *priced)

        return self._mean(group_cost)

    def noise_exposure(self, q_max: int | None = None) -> float:
        """Return the mean of 4**-q over steps and MACs, relative to static ``q_max``."""
        top = self.q_max if q_max is None else q_max
        return self._mean(lambda s: s.noise_exposure(top))

    def share_at(self, bits: int) -> float:
        """Return the share of the work, steps times MACs, that runs at exactly ``bits`` bits."""
        return self._mean(lambda s: s.share_at(bits))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; ``schedule_from_dict`` gives an equal schedule."""
        parts = [
            {"layers": list(names), "macs": macs, "schedule": s.to_dict()}
            for names, s, macs in self.parts
        ]
        return {"kind": self.kind, "parts": parts}


def _from_dict(parts: Iterable[Mapping[str, Any]]) -> LayeredSchedule:
    groups = (
        (tuple(p["layers"]), schedule_from_dict(p["schedule"]), p["macs"])
        for p in parts
    )
    return LayeredSchedule(tuple(groups))


SCHEDULE_KINDS["layered"] = _from_dict
