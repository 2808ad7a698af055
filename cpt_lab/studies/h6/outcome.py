"""The paper's schedules on ladders of other formats: H6 of ``docs/preregistration.md``.  No torch.

A cell is a task on a ladder; the question is answered when all runs of all cells are there. A run that diverged or
failed counts as chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_core.formats.ladder import LADDERS
from cpt_core.schedules.profiles import SUITE, savings_of
from cpt_lab.analysis.estimates import PERCENT, Estimate, found, quality, standing, unit_of
from cpt_lab.analysis.pages import Section
from cpt_lab.analysis.preregistered import Answer, against, corrected, summary
from cpt_lab.analysis.statistics import spearman
from cpt_lab.analysis.style import COLORS, TEXT, drawing, legend_below, name_points
from cpt_lab.studies.h6.arms import CASES, LATE, ON, on_ladders

MARGINS = {"digits": 1.0, "facebook": 0.2, "characters": 2.0}
NAMES = {"minifloat": "minifloats", "mx": "MX formats"}
QUESTIONS = {
    "H6a": "In other formats, are dearer schedules better?",
    "H6b": "In other formats, do schedules beat static formats of their cost?",
    "H6c": "In other formats, does low first and high before the decay beat static formats of its cost?",
}


class Cell:
    """A task on a ladder: ``cost`` by arm, and ``quality``, a frame of seeds by arms; ``lost`` runs.

    Args:
        case: of ``CASES``.
        ladder: of ``ON``.
        rows: by key, all of the cell's among them.
    """

    def __init__(self, case: str, ladder: str, rows: pd.DataFrame) -> None:
        self.case, self.ladder = case, ladder
        specs = [spec for spec in on_ladders(case) if spec.recipe.ladder == ladder]
        rows = rows.loc[[spec.key for spec in specs]]
        self.unit = unit_of(rows)
        self.lost = int((rows["status"] != "ok").sum())
        self.cost = {spec.arm: spec.relative_cost for spec in specs}
        frame = pd.DataFrame({"arm": [s.arm for s in specs], "seed": [s.seed for s in specs]})
        self.quality = frame.assign(quality=quality(rows, CASES[case][2])).pivot(
            index="seed", columns="arm", values="quality"
        )

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.case}, {NAMES[self.ladder]}"

    @property
    def static(self) -> list[str]:
        """The static arms, the cheapest first."""
        return [f"static {level}" for level in LADDERS[self.ladder].levels]

    def at_cost(self, arm: str) -> np.ndarray:
        """Return the quality of static formats at the cost of an arm, by seed: on the line between their neighbours."""
        costs = [self.cost[name] for name in self.static]
        rows = self.quality[self.static].to_numpy()
        return np.array([np.interp(self.cost[arm], costs, row) for row in rows])

    def gain(self, arms: Sequence[str]) -> np.ndarray:
        """Return what arms gain on static formats of their cost, the mean over them, by seed."""
        return np.mean([self.quality[arm].to_numpy() - self.at_cost(arm) for arm in arms], axis=0)

    def agreement(self) -> np.ndarray:
        """Return the rank correlation of cost and quality over the suite's ten, by seed."""
        costs = np.array([self.cost[arm] for arm in SUITE])
        return np.array([spearman(costs, row) for row in self.quality[list(SUITE)].to_numpy()])


def cells(runs: pd.DataFrame) -> list[Cell]:
    """Return the cells, once all of their runs are there; else none."""
    rows = _rows(runs)
    return [] if isinstance(rows, str) else [Cell(case, ladder, rows) for case in CASES for ladder in ON]


def _rows(runs: pd.DataFrame) -> pd.DataFrame | str:
    return found([spec for case in CASES for spec in on_ladders(case)], runs)


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H6a, H6b and H6c, a family of three tests, from rows."""
    if isinstance(word := _rows(runs), str):
        return [Answer(name, asks, word=word) for name, asks in QUESTIONS.items()]
    parts = cells(runs)
    return corrected([_correlation(parts), _gains("H6b", parts, tuple(SUITE)), _gains("H6c", parts, (LATE,))])


def _correlation(parts: list[Cell]) -> Answer:
    primary = [Estimate(f"{c.name}: rank correlation of cost and quality", "", c.agreement()) for c in parts]
    above, below = (standing(primary, side, 0.025) for side in ("above", "below"))
    up = all(e.mean > 0 for e in primary)
    p = max(e.p() for e in primary)
    stands = "confirmed: dearer schedules are better in every task and format" if up else ""
    reverse = f"contradicted: the reverse in {len(below)} ({'; '.join(below)})" if below else ""
    lost, beside = sum(c.lost for c in parts), f"dearer schedules are better in {len(above)} of {len(primary)}"
    return Answer("H6a", QUESTIONS["H6a"], tuple(primary), p, (stands, reverse), lost=lost, beside=beside)


def _gains(question: str, parts: list[Cell], arms: tuple[str, ...]) -> Answer:
    one = arms[0] if len(arms) == 1 else "schedules"
    primary = [Estimate(f"{c.name}: {one} minus static", c.unit, c.gain(arms), MARGINS[c.case]) for c in parts]
    p, wins, loses = against(primary)
    better = f"contradicted: better in {len(wins)} of {len(primary)} ({'; '.join(wins)})" if wins else ""
    beside = f"static is better in {len(loses)} of {len(primary)}"
    stands = "confirmed: nothing beats static formats by the margin"
    lost = sum(c.lost for c in parts)
    return Answer(question, QUESTIONS[question], tuple(primary), p, (stands, better), lost=lost, beside=beside)


def by_arm(parts: Sequence[Cell]) -> pd.DataFrame:
    """Return cost, quality and gain on static of every arm and cell, for people: mean and 95 % interval over seeds."""
    lines = []
    for c in parts:
        for arm in [*SUITE, LATE]:
            e = Estimate(arm, c.unit, c.gain([arm]))
            lines.append(
                (c.name, arm, savings_of(arm), f"{c.cost[arm]:.3f}", f"{c.quality[arm].mean():.2f}", e.shown())
            )
    return pd.DataFrame(lines, columns=["cell", "arm", "savings", "relative cost", "quality", "gain on static [95 %]"])


def figure(parts: Sequence[Cell]) -> Figure:
    """Draw quality against cost, a panel for each cell: schedules, the late rise, and the line of static formats.

    Raises:
        ValueError: when runs are missing.
    """
    if not parts:
        raise ValueError("H6 is not answered yet; all of its runs are needed")
    with drawing(len(CASES), len(ON), figsize=(9, 2.8 * len(CASES))) as (drawn, axes):
        for ax, c in zip(axes.flat, parts, strict=True):
            _panel(ax, c)
        legend_below(drawn, axes[0, 0])
        for ax, c in zip(axes.flat, parts, strict=True):
            _name_formats(ax, c)
    return drawn


def _panel(ax: Axes, c: Cell) -> None:
    costs = [c.cost[arm] for arm in c.static]
    mean = c.quality.mean()
    error = 1.96 * c.quality.std() / math.sqrt(len(c.quality))
    ax.errorbar(
        costs, mean[c.static], yerr=error[c.static], fmt="s-", color=COLORS["static"], capsize=2, label="static"
    )
    for group in ("large", "medium", "small"):
        arms = [arm for arm in SUITE if savings_of(arm) == group]
        ax.errorbar(
            [c.cost[arm] for arm in arms], mean[arms], yerr=error[arms], fmt="o", color=COLORS[group], capsize=2,
            label=f"{group} savings",
        )  # fmt: skip
    ax.errorbar(c.cost[LATE], mean[LATE], yerr=error[LATE], fmt="D", color="black", capsize=2, label=LATE)
    ax.set(xlabel="relative cost (BitOps)", ylabel="-100 ln perplexity" if c.unit == PERCENT else "accuracy (%)")
    ax.set_title(c.name, fontsize=9, loc="left")


def _name_formats(ax: Axes, c: Cell) -> None:
    """Write the names of static formats beside their points."""
    names = [str(LADDERS[c.ladder][level]).partition(":")[0] for level in LADDERS[c.ladder].levels]
    costs, mean = [c.cost[arm] for arm in c.static], c.quality.mean()[c.static]
    name_points(ax, names, costs, mean, [TEXT["static"]] * len(names))


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what the schedules came to on other formats, once all runs are there."""
    parts = cells(runs)
    if not parts:
        return
    note = (
        "H6 of docs/preregistration.md: the ten schedules, a late rise, and every format by itself, on two ladders of "
        "number formats. Costs are bit operations of elements; those of static training in the highest format are 1. "
        "Small tasks, simulated arithmetic, eight seeds."
    )
    alt = "quality against cost of schedules and static number formats, for three tasks and two ladders"
    yield Section("Schedules on other number formats", (note,), figure(parts), alt, summary(answers(runs)), "left")
    yield Section("Schedules on other number formats: every arm", table=by_arm(parts), style="left folded")
