"""Gradients that pay for forward bits, and cycles after that: H7 and H8 of ``docs/preregistration.md``.  No torch."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from cpt_lab.analysis.pages import Section
from cpt_lab.analysis.preregistered import Answer, sentence

QUESTIONS = {
    "H7a": "At the cost of 3 bits: do 4 forward bits with 5-bit gradients beat 3 with 8?",
    "H7b": "At the cost of 4 bits: do 5 forward bits with 5-bit gradients beat 4 with 8?",
    "H7c": "At the cost of 5 bits: do 6 forward bits with 5-bit gradients beat 5 with 8?",
    "H8a": "Does a cycle beat 4 forward bits with 5-bit gradients at equal cost?",
    "H8b": "Does a cycle beat 5 forward bits with 5-bit gradients at equal cost?",
}


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H7 and H8, a family of five tests."""
    return [Answer(name, asks, word="open: 0 of 1240 runs") for name, asks in QUESTIONS.items()]


def findings(runs: pd.DataFrame) -> list[str]:
    """Return what rows say of H7 and H8."""
    told = answers(runs)
    return [sentence(told, a.question) for a in told]


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield nothing yet."""
    yield from ()
