"""Complete tasks of a study whose arms have settings of their own, see ``tuned``, and the answers to its questions.

A task is complete when all its runs are there; the questions are answered when all tasks are. A run that diverged or
failed counts as chance.  No torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis import levels
from cpt_lab.analysis.estimates import (
    CURRENT_BITS,
    EVALUATION_RULES,
    TOP,
    Estimate,
    by_run,
    find_rows,
    seeds_by_arms,
)
from cpt_lab.analysis.metrics import plural
from cpt_lab.analysis.preregistered import (
    Answer,
    add_rules,
    correct_answers,
    secondary,
    summary,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.experiments.spec import NotMeasuredError
from cpt_lab.studies.case import OUTPUTS
from cpt_lab.studies.tuned import Tuned, held_out, settings

FULL_BITS = "8/8"  # the arm that costs most
# how both arms are evaluated -> the rule of ``Task.gain``
EVALUATIONS = {
    "each as chosen on held-out data": "",
    "both at 8 bits": TOP,
    "both at their own bits": CURRENT_BITS,
}
Question = tuple[
    str, Callable[..., Answer]
]  # what is asked; its answer, from tasks and the name of one of ``RULES``


class Task:
    """A complete task: quality of every arm, one value a seed; from the rows of ``study.runs(case)``, in that order."""

    def __init__(self, study: Tuned, case: str, rows: pd.DataFrame) -> None:
        c, runs = (
            study.case(case),
            by_run(study.runs(case), rows, OUTPUTS[study.case(case).dataset]),
        )
        self.name, self.margin, self.settings = (
            c.title or case,
            c.margin,
            settings(study, case),
        )
        self.unit, self.lost = runs["unit"].iloc[0], int(runs["lost"].sum())
        self.bitops = runs.groupby("arm")[["bitops", "bitops_per_op"]].mean()
        self.training = levels.training_text(c.recipe)
        of_full_bits = [
            spec.arm.startswith(f"{FULL_BITS} at ") for spec in study.runs(case)
        ]
        self.level = levels.reached(rows[of_full_bits])
        self._held_out = {
            arm: max(of.values()) for arm, of in held_out(study, case).items()
        }
        self._by_rule = {rule: seeds_by_arms(runs, rule) for rule in EVALUATION_RULES}

    def quality(self, arm: str, rule: str = "") -> np.ndarray:
        """Return the quality of an arm as it is evaluated by its settings, or by one of ``RULES``."""
        return self._by_rule[rule or self.settings[arm][1]][arm].to_numpy()

    def gain(self, arm: str, other: str, rule: str = "") -> Estimate:
        """Return what an arm gains on another."""
        what = f"{self.name}, {arm} minus {other}"
        return Estimate(
            what,
            self.unit,
            self.quality(arm, rule) - self.quality(other, rule),
            self.margin,
        )

    def best(self, arms: Sequence[str]) -> str:
        """Return that of some arms, as far as the task has them, which is best on held-out data."""
        return max(
            (arm for arm in arms if arm in self._held_out),
            key=self._held_out.__getitem__,
        )


def complete(study: Tuned, runs: pd.DataFrame) -> tuple[list[Task], str]:
    """Return the complete tasks, and a word on what is missing: "" when nothing is."""
    whole, there, wanted = [], 0, 0
    for case, c in study.cases.items():
        wanted += c.seeds * len(study.arms(c))
        try:
            specs = study.runs(case)
        except NotMeasuredError:
            continue
        there += len({spec.key for spec in specs} & set(runs["key"]))
        if not isinstance(rows := find_rows(specs, runs), str):
            whole.append(Task(study, case, rows))
    return whole, "" if len(whole) == len(
        study.cases
    ) else f"open: {there} of {plural(wanted, 'run')}"


def answer_questions(
    parts: Sequence[Task], missing: str, questions: Mapping[str, Question]
) -> list[Answer]:
    """Return the answers to a family of questions from what ``complete`` returned."""
    if missing:
        return [
            Answer(name, asks, word=missing) for name, (asks, _) in questions.items()
        ]
    lost = sum(t.lost for t in parts)

    def told(rule: str = "") -> list[Answer]:
        made = (
            (name, asks, make(parts, rule=rule))
            for name, (asks, make) in questions.items()
        )
        return [
            replace(answer, question=name, asks=asks, lost=lost)
            for name, asks, answer in made
        ]

    registered, by_rule = told(), {rule: told(rule) for rule in EVALUATION_RULES}
    return [
        add_rules(a, registered, {rule: alike[i] for rule, alike in by_rule.items()})
        for i, a in enumerate(correct_answers(registered))
    ]


def show_table(
    study: Tuned,
    runs: pd.DataFrame,
    questions: Mapping[str, Question],
    name: str,
    note: str,
    figure: Callable[[Sequence[Task]], Figure],
    alt: str,
    *tables: tuple[str, Callable[[Sequence[Task]], pd.DataFrame]],
) -> Iterator[Section]:
    """Yield what a study came to, once all runs of a task are there; ``tables`` have a title each."""
    parts, missing = complete(study, runs)
    if not parts:
        return
    told = answer_questions(parts, missing, questions)
    undecided = (
        (f"Nothing is decided ({missing}): shown are the tasks that are complete.",)
        if missing
        else ()
    )
    yield Section(name, (note, *undecided), figure(parts), alt, summary(told), "left")
    for title, table in (*tables, ("every arm", by_arm)):
        yield Section(f"{name}: {title}", table=table(parts), style="left folded")
    if not missing:
        yield Section(
            f"{name}: other effects", table=secondary(told), style="left folded"
        )


def level_columns(parts: Sequence[Task]) -> dict[str, list[str]]:
    """Return the columns that say how good every task's models are, evaluated at 8 bits, and how long they train."""
    return {
        f"{FULL_BITS} reaches": [t.level for t in parts],
        "training": [t.training for t in parts],
    }


def by_evaluation(
    parts: Sequence[Task], pairs: Callable[[Task], tuple[str, str]], heading: str
) -> pd.DataFrame:
    """Return what one arm gains on another in every task, by the bits at which both are evaluated, for people.

    Args:
        parts: complete tasks.
        pairs: the two arms of a task.
        heading: what stands before the bits of evaluation in the header.
    """
    cells: dict[str, list[str]] = {"task": [], **{name: [] for name in EVALUATIONS}}
    for t in parts:
        cells["task"].append(t.name)
        for name, rule in EVALUATIONS.items():
            cells[name].append(t.gain(*pairs(t), rule).shown())
    return pd.DataFrame(cells).rename(
        columns={name: f"{heading}, {name}" for name in EVALUATIONS}
    )


def by_arm(parts: Sequence[Task]) -> pd.DataFrame:
    """Return settings, quality and BitOps of every arm, for people."""
    lines = []
    for t in parts:
        for arm, (rate, evaluated) in t.settings.items():
            ratio = t.bitops.loc[arm] / t.bitops.loc[FULL_BITS]
            mean = f"{t.quality(arm).mean():.2f}"
            lines.append(
                (
                    t.name,
                    arm,
                    f"{rate:g}",
                    evaluated,
                    mean,
                    *(f"{x:.3f}" for x in ratio),
                )
            )
    columns = [
        "task",
        "arm",
        "rate, times the recipe's",
        "evaluated at",
        "quality",
        "BitOps (paper)",
        "per_op",
    ]
    return pd.DataFrame(lines, columns=columns)
