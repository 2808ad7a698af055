"""The one way to refuse a value: an error that names it and what is allowed.

>>> choose("profile", "cosine", ("linear", "cosine"))
'cosine'
"""

from __future__ import annotations

import operator
from typing import Any


def whole(what: str, value: Any) -> int:
    """Return ``value`` as an int; ValueError for anything that is not a whole number, booleans included."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what} must be an integer, got {value!r}") from None


def choose(what: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``allowed``; else a ValueError names them."""
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(allowed)}")
    return value
