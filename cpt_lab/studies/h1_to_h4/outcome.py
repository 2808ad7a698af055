"""What the runs of ``docs/preregistration.md`` answer: its tests, as they stand there, nothing else.  Needs no torch.

An answer is given when all runs of its question are there. A run that diverged or failed counts as chance.

>>> from cpt_lab.analysis.run_table import table
>>> [answer.word for answer in answers(table([]))][:1]
['open: 0 of 288 runs']
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy import stats

from cpt_lab.analysis import deficit_dates, preregistered
from cpt_lab.analysis.estimates import (
    CURRENT_BITS,
    EVALUATION_RULES,
    PERCENT,
    POINTS,
    Estimate,
    by_run,
    find_rows,
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
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.studies.case import OUTPUTS
from cpt_lab.studies.h1_to_h4 import arms


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H1, H2, H3, H4a and H4b from rows; a question with missing runs stays open.

    Holm's correction is over all five, whether the others are answered or not.
    """
    told, alike = [], {}
    for question, (asks, names, answer) in QUESTIONS.items():
        specs = [grid_specs(name) for name in names]
        rows = find_rows([spec for part in specs for spec in part], runs)
        if isinstance(rows, str):
            told.append(Answer(question, asks, word=rows))
            continue
        frames = [_frame(part, rows.loc[[spec.key for spec in part]]) for part in specs]
        lost = sum(int(frame["lost"].sum()) for frame in frames)
        told.append(replace(answer(*frames), question=question, asks=asks, lost=lost))
        if answer is _static:
            alike = {
                rule: replace(_static(*frames, rule=rule), question=question)
                for rule in EVALUATION_RULES
            }
    return [
        add_rules(a, told, alike) if a.question == "H2" and alike else a
        for a in correct_answers(told)
    ]


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what the questions came to, once all runs of one are there."""
    told = answers(runs)
    if not any(a.primary for a in told):
        return
    note = (
        "Arms, seeds, tests and what each outcome means were written down (docs/preregistration.md) before the first "
        "run. Grey: margins within which an effect is not worth naming. Runs that diverged or failed count as chance."
    )
    alt = "primary effects of the preregistered questions with their intervals and margins"
    lines: list[preregistered.Line] = []
    for question, e in ((a.question, e) for a in told for e in a.primary):
        mean, low, high = (x / e.margin for x in (e.mean, *e.interval()))
        lines.append(
            (f"{question} {e.what}, n = {len(e.values)}", mean, low, high, e.shown())
        )
    title = "What was found, beside margins within which it is not worth naming"
    drawn = preregistered.intervals(
        lines, title, "effect in margins (grey: within one)", band=1
    )
    yield Section(
        "Preregistered questions",
        (note,),
        drawn,
        alt,
        preregistered.summary(told),
        "left",
    )
    other = preregistered.secondary(told)
    yield Section(
        "Preregistered questions: other effects", table=other, style="left folded"
    )
    general = over_schedules(runs)
    if len(general):
        note = "The slopes of H1 over the means of the twelve schedules, which stand for schedules in general."
        yield Section("H1 over schedules", (note,), table=general, style="left")
    yield from deficit_dates.sections(decay_runs(runs))


def decay_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of H3, from which ``deficit_dates.outcome`` has the loss by date and decay; none if some miss."""
    rows = find_rows(grid_specs("h3/facebook"), runs)
    return runs.iloc[:0] if isinstance(rows, str) else rows.reset_index()


def _frame(specs: list[RunSpec], rows: pd.DataFrame) -> pd.DataFrame:
    """Return ``by_run`` of a grid, with the strata of degrees where there are any, at their own bits."""
    recipe = specs[0].recipe
    strata = {
        f"degree{low}": f"_degree{low}_current"
        for low in getattr(recipe, "degrees", ())
    }
    return by_run(specs, rows, OUTPUTS[recipe.dataset], {**EVALUATION_RULES, **strata})


def _direction(effects: Sequence[Estimate], below: str, above: str) -> str:
    signs = {effect.mean < 0 for effect in effects}
    return "mixed: two signs" if len(signs) > 1 else below if signs.pop() else above


def _alone(
    primary: Estimate, direction: str, small: str, secondary: Sequence[Estimate]
) -> Answer:
    """The answer of one primary effect: its direction if it stands, and whether it is too small to name."""
    words = (direction, small if primary.small else "")
    return Answer(
        primary=(primary,), p=primary.p(), words=words, secondary=tuple(secondary)
    )


def _slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Slopes of ordinary least squares with a constant: x (cells, k), y (seeds, cells) -> (k, seeds)."""
    return np.linalg.lstsq(np.column_stack([np.ones(len(x)), x]), y.T, rcond=None)[0][
        1:
    ]


# --- H1 -------------------------------------------------------------------------------------------
H1_MARGINS = {POINTS: 0.1, PERCENT: 1.6}


def _covariates() -> np.ndarray:
    """log2 noise, share at 2 bits, mean date of the noise: (12, 3)."""
    schedules = arms.twelve()
    return np.array(
        [
            (np.log2(s.noise_exposure()), s.share_at(2), arms.noise_date(s))
            for s in schedules
        ]
    )


def _noise(*frames: pd.DataFrame) -> Answer:
    x, primary, secondary = _covariates(), [], []
    for frame, task in zip(frames, ("Facebook", "characters"), strict=True):
        unit, y = frame["unit"].iloc[0], seeds_by_arms(frame).to_numpy()
        slopes = _slopes(x, y)
        primary.append(
            Estimate(
                f"{task}, a doubling of the noise", unit, slopes[0], H1_MARGINS[unit]
            )
        )
        secondary.append(
            Estimate(f"{task}, 10 % more steps at 2 bits", unit, 0.1 * slopes[1])
        )
        secondary.append(
            Estimate(f"{task}, noise 0.1 of the training later", unit, 0.1 * slopes[2])
        )
        for values, name in zip(x.T, ("noise", "share at 2 bits", "date"), strict=True):
            secondary.append(
                Estimate(
                    f"{task}, rank correlation with {name}", "", spearman(y, values)
                )
            )
    p = float(np.max([effect.p() for effect in primary]))  # NaN stays NaN
    direction = _direction(
        primary,
        "confirmed: at one cost, noisier schedules are worse",
        "contradicted: noisier schedules are better",
    )
    small = "no effect worth naming" if all(effect.small for effect in primary) else ""
    words = (direction if p < 0.01 else "", small)
    return Answer(primary=tuple(primary), p=p, words=words, secondary=tuple(secondary))


def over_schedules(runs: pd.DataFrame) -> pd.DataFrame:
    """Return H1's regression over the means of the twelve schedules: task, slope of log2 noise, interval, p (t of 8).

    It asks whether noise counts for schedules in general; the primary test, for these twelve.
    """
    lines, x = [], _covariates()
    a = np.column_stack([np.ones(len(x)), x])
    for name in ("h1/facebook", "h1/characters"):
        specs = grid_specs(name)
        if isinstance(rows := find_rows(specs, runs), str):
            continue
        frame = _frame(specs, rows)
        y = seeds_by_arms(frame).mean().to_numpy()
        b = np.linalg.lstsq(a, y, rcond=None)[0]
        free = len(x) - a.shape[1]
        error = math.sqrt(
            ((y - a @ b) ** 2).sum() / free * np.linalg.inv(a.T @ a)[1, 1]
        )
        half = float(stats.t.ppf(0.975, free)) * error
        p = float(2 * stats.t.sf(abs(b[1]) / error, free)) if error else 0.0
        slope = (
            f"{interval_text(b[1], b[1] - half, b[1] + half)} {frame['unit'].iloc[0]}"
        )
        lines.append((name.split("/")[1], slope, f"{p:.2g}"))
    return pd.DataFrame(lines, columns=["task", "a doubling of the noise [95 %]", "p"])


# --- H2 -------------------------------------------------------------------------------------------
H2_MARGINS = {POINTS: 0.2, PERCENT: 2.0}


def _static(*frames: pd.DataFrame, rule: str = "") -> Answer:
    """Judge a schedule at 8 bits, static at 8 or its own, whichever is better; or both by one of ``RULES``."""
    primary, secondary = [], []
    for frame, task in zip(
        frames, ("Facebook GCN", "characters", "Facebook GraphSAGE"), strict=True
    ):
        unit, at_top, at_own = (
            frame["unit"].iloc[0],
            seeds_by_arms(frame),
            seeds_by_arms(frame, CURRENT_BITS),
        )
        for bits in (5, 3):
            arm, cyclic = f"static {bits}", f"cyclic at the cost of static {bits}"
            schedule, better = (
                at_top[cyclic],
                max(at_top[arm], at_own[arm], key=lambda values: float(values.mean())),
            )
            if rule:
                schedule, better = (
                    seeds_by_arms(frame, rule)[[cyclic, arm]].to_numpy().T
                )
            name = f"{task}, schedule minus static {bits}"
            primary.append(
                Estimate(name, unit, np.asarray(schedule - better), H2_MARGINS[unit])
            )
            for values, where in (
                (at_top[arm], "8 bits"),
                (at_own[arm], "its own bits"),
            ):
                secondary.append(
                    Estimate(f"{name} at {where}", unit, np.asarray(schedule - values))
                )
    alike = f"; alike within the margin in {sum(effect.small for effect in primary)}"
    return judge_unbeaten(
        primary,
        "no schedule beats static by the margin",
        "a schedule wins",
        secondary,
        alike,
    )


# --- H3 -------------------------------------------------------------------------------------------
def _date(frame: pd.DataFrame) -> Answer:
    wide, cells = seeds_by_arms(frame), []
    specs = {spec.arm: spec for spec in frame["spec"]}
    for arm, spec in specs.items():
        if windows := spec.schedule.windows:
            rule = spec.recipe.lr_rule
            loss = wide[f"no deficit of {spec.recipe.steps}, {rule}"] - wide[arm]
            date = windows[0][0] / max(arms.STARTS)
            cells.append((rule, *arms.learning_rate_sums(spec), date, loss.to_numpy()))
    rules = np.array([cell[0] for cell in cells])
    x, y = (
        np.array([cell[1:4] for cell in cells]),
        np.array([cell[4] for cell in cells]).T,
    )
    during, after, date_slope = _slopes(x, y)
    primary = Estimate(
        "loss, latest minus earliest, at equal learning rate", POINTS, date_slope, 0.25
    )
    secondary = [
        Estimate(
            f"the same, {rule} learning rate alone",
            POINTS,
            _slopes(x[rules == rule, 2:], y[:, rules == rule])[0],
        )
        for rule in arms.LR_RULES
    ]
    secondary.append(
        Estimate(
            "loss, a learning rate of 10 steps more in the deficit", POINTS, 10 * during
        )
    )
    secondary.append(
        Estimate("loss, a learning rate of 10 steps more after it", POINTS, 10 * after)
    )
    direction = _direction([primary], "earlier is worse", "later is worse")
    return _alone(primary, direction, "no effect worth naming", secondary)


# --- H4 -------------------------------------------------------------------------------------------
def _gradients(frame: pd.DataFrame) -> Answer:
    at = {(int(s.schedule(0)), s.q_grad): s.arm for s in frame["spec"]}
    wide = seeds_by_arms(frame, CURRENT_BITS)
    y = {bits: wide[arm].to_numpy() for bits, arm in at.items()}
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
    frame = frame.assign(kind=[s.recipe.aggregation for s in frame["spec"]])
    lowest, highest = min(arms.DEGREES), max(arms.DEGREES)

    def gain(bits: int, column: str) -> np.ndarray:
        part = frame[frame["arm"] == f"static {bits}"].pivot(
            index="seed", columns="kind", values=column
        )
        return (part["fp"] - part["quantized"]).to_numpy()

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
        secondary.append(
            Estimate(f"{name}, all nodes", POINTS, gain(bits, CURRENT_BITS))
        )
        for low in arms.DEGREES:
            secondary.append(
                Estimate(
                    f"{name}, in-degree from {low}", POINTS, gain(bits, f"degree{low}")
                )
            )
    direction = _direction([primary], "hubs are hurt less", "hubs are hurt more")
    return _alone(primary, direction, "no difference worth naming", secondary)


# what each asks, the grids whose runs answer, the function of these runs, by grid, that does
QUESTIONS: dict[str, tuple[str, tuple[str, ...], Callable[..., Answer]]] = {
    "H1": ("At one cost, does noise decide?", ("h1/facebook", "h1/characters"), _noise),
    "H2": (
        "Does a cyclic schedule beat the static precision of its cost?",
        ("h2/facebook", "h2/characters", "h2/sage"),
        _static,
    ),
    "H3": ("Does the date of a deficit matter?", ("h3/facebook",), _date),
    "H4a": (
        "At 6 bits, do gradients hurt more, or weights and activations?",
        ("h4/gradients",),
        _gradients,
    ),
    "H4b": ("Does quantised aggregation hurt hubs more?", ("h4/aggregation",), _hubs),
}
