"""Resources granted by batch systems and containers, from simulated control groups and this process."""

import os
from types import SimpleNamespace

import pytest

from cpt_lab import resources

GB = 2**30
NO_LIMIT = "9223372036854771712\n"  # of version 1


def version_1(folder, quota):
    """Return the files of a group that give cores, as version 1 writes them."""
    files = {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "100000\n"}
    return {f"{folder}/{name}": text for name, text in files.items()}


# /proc/self/cgroup, the files under /sys/fs/cgroup -> cores and gigabytes of a machine with 8 cores and 64 GB
GRANTED = {
    "no control groups": ("", {}, 8, 64),
    "version 2, nothing limited": (
        "0::/\n",
        {"cpu.max": "max 100000\n", "memory.max": "max\n"},
        8,
        64,
    ),
    "a container of version 2": (
        "0::/\n",
        {"cpu.max": "250000 100000\n", "memory.max": f"{4 * GB}\n"},
        2,
        4,
    ),
    "less than a core": ("0::/\n", {"cpu.max": "50000 100000\n"}, 1, 64),
    "more than the machine has": (
        "0::/\n",
        {"cpu.max": "3200000 100000\n", "memory.max": f"{500 * GB}\n"},
        8,
        64,
    ),
    "the tightest of nested groups": (
        "0::/jobs/17/step\n",
        {
            "jobs/cpu.max": "600000 100000\n",
            "jobs/17/cpu.max": "300000 100000\n",
            "jobs/17/step/cpu.max": "max 100000",
            "jobs/memory.max": f"{8 * GB}\n",
            "jobs/17/step/memory.max": f"{16 * GB}\n",
        },
        3,
        8,
    ),
    "version 1": (
        "9:name=systemd:/\n5:memory:/job\n4:cpu,cpuacct:/job\n",
        {
            **version_1("cpu,cpuacct/job", 400000),
            **version_1("cpu,cpuacct", -1),
            "memory/job/memory.limit_in_bytes": f"{2 * GB}\n",
            "memory/memory.limit_in_bytes": NO_LIMIT,
        },
        4,
        2,
    ),
    "a container of version 1, in which its group on the host cannot be seen": (
        "5:memory:/docker/0123\n4:cpuacct,cpu:/docker/0123\n",
        {
            **version_1("cpu", 200000),
            "memory/memory.limit_in_bytes": f"{3 * GB}\n",
        },
        2,
        3,
    ),
    "both versions": (
        "1:cpu:/\n0::/job\n",
        {**version_1("cpu", -1), "unified/job/cpu.max": "500000 100000"},
        5,
        64,
    ),
}


@pytest.mark.parametrize("case", GRANTED)
def test_usable_cores_and_memory_follow_control_groups(case, tmp_path, monkeypatch):
    groups, files, cores, gigabytes = GRANTED[case]
    for name, text in {"../own": groups, **files}.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GB // 4096}
    monkeypatch.setattr(resources, "PROCESS_GROUPS", tmp_path / "own")
    monkeypatch.setattr(resources, "GROUPS", tmp_path / "sys")
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda process: set(range(8)), raising=False
    )
    monkeypatch.setattr(os, "sysconf", pages.get)
    monkeypatch.setattr(resources, "_runs", 1)
    for runs in (1, 3):
        resources.share_with(runs)
        assert resources.usable_cores() == max(1, cores // runs)
        assert resources.usable_memory() == gigabytes * GB // runs


def test_shared_memory_is_limited_by_share(tmp_path, monkeypatch):
    disk = SimpleNamespace(f_frsize=10, f_bavail=40, f_blocks=64)
    monkeypatch.setattr(resources, "SHARED", tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    monkeypatch.setattr(resources, "_runs", 1)
    assert resources.shared_memory() == 400
    resources.share_with(4)
    assert resources.shared_memory() == 160
    monkeypatch.setattr(resources, "SHARED", tmp_path / "nowhere")
    assert resources.shared_memory() is None
