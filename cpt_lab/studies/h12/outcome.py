"""Answers of H12 in ``docs/preregistration.md``: the date of a deficit by the decay of the learning rate.  No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.estimates import (
    Estimate,
    find_complete,
    run_frame,
    seeds_by_arms,
    significant_effects,
)
from cpt_lab.analysis.preregistered import (
    Answer,
    correct_answers,
    interval_figure,
    margin_lines,
    secondary,
    summary,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.experiments.schema import EIGHT_BITS
from cpt_lab.studies.case import NUM_OUTPUTS
from cpt_lab.studies.h11.arms import CONSTANT, DECAYS, RULES, TASKS
from cpt_lab.studies.h12 import arms

EQUAL_RECOVERY, FIXED_LENGTH = "equal recovery", "the paper's design"
DATES = ("early", "middle", "late")
QUESTIONS = {
    "H12a": "At a constant learning rate and equal recovery, does the date of a deficit matter?",
    "H12b": "At equal recovery, does decay make early deficits worse than late ones?",
}
FIGURE_ALT = (
    "damage of an early minus that of a late deficit, by rule of the learning rate"
)


class Damages:
    """Damages of the deficits of a task, in the order of ``arms.windows``.

    Attributes:
        name: printed name of the task.
        margin: smallest effect that counts.
        unit: unit of the quality.
        num_lost: number of runs that diverged or failed.
    """

    def __init__(self, task: str, rows: pd.DataFrame) -> None:
        """Compute the damages from the rows of ``arms.runs(task)``, in that order."""
        case, _ = TASKS[task]
        columns = {EIGHT_BITS: ""}
        runs = run_frame(arms.runs(task), rows, NUM_OUTPUTS[case.dataset], columns)
        self.name = case.title or task
        self.margin = case.margin
        self.unit = runs["unit"].iloc[0]
        self.num_lost = int(runs["lost"].sum())
        by_arm = seeds_by_arms(runs)
        self._damages: dict[tuple[str, str, str], np.ndarray] = {}
        for rule in RULES:
            for i, (steps, window) in enumerate(arms.windows(task)):
                control = by_arm[arms.arm_name(steps, None, rule)]
                deficit = by_arm[arms.arm_name(steps, window, rule)]
                design = EQUAL_RECOVERY if i < len(DATES) else FIXED_LENGTH
                key = (rule, design, DATES[i % len(DATES)])
                self._damages[key] = (control - deficit).to_numpy()

    def damage(self, rule: str, design: str, date: str) -> Estimate:
        """Return the quality of the control minus that of a deficit."""
        values = self._damages[rule, design, date]
        description = f"{self.name}, {rule}, {design}: damage of a {date} deficit"
        return Estimate(description, self.unit, values, self.margin)

    def date_effect(self, rule: str, design: str = EQUAL_RECOVERY) -> Estimate:
        """Return the damage of the early deficit minus that of the late one."""
        early, late = (self._damages[rule, design, date] for date in ("early", "late"))
        description = f"{self.name}, {rule}, {design}: early minus late"
        return Estimate(description, self.unit, early - late, self.margin)

    def effect_of_decay(self) -> Estimate:
        """Return the date effect under decay minus that at a constant rate, at equal recovery."""
        decayed = [self.date_effect(rule).values for rule in DECAYS]
        values = np.mean(decayed, axis=0) - self.date_effect(CONSTANT).values
        description = f"{self.name}, early minus late, under decay minus constant"
        return Estimate(description, self.unit, values, self.margin)


def damages(runs: pd.DataFrame) -> tuple[list[Damages], str]:
    """Return the damages of complete tasks, and a note on missing runs such as "not finished: 3 of 9 runs", or ""."""
    makers = {task: partial(arms.runs, task) for task in arms.DESIGNS}
    num_runs = sum(map(arms.num_runs, arms.DESIGNS))
    rows_by_task, missing = find_complete(makers, num_runs, runs)
    return [Damages(task, rows) for task, rows in rows_by_task.items()], missing


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H12, a family of two tests, from rows."""
    return _answers(*damages(runs))


def _answers(parts: Sequence[Damages], missing: str) -> list[Answer]:
    if missing:
        return [Answer(name, text, outcome=missing) for name, text in QUESTIONS.items()]
    tests = (_date_at_constant_rate(parts), _date_by_decay(parts))
    num_lost = sum(part.num_lost for part in parts)
    named = [
        replace(test, question=name, question_text=text, num_lost=num_lost)
        for test, (name, text) in zip(tests, QUESTIONS.items(), strict=True)
    ]
    return correct_answers(named)


def _date_at_constant_rate(parts: Sequence[Damages]) -> Answer:
    primary = [part.date_effect(CONSTANT) for part in parts]
    p_values = [
        max(effect.p(effect.margin, "less"), effect.p(-effect.margin, "greater"))
        for effect in primary
    ]
    early = significant_effects(primary, "greater", 0.025)
    late = significant_effects(primary, "less", 0.025)
    contradicted = ""
    if early or late:
        contradicted = f"contradicted: early is worse in {len(early)}, late in {len(late)} of {len(primary)}"
    others = [
        part.date_effect(rule, design)
        for part in parts
        for design in (EQUAL_RECOVERY, FIXED_LENGTH)
        for rule in RULES
        if (rule, design) != (CONSTANT, EQUAL_RECOVERY)
    ]
    return Answer(
        primary=tuple(primary),
        p=max(p_values),
        words=("confirmed: the date does not matter", contradicted),
        secondary=tuple(others),
    )


def _date_by_decay(parts: Sequence[Damages]) -> Answer:
    primary = [part.effect_of_decay() for part in parts]
    negative = significant_effects(primary, "less", 0.025)
    contradicted = ""
    if negative:
        contradicted = f"contradicted: decay makes late deficits worse in {len(negative)} of {len(primary)}"
    return Answer(
        primary=tuple(primary),
        p=max(effect.p(0.0, "greater") for effect in primary),
        words=("confirmed: decay makes early deficits worse", contradicted),
    )


def damage_table(parts: Sequence[Damages]) -> pd.DataFrame:
    """Return a printable table of the damage of every deficit, by task, design and rule."""
    lines = []
    for part in parts:
        for design in (EQUAL_RECOVERY, FIXED_LENGTH):
            for rule in RULES:
                cells = [part.damage(rule, design, date).text() for date in DATES]
                effect = part.date_effect(rule, design).text()
                lines.append((part.name, design, rule, *cells, effect))
    dates = [f"{date} [95 %]" for date in DATES]
    columns = ["task", "design", "learning rate", *dates, "early minus late [95 %]"]
    return pd.DataFrame(lines, columns=columns)


def figure(parts: Sequence[Damages]) -> Figure:
    """Draw the damage of an early minus that of a late deficit, by design and rule, in units of the margin."""
    effects, names = [], []
    for part in parts:
        for design in (EQUAL_RECOVERY, FIXED_LENGTH):
            for rule in RULES:
                effects.append(part.date_effect(rule, design))
                names.append(f"{part.name}, {design}, {rule}")
    lines = margin_lines(effects, names, "late is worse", "early is worse")
    return interval_figure(
        lines,
        "Damage of an early minus that of a late deficit",
        "in margins (grey: within one)",
        band=1,
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the results of H12, once all runs of a task are stored."""
    parts, missing = damages(runs)
    if not parts:
        return
    name = "Does the date of a deficit matter?"
    notes = [
        "H12 of docs/preregistration.md. Damage is the control's quality minus the deficit's. Equal recovery: training "
        "goes on equally long after every deficit; the paper's design: all trainings are equally long."
    ]
    if missing:
        notes.append(
            f"Nothing is decided ({missing}): shown are the tasks that are complete."
        )
    study_answers = _answers(parts, missing)
    yield Section(
        name,
        tuple(notes),
        figure(parts),
        FIGURE_ALT,
        summary(study_answers),
        "left",
    )
    yield Section(
        f"{name}: every deficit", table=damage_table(parts), style="left folded"
    )
    if not missing:
        others = secondary(study_answers)
        yield Section(f"{name}: other effects", table=others, style="left folded")
