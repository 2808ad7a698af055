"""Answers of H7 and H8 in ``docs/preregistration.md``.  No torch.

H7 tests whether fewer gradient bits may pay for a forward bit; H8 whether a cycle then gains more.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import bootstrap

from cpt_lab.analysis.estimates import Estimate
from cpt_lab.analysis.metrics import interval_text
from cpt_lab.analysis.preregistered import Answer, judge_unbeaten, margin_test
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.style import (
    COLORS,
    SMALL_FONT_SIZE,
    interval_bar,
    legend_below,
    subplots,
)
from cpt_lab.studies.h7.arms import (
    BUDGETS,
    CYCLE_BUDGETS,
    EXTENDED_STUDY,
    Q_MAX,
    REDUCED_GRAD_BITS,
    STUDY,
    reduced_gradient_arm,
)
from cpt_lab.studies.tuned import FULL_BITS_ARM
from cpt_lab.studies.tuned_outcome import (
    EVALUATIONS,
    Question,
    Task,
    answer_questions,
    baseline_columns,
    by_evaluation,
    complete,
    show_table,
)

MIN_GAINING_TASKS = 4
tasks = partial(complete, STUDY)


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H7 and H8, a family of five tests, from rows."""
    return answer_questions(*tasks(runs), QUESTIONS)


def extended_answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answers of H7 and H8 at extended learning rates, from rows; a sensitivity analysis."""
    return answer_questions(*complete(EXTENDED_STUDY, runs), QUESTIONS)


def p_of_gains(primary: Sequence[Estimate]) -> float:
    """Return the one-sided p-value of "at least ``MIN_GAINING_TASKS`` tasks gain".

    It is the p-value of the last task that is needed, corrected by Bonferroni for the tasks that are not.
    """
    p_values = sorted(effect.p(0.0, "greater") for effect in primary)
    num_spare_tasks = len(primary) - MIN_GAINING_TASKS
    return min(1.0, (num_spare_tasks + 1) * p_values[MIN_GAINING_TASKS - 1])


def _answer_reduced_gradients(
    parts: Sequence[Task], bits: int, rule: str = ""
) -> Answer:
    """Return whether fewer gradient bits and one more forward bit beat static ``bits``: enough gains, no loss."""
    static, pair = f"{bits}/{Q_MAX}", reduced_gradient_arm(bits)
    primary = [task.gain(pair, static, rule) for task in parts]
    loss_p = [effect.p(-effect.margin, "greater") for effect in primary]
    _, above, below = margin_test(primary)
    contradicted = ""
    if below:
        contradicted = (
            f"contradicted: gradients should keep their bits ({'; '.join(below)})"
        )
    upper = f"{bits + 1}/{Q_MAX}" if bits < max(BUDGETS) else FULL_BITS_ARM
    return Answer(
        primary=tuple(primary),
        p=max(p_of_gains(primary), *loss_p),
        words=("confirmed: gradients may pay", contradicted),
        secondary=tuple(task.gain(pair, upper) for task in parts),
        remark=f"the pair gains in {len(above)} of {len(primary)}",
    )


def _answer_cycles(parts: Sequence[Task], bits: int, rule: str = "") -> Answer:
    """Return whether no cycle beats the reduced-gradient arm of a budget by the margin."""
    pair, static = reduced_gradient_arm(bits), f"{bits}/{Q_MAX}"
    primary = [task.gain(f"cycle at {pair}", pair, rule) for task in parts]
    static_cycle = f"cycle at {static}"
    secondary = [
        task.gain(static_cycle, static)
        for task in parts
        if static_cycle in task.settings
    ]
    return judge_unbeaten(
        primary, "no cycle beats static by the margin", "a cycle wins", secondary
    )


def _questions() -> dict[str, Question]:
    questions: dict[str, Question] = {}
    for letter, bits in zip("abc", BUDGETS, strict=True):
        text = (
            f"At the cost of static {bits}, are {bits + 1} forward bits with "
            f"{REDUCED_GRAD_BITS}-bit gradients better?"
        )
        answer = partial(_answer_reduced_gradients, bits=bits)
        questions[f"H7{letter}"] = (text, answer)
    for letter, bits in zip("ab", CYCLE_BUDGETS, strict=True):
        text = (
            f"Does a cycle beat {bits + 1} forward bits with "
            f"{REDUCED_GRAD_BITS}-bit gradients at equal cost?"
        )
        questions[f"H8{letter}"] = (text, partial(_answer_cycles, bits=bits))
    return questions


QUESTIONS = _questions()


def gains(parts: Sequence[Task]) -> pd.DataFrame:
    """Return a printable table of the gain of every pair, also as a share of the gain of 8/8 on static precision.

    The interval of the share is a bootstrap's, over seeds; there is no share if 8/8 itself has no significant gain.
    """
    columns: dict[str, list[str]] = {"task": [task.name for task in parts]}
    for bits in BUDGETS:
        static, pair = f"{bits}/{Q_MAX}", reduced_gradient_arm(bits)
        cells = []
        for task in parts:
            gain = task.gain(pair, static)
            share = _share_of_full_gain(gain, task.gain(FULL_BITS_ARM, static))
            cells.append(f"{gain.text()}; {share}")
        columns[f"{pair} minus {static} [95 %]"] = cells
    return pd.DataFrame(columns | baseline_columns(parts))


def _share_of_full_gain(gain: Estimate, full: Estimate) -> str:
    """Return a gain as a share of the gain of 8/8, with its interval, in words."""
    low, _ = full.interval()
    if not low > 0:
        return f"{FULL_BITS_ARM} has no significant gain"
    # Some resamples have a gain of 0 at 8/8.
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = bootstrap(
            (gain.values, full.values), _ratio, paired=True, method="percentile", rng=0
        )
    share = interval_text(gain.mean / full.mean, *resampled.confidence_interval)
    return f"{share} of what {FULL_BITS_ARM} gains"


def gains_by_evaluation(
    parts: Sequence[Task], bits: int = min(BUDGETS)
) -> pd.DataFrame:
    """Return the gain of the pair that costs no more than static ``bits``, by the bits of evaluation."""
    pair, static = reduced_gradient_arm(bits), f"{bits}/{Q_MAX}"
    table = by_evaluation(
        parts, lambda t: (pair, static), f"{pair} minus {static} [95 %]"
    )
    if len(parts) < MIN_GAINING_TASKS:
        return table
    cells = [f"tasks that gain, p of at least {MIN_GAINING_TASKS}"]
    for rule in EVALUATIONS.values():
        primary = [t.gain(pair, static, rule) for t in parts]
        _, wins, _ = margin_test(primary)
        cells.append(f"{len(wins)} of {len(parts)}, p {p_of_gains(primary):.2g}")
    table.loc[len(table)] = cells
    return table


def _ratio(gain: np.ndarray, full: np.ndarray, axis: int) -> np.ndarray:
    return np.mean(gain, axis=axis) / np.mean(full, axis=axis)


def figure(parts: Sequence[Task]) -> Figure:
    """Draw the gains of fewer gradient bits, of a cycle, and of both on static precision of equal cost, in margins."""
    if not parts:
        raise ValueError("no task of H7 is complete yet; all runs of one are needed")
    size = (10, 0.55 * len(parts) + 1.4)
    with subplots(1, len(BUDGETS), figsize=size, sharey=True) as (chart, axes):
        num_gains = []
        for ax, bits in zip(axes[0], BUDGETS, strict=True):
            _panel(ax, bits, parts)
            pair, static = reduced_gradient_arm(bits), f"{bits}/{Q_MAX}"
            test = margin_test([task.gain(pair, static) for task in parts])
            num_gains.append(str(len(test.above)))
        counts = (
            f"{', '.join(num_gains[:-1])} and {num_gains[-1]} of {len(parts)} tasks"
        )
        chart.suptitle(
            f"Moving bits from gradients to weights and activations helps in {counts}",
            fontsize=11,
        )
        names = [task.name for task in parts]
        axes[0, 0].set_yticks(range(len(parts))[::-1], names, fontsize=SMALL_FONT_SIZE)
        legend_below(chart, axes[0, BUDGETS.index(4)])
    return chart


def _panel(ax: Axes, bits: int, parts: Sequence[Task]) -> None:
    static, pair = f"{bits}/{Q_MAX}", reduced_gradient_arm(bits)
    gradients = f"{REDUCED_GRAD_BITS}-bit gradients"
    arm_styles = {
        pair: (f"one more forward bit, {gradients}", "o", COLORS["small"]),
        f"cycle at {static}": (
            f"cycle, {Q_MAX}-bit gradients",
            "s",
            COLORS["large"],
        ),
        f"cycle at {pair}": (f"cycle, {gradients}", "D", COLORS["medium"]),
        FULL_BITS_ARM: (f"static {Q_MAX}, which costs more", "|", COLORS["static"]),
    }
    ax.axvspan(-1, 1, color="#dddddd", linewidth=0)
    ax.axvline(0, color="#888888", linewidth=0.8)
    for row, (arm, (label, marker, color)) in enumerate(arm_styles.items()):
        gains_by_row = [
            (y, t.gain(arm, static))
            for y, t in enumerate(reversed(parts))
            if arm in t.settings
        ]
        for y, e in gains_by_row:
            ends = (x / e.margin for x in (e.mean, *e.interval()))
            look = {"fmt": marker, "color": color, "label": "" if y else label}
            interval_bar(
                ax, y + 0.24 - 0.16 * row, ends, markersize=4, capsize=2, **look
            )
    ax.set_title(
        f"gain on static {bits} at equal cost", fontsize=SMALL_FONT_SIZE, loc="left"
    )
    ax.set_xlabel(
        "difference in margins (grey: below the margin)", fontsize=SMALL_FONT_SIZE
    )
    ax.tick_params(labelsize=SMALL_FONT_SIZE)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the results of H7 and H8, once all runs of a task are stored."""
    note = (
        "H7 and H8 of docs/preregistration.md. Pairs are forward/gradient bits: "
        f"{reduced_gradient_arm(3)} costs less than 3/{Q_MAX}. "
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
        extended=extended_answers(runs),
    )
