"""Answers of H11 in ``docs/preregistration.md``: the order of bits under rules of the learning rate.  No torch."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.estimates import Estimate, significant_effects
from cpt_lab.analysis.metrics import plural
from cpt_lab.analysis.preregistered import (
    Answer,
    interval_figure,
    judge_unbeaten,
    margin_lines,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.studies.h11.arms import (
    CONSTANT,
    CYCLIC,
    DECAYS,
    EVEN,
    FALLING,
    RISING,
    RULES,
    STATIC,
    STUDY,
    TASKS,
    case_name,
)
from cpt_lab.studies.tuned_outcome import (
    Question,
    Task,
    answer_questions,
    baseline_columns,
    complete,
    show_table,
)

ORDER, RISE = (RISING, FALLING), (RISING, STATIC)
COMPARED = (ORDER, RISE, (EVEN, STATIC), (CYCLIC, STATIC))
FIGURE_ALT = "rising minus falling bits at a constant rate and under decay, and rising minus static bits under decay"
tasks = partial(complete, STUDY)


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H11, a family of two tests, from rows."""
    return answer_questions(*tasks(runs), QUESTIONS)


def _by_task(parts: Sequence[Task]) -> dict[str, dict[str, Task]]:
    """Return task -> rule -> its training, for tasks whose trainings under all of ``RULES`` are complete."""
    by_case = {part.case: part for part in parts}
    found = {}
    for task in TASKS:
        cases = [case_name(task, rule) for rule in RULES]
        if all(case in by_case for case in cases):
            found[task] = {
                rule: by_case[case] for rule, case in zip(RULES, cases, strict=True)
            }
    return found


def _title(task: str) -> str:
    return TASKS[task][0].title or task


def _under_decay(
    trainings: Mapping[str, Task], task: str, pair: tuple[str, str], rule: str = ""
) -> Estimate:
    """Return the mean over ``DECAYS`` of the quality of an arm minus that of another."""
    gains = [trainings[decay].gain(*pair, rule) for decay in DECAYS]
    return Estimate(
        f"{_title(task)}, {pair[0]} minus {pair[1]} under decay",
        gains[0].unit,
        np.mean([gain.values for gain in gains], axis=0),
        gains[0].margin,
    )


def order_differences(parts: Sequence[Task], rule: str = "") -> list[Estimate]:
    """Return the order effect at a constant rate minus that under decay, of every task."""
    effects = []
    for task, trainings in _by_task(parts).items():
        constant = trainings[CONSTANT].gain(*ORDER, rule)
        decayed = _under_decay(trainings, task, ORDER, rule)
        description = (
            f"{_title(task)}, order effect at a constant rate minus under decay"
        )
        effects.append(
            Estimate(
                description,
                constant.unit,
                constant.values - decayed.values,
                constant.margin,
            )
        )
    return effects


def rises(parts: Sequence[Task], rule: str = "") -> list[Estimate]:
    """Return rising minus static bits under decay, of every task."""
    return [
        _under_decay(trainings, task, RISE, rule)
        for task, trainings in _by_task(parts).items()
    ]


def _answer_order(parts: Sequence[Task], rule: str = "") -> Answer:
    primary = order_differences(parts, rule)
    negative = significant_effects(primary, "less", 0.025)
    contradicted = ""
    if negative:
        contradicted = f"contradicted: the order matters more under decay in {len(negative)} of {len(primary)}"
    return Answer(
        primary=tuple(primary),
        p=max(effect.p(0.0, "greater") for effect in primary),
        words=(
            "confirmed: the order of bits matters more without decay",
            contradicted,
        ),
        secondary=tuple(part.gain(*ORDER) for part in parts),
    )


def _answer_rising(parts: Sequence[Task], rule: str = "") -> Answer:
    return judge_unbeaten(
        rises(parts, rule),
        "rising bits beat static bits nowhere by the margin",
        "rising bits win",
        [part.gain(*pair) for pair in COMPARED[1:] for part in parts],
    )


QUESTIONS: dict[str, Question] = {
    "H11a": (
        "Does the order of bits matter more at a constant learning rate than under decay?",
        _answer_order,
    ),
    "H11b": (
        "Under decay, do rising bits beat static bits of equal cost?",
        _answer_rising,
    ),
}


def gains(parts: Sequence[Task]) -> pd.DataFrame:
    """Return a printable table of the compared arms under every rule of every task."""
    columns: dict[str, list[str]] = {"training": [part.name for part in parts]}
    for pair in COMPARED:
        columns[f"{pair[0]} minus {pair[1]} [95 %]"] = [
            part.gain(*pair).text() for part in parts
        ]
    return pd.DataFrame(
        columns | {"8/8 reaches": baseline_columns(parts)["8/8 reaches"]}
    )


def figure(parts: Sequence[Task]) -> Figure:
    """Draw the order effect by rule, and rising minus static bits under decay, in units of the margin."""
    by_task = _by_task(parts)
    order = [
        trainings[rule].gain(*ORDER) for trainings in by_task.values() for rule in RULES
    ]
    names = [
        f"{_title(task)}, {rule}: rising minus falling"
        for task in by_task
        for rule in RULES
    ]
    order_lines = margin_lines(order, names, "falling is better", "rising is better")
    names = [f"{_title(task)}, decay: rising minus static" for task in by_task]
    static = margin_lines(rises(parts), names, "static is better", "rising is better")
    num_risen = sum(line.verdict.startswith("rising") for line in order_lines)
    num_static = sum(line.verdict.startswith("static") for line in static)
    return interval_figure(
        order_lines + static,
        f"Rising bits beat falling ones in {num_risen} of {len(order_lines)} trainings;\n"
        f"under decay static bits beat rising ones in {num_static} of {plural(len(static), 'task')}",
        "gain at equal cost, in margins (grey: within one)",
        band=1,
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the results of H11, once all runs of a task are stored."""
    if not _by_task(tasks(runs)[0]):
        return iter(())
    note = (
        "H11 of docs/preregistration.md. All arms but 8/8 cost what static 4 bits cost, with 8-bit gradients. Learning "
        "rate and bits of evaluation of every arm under every rule were chosen on held-out data."
    )
    return show_table(
        STUDY,
        runs,
        QUESTIONS,
        "Is a precision schedule a learning-rate schedule?",
        note,
        figure,
        FIGURE_ALT,
        ("by rule of the learning rate", gains),
    )
