"""Folders for compiled kernels where the user's cache cannot be used: without a home, or shared with a group.

A folder of this user's beside temporary files takes its place, under the rules of ``build``. Where there is none
either, every process builds its own.
"""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cpt_extras.kernels.cpp import build
from cpt_extras.kernels.cpp.build import NoKernelsError, UnusableError

log = logging.getLogger(__name__)
SPARE_DIRS = (
    "/var/tmp",
    "/dev/shm",
)  # where the folder for temporary files cannot be used, either


def kernels_dirs() -> list[Path]:
    """Return the folders that may hold compiled kernels, best first: ``build.kernels_dir()``, then temporary ones."""
    temporary = []
    with suppress(OSError):  # there is no folder for temporary files
        temporary.append(tempfile.gettempdir())
    name = f"cpt_core-kernels-{os.geteuid()}"
    spare = [
        Path(folder).absolute() / name
        for folder in dict.fromkeys((*temporary, *SPARE_DIRS))
    ]
    return [build.kernels_dir(), *spare]


def load(reason: str) -> str:
    """Load the kernels from the first folder that can be used, else build them for this process; say what they are.

    Args:
        reason: why the user's cache cannot be used.

    Raises:
        NoKernelsError: when there is no compiler, or it fails.
    """
    for folder in kernels_dirs()[1:]:
        with suppress(UnusableError):
            _check_no_link(folder)
            return f"{build.capability()}, {build.load_from(folder)}; {reason}"
    if build.compiler() is None:
        missing = (
            f"there is no C++ compiler ({os.environ.get('CXX') or 'g++ or clang++'})"
        )
        raise NoKernelsError(
            missing if reason == build.NO_COMPILER else f"{missing}, and {reason}"
        )
    log.warning(
        "%s; kernels are built for this process alone: name a safe folder with CPT_KERNELS_DIR",
        reason,
    )
    return _load_temporary(reason)


def _check_no_link(folder: Path) -> None:
    """Refuse a link, which anybody can make in a folder like ``/tmp``."""
    if folder.is_symlink():
        raise UnusableError(f"{folder} is a link")


def _load_temporary(reason: str) -> str:
    """Build and load a library in a temporary folder, and describe it."""
    try:
        with tempfile.TemporaryDirectory(prefix="cpt_kernels_") as folder:
            library = Path(folder) / build.library_name()
            build.build(library)
            build._load(library)
    except OSError as error:
        raise NoKernelsError(
            f"no folder can hold them: {reason}, and {error}"
        ) from None
    return f"{build.capability()}, built for this process alone: {reason}"


class KernelLocation(NamedTuple):
    """Folder of the compiled kernels.

    Attributes:
        folder: None if no folder can hold them.
        reason: why it is not the first one of ``kernels_dirs()``, or "".
        built: whether the kernels have been built.
        compiler: path of the C++ compiler, or None.
    """

    folder: Path | None
    reason: str
    built: bool
    compiler: str | None


def find_kernel_location() -> KernelLocation:
    """Return where the kernels are kept: in a folder that has them, or can be written to. Nothing is built."""
    reasons: list[str] = []
    for number, folder in enumerate(kernels_dirs()):
        try:
            if number:
                _check_no_link(folder)
            library = build.safe_place(folder)
            built = build.file_exists(library)
            if not built:
                build.make_private(library.parent)
                tempfile.TemporaryFile(dir=library.parent).close()
        except UnusableError as error:
            reasons.append(str(error))
        except OSError:
            reasons.append(f"{folder} cannot be written to")
        else:
            return KernelLocation(
                library.parent, "".join(reasons[:1]), built, build.compiler()
            )
    return KernelLocation(None, reasons[0], False, build.compiler())
