"""Schedules of one's own: bits from a table or from a function.  Beyond the paper.

They load when ``schedule_from_dict`` reads a table.

>>> FunctionSchedule(lambda u: 3 + 5 * u**2, total_steps=5).bits().tolist()
[3, 3, 4, 6, 8]
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cpt_core.schedules.make import KINDS
from cpt_core.schedules.profiles import Array
from cpt_core.schedules.schedule import MOST_STEPS, Schedule, check_pairs, set_range
from cpt_core.validation import MOST_BITS, declared, shown, whole
from cpt_extras.validation import number


@dataclass(frozen=True)
class TableSchedule(Schedule):
    """Bits as runs of equal steps, ``((bits, steps), ...)``: any schedule at all, and one that JSON can hold."""

    runs: tuple[tuple[int, int], ...]
    kind: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        pairs = check_pairs("runs", self.runs, "(bits, steps)")
        if not pairs:
            raise ValueError(f"runs must be one pair (bits, steps) at least, got {shown(self.runs)}")
        bits = [whole("bits of runs", b, 1, MOST_BITS) for b, _ in pairs]
        steps = [whole("steps of runs", s, 1) for _, s in pairs]
        object.__setattr__(self, "runs", tuple(zip(bits, steps, strict=True)))
        set_range(self, min(bits), max(bits), sum(steps))

    def values(self) -> Array:
        """Return the bits of every step as floats."""
        bits, steps = zip(*self.runs, strict=True)
        return np.repeat(np.array(bits, dtype=np.float64), steps)


@dataclass(frozen=True, init=False)
class FunctionSchedule(TableSchedule):
    """Your own curve: ``function(u)`` gives bits before rounding, u = 0 at the first and 1 at the last step.

    The function is read once, when the schedule is made; what stays is the table of its bits.
    """

    def __init__(self, function: Callable[[float], float], total_steps: int) -> None:
        declared(FunctionSchedule.__init__, locals())
        total_steps = whole("total_steps", total_steps, 1, MOST_STEPS)
        last = max(total_steps - 1, 1)
        bits = []
        for step in range(total_steps):
            value = number("function must return bits", function(step / last))
            if not (math.isfinite(value) and 1 <= round(value) <= MOST_BITS):
                raise ValueError(f"function gives {value} bits at step {step}; bits lie in 1..{MOST_BITS}")
            bits.append(round(value))
        super().__init__(tuple((q, len(list(run))) for q, run in itertools.groupby(bits)))


KINDS["table"] = TableSchedule
