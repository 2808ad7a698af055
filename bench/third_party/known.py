"""Promises that are known to be broken over foreign models and functions, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from bench.third_party.examination import Row
from bench.third_party.invariances import Answer

# (pattern of the layer or function, fault) -> reason
KNOWN_FAULTS: dict[tuple[str, str], str] = {}
# (pattern of the model, question) -> reason
KNOWN_ANSWERS: dict[tuple[str, str], str] = {}


def unexpected_rows(rows: Iterable[Row]) -> list[str]:
    """Return the faults that are not known."""
    return [
        f"{row.name} ({row.case}): {fault}"
        for row in rows
        for fault in row.faults
        if not any(fnmatchcase(row.name, name) and fault.startswith(known) for name, known in KNOWN_FAULTS)
    ]


def unexpected_answers(answers: Iterable[Answer]) -> list[str]:
    """Return the broken invariances that are not known."""
    return [
        f"{a.family}, {a.model}, {a.question}: {a.outcome} {dict(a.moved)} {a.error}"
        for a in answers
        if a.outcome in ("broken", "crashed")
        and not any(fnmatchcase(a.model, model) and a.question == question for model, question in KNOWN_ANSWERS)
    ]
