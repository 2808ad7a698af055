"""Precision schedules: how many bits at which optimizer step.  Paper: section 3.

A schedule is a *profile* (a curve from 0 to 1 over one cycle), repeated ``n_cycles`` times between ``q_min`` and
``q_max`` bits; a *triangular* schedule runs every other cycle, the first included, downwards.  The paper's ten are in
``SUITE``.  Schedules are frozen values and pure functions of the 0-based optimizer step.

>>> schedule = make_schedule("CR", q_min=3, q_max=8, total_steps=64_000)
>>> schedule(0), schedule(63_999), round(schedule.relative_cost(), 3)
(3, 8, 0.633)
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cpt_core import cost

Array = NDArray[np.float64]
MAX_BITS = 32


class ShortCycleWarning(UserWarning):
    """The cycles have too few steps for the bits to reach ``q_max`` at the end of a cycle."""


# --- profiles: x in [0, 1) -> [0, 1] --------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """A growth curve f over one cycle, with its two reflections.  Paper: section 3.1."""

    def growth(self, x: Array) -> Array:
        """Return f(x)."""
        raise NotImplementedError

    def horizontal(self, x: Array) -> Array:
        """Return f(1 - x): the curve read from right to left."""
        return self.growth(1.0 - x)

    def vertical(self, x: Array) -> Array:
        """Return 1 - f(x): the curve turned upside down."""
        return 1.0 - self.growth(x)


@dataclass(frozen=True)
class Linear(Profile):
    """f(x) = x."""

    def growth(self, x: Array) -> Array:
        """Return x."""
        return x


@dataclass(frozen=True)
class Cosine(Profile):
    """f(x) = (1 - cos(pi x)) / 2; repeated, this is the schedule of the original CPT paper."""

    def growth(self, x: Array) -> Array:
        """Return (1 - cos(pi x)) / 2."""
        return (1.0 - np.cos(np.pi * x)) / 2.0


@dataclass(frozen=True)
class Exponential(Profile):
    """f(x) = 1 - exp(-rate x): rises at once, saves little.

    Differs: with rate 4 the limit is 0.982, not 1, as the authors ran it; rounding hides it while q_max - q_min < 28.
    """

    rate: float = 4.0

    def __post_init__(self) -> None:
        """Check the constant."""
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be positive, got {self.rate}")

    def growth(self, x: Array) -> Array:
        """Return 1 - exp(-rate x)."""
        return 1.0 - np.exp(-self.rate * x)

    def vertical(self, x: Array) -> Array:
        """Return exp(-rate x)."""
        return np.exp(-self.rate * x)


@dataclass(frozen=True)
class Rex(Profile):
    """f(x) = 1 - (1 - x) / (1 - d + d (1 - x)): rises late, saves much.

    Differs: d = 0.9 as the authors ran it and as the costs in the paper's text require; the REX paper has d = 0.5.
    """

    d: float = 0.9

    def __post_init__(self) -> None:
        """Check the constant: the curve has a pole at d = 1."""
        if not 0 <= self.d < 1:
            raise ValueError(f"d must satisfy 0 <= d < 1, got {self.d}")

    def growth(self, x: Array) -> Array:
        """Return f(x)."""
        return 1.0 - self.vertical(x)

    def horizontal(self, x: Array) -> Array:
        """Return 1 - x / (1 - d + d x)."""
        return 1.0 - x / ((1.0 - self.d) + self.d * x)

    def vertical(self, x: Array) -> Array:
        """Return (1 - x) / (1 - d + d (1 - x)), from the closed form so that rounding ties fall as the authors' do."""
        z = 1.0 - x
        return z / ((1.0 - self.d) + self.d * z)


@dataclass(frozen=True)
class Warped(Profile):
    """f(x) = g(x**power), g another profile: the same two ends, reached earlier (power < 1) or later (power > 1).

    One number takes every profile from static ``q_max`` (power to 0) to static ``q_min`` (power to infinity);
    ``solve_schedule`` chooses it.

    Args:
        base: name of g, with its standard constants.
        power: positive; 1 is g itself.
    """

    base: str = "linear"
    power: float = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        _choose("profile", self.base, tuple(name for name, kind in PROFILES.items() if kind is not Warped))
        if not 0 < self.power < math.inf:
            raise ValueError(f"power must be positive, got {self.power}")

    def growth(self, x: Array) -> Array:
        """Return g(x**power)."""
        return PROFILES[self.base]().growth(x**self.power)

    def vertical(self, x: Array) -> Array:
        """Return 1 - g(x**(1/power)): a falling cycle gets cheaper with the power too, as a rising one does."""
        return PROFILES[self.base]().vertical(x ** (1 / self.power))


PROFILES: dict[str, type[Profile]] = {
    "linear": Linear,
    "cosine": Cosine,
    "exponential": Exponential,
    "rex": Rex,
    "warped": Warped,
}


# --- schedules ------------------------------------------------------------------------------------


class Schedule:
    """What every schedule can do. ``q_min``, ``q_max`` are bits, ``total_steps`` optimizer steps."""

    q_min: int
    q_max: int
    total_steps: int
    kind: ClassVar[str]

    def values(self) -> Array:
        """Return the precision of every step before rounding, shape (total_steps,)."""
        raise NotImplementedError

    @cached_property
    def _bits(self) -> NDArray[np.int64]:
        bits = np.rint(self.values()).astype(np.int64)  # half to even, as the authors round
        bits.setflags(write=False)
        return bits

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cached bits out of copies, which would be large and writable."""
        return {k: v for k, v in self.__dict__.items() if k != "_bits"}

    def bits(self) -> NDArray[np.int64]:
        """Return the bits of every step, shape (total_steps,), read-only."""
        return self._bits

    def _check_step(self, step: int) -> int:
        step = _integer("step", step)
        if not 0 <= step < self.total_steps:
            raise ValueError(f"step {step} is outside the schedule; steps run from 0 to {self.total_steps - 1}")
        return step

    def __call__(self, step: int) -> int:
        """Return the bits at a 0-based optimizer step."""
        return int(self._bits[self._check_step(step)])

    def value(self, step: int) -> float:
        """Return the precision at a step before rounding."""
        return float(self.values()[self._check_step(step)])

    def relative_cost(self, q_grad: int | None = None) -> float:
        """Return the training cost relative to static ``q_max``; gradients have ``q_grad`` (``q_max``) bits."""
        return cost.relative_cost(self._bits, self.q_max, q_grad)

    def noise_exposure(self) -> float:
        """Return the mean of 4**-q over the steps, relative to static ``q_max`` (1 = no extra noise)."""
        return cost.noise_exposure(self._bits, self.q_max)

    def share_at(self, bits: int) -> float:
        """Return the share of steps that run at exactly ``bits`` bits."""
        return float(np.mean(self._bits == _integer("bits", bits)))

    @property
    def savings(self) -> str | None:
        """The group by size of the cost reduction: "large", "medium", "small", "none" (static), None (unnamed).

        Paper: section 3.2 (Groups I-III). Differs: section 4.5 of the paper uses the words the other way round.
        """
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; ``schedule_from_dict`` gives an equal schedule."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class StaticSchedule(Schedule):
    """The same bits at every step: the baseline.  Paper: section 4.1."""

    q_max: int
    total_steps: int
    kind: ClassVar[str] = "static"
    name: ClassVar[str] = "STATIC"

    def __post_init__(self) -> None:
        """Check the values."""
        _set_integers(self, "q_max", "total_steps")
        _check_range(self.q_max, self.q_max, self.total_steps)

    @property
    def q_min(self) -> int:  # type: ignore[override]
        """The same as ``q_max``."""
        return self.q_max

    @property
    def savings(self) -> str:
        """Always "none"."""
        return "none"

    def values(self) -> Array:
        """Return ``q_max`` for every step."""
        return np.full(self.total_steps, float(self.q_max))


CYCLE_RULES = ("exact", "floor", "floor_plus_one")
MIRRORS = ("horizontal", "vertical")


@dataclass(frozen=True)
class CyclicSchedule(Schedule):
    """``n_cycles`` cycles of a profile between ``q_min`` and ``q_max``.  Paper: section 3.1.

    Args:
        profile: the growth curve.
        q_min: lowest number of bits.
        q_max: highest number of bits.
        total_steps: length of training in optimizer steps.
        n_cycles: number of cycles; even for a triangular schedule, which otherwise would end at ``q_min``.
        triangular: run the 1st, 3rd, ... cycle downwards.
        mirror: how a cycle is turned round, "horizontal" f(1 - x) or "vertical" 1 - f(x).
        cycle_rule: length of a cycle. "exact" is T/n, not rounded, so that every schedule ends at ``q_max`` and no
            steps are left over; "floor" and "floor_plus_one" are the authors' two rules.
        name: the paper's name, or "" for a schedule of one's own.

    Differs: the authors use floor(T/n) + 1 or floor(T/n) depending on the script; "exact" agrees with the latter
        whenever n divides T.
    """

    profile: Profile
    q_min: int
    q_max: int
    total_steps: int
    n_cycles: int = 8
    triangular: bool = False
    mirror: str = "horizontal"
    cycle_rule: str = "exact"
    name: str = ""
    kind: ClassVar[str] = "cyclic"

    def __post_init__(self) -> None:
        """Check the values; warn when the cycles are too short to reach ``q_max``."""
        _set_integers(self, "q_min", "q_max", "total_steps", "n_cycles")
        _check_range(self.q_min, self.q_max, self.total_steps)
        if not 1 <= self.n_cycles <= self.total_steps:
            raise ValueError(f"n_cycles must lie in 1..total_steps = 1..{self.total_steps}, got {self.n_cycles}")
        if self.triangular and self.n_cycles % 2:
            raise ValueError(f"a triangular schedule needs an even n_cycles, or it ends at q_min; got {self.n_cycles}")
        _choose("mirror", self.mirror, MIRRORS)
        _choose("cycle_rule", self.cycle_rule, CYCLE_RULES)
        last = int(np.rint(self._values_at(np.array([self.total_steps - 1]))[0]))
        if last != self.q_max:
            warnings.warn(
                f"{self.name or 'schedule'}: {self.n_cycles} cycles in {self.total_steps} steps end at {last} bits, "
                f"not at q_max = {self.q_max}; use fewer cycles or more steps",
                ShortCycleWarning,
                stacklevel=3,
            )

    def _values_at(self, steps: NDArray[np.int64]) -> Array:
        total, n = self.total_steps, self.n_cycles
        if self.cycle_rule == "exact":  # c = floor(t n / T), x = (t n mod T) / T: integers until the last division
            cycle, rest = np.divmod(steps * n, total)
            x = rest / total
        else:
            length = total // n + (self.cycle_rule == "floor_plus_one")
            cycle, rest = np.divmod(steps, length)
            x = rest / length
        shape = self.profile.growth(x)
        if self.triangular:
            turned = self.profile.horizontal(x) if self.mirror == "horizontal" else self.profile.vertical(x)
            shape = np.where(cycle % 2 == 0, turned, shape)
        # S = q_min + (q_max - q_min) f(x)
        return self.q_min + (self.q_max - self.q_min) * shape

    def values(self) -> Array:
        """Return the precision of every step before rounding, shape (total_steps,)."""
        total, n = self.total_steps, self.n_cycles
        if self.cycle_rule == "exact" and total % n == 0:  # the cycles are alike: compute two, repeat them
            two = self._values_at(np.arange(min(2 * (total // n), total)))
            return np.resize(two, total)
        return self._values_at(np.arange(total))

    def value(self, step: int) -> float:
        """Return the precision at a step before rounding."""
        return float(self._values_at(np.array([self._check_step(step)]))[0])

    @property
    def savings(self) -> str | None:
        """The paper's group of a named schedule, None for one of your own."""
        return SUITE[self.name].savings if self.name in SUITE else None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; ``schedule_from_dict`` gives an equal schedule."""
        kind = type(self.profile)
        if kind not in PROFILES.values():
            raise ValueError(f"{kind.__name__} is not in PROFILES; add it there, or use FunctionSchedule")
        profile = {v: k for k, v in PROFILES.items()}[kind]
        return {**super().to_dict(), "profile": {"name": profile, **asdict(self.profile)}}


@dataclass(frozen=True)
class TableSchedule(Schedule):
    """Bits as runs of equal steps, ``((bits, steps), ...)``: any schedule at all, and one that JSON can hold."""

    runs: tuple[tuple[int, int], ...]
    kind: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        """Check the values."""
        runs = tuple((_integer("bits", b), _integer("steps", s)) for b, s in self.runs)
        object.__setattr__(self, "runs", runs)
        if not runs or min(s for _, s in runs) < 1:
            raise ValueError(f"runs must be pairs (bits, steps) with steps >= 1, got {self.runs}")
        _check_range(self.q_min, self.q_max, self.total_steps)

    @property
    def q_min(self) -> int:  # type: ignore[override]
        """The lowest bits."""
        return min(b for b, _ in self.runs)

    @property
    def q_max(self) -> int:  # type: ignore[override]
        """The highest bits."""
        return max(b for b, _ in self.runs)

    @property
    def total_steps(self) -> int:  # type: ignore[override]
        """The number of optimizer steps."""
        return sum(s for _, s in self.runs)

    def values(self) -> Array:
        """Return the bits of every step as floats."""
        bits, steps = zip(*self.runs, strict=True)
        return np.repeat(np.array(bits, dtype=np.float64), steps)


@dataclass(frozen=True)
class FunctionSchedule(Schedule):
    """Your own curve: ``function(u)`` gives bits before rounding, u = 0 at the first and 1 at the last step.

    The function is read once, when the schedule is made; ``q_min`` and ``q_max`` are the lowest and the highest bits
    it reaches. ``to_dict`` stores the resulting bits, so it comes back as a ``TableSchedule`` of the same bits.

    >>> FunctionSchedule(lambda u: 3 + 5 * u**2, total_steps=5).bits().tolist()
    [3, 3, 4, 6, 8]
    """

    function: Callable[[float], float]
    total_steps: int
    _values: tuple[float, ...] = field(init=False, repr=False, compare=False)
    kind: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        """Read the curve and check it."""
        _set_integers(self, "total_steps")
        _check_range(1, 1, self.total_steps)
        last = max(self.total_steps - 1, 1)
        values = tuple(float(self.function(t / last)) for t in range(self.total_steps))
        bad = [t for t, v in enumerate(values) if not (math.isfinite(v) and 1 <= round(v) <= MAX_BITS)]
        if bad:
            raise ValueError(f"the curve gives {values[bad[0]]} bits at step {bad[0]}; bits lie in 1..{MAX_BITS}")
        object.__setattr__(self, "_values", values)

    @property
    def q_min(self) -> int:  # type: ignore[override]
        """The lowest bits of the curve."""
        return int(self._bits.min())

    @property
    def q_max(self) -> int:  # type: ignore[override]
        """The highest bits of the curve."""
        return int(self._bits.max())

    def values(self) -> Array:
        """Return the curve at every step, shape (total_steps,)."""
        return np.array(self._values)

    def to_dict(self) -> dict[str, Any]:
        """Return the bits as a table: a function itself cannot be written to JSON."""
        edges = [0, *(np.flatnonzero(np.diff(self._bits)) + 1).tolist(), self.total_steps]
        return {"kind": "table", "runs": [[int(self._bits[a]), b - a] for a, b in itertools.pairwise(edges)]}


@dataclass(frozen=True)
class DeficitSchedule(Schedule):
    """``q_high`` bits, but ``q_low`` inside the windows: the schedule of a critical-period experiment.

    >>> DeficitSchedule(3, 8, windows=[(2, 4)], total_steps=6).bits().tolist()
    [8, 8, 3, 3, 8, 8]

    Args:
        q_low: bits inside the windows.
        q_high: bits elsewhere, and of the gradients.
        windows: pairs (start, stop) of 0-based steps, half-open: ``start <= t < stop``; none is no deficit. They are
            kept in order of time.
        total_steps: length of training in optimizer steps.

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
        """Check the values."""
        _set_integers(self, "q_low", "q_high", "total_steps")
        _check_range(self.q_low, self.q_high, self.total_steps)
        windows = []
        for window in self.windows:
            windows.append(window_of(window))
            if not 0 <= windows[-1][0] < windows[-1][1] <= self.total_steps:
                raise ValueError(
                    f"window {windows[-1]} must satisfy 0 <= start < stop <= total_steps = {self.total_steps}"
                )
        windows.sort()
        for a, b in itertools.pairwise(windows):
            if b[0] < a[1]:
                raise ValueError(f"windows {a} and {b} overlap")
        object.__setattr__(self, "windows", tuple(windows))

    @classmethod
    def in_epochs(
        cls, q_low: int, q_high: int, windows: Sequence[tuple[int, int]], epochs: int, steps_per_epoch: int
    ) -> DeficitSchedule:
        """Make one from windows and a length in epochs of ``steps_per_epoch`` steps."""
        steps = _integer("steps_per_epoch", steps_per_epoch)
        if steps < 1:
            raise ValueError(f"steps_per_epoch must be at least 1, got {steps_per_epoch}")
        in_steps = tuple((start * steps, stop * steps) for start, stop in map(window_of, windows))
        return cls(q_low, q_high, in_steps, _integer("epochs", epochs) * steps)

    @property
    def q_min(self) -> int:  # type: ignore[override]
        """The same as ``q_low``."""
        return self.q_low

    @property
    def q_max(self) -> int:  # type: ignore[override]
        """The same as ``q_high``."""
        return self.q_high

    def values(self) -> Array:
        """Return the bits of every step as floats."""
        values = np.full(self.total_steps, float(self.q_high))
        for start, stop in self.windows:
            values[start:stop] = self.q_low
        return values


class _Around(Schedule):
    """A schedule made from another one, with its bits and, unless it says otherwise, its length."""

    schedule: Any

    @property
    def q_min(self) -> int:  # type: ignore[override]
        """Of the schedule."""
        return self.schedule.q_min

    @property
    def q_max(self) -> int:  # type: ignore[override]
        """Of the schedule."""
        return self.schedule.q_max

    @property
    def total_steps(self) -> int:  # type: ignore[override]
        """Of the schedule."""
        return self.schedule.total_steps


@dataclass(frozen=True)
class AdjustedSchedule(_Around):
    """A cyclic schedule with the bits of a few steps changed, ``((step, bits), ...)``: how short ones meet a budget."""

    schedule: CyclicSchedule
    changes: tuple[tuple[int, int], ...]
    kind: ClassVar[str] = "adjusted"

    def __post_init__(self) -> None:
        """Check the changes."""
        if not isinstance(self.schedule, CyclicSchedule):
            raise ValueError(f"only a cyclic schedule can be adjusted, got {self.schedule!r}")
        changes = tuple(sorted((self.schedule._check_step(t), _integer("bits", b)) for t, b in self.changes))
        object.__setattr__(self, "changes", changes)
        if len({t for t, _ in changes}) < len(changes):
            raise ValueError(f"a step is changed once, got {changes}")
        for _, bits in changes:
            if not self.q_min <= bits <= self.q_max:
                raise ValueError(f"changed bits must lie in {self.q_min}..{self.q_max}, got {bits}")

    def values(self) -> Array:
        """Return the schedule's values, whole numbers where it was changed."""
        values = self.schedule.values()
        for step, bits in self.changes:
            values[step] = bits
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; ``schedule_from_dict`` gives an equal schedule."""
        return {"kind": self.kind, "schedule": self.schedule.to_dict(), "changes": [list(c) for c in self.changes]}


@dataclass(frozen=True)
class DelayedSchedule(_Around):
    """``hold`` steps at ``q_max`` bits, then another schedule: low precision, but not at the start.

    Paper: section 5 (the closing remark, that a delay of low precision avoids the damage; not tested there).
    """

    schedule: CyclicSchedule | AdjustedSchedule
    hold: int
    kind: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        """Check the values."""
        _set_integers(self, "hold")
        if not isinstance(self.schedule, (CyclicSchedule, AdjustedSchedule)):
            raise ValueError(f"only a cyclic schedule can be delayed, got {self.schedule!r}")
        if self.hold < 0:
            raise ValueError(f"hold must be at least 0 steps, got {self.hold}")

    @property
    def total_steps(self) -> int:  # type: ignore[override]
        """The number of optimizer steps, those of the delay included."""
        return self.hold + self.schedule.total_steps

    def values(self) -> Array:
        """Return the precision of every step before rounding, shape (total_steps,)."""
        return np.concatenate([np.full(self.hold, float(self.q_max)), self.schedule.values()])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; ``schedule_from_dict`` gives an equal schedule."""
        return {"kind": self.kind, "schedule": self.schedule.to_dict(), "hold": self.hold}


# --- the suite ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SuiteEntry:
    """One of the paper's named schedules."""

    profile: str
    triangular: bool
    mirror: str
    savings: str


# Linear and cosine are their own mirror images, so they have one triangular form.  Paper: sections 3.1 and 3.2.
SUITE: dict[str, SuiteEntry] = {
    "LR": SuiteEntry("linear", False, "horizontal", "medium"),
    "LT": SuiteEntry("linear", True, "vertical", "medium"),
    "CR": SuiteEntry("cosine", False, "horizontal", "medium"),
    "CT": SuiteEntry("cosine", True, "vertical", "medium"),
    "RR": SuiteEntry("rex", False, "horizontal", "large"),
    "RTV": SuiteEntry("rex", True, "vertical", "medium"),
    "RTH": SuiteEntry("rex", True, "horizontal", "large"),
    "ER": SuiteEntry("exponential", False, "horizontal", "small"),
    "ETV": SuiteEntry("exponential", True, "vertical", "medium"),
    "ETH": SuiteEntry("exponential", True, "horizontal", "small"),
}
STATIC = "STATIC"


def make_schedule(
    name: str,
    *,
    q_max: int,
    total_steps: int,
    q_min: int | None = None,
    n_cycles: int = 8,
    cycle_rule: str = "exact",
    profile: Profile | None = None,
    delay: float = 0.0,
) -> Schedule:
    """Make one of the paper's ten schedules, or the static baseline, by name.

    Args:
        name: LR LT CR CT RR RTV RTH ER ETV ETH, or STATIC.
        q_max: highest bits, reached at the last step.
        total_steps: optimizer steps of the training.
        q_min: lowest bits; needed by all but STATIC, which has none (give ``q_max`` or nothing).
        n_cycles: number of cycles.
        cycle_rule: see ``CyclicSchedule``.
        profile: another constant for the same profile, such as ``Rex(d=0.5)``; the result has no ``name``.
        delay: share of the steps that are held at ``q_max`` first; the cycles share the others. A delay makes training
            dearer; ``solve_schedule`` delays at a given cost.

    Raises:
        ValueError: for an unknown name or values that make no schedule.

    Paper: sections 3.1, 3.2.
    """
    if name == STATIC:
        if q_min not in (None, q_max):
            raise ValueError(f"STATIC has one precision: q_min must equal q_max = {q_max} or be left out, got {q_min}")
        if profile is not None:
            raise ValueError(f"STATIC has no profile, got {profile!r}")
        if delay:
            raise ValueError(f"STATIC has nothing to delay, got delay={delay}")
        return StaticSchedule(q_max, total_steps)
    _choose("schedule", name, (*SUITE, STATIC))
    if q_min is None:
        raise ValueError(f"{name} needs q_min, an integer between 1 and q_max = {q_max}")
    entry = SUITE[name]
    standard = PROFILES[entry.profile]()
    if profile is not None and type(profile) is not type(standard):
        raise ValueError(f"{name} has a {entry.profile} profile, got {profile!r}; use CyclicSchedule for other mixes")
    chosen = standard if profile is None else profile
    hold = delay_steps(delay, total_steps)
    schedule = CyclicSchedule(
        profile=chosen,
        q_min=q_min,
        q_max=q_max,
        total_steps=total_steps - hold,
        n_cycles=n_cycles,
        triangular=entry.triangular,
        mirror=entry.mirror,
        cycle_rule=cycle_rule,
        name=name if chosen == standard else "",
    )
    return DelayedSchedule(schedule, hold) if hold else schedule


def delay_steps(delay: float, total_steps: int) -> int:
    """Return how many steps a delay, a share of the training, takes; ValueError unless 0 <= delay < 1."""
    if isinstance(delay, bool) or not isinstance(delay, (int, float)) or not 0 <= delay < 1:
        raise ValueError(f"delay is a share of the training, 0 <= delay < 1; got {delay!r}")
    steps = round(delay * _integer("total_steps", total_steps))
    if steps and steps == total_steps:
        raise ValueError(f"a delay of {delay} leaves none of {total_steps} steps to cycle in")
    return steps


def schedule_from_dict(description: dict[str, Any]) -> Schedule:
    """Rebuild a schedule from ``to_dict()``; raises ValueError for an unknown kind or profile.

    A schedule that does not end at q_max warned when it was made; it is rebuilt without another warning.
    """
    d = dict(description)
    kind = _choose("kind", d.pop("kind", None), ("static", "cyclic", "table", "deficit", "adjusted", "delayed"))
    if kind == "static":
        return StaticSchedule(**d)
    if kind == "table":
        return TableSchedule(tuple(tuple(run) for run in d["runs"]))
    if kind == "deficit":
        return DeficitSchedule(**{**d, "windows": tuple(tuple(w) for w in d["windows"])})
    if kind in ("adjusted", "delayed"):
        inner: Any = schedule_from_dict(d["schedule"])
        if kind == "delayed":
            return DelayedSchedule(inner, d["hold"])
        return AdjustedSchedule(inner, tuple(tuple(c) for c in d["changes"]))
    parameters = dict(d.pop("profile"))
    profile = PROFILES[_choose("profile", parameters.pop("name", None), tuple(PROFILES))](**parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShortCycleWarning)
        return CyclicSchedule(profile=profile, **d)


# --- checks ---------------------------------------------------------------------------------------


def _integer(what: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what} must be an integer, got {value!r}") from None


def window_of(window: Any) -> tuple[int, int]:
    """Return a pair (start, stop) of integers; ValueError for anything else."""
    try:
        start, stop = window
    except (TypeError, ValueError):
        raise ValueError(f"a window is a pair (start, stop) of steps, got {window!r}") from None
    return _integer("start of a window", start), _integer("stop of a window", stop)


def _set_integers(schedule: Schedule, *names: str) -> None:
    for name in names:  # numpy integers become int, so that equal schedules hash and serialise alike
        object.__setattr__(schedule, name, _integer(name, getattr(schedule, name)))


def _check_range(q_min: int, q_max: int, total_steps: int) -> None:
    if not 1 <= q_min <= q_max <= MAX_BITS:
        raise ValueError(f"bits must satisfy 1 <= q_min <= q_max <= {MAX_BITS}, got q_min={q_min}, q_max={q_max}")
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")


def _choose(what: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(allowed)}")
    return value
