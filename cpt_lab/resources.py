"""Resources that this process may use: CPU cores, memory, and shared memory.

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
    """Warning about a property of this machine that costs time or safety, with a remedy."""


def share_with(runs: int) -> None:
    """Set the number of runs that share the machine: each may use an equal part."""
    global _runs
    _runs = max(1, runs)


def existing_cores() -> int:
    """Return how many cores the machine has."""
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Return how many cores this process may use, at least 1, within its CPU affinity and quotas."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quotas = [_cores(group) for group in _groups("cpu")]
    return max(1, math.floor(min([cores, *quotas]) / _runs))


def usable_memory() -> int:
    """Return how much memory this process may use, in bytes, within its quotas."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    quotas = [_bytes(group) for group in _groups("memory")]
    return int(min([total, *quotas]) / _runs)


def shared_memory() -> int | None:
    """Return how much shared memory this process may use, in bytes; None without a limit."""
    if not SHARED.is_dir():
        return None
    status = os.statvfs(SHARED)
    return status.f_frsize * min(status.f_bavail, status.f_blocks // _runs)


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
    """Return the CPU quota of a control group, in cores; infinite without one."""
    quota = _read(group / "cpu.max")  # version 2
    if not quota:  # version 1
        quota = _read(group / "cpu.cfs_quota_us") + _read(group / "cpu.cfs_period_us")
    granted, *period = quota.split() or ["max"]
    if granted in ("max", "-1"):
        return math.inf
    return int(granted) / int(period[0])


def _bytes(group: Path) -> float:
    """Return the memory limit of a control group, in bytes; infinite without one."""
    granted = (
        _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
    ).strip()
    return math.inf if granted in ("", "max") else int(granted)


def _read(path: Path) -> str:
    """Return the text of a file; "" if it does not exist."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # not this system, not this version, or not in this group
        return ""
