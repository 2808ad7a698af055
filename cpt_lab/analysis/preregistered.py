"""The answers to the questions of ``docs/preregistration.md`` as tables, figure and sections of a page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis import allocation
from cpt_lab.analysis.answers import Answer, answers, over_schedules
from cpt_lab.analysis.estimates import Estimate
from cpt_lab.analysis.metrics import interval_text
from cpt_lab.analysis.pages import Section
from cpt_lab.analysis.style import COLORS, drawing

EFFECT = ["", "effect", "mean [95 %]", "seeds"]


def summary(found: Sequence[Answer]) -> pd.DataFrame:
    """Return the answers for people: question, primary effect, p-value before and after Holm, outcome, runs lost."""
    lines = []
    for a in found:
        effects = "; ".join(map(str, a.primary)) or "–"
        p, adjusted = (f"{v:.2g}" if v == v else "–" for v in (a.p, a.adjusted))
        lines.append((a.question, a.asks, effects, p, adjusted, a.word, a.lost))
    columns = ["", "question", "primary effect [95 %]", "p", "p (Holm)", "outcome", "diverged or failed"]
    return pd.DataFrame(lines, columns=columns)


def sentence(found: Sequence[Answer], question: str) -> str:
    """Return what became of a question, such as "H2", in words: what it asks, its outcome, its primary effects."""
    a = next(a for a in found if a.question == question)
    word = re.sub("(confirmed|contradicted): ", "", a.word)
    effects = "; ".join(f"{e.what}: {_interval(e)}, n = {len(e.values)}" for e in a.primary)
    if len(a.primary) > 2:  # too many for a sentence: how far they reach
        ends = {(e.margin, e.unit): max(x.interval()[1] for x in a.primary if x.unit == e.unit) for e in a.primary}
        reach = " and ".join(f"{end:+.2f} {unit} (margin {margin:g})" for (margin, unit), end in ends.items())
        seeds = {e.what.partition(",")[0]: len(e.values) for e in a.primary}
        effects = (
            f"the 95 % intervals reach up to {reach}; {', '.join(f'{task}: n = {n}' for task, n in seeds.items())}"
        )
    said = [part for part in (word, effects) if part]
    return " ".join([f"{question}: {a.asks}", *(f"{part[0].upper()}{part[1:]}." for part in said)])


def outcome(runs: pd.DataFrame) -> list[str]:
    """Return what rows say of schedules and static precision at equal cost: a line each for H2, H1 and H5."""
    found = answers(runs)
    bits = allocation.outcome(runs)
    asks = "H5: Do bits put where they matter beat static precision of equal cost?"
    return [sentence(found, "H2"), sentence(found, "H1"), f"{asks} {bits[0].upper()}{bits[1:]}."]


def primary(found: Sequence[Answer], question: str | None = None) -> pd.DataFrame:
    """Return the effects that decide, of one question or all, with 95 % intervals and their margins, "–" for none."""
    shown = [a for a in found if question in (None, a.question)]
    lines = [(*_line(a, e), _margin(e), f"{e.p():.2g}") for a in shown for e in a.primary]
    return pd.DataFrame(lines, columns=[*EFFECT, "margin +-", "p (against 0)"])


def secondary(found: Sequence[Answer], question: str | None = None) -> pd.DataFrame:
    """Return all else that the document promises, with 95 % intervals; it decides nothing."""
    shown = [a for a in found if question in (None, a.question)]
    return pd.DataFrame([_line(a, e) for a in shown for e in a.secondary], columns=EFFECT)


def _line(a: Answer, e: Estimate) -> tuple[str, str, str, int]:
    return a.question, e.what, _interval(e), len(e.values)


def _margin(e: Estimate) -> str:
    return f"{e.margin:g}" if e.margin == e.margin else "–"


def _interval(e: Estimate) -> str:
    return f"{interval_text(e.mean, *e.interval())} {e.unit}".strip()


def answers_figure(found: Sequence[Answer]) -> Figure:
    """Draw the primary effects of the answered questions, each in its unit: mean, 95 % interval, its margin in grey.

    Raises:
        ValueError: when no question is answered.
    """
    shown = [(a, e) for a in found for e in a.primary]
    if not shown:
        raise ValueError("no question is answered yet; all runs of one are needed")
    with drawing(len(shown), 1, figsize=(8, 0.75 * len(shown) + 0.3)) as (figure, axes):
        for ax, (a, e) in zip(axes[:, 0], shown, strict=True):
            low, high = e.interval()
            margin = np.nan_to_num(e.margin)  # some have none
            ax.axvspan(-margin, margin, color="#dddddd", linewidth=0)
            ax.axvline(0, color="#888888", linewidth=0.8)
            ax.errorbar(e.mean, 0, xerr=[[e.mean - low], [high - e.mean]], fmt="o", color=COLORS["static"], capsize=3)
            ax.plot(e.values, np.full(len(e.values), -0.6), "|", color=COLORS["static"], alpha=0.5)
            widest = 1.15 * max(margin, *np.abs(e.values), abs(low), abs(high))
            ax.set(xlim=(-widest, widest), ylim=(-1, 0.7), yticks=[])
            ax.set_title(f"{a.question}  {e.what}" + (f" ({e.unit})" if e.unit else ""), fontsize=8, loc="left")
            ax.tick_params(labelsize=8)
    return figure


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what the preregistered questions came to, once all runs of one are there."""
    found = answers(runs)
    if not any(a.primary for a in found):
        return
    note = (
        "Arms, seeds, tests and what each outcome means were written down (docs/preregistration.md) before the first "
        "run. Grey: margins within which an effect is not worth naming. Runs that diverged or failed count as chance."
    )
    alt = "primary effects of the preregistered questions with their intervals and margins"
    yield Section("Preregistered questions", (note,), answers_figure(found), alt, summary(found), "left")
    yield Section("Preregistered questions: other effects", table=secondary(found), style="left folded")
    general = over_schedules(runs)
    if len(general):
        note = "The slopes of H1 over the means of the twelve schedules, which stand for schedules in general."
        yield Section("H1 over schedules", (note,), table=general, style="left")
