"""Static and cyclic schedules, and what every schedule can do.  Paper: section 3.

>>> from cpt_core.schedules.profiles import Cosine
>>> schedule = CyclicSchedule(Cosine(), q_min=3, q_max=8, total_steps=64_000)
>>> schedule(0), schedule(63_999), round(schedule.relative_cost(), 3)
(3, 8, 0.633)
"""

import warnings
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpt_core.schedules.cost import Ladders, StepCost, noise_exposure, relative_cost
from cpt_core.schedules.profiles import PROFILES, SUITE, Array, Profile
from cpt_core.validation import (
    MAX_BITS,
    check_bits,
    check_choice,
    check_int,
    check_types,
    short_repr,
)

MAX_STEPS = 10**8  # of a training: schedules hold a number for each
FLOAT32 = 32  # the level of what is not quantised


class ShortCycleWarning(UserWarning):
    """The cycles have too few steps for the bits to reach ``q_max`` at the end of a cycle."""


class RoleLevels(NamedTuple):
    """Something for every role: levels of a step (None is float32, too), or of every step, arrays (total_steps,)."""

    activation: Any
    weight: Any
    error: Any  # the output's gradient where it is multiplied with weights
    weight_gradient: Any  # and where with activations


Levels = RoleLevels  # the name in whole-model pickles of release 0.3.0


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
        bits = np.rint(self.values()).astype(
            np.int64
        )  # half to even, as the authors round
        bits.setflags(write=False)
        return bits

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cached bits out of copies, which would be large and writable."""
        return {k: v for k, v in self.__dict__.items() if k != "_bits"}

    def bits(self) -> NDArray[np.int64]:
        """Return the bits of every step, shape (total_steps,), read-only."""
        return self._bits

    def _check_step(self, step: int) -> int:
        step = check_int("step", step)
        if not 0 <= step < self.total_steps:
            raise ValueError(
                f"step {step} is outside the schedule; steps run from 0 to {self.total_steps - 1}"
            )
        return step

    def __call__(self, step: int) -> int:
        """Return the bits at a 0-based optimizer step."""
        return int(self._bits[self._check_step(step)])

    def levels(self, q_grad: int | None = None) -> RoleLevels:
        """Return the levels of every step and role: weights and activations the same, gradients ``q_grad`` (q_max)."""
        gradient_bits = self.q_max if q_grad is None else check_bits("q_grad", q_grad)
        gradients = np.broadcast_to(np.int64(gradient_bits), self.total_steps)
        return RoleLevels(self._bits, self._bits, gradients, gradients)

    def levels_at(self, step: int, q_grad: int | None = None) -> RoleLevels:
        """Return the levels of a 0-based optimizer step."""
        step = self._check_step(step)
        return RoleLevels(*(int(levels[step]) for levels in self.levels(q_grad)))

    @property
    def highest(self) -> RoleLevels:
        """The highest level of every role, which "q_max" means where a model is evaluated."""
        return RoleLevels(*[self.q_max] * 4)

    def relative_cost(
        self,
        q_grad: int | None = None,
        q_max: int | None = None,
        cost: StepCost | str | None = None,
        ladder: Ladders | None = None,
    ) -> float:
        """Return the training cost relative to static ``q_max`` (its own) with gradients at ``q_max``.

        Gradients have ``q_grad`` (``q_max``) bits.
        By BitOps, a name of ``COSTS``, or a function, bits -> cost of a step; on a ladder, bits are its levels.
        """
        return self._relative_cost(
            self.q_max if q_max is None else q_max, q_grad, cost, ladder
        )

    def _relative_cost(self, q_max: int, q_grad: int | None, *priced: Any) -> float:
        return relative_cost(self._bits, q_max, q_grad, *priced)

    def noise_exposure(self, q_max: int | None = None) -> float:
        """Return the mean of 4**-q over the steps, relative to static ``q_max`` (its own; 1 = no extra noise)."""
        return noise_exposure(self._bits, self.q_max if q_max is None else q_max)

    def share_at(self, bits: int) -> float:
        """Return the share of steps that run at exactly ``bits`` bits."""
        return float(np.mean(self._bits == check_bits("bits", bits)))

    @property
    def savings(self) -> str | None:
        """The group by size of the cost reduction: "large", "medium", "small", "none" (static), None (unnamed).

        Paper: section 3.2 (Groups I-III). Differs: section 4.5 of the paper uses the words the other way round.
        """
        if self.kind == "static":
            return "none"
        name = getattr(self, "name", "")
        return SUITE[name].savings if name in SUITE else None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; ``schedule_from_dict`` gives an equal schedule."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {
            "kind": self.kind,
            **{
                name: _plain(value)
                for name, value in values.items()
                if value is not None
            },
        }


@dataclass(frozen=True)
class StaticSchedule(Schedule):
    """The same bits at every step: the baseline.  Paper: section 4.1."""

    q_max: int
    total_steps: int
    kind: ClassVar[str] = "static"
    name: ClassVar[str] = "STATIC"

    def __post_init__(self) -> None:
        set_integers(self, "q_max", "total_steps")
        set_range(self, check_bits("q_max", self.q_max), self.q_max, self.total_steps)

    def values(self) -> Array:
        """Return ``q_max`` for every step."""
        return np.full(self.total_steps, float(self.q_max))


CYCLE_RULES = ("exact", "floor", "floor_plus_one")
MIRRORS = ("horizontal", "vertical")


@dataclass(frozen=True)
class CyclicSchedule(Schedule):
    """``n_cycles`` cycles of a profile, its growth curve, between ``q_min`` and ``q_max`` bits.  Paper: section 3.1.

    Args:
        profile: one of ``PROFILES``, or your own: its ``growth(x)`` is given places x in a cycle, from 0 to 1, as an
            array, and returns values that lie in 0..1, too.
        n_cycles: even for a triangular schedule, which otherwise would end at ``q_min``.
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
        set_integers(self, "q_min", "q_max", "total_steps", "n_cycles")
        check_range(self.q_min, self.q_max, self.total_steps)
        if not 1 <= self.n_cycles <= self.total_steps:
            raise ValueError(
                f"n_cycles must lie in 1..total_steps = 1..{self.total_steps}, got {self.n_cycles}"
            )
        if self.triangular and self.n_cycles % 2:
            raise ValueError(
                f"a triangular schedule needs an even n_cycles, or it ends at q_min; got {self.n_cycles}"
            )
        _check_growth(self.profile)
        check_choice("mirror", self.mirror, MIRRORS)
        check_choice("cycle_rule", self.cycle_rule, CYCLE_RULES)
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
        if (
            self.cycle_rule == "exact"
        ):  # c = floor(t n / T), x = (t n mod T) / T: integers until the last division
            cycle, rest = np.divmod(steps * n, total)
            x = rest / total
        else:
            length = total // n + (self.cycle_rule == "floor_plus_one")
            cycle, rest = np.divmod(steps, length)
            x = rest / length
        shape = self.profile.growth(x)
        if self.triangular:
            turned = (
                self.profile.horizontal(x)
                if self.mirror == "horizontal"
                else self.profile.vertical(x)
            )
            shape = np.where(cycle % 2 == 0, turned, shape)
        # S = q_min + (q_max - q_min) f(x)
        return self.q_min + (self.q_max - self.q_min) * shape

    def values(self) -> Array:
        """Return the precision of every step before rounding, shape (total_steps,)."""
        return self._values_at(np.arange(self.total_steps))


def _check_growth(profile: Profile) -> None:
    """Raise ValueError for a curve that is no growth from 0 to 1, as one that takes steps."""
    if type(profile) in PROFILES.values():
        return
    values = np.asarray(profile.growth(np.linspace(0.0, 1.0, 65)), dtype=np.float64)
    low, high = values.min(), values.max()
    if not (low >= -1e-9 and high <= 1 + 1e-9 and low < high):
        raise ValueError(
            f"profile: growth(x) of {type(profile).__name__} must rise within 0..1 for places x in a cycle, which go "
            f"from 0 to 1 and are no steps; got values from {low:g} to {high:g}. For a function that returns bits use "
            "FunctionSchedule"
        )


def _plain(value: Any) -> Any:
    """Return a field of a schedule as JSON holds it."""
    if isinstance(value, Schedule):
        return value.to_dict()
    if isinstance(value, Profile):
        names = {kind: name for name, kind in PROFILES.items()}
        if type(value) not in names:
            raise ValueError(
                f"{type(value).__name__} is not in PROFILES; add it there, or use FunctionSchedule"
            )
        return {"name": names[type(value)], **asdict(value)}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def set_integers(schedule: Schedule, *names: str) -> None:
    """Turn fields of a frozen schedule into plain integers; ValueError for one that is none, or any odd field."""
    check_types(type(schedule), vars(schedule))
    for name in (
        names
    ):  # numpy integers become int, so that equal schedules hash and serialise alike
        object.__setattr__(schedule, name, check_int(name, getattr(schedule, name)))


def set_range(schedule: Schedule, q_min: int, q_max: int, total_steps: int) -> None:
    """Give a frozen schedule bits and length that are no fields of it; ValueError as ``check_range``."""
    check_range(q_min, q_max, total_steps)
    for name, value in (
        ("q_min", q_min),
        ("q_max", q_max),
        ("total_steps", total_steps),
    ):
        object.__setattr__(schedule, name, value)


def check_pairs(name: str, pairs: Any, meaning: str) -> list[tuple[Any, Any]]:
    """Return pairs of values as a list; ValueError for anything else."""
    try:
        return [(first, second) for first, second in pairs]
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be pairs {meaning}, got {short_repr(pairs)}"
        ) from None


def check_range(q_min: int, q_max: int, total_steps: int) -> None:
    """Raise ValueError unless 1 <= q_min <= q_max <= 32 and there are 1 to ``MOST_STEPS`` steps."""
    if not 1 <= q_min <= q_max <= MAX_BITS:
        raise ValueError(
            f"bits must satisfy 1 <= q_min <= q_max <= {MAX_BITS}, got q_min={q_min}, q_max={q_max}"
        )
    check_int("total_steps", total_steps, 1, MAX_STEPS)
