"""What the runs of ``docs/preregistration.md`` answer: its tests, as they stand there, nothing else.  Needs no torch.

An answer is given when all runs of its question are there. A run that diverged or failed counts as chance.

>>> from cpt_lab.analysis.runs import table
>>> [answer.word for answer in answers(table([]))][:1]
['open: 0 of 288 runs']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from cpt_lab.analysis.estimates import Estimate, holm
from cpt_lab.analysis.metrics import counted, interval_text
from cpt_lab.analysis.statistics import spearman
from cpt_lab.experiments import grids, questions
from cpt_lab.experiments.spec import RunSpec

LEVEL = 0.05  # of the family of five tests
POINTS, PERCENT = "points", "%"
CURRENT = "_current"


@dataclass(frozen=True)
class Answer:
    """What a question's runs say.

    Attributes:
        question: "H1", ... "H4b".
        asks: the question in words.
        primary: the effects that the primary test is about.
        p: of the primary test; NaN where runs are missing.
        words: of the outcome if the test stands, and if it does not.
        secondary: what else the document promises.
        lost: how many runs diverged or failed.
        adjusted: ``p`` by Holm's correction over the five tests.
        word: the outcome.
    """

    question: str
    asks: str
    primary: tuple[Estimate, ...] = ()
    p: float = math.nan
    words: tuple[str, str] = ("", "")
    secondary: tuple[Estimate, ...] = ()
    lost: int = 0
    adjusted: float = math.nan
    word: str = ""


@dataclass(frozen=True)
class Question:
    """A primary test: its name, what it asks, its grids, and the function of their runs, by grid, that answers."""

    name: str
    asks: str
    grids: tuple[str, ...]
    answer: Callable[..., Answer] = field(compare=False)


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H1, H2, H3, H4a and H4b from rows; a question with missing runs stays open.

    Holm's correction is over all five, whether the others are answered or not.
    """
    known = runs.set_index("key")
    found = []
    for q in QUESTIONS:
        specs = {name: grids.grid_specs(name) for name in q.grids}
        wanted = [spec.key for part in specs.values() for spec in part]
        there = sum(key in known.index for key in wanted)
        if there < len(wanted):
            found.append(Answer(q.name, q.asks, word=f"open: {there} of {counted(len(wanted), 'run')}"))
            continue
        frames = [_frame(part, known) for part in specs.values()]
        found.append(replace(q.answer(q, *frames), lost=sum(int(f["lost"].sum()) for f in frames)))
    adjusted = holm([a.p for a in found])
    return [worded(a, p) for a, p in zip(found, adjusted, strict=True)]


def worded(answer: Answer, adjusted: float) -> Answer:
    """Return an answer with its p-value after Holm's correction, and the word that follows from it."""
    if not answer.primary:
        return answer
    stands, otherwise = answer.words
    said = [word for word in (stands if adjusted < LEVEL else "", otherwise) if word]
    return replace(answer, adjusted=adjusted, word="; ".join(said) or "open")


def _frame(specs: list[RunSpec], known: pd.DataFrame) -> pd.DataFrame:
    """Return one line per run: its spec, seed and arm, quality at 8 bits and at its "own", "lost"; strata where any."""
    lines = []
    for spec in specs:
        row, perplexity = known.loc[spec.key], spec.recipe.task == "language_model"
        name, outputs = ("perplexity" if perplexity else "accuracy"), questions.OUTPUTS[spec.recipe.dataset]
        lost = row["status"] != "ok"

        def quality(column: str) -> float:
            value = (outputs if perplexity else 1 / outputs) if lost else row[column]  # noqa: B023 - called at once
            return float(-100 * math.log(value) if perplexity else 100 * value)  # noqa: B023

        line: dict[str, Any] = {"spec": spec, "seed": spec.seed, "arm": spec.arm, "lost": lost}
        line |= {"quality": quality(name), "own": quality(name + CURRENT)}
        for low in getattr(spec.recipe, "degrees", ()):
            line[f"degree{low}"] = quality(f"{name}_degree{low}{CURRENT}")
        lines.append(line)
    return pd.DataFrame(lines)


def _unit(frame: pd.DataFrame) -> str:
    return PERCENT if frame["spec"].iloc[0].recipe.task == "language_model" else POINTS


def _wide(frame: pd.DataFrame, value: str = "quality") -> pd.DataFrame:
    """Seeds by arms, arms in the order of the design."""
    return frame.pivot(index="seed", columns="arm", values=value)[list(dict.fromkeys(frame["arm"]))]


def _direction(effects: Sequence[Estimate], below: str, above: str) -> str:
    signs = {effect.mean < 0 for effect in effects}
    return "mixed: two signs" if len(signs) > 1 else below if signs.pop() else above


def _slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Slopes of ordinary least squares with a constant: x (cells, k), y (seeds, cells) -> (k, seeds)."""
    return np.linalg.lstsq(np.column_stack([np.ones(len(x)), x]), y.T, rcond=None)[0][1:]


# --- H1 -------------------------------------------------------------------------------------------
H1_MARGINS = {POINTS: 0.1, PERCENT: 1.6}


def _covariates() -> np.ndarray:
    """log2 noise, share at 2 bits, mean date of the noise: (12, 3)."""
    schedules = questions.twelve()
    return np.array([(np.log2(s.noise_exposure()), s.share_at(2), questions.noise_date(s)) for s in schedules])


def _noise(q: Question, *frames: pd.DataFrame) -> Answer:
    x, primary, secondary = _covariates(), [], []
    for frame, task in zip(frames, ("Facebook", "characters"), strict=True):
        unit, y = _unit(frame), _wide(frame).to_numpy()
        slopes = _slopes(x, y)
        primary.append(Estimate(f"{task}, a doubling of the noise", unit, slopes[0], H1_MARGINS[unit]))
        secondary.append(Estimate(f"{task}, 10 % more steps at 2 bits", unit, 0.1 * slopes[1]))
        secondary.append(Estimate(f"{task}, noise 0.1 of the training later", unit, 0.1 * slopes[2]))
        for values, name in zip(x.T, ("noise", "share at 2 bits", "date"), strict=True):
            secondary.append(Estimate(f"{task}, rank correlation with {name}", "", spearman(y, values)))
    p = float(np.max([effect.p() for effect in primary]))  # NaN stays NaN
    direction = _direction(
        primary, "confirmed: at one cost, noisier schedules are worse", "contradicted: noisier schedules are better"
    )
    small = "no effect worth naming" if all(effect.small for effect in primary) else ""
    return Answer(q.name, q.asks, tuple(primary), p, (direction if p < 0.01 else "", small), tuple(secondary))


def over_schedules(runs: pd.DataFrame) -> pd.DataFrame:
    """Return H1's regression over the means of the twelve schedules: task, slope of log2 noise, interval, p (t of 8).

    It asks whether noise counts for schedules in general; the primary test, for these twelve.
    """
    known, lines, x = runs.set_index("key"), [], _covariates()
    a = np.column_stack([np.ones(len(x)), x])
    for name in ("h1/facebook", "h1/characters"):
        specs = grids.grid_specs(name)
        if not all(spec.key in known.index for spec in specs):
            continue
        y = _wide(frame := _frame(specs, known)).mean().to_numpy()
        b = np.linalg.lstsq(a, y, rcond=None)[0]
        free = len(x) - a.shape[1]
        error = math.sqrt(((y - a @ b) ** 2).sum() / free * np.linalg.inv(a.T @ a)[1, 1])
        half = float(stats.t.ppf(0.975, free)) * error
        p = float(2 * stats.t.sf(abs(b[1]) / error, free)) if error else 0.0
        lines.append(
            (name.split("/")[1], interval_text(b[1], b[1] - half, b[1] + half) + f" {_unit(frame)}", f"{p:.2g}")
        )
    return pd.DataFrame(lines, columns=["task", "a doubling of the noise [95 %]", "p"])


# --- H2 -------------------------------------------------------------------------------------------
H2_MARGINS = {POINTS: 0.2, PERCENT: 2.0}


def _static(q: Question, *frames: pd.DataFrame) -> Answer:
    primary, secondary = [], []
    for frame, task in zip(frames, ("Facebook GCN", "characters", "Facebook GraphSAGE"), strict=True):
        unit, at_top, at_own = _unit(frame), _wide(frame), _wide(frame, "own")
        for bits in (5, 3):
            arm, schedule = f"static {bits}", at_top[f"cyclic at the cost of static {bits}"]
            better = max((at_top[arm], at_own[arm]), key=lambda values: float(values.mean()))
            name = f"{task}, schedule minus static {bits}"
            primary.append(Estimate(name, unit, (schedule - better).to_numpy(), H2_MARGINS[unit]))
            for values, where in ((at_top[arm], "8 bits"), (at_own[arm], "its own bits")):
                secondary.append(Estimate(f"{name} at {where}", unit, (schedule - values).to_numpy()))
    p = float(np.max([effect.p(effect.margin, "below") for effect in primary]))
    wins, loses = (standing(primary, side, 0.025) for side in ("above", "below"))
    word = f"a schedule wins in {len(wins)} of {len(primary)} ({'; '.join(wins)})" if wins else ""
    alike = [effect.what for effect in primary if effect.small]
    more = [f"static is better in {len(loses)} of {len(primary)}", f"alike within the margin in {len(alike)}"]
    stands = "confirmed: no schedule beats static by the margin"
    word = "; ".join([*([f"contradicted: {word}"] if word else []), *more])
    return Answer(q.name, q.asks, tuple(primary), p, (stands, word), tuple(secondary))


def standing(effects: Sequence[Estimate], side: str, level: float) -> list[str]:
    """Return the effects that lie on one side of 0, with Holm's correction over all of them."""
    adjusted = holm([effect.p(0.0, side) for effect in effects])
    return [effect.what for effect, p in zip(effects, adjusted, strict=True) if p < level]


# --- H3 -------------------------------------------------------------------------------------------
def _date(q: Question, frame: pd.DataFrame) -> Answer:
    wide, cells = _wide(frame), []
    specs = {spec.arm: spec for spec in frame["spec"]}
    for arm, spec in specs.items():
        if windows := spec.schedule.windows:
            rule = spec.recipe.lr_rule
            loss = wide[f"no deficit of {spec.recipe.steps}, {rule}"] - wide[arm]
            date = windows[0][0] / max(questions.STARTS)
            cells.append((rule, *questions.learning_rate_sums(spec), date, loss.to_numpy()))
    rules = np.array([cell[0] for cell in cells])
    x, y = np.array([cell[1:4] for cell in cells]), np.array([cell[4] for cell in cells]).T
    during, after, date_slope = _slopes(x, y)
    primary = Estimate("loss, latest minus earliest, at equal learning rate", POINTS, date_slope, 0.25)
    secondary = [
        Estimate(f"the same, {rule} learning rate alone", POINTS, _slopes(x[rules == rule, 2:], y[:, rules == rule])[0])
        for rule in questions.LR_RULES
    ]
    secondary.append(Estimate("loss, a learning rate of 10 steps more in the deficit", POINTS, 10 * during))
    secondary.append(Estimate("loss, a learning rate of 10 steps more after it", POINTS, 10 * after))
    direction = _direction([primary], "earlier is worse", "later is worse")
    small = "no effect worth naming" if primary.small else ""
    return Answer(q.name, q.asks, (primary,), primary.p(), (direction, small), tuple(secondary))


# --- H4 -------------------------------------------------------------------------------------------
def _gradients(q: Question, frame: pd.DataFrame) -> Answer:
    at = {(int(s.schedule(0)), s.q_grad): s.arm for s in frame["spec"]}
    wide = _wide(frame, "own")
    y = {bits: wide[arm].to_numpy() for bits, arm in at.items()}
    primary = Estimate("6 bits forward with 8-bit gradients, minus the reverse", PERCENT, y[6, 8] - y[8, 6], 0.15)
    secondary = (
        Estimate("6-bit minus 8-bit gradients", PERCENT, (y[6, 6] + y[8, 6] - y[6, 8] - y[8, 8]) / 2),
        Estimate("6 minus 8 bits forward", PERCENT, (y[6, 6] + y[6, 8] - y[8, 6] - y[8, 8]) / 2),
        Estimate("interaction of the two", PERCENT, y[6, 6] - y[6, 8] - y[8, 6] + y[8, 8]),
        Estimate("6-bit minus 8-bit gradients, 6 bits forward", PERCENT, y[6, 6] - y[6, 8]),
    )
    direction = _direction([primary], "weights and activations hurt more", "gradients hurt more")
    return Answer(q.name, q.asks, (primary,), primary.p(), (direction, "alike" if primary.small else ""), secondary)


def _hubs(q: Question, frame: pd.DataFrame) -> Answer:
    frame = frame.assign(kind=[s.recipe.aggregation for s in frame["spec"]])
    lowest, highest = min(questions.DEGREES), max(questions.DEGREES)

    def gain(bits: int, column: str) -> np.ndarray:
        part = frame[frame["arm"] == f"static {bits}"].pivot(index="seed", columns="kind", values=column)
        return (part["fp"] - part["quantized"]).to_numpy()

    def contrast(bits: int) -> np.ndarray:
        return gain(bits, f"degree{highest}") - gain(bits, f"degree{lowest}")

    primary = Estimate("FP-Agg minus Q-Agg at 3 bits, most minus fewest neighbours", POINTS, contrast(3), 0.5)
    secondary = [Estimate(f"the same at {bits} bits", POINTS, contrast(bits)) for bits in (4, 8)]
    for bits in (8, 4, 3):
        name = f"FP-Agg minus Q-Agg at {bits} bits"
        secondary.append(Estimate(f"{name}, all nodes", POINTS, gain(bits, "own")))
        for low in questions.DEGREES:
            secondary.append(Estimate(f"{name}, in-degree from {low}", POINTS, gain(bits, f"degree{low}")))
    direction = _direction([primary], "hubs are hurt less", "hubs are hurt more")
    small = "no difference worth naming" if primary.small else ""
    return Answer(q.name, q.asks, (primary,), primary.p(), (direction, small), tuple(secondary))


QUESTIONS = (
    Question("H1", "At one cost, does noise decide?", ("h1/facebook", "h1/characters"), _noise),
    Question(
        "H2", "Does a cyclic schedule beat the static precision of its cost?",
        ("h2/facebook", "h2/characters", "h2/sage"), _static,
    ),
    Question("H3", "Does the date of a deficit matter?", ("h3/facebook",), _date),
    Question("H4a", "At 6 bits, do gradients hurt more, or weights and activations?", ("h4/gradients",), _gradients),
    Question("H4b", "Does quantised aggregation hurt hubs more?", ("h4/aggregation",), _hubs),
)  # fmt: skip
