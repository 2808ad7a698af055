"""The README's figure: what the paper states about its figure 3, beside the committed rows that repeat it.

The paper's own drawing is not copied. Its statements come from ``data/paper/numbers.csv`` and ``claims.csv``.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import paper_numbers
from cpt_lab.analysis.figure_data import best_rows
from cpt_lab.analysis.metrics import metric_named, metric_of, plural
from cpt_lab.analysis.quality_cost import (
    SAVINGS_GROUPS,
    on_common_seeds,
    paired_difference,
)
from cpt_lab.analysis.run_groups import at_q_max, title_of
from cpt_lab.analysis.statistics import ALPHA, interval
from cpt_lab.analysis.style import COLORS, SMALL_FONT_SIZE, TEXT, name_points, subplots

PAPER_GREY = "#777777"
# Claims of data/paper/claims.csv without a number, by group of savings: claim, words, height of the words in points.
STATED = {
    "small": ("imagenet_small", "ImageNet, small\nsavings: above", 0.3),
    "medium": ("imagenet_medium", "ImageNet, medium\nsavings: similar\nor below", -0.1),
}
CIFAR_STATED = (
    "cifar_nearly_all",
    "CIFAR-10, CIFAR-100: nearly all\nschedules above static 8",
)


def differences(runs: pd.DataFrame) -> pd.DataFrame:
    """Return every arm's difference from static q_max in percentage points: paired mean, 95 % interval, n, cost.

    ``sign`` is that of a difference which is significant after Bonferroni's correction over the schedules, else 0.

    Args:
        runs: of one image experiment, with static q_max.
    """
    runs = on_common_seeds(at_q_max(runs, None))
    factor = metric_named(metric_of(runs)).factor
    baseline = f"static {int(runs['q_max'].iloc[0])}"
    level = ALPHA / max(1, len(set(runs["arm"]) & set(SUITE)))
    lines = []
    for arm, part in runs.groupby("arm"):
        first = part.iloc[0]
        gain, low, high, seeds = 0.0, float("nan"), float("nan"), part["seed"].nunique()
        sign = 0
        if arm != baseline:
            values = factor * paired_difference(runs, str(arm), baseline)
            gain, low, high = interval(values)
            _, corrected_low, corrected_high = interval(values, level)
            sign = int(corrected_low > 0) - int(corrected_high < 0)
            seeds = len(values)
        cost = first["relative_cost"]
        lines.append((arm, first["savings"], cost, gain, low, high, sign, seeds))
    columns = ["arm", "savings", "relative_cost", "gain", "low", "high", "sign", "n"]
    return pd.DataFrame(lines, columns=columns).sort_values(
        "relative_cost", ignore_index=True
    )


def finding(arms: pd.DataFrame) -> str:
    """Return a sentence: how many schedules are significantly above and below static q_max.

    >>> lines = pd.DataFrame({"arm": ["CR", "RR", "ER"], "sign": [1, -1, 0], "n": 8})
    >>> finding(lines)
    'Of 3 schedules 1 is more accurate than static 8, 1 is less accurate (corrected for 3 comparisons)'
    """
    schedules = arms[arms["arm"].isin(SUITE)]
    if schedules["n"].min() < 3:
        return f"{plural(int(schedules['n'].min()), 'seed')}: too few to compare schedules with static 8"
    above, below = (
        int((schedules["sign"] > 0).sum()),
        int((schedules["sign"] < 0).sum()),
    )
    counts = [
        f"{count or 'none'} {'are' if count > 1 else 'is'}" for count in (above, below)
    ]
    return (
        f"Of {len(schedules)} schedules {counts[0]} more accurate than static 8, "
        f"{counts[1]} less accurate (corrected for {plural(len(schedules), 'comparison')})"
    )


def paper_beside_ours() -> Figure:
    """Draw the paper's statements about its figure 3 beside our committed rows."""
    runs = best_rows("figure_3")
    arms = differences(runs)
    metric = metric_named(metric_of(runs))
    static = at_q_max(runs, None)
    level = metric.factor * static.loc[static["arm"] == "static 8", metric.name].mean()
    with subplots(1, 2, figsize=(10, 4.4), sharey=True, width_ratios=(1, 1.7)) as (
        figure,
        ((paper, ours),),
    ):
        _draw_paper(paper, arms)
        schedules = _draw_ours(ours, arms)
        paper.set_ylabel("accuracy minus static 8 [percentage points]")
        paper.set_title("Paper states (figure 3, section 4.2)", fontsize=9)
        first = runs.iloc[0]
        ours.set_title(
            f"Here: {title_of(runs).replace('$', chr(92) + '$')}", fontsize=9
        )
        for ax in (paper, ours):
            ax.axhline(0, color=COLORS["static"], linewidth=0.8, zorder=0)
            ax.set_xlabel("cost relative to static 8 bits")
            ax.set_xlim(0.2, 1.05)
        paper.set_ylim(
            top=max(2.0, paper.get_ylim()[1])
        )  # shared; room for the paper's statements
        figure.suptitle(finding(arms), fontsize=11)
        caption = (
            f"{first['total_steps']:,} steps, {plural(int(arms['n'].min()), 'seed')}, static 8 reaches {level:.1f} %. "
            "Bars: 95 % intervals, paired by seed."
        )
        figure.supxlabel(caption, fontsize=SMALL_FONT_SIZE, color=PAPER_GREY)
        name_points(
            ours,
            list(schedules["arm"]),
            schedules["relative_cost"],
            schedules["gain"],
            [TEXT[s] for s in schedules["savings"]],
        )
    return figure


def _draw_paper(ax: Axes, arms: pd.DataFrame) -> None:
    """Draw the printed differences as grey bars at the cost of their group, and write what has no number."""
    numbers = paper_numbers.numbers()
    numbers = numbers[
        (numbers["artefact"] == "figure_3") & (numbers["minus"] == "static")
    ]
    numbers = numbers[numbers["unit"] == "points"]
    cost = arms[arms["arm"].isin(SUITE)].groupby("savings")["relative_cost"].mean()
    for line in numbers.itertuples():
        ax.plot(
            [cost[line.arm]] * 2,
            [line.value, line.to],
            color=PAPER_GREY,
            linewidth=7,
            solid_capstyle="butt",
        )
        dataset = {"imagenet": "ImageNet"}.get(line.dataset, line.dataset)
        words = f"{line.arm} savings,\n{dataset}:\n{line.value:g} to {line.to:g}"
        ax.annotate(
            words,
            (cost[line.arm], line.value),
            (0, -4),
            textcoords="offset points",
            fontsize=SMALL_FONT_SIZE,
            ha="center",
            va="top",
        )
    for group, (_, words, height) in STATED.items():
        ax.text(
            cost[group],
            height,
            words,
            fontsize=SMALL_FONT_SIZE,
            color=PAPER_GREY,
            ha="center",
            va="bottom" if height > 0 else "top",
        )
    ax.text(
        0.03,
        0.97,
        CIFAR_STATED[1],
        fontsize=SMALL_FONT_SIZE,
        color=PAPER_GREY,
        transform=ax.transAxes,
        va="top",
    )


def _draw_ours(ax: Axes, arms: pd.DataFrame) -> pd.DataFrame:
    """Draw schedules by their group of savings, and static precisions; return the schedules."""
    static = arms[arms["savings"] == "static"]
    lowest = arms.loc[arms["arm"].isin(SUITE), "low"].min() - 2
    static = static[
        static["gain"] >= lowest
    ]  # what fails to train would squeeze the others
    ax.plot(
        static["relative_cost"],
        static["gain"],
        "s-",
        color=COLORS["static"],
        linewidth=1,
        label="static bits",
    )
    for line in static.itertuples():
        ax.annotate(
            line.arm.split()[-1],
            (line.relative_cost, line.gain),
            (0, 7),
            textcoords="offset points",
            fontsize=SMALL_FONT_SIZE,
            ha="center",
        )
    schedules = arms[arms["arm"].isin(SUITE)]
    for group in SAVINGS_GROUPS:
        part = schedules[schedules["savings"] == group]
        errors = [part["gain"] - part["low"], part["high"] - part["gain"]]
        ax.errorbar(
            part["relative_cost"],
            part["gain"],
            errors,
            color=COLORS[group],
            fmt="o",
            markersize=5,
            capsize=2,
            linewidth=1,
            label=f"{group} savings",
        )
    ax.legend(fontsize=SMALL_FONT_SIZE, loc="lower right")
    return schedules
