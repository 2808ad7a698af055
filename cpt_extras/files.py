"""Files: atomic writing, so that a reader never sees half a file, and numbers that JSON cannot hold."""

from __future__ import annotations

import errno
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Error numbers of file systems without fsync, such as some FUSE, SMB and other network folders.
FSYNC_UNSUPPORTED = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)
_warned = False  # whether a file system without fsync has been reported


def nan_to_none(value: Any, replaced: list[str] | None = None, place: str = "") -> Any:
    """Return lists and dicts with None for every number that is not finite, as JSON can hold them.

    >>> places = []
    >>> nan_to_none({"test": {"accuracy": 0.1, "loss": float("inf")}}, places), places
    ({'test': {'accuracy': 0.1, 'loss': None}}, ['test.loss'])

    Args:
        value: a number, list or dict, nested as deep as it is.
        replaced: list to which the places of the replaced numbers are appended.
        place: place of ``value`` itself, prefixed to all others.
    """
    if isinstance(value, float) and not math.isfinite(value):
        if replaced is not None:
            replaced.append(place)
        return None
    if isinstance(value, Mapping):
        return {
            key: nan_to_none(v, replaced, f"{place}.{key}".lstrip("."))
            for key, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [nan_to_none(v, replaced, f"{place}[{i}]") for i, v in enumerate(value)]
    return value


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8 whatever the locale."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)


def write_atomically(
    path: Path, write: Callable[[Path], Any], previous: Path | None = None
) -> None:
    """Write a file atomically: readers see the old content or the new one, also after a crash of the machine.

    Args:
        path: the file.
        write: writes the new content to the temporary file that it is given.
        previous: name under which the old file stays; None deletes it.

    Raises:
        IsADirectoryError: if ``path`` is a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        if previous is not None and path.exists():
            _name_also(path, previous)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _name_also(path: Path, name: Path) -> None:
    """Give a file a second name, replacing the file that had it; the first name exists throughout."""
    second = name.with_name(f"{name.name}.{os.getpid()}.tmp")
    try:
        os.link(path, second)
        os.replace(second, name)
    except OSError:  # a file system without hard links
        os.replace(path, name)
    finally:
        # os.replace leaves the link if both names were one file already
        second.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk (fsync)."""
    number = os.open(path, os.O_RDONLY)
    try:
        sync_open_file(number, path)
    finally:
        os.close(number)


def sync_open_file(number: int, path: Path) -> None:
    """Wait until an open file is on the disk; warn once if the file system has no fsync."""
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in FSYNC_UNSUPPORTED:
            raise
        warn_unsynced(path, error)


def suppress_unsynced_warning() -> None:
    """Suppress further warnings about file systems without fsync."""
    global _warned
    _warned = True


def warn_unsynced(path: Path, error: OSError) -> None:
    """Warn, once in a process, about a file system without fsync."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{path}: its file system does not say when the disk has what was written (fsync: {error.strerror}); files "
            "outlive a process that is killed, but perhaps not a power cut",
            stacklevel=3,
        )
