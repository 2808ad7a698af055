"""Custom schedules: bits from a table or from a function.  Beyond the paper.

This module loads when ``schedule_from_dict`` reads a table.

>>> FunctionSchedule(lambda u: 3 + 5 * u**2, total_steps=5).bits().tolist()
[3, 3, 4, 6, 8]
>>> FunctionSchedule(lambda step: 8 - step // 2, total_steps=5, argument="step").bits().tolist()
[8, 8, 7, 7, 6]
"""

import inspect
import itertools
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cpt_core.schedules.make import SCHEDULE_KINDS
from cpt_core.schedules.profiles import Array
from cpt_core.schedules.schedule import (
    MAX_TOTAL_STEPS,
    Schedule,
    check_pairs,
    set_range,
)
from cpt_core.validation import (
    MAX_BITS,
    check_choice,
    check_int,
    check_types,
    short_repr,
)
from cpt_extras.validation import check_float

ARGUMENTS = ("progress", "step")  # of the function of a FunctionSchedule
STEP_WORDS = frozenset(
    "batch batches epoch epochs iter iteration iterations iters step steps update updates".split()
)


@dataclass(frozen=True)
class TableSchedule(Schedule):
    """Bits as runs of equal steps, ``((bits, steps), ...)``: can express any schedule, and JSON can store it."""

    runs: tuple[tuple[int, int], ...]
    kind: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        pairs = check_pairs("runs", self.runs, "(bits, steps)")
        if not pairs:
            raise ValueError(
                f"runs must be one pair (bits, steps) at least, got {short_repr(self.runs)}"
            )
        bits = [check_int("bits of runs", b, 1, MAX_BITS) for b, _ in pairs]
        steps = [check_int("steps of runs", s, 1) for _, s in pairs]
        object.__setattr__(self, "runs", tuple(zip(bits, steps, strict=True)))
        set_range(self, min(bits), max(bits), sum(steps))

    def __eq__(self, other: object) -> bool:
        """Return whether two tables have equal runs, also if one was made of a function."""
        return isinstance(other, TableSchedule) and self.runs == other.runs

    def __hash__(self) -> int:
        """Return a hash of the runs."""
        return hash(self.runs)

    def values(self) -> Array:
        """Return the bits of every step as floats."""
        bits, steps = zip(*self.runs, strict=True)
        return np.repeat(np.array(bits, dtype=np.float64), steps)


@dataclass(frozen=True, init=False, eq=False)
class FunctionSchedule(TableSchedule):
    """Schedule of a function: ``function(u)`` gives bits before rounding, u = 0 at the first and 1 at the last step.

    The function is called for every step when the schedule is made; the schedule then stores a table of bits.

    Args:
        function: takes one number, and returns bits.
        total_steps: optimizer steps of the training.
        argument: "progress" gives the function u, from 0 to 1; "step" the 0-based optimizer step, an integer. None is
            "progress".

    Raises:
        ValueError: for bits outside 1..32; without ``argument``, for a function whose parameter is named like a step
            or an epoch.

    Warns:
        UserWarning: without ``argument``, for a function that gives the same bits at every step.
    """

    def __init__(
        self,
        function: Callable[[float], float],
        total_steps: int,
        argument: str | None = None,
    ) -> None:
        check_types(FunctionSchedule.__init__, locals())
        total_steps = check_int("total_steps", total_steps, 1, MAX_TOTAL_STEPS)
        if argument is None:
            _check_parameter_name(function)
        else:
            check_choice("argument", argument, ARGUMENTS)
        last = max(total_steps - 1, 1)
        bits = []
        for step in range(total_steps):
            value = function(step if argument == "step" else step / last)
            value = check_float("function must return bits", value)
            if not (math.isfinite(value) and 1 <= round(value) <= MAX_BITS):
                raise ValueError(
                    f"function gives {value} bits at step {step}; bits lie in 1..{MAX_BITS}"
                )
            bits.append(round(value))
        if argument is None and total_steps > 1 and len(set(bits)) == 1:
            warnings.warn(
                f"function gives {bits[0]} bits at every step. It is given u, from 0 at the first to 1 at the last "
                'step; argument="step" of FunctionSchedule gives it the 0-based step instead. For constant bits use '
                f"StaticSchedule({bits[0]}, total_steps={total_steps})",
                stacklevel=2,
            )
        runs = [(q, len(list(run))) for q, run in itertools.groupby(bits)]
        super().__init__(tuple(runs))


def _check_parameter_name(function: Callable[[float], float]) -> None:
    """Raise ValueError for a function whose parameter is named like a step or an epoch."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    name = names[0] if names else ""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_").split("_")
    if STEP_WORDS.isdisjoint(words):
        return
    if {"epoch", "epochs"} & set(words):
        remedy = f'argument="step", with lambda step: function(step // steps_per_epoch), if {name!r} is an epoch'
    else:
        remedy = f'argument="step" if {name!r} is the 0-based optimizer step'
    raise ValueError(
        f"function takes {name!r}, but FunctionSchedule gives it u, from 0 at the first to 1 at the last step: give "
        f'{remedy}, or argument="progress" if it is u'
    )


SCHEDULE_KINDS["table"] = TableSchedule
