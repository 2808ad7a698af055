"""Files: numbers that JSON cannot hold, and writing in one go, so that a reader never sees half a file."""

from __future__ import annotations

import errno
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# How a file system says that it has no fsync: some FUSE, SMB and other network folders.
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_warned = False  # of a file system without fsync


def nan_to_none(value: Any, lost: list[str] | None = None, place: str = "") -> Any:
    """Return lists and dicts with None for every number that is not finite, as JSON can hold them.

    >>> places = []
    >>> nan_to_none({"test": {"accuracy": 0.1, "loss": float("inf")}}, places), places
    ({'test': {'accuracy': 0.1, 'loss': None}}, ['test.loss'])

    Args:
        value: a number, list or dict, nested as deep as it is.
        lost: gets the places of the numbers that were not finite.
        place: of ``value`` itself.
    """
    if isinstance(value, float) and not math.isfinite(value):
        if lost is not None:
            lost.append(place)
        return None
    if isinstance(value, Mapping):
        return {
            key: nan_to_none(v, lost, f"{place}.{key}".lstrip("."))
            for key, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [nan_to_none(v, lost, f"{place}[{i}]") for i, v in enumerate(value)]
    return value


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whatever the locale; readers see the old one or the new one."""
    write_atomically(
        path, lambda temporary: temporary.write_text(text, encoding="utf-8")
    )


def write_atomically(
    path: Path, write: Callable[[Path], Any], previous: Path | None = None
) -> None:
    """Let ``write`` make a file beside ``path``, then put it in its place: readers see the old one or the new one.

    Both ways on the disk too, so that the machine may stop at any moment. With ``previous`` the old one stays under
    that name, from when the new one is on the disk.
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
    """Give a file a second name, in the place of what had it: so there is no moment without the first."""
    second = name.with_name(f"{name.name}.{os.getpid()}.tmp")
    try:
        os.link(path, second)
        os.replace(second, name)
    except OSError:  # a file system without second names
        os.replace(path, name)
    finally:
        second.unlink(
            missing_ok=True
        )  # the system leaves it there when both were one file already


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        sync_open_file(number, path)
    finally:
        os.close(number)


def sync_open_file(number: int, path: Path) -> None:
    """Wait until the disk has an open file; warn once of a file system that does not offer that."""
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        warn_unsynced(path, error)


def warned_unsynced() -> None:
    """Note that the user has been told of a file system without fsync."""
    global _warned
    _warned = True


def warn_unsynced(path: Path, error: OSError) -> None:
    """Warn, once in a process, that a file system does not say when the disk has a file."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{path}: its file system does not say when the disk has what was written (fsync: {error.strerror}); files "
            "outlive a process that is killed, but perhaps not a power cut",
            stacklevel=3,
        )
