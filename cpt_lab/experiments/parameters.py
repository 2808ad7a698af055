"""Parameters of experiments: the names, types and values that papermill, ``cpt run``, YAML files and Python share.

``PARAMETERS`` has one entry per name. A design of ``designs`` takes these names as arguments, a notebook as parameters
and the command line as options. ``None`` takes the value of the recipe, or of the scale.

>>> checked("q_max", [6, 8])
[6, 8]
>>> checked("q_max", "[6, 8]")  # as papermill passes it on from `-p q_max "[6, 8]"`
[6, 8]
"""

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from cpt_core.schedules.profiles import SCHEDULES
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.schema import DECAYS, PRESETS, SCALES, is_own

MAX_SEED = 2**31 - 1
MAX_STEPS = 10_000_000
NO_ITEMS = "none"  # what the command line takes for an empty list


@dataclass(frozen=True)
class Parameter:
    """The type and the allowed values of one parameter."""

    kind: str  # "str", "int", "float", "bool", or "list"
    allowed: str  # in words
    accepts: Callable[[Any], bool]  # tests a value, or an item of a list
    optional: bool = False  # whether None is allowed

    def check(self, name: str, value: Any) -> Any:
        """Return a value, a list also from its text; ValueError names the parameter, what is allowed, and the value."""
        if value is None and self.optional:
            return None
        if self.kind != "list":
            if not self.accepts(value):
                raise ValueError(
                    f"{name} must be {self.allowed}{self._or_none()}; got {value!r}"
                )
            return value
        if isinstance(value, str) and value.strip().startswith("["):
            value = read_list(value)
        expected = f"{name} must be a list of {self.allowed}{self._or_none()}"
        if not isinstance(value, (list, tuple)):
            hint = f": write [{value}]" if self.accepts(value) else ""
            raise ValueError(f"{expected}; got {value!r}{hint}")
        for item in value:
            if not self.accepts(item):
                hint = ""
                if isinstance(item, str) and "," in item:
                    hint = (
                        "; on the command line several values are separated by blanks"
                    )
                raise ValueError(f"{expected}; got {item!r} in {list(value)!r}{hint}")
        return list(value)

    def from_words(self, name: str, words: Sequence[str]) -> Any:
        """Return the value that words of the command line stand for; "none" is an empty list."""
        values = [literal(word) for word in words]
        if self.kind == "list":
            return self.check(name, [] if list(words) == [NO_ITEMS] else values)
        return self.check(name, words[-1] if self.kind == "str" else values[-1])

    def _or_none(self) -> str:
        return ", or None" if self.optional else ""


def names_parameter(names: Iterable[str]) -> Parameter:
    """Return a parameter that is one of some names."""
    allowed = tuple(names)
    return Parameter(
        "str",
        f"one of {', '.join(allowed)}",
        lambda v: isinstance(v, str) and v in allowed,
    )


def data_parameter(
    names: Sequence[str], user_data: str, can_be_empty: bool = False
) -> Parameter:
    """Return a parameter that is a named data set, or files of the user's own, described by ``user_data``."""

    def accepts(value: Any) -> bool:
        if not isinstance(value, str):
            return False
        return value in names or is_own(value) or (can_be_empty and not value)

    return Parameter("str", f"one of {', '.join(names)}, {user_data}", accepts)


def whole_parameter(low: int, high: int, optional: bool = False) -> Parameter:
    """Return a parameter that is a whole number in a range."""
    allowed = f"a whole number from {low} to {high}"
    return Parameter(
        "int", allowed, lambda v: type(v) is int and low <= v <= high, optional
    )


def list_parameter(allowed: str, item: Parameter, optional: bool = False) -> Parameter:
    """Return a parameter that is a list of what another parameter accepts."""
    return Parameter("list", allowed, item.accepts, optional)


def _whole_numbers(low: int, high: int, optional: bool = False) -> Parameter:
    return list_parameter(
        f"whole numbers from {low} to {high}", whole_parameter(low, high), optional
    )


def _is_positive_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 < value < math.inf
    )


PAIRS = tuple(EXPERIMENTS["entailment"].named_datasets)
# Sentence pairs have a parameter of their own beside a text; as ``dataset`` they are allowed, too.
DATASET_NAMES = tuple(name for e in EXPERIMENTS.values() for name in e.named_datasets)

PARAMETERS: dict[str, Parameter] = {
    "scale": names_parameter(SCALES),
    "dataset": data_parameter(
        DATASET_NAMES,
        "or your own data: a folder such as 'my-images/', or .npz archives",
    ),
    "model": Parameter(
        "str",
        "the name of a model, or '' for the first of the data set",
        lambda v: isinstance(v, str),
    ),
    "preset": names_parameter(PRESETS),
    "schedules": list_parameter(", ".join(SCHEDULES), names_parameter(SCHEDULES)),
    "static_bits": _whole_numbers(1, 32, optional=True),
    "q_max": _whole_numbers(1, 32),
    "q_min": whole_parameter(1, 32, optional=True),
    "q_grad": whole_parameter(1, 32, optional=True),
    "n_cycles": whole_parameter(1, 1000, optional=True),
    "steps": whole_parameter(1, MAX_STEPS, optional=True),
    "learning_rate": Parameter(
        "float",
        "a number above 0 (in YAML with a point, such as 1.0e-3)",
        _is_positive_number,
        optional=True,
    ),
    "seeds": _whole_numbers(0, MAX_SEED, optional=True),
    "aggregations": list_parameter(
        "fp, quantized", names_parameter(("fp", "quantized"))
    ),
    "deficit_bits": whole_parameter(1, 32, optional=True),
    "deficit_lengths": _whole_numbers(0, MAX_STEPS, optional=True),
    "deficit_starts": _whole_numbers(0, MAX_STEPS, optional=True),
    "deficit_window": whole_parameter(1, MAX_STEPS, optional=True),
    "decay": list_parameter(", ".join(DECAYS), names_parameter(DECAYS)),
    "controls": Parameter("bool", "True or False", lambda v: isinstance(v, bool)),
}

# Lists that would leave nothing to run.
NOT_EMPTY = ("q_max", "seeds", "aggregations", "decay")


def checked(
    name: str, value: Any, parameters: Mapping[str, Parameter] = PARAMETERS
) -> Any:
    """Return a value of a parameter, a list also from its text.

    Raises:
        ValueError: for an unknown name or a wrong value; it says what is allowed.
    """
    if name not in parameters:
        names = ", ".join(parameters)
        raise ValueError(
            f"unknown parameter {name!r}{did_you_mean(name, parameters)} There is {names}"
        )
    checked_value = parameters[name].check(name, value)
    if checked_value == [] and name in NOT_EMPTY:
        allowed = f"a list of at least one of {parameters[name].allowed}"
        none = "; None takes the recipe's" if parameters[name].optional else ""
        raise ValueError(f"{name} must be {allowed}{none}; got []")
    return checked_value


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question with the nearest name, or a full stop where none is near."""
    near = get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


def literal(text: str) -> Any:
    """Return the Python literal that a text is, or the text itself."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


def read_list(text: str) -> list[Any]:
    """Return a list from its text; items are Python literals or bare words.

    >>> read_list("[CR, 'RR', 8]")
    ['CR', 'RR', 8]
    """
    return [
        literal(word) for word in text.strip().strip("[]").split(",") if word.strip()
    ]
