"""Make a schedule by name, or from the description that ``to_dict`` gave."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from cpt_core import extensions
from cpt_core.checks import choose, declared, shown, whole
from cpt_core.schedules.deficit import AdjustedSchedule, DeficitSchedule, DelayedSchedule
from cpt_core.schedules.profiles import PROFILES, SCHEDULES, STATIC, Profile
from cpt_core.schedules.schedule import (
    FLOAT32,
    CyclicSchedule,
    Schedule,
    ShortCycleWarning,
    StaticSchedule,
    TableSchedule,
)

DELAYS_AT = ("q_max", "float32")


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
    delay_at: str = "q_max",
) -> Schedule:
    """Make one of the paper's ten schedules, another of ``SCHEDULES``, or the static baseline, by name.

    Args:
        name: LR LT CR CT RR RTV RTH ER ETV ETH, or STATIC.
        q_max: highest bits, reached at the last of ``total_steps`` optimizer steps.
        q_min: lowest bits; needed by all but STATIC, which has none (give ``q_max`` or nothing).
        n_cycles, cycle_rule: see ``CyclicSchedule``.
        profile: another constant for the same profile, such as ``Rex(d=0.5)``; the result has no ``name``.
        delay: share of the steps that are held at ``q_max`` first; the cycles share the others. A delay makes training
            dearer; ``solve_schedule`` delays at a given cost.
        delay_at: "q_max", or "float32": these steps are not quantised at all.

    Raises:
        ValueError: for an unknown name or values that make no schedule.

    Paper: sections 3.1, 3.2.
    """
    choose("schedule", name, (*SCHEDULES, STATIC))
    if name == STATIC:
        if q_min not in (None, q_max) or profile is not None or delay:
            raise ValueError(
                f"STATIC has one precision, no profile and nothing to delay: q_min is q_max = {q_max} or left out; "
                f"got {q_min=}, {profile=}, {delay=}"
            )
        return StaticSchedule(q_max, total_steps)
    if q_min is None:
        raise ValueError(f"{name} needs q_min, an integer between 1 and q_max = {q_max}")
    entry = SCHEDULES[name]
    standard = PROFILES[entry.profile]()
    if profile is not None and type(profile) is not type(standard):
        raise ValueError(f"{name} has a {entry.profile} profile, got {profile!r}; use CyclicSchedule for other mixes")
    chosen = standard if profile is None else profile
    hold = delay_steps(delay, total_steps)
    level = {"q_max": None, "float32": FLOAT32}[choose("delay_at", delay_at, DELAYS_AT)]
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
    if not hold:
        return schedule
    return DelayedSchedule(schedule, hold, level)


def delay_steps(delay: float, total_steps: int) -> int:
    """Return how many steps a delay, a share of the training, takes; ValueError unless 0 <= delay < 1."""
    if isinstance(delay, bool) or not isinstance(delay, (int, float)) or not 0 <= delay < 1:
        raise ValueError(f"delay is a share of the training, 0 <= delay < 1; got {delay!r}")
    steps = round(delay * whole("total_steps", total_steps))
    if steps and steps == total_steps:
        raise ValueError(f"a delay of {delay} leaves none of {total_steps} steps to cycle in")
    return steps


def schedule_from_dict(description: Mapping[str, Any]) -> Schedule:
    """Rebuild a schedule from ``to_dict()``; raises ValueError for what describes none.

    A schedule that does not end at q_max warned when it was made; it is rebuilt without another warning.
    """
    declared(schedule_from_dict, locals())
    try:
        return _made(dict(description))
    except (KeyError, TypeError) as error:
        raise ValueError(f"description must be what to_dict() returned, got {shown(description)}: {error!r}") from None


def _made(d: dict[str, Any]) -> Schedule:
    kind = choose("kind", d.pop("kind"), (*KINDS, *OPTIONAL_KINDS))
    if kind in OPTIONAL_KINDS:
        return extensions.load(kind).from_dict(d)
    return KINDS[kind](d)


def _cyclic(d: dict[str, Any]) -> Schedule:
    parameters = dict(d.pop("profile"))
    profile = PROFILES[choose("profile", parameters.pop("name", None), PROFILES)](**parameters)
    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        return CyclicSchedule(profile=profile, **d)


def _deficit(d: dict[str, Any]) -> Schedule:
    return DeficitSchedule(**{**d, "windows": tuple(tuple(window) for window in d["windows"])})


def _delayed(d: dict[str, Any]) -> Schedule:
    inner: Any = schedule_from_dict(d["schedule"])
    return DelayedSchedule(inner, d["hold"], d.get("level"))


def _adjusted(d: dict[str, Any]) -> Schedule:
    inner: Any = schedule_from_dict(d["schedule"])
    return AdjustedSchedule(inner, tuple(tuple(change) for change in d["changes"]))


# kind of a schedule -> what makes it from its description
KINDS: dict[str, Callable[[dict[str, Any]], Schedule]] = {
    "static": lambda d: StaticSchedule(**d),
    "cyclic": _cyclic,
    "table": lambda d: TableSchedule(tuple(tuple(run) for run in d["runs"])),
    "deficit": _deficit,
    "adjusted": _adjusted,
    "delayed": _delayed,
}
OPTIONAL_KINDS = ("layered", "roles")  # see ``cpt_core.extensions``
