"""Answer of H5 in ``docs/preregistration.md``: bits allocated by sensitivity against static precision.  No torch.

A case is answered when all its runs are stored. A run that diverged or failed counts as chance. ``effects`` has the
gain of every arm, ``verdict`` the outcome in the words of the document, ``robustness`` its dependence on the rule of
evaluation.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_core.schedules.schedule import Schedule
from cpt_extras.search.layered import LayeredSchedule
from cpt_extras.search.sensitivity_result import OVER
from cpt_lab.analysis.estimates import (
    EVALUATION_RULES,
    INCONCLUSIVE,
    NOT_FINISHED,
    PERCENT,
    Estimate,
    find_rows,
    holm,
    run_frame,
    seeds_by_arms,
)
from cpt_lab.analysis.metrics import interval_text
from cpt_lab.analysis.preregistered import SIGNIFICANCE_LEVEL, Answer, rule_dependence
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.style import (
    COLORS,
    SMALL_FONT_SIZE,
    integer_ticks,
    interval_bar,
    subplots,
)
from cpt_lab.experiments.schema import CURRENT_BITS, EIGHT_BITS
from cpt_lab.experiments.spec import NotMeasuredError, RunSpec
from cpt_lab.studies.case import NUM_OUTPUTS
from cpt_lab.studies.h5.arms import (
    CASES,
    LATE,
    Q_MAX,
    STATIC,
    allocated,
    stored_sensitivity,
)

QUESTION_TEXT = "Do bits put where they matter beat static precision of equal cost?"
ALLOCATED = tuple(f"over {over}" for over in OVER)
ARMS = (*ALLOCATED, LATE)
WINS, LOSES = "wins", "loses"
ELSEWHERE = ", as what wins here loses elsewhere"
# the registered outcomes: an arm wins and never loses; wins and loses; loses; no arm wins
WON, MIXED, WORSE = "bits here, not there", f"mixed{ELSEWHERE}", "worse than static"
NOTHING_BEAT_STATIC = "nothing beat static"


class Arms:
    """The runs of a case.

    Attributes:
        unit: unit of the quality.
        schedules: schedule by arm.
        by_rule: rule of ``EVALUATION_RULES`` -> quality, seeds by arms.
        num_lost: runs that diverged or failed, by arm.
        bitops: BitOps by arm relative to static precision, by both conventions.
    """

    def __init__(self, specs: list[RunSpec], rows: pd.DataFrame) -> None:
        runs = run_frame(specs, rows, NUM_OUTPUTS[specs[0].recipe.dataset])
        by_arm = runs.groupby("arm")
        bitops = by_arm[["bitops", "bitops_per_op"]].mean()
        self.unit = runs["unit"].iloc[0]
        self.schedules = {r.arm: r.spec.schedule for r in runs.itertuples()}
        self.by_rule = {rule: seeds_by_arms(runs, rule) for rule in EVALUATION_RULES}
        self.num_lost = by_arm["lost"].sum()
        self.bitops = bitops / bitops.loc[STATIC]

    @property
    def opponent(self) -> str:
        """The better evaluation of static precision by its mean, a rule of ``EVALUATION_RULES``."""
        at_top, at_own = (
            self.by_rule[rule][STATIC] for rule in (EIGHT_BITS, CURRENT_BITS)
        )
        return EIGHT_BITS if at_top.mean() >= at_own.mean() else CURRENT_BITS

    def gain(self, arm: str, rule: str = "") -> Estimate:
        """Return the gain of an arm on static precision.

        Without a rule the arm is evaluated at 8 bits and static precision by its better evaluation; with one of
        ``EVALUATION_RULES`` both are evaluated by it.
        """
        static = self.by_rule[rule or self.opponent][STATIC]
        gains = self.by_rule[rule or EIGHT_BITS][arm] - static
        return Estimate(arm, self.unit, gains.to_numpy())

    def is_static(self, arm: str) -> bool:
        """Return whether an arm is static precision itself, with equal bits in all layers at every step."""
        return _bits(self.schedules[arm]) == _bits(self.schedules[STATIC])


def effects(parts: Mapping[str, Arms | str], rule: str = "") -> pd.DataFrame:
    """Return one line per case and arm: its gain on the better evaluation of static precision, by seed.

    Args:
        parts: of ``cases``.
        rule: a rule of ``EVALUATION_RULES`` by which arms and static precision are both evaluated; "" for the
            registered evaluation.

    Returns:
        case, arm, unit ("points", or "%" of the perplexity), mean, low, high (95 %), p (two-sided), adjusted (Holm over
        all cases times arms), word ("wins", "loses", "inconclusive", or a note on missing runs), n, lost (runs of arm
        and opponent that diverged or failed), opponent ("8 bits" or "own bits"), static (its quality), full (gain of
        static 8 on it), promised (gain by the model), bitops and bitops_per_op (those of the whole model, relative
        to static's, by both conventions). NaN for a case with missing runs.
    """
    lines = [line for case, arms in parts.items() for line in _case(case, arms, rule)]
    adjusted = holm([line["p"] for line in lines])
    for line, p in zip(lines, adjusted, strict=True):
        line["adjusted"] = p
        if not line["word"]:
            direction = WINS if line["mean"] > 0 else LOSES
            line["word"] = direction if p < SIGNIFICANCE_LEVEL else INCONCLUSIVE
    columns = [
        "case",
        "arm",
        "unit",
        "mean",
        "low",
        "high",
        "p",
        "adjusted",
        "word",
        "n",
        "lost",
        "opponent",
        "static",
        "full",
        "promised",
        "bitops",
        "bitops_per_op",
    ]
    return pd.DataFrame(lines, columns=columns)


def cases(runs: pd.DataFrame) -> dict[str, Arms | str]:
    """Return the runs of every case; a note instead if runs are missing or cannot be defined yet."""

    def arms(case: str) -> Arms | str:
        try:
            specs = allocated(case)
        except NotMeasuredError:
            return f"{NOT_FINISHED}where bits matter has not been measured"
        rows = find_rows(specs, runs)
        return rows if isinstance(rows, str) else Arms(specs, rows)

    return {case: arms(case) for case in CASES}


def _case(case: str, arms: Arms | str, rule: str) -> Iterator[dict[str, Any]]:
    if isinstance(arms, str):
        for arm in ARMS:
            yield {
                "case": case,
                "arm": arm,
                "p": math.nan,
                "word": arms,
                "n": 0,
                "lost": 0,
            }
        return
    s, opponent = stored_sensitivity(case), rule or arms.opponent
    static = float(arms.by_rule[opponent][STATIC].mean())
    scale = 100 / float(np.mean(s.reference)) if arms.unit == PERCENT else 100.0
    for arm in ARMS:
        gain = arms.gain(arm, rule)
        low, high = gain.interval()
        is_static = arms.is_static(arm)
        yield {
            "case": case,
            "arm": arm,
            "unit": arms.unit,
            "mean": gain.mean,
            "low": low,
            "high": high,
            "p": 1.0 if is_static else gain.p(),
            "word": "static precision itself" if is_static else "",
            "n": len(gain.values),
            "lost": arms.num_lost[arm] + arms.num_lost[STATIC],
            "opponent": opponent.removeprefix("their "),
            "static": static,
            "full": float(arms.by_rule[EIGHT_BITS][f"static {Q_MAX}"].mean()) - static,
            "promised": scale
            * (
                s.predicted_quality_loss(arms.schedules[STATIC])
                - s.predicted_quality_loss(arms.schedules[arm])
            ),
            **arms.bitops.loc[arm],
        }


def secondary(parts: Mapping[str, Arms | str]) -> pd.DataFrame:
    """Return a printable table of the secondary effects of ``cases``; they decide nothing."""
    lines = []
    for case, arms in parts.items():
        if not isinstance(arms, str):
            lines += [(case, *effect) for effect in _secondary_effects(case, arms)]
    return pd.DataFrame(lines, columns=["task", "effect", "mean [95 %]"])


def _secondary_effects(case: str, arms: Arms) -> Iterator[tuple[str, str]]:
    """Yield (effect, its value in words) of a case."""

    def difference(a: pd.Series, b: pd.Series) -> str:
        return Estimate("", arms.unit, (a - b).to_numpy()).text()

    top, at_own = arms.by_rule[EIGHT_BITS], arms.by_rule[CURRENT_BITS]
    static = float(arms.by_rule[arms.opponent][STATIC].mean())
    for arm in ARMS:
        gain = difference(top[arm], top[STATIC])
        yield f"{arm}, minus static at {Q_MAX} bits", gain
        gain = difference(top[arm], at_own[STATIC])
        yield f"{arm}, minus static at its own bits", gain
        way = (top[arm].mean() - static) / (top[f"static {Q_MAX}"].mean() - static)
        share = f"{100 * way:.0f} %"
        yield f"{arm}, share of the way from static to static {Q_MAX}", share
        conventions = ("paper", "per_op")
        for ratio, name in zip(arms.bitops.loc[arm], conventions, strict=True):
            effect = f"{arm}, BitOps of the whole model beside static's ({name})"
            yield effect, f"{ratio:.3f}"
    over_both = ALLOCATED[2]
    for other in ALLOCATED[:2]:
        yield f"{over_both}, minus {other}", difference(top[over_both], top[other])
    for dimension in OVER[:2]:
        agreement = stored_sensitivity(case).agreement(dimension)
        effect = (
            f"rank correlation over {dimension}: measured w, and estimated "
            "from gradients"
        )
        yield effect, f"{agreement:+.2f}"


def _bits(schedule: Schedule) -> set[tuple[int, ...]]:
    """Return the distinct sequences of bits over the layers of a schedule."""
    if isinstance(schedule, LayeredSchedule):
        rows = list(schedule.by_group())
    else:
        rows = [schedule.bits()]
    return {tuple(row.tolist()) for row in rows}


def verdict(gains: pd.DataFrame) -> str:
    """Return the outcome of H5 from ``effects``, in the words of the document, with every win and every loss.

    For an arm that wins and never loses, the results of all other tasks are listed too.
    """
    is_missing = gains["word"].str.startswith(NOT_FINISHED)
    missing = [case for case in CASES if is_missing[gains["case"] == case].any()]
    if missing:
        return f"{NOT_FINISHED}runs of {', '.join(missing)} are missing"

    allocated_gains = gains[gains["arm"].isin(ALLOCATED)]
    word = allocated_gains["word"]
    if not (word == WINS).any():
        return _no_win_text(allocated_gains)

    outcome = allocated_gains["arm"].map(_outcomes(gains))
    sentences = []
    for name in (WON, MIXED, WORSE):
        lines = allocated_gains[(outcome == name) & word.isin((WINS, LOSES))]
        if len(lines):
            sentences.append(f"{name}: {'; '.join(_gains(lines))}")
    other_gains = allocated_gains[(outcome == WON) & (word != WINS)]
    is_undecided = other_gains["word"] == INCONCLUSIVE
    if is_undecided.any():
        undecided = "; ".join(_gains(other_gains[is_undecided]))
        sentences.append(f"{INCONCLUSIVE} after Holm's correction: {undecided}")
    static_arms = [
        f"{r.arm}, {r.case}" for r in other_gains[~is_undecided].itertuples()
    ]
    if static_arms:
        sentences.append(f"static precision itself: {'; '.join(static_arms)}")
    first, *other_sentences = sentences
    return ". ".join(
        [first, *(f"{text[0].upper()}{text[1:]}" for text in other_sentences)]
    )


def _no_win_text(allocated_gains: pd.DataFrame) -> str:
    """Return the outcome without any win, with the largest gain that the intervals allow."""
    share_of_full = allocated_gains["high"] / allocated_gains["full"]
    best = allocated_gains.loc[share_of_full.idxmax()]
    return (
        f"{NOTHING_BEAT_STATIC}: at most {best.high:+.2f} {best.unit} ({best.arm}, {best.case}, of {best.full:.2f} "
        f"between static and static {Q_MAX})"
    )


def _outcomes(gains: pd.DataFrame) -> dict[str, str]:
    """Return the registered outcome of every allocated arm, or "inconclusive"."""
    outcomes = {}
    for arm in ALLOCATED:
        words = set(gains["word"][gains["arm"] == arm])
        if WINS in words:
            outcomes[arm] = MIXED if LOSES in words else WON
        else:
            outcomes[arm] = WORSE if LOSES in words else INCONCLUSIVE
    return outcomes


def robustness(parts: Mapping[str, Arms | str]) -> dict[str, str]:
    """Return the arms with an outcome that depends on the rule of evaluation, with a note on the deviating outcomes."""
    registered = _outcomes(effects(parts))
    by_rule = {rule: _outcomes(effects(parts, rule)) for rule in EVALUATION_RULES}
    notes = {}
    for arm, outcome in registered.items():
        rule_outcomes = {rule: outcomes[arm] for rule, outcomes in by_rule.items()}
        note = rule_dependence(outcome, rule_outcomes)
        if note:
            notes[arm] = note.replace(ELSEWHERE, "")
    return notes


def outcomes_by_rule(parts: Mapping[str, Arms | str]) -> dict[str, str]:
    """Return the outcomes of all allocated arms in words by each rule of ``EVALUATION_RULES``, even if they agree."""
    return {rule: _outcomes_text(effects(parts, rule)) for rule in EVALUATION_RULES}


def _outcomes_text(gains: pd.DataFrame) -> str:
    """Return the outcomes of all allocated arms, such as "over time: worse than static; over layers: ..."."""
    outcomes = _outcomes(gains).items()
    return "; ".join(f"{arm}: {text.replace(ELSEWHERE, '')}" for arm, text in outcomes)


def _gains(lines: pd.DataFrame) -> list[str]:
    """Return gains in words, with the BitOps of the whole model if they differ from static's by 0.5 % or more."""
    texts = []
    for r in lines.itertuples():
        gain = f"{r.arm}, {r.case}: {_interval(r)}"
        deviation = max(abs(r.bitops - 1), abs(r.bitops_per_op - 1))
        if not deviation < 0.005:
            gain += (
                f" (BitOps of the whole model: {r.bitops:.2f} of static's as the paper counts, "
                f"{r.bitops_per_op:.2f} of all that runs)"
            )
        texts.append(gain)
    return texts


def _interval(r: Any) -> str:
    return f"{interval_text(r.mean, r.low, r.high)} {r.unit}".strip()


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answer of H5 from rows, in the registered words for outcomes."""
    parts = cases(runs)
    gains = effects(parts)
    outcome = verdict(gains)
    by_rule: tuple[tuple[str, str], ...] = ()
    if not outcome.startswith(NOT_FINISHED):
        by_rule = tuple(outcomes_by_rule(parts).items())
        if outcome.startswith(NOTHING_BEAT_STATIC):
            outcome = NOTHING_BEAT_STATIC
        else:
            outcome = _outcomes_text(gains)
    dependent_arms = robustness(parts)
    if dependent_arms:
        outcome += f"; depends on the rule: {' and '.join(dependent_arms)}"

    primary = []
    for case, arms in parts.items():
        if isinstance(arms, str):
            continue
        for arm in ARMS:
            if not arms.is_static(arm):
                description = f"{case}, {arm} minus static"
                primary.append(replace(arms.gain(arm), description=description))
    return [
        Answer("H5", QUESTION_TEXT, tuple(primary), outcome=outcome, by_rule=by_rule)
    ]


def summary(gains: pd.DataFrame) -> pd.DataFrame:
    """Return a printable form of ``effects``."""

    def texts(column: str, template: str) -> list[str]:
        return ["–" if pd.isna(x) else template.format(x) for x in gains[column]]

    bitops = []
    for paper, per_op in zip(
        texts("bitops", "{:.3f}"), texts("bitops_per_op", "{:.3f}"), strict=True
    ):
        bitops.append("–" if paper == "–" else f"{paper}, {per_op}")
    cells = {
        "task": gains["case"],
        "arm": gains["arm"],
        "gain on static [95 %]": [
            _interval(r) if r.n else "–" for r in gains.itertuples()
        ],
        "promised": texts("promised", "{:+.2f}"),
        f"static {Q_MAX} on static": texts("full", "{:+.2f}"),
        "BitOps of the whole model (paper, per_op)": bitops,
        "p": texts("p", "{:.2g}"),
        "p (Holm)": texts("adjusted", "{:.2g}"),
        "outcome": gains["word"],
        "static judged at": texts("opponent", "{}"),
        "seeds": gains["n"],
        "diverged or failed": gains["lost"],
    }
    return pd.DataFrame(cells)


def allocation_figure(gains: pd.DataFrame) -> Figure:
    """Draw the schedules of every answered case of ``effects``, and their gains; ValueError if no case is answered."""
    cases = [case for case in CASES if (gains["n"][gains["case"] == case] > 0).any()]
    if not cases:
        raise ValueError("no case of H5 is answered yet; all runs of one are needed")
    with subplots(len(cases), 4, figsize=(10, 2.2 * len(cases) + 0.4)) as (
        figure,
        axes,
    ):
        for row, case in zip(axes, cases, strict=True):
            specs = {spec.arm.split(" at ")[0]: spec for spec in allocated(case, [0])}
            for ax, arm in zip(row, ALLOCATED, strict=False):
                _draw_bits(ax, specs[arm].schedule, CASES[case].bits)
                ax.set_title(f"{case}: {arm}", fontsize=SMALL_FONT_SIZE)
            _draw_gains(row[-1], gains[gains["case"] == case])
        for ax in axes[-1, :3]:
            ax.set_xlabel("training step", fontsize=SMALL_FONT_SIZE)
        figure.suptitle(
            "Bits allocated by sensitivity, at the cost of static precision (dashed)",
            fontsize=10,
        )
    return figure


def _draw_bits(ax: Axes, schedule: Schedule, static: int) -> None:
    """Draw the mean bits over every fortieth of the steps, a line per group of layers."""
    parts = (
        schedule.parts
        if isinstance(schedule, LayeredSchedule)
        else ((("all layers",), schedule, 1),)
    )
    for names, inner, _ in parts:
        edges = np.linspace(0, inner.total_steps, 41).astype(int)
        means = [inner.bits()[a:b].mean() for a, b in itertools.pairwise(edges)]
        ax.plot(
            edges[:-1], means, drawstyle="steps-post", linewidth=1.4, label=names[0]
        )
    ax.axhline(static, color=COLORS["static"], linestyle="--", linewidth=0.8)
    low, high = static - 1.5, max(static + 1.5, schedule.q_max + 0.3)
    ax.set_ylim(
        low, low + (high - low) / (0.97 - 0.11 * len(parts))
    )  # names stand above all lines
    integer_ticks(ax.yaxis)
    ax.tick_params(labelsize=SMALL_FONT_SIZE)
    ax.legend(fontsize=SMALL_FONT_SIZE, loc="upper left")


def _draw_gains(ax: Axes, lines: pd.DataFrame) -> None:
    colors = {WINS: COLORS["small"], LOSES: COLORS["large"]}
    for y, r in zip(range(len(lines))[::-1], lines.itertuples(), strict=True):
        color = colors.get(r.word, COLORS["static"])
        interval_bar(
            ax, y, (r.mean, r.low, r.high), color=color, markersize=4, capsize=3
        )
        ax.plot(r.promised, y, "x", color="#888888", markersize=5)
    ax.axvline(0, color="#888888", linewidth=0.8)
    ax.axvline(lines["full"].iloc[0], color="#888888", linewidth=0.8, linestyle=":")
    ax.set_yticks(range(len(lines))[::-1], lines["arm"], fontsize=SMALL_FONT_SIZE)
    ax.set_ylim(-0.6, len(lines) - 0.4)
    ax.set_title(
        f"gain on static, {lines['unit'].iloc[0]} (x: promised)",
        fontsize=SMALL_FONT_SIZE,
    )
    ax.tick_params(labelsize=SMALL_FONT_SIZE)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the results of H5, once all runs of a case are stored."""
    parts = cases(runs)
    gains = effects(parts)
    if not gains["n"].any():
        return
    notes = (
        f"H5 of docs/preregistration.md: {verdict(gains)}.",
        *(f"{arm.capitalize()} {text}." for arm, text in robustness(parts).items()),
        "Static precision is judged at 8 bits and at its own; the better counts. Runs that diverged or failed count as "
        "chance. Crosses: gains predicted from the measured sensitivities; dotted: the gain of 8 bits throughout.",
    )
    alt = "schedules made from sensitivities, and their gain on static precision of equal cost"
    yield Section(
        "Bits where they matter",
        notes,
        allocation_figure(gains),
        alt,
        summary(gains),
        "left",
    )
    yield Section(
        "Bits where they matter: other effects",
        table=secondary(parts),
        style="left folded",
    )
