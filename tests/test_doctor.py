"""Machine checks of ``cpt doctor``: state, cost and remedy of each."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import refused, specs_of

from cpt_extras import files
from cpt_extras.kernels.cpp import build, spare_folders
from cpt_lab import doctor, provenance
from cpt_lab.doctor import Check, MachineError, MachineWarning
from cpt_lab.paths import ROOT
from cpt_lab.provenance import Commit
from cpt_lab.sweeps.sweep import run_grid

CHECK_NAMES = (
    "kernels git locks disk /dev/shm temporary processes cores memory GPU user".split()
)
NOWHERE = "/proc/nope"  # cannot be written to, not even by root


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Reset the checks, as in a new process."""
    monkeypatch.setattr(doctor, "_checked", set())
    monkeypatch.setattr(doctor, "_warned", set())
    monkeypatch.setattr(files, "_warned", False)


def raises(error):
    """Return a function that raises an error, whatever it is called with."""

    def fail(*_, **__):
        raise error

    return fail


def system_error(number):
    return OSError(number, os.strerror(number))


def test_examine_runs_every_check_and_cleans_up(tmp_path):
    checks = doctor.examine(tmp_path / "no" / "runs yet")
    assert [check.name for check in checks] == CHECK_NAMES
    for check in checks:
        assert check.state in ("fine", "degraded", "refused")
        assert check.text
        assert check.remedy or check.state == "fine"
        assert str(check).split()[:2] == [check.name, check.state]
    assert list(tmp_path.iterdir()) == []


def test_examine_reports_failing_check_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "find_commit", raises(KeyError("odd machine")))
    (check,) = (check for check in doctor.examine(tmp_path) if check.name == "git")
    assert check.state == "degraded"
    assert "this check failed: KeyError: 'odd machine'" in check.text


# --- each check -----------------------------------------------------------------------------------


def mount(words):
    """Return a table of mounts with a file system at FOLDER, whose path is escaped in it."""
    lines = f"20 1 8:1 / / rw - ext4 /dev/sda rw\n21 20 0:5 / {words}"
    return {"cpt_lab.doctor.MOUNTS": lines}


def gpu(driver, cuda, kind="x86_64 ", suffix=""):
    """Return what the NVIDIA driver writes to /proc, and the CUDA that torch is built for."""
    name = f"NVIDIA UNIX {kind}Kernel Module{suffix}"
    text = f"NVRM version: {name}  {driver}  Release Build\nGCC version: gcc 12.3\n"
    return {"cpt_lab.doctor.DRIVER": text, "torch.version.cuda": cuda}


def git(*fields):
    return {"cpt_lab.doctor.find_commit": lambda: Commit(*fields)}


def flock(error):
    return {"fcntl.flock": raises(system_error(error))}


def granted(name, value):
    return {f"cpt_lab.doctor.{name}": lambda: value}


NO_PYTHON = {"subprocess.run": raises(system_error(errno.EACCES))}
TRUSTING = {
    "fcntl.flock": lambda *_: None
}  # this process believes that it has the lock
CORES = granted("usable_cores", 2) | granted("existing_cores", 64)
# Check, what is different about the machine, and the arguments of the check.  "$" begins the name of a variable, FOLDER
# stands for the folder of the stores; tests/golden/doctor.txt has the results.
MACHINES = [
    ("locks", {}),
    ("locks", TRUSTING),
    ("locks", NO_PYTHON),
    ("locks", NO_PYTHON | TRUSTING),
    ("locks", flock(errno.ENOLCK)),
    ("locks", flock(errno.EOPNOTSUPP)),
    ("locks", flock(errno.ENOSYS)),
    ("locks", mount("FOLDER rw,nosuid - fuse.sshfs me@there:/ rw,user_id=0")),
    ("locks", mount("FOLDER/deeper rw - fuse.sshfs me@there:/ rw")),
    ("locks", mount("FOLDER rw - nfs4 server:/ rw,vers=4.2,local_lock=none")),
    ("locks", mount("FOLDER rw - nfs server:/ rw,vers=3,nolock,local_lock=all")),
    ("locks", mount("FOLDER rw - lustre 10.0.0.1@tcp:/fs rw,flock")),
    ("locks", mount("FOLDER rw - lustre 10.0.0.1@tcp:/fs rw,localflock")),
    ("disk", {}),
    ("disk", {}, 2**40),
    ("disk", {"cpt_lab.doctor.LITTLE_DISK": 2**60}),
    ("disk", {"os.fsync": raises(system_error(errno.EINVAL))}),
    ("git", git("0123456789abcdef", False)),
    ("git", git("0123456789abcdef", True)),
    ("git", git(None, None, "git is not installed")),
    ("git", git(None, None, "detected dubious ownership in x")),
    ("git", git(None, None, "/x is no repository: no .git")),
    ("git", git(None, None, "something else")),
    ("git", git(None, None, "a wheel") | {"cpt_lab.doctor.CHECKOUT": None}),
    ("temporary", {"$TMPDIR": "/nowhere"}),
    ("gpu", {"cpt_lab.doctor.DRIVER": None}),
    ("gpu", gpu("535.104.05", "13.2")),
    ("gpu", gpu("580.65.06", "13.2", "Open ", " for x86_64")),
    ("gpu", gpu("535.104.05", "12.6")),
    ("gpu", gpu("470.82.01", "12.6")),
    ("gpu", gpu("580.65.06", None)),
    ("user", {"$HOME": NOWHERE, "os.geteuid": lambda: 987654}),
    ("cores", CORES | {"torch.get_num_threads": lambda: 1}),
    ("cores", CORES | {"torch.get_num_threads": lambda: 64}),
    ("memory", granted("usable_memory", 10**9)),
    ("memory", granted("usable_memory", 10**11)),
    ("shared_memory", granted("shared_memory", 64 * 2**20)),
    ("shared_memory", granted("shared_memory", None)),
    ("processes", {"sys.executable": f"{NOWHERE}/python"}),
]


@pytest.mark.slow
def test_checks_describe_machines(tmp_path, golden):
    """Compare state, cost and remedy on many machines with a golden file."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    escaped = str(folder).replace(" ", "\\040")
    lines = []
    for name, changes, *arguments in MACHINES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1e11))
            patch.setattr("tempfile.tempdir", str(tmp_path))
            patch.setattr("torch.__version__", "2.9")
            patch.setattr(doctor, "CHECKOUT", ROOT)
            for target, value in {"cpt_lab.doctor.MOUNTS": "", **changes}.items():
                if target in ("cpt_lab.doctor.MOUNTS", "cpt_lab.doctor.DRIVER"):
                    file = tmp_path / "table"
                    file.write_text((value or "").replace("FOLDER", escaped))
                    patch.setattr(target, file)
                elif target.startswith("$"):
                    patch.setenv(target[1:], value)
                else:
                    patch.setattr(target, value)
            places = [folder] if name in ("locks", "disk") else []
            check = getattr(doctor, f"check_{name}")(*places, *arguments)
        lines.append(str(check))
    text = "\n".join(lines).replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT")
    golden("doctor.txt", text.replace(str(tmp_path), "TMP") + "\n")
    assert list(folder.iterdir()) == []


def test_check_disk_without_fsync_is_the_only_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", raises(system_error(errno.EINVAL)))
    assert doctor.check_disk(tmp_path).state == "degraded"
    with warnings.catch_warnings(action="error"):
        files.write_text(tmp_path / "file", "text")


def test_check_temporary_refuses_unusable_folder(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    check = doctor.check_temporary()
    assert (check.state, "too long a path" in check.text) == ("refused", True)
    monkeypatch.setattr(tempfile, "tempdir", NOWHERE)
    check = doctor.check_temporary()
    assert check.state == "refused"
    assert "there is no folder for temporary files" in check.text


@pytest.fixture
def no_safe_folder(tmp_path, monkeypatch):
    """Let no folder keep kernels except those that CPT_KERNELS_DIR or a check names; return the temporary one."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    temporary.chmod(0o777)
    monkeypatch.delenv("CPT_KERNELS", raising=False)
    monkeypatch.setenv("CPT_KERNELS_DIR", f"{NOWHERE}/kernels")
    monkeypatch.setattr(build, "compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(spare_folders, "SPARE_DIRS", ())
    return temporary


def test_check_kernels_names_folder_and_compiler(no_safe_folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("CPT_KERNELS_DIR", str(cache))
    assert "/usr/bin/g++ builds them on first use" in doctor.check_kernels().text
    (cache / build.library_name()).touch()
    expected = ("kernels", "fine", f"built, in {cache}")
    assert doctor.check_kernels()[:3] == expected

    monkeypatch.setenv("CPT_KERNELS_DIR", f"{NOWHERE}/kernels")
    check = doctor.check_kernels()
    assert (check.state, "every process builds" in check.text) == ("degraded", True)
    no_safe_folder.chmod(0o700)
    check = doctor.check_kernels()
    assert check.state == "degraded"
    assert f"lost when it is emptied: {NOWHERE}/kernels cannot" in check.text
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert "there is no C++ compiler" in doctor.check_kernels().text
    monkeypatch.setenv("CPT_KERNELS", "reference")
    assert doctor.check_kernels().state == "fine"


def test_check_kernels_falls_back_to_store_folder(no_safe_folder, tmp_path):
    assert doctor.check_kernels(no_safe_folder / "unsafe").state == "degraded"
    assert os.environ["CPT_KERNELS_DIR"] == f"{NOWHERE}/kernels"
    folder = tmp_path / "runs" / "kernels"
    assert str(folder.parent) in doctor.check_kernels(folder).text
    assert os.environ["CPT_KERNELS_DIR"] == str(folder)  # which runs get


# --- before a sweep -------------------------------------------------------------------------------


def set_check(monkeypatch, name, *fields):
    """Replace a check by its result."""
    monkeypatch.setattr(doctor, f"check_{name}", lambda *_: Check(name, *fields))


def test_check_sweep_warns_once_and_refuses_repeatedly(tmp_path, monkeypatch):
    set_check(monkeypatch, "git", "degraded", "no commit", "install git")
    monkeypatch.setattr(provenance, "_has_warned_of_commit", False)
    with pytest.warns(MachineWarning, match="git: no commit; install git") as warned:
        doctor.check_sweep(tmp_path / "a")
    assert len(warned) == 1
    assert provenance._has_warned_of_commit  # rows do not say it again
    with warnings.catch_warnings(action="error"):
        doctor.check_sweep(tmp_path / "a")
        doctor.check_sweep(tmp_path / "b")

    set_check(monkeypatch, "locks", "fine", "of no interest")
    message, error = "disk: .*cannot be written to", MachineError
    for _ in range(2):
        refused(message, doctor.check_sweep, Path(NOWHERE), error=error)
    monkeypatch.setattr(tempfile, "tempdir", NOWHERE)
    doctor.check_sweep(tmp_path / "d", starts=False)
    message = "temporary: there is no folder"
    refused(message, doctor.check_sweep, tmp_path / "d", error=error)


@pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning")
def test_run_grid_checks_machine_before_runs(tmp_path, monkeypatch):
    (spec,), store = specs_of("CR"), tmp_path / "rows.jsonl"
    with monkeypatch.context() as patch:
        set_check(patch, "locks", "refused", "none here")
        message, error = "locks: none here; `cpt doctor`", MachineError
        refused(message, run_grid, [spec], store, workers=0, error=error)
    assert not store.exists()
    (row,) = run_grid([spec], store, workers=0)
    assert row["status"] == "ok"
    # Where there is nothing to run, nothing is checked.
    monkeypatch.setattr(doctor, "check_locks", raises(AssertionError))
    monkeypatch.setattr(doctor, "_checked", set())
    run_grid([spec], store, workers=0)


def test_doctor_command_exits_1_on_refused_check(command, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    checks = [Check("git", "degraded", "no commit"), Check("x", "fine", "y")]
    monkeypatch.setattr(doctor, "examine", lambda min_free_bytes: checks)
    text = "git          degraded  no commit\nx            fine      y\n"
    assert command("doctor") == (0, text, "")
    checks[:] = [Check("disk", "refused", "full", "make room")]
    assert command("doctor") == (1, "disk         refused   full; make room\n", "")


# Variables of a user, and whether it is a number without a name.
USERS = {
    "a home that is nowhere": ({"HOME": NOWHERE, "TMPDIR": "/nowhere"}, False),
    "a number without a name, and no git": (
        {"HOME": NOWHERE, "PATH": "/nowhere"},
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", USERS)
def test_doctor_command_works_for_restricted_users(name):
    variables, is_nobody = USERS[name]
    prefix = []
    if is_nobody:
        setpriv = shutil.which("setpriv")
        if os.geteuid() != 0 or setpriv is None:
            pytest.skip("only root becomes another user")
        prefix = f"{setpriv} --reuid 12345 --regid 12345 --clear-groups".split()
    folder = Path(tempfile.mkdtemp(prefix="cpt-"))  # which others may enter
    folder.chmod(0o777)
    removed = ("HOME", "XDG_CACHE_HOME", "TMPDIR")
    environment = {k: v for k, v in os.environ.items() if k not in removed}
    environment |= {"PYTHONPATH": str(ROOT), "CPT_RUNS_DIR": str(folder / "runs")}
    try:
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "cpt_lab", "doctor"],
            env=environment | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        shutil.rmtree(folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()] == CHECK_NAMES
    assert "this check failed" not in done.stdout
    assert "has no home that can be written to" in done.stdout
