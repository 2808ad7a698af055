"""Build of the C++ kernels: ``operators.cpp`` is compiled once into the user's cache, verified and loaded.

The name of the library is a hash of what it depends on: source, flags, torch, processor instructions. It is written to
a temporary file and moved, under a lock, so that processes that start together build it once.

Loading a library runs it. So it is taken from a folder only where nobody else could have put it: it and the folders
above belong to this user or to root, and others cannot write to them (above its own folder there may be one like
``/tmp``, where each may delete his own alone). And only if its content has the digest that was written when it was
built; else it is built again. Where the cache cannot be used, ``spare_folders`` has others.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import stat
import sys
from pathlib import Path

import torch
from filelock import FileLock
from platformdirs import user_cache_path

log = logging.getLogger(__name__)
SOURCES = sorted(Path(__file__).parent.glob("*.cpp")) + sorted(
    Path(__file__).parent.glob("*.h")
)
# No contraction: a fused multiply-add rounds once where torch's operations round twice. The others let loops with
# rounding and comparisons be vectorised and change no result.
COMPILER_FLAGS = (
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
NO_COMPILER = "there is no C++ compiler"
INSTRUCTION_FLAGS = {
    "AVX2": ("-mavx2",),
    "AVX512": (
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mprefer-vector-width=512",
    ),
}


def kernels_dir() -> Path:
    """Return the folder of compiled kernels: ``CPT_KERNELS_DIR``, else in the user's cache."""
    folder = os.environ.get("CPT_KERNELS_DIR")
    if folder:
        return Path(os.path.expanduser(folder))  # without a home, ~ stays as it is
    try:
        return user_cache_path("cpt_core", appauthor=False) / "kernels"
    except RuntimeError:  # no home
        return Path("~/.cache/cpt_core/kernels")


class NoKernelsError(RuntimeError):
    """The C++ kernels cannot be had here; the message says why."""


def compiler() -> str | None:
    """Return the C++ compiler: ``CXX``, else g++ or clang++, else None."""
    return shutil.which(os.environ.get("CXX") or "g++") or (
        None if "CXX" in os.environ else shutil.which("clang++")
    )


class UnusableError(Exception):
    """A folder cannot hold kernels; the message says why."""


def load() -> str:
    """Load the kernels, build them first if need be, and return what they are.

    Raises:
        NoKernelsError: when the compiler fails.
        UnusableError: when ``kernels_dir()`` cannot be used, see ``spare_folders``.
    """
    if sys.platform == "win32":
        raise NoKernelsError("they are not built on Windows")
    return f"{capability()}, {load_from(kernels_dir())}"


def compiler_flags() -> tuple[str, ...]:
    """Return the flags of the compiler for the processor that torch sees."""
    return (*COMPILER_FLAGS, *INSTRUCTION_FLAGS.get(capability(), ()))


def library_name() -> str:
    """Return the name of the file of the kernels, which changes with what they depend on."""
    sources = [(path.name, path.read_text(encoding="utf-8")) for path in SOURCES]
    facts = (
        *sources,
        *compiler_flags(),
        torch.__version__,
        sys.platform,
        platform.machine(),
    )
    return f"cpt_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"


def load_from(folder: Path) -> Path:
    """Load the kernels from a folder, after building them there if need be; return the file."""
    library = safe_place(folder)
    if file_exists(library):
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
        before = library.stat().st_mtime_ns if file_exists(library) else None
        make_private(library.parent)
        with FileLock(library.with_name(f"{library.name}.lock")):
            if (
                not library.exists() or library.stat().st_mtime_ns == before
            ):  # nobody has built them meanwhile
                build(library)
    except OSError:  # a folder that cannot be written to
        raise UnusableError(f"{library.parent} cannot be written to") from None
    try:
        _load(library)
    except NoKernelsError as error:
        if "failed to map segment" in str(
            error
        ):  # a file system from which nothing may be run
            raise UnusableError(str(error)) from None
        raise
    return library


def safe_place(folder: Path) -> Path:
    """Return the path of the kernels in a folder, without links; UnusableError where others could write it."""
    if str(folder).startswith("~"):
        raise UnusableError(f"this user has no home folder for {folder}")
    library = folder.resolve() / library_name()
    if exposed := exposure_reason(library):
        raise UnusableError(exposed)
    return library


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone."""
    for missing in reversed(
        [path for path in (folder, *folder.parents) if not path.exists()]
    ):
        missing.mkdir(mode=0o700, exist_ok=True)


def file_exists(path: Path) -> bool:
    """Return whether a file exists where this user may look."""
    try:
        return path.exists()
    except OSError:
        return False


def capability() -> str:
    """Return the instructions that torch itself uses here, such as "AVX512"."""
    return torch.backends.cpu.get_cpu_capability()


def exposure_reason(library: Path) -> str:
    """Return why another user could have written a file, or could write it, or ""; the path must have no links."""
    for path in (library, *library.parents[:-1]):
        try:
            found = path.lstat()
        except OSError:  # not there yet
            continue
        if found.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user (number {found.st_uid})"
        sticky = path not in (library, library.parent) and found.st_mode & stat.S_ISVTX
        others = (
            stat.S_IWOTH
            if _is_private_group(found.st_gid)
            else stat.S_IWGRP | stat.S_IWOTH
        )
        if found.st_mode & others and not sticky:
            return f"{path} can be written to by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _is_private_group(number: int) -> bool:
    """Return whether a group has the user's name and no other member, as most systems make one for every user."""
    import grp  # these two are not on Windows
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return (
        number == user.pw_gid
        and group.gr_name == user.pw_name
        and set(group.gr_mem) <= {user.pw_name}
    )


def _verify(library: Path) -> None:
    """Raise NoKernelsError for a library that is not, byte for byte, what was built."""
    try:
        digest = library.with_suffix(".sha256").read_text(encoding="ascii")
    except OSError:
        raise NoKernelsError(f"{library} has no digest") from None
    if digest != hashlib.sha256(library.read_bytes()).hexdigest():
        raise NoKernelsError(f"{library} is not what was built: its digest differs")


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise NoKernelsError(f"{library} cannot be loaded: {error}") from None
    if not hasattr(torch.ops.cpt, "quantize_gradient"):  # which it alone defines
        raise NoKernelsError(f"{library} defines no operator of this package")


def build(library: Path) -> None:
    """Compile the kernels into a file, in one go."""
    from cpt_extras.kernels.cpp.compilation import compile_library

    if reason := compile_library(
        str(compiler()), compiler_flags(), SOURCES[0], library
    ):
        raise NoKernelsError(reason)
