"""Static and cyclic schedules, and the base class of all schedules.  Paper: section 3.

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

MAX_TOTAL_STEPS = 10**8  # a schedule holds one number per step
FLOAT32_LEVEL = 32  # level of an operand that is not quantised


class ShortCycleWarning(UserWarning):
    """The cycles have too few steps for the bits to reach ``q_max`` at the end of a cycle."""


class RoleLevels(NamedTuple):
    """One value per role of an operand: its level at a step, or an array of its levels at all steps.

    A level is the number of bits, or a rung of a format ladder; None means float32.

    Attributes:
        activation: input of a layer in the forward pass.
        weight: weight in the forward pass and in the input gradient (dgrad).
        error: output gradient where it is multiplied by the weight (dgrad).
        weight_gradient: output gradient where it is multiplied by the activation (wgrad).
    """

    activation: Any
    weight: Any
    error: Any
    weight_gradient: Any


# pass -> roles of its operands: y = x w; dx = dy w; dw = x dy
PASS_OPERANDS = {
    "forward": ("activation", "weight"),
    "error": ("error", "weight"),
    "weight": ("weight_gradient", "activation"),
}


class Formats(RoleLevels):
    """Format that each role is priced at: bits of a grid, 32 for float32, or a number format."""

    __slots__ = ()

    def operands(self, pass_name: str) -> tuple[Any, Any]:
        """Return the formats of the two operands of a pass, a key of ``PASS_OPERANDS``."""
        first, second = PASS_OPERANDS[pass_name]
        return getattr(self, first), getattr(self, second)


Levels = RoleLevels  # the name in whole-model pickles of release 0.3.0


class Schedule:
    """Base class of schedules: bits per optimizer step, their cost, and a JSON description.

    Attributes:
        q_min: fewest bits.
        q_max: most bits.
        total_steps: number of optimizer steps.
        kind: name of the class in descriptions, a key of ``SCHEDULE_KINDS``.
    """

    q_min: int
    q_max: int
    total_steps: int
    kind: ClassVar[str]

    def values(self) -> Array:
        """Return the precision of every step before rounding, shape (total_steps,)."""
        raise NotImplementedError

    @cached_property
    def _bits(self) -> NDArray[np.int64]:
        # rint rounds half to even, as the authors do
        bits = np.rint(self.values()).astype(np.int64)
        bits.setflags(write=False)
        return bits

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the cached bits from copies and pickles, where they would be large and writable."""
        return {name: value for name, value in vars(self).items() if name != "_bits"}

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
        """Return the levels of every role at all steps; gradients have ``q_grad`` bits, ``q_max`` when None."""
        gradient_bits = self.q_max if q_grad is None else check_bits("q_grad", q_grad)
        gradients = np.broadcast_to(np.int64(gradient_bits), self.total_steps)
        return RoleLevels(self._bits, self._bits, gradients, gradients)

    def levels_at(self, step: int, q_grad: int | None = None) -> RoleLevels:
        """Return the levels of every role at a 0-based optimizer step."""
        step = self._check_step(step)
        return RoleLevels(*(int(levels[step]) for levels in self.levels(q_grad)))

    @property
    def highest(self) -> RoleLevels:
        """Highest level of every role, used where a model is evaluated at "q_max"."""
        return RoleLevels(*[self.q_max] * 4)

    def relative_cost(
        self,
        q_grad: int | None = None,
        q_max: int | None = None,
        cost: StepCost | str | None = None,
        ladder: Ladders | None = None,
    ) -> float:
        """Return the cost of training relative to a static schedule at ``q_max`` bits.

        Args:
            q_grad: gradient bits; ``q_max`` when None.
            q_max: bits of the static schedule and its gradients; the schedule's own ``q_max`` when None.
            cost: BitOps when None; a name of ``COSTS``, or a function from bits to the cost of a step.
            ladder: format ladder of which the bits are levels.
        """
        return self._relative_cost(
            self.q_max if q_max is None else q_max, q_grad, cost, ladder
        )

    def _relative_cost(self, q_max: int, q_grad: int | None, *priced: Any) -> float:
        return relative_cost(self._bits, q_max, q_grad, *priced)

    def noise_exposure(self, q_max: int | None = None) -> float:
        """Return the mean of 4**-q over the steps, relative to static ``q_max`` bits (1: no extra noise)."""
        return noise_exposure(self._bits, self.q_max if q_max is None else q_max)

    def share_at(self, bits: int) -> float:
        """Return the share of steps that run at exactly ``bits`` bits."""
        return float(np.mean(self._bits == check_bits("bits", bits)))

    @property
    def savings(self) -> str | None:
        """Group by cost reduction: "large", "medium", "small", "none" (static), None (unnamed).

        Paper: section 3.2 (Groups I-III). Differs: section 4.5 of the paper uses the words the other way round.
        """
        if self.kind == "static":
            return "none"
        name = getattr(self, "name", "")
        return SUITE[name].savings if name in SUITE else None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; ``schedule_from_dict`` gives an equal schedule."""
        description: dict[str, Any] = {"kind": self.kind}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                description[field.name] = _json_value(value)
        return description


@dataclass(frozen=True)
class StaticSchedule(Schedule):
    """Constant bits: the baseline.  Paper: section 4.1."""

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
        profile: one of ``PROFILES``, or a class whose ``growth(x)`` maps an array of positions in a cycle, from
            0 to 1, to values in 0..1.
        q_min: fewest bits.
        q_max: most bits.
        total_steps: number of optimizer steps.
        n_cycles: even for a triangular schedule, which otherwise would end at ``q_min``.
        triangular: run the 1st, 3rd, ... cycle downwards.
        mirror: reflection for cycles that run downwards: "horizontal" f(1 - x) or "vertical" 1 - f(x).
        cycle_rule: length of a cycle. "exact" is T/n without rounding, so that every schedule ends at ``q_max``
            and no steps remain; "floor" and "floor_plus_one" are the authors' two rules.
        name: the paper's name, or "" for any other schedule.

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
            cycles = "cycle" if self.n_cycles == 1 else "cycles"
            warnings.warn(
                f"{self.name or 'schedule'}: {self.n_cycles} {cycles} in {self.total_steps} steps end at {last} bits, "
                f"not at q_max = {self.q_max}; {self._remedy()}",
                ShortCycleWarning,
                stacklevel=3,
            )

    def _remedy(self) -> str:
        """Return what makes the last step run at ``q_max``."""
        # the last step of an "exact" schedule, and the end of a cycle that no step reaches
        last_position = (self.total_steps - self.n_cycles) / self.total_steps
        growth = self.profile.growth(np.array([last_position, 1.0]))
        precision = self.q_min + (self.q_max - self.q_min) * growth
        reaches_q_max = np.rint(precision) == self.q_max

        if not reaches_q_max[1]:
            profile = type(self.profile).__name__
            return (
                f"no cycle reaches it, because growth(1) of the profile {profile} is {growth[1]:.3g}, not 1: use other "
                "constants, or another profile"
            )
        if reaches_q_max[0]:
            return 'use cycle_rule="exact"'
        return "use fewer cycles or more steps"

    def _values_at(self, steps: NDArray[np.int64]) -> Array:
        total, n = self.total_steps, self.n_cycles
        if self.cycle_rule == "exact":
            # c = floor(t n / T), x = (t n mod T) / T: integers until the last division
            cycle, remainder = np.divmod(steps * n, total)
            x = remainder / total
        else:
            length = total // n
            if self.cycle_rule == "floor_plus_one":
                length += 1
            cycle, remainder = np.divmod(steps, length)
            x = remainder / length

        growth = self.profile.growth(x)
        if self.triangular:
            is_horizontal = self.mirror == "horizontal"
            mirror = self.profile.horizontal if is_horizontal else self.profile.vertical
            growth = np.where(cycle % 2 == 0, mirror(x), growth)
        # S = q_min + (q_max - q_min) f(x)
        return self.q_min + (self.q_max - self.q_min) * growth

    def values(self) -> Array:
        """Return the precision of every step before rounding, shape (total_steps,)."""
        return self._values_at(np.arange(self.total_steps))


def _check_growth(profile: Profile) -> None:
    """Raise ValueError unless ``profile.growth`` rises within 0..1; a function of optimizer steps does not."""
    if type(profile) in PROFILES.values():
        return
    values = np.asarray(profile.growth(np.linspace(0.0, 1.0, 65)), dtype=np.float64)
    low, high = values.min(), values.max()
    rises = values[0] < values[-1]
    if not (low >= -1e-9 and high <= 1 + 1e-9 and rises):
        raise ValueError(
            f"profile: growth(x) of {type(profile).__name__} must rise within 0..1, where x is the position in a cycle "
            f"from 0 to 1, not an optimizer step; got {values[0]:g} at 0, {values[-1]:g} at 1, and values from {low:g} "
            f"to {high:g}. For a function that returns bits use FunctionSchedule"
        )


def _json_value(value: Any) -> Any:
    """Return a field of a schedule as JSON holds it."""
    if isinstance(value, Schedule):
        return value.to_dict()
    if isinstance(value, Profile):
        return _describe_profile(value)
    if isinstance(value, tuple):
        return [_json_value(element) for element in value]
    return value


def _describe_profile(profile: Profile) -> dict[str, Any]:
    """Return name and constants of a profile; ValueError for one that has no name in ``PROFILES``."""
    names = {profile_class: name for name, profile_class in PROFILES.items()}
    if type(profile) not in names:
        raise ValueError(
            f"{type(profile).__name__} is not in PROFILES; add it there, or use FunctionSchedule"
        )
    return {"name": names[type(profile)], **asdict(profile)}


def set_integers(schedule: Schedule, *names: str) -> None:
    """Convert fields of a frozen schedule to plain integers; ValueError for a field of another type."""
    check_types(type(schedule), vars(schedule))
    # numpy integers become int, so that equal schedules have equal hashes and JSON
    for name in names:
        object.__setattr__(schedule, name, check_int(name, getattr(schedule, name)))


def set_range(schedule: Schedule, q_min: int, q_max: int, total_steps: int) -> None:
    """Set bits and length of a frozen schedule that has no fields for them, after ``check_range``."""
    check_range(q_min, q_max, total_steps)
    attributes = {"q_min": q_min, "q_max": q_max, "total_steps": total_steps}
    for name, value in attributes.items():
        object.__setattr__(schedule, name, value)


def check_pairs(name: str, pairs: Any, meaning: str) -> list[tuple[Any, Any]]:
    """Return ``pairs`` as a list of tuples; ValueError if an element is no pair."""
    try:
        return [(first, second) for first, second in pairs]
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be pairs {meaning}, got {short_repr(pairs)}"
        ) from None


def check_range(q_min: int, q_max: int, total_steps: int) -> None:
    """Raise ValueError unless 1 <= q_min <= q_max <= 32 and there are 1 to ``MAX_TOTAL_STEPS`` steps."""
    if not 1 <= q_min <= q_max <= MAX_BITS:
        raise ValueError(
            f"bits must satisfy 1 <= q_min <= q_max <= {MAX_BITS}, got q_min={q_min}, q_max={q_max}"
        )
    check_int("total_steps", total_steps, 1, MAX_TOTAL_STEPS)
