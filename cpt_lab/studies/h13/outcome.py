"""Answers of H13 in ``docs/preregistration.md``: which matmuls switch from four bits to MXFP8 late.  No torch."""

from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.estimates import Estimate, significant_effects
from cpt_lab.analysis.preregistered import Answer, interval_figure, margin_lines
from cpt_lab.analysis.rendering import Section
from cpt_lab.studies.h13.arms import (
    BOTH,
    FORWARD,
    FP4_FORMATS,
    FULL,
    GRADIENTS,
    INTEGER_FORMATS,
    SPREAD,
    STATIC,
    STUDY,
    WIDE,
)
from cpt_lab.studies.tuned_outcome import (
    Question,
    Task,
    answer_questions,
    complete,
    level_columns,
    show_table,
)

SWITCHES = (FORWARD, GRADIENTS, BOTH, SPREAD)  # of equal cost
FIGURE_ALT = "a late forward switch minus a late gradient switch, and minus forward matmuls spread over the training"
tasks = partial(complete, STUDY)


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H13, a family of three tests, from rows."""
    return answer_questions(*tasks(runs), QUESTIONS)


def effects(
    parts: Sequence[Task], arm: str, other: str, formats: Sequence[str], rule: str = ""
) -> list[Estimate]:
    """Return the quality of an arm minus that of another in all tasks with some formats of four bits."""
    return [
        part.gain(arm, other, rule)
        for part in parts
        if part.case.partition("/")[2] in formats
    ]


def _answer(
    parts: Sequence[Task],
    arm: str,
    other: str,
    formats: Sequence[str],
    rule: str = "",
    also: Sequence[tuple[str, str]] = (),
) -> Answer:
    """Return the answer to whether an arm beats another everywhere; ``also`` are pairs of secondary effects."""
    primary = effects(parts, arm, other, formats, rule)
    negative = significant_effects(primary, "less", 0.025)
    contradicted = ""
    if negative:
        contradicted = (
            f"contradicted: {other} is better in {len(negative)} of {len(primary)} "
            f"({'; '.join(negative)})"
        )
    positive = significant_effects(primary, "greater", 0.025)
    return Answer(
        primary=tuple(primary),
        p=max(effect.p(0.0, "greater") for effect in primary),
        words=(f"confirmed: {arm} is better everywhere", contradicted),
        secondary=tuple(_secondary(parts, also)),
        remark=f"{arm} is better in {len(positive)} of {len(primary)}",
    )


def _secondary(
    parts: Sequence[Task], pairs: Sequence[tuple[str, str]]
) -> Iterator[Estimate]:
    for pair in pairs:
        for part in parts:
            if set(pair) <= set(part.settings):
                yield part.gain(*pair)


QUESTIONS: dict[str, Question] = {
    "H13a": (
        "In FP4, is it better to switch the forward matmuls late than the gradients, at one cost?",
        partial(
            _answer,
            arm=FORWARD,
            other=GRADIENTS,
            formats=FP4_FORMATS,
            also=[(arm, STATIC) for arm in (*SWITCHES, WIDE)] + [(FULL, STATIC)],
        ),
    ),
    "H13b": (
        "In whole numbers of four bits, is it better to switch the gradients late than the forward matmuls?",
        partial(_answer, arm=GRADIENTS, other=FORWARD, formats=INTEGER_FORMATS),
    ),
    "H13c": (
        "In FP4, is it better to have the forward matmuls in MXFP8 late than spread over the training?",
        partial(
            _answer,
            arm=FORWARD,
            other=SPREAD,
            formats=FP4_FORMATS,
            also=[(BOTH, FORWARD), (BOTH, GRADIENTS)],
        ),
    ),
}


def gains(parts: Sequence[Task]) -> pd.DataFrame:
    """Return a printable table of what every arm gains on four bits alone, and of what MXFP8 alone gains."""
    columns: dict[str, list[str]] = {"task": [part.name for part in parts]}
    for arm in (*SWITCHES, WIDE, FULL):
        columns[f"{arm} minus {STATIC} [95 %]"] = [
            part.gain(arm, STATIC).text() if arm in part.settings else "–"
            for part in parts
        ]
    return pd.DataFrame(columns | level_columns(parts))


def comparisons(parts: Sequence[Task]) -> pd.DataFrame:
    """Return a printable table of the late forward switch against the other arms of its cost."""
    columns: dict[str, list[str]] = {"task": [part.name for part in parts]}
    for other in SWITCHES[1:]:
        columns[f"{FORWARD} minus {other} [95 %]"] = [
            part.gain(FORWARD, other).text() for part in parts
        ]
    return pd.DataFrame(columns | level_columns(parts))


def figure(parts: Sequence[Task]) -> Figure:
    """Draw the late forward switch minus a late gradient switch and minus a spread one, in units of the margin."""
    lines = []
    for other, word in ((GRADIENTS, "gradients"), (SPREAD, "spread")):
        gained = [part.gain(FORWARD, other) for part in parts]
        names = [f"{part.name}: forward late minus {other}" for part in parts]
        lines += margin_lines(gained, names, f"{word} is better", "forward is better")
    return interval_figure(
        lines,
        "Which matmuls should switch from four bits to MXFP8 late",
        "gain at equal cost, in margins (grey: within one, 1 point or 1 %)",
        band=1,
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the results of H13, once all runs of a task are stored."""
    note = (
        f"H13 of docs/preregistration.md. {', '.join(SWITCHES)} cost the same, for transformers whatever MXFP8 costs: "
        "a fifteenth of their matmuls is in MXFP8, the others have four bits. Learning rate and bits of evaluation of "
        "every arm were chosen on held-out data."
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
