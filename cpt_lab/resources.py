"""What this process may use of the machine: cores, memory, and the memory that it shares with its children.

A batch system or a container grants less than the machine has: by the cores that a process may run on, or by quotas of
its control groups (cgroups, version 2 or 1).
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

PROCESS_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
SHARED = Path("/dev/shm")

# The oldest NVIDIA drivers on Linux by the version of CUDA, from NVIDIA's table of compatibility.
DRIVERS = {"11": 450, "12": 525, "13": 580}

_runs = 1


class MachineWarning(UserWarning):
    """Something of this machine costs time, safety or knowledge; the message says what, and how to mend it."""


def share_with(runs: int) -> None:
    """Say that so many runs, this process's included, share the machine from now on: each has its part of it."""
    global _runs
    _runs = max(1, runs)


def existing_cores() -> int:
    """Return how many cores the machine has."""
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Return how many cores this process may keep busy, at least 1: its part of those it may run on and its quotas."""
    there = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    return max(1, math.floor(min([there, *map(_cores, _groups("cpu"))]) / _runs))


def usable_memory() -> int:
    """Return its part of the machine's memory, or of what its control groups grant, in bytes."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min([there, *map(_bytes, _groups("memory"))]) / _runs)


def shared_memory() -> int | None:
    """Return its part of the memory that processes can share, or what is free of it, in bytes; None without a limit."""
    if not SHARED.is_dir():
        return None
    found = os.statvfs(SHARED)
    return found.f_frsize * min(found.f_bavail, found.f_blocks // _runs)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, of either version, from the inner ones out.

    A container may not see the folder that its own group has on the host: then the outermost is the container's.
    """
    for line in _read(PROCESS_GROUPS).splitlines():
        _, names, inner = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        for top in (
            (GROUPS / names, GROUPS / controller)
            if names
            else (GROUPS, GROUPS / "unified")
        ):
            place = top / inner.strip("/")
            yield from (
                group for group in (place, *place.parents) if group.is_relative_to(top)
            )


def _cores(group: Path) -> float:
    quota = _read(group / "cpu.max") or _read(group / "cpu.cfs_quota_us") + _read(
        group / "cpu.cfs_period_us"
    )
    granted, *period = quota.split() or ["max"]
    return math.inf if granted in ("max", "-1") else int(granted) / int(period[0])


def _bytes(group: Path) -> float:
    granted = (
        _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
    ).strip()
    return math.inf if granted in ("", "max") else int(granted)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # not this system, not this version, or not in this group
        return ""
