"""Answers to the preregistered questions of ``cpt_lab.studies``: one test each, in sentences, tables and a figure.

``correct_answers`` turns p-values into outcomes after Holm's correction over a study; ``add_rules`` adds the outcomes
under other rules of evaluation; ``summary``, ``secondary`` and ``interval_figure`` show them.

``replicated_effects`` compares the effects of a grid with those of the same grid with fresh seeds on this machine:
single runs are not reproducible across processors, but a true difference of two arms over seeds is.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from cpt_core.validation import check_choice
from cpt_lab.analysis.estimates import (
    INCONCLUSIVE,
    Estimate,
    holm,
    significant_effects,
)
from cpt_lab.analysis.run_table import committed, table
from cpt_lab.analysis.style import COLORS, MUTED_COLOR, TEXT, interval_bar, subplots
from cpt_lab.experiments.grids import grid_specs, studies
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.sweeps.result_row import ResultRow

SIGNIFICANCE_LEVEL = 0.05  # family-wise level of the tests of a study
# header of the column with ``Answer.by_rule``
EQUAL_EVALUATION_COLUMN = "outcome if both sides are evaluated alike"
SEED_OFFSET = 1000  # added to the seeds of a grid when it is replicated


@dataclass(frozen=True)
class Answer:
    """A preregistered question with its result."""

    question: str = ""  # its name, such as "H4b"
    question_text: str = ""  # the question in words
    primary: tuple[Estimate, ...] = ()  # the effects of the primary test
    p: float = math.nan  # of the primary test; NaN if runs are missing
    # outcome if the test is significant, and outcome in any case; "" for none. Without either it is "inconclusive"
    words: tuple[str, str] = ("", "")
    secondary: tuple[Estimate, ...] = ()  # further effects that the document promises
    remark: str = ""  # shown after the outcome; it decides nothing
    num_lost: int = 0  # runs that diverged or failed
    adjusted: float = math.nan  # ``p`` after Holm's correction over a study
    outcome: str = ""
    # (rule of ``estimates.EVALUATION_RULES``, outcome if both sides are evaluated by it); empty for a question with one
    # rule alone
    by_rule: tuple[tuple[str, str], ...] = ()

    def rules_text(self) -> str:
        """Return the outcomes by rule in words, such as "Judged at 8 bits: inconclusive. Judged at ..."."""
        texts = [f"Judged at {rule}: {outcome}." for rule, outcome in self.by_rule]
        return " ".join(texts)


def correct_answers(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers of a study with p-values after Holm's correction, and their outcomes."""
    adjusted_p = holm([answer.p for answer in answers])
    return [
        _with_outcome(answer, p) if answer.primary else answer
        for answer, p in zip(answers, adjusted_p, strict=True)
    ]


def _with_outcome(answer: Answer, adjusted: float) -> Answer:
    """Return an answer with its outcome at an adjusted p-value."""
    significant, always = answer.words
    parts = []
    if significant and adjusted < SIGNIFICANCE_LEVEL:
        parts.append(significant)
    if always:
        parts.append(always)
    if not parts:
        parts.append(INCONCLUSIVE)
    if answer.remark:
        parts.append(answer.remark)
    return replace(answer, adjusted=adjusted, outcome="; ".join(parts))


class MarginTest(NamedTuple):
    """Test of the hypothesis that every effect is below its margin."""

    p: float
    above: list[str]  # effects above 0 at .025, with Holm's correction over all effects
    below: list[str]  # effects below 0


def margin_test(primary: Sequence[Estimate]) -> MarginTest:
    """Return p of "every effect is below its margin", and the significant effects on both sides of 0."""
    above = significant_effects(primary, "greater", 0.025)
    below = significant_effects(primary, "less", 0.025)
    p_values = [effect.p(effect.margin, "less") for effect in primary]
    return MarginTest(float(np.max(p_values)), above, below)


def judge_unbeaten(
    primary: Sequence[Estimate],
    confirmed_text: str,
    wins: str,
    secondary: Sequence[Estimate] = (),
    note: str = "",
    other: str = "static",
) -> Answer:
    """Return the answer to whether nothing beats a baseline by its margin.

    Args:
        primary: gains on the baseline.
        confirmed_text: outcome if the test is significant.
        wins: words for an effect that beats the baseline, such as "a cycle wins".
        secondary: further effects.
        note: end of the remark.
        other: name of the baseline.
    """
    p, above, below = margin_test(primary)
    count = f"of {len(primary)}"
    contradicted = ""
    if above:
        contradicted = (
            f"contradicted: {wins} in {len(above)} {count} ({'; '.join(above)})"
        )
    return Answer(
        primary=tuple(primary),
        p=p,
        words=(f"confirmed: {confirmed_text}", contradicted),
        secondary=tuple(secondary),
        remark=f"{other} is better in {len(below)} {count}{note}",
    )


def add_rules(
    answer: Answer, family: Sequence[Answer], by_rule: Mapping[str, Answer]
) -> Answer:
    """Add the outcomes under ``EVALUATION_RULES`` to an answer, and a note if the outcome depends on the rule.

    Args:
        answer: the answer with its outcome.
        family: the answers of the study, before Holm's correction.
        by_rule: rule -> answer to the same question if both sides are evaluated by it, before correction.
    """
    outcomes, texts = {}, []
    for rule, rule_answer in by_rule.items():
        rule_family = [
            rule_answer if other.question == answer.question else other
            for other in family
        ]
        rule_outcome = next(
            other
            for other in correct_answers(rule_family)
            if other.question == answer.question
        )
        outcomes[rule] = outcome_alone(rule_outcome.outcome)
        without_names = re.sub(r" \([^()]*\)", "", rule_outcome.outcome)
        p = _number(rule_outcome.adjusted)
        texts.append((rule, f"{without_names}; p {p} after Holm's correction"))
    outcome = answer.outcome
    dependence = rule_dependence(outcome_alone(outcome), outcomes)
    if dependence:
        outcome = "; ".join(filter(None, [outcome, dependence]))
    return replace(answer, outcome=outcome, by_rule=tuple(texts))


def outcome_alone(word: str) -> str:
    """Return an outcome without its remark: "inconclusive" for "inconclusive; the pair gains in 3 of 6"."""
    return re.split("[:;]", word, maxsplit=1)[0]


def rule_dependence(outcome: str, by_rule: Mapping[str, str]) -> str:
    """Return a note such as "depends on the rule: confirmed where both are judged at 8 bits"; "" if all agree."""
    deviations = [
        f"{other} where both are judged at {rule}"
        for rule, other in by_rule.items()
        if other != outcome
    ]
    if not deviations:
        return ""
    return f"depends on the rule: {' and '.join(deviations)}"


def summary(answers: Sequence[Answer]) -> pd.DataFrame:
    """Return a printable table of the answers: question, primary effect, p-values, outcome, lost runs."""
    lines = []
    for a in answers:
        effects = "; ".join(map(str, a.primary)) or "–"
        by_rule = a.rules_text() or "–"
        lines.append(
            (
                a.question,
                a.question_text,
                effects,
                _number(a.p),
                _number(a.adjusted),
                a.outcome,
                by_rule,
                a.num_lost,
            )
        )
    columns = [
        "",
        "question",
        "primary effect [95 %]",
        "p",
        "p (Holm)",
        "outcome",
        EQUAL_EVALUATION_COLUMN,
        "diverged or failed",
    ]
    return pd.DataFrame(lines, columns=columns)


def all_answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of all studies with stored runs."""
    return [answer for study in studies("outcome") for answer in study.answers(runs)]


def secondary(answers: Sequence[Answer]) -> pd.DataFrame:
    """Return a printable table of the secondary effects with 95 % intervals; they decide nothing."""
    lines = [
        (a.question, e.description, e.text(), len(e.values))
        for a in answers
        for e in a.secondary
    ]
    return pd.DataFrame(lines, columns=["", "effect", "mean [95 %]", "seeds"])


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2g}"


class IntervalLine(NamedTuple):
    """A line of ``interval_figure``."""

    name: str
    mean: float
    low: float
    high: float
    verdict: str


def margin_lines(
    effects: Sequence[Estimate],
    names: Sequence[str],
    below: str = "static is better",
    above: str = "cycle is better",
) -> list[IntervalLine]:
    """Return effects in units of their margins, with verdicts at .025 on one side after Holm's correction."""
    negative = significant_effects(effects, "less", 0.025)
    positive = significant_effects(effects, "greater", 0.025)
    lines = []
    for name, effect in zip(names, effects, strict=True):
        within = "within the margin"
        if effect.description in negative:
            word = f"{below}, {within}" if effect.is_equivalent else below
        elif effect.description in positive:
            word = f"{above}, {within}" if effect.is_equivalent else above
        else:
            word = within if effect.is_equivalent else INCONCLUSIVE
        low, high = effect.interval()
        lines.append(
            IntervalLine(
                f"{name}, n = {len(effect.values)}",
                effect.mean / effect.margin,
                low / effect.margin,
                high / effect.margin,
                f"{word} ({effect.mean:+.2f} {effect.unit})",
            )
        )
    return lines


def interval_figure(
    lines: Sequence[IntervalLine], title: str, unit: str, band: float = 0.0
) -> Figure:
    """Draw means and 95 % intervals on one axis, with name and verdict above each, grey within +- ``band``."""
    lines = [IntervalLine(*line) for line in lines]
    verdicts = [f"{line.name}: {line.verdict}" for line in lines]
    alt = f"{' '.join(title.split())}. {'; '.join(verdicts)}"
    size = (5.6, 0.9 + 0.38 * len(lines))  # narrow enough for phones
    with subplots(alt=alt, figsize=size) as (figure, ((ax,),)):
        ax.axvspan(-band, band, color="#dddddd", linewidth=0)
        ax.axvline(0, color=MUTED_COLOR, linewidth=0.8)
        # Name and verdict have to fit next to each other.
        longest = max(len(line.name + line.verdict) for line in lines)
        font_size = min(8.5, 640 / longest)
        for y, line in zip(range(len(lines))[::-1], lines, strict=True):
            group = _color_group(line)
            interval_bar(
                ax,
                y,
                (line.mean, line.low, line.high),
                color=COLORS[group],
                markersize=4,
                capsize=2,
            )
            for x, text, side in (
                (0.01, line.name, "left"),
                (0.99, line.verdict, "right"),
            ):
                ax.text(
                    x,
                    y + 0.28,
                    text,
                    color=TEXT[group],
                    ha=side,
                    size=font_size,
                    transform=ax.get_yaxis_transform(),
                )
        ax.grid(axis="y", visible=False)
        ax.set(xlabel=unit, yticks=[], ylim=(-0.35, len(lines) - 0.2))
        figure.suptitle(title, fontsize=11)
    return figure


def _color_group(line: IntervalLine) -> str:
    """Return the key in ``COLORS`` of a line: by the sign of its effect, "static" if it is inconclusive."""
    if line.verdict.startswith(INCONCLUSIVE) or line.low <= 0 <= line.high:
        return "static"
    return "large" if line.high < 0 else "small"


# --- replication with fresh seeds -------------------------------------------------------------------
@dataclass(frozen=True)
class ReplicatedEffect:
    """An effect measured from the committed rows and from fresh seeds.

    Attributes:
        original: the effect of the committed rows.
        replication: the effect of fresh seeds.
        p: p-value of Welch's test that they differ, after Holm's correction over the effects of the grid.
    """

    original: Estimate
    replication: Estimate
    p: float

    @property
    def outcome(self) -> str:
        """Verdict: "repeats", "no effect, again", "DIFFERS", or "cannot be told" with these seeds."""
        if self.p < SIGNIFICANCE_LEVEL:
            return "DIFFERS"
        sign = _sign(self.original)
        if sign != _sign(self.replication):
            return "cannot be told"
        return "repeats" if sign else "no effect, again"

    def __str__(self) -> str:
        n = f"n = {len(self.original.values)} and {len(self.replication.values)}"
        values = f"{self.replication.text()}, stored {self.original.text()}"
        return f"{self.original.description}: {self.outcome}: {values}, {n}"


def _sign(effect: Estimate) -> int:
    """Return 1 or -1 for a significant effect by its sign, 0 if its interval includes 0."""
    low, high = effect.interval()
    return int(low > 0) - int(high < 0)


def fresh_seed_specs(grid: str) -> list[RunSpec]:
    """Return the runs of a preregistered grid, such as "h5/characters", with seeds that no committed row has.

    Raises:
        ValueError: for an unknown grid, with the names of all grids.
    """
    grids = [name for study in studies("arms") for name in study.GRIDS]
    check_choice("grid", grid, grids)
    return [replace(spec, seed=spec.seed + SEED_OFFSET) for spec in grid_specs(grid)]


def grid_data(grid: str) -> list[tuple[RunSpec, str]]:
    """Return a run of every recipe of a grid, and the checksum of the data in its committed rows."""
    checksums = committed().set_index("key")["data_checksum"]
    spec_by_data = {}
    for spec in grid_specs(grid):
        checksum = str(checksums.get(spec.key, ""))
        spec_by_data[spec.recipe, checksum] = spec
    return [
        (spec, checksum) for (_, checksum), spec in spec_by_data.items() if checksum
    ]


def replicated_effects(grid: str, rows: Iterable[ResultRow]) -> list[ReplicatedEffect]:
    """Return the primary effects that use a grid, from committed rows and from rows of ``fresh_seed_specs(grid)``."""
    stored_runs = committed()
    keys = [spec.key for spec in grid_specs(grid)]
    fresh_keys = [spec.key for spec in fresh_seed_specs(grid)]
    stored_key = dict(zip(fresh_keys, keys, strict=True))

    # The fresh runs take the place of the stored ones, under their keys and seeds.
    fresh_runs = table(rows)
    fresh_runs = fresh_runs.assign(
        key=fresh_runs["key"].map(stored_key), seed=fresh_runs["seed"] - SEED_OFFSET
    )
    is_replaced = stored_runs["key"].isin(keys)
    replaced_runs = pd.concat([stored_runs[~is_replaced], fresh_runs])

    study_pairs = zip(studies("arms"), studies("outcome"), strict=True)
    (study,) = (outcome for arms, outcome in study_pairs if grid in arms.GRIDS)
    original = _primary_effects(study.answers(stored_runs))
    replication = _primary_effects(study.answers(replaced_runs))
    pairs = []
    for key, effect in original.items():
        if key in replication and list(effect.values) != list(replication[key].values):
            pairs.append((effect, replication[key]))
    return pair_effects(pairs)


def _primary_effects(answers: Iterable[Answer]) -> dict[tuple[str, str], Estimate]:
    """Return the primary effects of answers by question and description."""
    return {
        (answer.question, effect.description): effect
        for answer in answers
        for effect in answer.primary
    }


def pair_effects(pairs: Iterable[tuple[Estimate, Estimate]]) -> list[ReplicatedEffect]:
    """Return replicated effects with p-values after Holm's correction, from (original, replication) pairs."""
    pairs = list(pairs)
    p_values = []
    for original, replication in pairs:
        test = stats.ttest_ind(original.values, replication.values, equal_var=False)
        p_values.append(float(test.pvalue))
    return [
        ReplicatedEffect(original, replication, p)
        for (original, replication), p in zip(pairs, holm(p_values), strict=True)
    ]
