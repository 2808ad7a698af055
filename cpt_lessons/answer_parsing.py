"""Reading what the answer of an exercise means: a number in any spelling, a word, a schedule, a function's results."""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np
import torch

from cpt_core.schedules.schedule import Schedule


class Refused(Exception):
    """An answer that is not right: a sentence that says what is wrong with it, and a hint, if there is a better one."""


class Unanswered(Exception):
    """A function that returns nothing yet."""


class Exercise(NamedTuple):
    """A check."""

    # takes the attempt; may raise ``Refused`` or ``Unanswered``; a sentence is said of a right answer
    right: Callable[[Any], bool | str]
    hint: str  # what helps on, unless the refusal has a better one


def number(answer: Any) -> float:
    """Return a number of any kind as a float: of Python, NumPy, torch, or text, such as "4/9", "10,000" or "59 %"."""
    if isinstance(answer, str):
        text = re.sub(r"[\s_%]", "", answer)
        thousands = re.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text)
        text = text.replace(",", "" if thousands else ".")
    else:
        text = answer
    try:
        if hasattr(text, "item"):
            text = text.item()
        above, slash, below = (
            text.partition("/") if isinstance(text, str) else (text, "", 1)
        )
        return float(above) / float(below if slash else 1)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError, OverflowError):
        raise Refused(f"{short(answer)} is no number") from None


def words(answer: Any) -> str:
    """Return a word, or a schedule's name, in small letters with single blanks."""
    text = answer if isinstance(answer, str) else getattr(answer, "name", None)
    if not isinstance(text, str):
        raise Refused(f"{short(answer)} is no word")
    return " ".join(text.lower().split())


def schedule(answer: Any, total_steps: int, *ends: int) -> Schedule:
    """Return a schedule of that many steps, between these bits where they are given."""
    if not isinstance(answer, Schedule):
        raise Refused(f"{short(answer)} is no schedule")
    if answer.total_steps != total_steps:
        raise Refused(f"it has {answer.total_steps:,} steps, not {total_steps:,}")
    if ends and (answer.q_min, answer.q_max) != ends:
        raise Refused(f"it goes from {answer.q_min} to {answer.q_max} bits")
    return answer


def suite_schedule(answer: Any) -> Schedule:
    """Return a schedule of the suite, from 3 to 8 bits, of 64,000 steps."""
    s = schedule(answer, 64_000)
    if s.savings not in ("large", "medium", "small"):
        raise Refused("it is none of the ten of the suite")
    return schedule(s, 64_000, 3, 8)


def outcome(function: Any, *args: Any) -> Any:
    """Call a reader's function on copies of ``args``; refused when it is none, or raises, unanswered without result."""
    if not callable(function):
        raise Refused(f"{short(function)} is no function")
    try:
        result = function(*deepcopy(args))
    except Exception as error:
        raise Refused(f"it raises {type(error).__name__}: {error}") from None
    if result is None or result is ...:
        raise Unanswered
    return result


def _array(value: Any) -> np.ndarray:
    return np.asarray(
        value.detach().cpu() if isinstance(value, torch.Tensor) else value, dtype=float
    )


def paste_repr(value: Any) -> str:
    """Return a value as Python writes it, whole, so that it can be pasted; a tensor's 0.7 is not 0.699999988."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    array = (
        (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    )
    return f"tensor({(array.astype(str).astype(float) if array.dtype.kind == 'f' else array).tolist()})"


def _argument_text(sample: tuple[Any, ...], *functions: Callable[..., Any]) -> str:
    """Return arguments with the names that the first of these functions has for them, such as "x = 3, bits = 2"."""
    for function in functions:
        with suppress(TypeError, ValueError):  # some of C have no signature
            names = list(inspect.signature(function).parameters)
            if len(names) >= len(sample):
                return ", ".join(
                    f"{name} = {paste_repr(value)}"
                    for name, value in zip(names, sample, strict=False)
                )
    return ", ".join(map(paste_repr, sample))


def like(
    reference: Callable[..., Any],
    *samples: tuple[Any, ...],
    tolerance: float = 1e-4,
    slips: Mapping[str, Callable[..., Any]] = {},
) -> Callable[[Any], bool]:
    """Return a check of a function: on every sample it gives what ``reference`` gives, by value and shape.

    ``slips`` are functions that people write instead, with a sentence that says what is wrong with them: the hint.
    """

    def close(a: np.ndarray, b: np.ndarray) -> bool:
        return a.shape == b.shape and np.allclose(
            a, b, rtol=tolerance, atol=tolerance, equal_nan=True
        )

    def right(function: Any) -> bool:
        for sample in samples:
            result, expected = outcome(function, *sample), reference(*sample)
            try:
                result_array = _array(result)
            except (TypeError, ValueError, RuntimeError):
                result_array = np.empty((0, 0))  # like nothing that is wanted
            if not close(result_array, _array(expected)):
                slip = [
                    explanation
                    for explanation, wrong_function in slips.items()
                    if close(result_array, _array(wrong_function(*sample)))
                ][:1]
                lines = (
                    f"for {_argument_text(sample, function, reference)}",
                    f"your function returns {paste_repr(result)}",
                )
                raise Refused(
                    "\n  ".join((*lines, f"{'wanted':21} {paste_repr(expected)}")),
                    *slip,
                )
        return True

    return right


def share(value: float, tolerance: float) -> Callable[[Any], bool]:
    """Return a check of a share within ``tolerance``: a number from 0 to 1, or a percentage that says so."""

    def right(answer: Any) -> bool:
        percentage = isinstance(answer, str) and "%" in answer
        return abs(number(answer) / (100 if percentage else 1) - value) <= tolerance

    return right
