"""Argument validation: checks that raise ValueError with the value and what is allowed.

``check_int``, ``check_bits`` and ``check_choice`` check one value; ``check_types`` the arguments of a function, or
all fields of a dataclass, against their annotations.  ``short_repr`` and ``suggest_names`` format values for messages.
"""

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

MAX_BITS = 32
MAX_LISTED_CHARACTERS = 160  # about a line of a terminal
MAX_REPR_CHARACTERS = 200


# arguments of a forward pass: positional ones, or keyword arguments
ForwardInputs = tuple[Any, ...] | Mapping[str, Any]


def check_inputs(inputs: Any) -> tuple[Any, ...] | dict[str, Any]:
    """Return the arguments of a forward pass as a tuple or a dict, see ``run_forward``.

    Raises:
        ValueError: for anything else, such as a tensor, of which ``model(*inputs)`` would iterate over the rows.
    """
    if isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs):
        return dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs)
    raise ValueError(
        "inputs must be a tuple of the arguments of forward, or a mapping of its keyword arguments, "
        f"got a {type(inputs).__name__}; of one argument x it is (x,)"
    )


def run_forward(call: Callable[..., Any], inputs: ForwardInputs) -> Any:
    """Call a model or function with positional arguments in a tuple, or keyword arguments in a mapping."""
    return call(**inputs) if isinstance(inputs, Mapping) else call(*inputs)


def check_int(
    name: str, value: Any, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Return ``value`` as an int.

    Raises:
        ValueError: for a boolean, for no whole number, and for one outside ``minimum`` to ``maximum``.
    """
    expected = "an integer"
    if minimum is not None:
        expected = f"a whole number of at least {minimum}"
    if maximum is not None:
        expected += f" and at most {maximum}"

    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(
            f"{name} must be {expected}, got {short_repr(value)}"
        ) from None

    is_too_small = minimum is not None and number < minimum
    is_too_large = maximum is not None and number > maximum
    if isinstance(value, bool) or is_too_small or is_too_large:
        raise ValueError(f"{name} must be {expected}, got {short_repr(value)}")
    return number


def check_bits(name: str, bits: Any) -> int:
    """Return ``bits`` as an int; ValueError for anything but a whole number in 1..32.

    A float that is a whole number, such as 8.0, is accepted.
    """
    is_whole_float = isinstance(bits, float) and bits.is_integer()
    try:
        return check_int(name, int(bits) if is_whole_float else bits, 1, MAX_BITS)
    except ValueError:
        raise ValueError(
            f"{name} must be an integer from 1 to {MAX_BITS}, got {short_repr(bits)}"
        ) from None


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``allowed``, else raise ValueError with the nearest choices."""
    choices = tuple(allowed)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"unknown {name} {short_repr(value)}; {suggest_names(value, choices)}"
        )
    return value


def suggest_names(value: Any, names: Sequence[str]) -> str:
    """Return the part of a message that lists valid names, or the three nearest of many."""
    all_names = ", ".join(names)
    if len(all_names) <= MAX_LISTED_CHARACTERS:
        return f"choose from {all_names}"
    nearest = get_close_matches(str(value), names, n=3, cutoff=0.0)
    return f"the nearest of {len(names)} are {', '.join(nearest)}"


def check_types(annotated: Any, values: Mapping[str, Any], parts: bool = False) -> None:
    """Raise ValueError if a value does not match its type annotation; the message names both.

    ``check_types(function, locals())`` at the top of a function checks its arguments;
    ``check_types(type(self), vars(self))`` in ``__post_init__`` checks the fields. With ``parts``
    the elements of tuples, lists and mappings are checked, too. A bool is not accepted as a
    number, nor a string as a list. Ranges are checked where the values are used.
    """
    # the cache must hold the function and not a bound method, which would keep its object alive
    function = getattr(annotated, "__func__", annotated)
    for name, hint in _type_hints(function).items():
        if name in values and not _has_type(values[name], hint, parts):
            raise ValueError(
                f"{name} must be {_type_text(hint)}, got {short_repr(values[name])}"
            )


@lru_cache(maxsize=1024)
def _type_hints(annotated: Any) -> dict[str, Any]:
    hints = get_type_hints(annotated)
    return {name: hint for name, hint in hints.items() if name != "return"}


def _has_type(value: Any, hint: Any, parts: bool) -> bool:
    """Return whether a value has an annotated type; ``Any`` and protocols accept everything."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return any(_has_type(value, alternative, parts) for alternative in arguments)
    if origin is int:
        return _is_whole_number(value)
    if origin is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if origin in (tuple, Sequence, Iterable):
        return _is_sequence(value, origin, arguments, parts)
    if origin is Mapping:
        return _is_mapping(value, arguments, parts)
    if origin is Any or not isinstance(origin, type):
        return True
    if getattr(origin, "_is_protocol", False):
        return True
    return isinstance(value, origin)


def _is_whole_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return _is_index(value) or (isinstance(value, float) and value.is_integer())


def _is_sequence(
    value: Any, origin: Any, element_hints: tuple[Any, ...], parts: bool
) -> bool:
    """Return whether a value is iterable and, with ``parts``, a tuple or list of elements of the annotated types."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        return False
    if not parts:
        return True
    if not isinstance(value, (tuple, list)):
        return False

    has_fixed_length = origin is tuple and element_hints[-1] is not ...
    hints = element_hints if has_fixed_length else element_hints[:1] * len(value)
    if len(hints) != len(value):
        return False
    return all(
        _has_type(element, hint, parts)
        for element, hint in zip(value, hints, strict=True)
    )


def _is_mapping(value: Any, hints: tuple[Any, ...], parts: bool) -> bool:
    """Return whether a value is a mapping and, with ``parts``, its keys and values have the annotated types."""
    if not isinstance(value, Mapping):
        return False
    if not parts:
        return True
    key_hint, value_hint = hints
    return all(
        _has_type(key, key_hint, parts) and _has_type(element, value_hint, parts)
        for key, element in value.items()
    )


def _is_index(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


TYPE_WORDS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "True or False",
    NoneType: "None",
}


def _type_text(hint: Any) -> str:
    """Return a type in words, or its annotation without module names."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_type_text, get_args(hint))))
    if get_origin(hint) is Callable:
        return "a function"
    return TYPE_WORDS.get(hint) or re.sub(
        r"(\w+\.)+(?=\w)", "", inspect.formatannotation(hint)
    )


def short_repr(value: Any) -> str:
    """Return the ``repr`` of a value for a message, or its type alone if that is long."""
    text = repr(value)
    is_short = len(text) <= MAX_REPR_CHARACTERS and "\n" not in text
    return text if is_short else f"a {type(value).__name__}"
