"""The paper's schedules on ladders of other formats: H6 of ``docs/preregistration.md``.  No torch.

A cell is a task on a ladder; the question is answered when all runs of all cells are there. A run that diverged or
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
    TOP,
    Estimate,
    by_run,
    find_rows,
    seeds_by_arms,
    significant_effects,
)
from cpt_lab.analysis.preregistered import (
    Answer,
    correct_answers,
    in_margins,
    intervals,
    judge_unbeaten,
    summary,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.statistics import spearman
from cpt_lab.experiments.spec import savings_of
from cpt_lab.studies.case import OUTPUTS
from cpt_lab.studies.h6.arms import CASES, LATE, ON, on_ladders

NAMES = {"minifloat": "minifloats", "mx": "MX formats"}
QUESTIONS = {
    "H6a": "In other formats, are dearer schedules better?",
    "H6b": "In other formats, do schedules beat static formats of their cost?",
    "H6c": "In other formats, does low first and high before the decay beat static formats of its cost?",
}


class Cell:
    """A task on a ladder: ``cost`` by arm, and ``quality``, a frame of seeds by arms; ``lost`` runs.

    Rows are by key, all of the cell's among them.
    """

    def __init__(self, case: str, ladder: str, rows: pd.DataFrame) -> None:
        specs = [spec for spec in on_ladders(case) if spec.recipe.ladder == ladder]
        runs = by_run(
            specs,
            rows.loc[[spec.key for spec in specs]],
            OUTPUTS[CASES[case].dataset],
            {TOP: ""},
        )
        self.ladder, self.name, self.margin = (
            ladder,
            f"{case}, {NAMES[ladder]}",
            CASES[case].margin,
        )
        self.unit, self.lost, self.quality = (
            runs["unit"].iloc[0],
            int(runs["lost"].sum()),
            seeds_by_arms(runs),
        )
        self.cost = {spec.arm: spec.relative_cost for spec in specs}

    def at_cost(self, arm: str) -> np.ndarray:
        """Return the quality of static formats at the cost of an arm, by seed: on the line between their neighbours."""
        static = [
            f"static {level}" for level in LADDERS[self.ladder].levels
        ]  # the cheapest first
        costs, rows = (
            [self.cost[name] for name in static],
            self.quality[static].to_numpy(),
        )
        return np.array([np.interp(self.cost[arm], costs, row) for row in rows])

    def gain(self, arms: Iterable[str]) -> np.ndarray:
        """Return what arms gain on static formats of their cost, the mean over them, by seed."""
        return np.mean(
            [self.quality[arm].to_numpy() - self.at_cost(arm) for arm in arms], axis=0
        )

    def agreement(self) -> np.ndarray:
        """Return the rank correlation of cost and quality over the suite's ten, by seed."""
        costs = np.array([self.cost[arm] for arm in SUITE])
        return np.array(
            [spearman(costs, row) for row in self.quality[list(SUITE)].to_numpy()]
        )


def cells(runs: pd.DataFrame) -> list[Cell] | str:
    """Return the cells; a word on what is missing, as long as not all runs are there."""
    rows = find_rows([spec for case in CASES for spec in on_ladders(case)], runs)
    return (
        rows
        if isinstance(rows, str)
        else [Cell(case, ladder, rows) for case in CASES for ladder in ON]
    )


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H6a, H6b and H6c, a family of three tests, from rows."""
    parts = cells(runs)
    if isinstance(parts, str):
        return [Answer(name, asks, word=parts) for name, asks in QUESTIONS.items()]
    told = zip(
        QUESTIONS.items(),
        (_correlation(parts), _gains(parts, SUITE), _gains(parts, (LATE,))),
        strict=True,
    )
    lost = sum(c.lost for c in parts)
    return correct_answers(
        [
            replace(answer, question=name, asks=asks, lost=lost)
            for (name, asks), answer in told
        ]
    )


def _correlation(parts: list[Cell]) -> Answer:
    primary = [
        Estimate(f"{c.name}: rank correlation of cost and quality", "", c.agreement())
        for c in parts
    ]
    above, below = (
        significant_effects(primary, side, 0.025) for side in ("greater", "less")
    )
    up = all(e.mean > 0 for e in primary)
    p = max(e.p() for e in primary)
    stands = (
        "confirmed: dearer schedules are better in every task and format" if up else ""
    )
    reverse = (
        f"contradicted: the reverse in {len(below)} ({'; '.join(below)})"
        if below
        else ""
    )
    beside = f"dearer schedules are better in {len(above)} of {len(primary)}"
    return Answer(primary=tuple(primary), p=p, words=(stands, reverse), beside=beside)


def _gains(parts: list[Cell], arms: Collection[str]) -> Answer:
    (one,) = arms if len(arms) == 1 else ("schedules",)
    primary = [
        Estimate(f"{c.name}: {one} minus static", c.unit, c.gain(arms), c.margin)
        for c in parts
    ]
    return judge_unbeaten(
        primary, "nothing beats static formats by the margin", "better"
    )


def by_arm(parts: Sequence[Cell]) -> pd.DataFrame:
    """Return cost, quality and gain on static of every arm and cell, for people: mean and 95 % interval over seeds."""
    lines = []
    for c in parts:
        for arm in [*SUITE, LATE]:
            e = Estimate(arm, c.unit, c.gain([arm]))
            mean = f"{c.quality[arm].mean():.2f}"
            lines.append(
                (c.name, arm, savings_of(arm), f"{c.cost[arm]:.3f}", mean, e.shown())
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


def figure(told: Sequence[Answer]) -> Figure:
    """Draw H6b and H6c of ``answers``: schedules against static formats of their cost, in units of the margin."""
    lines = []
    for effects in (a.primary for a in told[1:]):
        names = [effect.what.replace(" minus static", "") for effect in effects]
        lines += in_margins(effects, names, above="schedule is better")
    unit = "gain on static formats of equal cost, in margins\n(grey: within one margin, 1 or 0.2 points, or 2 %)"
    won = sum("schedule is better" in line[-1] for line in lines) or "no"
    title = f"Schedules in other number formats: on average better than static formats in {won} case"
    return intervals(lines, title, unit, band=1)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what the schedules came to on other formats, once all runs are there."""
    parts, told = cells(runs), answers(runs)
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
        figure(told),
        alt,
        summary(told),
        "left",
    )
    yield Section(
        "Schedules on other number formats: every arm",
        table=by_arm(parts),
        style="left folded",
    )
