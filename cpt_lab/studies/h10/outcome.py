"""Which products switch to more bits, shortly before the learning rate falls: H10 of ``docs/preregistration.md``."""

from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.estimates import Estimate
from cpt_lab.analysis.preregistered import Answer, in_margins, intervals, judge_unbeaten
from cpt_lab.analysis.rendering import Section
from cpt_lab.studies.h10.arms import LATE, STATIC, STUDY
from cpt_lab.studies.tuned_outcome import (
    FULL_BITS,
    Task,
    answer_questions,
    by_evaluation,
    complete,
    level_columns,
    show_table,
)

OTHERS = {
    "H10a": STATIC,
    "H10b": ("gradients late", "both late"),
    "H10c": ("forward spread",),
}
ASKS = "At one cost, does switching the forward products to 8 bits, as the learning rate falls,"
ALT = "gain of switching the forward products late on static bits, on other switches, and on the same bits spread"
tasks = partial(complete, STUDY)


def effects(parts: Sequence[Task], question: str, rule: str = "") -> list[Estimate]:
    """Return what the late forward switch gains, in every task, on the best of what a question compares it with."""
    return [t.gain(LATE, t.best(OTHERS[question]), rule) for t in parts]


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H10, a family of three tests, from rows."""
    return answer_questions(*tasks(runs), QUESTIONS)


def _answer(parts: Sequence[Task], question: str, rule: str = "") -> Answer:
    pairs = {
        "H10a": ((LATE, "4/4"), (FULL_BITS, LATE)),
        "H10b": (("gradients late", "both late"),),
    }.get(question, ())
    return judge_unbeaten(
        effects(parts, question, rule),
        "the forward switch beats it nowhere by the margin",
        "the forward switch wins",
        [t.gain(*pair) for pair in pairs for t in parts],
        other="the other",
    )


QUESTIONS = {
    "H10a": (f"{ASKS} beat static bits?", partial(_answer, question="H10a")),
    "H10b": (
        f"{ASKS} beat switching the gradients, or both?",
        partial(_answer, question="H10b"),
    ),
    "H10c": (
        f"{ASKS} beat the same bits at other times?",
        partial(_answer, question="H10c"),
    ),
}


def gains(parts: Sequence[Task]) -> pd.DataFrame:
    """Return what the late forward switch gains on the opponents of every question, for people."""
    found: dict[str, list[str]] = {"task": [t.name for t in parts]}
    for question, what in {
        "H10a": "static bits",
        "H10b": "another switch",
        "H10c": "the same, spread",
    }.items():
        told = zip(parts, effects(parts, question), strict=True)
        found[f"minus {what} [95 %]"] = [
            f"{e.shown()} ({t.best(OTHERS[question])})" for t, e in told
        ]
    return pd.DataFrame(found | level_columns(parts))


def gains_by_evaluation(parts: Sequence[Task], question: str = "H10a") -> pd.DataFrame:
    """Return what the late forward switch gains on the opponents of a question, by the bits of evaluation."""
    return by_evaluation(
        parts,
        lambda t: (LATE, t.best(OTHERS[question])),
        f"{LATE} minus the best of its opponents",
    )


def switches(parts: Sequence[Task]) -> pd.DataFrame:
    """Return what 8 forward bits in the last fifth gain on 8 gradient bits in the last half, by the format of the task.

    Both cost the same by a * b. The preregistration does not ask for it: it is exploratory.
    """
    lines = []
    for t in parts:
        gain = t.gain(LATE, "gradients late")
        lines.append(
            (t.name, gain.shown(), f"{gain.p():.1g}", str(len(gain.values)), t.level)
        )
    columns = [
        "task",
        f"{LATE} minus gradients late [95 %]",
        "p",
        "n",
        f"{FULL_BITS} reaches",
    ]
    return pd.DataFrame(lines, columns=columns)


def figure(parts: Sequence[Task]) -> Figure:
    """Draw what the late forward switch gains, in units of the margin."""
    lines = []
    for question in QUESTIONS:
        found = effects(parts, question)
        names = [f"{t.name}, minus {t.best(OTHERS[question])}" for t in parts]
        lines += in_margins(found, names, "worse", "better")
    won, lost = (
        sum(line[-1].startswith(word) for line in lines) for word in ("better", "worse")
    )
    title = (
        f"A late forward switch wins {won} of {len(lines)} comparisons and loses {lost}"
    )
    return intervals(
        lines,
        title,
        "gain at equal cost, in margins (grey: within one, 1 point or 1 %)",
        band=1,
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what H10 came to, once all runs of a task are there."""
    note = (
        "H10 of docs/preregistration.md. Bits are forward/gradient bits; all arms but 4/4 and 8/8 cost a third of 8/8, "
        "and 5/4 costs 1.6 % more. Learning rate and bits of evaluation of every arm, and which opponent is taken, "
        "were chosen on held-out data."
    )
    return show_table(
        STUDY,
        runs,
        QUESTIONS,
        "Which products should switch to more bits late",
        note,
        figure,
        ALT,
    )
