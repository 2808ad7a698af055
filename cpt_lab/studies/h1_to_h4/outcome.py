"""Answers of H1 to H4 in ``docs/preregistration.md``: its tests as registered, and nothing else.  No torch.

A question is answered when all its runs are stored. A run that diverged or failed counts as chance.

>>> from cpt_lab.analysis.run_table import table
>>> [answer.outcome for answer in answers(table([]))][:1]
['not finished: 0 of 288 runs']
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from cpt_lab.analysis import deficit_dates, preregistered
from cpt_lab.analysis.estimates import (
    EVALUATION_RULES,
    PERCENT,
    POINTS,
    Estimate,
    find_rows,
    run_frame,
    seeds_by_arms,
)
from cpt_lab.analysis.metrics import interval_text
from cpt_lab.analysis.preregistered import (
    Answer,
    add_rules,
    correct_answers,
    judge_unbeaten,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.statistics import spearman
from cpt_lab.experiments.grids import grid_specs
from cpt_lab.experiments.schema import CURRENT_BITS
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.studies.case import NUM_OUTPUTS
from cpt_lab.studies.h1_to_h4 import arms


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H1, H2, H3, H4a and H4b from rows; a question with missing runs has no answer.

    Holm's correction is over all five, answered or not.
    """
    study_answers, by_rule = [], {}
    for name, question in QUESTIONS.items():
        specs = [grid_specs(grid) for grid in question.grids]
        rows = find_rows([spec for part in specs for spec in part], runs)
        if isinstance(rows, str):
            study_answers.append(Answer(name, question.text, outcome=rows))
            continue
        frames = [_frame(part, rows.loc[[spec.key for spec in part]]) for part in specs]
        num_lost = sum(int(frame["lost"].sum()) for frame in frames)
        answer = question.answer(*frames)
        study_answers.append(
            replace(
                answer, question=name, question_text=question.text, num_lost=num_lost
            )
        )
        if name == "H2":
            for rule in EVALUATION_RULES:
                by_rule[rule] = replace(_static(*frames, rule=rule), question=name)
    return [
        add_rules(answer, study_answers, by_rule)
        if answer.question == "H2" and by_rule
        else answer
        for answer in correct_answers(study_answers)
    ]


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the results of the questions, once all runs of one are stored."""
    study_answers = answers(runs)
    if not any(a.primary for a in study_answers):
        return
    note = (
        "Arms, seeds, tests and what each outcome means were written down (docs/preregistration.md) before the first "
        "run. Grey: effects within their margin are too small to matter. Runs that diverged or failed count as chance."
    )
    alt = "primary effects of the preregistered questions with their intervals and margins"
    lines: list[preregistered.IntervalLine] = []
    effects = [(a.question, effect) for a in study_answers for effect in a.primary]
    for question, e in effects:
        mean, low, high = (x / e.margin for x in (e.mean, *e.interval()))
        lines.append(
            preregistered.IntervalLine(
                f"{question} {e.description}, n = {len(e.values)}",
                mean,
                low,
                high,
                e.text(),
            )
        )
    title = (
        "Primary effects of H1 to H4; inside the grey band they are too small to matter"
    )
    figure = preregistered.interval_figure(
        lines, title, "effect in margins (grey: within one)", band=1
    )
    yield Section(
        "Preregistered questions",
        (note,),
        figure,
        alt,
        preregistered.summary(study_answers),
        "left",
    )
    other = preregistered.secondary(study_answers)
    yield Section(
        "Preregistered questions: other effects", table=other, style="left folded"
    )
    general = over_schedules(runs)
    if len(general):
        note = "The slopes of H1 over the means of the twelve schedules, which stand for schedules in general."
        yield Section("H1 over schedules", (note,), table=general, style="left")
    yield from deficit_dates.sections(decay_runs(runs))


def decay_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of H3, for ``deficit_dates.outcome``; none if some are missing."""
    rows = find_rows(grid_specs("h3/facebook"), runs)
    return runs.iloc[:0] if isinstance(rows, str) else rows.reset_index()


def _frame(specs: list[RunSpec], rows: pd.DataFrame) -> pd.DataFrame:
    """Return ``run_frame`` of a grid, with the accuracy of every degree stratum of its recipe at its own bits."""
    recipe = specs[0].recipe
    strata = {
        f"degree{low}": f"_degree{low}_current"
        for low in getattr(recipe, "degrees", ())
    }
    return run_frame(
        specs, rows, NUM_OUTPUTS[recipe.dataset], {**EVALUATION_RULES, **strata}
    )


def _direction(effects: Sequence[Estimate], below: str, above: str) -> str:
    """Return ``below`` or ``above`` by the common sign of effects."""
    is_negative = {effect.mean < 0 for effect in effects}
    if len(is_negative) > 1:
        return "mixed: two signs"
    return below if is_negative.pop() else above


def _alone(
    primary: Estimate, direction: str, small: str, secondary: Sequence[Estimate]
) -> Answer:
    """Return the answer of one primary effect: its direction if significant, and whether it is within the margin."""
    words = (direction, small if primary.is_equivalent else "")
    return Answer(
        primary=(primary,), p=primary.p(), words=words, secondary=tuple(secondary)
    )


def _slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the slopes of ordinary least squares with a constant: x (cells, k), y (seeds, cells) -> (k, seeds)."""
    design = np.column_stack([np.ones(len(x)), x])
    coefficients = np.linalg.lstsq(design, y.T, rcond=None)[0]
    return coefficients[1:]


# --- H1 -------------------------------------------------------------------------------------------
H1_MARGINS = {POINTS: 0.1, PERCENT: 1.6}


def _covariates() -> np.ndarray:
    """Return log2 of the noise, share at 2 bits and mean date of the noise of the twelve schedules: (12, 3)."""
    schedules = arms.equal_cost_schedules()
    return np.array(
        [
            (np.log2(s.noise_exposure()), s.share_at(2), arms.mean_noise_time(s))
            for s in schedules
        ]
    )


def _noise(*frames: pd.DataFrame) -> Answer:
    """Return whether noisier schedules are worse at one cost.

    Two slopes that stand and have two signs are mixed, as the notes of the preregistration say.
    """
    x, primary, secondary = _covariates(), [], []
    for frame, task in zip(frames, ("Facebook", "characters"), strict=True):
        unit, y = frame["unit"].iloc[0], seeds_by_arms(frame).to_numpy()
        noise, share, date = _slopes(x, y)
        effect = f"{task}, a doubling of the noise"
        primary.append(Estimate(effect, unit, noise, H1_MARGINS[unit]))
        effect = f"{task}, 10 % more steps at 2 bits"
        secondary.append(Estimate(effect, unit, 0.1 * share))
        effect = f"{task}, noise 0.1 of the training later"
        secondary.append(Estimate(effect, unit, 0.1 * date))
        for values, name in zip(x.T, ("noise", "share at 2 bits", "date"), strict=True):
            effect = f"{task}, rank correlation with {name}"
            secondary.append(Estimate(effect, "", spearman(y, values)))
    p = float(np.max([effect.p() for effect in primary]))  # NaN stays NaN
    direction = _direction(
        primary,
        "confirmed: at one cost, noisier schedules are worse",
        "contradicted: noisier schedules are better",
    )
    small = (
        "no effect worth naming"
        if all(effect.is_equivalent for effect in primary)
        else ""
    )
    words = (direction if p < 0.01 else "", small)
    return Answer(primary=tuple(primary), p=p, words=words, secondary=tuple(secondary))


def over_schedules(runs: pd.DataFrame) -> pd.DataFrame:
    """Return H1's regression over the means of the twelve schedules: task, slope of log2 noise, interval, p (t of 8).

    It tests whether noise counts for schedules in general; the primary test, for these twelve.
    """
    lines = []
    x = _covariates()
    design = np.column_stack([np.ones(len(x)), x])
    for name in ("h1/facebook", "h1/characters"):
        specs = grid_specs(name)
        rows = find_rows(specs, runs)
        if isinstance(rows, str):
            continue
        frame = _frame(specs, rows)
        y = seeds_by_arms(frame).mean().to_numpy()
        slope, error, free = _noise_slope(design, y)
        half = float(stats.t.ppf(0.975, free)) * error
        p = float(2 * stats.t.sf(abs(slope) / error, free)) if error else 0.0
        text = interval_text(slope, slope - half, slope + half)
        unit = frame["unit"].iloc[0]
        lines.append((name.split("/")[1], f"{text} {unit}", f"{p:.2g}"))
    return pd.DataFrame(lines, columns=["task", "a doubling of the noise [95 %]", "p"])


def _noise_slope(design: np.ndarray, y: np.ndarray) -> tuple[float, float, int]:
    """Return the coefficient of the noise by least squares, its standard error and the degrees of freedom."""
    coefficients = np.linalg.lstsq(design, y, rcond=None)[0]
    free = len(design) - design.shape[1]
    residual_variance = ((y - design @ coefficients) ** 2).sum() / free
    inverse = np.linalg.inv(design.T @ design)
    error = math.sqrt(residual_variance * inverse[1, 1])
    return coefficients[1], error, free


# --- H2 -------------------------------------------------------------------------------------------
H2_MARGINS = {POINTS: 0.2, PERCENT: 2.0}


def _static(*frames: pd.DataFrame, rule: str = "") -> Answer:
    """Return whether no schedule beats static precision of equal cost by the margin.

    A schedule is evaluated at 8 bits, static precision at 8 bits or its own, whichever is better; with a rule of
    ``EVALUATION_RULES`` both are evaluated by it.
    """
    primary, secondary = [], []
    tasks = ("Facebook GCN", "characters", "Facebook GraphSAGE")
    for frame, task in zip(frames, tasks, strict=True):
        unit = frame["unit"].iloc[0]
        at_top, at_own = seeds_by_arms(frame), seeds_by_arms(frame, CURRENT_BITS)
        for bits in (5, 3):
            arm, cyclic = f"static {bits}", f"cyclic at the cost of static {bits}"
            if rule:
                by_arm = seeds_by_arms(frame, rule)
                schedule, static = by_arm[cyclic], by_arm[arm]
            else:
                schedule, static = at_top[cyclic], at_top[arm]
                if at_own[arm].mean() > at_top[arm].mean():
                    static = at_own[arm]
            name = f"{task}, schedule minus static {bits}"
            gains = schedule.to_numpy() - static.to_numpy()
            primary.append(Estimate(name, unit, gains, H2_MARGINS[unit]))
            for static, bits_text in (
                (at_top[arm], "8 bits"),
                (at_own[arm], "its own bits"),
            ):
                gains = schedule.to_numpy() - static.to_numpy()
                secondary.append(Estimate(f"{name} at {bits_text}", unit, gains))
    num_small = sum(effect.is_equivalent for effect in primary)
    return judge_unbeaten(
        primary,
        "no schedule beats static by the margin",
        "a schedule wins",
        secondary,
        f"; alike within the margin in {num_small}",
    )


# --- H3 -------------------------------------------------------------------------------------------
def _date(frame: pd.DataFrame) -> Answer:
    """Return whether the date of a deficit matters, at equal learning rate during and after it."""
    by_arm = seeds_by_arms(frame)
    rules, regressors, losses = [], [], []
    specs = {spec.arm: spec for spec in frame["spec"]}
    for arm, spec in specs.items():
        windows = spec.schedule.windows
        if not windows:
            continue
        rule = spec.recipe.lr_rule
        control = by_arm[f"no deficit of {spec.recipe.steps}, {rule}"]
        date = windows[0][0] / max(arms.STARTS)
        rules.append(rule)
        regressors.append((*arms.learning_rate_sums(spec), date))
        losses.append((control - by_arm[arm]).to_numpy())
    x, y = np.array(regressors), np.array(losses).T

    during, after, date_slope = _slopes(x, y)
    primary = Estimate(
        "loss, latest minus earliest, at equal learning rate", POINTS, date_slope, 0.25
    )
    secondary = []
    for rule in arms.LR_RULES:
        has_rule = np.array(rules) == rule
        (slope,) = _slopes(x[has_rule, 2:], y[:, has_rule])
        effect = f"the same, {rule} learning rate alone"
        secondary.append(Estimate(effect, POINTS, slope))
    effect = "loss, a learning rate of 10 steps more in the deficit"
    secondary.append(Estimate(effect, POINTS, 10 * during))
    effect = "loss, a learning rate of 10 steps more after it"
    secondary.append(Estimate(effect, POINTS, 10 * after))
    direction = _direction([primary], "earlier is worse", "later is worse")
    return _alone(primary, direction, "no effect worth naming", secondary)


# --- H4 -------------------------------------------------------------------------------------------
def _gradients(frame: pd.DataFrame) -> Answer:
    arm_by_bits = {(int(s.schedule(0)), s.q_grad): s.arm for s in frame["spec"]}
    wide = seeds_by_arms(frame, CURRENT_BITS)
    y = {bits: wide[arm].to_numpy() for bits, arm in arm_by_bits.items()}
    primary = Estimate(
        "6 bits forward with 8-bit gradients, minus the reverse",
        PERCENT,
        y[6, 8] - y[8, 6],
        0.15,
    )
    secondary = (
        Estimate(
            "6-bit minus 8-bit gradients",
            PERCENT,
            (y[6, 6] + y[8, 6] - y[6, 8] - y[8, 8]) / 2,
        ),
        Estimate(
            "6 minus 8 bits forward",
            PERCENT,
            (y[6, 6] + y[6, 8] - y[8, 6] - y[8, 8]) / 2,
        ),
        Estimate(
            "interaction of the two", PERCENT, y[6, 6] - y[6, 8] - y[8, 6] + y[8, 8]
        ),
        Estimate(
            "6-bit minus 8-bit gradients, 6 bits forward", PERCENT, y[6, 6] - y[6, 8]
        ),
    )
    direction = _direction(
        [primary], "weights and activations hurt more", "gradients hurt more"
    )
    return _alone(primary, direction, "alike", secondary)


def _hubs(frame: pd.DataFrame) -> Answer:
    """Return whether quantised aggregation hurts nodes with many neighbours more."""
    frame = frame.assign(kind=[s.recipe.aggregation for s in frame["spec"]])
    lowest, highest = min(arms.DEGREES), max(arms.DEGREES)

    def gain(bits: int, column: str) -> np.ndarray:
        arm_runs = frame[frame["arm"] == f"static {bits}"]
        by_kind = arm_runs.pivot(index="seed", columns="kind", values=column)
        return (by_kind["fp"] - by_kind["quantized"]).to_numpy()

    def contrast(bits: int) -> np.ndarray:
        return gain(bits, f"degree{highest}") - gain(bits, f"degree{lowest}")

    primary = Estimate(
        "Q-Agg's loss at 3 bits, most minus fewest neighbours", POINTS, contrast(3), 0.5
    )
    secondary = [
        Estimate(f"the same at {bits} bits", POINTS, contrast(bits)) for bits in (4, 8)
    ]
    for bits in (8, 4, 3):
        name = f"FP-Agg minus Q-Agg at {bits} bits"
        all_nodes = gain(bits, CURRENT_BITS)
        secondary.append(Estimate(f"{name}, all nodes", POINTS, all_nodes))
        for degree in arms.DEGREES:
            effect = f"{name}, in-degree from {degree}"
            stratum = gain(bits, f"degree{degree}")
            secondary.append(Estimate(effect, POINTS, stratum))
    direction = _direction([primary], "hubs are hurt less", "hubs are hurt more")
    return _alone(primary, direction, "no difference worth naming", secondary)


class Question(NamedTuple):
    """A preregistered question."""

    text: str
    grids: tuple[str, ...]  # the grids whose runs answer it
    answer: Callable[..., Answer]  # from the runs of every grid (``_frame``)


QUESTIONS = {
    "H1": Question(
        "At one cost, does noise decide?", ("h1/facebook", "h1/characters"), _noise
    ),
    "H2": Question(
        "Does a cyclic schedule beat the static precision of its cost?",
        ("h2/facebook", "h2/characters", "h2/sage"),
        _static,
    ),
    "H3": Question("Does the date of a deficit matter?", ("h3/facebook",), _date),
    "H4a": Question(
        "At 6 bits, do gradients hurt more, or weights and activations?",
        ("h4/gradients",),
        _gradients,
    ),
    "H4b": Question(
        "Does quantised aggregation hurt hubs more?", ("h4/aggregation",), _hubs
    ),
}
