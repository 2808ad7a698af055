"""Construction of schedules, by name (``make_schedule``) or from a stored description (``schedule_from_dict``)."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from cpt_core import extensions
from cpt_core.schedules.deficit import DeficitSchedule
from cpt_core.schedules.profiles import PROFILES, SCHEDULES, STATIC, Profile
from cpt_core.schedules.schedule import (
    CyclicSchedule,
    Schedule,
    ShortCycleWarning,
    StaticSchedule,
)
from cpt_core.validation import check_choice, check_types, short_repr

ARGUMENT_ORDER = "name, q_min, q_max, total_steps, n_cycles"


def make_schedule(
    name: str,
    q_min: int | None = None,
    q_max: int | None = None,
    total_steps: int | None = None,
    n_cycles: int = 8,
    *,
    cycle_rule: str = "exact",
    profile: Profile | None = None,
) -> Schedule:
    """Return the schedule of a name: one of the paper's ten, another of ``SCHEDULES``, or the static baseline.

    Args:
        name: LR LT CR CT RR RTV RTH ER ETV ETH, or STATIC.
        q_min: lowest bits; needed by all but STATIC, which has none (give ``q_max`` or nothing).
        q_max: highest bits, reached at the last step.
        total_steps: optimizer steps of the training.
        n_cycles: number of cycles, see ``CyclicSchedule``.
        cycle_rule: rule for the length of a cycle, see ``CyclicSchedule``.
        profile: the profile with another constant, such as ``Rex(d=0.5)``; the schedule then has no ``name``.

    Raises:
        ValueError: for an unknown name or invalid values.
        TypeError: without ``q_max`` or ``total_steps``.

    Paper: sections 3.1, 3.2.

    >>> make_schedule("CR", 3, 8, 100) == make_schedule("CR", q_min=3, q_max=8, total_steps=100, n_cycles=8)
    True
    """
    check_choice("schedule", name, (*SCHEDULES, STATIC))
    if q_max is None or total_steps is None:
        required = {"q_max": q_max, "total_steps": total_steps}
        missing = [argument for argument, value in required.items() if value is None]
        raise TypeError(
            f"make_schedule needs {' and '.join(missing)}; the order is {ARGUMENT_ORDER}"
        )
    if name == STATIC:
        if q_min not in (None, q_max) or profile is not None:
            raise ValueError(
                f"STATIC has one precision and no profile: q_min is q_max = {q_max} or left out; "
                f"got {q_min=}, {profile=}; in order: make_schedule('STATIC', None, q_max, total_steps)"
            )
        return StaticSchedule(q_max, total_steps)
    if q_min is None:
        raise ValueError(
            f"{name} needs q_min, an integer between 1 and q_max = {q_max}"
        )
    entry = SCHEDULES[name]
    standard = PROFILES[entry.profile]()
    if profile is not None and type(profile) is not type(standard):
        raise ValueError(
            f"{name} has a {entry.profile} profile, got {profile!r}; use CyclicSchedule for other mixes"
        )
    used_profile = standard if profile is None else profile
    return CyclicSchedule(
        profile=used_profile,
        q_min=q_min,
        q_max=q_max,
        total_steps=total_steps,
        n_cycles=n_cycles,
        triangular=entry.triangular,
        mirror=entry.mirror,
        cycle_rule=cycle_rule,
        name=name if used_profile == standard else "",
    )


def schedule_from_dict(description: Mapping[str, Any]) -> Schedule:
    """Rebuild a schedule from the description that ``to_dict()`` returned.

    A schedule that does not end at q_max warned when it was made; it is rebuilt without another warning.

    Raises:
        ValueError: for anything else.
    """
    check_types(schedule_from_dict, locals())
    try:
        fields = dict(description)
        kind = fields.pop("kind")
        extensions.load_optional(kind)
        return SCHEDULE_KINDS[check_choice("kind", kind, SCHEDULE_KINDS)](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"description must be what to_dict() returned, got {short_repr(description)}: {error!r}"
        ) from None


def _cyclic_from_dict(profile: dict[str, Any], **fields: Any) -> Schedule:
    constants = dict(profile)
    name = constants.pop("name", None)
    extensions.load_optional(name)
    curve = PROFILES[check_choice("profile", name, PROFILES)](**constants)
    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        return CyclicSchedule(curve, **fields)


# kind of a schedule -> function that builds it from its description; optional parts add their kinds
SCHEDULE_KINDS: dict[str, Callable[..., Schedule]] = {
    "static": StaticSchedule,
    "cyclic": _cyclic_from_dict,
    "deficit": DeficitSchedule,
}
