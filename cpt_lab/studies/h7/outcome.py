"""Gradients that pay for forward bits, and cycles after that: H7 and H8 of ``docs/preregistration.md``.  No torch."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import bootstrap

from cpt_lab.analysis.estimates import Estimate
from cpt_lab.analysis.metrics import interval_text
from cpt_lab.analysis.preregistered import Answer, against, judge_unbeaten
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.style import COLORS, SMALL, interval_bar, legend_below, subplots
from cpt_lab.studies.h7.arms import (
    BUDGETS,
    CYCLED,
    Q_MAX,
    REDUCED_GRAD_BITS,
    STUDY,
    paying_arm,
)
from cpt_lab.studies.tuned_outcome import (
    EVALUATIONS,
    FULL_BITS,
    Task,
    answer_questions,
    by_evaluation,
    complete,
    level_columns,
    show_table,
)

GAIN = 4  # tasks that must gain
tasks = partial(complete, STUDY)


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H7 and H8, a family of five tests, from rows."""
    return answer_questions(*tasks(runs), QUESTIONS)


def p_of_gains(primary: Sequence[Estimate]) -> float:
    """Return the p-value of "at least ``GAIN`` tasks gain": one-sided, for the number of tasks that may be left out."""
    ordered = sorted(e.p(0.0, "greater") for e in primary)
    return min(1.0, (len(primary) - GAIN + 1) * ordered[GAIN - 1])


def _pays(parts: Sequence[Task], bits: int, rule: str = "") -> Answer:
    static, pair = f"{bits}/{Q_MAX}", paying_arm(bits)
    primary = [t.gain(pair, static, rule) for t in parts]
    p = max(p_of_gains(primary), *(e.p(-e.margin, "greater") for e in primary))
    _, wins, loses = against(primary)
    keep = (
        f"contradicted: gradients should keep their bits ({'; '.join(loses)})"
        if loses
        else ""
    )
    other = [
        t.gain(pair, f"{bits + 1}/{Q_MAX}" if bits < max(BUDGETS) else FULL_BITS)
        for t in parts
    ]
    words = ("confirmed: gradients may pay", keep)
    said = f"the pair gains in {len(wins)} of {len(primary)}"
    return Answer(
        primary=tuple(primary), p=p, words=words, secondary=tuple(other), beside=said
    )


def _cycles(parts: Sequence[Task], bits: int, rule: str = "") -> Answer:
    pair, paid = paying_arm(bits), f"{bits}/{Q_MAX}"
    primary = [t.gain(f"cycle at {pair}", pair, rule) for t in parts]
    other = [
        t.gain(f"cycle at {paid}", paid)
        for t in parts
        if f"cycle at {paid}" in t.settings
    ]
    return judge_unbeaten(
        primary, "no cycle beats static by the margin", "a cycle wins", other
    )


QUESTIONS = {
    **{
        f"H7{x}": (
            f"At the cost of static {b}, are {b + 1} forward bits with {REDUCED_GRAD_BITS}-bit gradients better?",
            partial(_pays, bits=b),
        )
        for x, b in zip("abc", BUDGETS, strict=True)
    },
    **{
        f"H8{x}": (
            f"Does a cycle beat {b + 1} forward bits with {REDUCED_GRAD_BITS}-bit gradients at equal cost?",
            partial(_cycles, bits=b),
        )
        for x, b in zip("ab", CYCLED, strict=True)
    },
}


def gains(parts: Sequence[Task]) -> pd.DataFrame:
    """Return what every pair gains, and that in units of what 8/8 gains on the same static precision; for people.

    The interval of the share is a bootstrap's, over seeds; there is no share where 8/8 itself gains nothing clear.
    """
    found: dict[str, list[str]] = {"task": [t.name for t in parts]}
    for bits in BUDGETS:
        static, pair = f"{bits}/{Q_MAX}", paying_arm(bits)
        cells = found[f"{pair} minus {static} [95 %]"] = []
        for t in parts:
            gain, full = t.gain(pair, static), t.gain(FULL_BITS, static)
            share = f"{FULL_BITS} gains nothing clear"
            if full.interval()[0] > 0:
                with np.errstate(
                    divide="ignore", invalid="ignore"
                ):  # where what 8/8 gains is drawn as 0
                    both = (gain.values, full.values)
                    ends = bootstrap(
                        both, _ratio, paired=True, method="percentile", rng=0
                    ).confidence_interval
                share = f"{interval_text(gain.mean / full.mean, *ends)} of what {FULL_BITS} gains"
            cells.append(f"{gain.shown()}; {share}")
    return pd.DataFrame(found | level_columns(parts))


def gains_by_evaluation(
    parts: Sequence[Task], bits: int = min(BUDGETS)
) -> pd.DataFrame:
    """Return what the pair that costs no more than static ``bits`` gains on it, by the bits of evaluation."""
    pair, static = paying_arm(bits), f"{bits}/{Q_MAX}"
    found = by_evaluation(
        parts, lambda t: (pair, static), f"{pair} minus {static} [95 %]"
    )
    if len(parts) < GAIN:
        return found
    cells = [f"tasks that gain, p of at least {GAIN}"]
    for rule in EVALUATIONS.values():
        primary = [t.gain(pair, static, rule) for t in parts]
        _, wins, _ = against(primary)
        cells.append(f"{len(wins)} of {len(parts)}, p {p_of_gains(primary):.2g}")
    found.loc[len(found)] = cells
    return found


def _ratio(gain: np.ndarray, full: np.ndarray, axis: int) -> np.ndarray:
    return np.mean(gain, axis=axis) / np.mean(full, axis=axis)


def figure(parts: Sequence[Task]) -> Figure:
    """Draw what gradients that pay, a cycle, and both gain on static precision of equal cost, in margins."""
    if not parts:
        raise ValueError("no task of H7 is complete yet; all runs of one are needed")
    with subplots(
        1, len(BUDGETS), figsize=(10, 0.55 * len(parts) + 1.4), sharey=True
    ) as (drawn, axes):
        for ax, bits in zip(axes[0], BUDGETS, strict=True):
            _panel(ax, bits, parts)
        won = [
            len(against([t.gain(paying_arm(b), f"{b}/{Q_MAX}") for t in parts])[1])
            for b in BUDGETS
        ]
        said = f"{', '.join(map(str, won[:-1]))} and {won[-1]} of {len(parts)} tasks"
        drawn.suptitle(
            f"One more forward bit, paid with {REDUCED_GRAD_BITS}-bit gradients, gains in {said}",
            fontsize=11,
        )
        axes[0, 0].set_yticks(
            range(len(parts))[::-1], [t.name for t in parts], fontsize=SMALL
        )
        legend_below(drawn, axes[0, BUDGETS.index(4)])
    return drawn


def _panel(ax: Axes, bits: int, parts: Sequence[Task]) -> None:
    static, pair = f"{bits}/{Q_MAX}", paying_arm(bits)
    shown = {
        pair: ("gradients pay", "o", COLORS["small"]),
        f"cycle at {static}": ("a cycle", "s", COLORS["large"]),
        f"cycle at {pair}": ("gradients pay, and a cycle", "D", COLORS["medium"]),
        FULL_BITS: ("static 8, which costs more", "|", COLORS["static"]),
    }
    ax.axvspan(-1, 1, color="#dddddd", linewidth=0)
    ax.axvline(0, color="#888888", linewidth=0.8)
    for row, (arm, (label, marker, color)) in enumerate(shown.items()):
        there = [
            (y, t.gain(arm, static))
            for y, t in enumerate(reversed(parts))
            if arm in t.settings
        ]
        for y, e in there:
            ends = (x / e.margin for x in (e.mean, *e.interval()))
            look = {"fmt": marker, "color": color, "label": "" if y else label}
            interval_bar(
                ax, y + 0.24 - 0.16 * row, ends, markersize=4, capsize=2, **look
            )
    ax.set_title(f"gain on static {bits} at equal cost", fontsize=SMALL, loc="left")
    ax.set_xlabel("in units of the margin (grey: too little to name)", fontsize=SMALL)
    ax.tick_params(labelsize=SMALL)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what H7 and H8 came to, once all runs of a task are there."""
    note = (
        "H7 and H8 of docs/preregistration.md. Pairs are forward/gradient bits: "
        f"{paying_arm(3)} costs less than 3/{Q_MAX}. "
        "Learning rate and bits of evaluation of every arm were chosen on held-out data. Grey: too little to name."
    )
    alt = "gains of gradients that pay for forward bits, of a cycle, and of both, on static precision of equal cost"
    tables = (
        ("beside all that there is to win", gains),
        ("by the bits of evaluation", gains_by_evaluation),
    )
    return show_table(
        STUDY,
        runs,
        QUESTIONS,
        "Where the next bit operation should go",
        note,
        figure,
        alt,
        *tables,
    )
