"""Machine checks of ``cpt doctor``: state, cost and remedy of each."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from helpers import refused, specs_of

from cpt_extras import files
from cpt_extras.kernels.cpp import build, spare_folders
from cpt_lab import doctor, provenance, resources
from cpt_lab.doctor import Check, MachineError, MachineWarning
from cpt_lab.provenance import Commit
from cpt_lab.sweeps.sweep import run_grid

NAMES = (
    "kernels git locks disk /dev/shm temporary processes cores memory GPU user".split()
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Reset the checks, as in a new process."""
    monkeypatch.setattr(doctor, "_checked", set())
    monkeypatch.setattr(doctor, "_warned", set())
    monkeypatch.setattr(files, "_warned", False)


def test_examine_runs_every_check_and_cleans_up(tmp_path):
    checks = doctor.examine(tmp_path / "no" / "runs yet")
    assert [check.name for check in checks] == NAMES
    assert {check.state for check in checks} <= {"fine", "degraded", "refused"}
    assert all(check.text for check in checks)
    assert all(check.remedy for check in checks if check.state != "fine")
    assert list(tmp_path.iterdir()) == []
    lines = [str(check) for check in checks]
    assert all(
        line.split()[:2] == [check.name, check.state]
        for line, check in zip(lines, checks, strict=True)
    )


def test_examine_reports_failing_check_in_one_line(monkeypatch, tmp_path):
    def fail():
        raise KeyError("odd machine")

    monkeypatch.setattr(doctor, "find_commit", fail)
    found = {check.name: check for check in doctor.examine(tmp_path)}["git"]
    assert (
        found.state,
        "this check failed: KeyError: 'odd machine'" in found.text,
    ) == ("degraded", True)


# --- locks and disk ------------------------------------------------------------------------------


def test_check_locks_uses_second_process(tmp_path, monkeypatch):
    assert doctor.check_locks(tmp_path).state == "fine"
    monkeypatch.setattr(
        "fcntl.flock", lambda *_: None
    )  # this process believes that it has the lock
    found = doctor.check_locks(tmp_path)
    assert found.state == "refused"
    assert "excludes nobody" in found.text
    assert "CPT_RUNS_DIR" in found.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("excludes", [True, False])
def test_check_locks_forks_without_python_executable(excludes, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(subprocess, "run", refuse)
    if not excludes:
        monkeypatch.setattr("fcntl.flock", lambda *_: None)
    assert doctor.check_locks(tmp_path).state == ("fine" if excludes else "refused")


@pytest.mark.parametrize(
    ("number", "state", "words"),
    [
        (errno.ENOLCK, "refused", "No locks available"),
        (errno.EOPNOTSUPP, "refused", "Operation not supported"),
        (errno.ENOSYS, "degraded", "files stand for them"),
    ],
)
def test_check_locks_names_system_error(number, state, words, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    found = doctor.check_locks(tmp_path)
    assert (found.state, words in found.text) == (state, True)


@pytest.mark.parametrize(
    ("mount", "state"),
    [
        ("/ rw - ext4 /dev/sda rw", "fine"),
        ("{folder} rw,nosuid - fuse.sshfs me@there:/ rw,user_id=0", "degraded"),
        ("{folder} rw - nfs4 server:/ rw,vers=4.2,local_lock=none", "fine"),
        ("{folder} rw - nfs server:/ rw,vers=3,nolock,local_lock=all", "degraded"),
        ("{folder} rw - lustre 10.0.0.1@tcp:/fs rw,flock", "fine"),
        ("{folder} rw - lustre 10.0.0.1@tcp:/fs rw,localflock", "degraded"),
        ("{folder}/deeper rw - fuse.sshfs me@there:/ rw", "fine"),
    ],
)
def test_check_locks_detects_machine_local_locks(mount, state, tmp_path, monkeypatch):
    folder = tmp_path / "a folder"
    folder.mkdir()
    place = str(folder).replace(" ", "\\040")
    lines = [
        "20 1 8:1 / / rw - ext4 /dev/sda rw",
        f"21 20 0:5 / {mount.format(folder=place)}",
    ]
    monkeypatch.setattr(doctor, "MOUNTS", tmp_path / "mountinfo")
    doctor.MOUNTS.write_text("\n".join(lines))
    found = doctor.check_locks(folder)
    assert found.state == state
    assert (
        state == "fine"
        or "give every machine a CPT_RUNS_DIR of its own" in found.remedy
    )


def test_check_disk_reports_free_space(tmp_path, monkeypatch):
    assert doctor.check_disk(tmp_path).state == "fine"
    assert doctor.check_disk(tmp_path, min_free_bytes=2**60).state == "refused"
    monkeypatch.setattr(doctor, "LITTLE_DISK", 2**60)
    assert doctor.check_disk(tmp_path).state == "degraded"
    assert doctor.check_disk(Path("/proc/nope")).state == "refused"


def test_check_disk_detects_missing_fsync(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    found = doctor.check_disk(tmp_path)
    assert (found.state, "power cut" in found.text) == ("degraded", True)
    with warnings.catch_warnings(action="error"):  # it has been said
        files.write_text(tmp_path / "file", "text")


# --- kernels and git -----------------------------------------------------------------------------


def test_check_kernels_reports_location_and_cost(tmp_path, monkeypatch):
    monkeypatch.delenv("CPT_KERNELS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(spare_folders, "SPARE_DIRS", ())
    monkeypatch.setenv("CPT_KERNELS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "compiler", lambda: "/usr/bin/g++")
    assert "/usr/bin/g++ builds them on first use" in doctor.check_kernels().text
    (tmp_path / "cache" / build.library_name()).touch()
    assert doctor.check_kernels()[:3] == (
        "kernels",
        "fine",
        f"built, in {tmp_path / 'cache'}",
    )
    monkeypatch.setenv("CPT_KERNELS_DIR", "/proc/nope/kernels")
    found = doctor.check_kernels()
    assert (
        found.state,
        "lost when it is emptied: /proc/nope/kernels cannot" in found.text,
    ) == ("degraded", True)
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert "there is no C++ compiler" in doctor.check_kernels().text
    tmp_path.chmod(0o777)  # now nothing there is safe
    found = doctor.check_kernels()
    assert (found.state, "every process builds" in found.text) == ("degraded", True)
    monkeypatch.setenv("CPT_KERNELS", "reference")
    assert doctor.check_kernels().state == "fine"


def test_check_kernels_falls_back_to_store_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("CPT_KERNELS", raising=False)
    monkeypatch.setattr(build, "compiler", lambda: "/usr/bin/g++")
    (tmp_path / "temporary").mkdir(mode=0o777)
    (tmp_path / "temporary").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(spare_folders, "SPARE_DIRS", ())
    monkeypatch.setenv("CPT_KERNELS_DIR", "/proc/nope/kernels")
    assert doctor.check_kernels(tmp_path / "temporary" / "unsafe").state == "degraded"
    assert os.environ["CPT_KERNELS_DIR"] == "/proc/nope/kernels"
    assert (
        str(tmp_path / "runs")
        in doctor.check_kernels(tmp_path / "runs" / "kernels").text
    )
    assert os.environ["CPT_KERNELS_DIR"] == str(
        tmp_path / "runs" / "kernels"
    )  # which the runs' processes get


@pytest.mark.parametrize(
    ("commit", "state", "words"),
    [
        (Commit("0123456789abcdef", False), "fine", "at commit 0123456789"),
        (Commit("0123456789abcdef", True), "fine", "tracked files differ"),
        (Commit(None, None, "git is not installed"), "degraded", "install git"),
        (
            Commit(None, None, "detected dubious ownership in x"),
            "degraded",
            "config --global --add safe.directory",
        ),
        (Commit(None, None, "/x is no repository: no .git"), "degraded", "use a clone"),
        (Commit(None, None, "something else"), "degraded", "something else"),
    ],
)
def test_check_git_gives_reason_without_commit(commit, state, words, monkeypatch):
    monkeypatch.setattr(doctor, "find_commit", lambda: commit)
    found = doctor.check_git()
    assert (found.state, words in found.words) == (state, True), found


def test_check_git_accepts_wheel(monkeypatch):
    monkeypatch.setattr(provenance, "CHECKOUT", None)
    monkeypatch.setattr(doctor, "CHECKOUT", None)
    assert doctor.check_git().state == "fine"


# --- the rest ------------------------------------------------------------------------------------


def test_check_temporary_names_unusable_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert "TMPDIR=/nowhere is not there" in doctor.check_temporary().text
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    found = doctor.check_temporary()
    assert (found.state, "too long a path" in found.text) == ("refused", True)
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nope")
    assert doctor.check_temporary().state == "refused"


NVRM = "NVRM version: NVIDIA UNIX {}Kernel Module{}  {}  Release Build\nGCC version: gcc 12.3\n"


@pytest.mark.parametrize(
    ("text", "cuda", "state", "words"),
    [
        (None, "13.2", "fine", "no NVIDIA driver"),
        (
            NVRM.format("x86_64 ", "", "535.104.05"),
            "13.2",
            "degraded",
            "too old for torch's CUDA 13.2, which needs 580",
        ),
        (
            NVRM.format("Open ", " for x86_64", "580.65.06"),
            "13.2",
            "fine",
            "driver 580.65.06",
        ),
        (
            NVRM.format("x86_64 ", "", "535.104.05"),
            "12.6",
            "fine",
            "torch for CUDA 12.6",
        ),
        (
            NVRM.format("x86_64 ", "", "470.82.01"),
            "12.6",
            "degraded",
            "which needs 525",
        ),
        (
            NVRM.format("x86_64 ", "", "580.65.06"),
            None,
            "degraded",
            "built for the CPU",
        ),
    ],
)
def test_check_gpu_compares_driver_and_torch(
    text, cuda, state, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    if text is not None:
        doctor.DRIVER.write_text(text)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = doctor.check_gpu()
    assert (found.state, words in found.text) == (state, True), found
    assert ("--index-url" in found.remedy) == (state == "degraded" and cuda is not None)


def test_check_user_names_missing_home_or_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor.check_user().state == "fine"
    monkeypatch.setattr(os, "geteuid", lambda: 987654)
    monkeypatch.setenv("HOME", "/proc/nope")
    found = doctor.check_user()
    assert (found.state, "number 987654 has no home" in found.text) == (
        "degraded",
        True,
    )


def test_check_cores_and_memory_report_granted_resources(monkeypatch):
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    monkeypatch.setattr(doctor, "existing_cores", lambda: 64)
    assert "2 of 64" in doctor.check_cores().text
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert "OMP_NUM_THREADS=2" in doctor.check_cores().remedy
    monkeypatch.setattr(doctor, "usable_memory", lambda: 10**9)
    assert doctor.check_memory().state == "degraded"
    monkeypatch.setattr(doctor, "shared_memory", lambda: 64 * 2**20)
    assert "--ipc=host" in doctor.check_shared_memory().remedy
    monkeypatch.setattr(doctor, "shared_memory", lambda: None)
    assert doctor.check_shared_memory().state == "fine"
    assert resources.existing_cores() >= resources.usable_cores()


def test_check_processes_starts_python(tmp_path, monkeypatch):
    assert doctor.check_processes().state == "fine"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert doctor.check_processes().state == "degraded"


# --- before a sweep ------------------------------------------------------------------------------


def test_check_sweep_warns_once_and_refuses_repeatedly(tmp_path, monkeypatch):
    monkeypatch.setattr(
        doctor,
        "check_git",
        lambda: Check("git", "degraded", "no commit", "install git"),
    )
    monkeypatch.setattr(provenance, "_has_warned_of_commit", False)
    with pytest.warns(MachineWarning, match="git: no commit; install git") as said:
        doctor.check_sweep(tmp_path / "a")
    assert len(said) == 1
    assert provenance._has_warned_of_commit, "rows do not say it again"
    with warnings.catch_warnings(action="error"):
        doctor.check_sweep(tmp_path / "a")
        doctor.check_sweep(tmp_path / "b")
    monkeypatch.setattr(
        doctor, "check_locks", lambda folder: Check("locks", "fine", "of no interest")
    )
    for _ in range(2):
        refused(
            "disk: .*cannot be written to",
            doctor.check_sweep,
            Path("/proc/nope"),
            error=MachineError,
        )
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nope")
    doctor.check_sweep(tmp_path / "d", starts=False)
    refused(
        "temporary: there is no folder",
        doctor.check_sweep,
        tmp_path / "d",
        error=MachineError,
    )


@pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning")
def test_run_grid_checks_machine_before_runs(tmp_path, monkeypatch):
    (spec,), store = specs_of("CR"), tmp_path / "rows.jsonl"
    monkeypatch.setattr(
        doctor,
        "check_locks",
        lambda folder: Check("locks", "refused", f"none in {folder}"),
    )
    refused(
        f"locks: none in {tmp_path}; `cpt doctor`",
        run_grid,
        [spec],
        store,
        workers=0,
        error=MachineError,
    )
    assert not store.exists()
    monkeypatch.undo()
    (row,) = run_grid([spec], store, workers=0)
    assert row["status"] == "ok"
    monkeypatch.setattr(
        doctor, "check_locks", lambda folder: pytest.fail("there is nothing to be run")
    )
    monkeypatch.setattr(doctor, "_checked", set())
    run_grid([spec], store, workers=0)


def test_doctor_command_exits_1_on_refused_check(command, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    found = [Check("git", "degraded", "no commit"), Check("x", "fine", "y")]
    monkeypatch.setattr(doctor, "examine", lambda min_free_bytes: found)
    assert command("doctor") == (
        0,
        "git          degraded  no commit\nx            fine      y\n",
        "",
    )
    found[:] = [Check("disk", "refused", "full", "make room")]
    assert command("doctor") == (1, "disk         refused   full; make room\n", "")


NOBODY = [
    shutil.which("setpriv"),
    "--reuid",
    "12345",
    "--regid",
    "12345",
    "--clear-groups",
]
USERS = {
    "a home that is nowhere": ({"HOME": "/proc/nope", "TMPDIR": "/nowhere"}, []),
    "a number without a name": (
        {"HOME": "/proc/nope"},
        NOBODY,
    ),
    "no home and no git": (
        {"PATH": "/nowhere"},
        NOBODY,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", USERS)
def test_doctor_command_works_for_restricted_users(name, tmp_path):
    changes, before = USERS[name]
    if before and (os.geteuid() != 0 or before[0] is None):
        pytest.skip("only root becomes another user")
    folder = Path(tempfile.mkdtemp(prefix="cpt-"))  # which others may enter
    folder.chmod(0o777)
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("HOME", "XDG_CACHE_HOME", "TMPDIR")
    }
    environment |= {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "CPT_RUNS_DIR": str(folder / "runs"),
        **changes,
    }
    words = [*before, sys.executable, "-m", "cpt_lab", "doctor"]
    try:
        done = subprocess.run(
            words,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        shutil.rmtree(folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()] == NAMES
    assert "this check failed" not in done.stdout
    assert "has no home that can be written to" in done.stdout
