"""Build ``operators.cpp`` once, into the user's cache, and load it.

The library's name holds what it depends on: source, flags, torch, instructions of the processor. It is written beside
its place and moved there, under a lock: processes that start at once build it once.

Loading a library runs it. So it is taken from a folder only where nobody else could have put it: it and the folders
above belong to this user or to root, and others cannot write to them (above its own folder there may be one like
``/tmp``, where each may delete his own alone). And only if its content has the digest that was written when it was
built; else it is built again.

Where the cache cannot be used, as without a home or in a folder that a group shares, a folder of this user's beside
temporary files takes its place, under the same rules. Where there is none either, every process builds its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from filelock import FileLock
from platformdirs import user_cache_path

log = logging.getLogger(__name__)
SOURCES = sorted(Path(__file__).parent.glob("*.cpp")) + sorted(Path(__file__).parent.glob("*.h"))
# No contraction: a fused multiply-add rounds once where torch's operations round twice. The others let loops with
# rounding and comparisons be vectorised and change no result.
FLAGS = ("-O3", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
NO_COMPILER = "there is no C++ compiler"
WIDE = {
    "AVX2": ("-mavx2",),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
}
SPARE_DIRS = ("/var/tmp", "/dev/shm")  # for kernels, where the folder for temporary files cannot be used, either


def kernels_dir() -> Path:
    """Return the folder of compiled kernels: ``CPT_KERNELS_DIR``, else in the user's cache."""
    given = os.environ.get("CPT_KERNELS_DIR")
    if given:
        return Path(os.path.expanduser(given))  # without a home, ~ stays as it is
    try:
        return user_cache_path("cpt_core", appauthor=False) / "kernels"
    except RuntimeError:  # no home
        return Path("~/.cache/cpt_core/kernels")


def kernels_dirs() -> list[Path]:
    """Return the folders that may hold compiled kernels, best first: ``kernels_dir()``, then temporary ones."""
    temporary = []
    with suppress(OSError):  # there is no folder for temporary files
        temporary.append(tempfile.gettempdir())
    name = f"cpt_core-kernels-{os.geteuid()}"
    spare = [Path(folder).absolute() / name for folder in dict.fromkeys((*temporary, *SPARE_DIRS))]
    return [kernels_dir(), *spare]


class NoKernelsError(RuntimeError):
    """The C++ kernels cannot be had here; the message says why."""


def compiler() -> str | None:
    """Return the C++ compiler: ``CXX``, else g++ or clang++, else None."""
    return shutil.which(os.environ.get("CXX") or "g++") or (None if "CXX" in os.environ else shutil.which("clang++"))


class UnusableError(Exception):
    """A folder cannot hold kernels; the message says why."""


def load() -> str:
    """Load the kernels, build them first if need be, and return what they are.

    Raises:
        NoKernelsError: when there is no compiler, or it fails.
    """
    if sys.platform == "win32":
        raise NoKernelsError("they are not built on Windows")
    flags, name = flags_here(), library_name()
    reasons: list[str] = []
    for folder in kernels_dirs():
        try:
            library = _load_from(folder, name, flags)
        except UnusableError as error:
            reasons.append(str(error))
        else:
            return "; ".join([f"{capability()}, {library}", *reasons[:1]])
    if compiler() is None:
        exposed = [reason for reason in reasons if reason != NO_COMPILER]
        missing = f"there is no C++ compiler ({os.environ.get('CXX') or 'g++ or clang++'})"
        raise NoKernelsError(", and ".join([missing, *exposed[:1]]))
    log.warning("%s; kernels are built for this process alone: name a safe folder with CPT_KERNELS_DIR", reasons[0])
    return _alone(name, flags, reasons[0])


def flags_here() -> tuple[str, ...]:
    """Return the flags of the compiler for the processor that torch sees."""
    return (*FLAGS, *WIDE.get(capability(), ()))


def library_name() -> str:
    """Return the name of the file of the kernels, which changes with what they depend on."""
    flags = flags_here()
    sources = [(path.name, path.read_text(encoding="utf-8")) for path in SOURCES]
    facts = (*sources, *flags, torch.__version__, sys.platform, platform.machine())
    return f"cpt_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"


def _load_from(folder: Path, name: str, flags: tuple[str, ...]) -> Path:
    """Load the kernels from a folder, after building them there if need be; return the file."""
    library = _safe_place(folder, name)
    if is_there(library):
        try:
            _verify(library)
            _load(library)
        except NoKernelsError as error:  # cut short on a full disk, say
            log.warning("%s; they are built again", error)
        else:
            return library
    if compiler() is None:
        raise UnusableError(NO_COMPILER)
    try:
        before = library.stat().st_mtime_ns if is_there(library) else None
        make_private(library.parent)
        with FileLock(library.parent / f"{name}.lock"):
            if not library.exists() or library.stat().st_mtime_ns == before:  # nobody has built them meanwhile
                _build(library, flags)
    except OSError:  # a folder that cannot be written to
        raise UnusableError(f"{library.parent} cannot be written to") from None
    try:
        _load(library)
    except NoKernelsError as error:
        if "failed to map segment" in str(error):  # a file system from which nothing may be run
            raise UnusableError(str(error)) from None
        raise
    return library


def _safe_place(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, without links; UnusableError where others could have written it."""
    if str(folder).startswith("~"):
        raise UnusableError(f"this user has no home folder for {folder}")
    if folder != kernels_dir() and folder.is_symlink():  # anybody can make one in a folder like /tmp
        raise UnusableError(f"{folder} is a link")
    library = folder.resolve() / name
    if exposed := open_to_others(library):
        raise UnusableError(exposed)
    return library


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def is_there(path: Path) -> bool:
    """Return whether a file exists where this user may look."""
    try:
        return path.exists()
    except OSError:
        return False


def find_dir() -> tuple[Path | None, str]:
    """Return the folder that kernels are kept in, None where there is none, and why it is not the first one.

    Nothing is built: a folder counts when it has the kernels, or can be written to.
    """
    name = library_name()
    reasons: list[str] = []
    for folder in kernels_dirs():
        try:
            library = _safe_place(folder, name)
            if not is_there(library):
                make_private(library.parent)
                tempfile.TemporaryFile(dir=library.parent).close()
        except UnusableError as error:
            reasons.append(str(error))
        except OSError:
            reasons.append(f"{folder} cannot be written to")
        else:
            return library.parent, "".join(reasons[:1])
    return None, reasons[0]


def capability() -> str:
    """Return the instructions that torch itself uses here, such as "AVX512"."""
    return torch.backends.cpu.get_cpu_capability()


def open_to_others(library: Path) -> str:
    """Say why somebody else could have written a file, or could write it: a path without symbolic links; "" if not."""
    for path in (library, *library.parents[:-1]):
        try:
            found = path.lstat()
        except OSError:  # not there yet
            continue
        if found.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user (number {found.st_uid})"
        sticky = path not in (library, library.parent) and found.st_mode & stat.S_ISVTX
        others = stat.S_IWOTH if _is_own_group(found.st_gid) else stat.S_IWGRP | stat.S_IWOTH
        if found.st_mode & others and not sticky:
            return f"{path} can be written to by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _is_own_group(number: int) -> bool:
    """Whether a group is the user's alone, as most systems make one for everybody: of that name, with nobody else."""
    import grp  # these two are not on Windows
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _alone(name: str, flags: tuple[str, ...], why: str) -> str:
    """Build and load a library that nobody else sees, and return what it is."""
    try:
        with tempfile.TemporaryDirectory(prefix="cpt_kernels_") as own:
            _build(Path(own) / name, flags)
            _load(Path(own) / name)
    except OSError as error:
        raise NoKernelsError(f"no folder can hold them: {why}, and {error}") from None
    return f"{capability()}, built for this process alone: {why}"


def _verify(library: Path) -> None:
    """Raise NoKernelsError for a library that is not, byte for byte, what was built."""
    try:
        written = library.with_suffix(".sha256").read_text(encoding="ascii")
    except OSError:
        raise NoKernelsError(f"{library} has no digest") from None
    if written != hashlib.sha256(library.read_bytes()).hexdigest():
        raise NoKernelsError(f"{library} is not what was built: its digest differs")


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise NoKernelsError(f"{library} cannot be loaded: {error}") from None
    if not hasattr(torch.ops.cpt, "quantize_gradient"):  # which it alone defines
        raise NoKernelsError(f"{library} defines no operator of this package")


def _build(library: Path, flags: tuple[str, ...]) -> None:
    # torch.utils.cpp_extension knows these folders, too, but needs setuptools, and its import looks for CUDA and warns.
    home = Path(torch.__file__).parent
    headers = home / "include"
    includes = (headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    found = compiler()
    assert found is not None
    handle, part = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        command = [found, "-std=c++20", *flags, *(f"-I{path}" for path in includes), str(SOURCES[0]), "-o", part]
        command += [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise NoKernelsError(f"{found} failed: {lines[0] if lines else f'exit code {done.returncode}'}")
        os.chmod(part, 0o644)
        from cpt_extras.files import write_text  # kernels are built once

        write_text(library.with_suffix(".sha256"), hashlib.sha256(Path(part).read_bytes()).hexdigest())
        os.replace(part, library)
    finally:
        Path(part).unlink(missing_ok=True)
