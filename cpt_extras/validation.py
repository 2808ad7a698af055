"""Checks of the values that users' functions return."""

from typing import Any

from cpt_core.validation import short_repr


def check_float(description: str, value: Any) -> float:
    """Return ``value`` as a float.

    Args:
        description: how the message of an error begins, such as "score must return".
        value: a number, or an array or tensor of one element.

    Raises:
        ValueError: for anything else.
    """
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{description}, one number; got {short_repr(value)}"
        ) from None
