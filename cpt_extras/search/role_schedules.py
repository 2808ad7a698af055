"""Schedules by role of a tensor: weights, activations, and the gradients of both backward matmuls.

Beyond the paper, which has one schedule for weights and activations, and static gradients.

>>> from cpt_core.schedules.schedule import StaticSchedule
>>> from cpt_extras.search.custom_schedules import TableSchedule
>>> cycle = TableSchedule(((3, 2), (8, 2)))
>>> roles = RoleSchedules(weight=cycle, activation=StaticSchedule(8, 4), gradient="float32")
>>> roles.levels_at(0)
RoleLevels(activation=8, weight=3, error=32, weight_gradient=32)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cpt_core.schedules.make import SCHEDULE_KINDS, schedule_from_dict
from cpt_core.schedules.profiles import Array
from cpt_core.schedules.schedule import (
    FLOAT32_LEVEL,
    RoleLevels,
    Schedule,
    StaticSchedule,
    set_range,
)
from cpt_core.validation import check_bits, check_int, check_types
from cpt_extras.formats.prices import role_prices
from cpt_extras.search.layered import LayeredSchedule

Part = Schedule | int | str | None


@dataclass(frozen=True)
class RoleSchedules(Schedule):
    """One schedule for every role; a level instead of a schedule is constant, "float32" leaves a role unquantised.

    Args:
        weight: schedule of weights and biases.
        activation: schedule of inputs, hidden states, and the operands of attention.
        gradient: schedule of the output gradients in both backward matmuls, instead of the next two arguments.
        error: schedule of the output gradients in the matmul with the weights, which gives the input gradient.
        weight_gradient: schedule of the output gradients in the matmul with the activations, which gives the weight
            gradient.

    ``bits`` are the bits of activations; ``q_min`` and ``q_max`` are over weights and activations together.

    Raises:
        ValueError: for roles that are missing or given twice, or schedules of several lengths.
    """

    weight: Part = None
    activation: Part = None
    gradient: Part = None
    error: Part = None
    weight_gradient: Part = None
    kind: ClassVar[str] = "roles"

    def __post_init__(self) -> None:
        """Check the roles; replace ``gradient`` by ``error`` and ``weight_gradient``."""
        check_types(type(self), vars(self))
        if self.gradient is not None:
            if self.error is not None or self.weight_gradient is not None:
                raise ValueError(
                    "give gradient, or error and weight_gradient, not both"
                )
            for name in ("error", "weight_gradient"):
                object.__setattr__(self, name, self.gradient)
            object.__setattr__(self, "gradient", None)
        missing = [name for name in RoleLevels._fields if getattr(self, name) is None]
        if missing:
            raise ValueError(
                f"roles missing: {', '.join(missing)}; give a schedule, a level, or 'float32' for each "
                "(gradient stands for error and weight_gradient)"
            )
        lengths = {s.total_steps for s in self.parts if isinstance(s, Schedule)}
        if not lengths:
            raise ValueError(
                "one role at least needs a schedule, which says how many steps there are"
            )
        if len(lengths) > 1:
            raise ValueError(
                f"schedules of roles must have one length, got {sorted(lengths)} steps"
            )
        for name in RoleLevels._fields:
            schedule = _schedule(name, getattr(self, name), *lengths)
            object.__setattr__(self, name, schedule)

        q_min = min(self.parts.weight.q_min, self.parts.activation.q_min)
        q_max = max(self.parts.weight.q_max, self.parts.activation.q_max)
        set_range(self, q_min, q_max, *lengths)

    @property
    def parts(self) -> RoleLevels:
        """The schedule of every role."""
        return RoleLevels(*(getattr(self, name) for name in RoleLevels._fields))

    @property
    def highest(self) -> RoleLevels:
        """The highest level of every role."""
        return RoleLevels(*(s.q_max for s in self.parts))

    def values(self) -> Array:
        """Return the bits of activations before rounding, shape (total_steps,)."""
        return self.parts.activation.values()

    def levels(self, q_grad: int | None = None) -> RoleLevels:
        """Return the levels of every step and role; ``q_grad`` must be None: gradients have schedules of their own."""
        if q_grad is not None:
            raise ValueError(
                f"gradients have schedules of their own here; leave q_grad out, got {q_grad}"
            )
        return RoleLevels(*(s.bits() for s in self.parts))

    def _relative_cost(self, q_max: int, q_grad: int | None, *priced: Any) -> float:
        if q_grad is not None:
            # checked only: gradients have schedules of their own
            check_bits("q_grad", q_grad)
        prices, baseline_price = role_prices(self.levels(), q_max, *priced)
        return float(prices.mean() / baseline_price)

    def noise_exposure(self, q_max: int | None = None) -> float:
        """Return the mean of 4**-q over steps, weights and activations, relative to static ``q_max``."""
        top = self.q_max if q_max is None else q_max
        forward_schedules = self.parts[:2]
        exposures = [s.noise_exposure(top) for s in forward_schedules]
        return sum(exposures) / len(exposures)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; ``schedule_from_dict`` gives an equal schedule."""
        return {
            "kind": self.kind,
            **{name: s.to_dict() for name, s in self.parts._asdict().items()},
        }


def _schedule(name: str, part: Any, total_steps: int) -> Schedule:
    if isinstance(part, (RoleSchedules, LayeredSchedule)):
        raise ValueError(
            f"{name} has one schedule, the same in all layers; got {part!r}"
        )
    if isinstance(part, Schedule):
        return part
    if isinstance(part, str) and part != "float32":
        raise ValueError(f"{name} is a schedule, a level, or 'float32', got {part!r}")
    level = (
        FLOAT32_LEVEL if part == "float32" else check_int(f"level of {name}", part, 1)
    )
    return StaticSchedule(level, total_steps)


def _from_dict(**roles: Mapping[str, Any]) -> RoleSchedules:
    schedules = {name: schedule_from_dict(part) for name, part in roles.items()}
    return RoleSchedules(**schedules)


SCHEDULE_KINDS["roles"] = _from_dict
