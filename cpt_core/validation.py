"""Checks of arguments: errors that name the value and what is allowed."""

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from difflib import get_close_matches
from functools import lru_cache
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

MAX_BITS = 32


def check_inputs(inputs: Any) -> None:
    """Raise ValueError for inputs that ``model(*inputs)`` would take apart: a tensor by itself is one of its rows."""
    if not isinstance(inputs, (tuple, list)):
        raise ValueError(
            f"inputs must be a tuple of the arguments of forward, got a {type(inputs).__name__}; "
            "of one argument x it is (x,)"
        )


def check_int(
    what: str, value: Any, least: int | None = None, most: int | None = None
) -> int:
    """Return ``value`` as an int; ValueError for no whole number from ``least`` to ``most``, and for booleans."""
    wanted = "an integer" if least is None else f"a whole number of at least {least}"
    wanted += "" if most is None else f" and at most {most}"
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{what} must be {wanted}, got {short_repr(value)}") from None
    if (
        isinstance(value, bool)
        or (least is not None and number < least)
        or (most is not None and number > most)
    ):
        raise ValueError(f"{what} must be {wanted}, got {short_repr(value)}")
    return number


def check_bits(what: str, bits: Any) -> int:
    """Return ``bits`` as an int when it is a whole number in 1..32, also as a float, else raise ValueError."""
    try:
        return check_int(
            what,
            int(bits) if isinstance(bits, float) and bits.is_integer() else bits,
            1,
            MAX_BITS,
        )
    except ValueError:
        raise ValueError(
            f"{what} must be an integer from 1 to {MAX_BITS}, got {short_repr(bits)}"
        ) from None


def check_choice(what: str, value: Any, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``allowed``; else a ValueError names them, of many the three nearest."""
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        raise ValueError(
            f"unknown {what} {short_repr(value)}; {suggest_names(value, names)}"
        )
    return value


def suggest_names(value: Any, names: Sequence[str]) -> str:
    """Return what there is instead of a wrong name: all names, or of more than a line the three nearest."""
    listed = ", ".join(names)
    if len(listed) <= 160:
        return f"choose from {listed}"
    return f"the nearest of {len(names)} are {', '.join(get_close_matches(str(value), names, n=3, cutoff=0.0))}"


def check_types(what: Any, given: Mapping[str, Any], parts: bool = False) -> None:
    """Raise ValueError for the first value that is not of the type its annotation declares; it names both.

    ``check_types(function, locals())`` at the top of a function checks its arguments;
    ``check_types(type(self), vars(self))`` in ``__post_init__`` checks the fields. With ``parts``
    the elements of tuples, lists and mappings are checked, too. A bool is not accepted as a
    number, nor a string as a list. Ranges are checked where the values are used.
    """
    for name, hint in _hints(
        getattr(what, "__func__", what)
    ).items():  # a method is kept, its object is not
        if name in given and not _fits(given[name], hint, parts):
            raise ValueError(
                f"{name} must be {_type_text(hint)}, got {short_repr(given[name])}"
            )


@lru_cache(maxsize=1024)
def _hints(what: Any) -> dict[str, Any]:
    return {
        name: hint for name, hint in get_type_hints(what).items() if name != "return"
    }


def _fits(value: Any, hint: Any, parts: bool) -> bool:
    """Return whether a value is of a type; what is no class, such as ``Any`` or a protocol, takes everything."""
    kind, of = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, one, parts) for one in of)
    if kind is int:
        return not isinstance(value, bool) and (
            _is_index(value) or (isinstance(value, float) and value.is_integer())
        )
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if kind in (tuple, Sequence, Iterable):
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
            return False
        if not parts:
            return True
        each = (
            of
            if kind is tuple and of[-1] is not ...
            else of[:1] * len(value)
            if isinstance(value, Sized)
            else ()
        )
        listed = isinstance(value, (tuple, list)) and len(each) == len(value)
        return listed and all(
            _fits(v, one, parts) for v, one in zip(value, each, strict=True)
        )
    if kind is Mapping:
        items = value.items() if isinstance(value, Mapping) else ()
        return isinstance(value, Mapping) and all(
            not parts or (_fits(k, of[0], parts) and _fits(v, of[1], parts))
            for k, v in items
        )
    return (
        kind is Any
        or not isinstance(kind, type)
        or getattr(kind, "_is_protocol", False)
        or isinstance(value, kind)
    )


def _is_index(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


_WORDS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "True or False",
    NoneType: "None",
}


def _type_text(hint: Any) -> str:
    """Write a type for people: words for what is simple, else the annotation without the names of modules."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_type_text, get_args(hint))))
    if get_origin(hint) is Callable:
        return "a function"
    return _WORDS.get(hint) or re.sub(
        r"(\w+\.)+(?=\w)", "", inspect.formatannotation(hint)
    )


def short_repr(value: Any) -> str:
    """Write a value for an error: as Python does, but the type alone of what takes lines or hundreds of characters."""
    text = repr(value)
    return (
        text if len(text) <= 200 and "\n" not in text else f"a {type(value).__name__}"
    )
