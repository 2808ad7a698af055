"""Checks of what the functions of users return."""

from typing import Any

from cpt_core.validation import shown


def number(what: str, value: Any) -> float:
    """Return a number, or an array or tensor of one, as a float; ValueError for others."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what}, one number; got {shown(value)}") from None
