"""The one way to refuse: errors that name the value and what is allowed, or the library and what brings it.

>>> choose("profile", "cosine", ("linear", "cosine"))
'cosine'
"""

from __future__ import annotations

import operator
import os
import pkgutil
from collections.abc import Callable, Iterable, Sequence
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


def unsharded(model: Any, first: str) -> None:
    """Raise ValueError for a model whose parameters are spread over processes; ``first`` is what comes before that."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):  # a DTensor, asked without importing torch.distributed
            raise ValueError(
                f"parameter {name!r} is sharded already, by fully_shard or tensor parallelism; {first} before "
                "fully_shard(model). Quantised layers need whole weights when they run: fully_shard gathers them, "
                "tensor parallelism (parallelize_module) does not and cannot be used with them"
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


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whatever the locale; readers see the old one or the new one."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` make a file beside ``path``, then put it in its place: readers see the old one or the new one.

    Both ways on the disk too, so that the machine may stop at any moment.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
