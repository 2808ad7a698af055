"""Answers of H10 in ``docs/preregistration.md``: matmuls that switch to more bits before the learning rate falls."""

from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.estimates import Estimate
from cpt_lab.analysis.preregistered import (
    Answer,
    interval_figure,
    judge_unbeaten,
    margin_lines,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.studies.h10.arms import EXTENDED_STUDY, LATE, STATIC, STUDY
from cpt_lab.studies.tuned import FULL_BITS_ARM
from cpt_lab.studies.tuned_outcome import (
    Task,
    answer_questions,
    baseline_columns,
    by_evaluation,
    complete,
    show_table,
)

OPPONENTS = {
    "H10a": STATIC,
    "H10b": ("gradients late", "both late"),
    "H10c": ("forward spread",),
}
QUESTION_START = "At one cost, does switching the forward matmuls to 8 bits, as the learning rate falls,"
FIGURE_ALT = "gain of a late forward switch over static bits, over other switches, and over the same bits spread evenly"
tasks = partial(complete, STUDY)


def effects(parts: Sequence[Task], question: str, rule: str = "") -> list[Estimate]:
    """Return the gain of the late forward switch in every task on the best opponent of a question."""
    return [t.gain(LATE, t.best(OPPONENTS[question]), rule) for t in parts]


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H10, a family of three tests, from rows."""
    return answer_questions(*tasks(runs), QUESTIONS)


def extended_answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H10 at extended learning rates, from rows; a sensitivity analysis."""
    return answer_questions(*complete(EXTENDED_STUDY, runs), QUESTIONS)


def _answer(parts: Sequence[Task], question: str, rule: str = "") -> Answer:
    pairs = {
        "H10a": ((LATE, "4/4"), (FULL_BITS_ARM, LATE)),
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
    "H10a": (f"{QUESTION_START} beat static bits?", partial(_answer, question="H10a")),
    "H10b": (
        f"{QUESTION_START} beat switching the gradients, or both?",
        partial(_answer, question="H10b"),
    ),
    "H10c": (
        f"{QUESTION_START} beat the same bits at other times?",
        partial(_answer, question="H10c"),
    ),
}


def gains(parts: Sequence[Task]) -> pd.DataFrame:
    """Return a printable table of the gain of the late forward switch on the opponents of every question."""
    columns: dict[str, list[str]] = {"task": [t.name for t in parts]}
    for question, opponent_name in {
        "H10a": "static bits",
        "H10b": "another switch",
        "H10c": "the same, spread",
    }.items():
        cells = []
        for task, effect in zip(parts, effects(parts, question), strict=True):
            cells.append(f"{effect.text()} ({task.best(OPPONENTS[question])})")
        columns[f"minus {opponent_name} [95 %]"] = cells
    return pd.DataFrame(columns | baseline_columns(parts))


def gains_by_evaluation(parts: Sequence[Task], question: str = "H10a") -> pd.DataFrame:
    """Return the gain of the late forward switch on the opponents of a question, by the bits of evaluation."""
    return by_evaluation(
        parts,
        lambda t: (LATE, t.best(OPPONENTS[question])),
        f"{LATE} minus the best of its opponents",
    )


def switches(parts: Sequence[Task]) -> pd.DataFrame:
    """Return the gain of 8 forward bits in the last fifth on 8 gradient bits in the last half, by task.

    Both have the same BitOps. The preregistration does not list this comparison: it is exploratory.
    """
    lines = []
    for t in parts:
        gain = t.gain(LATE, "gradients late")
        lines.append(
            (t.name, gain.text(), f"{gain.p():.1g}", str(len(gain.values)), t.baseline)
        )
    columns = [
        "task",
        f"{LATE} minus gradients late [95 %]",
        "p",
        "n",
        f"{FULL_BITS_ARM} reaches",
    ]
    return pd.DataFrame(lines, columns=columns)


def figure(parts: Sequence[Task]) -> Figure:
    """Draw the gain of the late forward switch, in units of the margin."""
    lines = []
    for question in QUESTIONS:
        task_effects = effects(parts, question)
        names = [f"{t.name}, minus {t.best(OPPONENTS[question])}" for t in parts]
        lines += margin_lines(task_effects, names, "worse", "better")
    num_won, num_lost = (
        sum(line[-1].startswith(word) for line in lines) for word in ("better", "worse")
    )
    title = f"A late forward switch wins {num_won} of {len(lines)} comparisons and loses {num_lost}"
    return interval_figure(
        lines,
        title,
        "gain at equal cost, in margins (grey: within one, 1 point or 1 %)",
        band=1,
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the results of H10, once all runs of a task are stored."""
    note = (
        "H10 of docs/preregistration.md. Bits are forward/gradient bits; all arms but 4/4 and 8/8 cost a third of 8/8, "
        "and 5/4 costs 1.6 % more. Learning rate and bits of evaluation of every arm, and which opponent is taken, "
        "were chosen on held-out data."
    )
    return show_table(
        STUDY,
        runs,
        QUESTIONS,
        "Which matmuls should switch to more bits late",
        note,
        figure,
        FIGURE_ALT,
        extended=extended_answers(runs),
    )
