"""The schedule of a critical-period experiment: low precision inside windows.  Paper: section 5."""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cpt_core.schedules.profiles import Array
from cpt_core.schedules.schedule import Schedule, check_pairs, set_integers, set_range
from cpt_core.validation import check_int


@dataclass(frozen=True)
class DeficitSchedule(Schedule):
    """Schedule of a critical-period experiment: ``q_low`` bits inside windows of steps, ``q_high`` elsewhere.

    >>> DeficitSchedule(3, 8, windows=[(2, 4)], total_steps=6).bits().tolist()
    [8, 8, 3, 3, 8, 8]

    Args:
        q_low: bits inside the windows; also ``q_min``.
        q_high: bits elsewhere, and of the gradients; also ``q_max``.
        windows: pairs (start, stop) of 0-based steps, half-open: ``start <= t < stop``. They are sorted by
            time; without windows there is no deficit.

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
        pairs = check_pairs("windows", self.windows, "(start, stop)")
        windows = sorted(
            (check_int("start of windows", start), check_int("stop of windows", stop))
            for start, stop in pairs
        )
        for start, stop in windows:
            if not 0 <= start < stop <= self.total_steps:
                raise ValueError(
                    f"window {start, stop} must satisfy 0 <= start < stop <= total_steps = {self.total_steps}"
                )
        for first, second in itertools.pairwise(windows):
            if second[0] < first[1]:
                raise ValueError(f"windows {first} and {second} overlap")
        object.__setattr__(self, "windows", tuple(windows))

    def values(self) -> Array:
        """Return the bits of every step as floats."""
        values = np.full(self.total_steps, float(self.q_high))
        for start, stop in self.windows:
            values[start:stop] = self.q_low
        return values
