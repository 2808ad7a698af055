"""Answers of H13 in ``docs/preregistration.md``: which matmuls switch from four bits to MXFP8 late.  No torch."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.estimates import (
    INCONCLUSIVE,
    Estimate,
    significant_effects,
)
from cpt_lab.analysis.metrics import plural
from cpt_lab.analysis.preregistered import (
    Answer,
    interval_figure,
    margin_lines,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.studies.h13.arms import (
    EQUAL_COST_ARMS,
    FORWARD_ARM,
    INPUT_GRADIENT_ARM,
    INT4,
    LOW_BIT_RECIPES,
    MXFP4,
    NVFP4,
    SPREAD_ARM,
    STATIC_ARM,
    STUDY,
    WEIGHT_GRADIENT_ARM,
    WIDE_ARM,
    case_name,
)
from cpt_lab.studies.tuned import FULL_BITS_ARM
from cpt_lab.studies.tuned_outcome import (
    Question,
    Task,
    answer_questions,
    baseline_columns,
    complete,
    show_table,
)


class Opponent(NamedTuple):
    """Arms whose mean the late forward switch is compared with, and their name."""

    arms: tuple[str, ...]
    name: str


GRADIENT_OPPONENT = Opponent(
    (INPUT_GRADIENT_ARM, WEIGHT_GRADIENT_ARM), "the mean of both gradients late"
)
STATIC_OPPONENT, SPREAD_OPPONENT = (
    Opponent((STATIC_ARM,), STATIC_ARM),
    Opponent((SPREAD_ARM,), SPREAD_ARM),
)
FIGURE_OPPONENTS = (GRADIENT_OPPONENT, STATIC_OPPONENT, SPREAD_OPPONENT)
MIN_GAIN = 0.5  # of MXFP8 on held-out data in margins, for a task to count
MIN_TASKS = 2  # that count, for an answer
FIGURE_ALT = (
    "a late switch of the forward matmuls minus late switches of gradients, minus four bits, and minus forward matmuls "
    "in MXFP8 spread over time, by recipe"
)
tasks = partial(complete, STUDY)


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H13, a family of three tests, from rows."""
    return answer_questions(*tasks(runs), QUESTIONS)


def forward_gain(task: Task, opponent: Opponent, rule: str = "") -> Estimate:
    """Return the quality of the late forward switch minus the mean of other arms.

    Args:
        task: a task in a recipe.
        opponent: what is subtracted.
        rule: of evaluation; "" for MXFP8.
    """
    qualities = [task.quality(arm, rule) for arm in opponent.arms]
    values = task.quality(FORWARD_ARM, rule) - np.mean(qualities, axis=0)
    description = f"{task.name}, {FORWARD_ARM} minus {opponent.name}"
    return Estimate(description, task.unit, values, task.margin)


def gain_in_margins(
    task: Task, opponent: Opponent, rule: str = "", minus: Task | None = None
) -> np.ndarray:
    """Return ``forward_gain`` in margins by seed, minus that of the same task in another recipe if one is given."""
    gain = forward_gain(task, opponent, rule).values / task.margin
    return gain if minus is None else gain - gain_in_margins(minus, opponent, rule)


def counted_tasks(parts: Sequence[Task], *recipes: str) -> list[dict[str, Task]]:
    """Return recipe -> task, for the complete tasks in which MXFP8 gains enough in each of ``recipes``."""
    by_name: dict[str, dict[str, Task]] = {}
    for part in filter(_has_gain, parts):
        name, _, recipe = part.case.partition("/")
        if recipe in recipes:
            by_name.setdefault(name, {})[recipe] = part
    return [found for found in by_name.values() if len(found) == len(recipes)]


def _has_gain(task: Task) -> bool:
    return task.held_out_gain(FULL_BITS_ARM, STATIC_ARM) >= MIN_GAIN * task.margin


def mean_gain(
    parts: Sequence[Task],
    opponent: Opponent,
    recipe: str,
    minus: str = "",
    rule: str = "",
) -> Estimate | None:
    """Return the mean of ``forward_gain`` in margins over the tasks that count, by seed; None for too few.

    Args:
        parts: all tasks.
        opponent: what is subtracted.
        recipe: name of a recipe.
        minus: recipe whose gain is subtracted; "" for none.
        rule: of evaluation; "" for MXFP8.
    """
    recipes = (recipe, minus) if minus else (recipe,)
    counted = counted_tasks(parts, *recipes)
    if len(counted) < MIN_TASKS:
        return None
    values = [
        gain_in_margins(by_recipe[recipe], opponent, rule, by_recipe.get(minus))
        for by_recipe in counted
    ]
    name = f"{recipe} minus {minus}" if minus else recipe
    description = (
        f"{name}, {FORWARD_ARM} minus {opponent.name}, mean of {len(counted)} tasks"
    )
    return Estimate(description, "margins", np.mean(values, axis=0), 1.0)


def _answer(
    parts: Sequence[Task],
    opponents: Sequence[Opponent],
    words: tuple[str, str],
    minus: str = "",
    rule: str = "",
) -> Answer:
    """Return an answer for MXFP4: all effects have to be positive, the first one contradicts.

    Args:
        parts: all tasks.
        opponents: what the late forward switch is compared with.
        words: what is confirmed, and what contradicts.
        minus: recipe whose effects are subtracted; "" for none.
        rule: of evaluation; "" for MXFP8.
    """
    effects = [mean_gain(parts, opponent, MXFP4, minus, rule) for opponent in opponents]
    primary = [effect for effect in effects if effect is not None]
    left_out = [
        part.name
        for part in parts
        if part.case.partition("/")[2] in (MXFP4, minus) and not _has_gain(part)
    ]
    remark = ""
    if left_out:
        remark = f"left out, as MXFP8 gains too little there: {', '.join(left_out)}"
    secondary = _secondary(parts, opponents, minus, rule)
    if not primary:
        outcome = "; ".join(filter(None, [INCONCLUSIVE, remark]))
        return Answer(secondary=tuple(secondary), outcome=outcome)

    contradicted = ""
    if significant_effects(primary[:1], "less", 0.025):
        contradicted = f"contradicted: {words[1]}"
    return Answer(
        primary=tuple(primary),
        p=max(effect.p(0.0, "greater") for effect in primary),
        words=(f"confirmed: {words[0]}", contradicted),
        secondary=tuple(secondary),
        remark=remark,
    )


def _secondary(
    parts: Sequence[Task],
    opponents: Sequence[Opponent],
    minus: str,
    rule: str,
) -> list[Estimate]:
    """Return the effects of ``_answer`` in every task, and their means for NVFP4."""
    effects = []
    for opponent in opponents:
        for part in parts:
            task, _, recipe = part.case.partition("/")
            if not minus:
                effects.append(forward_gain(part, opponent, rule))
            elif recipe != minus:
                (subtracted,) = (p for p in parts if p.case == case_name(task, minus))
                values = gain_in_margins(part, opponent, rule, subtracted)
                description = (
                    f"{part.name} minus {minus}, {FORWARD_ARM} minus {opponent.name}"
                )
                effects.append(Estimate(description, "margins", values, 1.0))
        mean = mean_gain(parts, opponent, NVFP4, minus, rule)
        effects += [] if mean is None else [mean]
    return effects


QUESTIONS: dict[str, Question] = {
    "H13a": (
        "In the recipe for MXFP4, is it better to switch the forward matmuls late than those of a gradient?",
        partial(
            _answer,
            opponents=(GRADIENT_OPPONENT, STATIC_OPPONENT),
            words=("the forward matmuls should switch", "a gradient should switch"),
        ),
    ),
    "H13b": (
        "Does that depend on the recipe: is it more so for MXFP4 than for int4?",
        partial(
            _answer,
            opponents=(GRADIENT_OPPONENT,),
            words=("more so for MXFP4", "more so for int4"),
            minus=INT4,
        ),
    ),
    "H13c": (
        "In the recipe for MXFP4, is a late switch of the forward matmuls better than the same MXFP8 steps spread over "
        "the training?",
        partial(
            _answer,
            opponents=(SPREAD_OPPONENT,),
            words=("late is better", "spread is better"),
        ),
    ),
}


def gains(parts: Sequence[Task]) -> pd.DataFrame:
    """Return a printable table of what every arm gains on four bits alone, and of what MXFP8 alone gains."""
    columns: dict[str, list[str]] = {"task": [part.name for part in parts]}
    for arm in (*EQUAL_COST_ARMS, WIDE_ARM, FULL_BITS_ARM):
        columns[f"{arm} minus {STATIC_ARM} [95 %]"] = [
            part.gain(arm, STATIC_ARM).text() if arm in part.settings else "–"
            for part in parts
        ]
    counts = ["yes" if _has_gain(part) else "no" for part in parts]
    return pd.DataFrame(columns | {"counts": counts} | baseline_columns(parts))


def comparisons(parts: Sequence[Task]) -> pd.DataFrame:
    """Return a printable table of the late forward switch against the other arms of its cost."""
    columns: dict[str, list[str]] = {"task": [part.name for part in parts]}
    for other in EQUAL_COST_ARMS[1:]:
        columns[f"{FORWARD_ARM} minus {other} [95 %]"] = [
            part.gain(FORWARD_ARM, other).text() for part in parts
        ]
    return pd.DataFrame(columns)


def figure(parts: Sequence[Task]) -> Figure | None:
    """Draw the gains of the late forward switch, means over tasks by recipe; None if no recipe has enough tasks."""
    names, effects = [], []
    for opponent in FIGURE_OPPONENTS:
        for recipe in LOW_BIT_RECIPES:
            gain = mean_gain(parts, opponent, recipe)
            if gain is not None:
                num_tasks = len(counted_tasks(parts, recipe))
                names.append(f"{recipe}, minus {opponent.name}, {num_tasks} tasks")
                effects.append(gain)
    if not effects:
        return None
    lines = margin_lines(effects, names, "worse", "better")
    num_recipes = len(effects) // len(FIGURE_OPPONENTS)
    better = [
        sum(line.verdict.startswith("better") for line in lines[start:][:num_recipes])
        for start in range(0, len(lines), num_recipes)
    ]
    return interval_figure(
        lines,
        f"Forward late beats gradients late in {better[0]} of {plural(num_recipes, 'recipe')},\n"
        f"4/4 in {better[1]}, and forward spread in {better[2]}",
        "gain, in margins (grey: within one, 1 point or 1 %); all but 4/4 cost the same",
        band=1,
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the results of H13, once all runs of a task are stored."""
    note = (
        f"H13 of docs/preregistration.md. {', '.join(EQUAL_COST_ARMS)} cost the same at any price of a "
        "multiply-accumulate: a fifteenth of the matmuls of quantised layers is in MXFP8, the others in four bits "
        "(for the MLP see there). The learning rates of 4/4 and of 8/8 were chosen on held-out data; the other arms "
        "have that of 4/4. All models are evaluated in MXFP8."
    )
    return show_table(
        STUDY,
        runs,
        QUESTIONS,
        "Which matmuls should switch late, in recipes that hardware has?",
        note,
        figure,
        FIGURE_ALT,
        ("gains on four bits", gains),
        ("the late forward switch", comparisons),
    )
