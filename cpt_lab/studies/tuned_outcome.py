"""Complete tasks of a study with tuned arms (``tuned``), and the answers to its questions.  No torch.

A task is complete when all its runs are stored; the questions are answered when all tasks are complete. A run that
diverged or failed counts as chance.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis import baselines
from cpt_lab.analysis.estimates import (
    EVALUATION_RULES,
    NOT_FINISHED,
    Estimate,
    find_complete,
    run_frame,
    seeds_by_arms,
)
from cpt_lab.analysis.preregistered import (
    Answer,
    add_rules,
    correct_answers,
    outcome_alone,
    secondary,
    summary,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.experiments.schema import CURRENT_BITS, EIGHT_BITS
from cpt_lab.studies.case import NUM_OUTPUTS
from cpt_lab.studies.tuned import FULL_BITS_ARM, TunedStudy, held_out, settings

# evaluation of both arms -> the rule of ``Task.gain``
EVALUATIONS = {
    "each as chosen on held-out data": "",
    "both at 8 bits": EIGHT_BITS,
    "both at their own bits": CURRENT_BITS,
}
# the question in words; the function from tasks and a rule of ``EVALUATION_RULES`` to its answer
Question = tuple[str, Callable[..., Answer]]


class Task:
    """A complete task of a study, from the rows of ``study.runs(case)``, in that order.

    Attributes:
        case: key in the cases of the study.
        name: printed name.
        margin: smallest gain that counts.
        settings: arm -> (learning rate, bits of evaluation), as chosen on held-out data.
        unit: unit of the quality.
        lost_keys: keys of the runs that diverged or failed; tasks may share runs.
        bitops: mean BitOps by arm, by both conventions.
        training: length of the training in words.
        baseline: quality of the full-bits arm in words.
    """

    def __init__(self, study: TunedStudy, case: str, rows: pd.DataFrame) -> None:
        task = study.case(case)
        specs = study.runs(case)
        runs = run_frame(specs, rows, NUM_OUTPUTS[task.dataset])
        self.case = case
        self.name = task.title or case
        self.margin = task.margin
        self.settings = settings(study, case)
        self.unit = runs["unit"].iloc[0]
        self.lost_keys = {
            spec.key for spec, lost in zip(specs, runs["lost"], strict=True) if lost
        }
        self.bitops = runs.groupby("arm")[["bitops", "bitops_per_op"]].mean()
        self.training = baselines.training_text(task.recipe)
        is_full_bits = [spec.arm.startswith(f"{FULL_BITS_ARM} at ") for spec in specs]
        self.baseline = baselines.quality_text(rows[is_full_bits])
        self._held_out = {}
        for arm, quality_by_setting in held_out(study, case).items():
            self._held_out[arm] = max(quality_by_setting.values())
        self._by_rule = {rule: seeds_by_arms(runs, rule) for rule in EVALUATION_RULES}

    def quality(self, arm: str, rule: str = "") -> np.ndarray:
        """Return the quality of an arm by seed, evaluated by its settings or by a rule of ``EVALUATION_RULES``."""
        return self._by_rule[rule or self.settings[arm][1]][arm].to_numpy()

    def gain(self, arm: str, other: str, rule: str = "") -> Estimate:
        """Return the quality of an arm minus the quality of another arm."""
        description = f"{self.name}, {arm} minus {other}"
        differences = self.quality(arm, rule) - self.quality(other, rule)
        return Estimate(description, self.unit, differences, self.margin)

    def held_out_gain(self, arm: str, other: str) -> float:
        """Return the quality of an arm minus that of another on held-out data, for arms that have their own rates."""
        return 100 * (self._held_out[arm] - self._held_out[other])

    def best(self, arms: Sequence[str]) -> str:
        """Return the best of some arms on held-out data, among those that have their own rates."""
        own_arms = [arm for arm in arms if arm in self._held_out]
        return max(own_arms, key=self._held_out.__getitem__)


def complete(study: TunedStudy, runs: pd.DataFrame) -> tuple[list[Task], str]:
    """Return the complete tasks, and a note on missing runs such as "not finished: 3 of 9 runs"; "" for none."""
    makers = {case: partial(study.runs, case) for case in study.cases}
    rows_by_case, missing = find_complete(makers, study.num_runs(), runs)
    return [Task(study, case, rows) for case, rows in rows_by_case.items()], missing


def answer_questions(
    parts: Sequence[Task], missing: str, questions: Mapping[str, Question]
) -> list[Answer]:
    """Return the answers to a family of questions from what ``complete`` returned."""
    if missing:
        return [
            Answer(name, question_text, outcome=missing)
            for name, (question_text, _) in questions.items()
        ]
    num_lost = len(set[str]().union(*(task.lost_keys for task in parts)))

    def answer_all(rule: str = "") -> list[Answer]:
        answers = []
        for name, (question_text, answer) in questions.items():
            answers.append(
                replace(
                    answer(parts, rule=rule),
                    question=name,
                    question_text=question_text,
                    num_lost=num_lost,
                )
            )
        return answers

    registered = answer_all()
    by_rule = {rule: answer_all(rule) for rule in EVALUATION_RULES}
    final = []
    for i, answer in enumerate(correct_answers(registered)):
        rule_answers = {rule: answers[i] for rule, answers in by_rule.items()}
        final.append(add_rules(answer, registered, rule_answers))
    return final


def compare_rate_grids(
    registered: Sequence[Answer], extended: Sequence[Answer]
) -> pd.DataFrame:
    """Return a printable table of the outcomes at the preregistered learning rates and at extended ones.

    An answer depends on the learning rates if its outcome without the remark differs.
    """
    lines = []
    for answer, extended_answer in zip(registered, extended, strict=True):
        if answer.question != extended_answer.question:
            raise ValueError(
                f"extended: expected the answer to {answer.question}, got one to {extended_answer.question}"
            )
        outcomes = (answer.outcome, extended_answer.outcome)
        if any(outcome.startswith(NOT_FINISHED) for outcome in outcomes):
            dependence = "–"
        elif outcome_alone(outcomes[0]) == outcome_alone(outcomes[1]):
            dependence = "no"
        else:
            dependence = "yes"
        lines.append((answer.question, *outcomes, dependence))
    columns = [
        "",
        "outcome at the preregistered learning rates",
        "outcome at extended ones",
        "depends on the rates",
    ]
    return pd.DataFrame(lines, columns=columns)


def show_table(
    study: TunedStudy,
    runs: pd.DataFrame,
    questions: Mapping[str, Question],
    name: str,
    note: str,
    figure: Callable[[Sequence[Task]], Figure | None],
    alt: str,
    *tables: tuple[str, Callable[[Sequence[Task]], pd.DataFrame]],
    extended: Sequence[Answer] = (),
) -> Iterator[Section]:
    """Yield the sections of a study with a complete task.

    ``tables`` are (title, function of the tasks); ``extended`` are the answers at extended learning rates, if the study
    has any.
    """
    parts, missing = complete(study, runs)
    if not parts:
        return
    study_answers = answer_questions(parts, missing, questions)
    undecided = (
        (f"Nothing is decided ({missing}): shown are the tasks that are complete.",)
        if missing
        else ()
    )
    yield Section(
        name, (note, *undecided), figure(parts), alt, summary(study_answers), "left"
    )
    for title, table in (*tables, ("every arm", by_arm)):
        yield Section(f"{name}: {title}", table=table(parts), style="left folded")
    if extended:
        yield Section(
            f"{name}: with extended grids of learning rates",
            table=compare_rate_grids(study_answers, extended),
            style="left folded",
        )
    if not missing:
        yield Section(
            f"{name}: other effects",
            table=secondary(study_answers),
            style="left folded",
        )


def baseline_columns(parts: Sequence[Task]) -> dict[str, list[str]]:
    """Return the columns with the quality of every task at 8 bits and the length of its training."""
    return {
        f"{FULL_BITS_ARM} reaches": [t.baseline for t in parts],
        "training": [t.training for t in parts],
    }


def by_evaluation(
    parts: Sequence[Task], pairs: Callable[[Task], tuple[str, str]], heading: str
) -> pd.DataFrame:
    """Return a printable table of the gain of one arm on another in every task, by the bits of evaluation.

    Args:
        parts: complete tasks.
        pairs: function from a task to its two arms.
        heading: start of the header, before the bits of evaluation.
    """
    cells: dict[str, list[str]] = {"task": [task.name for task in parts]}
    for name, rule in EVALUATIONS.items():
        gains = [task.gain(*pairs(task), rule) for task in parts]
        cells[f"{heading}, {name}"] = [gain.text() for gain in gains]
    return pd.DataFrame(cells)


def by_arm(parts: Sequence[Task]) -> pd.DataFrame:
    """Return a printable table of settings, quality and BitOps of every arm."""
    lines = []
    for task in parts:
        full_bitops = task.bitops.loc[FULL_BITS_ARM]
        for arm, (rate, evaluation_bits) in task.settings.items():
            mean = f"{task.quality(arm).mean():.2f}"
            ratios = [f"{ratio:.3f}" for ratio in task.bitops.loc[arm] / full_bitops]
            lines.append((task.name, arm, f"{rate:g}", evaluation_bits, mean, *ratios))
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
