"""What only the notebooks need: predictions, self-checking exercises, bands for live numbers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from reprlib import repr as short
from typing import Any

import pandas as pd

from cpt_lab.analysis.effects import LEAST_SEEDS
from cpt_lab.analysis.metrics import interval_text
from cpt_lab.analysis.pages import terminal
from cpt_lab.analysis.statistics import interval
from cpt_lab.experiments.recipe import is_own
from cpt_lab.paths import results_dir
from cpt_lessons import checks_of_lessons, checks_of_results
from cpt_lessons.answers import Refused, Unanswered
from cpt_lessons.predictions import PREDICTIONS

EXERCISES = dict(sorted((checks_of_lessons.EXERCISES | checks_of_results.EXERCISES).items()))

_predictions: dict[str, str] = {}


def predict(question: str, choice: Any, options: tuple[str, ...] = ("a", "b", "c")) -> None:
    """Note your prediction before you run on; "" notes none, and what is no option gets a sentence."""
    letter = choice.strip(" ().").lower() if isinstance(choice, str) else None
    _predictions.pop(question, None)
    if letter == "":
        print(f"{question}: no prediction yet - put a letter between the quotes")
    elif letter in options:
        _predictions[question] = letter
        print(f"{question}: noted {letter!r}")
    else:
        print(f"{question}: {short(choice)} is none of {', '.join(options)} - put one of them between the quotes")


def reveal(question: str, found: str | None = None, because: str = "") -> None:
    """Tell the answer of ``PREDICTIONS`` to those who have chosen, and nobody else.

    Args:
        question: that of ``predict``.
        found: the answer that committed rows give, where they decide it.
        because: what is to be said beyond the answer's own sentence.

    Raises:
        AssertionError: when rows give another answer than the one that is kept.
    """
    if question not in PREDICTIONS:
        print(f"there is no question {short(question)}; those of the notebooks are {', '.join(PREDICTIONS)}")
        return
    answer, reason = PREDICTIONS[question]
    if found not in (None, answer):
        raise AssertionError(f"{question}: the answer that is kept is {answer}, the rows say {found}")
    choice = _predictions.get(question)
    if choice is None:
        print(f"{question}: choose first, in the cell with predict, then run this cell again")
        return
    verdict = "You were right." if choice == answer else f"You said {choice}."
    print(f"{question}: the answer is {answer}.  {verdict}", reason, *filter(None, [because]), sep="\n")


def show(frame: pd.DataFrame) -> None:
    """Print a table."""
    print(terminal(frame))


def check(exercise: str, attempt: Any, right: Callable[[Any], bool | str] | None = None, hint: str = "") -> None:
    """Check an exercise; ``...`` means not attempted. Wrong answers get a hint, never a traceback.

    Args:
        exercise: its number in ``EXERCISES``, such as "03.1"; any name when ``right`` is given.
        attempt: a value, or a function that the reader wrote.
        right: whether an attempt is right; what it raises is told as a sentence.
        hint: for attempts that are not.
    """
    hints: Mapping[str, str] = {}
    if right is None:
        if exercise not in EXERCISES:
            print(f"there is no exercise {short(exercise)}")
            return
        right, hint, hints = EXERCISES[exercise]
    said = f"exercise {exercise}" if exercise in EXERCISES else exercise
    if attempt is ...:
        print(f"{said}: not attempted yet")
        return
    why = ""
    try:
        if found := right(attempt):
            print(f"{said}: correct" + (f". {found}" if isinstance(found, str) else ""))
            return
    except Unanswered:
        print(f"{said}: not attempted yet")
        return
    except Refused as refused:
        refusal, *better = refused.args
        why = f": {refusal}"
        hint = next((helps for part, helps in hints.items() if part in " ".join(refused.args)), "" if better else hint)
        hint = ": ".join(filter(None, [*better, hint]))
    except (AttributeError, TypeError):
        why = f": {type(attempt).__name__} is not the kind of answer asked for"
    except Exception as error:
        why = f" ({type(error).__name__}: {error})"
    before = "\n  " if "\n" in why else ". "
    print(f"{said}: not yet{why}{before}Hint: {hint}")


def in_band(name: str, value: float) -> None:
    """Assert that a live number lies in the band measured over many seeds; print only the verdict.

    Bands are kept in ``data/results/bands.json`` with the seeds and the command that measured them.
    """
    band = json.loads((results_dir() / "bands.json").read_text(encoding="utf-8"))["bands"][name]
    if not band["low"] <= value <= band["high"]:
        raise AssertionError(f"{name} = {value:.4f} lies outside its band {band['low']:.4f}..{band['high']:.4f}")
    print(f"{name}: within the range of {len(band['values'])} earlier seeds")


def finding(statement: str, holds: pd.Series, runs: pd.DataFrame, dataset: str) -> None:
    """Print whether a statement holds for every run; where it must, on data that is not your own, assert it.

    Args:
        statement: such as "every run finished".
        holds: whether it does, run by run.
        runs: a line per run, with ``arm`` and ``seed``.
        dataset: what they were trained on.

    Raises:
        AssertionError: on a known data set, naming the runs for which it does not hold.
    """
    against = ", ".join(f"{run.arm} seed {run.seed}" for run in runs[~holds].itertuples())
    if against and not is_own(dataset):
        raise AssertionError(f"{statement}: not so in {against}")
    print(f"{statement}: {f'not so in {against}' if against else 'yes'}")


def direction(values: Iterable[float]) -> int:
    """Return 1 or -1 where the 95 % interval of differences lies above or below 0, else 0; two seeds say nothing."""
    values = list(values)
    _, low, high = interval(values)
    return 0 if len(values) < LEAST_SEEDS else int(low > 0) - int(high < 0)


def compare(what: str, differences: Iterable[float], unit: str = "points", digits: int = 2) -> None:
    """Print paired differences, a value per seed, with their interval, and in words what may be said of them."""
    values = list(differences)
    few = f"fewer than {LEAST_SEEDS} seeds say nothing" if len(values) < LEAST_SEEDS else "cannot be told from 0"
    said = {1: "above 0", -1: "below 0", 0: few}[direction(values)]
    mean, low, high = (round(x, 9) + 0.0 for x in interval(values))  # a mean of 0 has one sign on every machine
    shown = f"{interval_text(mean, low, high, digits)} {unit}".rstrip()
    print(f"{what}: {shown}, n = {len(values)}: {said}")


@contextmanager
def warnings_as_text() -> Iterator[None]:
    """Print the warnings of a block as plain lines instead of sending them to stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for line in dict.fromkeys(f"{warning.category.__name__}: {warning.message}" for warning in caught):
        print(line)
