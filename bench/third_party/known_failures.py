"""Known failures of other libraries' models, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from bench.third_party.examination import Row
from bench.third_party.invariances import Answer

ZEROS_OF_CONVOLUTIONS = (
    "a convolution layer has the paper's grid, on which 0 need not lie; "
    "padded places hold zeros that are rounded"
)
ANOTHER_COMPUTATION = "a step of the recurrence multiplies other operands than a pass over the whole sequence"
# (pattern of the model, question) -> reason
KNOWN_ANSWERS: dict[tuple[str, str], str] = {
    **dict.fromkeys(
        [
            (model, question)
            for model in ("mamba,*", "mamba2,*", "falcon_mamba,*", "olmo_hybrid,*")
            for question in ("left padding", "cached = full")
        ],
        ZEROS_OF_CONVOLUTIONS,
    ),
    **dict.fromkeys(
        [(model, "left padding") for model in ("recurrent_gemma,*", "bamba,*")],
        ZEROS_OF_CONVOLUTIONS,
    ),
    ("minimax,*", "cached = full"): ANOTHER_COMPUTATION,
}


def unexpected_rows(rows: Iterable[Row]) -> list[str]:
    """Return a line for every fault of a layer or function; none is known."""
    return [f"{row.name} ({row.case}): {fault}" for row in rows for fault in row.faults]


def reason_of(answer: Answer) -> str:
    """Return why an invariance is known to be broken; "" if it is not. No crash is known."""
    if answer.outcome != "broken":
        return ""
    for (model, question), reason in KNOWN_ANSWERS.items():
        if fnmatchcase(answer.model, model) and answer.question == question:
            return reason
    return ""


def unexpected_answers(answers: Iterable[Answer]) -> list[str]:
    """Return a line for every broken invariance that is not a known one."""
    lines = []
    for answer in answers:
        if answer.outcome in ("broken", "crashed") and not reason_of(answer):
            question = f"{answer.family}, {answer.model}, {answer.question}"
            moved = dict(answer.moved)
            lines.append(f"{question}: {answer.outcome} {moved} {answer.error}")
    return lines


def outdated_answers(answers: Sequence[Answer]) -> list[str]:
    """Return a line for every known failure that all of its models have overcome."""
    lines = []
    for pattern, question in KNOWN_ANSWERS:
        outcomes = {
            answer.outcome
            for answer in answers
            if fnmatchcase(answer.model, pattern) and answer.question == question
        }
        if outcomes and outcomes.isdisjoint(("broken", "crashed")):
            lines.append(
                f"{pattern}, {question}: is listed as a known failure, but holds"
            )
    return lines
