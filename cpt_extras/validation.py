"""Checks of what the functions of users return."""

from typing import Any

from cpt_core.validation import short_repr


def check_float(what: str, value: Any) -> float:
    """Return a number, or an array or tensor of one, as a float; ValueError for others."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what}, one number; got {short_repr(value)}") from None
