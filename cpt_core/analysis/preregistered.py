"""The answers to the questions of ``PREREGISTRATION.md`` as tables, figure and sections of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_core.analysis.answers import Answer, answers, over_schedules
from cpt_core.analysis.metrics import interval_text
from cpt_core.analysis.pages import Section
from cpt_core.analysis.style import COLORS, drawing


def summary(found: Sequence[Answer]) -> pd.DataFrame:
    """Return the answers for people: question, primary effect, p-value before and after Holm, outcome, runs lost."""
    lines = []
    for a in found:
        effects = "; ".join(map(str, a.primary)) or "–"
        p, adjusted = (f"{v:.2g}" if v == v else "–" for v in (a.p, a.adjusted))
        lines.append((a.question, a.asks, effects, p, adjusted, a.word, a.lost))
    columns = ["", "question", "primary effect [95 %]", "p", "p (Holm)", "outcome", "diverged or failed"]
    return pd.DataFrame(lines, columns=columns)


def secondary(found: Sequence[Answer]) -> pd.DataFrame:
    """Return all else that the document promises, with 95 % intervals; it decides nothing."""
    lines = [
        (a.question, e.what, f"{interval_text(e.mean, *e.interval())} {e.unit}".strip(), len(e.values))
        for a in found
        for e in a.secondary
    ]
    return pd.DataFrame(lines, columns=["", "effect", "mean [95 %]", "seeds"])


def answers_figure(found: Sequence[Answer]) -> Figure:
    """Draw the primary effects of the answered questions, each in its unit: mean, 95 % interval, margin in grey.

    Raises:
        ValueError: when no question is answered.
    """
    shown = [(a, e) for a in found for e in a.primary]
    if not shown:
        raise ValueError("no question is answered yet; all runs of one are needed")
    with drawing(len(shown), 1, figsize=(8, 0.75 * len(shown) + 0.3)) as (figure, axes):
        for ax, (a, e) in zip(axes[:, 0], shown, strict=True):
            low, high = e.interval()
            ax.axvspan(-e.margin, e.margin, color="#dddddd", linewidth=0)
            ax.axvline(0, color="#888888", linewidth=0.8)
            ax.errorbar(e.mean, 0, xerr=[[e.mean - low], [high - e.mean]], fmt="o", color=COLORS["static"], capsize=3)
            ax.plot(e.values, np.full(len(e.values), -0.6), "|", color=COLORS["static"], alpha=0.5)
            widest = 1.15 * max(e.margin, *np.abs(e.values), abs(low), abs(high))
            ax.set(xlim=(-widest, widest), ylim=(-1, 0.7), yticks=[])
            ax.set_title(f"{a.question}  {e.what} ({e.unit})", fontsize=8, loc="left")
            ax.tick_params(labelsize=7)
    return figure


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what the preregistered questions came to, once all runs of one are there."""
    found = answers(runs)
    if not any(a.primary for a in found):
        return
    note = (
        "Arms, seeds, tests and what each outcome means were written down in PREREGISTRATION.md before the first run. "
        "Grey: margins within which an effect is not worth naming. Runs that diverged or failed count as chance."
    )
    alt = "primary effects of the preregistered questions with their intervals and margins"
    yield Section("Preregistered questions", (note,), answers_figure(found), alt, summary(found), "left")
    yield Section("Preregistered questions: other effects", table=secondary(found), style="left folded")
    general = over_schedules(runs)
    if len(general):
        note = "The slopes of H1 over the means of the twelve schedules, which stand for schedules in general."
        yield Section("H1 over schedules", (note,), table=general, style="left")
