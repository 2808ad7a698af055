"""Checks of the machine that sweeps run on: each gives a state, its consequence and a remedy.

>>> check = Check("git", "degraded", "git is not installed: rows name no commit", "install git")
>>> print(check)
git          degraded  git is not installed: rows name no commit; install git

``cpt doctor`` prints all checks. A sweep makes those that take milliseconds, see ``check_sweep``.
"""

import errno
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cpt_extras import files
from cpt_lab.paths import CHECKOUT, runs_dir
from cpt_lab.provenance import find_commit, told_of_commit
from cpt_lab.resources import (
    DRIVERS,
    MachineWarning,
    existing_cores,
    shared_memory,
    usable_cores,
    usable_memory,
)

State = Literal["fine", "degraded", "refused"]
LITTLE_DISK = 2 * 10**9  # bytes: checkpoints, curves and logs of a grid
LITTLE_MEMORY = 2 * 10**9  # bytes: a run takes about one
LITTLE_SHARED = 256 * 2**20  # bytes: batches of images that other processes read
MAX_SOCKET_PATH = 107  # bytes that the system allows for the name of a socket
SOCKET_NAME = "/pymp-xxxxxxxx/listener-xxxxxxxx"  # of multiprocessing's server
DRIVER = Path("/proc/driver/nvidia/version")
MOUNTS = Path("/proc/self/mountinfo")
# File systems whose locks other machines do not see: type, and the mount option that makes it so; None: always.
LOCAL_LOCKS = (
    ("fuse.sshfs", None),
    ("fuse.rclone", None),
    ("fuse.s3fs", None),
    ("fuse.gcsfuse", None),
    ("nfs", "nolock"),
    ("nfs", "local_lock=all"),
    ("nfs", "local_lock=flock"),
    ("nfs4", "local_lock=all"),
    ("nfs4", "local_lock=flock"),
    ("lustre", "localflock"),
    ("lustre", "noflock"),
    ("cifs", "nobrl"),
    ("smb3", "nobrl"),
)

# Program that tries to lock a file: exit status 0 when it gets the lock, 1 when it does not.
OTHER_PROCESS = """
import fcntl, sys
with open(sys.argv[1]) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(1)
"""


class MachineError(OSError):
    """A sweep cannot start on this machine; the message says why."""


class Check(NamedTuple):
    """Result of one check."""

    name: str
    state: State  # "refused": a sweep cannot start
    text: str  # the state of the machine, and its consequence
    remedy: str = ""  # how to fix it

    def __str__(self) -> str:
        return f"{self.name:<12} {self.state:<9} {self.words}"

    @property
    def words(self) -> str:
        """Text and remedy."""
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


# --- all together --------------------------------------------------------------------------------
def examine(folder: Path | None = None, min_free_bytes: int = 0) -> list[Check]:
    """Return all checks of this machine, for sweeps that write into a folder.

    Args:
        folder: folder of the stores; None takes ``runs_dir()``.
        min_free_bytes: disk space that must be free there.
    """
    folder = folder or runs_dir()
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    checks: dict[str, Callable[[], Check]] = {
        "kernels": check_kernels,
        "git": check_git,
        "locks": partial(check_locks, folder),
        "disk": partial(check_disk, folder, min_free_bytes),
        "/dev/shm": check_shared_memory,
        "temporary": check_temporary,
        "processes": check_processes,
        "cores": check_cores,
        "memory": check_memory,
        "GPU": check_gpu,
        "user": check_user,
    }
    results = [_run_check(name, check) for name, check in checks.items()]
    for path in missing:  # remove the folders that the checks have created
        with suppress(OSError):
            path.rmdir()
    return results


def check_sweep(folder: Path, starts: bool = True) -> None:
    """Run the quick checks for a sweep, and warn once per process of everything that is degraded.

    Args:
        folder: folder of the store.
        starts: whether the runs are separate processes.

    Raises:
        MachineError: when the sweep cannot start.
    """
    if (folder, starts) in _checked:
        return
    quick: dict[str, Callable[[], Check]] = {
        "kernels": partial(check_kernels, fallback=folder / "kernels"),
        "git": check_git,
        "locks": partial(check_locks, folder),
        "disk": partial(check_disk, folder),
        "GPU": check_gpu,
    }
    if starts:
        quick |= {"temporary": check_temporary, "processes": check_processes}
    for name, check in quick.items():
        result = _run_check(name, check)
        if result.state == "refused":
            raise MachineError(
                f"{result.name}: {result.words}; `cpt doctor` checks this machine"
            )
        if result.state == "degraded" and result not in _warned:
            _warned.add(result)
            if name == "git":
                told_of_commit()
            warnings.warn(
                f"{result.name}: {result.words}", MachineWarning, stacklevel=3
            )
    _checked.add((folder, starts))


_checked: set[tuple[Path, bool]] = set()
_warned: set[Check] = set()


def _run_check(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; if it raises, return a result that says so."""
    try:
        return check()
    except Exception as error:  # a broken check must not stop a sweep
        return Check(
            name,
            "degraded",
            f"this check failed: {type(error).__name__}: {error}",
            "report it",
        )


# --- each ----------------------------------------------------------------------------------------
def check_kernels(fallback: Path | None = None) -> Check:
    """Check whether the C++ kernels are built, or can be, once for all processes.

    Args:
        fallback: folder for the kernels where there is no other; set as ``CPT_KERNELS_DIR``.
    """
    if sys.platform == "win32" or os.environ.get("CPT_KERNELS") == "reference":
        return Check(
            "kernels", "fine", "plain torch, as CPT_KERNELS or Windows asks for"
        )
    folder, reason, built, compiler = _find_kernels()
    if folder is None and fallback is not None:
        folder = _use_kernel_folder(fallback)
    if folder is None:
        cost = "every process builds the C++ kernels anew, half a minute of processor time each"
        return Check(
            "kernels",
            "degraded",
            f"{cost}: {reason}",
            "name a folder of your own with CPT_KERNELS_DIR",
        )
    if built:
        where = f"built, in {folder}"
    elif compiler is None:
        cost = "there is no C++ compiler (g++ or clang++, CXX): plain torch runs instead, more slowly"
        return Check("kernels", "degraded", cost, "install g++")
    else:
        where = f"{compiler} builds them on first use, in half a minute, into {folder}"
    if reason:
        remedy = "name a folder of your own with CPT_KERNELS_DIR"
        return Check(
            "kernels",
            "degraded",
            f"{where}; they are lost when it is emptied: {reason}",
            remedy,
        )
    return Check("kernels", "fine", where)


def _find_kernels() -> Any:
    """Return the ``Place`` of the C++ kernels without building or loading them."""
    return import_module("cpt_extras.kernels.cpp.spare_folders").find_kernel_location()


def _use_kernel_folder(folder: Path) -> Path | None:
    """Set ``CPT_KERNELS_DIR`` for all processes; return the folder, or None where it is not safe."""
    former_value = os.environ.get("CPT_KERNELS_DIR")
    os.environ["CPT_KERNELS_DIR"] = str(folder)
    usable_folder: Path | None = _find_kernels().folder
    if usable_folder is None and former_value is None:
        del os.environ["CPT_KERNELS_DIR"]
    elif usable_folder is None and former_value is not None:
        os.environ["CPT_KERNELS_DIR"] = former_value
    return usable_folder


def check_git() -> Check:
    """Check whether rows can name the commit that they come from."""
    name, dirty, reason = find_commit()
    if name is not None:
        changed = (
            "tracked files differ from it"
            if dirty
            else "no tracked file differs from it"
        )
        return Check("git", "fine", f"{CHECKOUT} is at commit {name[:10]}, {changed}")
    if CHECKOUT is None:
        return Check("git", "fine", f"rows name no commit: {reason}")
    remedies = {
        "git is not installed": "install git",
        "detected dubious ownership": f"git config --global --add safe.directory '{CHECKOUT}'",
        "is no repository": "use a clone of the repository",
    }
    remedy = next(
        (remedy for words, remedy in remedies.items() if words in reason),
        "run `git status` there",
    )
    return Check("git", "degraded", f"rows name no commit (null): {reason}", remedy)


def check_locks(folder: Path) -> Check:
    """Check whether the locks of a folder exclude another process."""
    elsewhere = "name a folder on another disk with CPT_RUNS_DIR"
    try:
        excludes_others = _excludes_other_process(folder)
    except ImportError:
        return Check("locks", "fine", "those of this system")
    except OSError as error:
        if error.errno != errno.ENOSYS:
            return Check(
                "locks",
                "refused",
                f"{folder} cannot be locked: {error.strerror or error}",
                elsewhere,
            )
        cost = f"{folder} has no locks: files stand for them, and stay when a sweep is killed"
        return Check(
            "locks",
            "degraded",
            cost,
            f"remove *.lock when no sweep runs, or {elsewhere}",
        )
    if not excludes_others:
        cost = f"a lock in {folder} excludes nobody: two processes had it at once, and rows could be lost"
        return Check("locks", "refused", cost, elsewhere)
    kind, options = mount_of(folder)
    has_local_locks = any(
        kind == local_kind and (option is None or option in options)
        for local_kind, option in LOCAL_LOCKS
    )
    if has_local_locks:
        cost = f"{folder} is on {kind}, whose locks other machines do not see: two of them may do one run"
        return Check(
            "locks", "degraded", cost, "give every machine a CPT_RUNS_DIR of its own"
        )
    return Check(
        "locks",
        "fine",
        f"a lock in {folder} ({kind or 'local'}) excludes other processes",
    )


def _excludes_other_process(folder: Path) -> bool:
    """Return whether a lock in a folder excludes another process."""
    import fcntl

    with _probe(folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = _status_of_other(file.name)
    if status not in (0, 1):
        raise RuntimeError(f"another process could not try a lock: status {status}")
    return status == 1


def _status_of_other(path: str) -> int:
    """Return the exit status of ``OTHER_PROCESS``: in a new Python, or in a fork where none can be started."""
    try:
        words = [sys.executable, "-I", "-S", "-c", OTHER_PROCESS, path]
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60
        ).returncode
    except PermissionError:
        pass
    with warnings.catch_warnings(
        action="ignore"
    ):  # about threads: the child only makes system calls
        process = os.fork()
    if process == 0:
        import fcntl

        try:
            fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os._exit(0)
        except BlockingIOError:
            os._exit(1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def check_processes() -> Check:
    """Check whether this user can start Python again, as the runs of a sweep do."""
    if os.access(sys.executable, os.X_OK):
        return Check("processes", "fine", f"runs start by {sys.executable}")
    cost = f"{sys.executable} cannot be started by this user: a sweep runs in its own process alone (workers=0)"
    return Check(
        "processes", "degraded", cost, "let this user enter the folders above it"
    )


def check_disk(folder: Path, min_free_bytes: int = 0) -> Check:
    """Check the free space of a folder, and whether its disk confirms that a file was written."""
    import shutil

    elsewhere = "make room, or name a folder on another disk with CPT_RUNS_DIR"
    try:
        with _probe(folder) as file:
            try:
                os.fsync(file.fileno())
                unsynced = ""
            except OSError as error:
                if error.errno not in files.FSYNC_UNSUPPORTED:
                    raise
                unsynced = error.strerror or str(error)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            "disk",
            "refused",
            f"{folder} cannot be written to: {error.strerror or error}",
            elsewhere,
        )
    room = f"{free / 1e9:,.1f} GB free in {folder}"
    if free < min_free_bytes:
        return Check(
            "disk",
            "refused",
            f"{room}; a run needs {min_free_bytes / 1e9:.1f}",
            elsewhere,
        )
    if unsynced:
        files.suppress_unsynced_warning()
        cost = f"{folder} does not say when its disk has a row ({unsynced}): a power cut may lose the last ones"
        return Check(
            "disk", "degraded", cost, "name a folder on another disk with CPT_RUNS_DIR"
        )
    if free < LITTLE_DISK:
        return Check(
            "disk",
            "degraded",
            f"{room}: little for the checkpoints of a grid",
            elsewhere,
        )
    return Check("disk", "fine", room)


def check_shared_memory() -> Check:
    """Check the shared memory, which passes images from reading processes to the training process."""
    room = shared_memory()
    if room is None:
        return Check("/dev/shm", "fine", "no limit of its own")
    if room < LITTLE_SHARED:
        cost = f"{room / 2**20:,.0f} MB: images from disk are read by fewer processes, or by none"
        return Check(
            "/dev/shm",
            "degraded",
            cost,
            "start the container with --ipc=host, or --shm-size=8g",
        )
    return Check("/dev/shm", "fine", f"{room / 1e9:,.1f} GB")


def check_temporary() -> Check:
    """Check the folder for temporary files, which holds the socket of the processes of a sweep."""
    tmpdir = os.environ.get("TMPDIR")
    try:
        folder = tempfile.gettempdir()
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return Check(
            "temporary",
            "refused",
            f"there is no folder for temporary files: {error}",
            "set TMPDIR to one",
        )
    if len(os.fsencode(folder + SOCKET_NAME)) > MAX_SOCKET_PATH:
        longest = MAX_SOCKET_PATH - len(SOCKET_NAME)
        cost = f"{folder} is too long a path for the socket through which runs start: at most {longest} characters"
        return Check("temporary", "refused", cost, "set TMPDIR to a shorter one")
    if tmpdir and not os.path.isdir(tmpdir):
        return Check("temporary", "fine", f"{folder}, for TMPDIR={tmpdir} is not there")
    return Check("temporary", "fine", folder)


def check_cores() -> Check:
    """Check how many cores this process may use, and whether torch uses more."""
    import torch

    usable, existing = usable_cores(), existing_cores()
    threads = torch.get_num_threads()
    granted = f"{usable} of {existing}" if usable < existing else f"{usable}"
    if threads > usable:
        cost = f"{granted} granted, but torch takes {threads} threads in programs of your own, and is slower"
        return Check(
            "cores",
            "degraded",
            cost,
            f"set OMP_NUM_THREADS={usable}; sweeps count right by themselves",
        )
    return Check("cores", "fine", f"{granted}; threads of torch: {threads}")


def check_memory() -> Check:
    """Check how much memory this process may use."""
    usable = usable_memory()
    if usable < LITTLE_MEMORY:
        cost = (
            f"{usable / 1e9:.1f} GB, and a run takes about 1: the system may end some"
        )
        return Check(
            "memory",
            "degraded",
            cost,
            "grant more, or run one at a time with --workers 1",
        )
    return Check("memory", "fine", f"{usable / 1e9:,.1f} GB")


def check_gpu() -> Check:
    """Check whether torch can use the NVIDIA driver of this machine, without starting CUDA."""
    import torch

    version, cuda = driver_version(), torch.version.cuda
    if version is None:
        return Check("GPU", "fine", "no NVIDIA driver: runs are on the CPU")
    if cuda is None:
        cost = f"driver {version}, but torch {torch.__version__} is built for the CPU: runs are on the CPU"
        return Check(
            "GPU", "degraded", cost, "install a torch for CUDA; see docs/installing.md"
        )
    oldest = DRIVERS.get(cuda.partition(".")[0], 0)
    if int(version.partition(".")[0]) < oldest:
        cost = f"driver {version} is too old for torch's CUDA {cuda}, which needs {oldest}: runs are on the CPU"
        return Check(
            "GPU",
            "degraded",
            cost,
            f"update the driver, or take a torch for it: {older_torch()}",
        )
    return Check("GPU", "fine", f"driver {version}, torch for CUDA {cuda}")


def older_torch() -> str:
    """Return the command that installs a torch for drivers of CUDA 12."""
    return "pip install --force-reinstall 'torch>=2.6' torchvision --index-url https://download.pytorch.org/whl/cu126"


def check_user() -> Check:
    """Check that the user has a home folder for caches."""
    home = os.path.expanduser("~")
    user = f"number {os.geteuid()}" if hasattr(os, "geteuid") else "this user"
    with suppress(ImportError, KeyError):
        import pwd

        user = pwd.getpwuid(os.geteuid()).pw_name
    if not os.path.isdir(home) or not os.access(home, os.W_OK | os.X_OK):
        cost = f"{user} has no home that can be written to ({home}): caches are lost with temporary files"
        return Check(
            "user", "degraded", cost, "set HOME, or CPT_KERNELS_DIR and CPT_DATA_DIR"
        )
    return Check("user", "fine", f"{user}, home {home}")


# --- what they ask -------------------------------------------------------------------------------
@contextmanager
def _probe(folder: Path) -> Iterator["tempfile._TemporaryFileWrapper[bytes]"]:
    """Create a file in a folder for a ``with`` block."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        dir=folder, prefix=".cpt-doctor-", suffix=".lock"
    ) as file:
        yield file


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, such as "580.65.06"; None without one."""
    try:
        match = re.search(
            r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER.read_text(encoding="utf-8")
        )
    except OSError:
        return None
    return match[1] if match else None


class Mount(NamedTuple):
    """File system of a folder."""

    kind: str  # such as "nfs4"; "" if it is not known
    options: list[str]


def mount_of(folder: Path) -> Mount:
    """Return the type and the options of the file system of a folder."""
    resolved = folder.resolve()
    innermost = Mount("", [""])
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return innermost

    depth = -1
    for line in lines:
        before, _, after = line.partition(" - ")
        escaped_path, options = before.split()[4:6]
        mount_point = Path(re.sub(r"\\(\d{3})", _decode_octal, escaped_path))
        if not resolved.is_relative_to(mount_point):
            continue
        if len(mount_point.parts) >= depth:
            kind, _, super_options = after.split(" ", 2)
            depth = len(mount_point.parts)
            innermost = Mount(kind, super_options.split(",") + options.split(","))
    return innermost


def _decode_octal(match: re.Match[str]) -> str:
    """Return the character of an octal escape, as the kernel writes blanks in paths."""
    return chr(int(match[1], 8))
