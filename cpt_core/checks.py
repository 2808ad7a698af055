"""The one way to refuse: errors that name the value and what is allowed, or the library and what brings it.

Also what files have in common: numbers that JSON cannot hold, and writing in one go.

>>> choose("profile", "cosine", ("linear", "cosine"))
'cosine'
"""

from __future__ import annotations

import math
import operator
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def arguments(inputs: Any) -> None:
    """Raise ValueError for inputs that ``model(*inputs)`` would take apart: a tensor by itself is one of its rows."""
    if not isinstance(inputs, (tuple, list)):
        raise ValueError(
            f"inputs must be a tuple of the arguments of forward, got a {type(inputs).__name__}; "
            "of one argument x it is (x,)"
        )


def whole(what: str, value: Any, least: int | None = None) -> int:
    """Return ``value`` as an int; ValueError for what is no whole number of at least ``least``, booleans included."""
    wanted = "an integer" if least is None else f"a whole number of at least {least}"
    try:
        if isinstance(value, bool) or (least is not None and value < least):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what} must be {wanted}, got {value!r}") from None


def choose(what: str, value: Any, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``allowed``; else a ValueError names them, of many the three nearest."""
    if value not in (names := tuple(allowed)):
        raise ValueError(f"unknown {what} {value!r}; {offer(value, names)}")
    return value


def offer(value: Any, names: Sequence[str]) -> str:
    """Return what there is instead of a wrong name: all names, or of more than a line the three nearest."""
    listed = ", ".join(names)
    if len(listed) <= 160:
        return f"choose from {listed}"
    return f"the nearest of {len(names)} are {', '.join(get_close_matches(str(value), names, n=3, cutoff=0.0))}"


def library(name: str, extra: str) -> Any:
    """Import an optional library, or "module:name" that needs one; ImportError names the extra that brings it."""
    try:
        return pkgutil.resolve_name(name if ":" in name else f"{name}:")
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        if not extra or missing == "cpt_core":
            raise
        raise ImportError(f"{missing} cannot be imported; get it with: pip install 'cpt-core[{extra}]'") from error


def nulled(value: Any, lost: list[str] | None = None, place: str = "") -> Any:
    """Return lists and dicts with None for every number that is not finite, as JSON can hold them.

    >>> places = []
    >>> nulled({"test": {"accuracy": 0.1, "loss": float("inf")}}, places), places
    ({'test': {'accuracy': 0.1, 'loss': None}}, ['test.loss'])

    Args:
        value: a number, a text, or lists, tuples and dicts of such.
        lost: gets the places of the numbers that were not finite.
        place: of ``value`` itself.
    """
    if isinstance(value, float) and not math.isfinite(value):
        if lost is not None:
            lost.append(place)
        return None
    if isinstance(value, Mapping):
        return {key: nulled(v, lost, f"{place}.{key}".lstrip(".")) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [nulled(v, lost, f"{place}[{i}]") for i, v in enumerate(value)]
    return value


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whatever the locale; readers see the old one or the new one."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], Any], previous: Path | None = None) -> None:
    """Let ``write`` make a file beside ``path``, then put it in its place: readers see the old one or the new one.

    Both ways on the disk too, so that the machine may stop at any moment. With ``previous`` the old one stays under
    that name, from when the new one is on the disk.
    """
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
        second.unlink(missing_ok=True)  # the system leaves it there when both were one file already


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
