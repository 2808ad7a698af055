"""Answers of H6 in ``docs/preregistration.md``: the paper's schedules on ladders of other formats.  No torch.

A cell is a task on a ladder; the questions are answered when all runs of all cells are stored. A run that diverged or
failed counts as chance.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_core.schedules.profiles import SUITE
from cpt_extras.formats.ladder import LADDERS
from cpt_lab.analysis.estimates import (
    Estimate,
    find_rows,
    run_frame,
    seeds_by_arms,
    significant_effects,
)
from cpt_lab.analysis.preregistered import (
    Answer,
    correct_answers,
    interval_figure,
    judge_unbeaten,
    margin_lines,
    summary,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.statistics import spearman
from cpt_lab.experiments.schema import EIGHT_BITS
from cpt_lab.experiments.spec import savings_of
from cpt_lab.studies.case import NUM_OUTPUTS
from cpt_lab.studies.h6.arms import CASES, LADDER_NAMES, LATE, on_ladders

LADDER_TITLES = {"minifloat": "minifloats", "mx": "MX formats"}
QUESTIONS = {
    "H6a": "In other formats, are dearer schedules better?",
    "H6b": "In other formats, do schedules beat static formats of their cost?",
    "H6c": "In other formats, does low first and high before the decay beat static formats of its cost?",
}


class Cell:
    """A task on a ladder.

    Attributes:
        ladder: name of the ladder.
        name: printed name of task and ladder.
        margin: smallest gain that counts.
        unit: unit of the quality.
        num_lost: number of runs that diverged or failed.
        quality: seeds by arms.
        cost: relative cost by arm.
    """

    def __init__(self, case: str, ladder: str, rows: pd.DataFrame) -> None:
        """Compute the qualities of a cell.

        Args:
            case: name of the task.
            ladder: name of the ladder.
            rows: rows by key, with all runs of the cell.
        """
        task = CASES[case]
        specs = [spec for spec in on_ladders(case) if spec.recipe.ladder == ladder]
        cell_rows = rows.loc[[spec.key for spec in specs]]
        num_outputs = NUM_OUTPUTS[task.dataset]
        runs = run_frame(specs, cell_rows, num_outputs, {EIGHT_BITS: ""})
        self.ladder = ladder
        self.name = f"{case}, {LADDER_TITLES[ladder]}"
        self.margin = task.margin
        self.unit = runs["unit"].iloc[0]
        self.num_lost = int(runs["lost"].sum())
        self.quality = seeds_by_arms(runs)
        self.cost = {spec.arm: spec.relative_cost for spec in specs}

    def at_cost(self, arm: str) -> np.ndarray:
        """Return the quality of static formats at the cost of an arm, by seed, interpolated between neighbours."""
        # The levels are sorted by cost.
        static = [f"static {level}" for level in LADDERS[self.ladder].levels]
        static_costs = [self.cost[name] for name in static]
        qualities = []
        for static_qualities in self.quality[static].to_numpy():
            qualities.append(np.interp(self.cost[arm], static_costs, static_qualities))
        return np.array(qualities)

    def gain(self, arms: Iterable[str]) -> np.ndarray:
        """Return the mean gain of arms on static formats of equal cost, by seed."""
        gains = [self.quality[arm].to_numpy() - self.at_cost(arm) for arm in arms]
        return np.mean(gains, axis=0)

    def agreement(self) -> np.ndarray:
        """Return the rank correlation of cost and quality over the suite's ten, by seed."""
        costs = np.array([self.cost[arm] for arm in SUITE])
        qualities = self.quality[list(SUITE)].to_numpy()
        return np.array([spearman(costs, row) for row in qualities])


def cells(runs: pd.DataFrame) -> list[Cell] | str:
    """Return the cells, or a note on missing runs such as "not finished: 3 of 9 runs"."""
    specs = [spec for case in CASES for spec in on_ladders(case)]
    rows = find_rows(specs, runs)
    if isinstance(rows, str):
        return rows
    return [Cell(case, ladder, rows) for case in CASES for ladder in LADDER_NAMES]


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H6a, H6b and H6c, a family of three tests, from rows."""
    parts = cells(runs)
    if isinstance(parts, str):
        return [
            Answer(name, question_text, outcome=parts)
            for name, question_text in QUESTIONS.items()
        ]
    tests = (_correlation(parts), _gains(parts, SUITE), _gains(parts, (LATE,)))
    num_lost = sum(cell.num_lost for cell in parts)
    study_answers = []
    for (name, question_text), answer in zip(QUESTIONS.items(), tests, strict=True):
        study_answers.append(
            replace(
                answer, question=name, question_text=question_text, num_lost=num_lost
            )
        )
    return correct_answers(study_answers)


def _correlation(parts: list[Cell]) -> Answer:
    """Return whether dearer schedules are better in every cell."""
    primary = []
    for cell in parts:
        description = f"{cell.name}: rank correlation of cost and quality"
        primary.append(Estimate(description, "", cell.agreement()))
    above = significant_effects(primary, "greater", 0.025)
    below = significant_effects(primary, "less", 0.025)
    confirmed, contradicted = "", ""
    if all(effect.mean > 0 for effect in primary):
        confirmed = "confirmed: dearer schedules are better in every task and format"
    if below:
        contradicted = f"contradicted: the reverse in {len(below)} ({'; '.join(below)})"
    return Answer(
        primary=tuple(primary),
        p=max(effect.p() for effect in primary),
        words=(confirmed, contradicted),
        remark=f"dearer schedules are better in {len(above)} of {len(primary)}",
    )


def _gains(parts: list[Cell], arms: Collection[str]) -> Answer:
    """Return whether nothing beats static formats by the margin, for the mean gain of arms."""
    subject = "schedules"
    if len(arms) == 1:
        (subject,) = arms
    primary = []
    for cell in parts:
        description = f"{cell.name}: {subject} minus static"
        primary.append(Estimate(description, cell.unit, cell.gain(arms), cell.margin))
    return judge_unbeaten(
        primary, "nothing beats static formats by the margin", "better"
    )


def by_arm(parts: Sequence[Cell]) -> pd.DataFrame:
    """Return a printable table of cost, quality and gain on static formats, by cell and arm, with 95 % intervals."""
    lines = []
    for c in parts:
        for arm in [*SUITE, LATE]:
            e = Estimate(arm, c.unit, c.gain([arm]))
            mean = f"{c.quality[arm].mean():.2f}"
            lines.append(
                (c.name, arm, savings_of(arm), f"{c.cost[arm]:.3f}", mean, e.text())
            )
    return pd.DataFrame(
        lines,
        columns=[
            "cell",
            "arm",
            "savings",
            "relative cost",
            "quality",
            "gain on static [95 %]",
        ],
    )


def figure(study_answers: Sequence[Answer]) -> Figure:
    """Draw H6b and H6c: schedules against static formats of equal cost, in units of the margin."""
    lines = []
    for effects in (a.primary for a in study_answers[1:]):
        names = [effect.description.replace(" minus static", "") for effect in effects]
        lines += margin_lines(effects, names, above="schedule is better")
    unit = "gain on static formats of equal cost, in margins\n(grey: within one margin, 1 or 0.2 points, or 2 %)"
    won = sum("schedule is better" in line[-1] for line in lines) or "no"
    title = f"Schedules in other number formats: on average better than static formats in {won} case"
    return interval_figure(lines, title, unit, band=1)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the results of H6, once all runs are stored."""
    parts, study_answers = cells(runs), answers(runs)
    if isinstance(parts, str):
        return
    note = (
        "H6 of docs/preregistration.md: the ten schedules, a late rise, and every format by itself, on two ladders of "
        "number formats. Costs are bit operations of elements; those of static training in the highest format are 1. "
        "Small tasks, simulated arithmetic, eight seeds."
    )
    alt = (
        "what schedules, and a late rise, gain on static number formats of their cost, "
        "for three tasks and two ladders"
    )
    yield Section(
        "Schedules on other number formats",
        (note,),
        figure(study_answers),
        alt,
        summary(study_answers),
        "left",
    )
    yield Section(
        "Schedules on other number formats: every arm",
        table=by_arm(parts),
        style="left folded",
    )
