"""Answers of H13 in ``docs/preregistration.md``: which matmuls switch from four bits to MXFP8 late.  No torch."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.estimates import Estimate, significant_effects
from cpt_lab.analysis.preregistered import Answer, interval_figure, margin_lines
from cpt_lab.analysis.rendering import Section
from cpt_lab.studies.h13.arms import (
    EQUAL_COST_ARMS,
    FORWARD_ARM,
    FP4_FORMATS,
    FULL_ARM,
    INPUT_GRADIENT_ARM,
    INTEGER_FORMATS,
    SPREAD_ARM,
    STATIC_ARM,
    STUDY,
    WEIGHT_GRADIENT_ARM,
    WIDE_ARM,
)
from cpt_lab.studies.tuned_outcome import (
    Question,
    Task,
    answer_questions,
    complete,
    level_columns,
    show_table,
)

GRADIENT_ARMS = (INPUT_GRADIENT_ARM, WEIGHT_GRADIENT_ARM)
FIGURE_ALT = "a late switch of the forward matmuls minus one of a gradient, and minus forward matmuls spread over time"
tasks = partial(complete, STUDY)


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H13, a family of three tests, from rows."""
    return answer_questions(*tasks(runs), QUESTIONS)


def gain(task: Task, others: Sequence[str], rule: str = "") -> Estimate:
    """Return the gain of the late forward switch on the best of other arms on held-out data."""
    return task.gain(FORWARD_ARM, task.best(others), rule)


def mean_gain(
    tasks_of_format: Sequence[Task], others: Sequence[str], rule: str = ""
) -> Estimate:
    """Return the mean over tasks of ``gain`` in margins, by seed."""
    gains = [gain(task, others, rule) for task in tasks_of_format]
    format = tasks_of_format[0].case.partition("/")[2]
    names = " or ".join(others)
    return Estimate(
        f"{format}, {FORWARD_ARM} minus {names}, mean of {len(gains)} tasks",
        "margins",
        np.mean([g.values / g.margin for g in gains], axis=0),
        1.0,
    )


def _by_format(parts: Sequence[Task], formats: Sequence[str]) -> list[list[Task]]:
    """Return the tasks of every format in which MXFP8 is better than four bits on held-out data."""
    found = []
    for format in formats:
        tasks_of_format = [
            part
            for part in parts
            if part.case.partition("/")[2] == format
            and part.best([STATIC_ARM, FULL_ARM]) == FULL_ARM
        ]
        if tasks_of_format:
            found.append(tasks_of_format)
    return found


def _answer(
    parts: Sequence[Task],
    others: Sequence[str],
    formats: Sequence[str],
    sign: int = 1,
    rule: str = "",
) -> Answer:
    """Return the answer to whether the late forward switch is better than other arms; worse for ``sign`` -1."""
    answerable = _by_format(parts, formats)
    primary = [mean_gain(tasks, others, rule) for tasks in answerable]
    side, opposite = ("greater", "less") if sign > 0 else ("less", "greater")
    is_tested = len(primary) == len(formats)
    p = max((effect.p(0.0, side) for effect in primary), default=1.0)
    better, worse = "better", "worse"
    against = significant_effects(primary, opposite, 0.025) if primary else []
    contradicted = ""
    if against:
        contradicted = (
            f"contradicted: the late forward switch is {worse if sign > 0 else better} "
            f"({'; '.join(against)})"
        )
    left_out = [
        part.name
        for part in parts
        if part.case.partition("/")[2] in formats
        and not any(part in tasks for tasks in answerable)
    ]
    remark = ""
    if left_out:
        remark = f"left out, as MXFP8 is not better there: {', '.join(left_out)}"
    return Answer(
        primary=tuple(primary),
        p=p if is_tested else 1.0,
        words=(
            f"confirmed: the late forward switch is {better if sign > 0 else worse}",
            contradicted,
        ),
        secondary=tuple(gain(part, others, rule) for part in parts),
        remark=remark,
        outcome="" if primary else f"open; {remark}",
    )


QUESTIONS: dict[str, Question] = {
    "H13a": (
        "In FP4, is it better to switch the forward matmuls late than those of a gradient?",
        partial(_answer, others=GRADIENT_ARMS, formats=FP4_FORMATS),
    ),
    "H13b": (
        "In int4, is it worse to switch the forward matmuls late than those of a gradient?",
        partial(_answer, others=GRADIENT_ARMS, formats=INTEGER_FORMATS, sign=-1),
    ),
    "H13c": (
        "In FP4, is a late switch of the forward matmuls better than the same MXFP8 steps spread over the training?",
        partial(_answer, others=(SPREAD_ARM,), formats=FP4_FORMATS),
    ),
}


def gains(parts: Sequence[Task]) -> pd.DataFrame:
    """Return a printable table of what every arm gains on four bits alone, and of what MXFP8 alone gains."""
    columns: dict[str, list[str]] = {"task": [part.name for part in parts]}
    for arm in (*EQUAL_COST_ARMS, WIDE_ARM, FULL_ARM):
        columns[f"{arm} minus {STATIC_ARM} [95 %]"] = [
            part.gain(arm, STATIC_ARM).text() if arm in part.settings else "–"
            for part in parts
        ]
    return pd.DataFrame(columns | level_columns(parts))


def comparisons(parts: Sequence[Task]) -> pd.DataFrame:
    """Return a printable table of the late forward switch against the other arms of its cost."""
    columns: dict[str, list[str]] = {"task": [part.name for part in parts]}
    for other in EQUAL_COST_ARMS[1:]:
        columns[f"{FORWARD_ARM} minus {other} [95 %]"] = [
            part.gain(FORWARD_ARM, other).text() for part in parts
        ]
    return pd.DataFrame(columns | level_columns(parts))


def figure(parts: Sequence[Task]) -> Figure:
    """Draw the late forward switch minus the better gradient switch and minus a spread one, in units of the margin."""
    lines = []
    for others, word in ((GRADIENT_ARMS, "gradient"), ((SPREAD_ARM,), "spread")):
        names = [
            f"{part.name}: forward late minus {part.best(others)}" for part in parts
        ]
        found = [gain(part, others) for part in parts]
        lines += margin_lines(found, names, f"{word} is better", "forward is better")
    return interval_figure(
        lines,
        "Which matmuls should switch from four bits to MXFP8 late",
        "gain at equal cost, in margins (grey: within one, 1 point or 1 %)",
        band=1,
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the results of H13, once all runs of a task are stored."""
    note = (
        f"H13 of docs/preregistration.md. {', '.join(EQUAL_COST_ARMS)} cost the same whatever MXFP8 costs: a fifteenth "
        "of the matmuls of quantised layers is in MXFP8, the others have four bits. Learning rate and bits of "
        "evaluation of every arm were chosen on held-out data."
    )
    return show_table(
        STUDY,
        runs,
        QUESTIONS,
        "Which matmuls should switch late, in formats that hardware has?",
        note,
        figure,
        FIGURE_ALT,
        ("gains on four bits", gains),
        ("the late forward switch", comparisons),
    )
