"""A training run as a value: everything that decides its result, with a key to store the result under.

>>> from cpt_lab.experiments.registry import recipe
>>> spec = run_spec(recipe("demo"), "CR", q_max=8, seed=0)
>>> RunSpec.from_dict(spec.to_dict()) == spec
True
"""

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Self

from cpt_core.schedules.make import make_schedule, schedule_from_dict
from cpt_core.schedules.profiles import STATIC, SUITE
from cpt_core.schedules.schedule import Schedule
from cpt_core.validation import check_bits, check_choice, check_int
from cpt_extras.search.custom_schedules import FunctionSchedule
from cpt_extras.search.layered import LayeredSchedule
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.schema import Recipe

SPEC_VERSION = 1


class NotMeasuredError(ValueError):
    """The runs of a grid cannot be made yet: what their schedules rest on has not been measured."""


def key_of(spec: dict[str, Any]) -> str:
    """Return the key of a spec in its stored JSON form, of any version."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RunSpec:
    """One training run. All fields are resolved, so that a changed default changes no old key.

    Attributes:
        recipe: data, model, optimizer.
        schedule: forward bits of every step; a ``LayeredSchedule`` where layers differ.
        q_max: bits of the static baseline the run is compared with, and of its evaluation.
        q_grad: gradient bits; None where the schedule is of roles, ``RoleSchedules``.
        seed: of initial weights, data order, augmentation and rounding noise; arms of one seed share the first three.
        arm: what the run is called in figures, such as "CR" or "static 8".
        scale: "smoke", "demo", "paper".
        preset: "ours" or "authors".
    """

    recipe: Recipe
    schedule: Schedule
    q_max: int
    q_grad: int | None
    seed: int
    arm: str
    scale: str
    preset: str = "ours"

    def __post_init__(self) -> None:
        """Check all values; replace a function schedule by a table of its bits."""
        for name, value in (
            ("q_max", check_bits("q_max", self.q_max)),
            (
                "q_grad",
                None if self.q_grad is None else check_bits("q_grad", self.q_grad),
            ),
            ("seed", check_int("seed", self.seed, 0)),
        ):
            object.__setattr__(
                self, name, value
            )  # such as NumPy's, which have no JSON form
        EXPERIMENTS[check_choice("task", self.recipe.task, EXPERIMENTS)].check_dataset(
            self.recipe.dataset
        )
        parts = (
            self.schedule.parts
            if isinstance(self.schedule, LayeredSchedule)
            else (((), self.schedule, 0),)
        )
        if any(
            isinstance(s, FunctionSchedule) for _, s, _ in parts
        ):  # a spec that is read again is equal
            object.__setattr__(
                self, "schedule", schedule_from_dict(self.schedule.to_dict())
            )
        if self.schedule.total_steps != self.recipe.steps:
            raise ValueError(
                f"the schedule has {self.schedule.total_steps} steps, the recipe {self.recipe.steps}"
            )

    @property
    def relative_cost(self) -> float:
        """Training cost relative to static ``q_max``, gradients too, in bit operations; on a ladder by its formats."""
        return self.schedule.relative_cost(
            self.q_grad, self.q_max, ladder=self.recipe.formats
        )

    def to_dict(self, schedule_json: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the canonical JSON form; ``schedule_json`` is that of the schedule, if it is known."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = {
            "recipe": self.recipe.to_dict(),
            "schedule": schedule_json or self.schedule.to_dict(),
        }
        return {"version": SPEC_VERSION, **values, **parts}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        """Rebuild a spec; ValueError for another version."""
        if d.get("version") != SPEC_VERSION:
            raise ValueError(f"spec version {d.get('version')!r} is not {SPEC_VERSION}")
        recipe: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in d["recipe"].items()
        }
        values = {f.name: d[f.name] for f in fields(cls)}
        values["recipe"] = EXPERIMENTS[recipe["task"]].recipe(**recipe)
        values["schedule"] = schedule_from_dict(d["schedule"])
        return cls(**values)

    @cached_property
    def key(self) -> str:
        """Sixteen hexadecimal digits that identify the run."""
        return key_of(self.to_dict(_schedule_json(self.schedule)))


@lru_cache(maxsize=512)
def _schedule_json(schedule: Schedule) -> dict[str, Any]:
    """Return the JSON form of a schedule, which many specs share; it must not be changed."""
    return schedule.to_dict()


def run_spec(
    recipe: Recipe,
    arm: str,
    *,
    q_max: int,
    seed: int,
    scale: str = "demo",
    preset: str = "ours",
    q_grad: int | None = None,
) -> RunSpec:
    """Make the spec of an arm: a schedule's name, or "static 5" for static training at 5 bits.

    Static arms keep the gradient bits of the schedules they are compared with (``q_max``). ValueError for an unknown
    arm.
    """
    kind, _, bits = arm.partition(" ")
    if kind == "static":
        if not bits.isdecimal():
            raise ValueError(f"a static arm is written 'static 5', got {arm!r}")
        schedule = make_schedule(STATIC, q_max=int(bits), total_steps=recipe.steps)
    else:
        cycles: dict[str, Any] = {
            "n_cycles": recipe.n_cycles,
            "cycle_rule": recipe.cycle_rule,
        }
        schedule = make_schedule(
            arm, q_min=recipe.q_min, q_max=q_max, total_steps=recipe.steps, **cycles
        )
    return RunSpec(recipe, schedule, q_max, q_grad or q_max, seed, arm, scale, preset)


def savings_of(arm: str) -> str:
    """Return the paper's group of an arm, "large", "medium" or "small"; "static" or "own" for arms that have none."""
    if arm in SUITE:
        return SUITE[arm].savings
    return "static" if arm.startswith("static ") else "own"
