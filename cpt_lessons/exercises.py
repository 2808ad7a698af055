"""Predictions, self-checking exercises, and bands for live numbers in the notebooks."""

import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from reprlib import repr as short
from typing import Any

from cpt_lab.analysis.effects import MIN_SEEDS
from cpt_lab.analysis.metrics import interval_text
from cpt_lab.analysis.statistics import interval
from cpt_lab.paths import results_dir
from cpt_lessons import exercise_checks, paper_exercise_checks
from cpt_lessons.answer_parsing import Exercise, Refused, Unanswered
from cpt_lessons.predictions import PREDICTIONS

EXERCISES: dict[str, Exercise] = {
    **exercise_checks.EXERCISES,
    **paper_exercise_checks.EXERCISES,
}

PREDICTION_OPTIONS = ("a", "b", "c")  # of every prediction

_predictions: dict[str, str] = {}


def predict(question: str, choice: Any) -> None:
    """Note your prediction before you run on; "" notes none, and what is no option gets a sentence."""
    letter = choice.strip(" ().").lower() if isinstance(choice, str) else None
    _predictions.pop(question, None)
    if letter == "":
        print(f"{question}: no prediction yet - put a letter between the quotes")
    elif letter in PREDICTION_OPTIONS:
        _predictions[question] = letter
        print(f"{question}: noted {letter!r}")
    else:
        options = ", ".join(PREDICTION_OPTIONS)
        print(
            f"{question}: {short(choice)} is none of {options} - put one of them between the quotes"
        )


def reveal(question: str) -> None:
    """Print the answer of a question, if its prediction was made before."""
    if question not in PREDICTIONS:
        print(
            f"there is no question {short(question)}; those of the notebooks are {', '.join(PREDICTIONS)}"
        )
        return
    choice = _predictions.get(question)
    if choice is None:
        print(
            f"{question}: choose first, in the cell with predict, then run this cell again"
        )
        return
    answer, reason = PREDICTIONS[question]
    verdict = "You were right." if choice == answer else f"You said {choice}."
    print(f"{question}: the answer is {answer}.  {verdict}", reason, sep="\n")


def check(exercise: str, attempt: Any) -> None:
    """Check an exercise; ``...`` means not attempted. Wrong answers get a hint, never a traceback.

    Args:
        exercise: its number in ``EXERCISES``, such as "03.1".
        attempt: a value, or a function that the reader wrote.
    """
    if exercise not in EXERCISES:
        print(f"there is no exercise {short(exercise)}")
        return
    print(f"exercise {exercise}: {_verdict(EXERCISES[exercise], attempt)}")


def _verdict(exercise: Exercise, attempt: Any) -> str:
    hint = exercise.hint
    if attempt is ...:
        return "not attempted yet"
    reason = ""
    try:
        if praise := exercise.right(attempt):
            return "correct" + (f". {praise}" if isinstance(praise, str) else "")
    except Unanswered:
        return "not attempted yet"
    except Refused as refused:
        refusal, *better = refused.args
        reason, hint = f": {refusal}", better[0] if better else hint
    except Exception as error:
        reason = f" ({type(error).__name__}: {error})"
    return f"not yet{reason}" + ("\n  " if "\n" in reason else ". ") + f"Hint: {hint}"


def in_band(name: str, value: float) -> None:
    """Assert that a live number lies in the band measured over many seeds; print only the verdict.

    Bands are kept in ``data/results/bands.json`` with the seeds and the command that measured them.
    """
    band = json.loads((results_dir() / "bands.json").read_text(encoding="utf-8"))[
        "bands"
    ][name]
    if not band["low"] <= value <= band["high"]:
        raise AssertionError(
            f"{name} = {value:.4f} lies outside its band {band['low']:.4f}..{band['high']:.4f}"
        )
    print(
        f"{name}: within four standard deviations of {len(band['values'])} earlier seeds"
    )


def compare(
    what: str, differences: Iterable[float], unit: str = "points", digits: int = 2
) -> None:
    """Print paired differences, a value per seed, with their interval, and in words what may be said of them."""
    values = list(differences)
    mean, low, high = interval(values)
    if len(values) < MIN_SEEDS:
        verdict = f"fewer than {MIN_SEEDS} seeds say nothing"
    elif low > 0:
        verdict = "above 0"
    elif high < 0:
        verdict = "below 0"
    else:
        verdict = "cannot be told from 0"

    mean, low, high = (
        round(x, 9) + 0.0 for x in (mean, low, high)
    )  # a mean of 0 has one sign on every machine
    mean_text = f"{interval_text(mean, low, high, digits)} {unit}".rstrip()
    print(f"{what}: {mean_text}, n = {len(values)}: {verdict}")


@contextmanager
def warnings_as_text(scale: str) -> Iterator[None]:
    """Print the warnings of a block as plain lines; omit them at smoke scale."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    for line in dict.fromkeys(
        f"{warning.category.__name__}: {warning.message}" for warning in caught
    ):
        if scale != "smoke":
            print(line)
