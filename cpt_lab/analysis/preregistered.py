"""Answers to preregistered questions (``cpt_lab.studies``): by one test each, as sentences, tables and a figure.

And whether their effects repeat, when a grid is run again with fresh seeds on this machine: single runs do not repeat
between processors; the difference of two arms over seeds does, where it is one.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from cpt_core.validation import check_choice
from cpt_lab.analysis.estimates import Estimate, holm, significant_effects
from cpt_lab.analysis.run_table import committed, table
from cpt_lab.analysis.style import COLORS, QUIET, TEXT, interval_bar, subplots
from cpt_lab.experiments.grids import grid_specs, studies
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.sweeps.result_row import ResultRow

LEVEL = 0.05  # of the tests of a study together
EVALUATED_ALIKE = "outcome if both sides are evaluated alike"  # header of the column, see ``Answer.by_rule``
FRESH = 1000  # what is added to the seeds of a question, where a grid is run again


@dataclass(frozen=True)
class Answer:
    """A preregistered question, and what its runs say."""

    question: str = ""  # its name, such as "H4b"
    asks: str = ""  # the question in words
    primary: tuple[Estimate, ...] = ()  # the effects that the primary test is about
    p: float = math.nan  # of the primary test; NaN where runs are missing
    # of the outcome if the test stands, and whether it stands or not; the outcome is "open" without either
    words: tuple[str, str] = ("", "")
    secondary: tuple[Estimate, ...] = ()  # what else the document promises
    beside: str = ""  # what is said after the outcome, and decides nothing
    lost: int = 0  # how many runs diverged or failed
    adjusted: float = math.nan  # ``p`` by Holm's correction over the tests of a study
    word: str = ""
    # the outcome where both sides are evaluated alike, by the name of a rule in ``estimates.RULES``; also where it is
    # the registered one. Empty where the question has one rule alone
    by_rule: tuple[tuple[str, str], ...] = ()

    def judged(self) -> str:
        """Return the outcomes by rule in words, such as "Judged at 8 bits: open. Judged at their own bits: ..."."""
        return " ".join(
            f"Judged at {rule}: {outcome}." for rule, outcome in self.by_rule
        )


def correct_answers(found: Sequence[Answer]) -> list[Answer]:
    """Return the answers of a study with their p-values after Holm's correction, and the words that follow."""

    def worded(a: Answer, adjusted: float) -> Answer:
        stands, otherwise = a.words
        said = [
            word for word in (stands if adjusted < LEVEL else "", otherwise) if word
        ]
        return replace(
            a,
            adjusted=adjusted,
            word="; ".join([*(said or ["open"]), *filter(None, [a.beside])]),
        )

    return [
        worded(a, p) if a.primary else a
        for a, p in zip(found, holm([a.p for a in found]), strict=True)
    ]


def against(primary: Sequence[Estimate]) -> tuple[float, list[str], list[str]]:
    """Return p of "every effect is below its margin", and those above and below 0 at .025, with Holm over all."""
    above, below = (
        significant_effects(primary, side, 0.025) for side in ("greater", "less")
    )
    return float(np.max([e.p(e.margin, "less") for e in primary])), above, below


def judge_unbeaten(
    primary: Sequence[Estimate],
    stands: str,
    wins: str,
    secondary: Sequence[Estimate] = (),
    beside: str = "",
    other: str = "static",
) -> Answer:
    """Return the answer to whether nothing beats the other side by its margin; ``wins`` says what does."""
    p, above, below = against(primary)
    count = f"of {len(primary)}"
    beaten = (
        f"contradicted: {wins} in {len(above)} {count} ({'; '.join(above)})"
        if above
        else ""
    )
    words, said = (
        (f"confirmed: {stands}", beaten),
        f"{other} is better in {len(below)} {count}{beside}",
    )
    return Answer(
        primary=tuple(primary),
        p=p,
        words=words,
        secondary=tuple(secondary),
        beside=said,
    )


def add_rules(
    answer: Answer, family: Sequence[Answer], by_rule: Mapping[str, Answer]
) -> Answer:
    """Add to an answer its outcome by each of ``RULES``, which judge both sides alike, and whether it depends on them.

    Args:
        answer: with its outcome.
        family: the answers of the study, before Holm's correction.
        by_rule: the answer to the same question by rule, before correction.
    """
    outcomes, told = {}, []
    for rule, alike in by_rule.items():
        told_alike = correct_answers(
            [alike if a.question == answer.question else a for a in family]
        )
        found = next(a for a in told_alike if a.question == answer.question)
        outcomes[rule] = _outcome_alone(found.word)
        without_names = re.sub(r" \([^()]*\)", "", found.word)
        told.append(
            (
                rule,
                f"{without_names}; p {_number(found.adjusted)} after Holm's correction",
            )
        )
    said = depends(_outcome_alone(answer.word), outcomes)
    return replace(
        answer, word="; ".join(filter(None, [answer.word, said])), by_rule=tuple(told)
    )


def _outcome_alone(word: str) -> str:
    """Return the outcome without what is said beside it: "open" of "open; the pair gains in 3 of 6"."""
    return re.split("[:;]", word, maxsplit=1)[0]


def depends(outcome: str, by_rule: Mapping[str, str]) -> str:
    """Return "depends on the rule" where an outcome is another under rules that judge both sides alike, and which."""
    others = [
        f"{other} where both are judged at {rule}"
        for rule, other in by_rule.items()
        if other != outcome
    ]
    return f"depends on the rule: {' and '.join(others)}" if others else ""


def summary(found: Sequence[Answer]) -> pd.DataFrame:
    """Return the answers for people: question, primary effect, p-value before and after Holm, outcome, runs lost."""
    lines = []
    for a in found:
        effects = "; ".join(map(str, a.primary)) or "–"
        by_rule = a.judged() or "–"
        lines.append(
            (
                a.question,
                a.asks,
                effects,
                _number(a.p),
                _number(a.adjusted),
                a.word,
                by_rule,
                a.lost,
            )
        )
    columns = [
        "",
        "question",
        "primary effect [95 %]",
        "p",
        "p (Holm)",
        "outcome",
        EVALUATED_ALIKE,
        "diverged or failed",
    ]
    return pd.DataFrame(lines, columns=columns)


def all_answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of all studies, as far as they are answered."""
    return [answer for study in studies("outcome") for answer in study.answers(runs)]


def secondary(found: Sequence[Answer]) -> pd.DataFrame:
    """Return all else that the document promises, with 95 % intervals; it decides nothing."""
    lines = [
        (a.question, e.what, e.shown(), len(e.values))
        for a in found
        for e in a.secondary
    ]
    return pd.DataFrame(lines, columns=["", "effect", "mean [95 %]", "seeds"])


def _number(value: float) -> str:
    return f"{value:.2g}" if value == value else "–"


# what is drawn in a line: its name, mean, ends of its interval, a verdict
Line = tuple[str, float, float, float, str]


def in_margins(
    effects: Sequence[Estimate],
    names: Sequence[str],
    below: str = "static is better",
    above: str = "cycle is better",
) -> list[Line]:
    """Return effects in units of their margins; a verdict stands at .025 on one side, with Holm's correction."""
    lost, won = (
        significant_effects(effects, side, 0.025) for side in ("less", "greater")
    )
    lines = []
    for name, e in zip(names, effects, strict=True):
        word = (
            below
            if e.what in lost
            else above
            if e.what in won
            else "alike"
            if e.small
            else "open"
        )
        low, high = e.interval()
        said = f"{word} ({e.mean:+.2f} {e.unit})"
        lines.append(
            (
                f"{name}, n = {len(e.values)}",
                e.mean / e.margin,
                low / e.margin,
                high / e.margin,
                said,
            )
        )
    return lines


def intervals(
    lines: Sequence[Line], title: str, unit: str, band: float = 0.0
) -> Figure:
    """Draw means and 95 % intervals on one axis from the top down, name and verdict above each, grey around 0."""
    alt = f"{title}. {'; '.join(f'{name}: {word}' for name, *_, word in lines)}"
    with subplots(alt=alt, figsize=(5.6, 0.9 + 0.38 * len(lines))) as (
        figure,
        ((ax,),),
    ):  # narrow: phones read it, too
        ax.axvspan(-band, band, color="#dddddd", linewidth=0)
        ax.axvline(0, color=QUIET, linewidth=0.8)
        size = min(
            8.5, 640 / max(len(name + word) for name, *_, word in lines)
        )  # both fit beside each other
        for y, (name, mean, low, high, word) in zip(
            range(len(lines))[::-1], lines, strict=True
        ):
            group = (
                "static"
                if word.startswith("open") or low <= 0 <= high
                else "large"
                if high < 0
                else "small"
            )
            interval_bar(
                ax, y, (mean, low, high), color=COLORS[group], markersize=4, capsize=2
            )
            for x, text, side in ((0.01, name, "left"), (0.99, word, "right")):
                ax.text(
                    x,
                    y + 0.28,
                    text,
                    color=TEXT[group],
                    ha=side,
                    size=size,
                    transform=ax.get_yaxis_transform(),
                )
        ax.grid(axis="y", visible=False)
        ax.set(xlabel=unit, yticks=[], ylim=(-0.35, len(lines) - 0.2))
        figure.suptitle(title, fontsize=11)
    return figure


# --- do effects repeat ----------------------------------------------------------------------------
@dataclass(frozen=True)
class ReplicatedEffect:
    """An effect of the committed rows, ``before``, and of fresh seeds, ``now``.

    ``p`` is that of Welch's test that they differ, by Holm over the effects of the grid.
    """

    before: Estimate
    now: Estimate
    p: float

    @property
    def word(self) -> str:
        """ "repeats", "no effect, again", "DIFFERS", or "cannot be told" with these seeds."""
        signs = [
            (low > 0) - (high < 0)
            for low, high in (self.before.interval(), self.now.interval())
        ]
        if self.p < LEVEL:
            return "DIFFERS"
        return (
            "cannot be told"
            if signs[0] != signs[1]
            else "repeats"
            if signs[0]
            else "no effect, again"
        )

    def __str__(self) -> str:
        n = f"n = {len(self.before.values)} and {len(self.now.values)}"
        return f"{self.before.what}: {self.word}: {self.now.shown()}, stored {self.before.shown()}, {n}"


def fresh(grid: str) -> list[RunSpec]:
    """Return the runs of a preregistered grid, such as "h5/characters", with seeds that nothing committed has.

    Raises:
        ValueError: for another grid, naming those that there are.
    """
    check_choice(
        "grid", grid, [name for study in studies("arms") for name in study.GRIDS]
    )
    return [replace(spec, seed=spec.seed + FRESH) for spec in grid_specs(grid)]


def data_of(grid: str) -> list[tuple[RunSpec, str]]:
    """Return a run of every recipe of a grid, and the checksum of the data that its committed rows were trained on."""
    stored = committed().set_index("key")["data_checksum"]
    of = {
        (spec.recipe, str(stored.get(spec.key, ""))): spec for spec in grid_specs(grid)
    }
    return [(spec, checksum) for (_, checksum), spec in of.items() if checksum]


def replicated_effects(grid: str, rows: Iterable[ResultRow]) -> list[ReplicatedEffect]:
    """Return the primary effects that rest on a grid, from committed rows and from those of ``fresh(grid)``."""
    known, keys = committed(), [spec.key for spec in grid_specs(grid)]
    again = table(rows)
    of = {spec.key: key for spec, key in zip(fresh(grid), keys, strict=True)}
    again = again.assign(key=again["key"].map(of), seed=again["seed"] - FRESH)
    mixed = pd.concat([known[~known["key"].isin(keys)], again])
    both = zip(studies("arms"), studies("outcome"), strict=True)
    (study,) = (outcome for arms, outcome in both if grid in arms.GRIDS)
    before, now = (
        {(a.question, e.what): e for a in study.answers(runs) for e in a.primary}
        for runs in (known, mixed)
    )
    return pair_effects(
        (e, now[k])
        for k, e in before.items()
        if k in now and list(e.values) != list(now[k].values)
    )


def pair_effects(pairs: Iterable[tuple[Estimate, Estimate]]) -> list[ReplicatedEffect]:
    """Return what became of the effects of a grid: each from the committed rows, and from fresh seeds."""
    pairs = list(pairs)
    p = holm(
        [
            float(stats.ttest_ind(a.values, b.values, equal_var=False).pvalue)
            for a, b in pairs
        ]
    )
    return [
        ReplicatedEffect(a, b, found) for (a, b), found in zip(pairs, p, strict=True)
    ]
