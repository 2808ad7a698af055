"""Critical learning periods: numbers, table, figure.  Paper: section 5, figure 8, table 1.

``deficits`` compares every arm with its control, by seed; ``table_1`` and ``table_1_beside_paper`` add the numbers of
the paper; ``figure_8`` draws an experiment and ``finding`` puts it into a sentence.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_lab.analysis import paper_numbers
from cpt_lab.analysis.captions import caption, with_smoke_warning
from cpt_lab.analysis.metrics import (
    intervals,
    metric_named,
    metric_of,
    plural,
    spread_text,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.run_groups import deficit_groups, with_unique_names
from cpt_lab.analysis.statistics import check_one_run_per_seed, interval, paired
from cpt_lab.analysis.style import (
    COLORS,
    MUTED_COLOR,
    SMALL_FONT_SIZE,
    set_finding,
    subplots,
    write_caption,
)
from cpt_lab.experiments.registry import DATASETS
from cpt_lab.experiments.schema import Metric

MIN_SEEDS = 3  # with fewer seeds no comparison is made

# Length of the normal training in table 1, in the units of its deficits (thousands of steps, or epochs).
NORMAL_TRAINING = {"cifar10": 256, "imagenet": 150}
NETWORKS = {"cifar10": "ResNet-74", "imagenet": "ResNet-18"}  # networks of table 1


def deficits(runs: pd.DataFrame, metric: str | None = None) -> pd.DataFrame:
    """Return one line per arm of a critical-period experiment, each compared with its control, by seed.

    The control of an arm is the training of the same length, with the same learning rates, at q_max throughout.

    Args:
        runs: of one such experiment (``deficit_groups``).
        metric: None uses the main metric of the task.

    Returns:
        Columns: experiment ("length": low steps at the start make training longer; "window": they lie within a fixed
        length), arm, recipe (as in ``runs``), place ("none", "start", "inside", "end"), start, stop, total (steps);
        mean, std, n and how many of them diverged; difference to the control with low and high (95 %, paired), pairs
        (seeds that were compared), worse (seeds below the control); paper_arm, the name in the paper's table 1.

    Paper: section 5, figure 8, table 1.
    """
    metric = metric or metric_of(runs)
    if (runs["kind"] != "deficit").any() or runs["start"].isna().any():
        raise ValueError("rows of deficits with at most one window are needed")

    # A recipe is one length of training with its learning rates: its arms share a control.
    families = dict(list(runs.groupby("recipe", sort=False)))
    has_window = {key: _has_inner_window(family) for key, family in families.items()}
    length_families = [
        family for key, family in families.items() if not has_window[key]
    ]
    normal_length = _normal_length(length_families, list(families.values()))

    rows = []
    for key, family in families.items():
        total = int(family["total_steps"].iloc[0])
        check_one_run_per_seed(family)
        control = family[family["stop"] == 0]
        is_normal = total == normal_length
        is_longer = (
            not has_window[key] and total - _start_deficit(family) == normal_length
        )
        for arm, part in family.groupby("arm", sort=False):
            numbers = _compare_with_control(part, control, metric)
            row = {"arm": arm, "recipe": key, **numbers, "total": total}
            if is_longer:
                experiments = ["length"]
            elif row["place"] == "none" and is_normal:
                # Where windows lie within the normal length, the training without a deficit serves both experiments.
                experiments = ["window", "length"]
            else:
                experiments = ["window"]
            for experiment in experiments:
                paper_arm = _paper_arm(experiment, row["place"], str(arm), is_normal)
                rows.append({"experiment": experiment, **row, "paper_arm": paper_arm})
    order = ["experiment", "total", "start", "stop"]
    table = pd.DataFrame(rows).sort_values(order, kind="stable")
    return table.reset_index(drop=True)


def _has_inner_window(family: pd.DataFrame) -> bool:
    """Return whether a deficit of a family lies neither at the start nor at the end of training."""
    is_inner = (family["start"] > 0) & (family["stop"] < family["total_steps"])
    return bool(is_inner.any())


def _start_deficit(family: pd.DataFrame) -> int:
    """Return the steps of the longest deficit at the start of a family; 0 without one."""
    return int(max(family.loc[family["start"] == 0, "stop"], default=0))


def _normal_length(candidates: list[pd.DataFrame], families: list[pd.DataFrame]) -> int:
    """Return the steps of the normal training, which follows a deficit at the start; 0 without such an experiment.

    It is the most frequent number of steps after the deficit at the start. A family with one window at the start looks
    like that, too: a length at which something was trained without a deficit takes precedence.
    """
    clean_lengths = {
        int(family["total_steps"].iloc[0])
        for family in families
        if (family["stop"] == 0).any()
    }
    counts = Counter(
        int(family["total_steps"].iloc[0]) - _start_deficit(family)
        for family in candidates
    )

    def priority(length: int) -> tuple[bool, int, int]:
        return length in clean_lengths, counts[length], length

    return max(counts, key=priority, default=0)


def _compare_with_control(
    part: pd.DataFrame, control: pd.DataFrame, metric: str
) -> dict[str, Any]:
    """Return place, mean and spread of an arm, and its paired difference to the control."""
    first = part.iloc[0]
    start, stop, total = (int(first[name]) for name in ("start", "stop", "total_steps"))
    values = part[metric]
    difference = paired(part, control, metric) if stop else values.iloc[:0]
    mean, low, high = interval(difference)
    is_worse = metric_named(metric).better * difference < 0
    return {
        "place": _place(start, stop, total),
        "start": start,
        "stop": stop,
        "mean": values.mean(),
        "std": values.std(),
        "n": int(values.count()),
        "diverged": int(part["diverged"].sum()),
        "difference": mean,
        "low": low,
        "high": high,
        "pairs": len(difference),
        "worse": int(is_worse.sum()),
    }


def _place(start: int, stop: int, total: int) -> str:
    """Return where the deficit [start, stop) lies in a training: "none", "start", "inside" or "end"."""
    if not stop:
        return "none"
    if not start:
        return "start"
    return "end" if stop == total else "inside"


def _paper_arm(experiment: str, place: str, arm: str, is_normal: bool) -> str:
    """Return the name of an arm in the paper's table 1; "" for controls and windows at the end, which it lacks."""
    if place == "none":
        return "no deficit" if experiment == "length" and is_normal else ""
    if (place == "start") == (experiment == "length") and place != "end":
        return arm.split(" of ")[0]
    return ""


def table_1(runs: pd.DataFrame) -> pd.DataFrame:
    """Return ``deficits`` in percent, with the number of the paper's table 1 in a column ``paper``.

    ``paper`` is NaN where the paper has no such number, which is everywhere but at paper scale.

    Paper: table 1.
    """
    arms = deficits(runs)
    printed = paper_numbers.experiment_numbers(runs, "table_1")
    paper_values = printed.set_index("arm")["value"]
    factor = metric_named(metric_of(runs)).factor
    arms[["mean", "std", "difference", "low", "high"]] *= factor
    arms["paper"] = [
        float(paper_values.get(arm, float("nan"))) for arm in arms.paper_arm
    ]
    return arms


def has_controls(arms: pd.DataFrame) -> bool:
    """Return whether every arm of ``deficits`` with a deficit has a control of the same length."""
    clean_arms = arms[arms["place"] == "none"]
    deficit_arms = arms[arms["place"] != "none"]
    return set(deficit_arms["recipe"]) <= set(clean_arms["recipe"])


def minus_no_deficit(runs: pd.DataFrame) -> pd.DataFrame:
    """Return ``deficits`` with each arm compared with "no deficit" of the normal length instead of its control.

    The normal length is that of the shortest training without a deficit; for windows, of the shortest within which
    there are windows. A deficit at the start makes training longer than that.

    Paper: table 1, which has no other control.
    """
    metric = metric_of(runs)
    better = metric_named(metric).better
    arms = deficits(runs)
    columns = ["difference", "low", "high", "pairs", "worse"]
    for arm in arms.itertuples():
        normal = _no_deficit(arms, arm.experiment)
        if arm.place == "none" or normal is None:
            arms.loc[arm.Index, columns] = [np.nan, np.nan, np.nan, 0, 0]
            continue
        difference = paired(_arm(runs, arm), _arm(runs, normal), metric)
        arms.loc[arm.Index, columns] = [
            *interval(difference),
            len(difference),
            int((better * difference < 0).sum()),
        ]
    return arms


def _no_deficit(arms: pd.DataFrame, experiment: str) -> Any:
    """Return the line of the shortest training without a deficit, preferably of an experiment; None without any."""
    clean_arms = arms[arms["place"] == "none"]
    same_experiment = clean_arms[clean_arms["experiment"] == experiment]
    choice = (same_experiment if len(same_experiment) else clean_arms).sort_values(
        "total", kind="stable"
    )
    return next(choice.itertuples(), None)


def _arm(runs: pd.DataFrame, line: Any) -> pd.DataFrame:
    return runs[(runs["arm"] == line.arm) & (runs["recipe"] == line.recipe)]


def compare_deficits(runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return ``deficits`` and the name of their baseline: the controls, or "no deficit" if some arms lack one."""
    arms = deficits(runs)
    if has_controls(arms):
        return arms, "control of equal length"
    return minus_no_deficit(runs), "no deficit"


def table_1_beside_paper(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of the paper's table 1, each with the nearest arm of an experiment.

    At paper scale the nearest arm is the same one. On stand-ins it is the arm whose deficit at the start is nearest in
    length, or whose window is nearest in start, as a share of the normal training; the cell names both shares.
    Differences are to "no deficit" of the normal length, by seed.

    Args:
        runs: of one experiment, see ``deficits``. ImageNet is compared with the paper's ImageNet, any other data set
            with its CIFAR-10.

    Paper: table 1.
    """
    dataset = "imagenet" if runs["dataset"].iloc[0] == "imagenet" else "cifar10"
    numbers = paper_numbers.numbers()
    numbers = numbers[
        (numbers["artefact"] == "table_1") & (numbers["dataset"] == dataset)
    ]
    arms, metric = (
        minus_no_deficit(runs),
        replace(metric_named(metric_of(runs)), digits=2),
    )
    has_paper_arms = len(paper_numbers.experiment_numbers(runs, "table_1")) > 0
    lines = []
    for p in numbers.itertuples():
        if has_paper_arms:
            nearest = arms[arms["paper_arm"] == p.arm]
            label = "" if nearest.empty else nearest["arm"].iloc[0]
        else:
            nearest, label = nearest_arm(arms, p.arm, dataset)
        lines.append(
            (
                p.arm,
                f"{p.value:.2f} +- {p.std:.2f}",
                *_nearest_cells(nearest, label, metric),
            )
        )
    name = f"{DATASETS[dataset].title} {NETWORKS[dataset]}"
    unit = f", {metric.unit}" if metric.unit else f", {metric.name}"
    columns = [
        "low precision (paper)",
        f"paper, {name}, %",
        "low precision (this run)",
        f"this run (mean +- std, n){unit}",
        "minus no deficit [95 %]",
    ]
    return pd.DataFrame(lines, columns=columns)


def _nearest_cells(
    nearest: pd.DataFrame, label: str, metric: Metric
) -> tuple[str, str, str]:
    if nearest.empty:
        return "not run", "–", "–"
    first = nearest.iloc[0]
    (difference,) = intervals(metric, nearest.head(1))
    return (
        label,
        spread_text(metric, first["mean"], first["std"], first["n"]),
        difference or "–",
    )


def nearest_arm(
    arms: pd.DataFrame, paper_arm: str, dataset: str
) -> tuple[pd.DataFrame, str]:
    """Return the line of ``deficits`` nearest to an arm of table 1, and its name with both shares.

    Args:
        arms: ``deficits`` of one experiment.
        paper_arm: such as "no deficit", "[0, 16K)" or "[32K, 160K)".
        dataset: the data set of table 1, "cifar10" or "imagenet".

    Returns:
        The line, as a table that is empty if no such deficit was trained; and its text, such as "[0, 195) of 4095: 5 %
        of the normal training (paper: 6 %)", "" without a line.
    """
    normal = _no_deficit(arms, "length")
    span = re.fullmatch(r"\[(\d+)K?, (\d+)K?\)", paper_arm)
    if normal is None:
        return arms.iloc[:0], ""
    if span is None:
        return arms.loc[[normal.Index]], normal.arm
    if span[1] == "0":
        part = arms[(arms["experiment"] == "length") & (arms["place"] == "start")]
        column, paper_step, words, total = "stop", int(span[2]), "", normal.total
    else:
        part = arms[(arms["experiment"] == "window") & (arms["place"] == "inside")]
        column, paper_step, words, total = (
            "start",
            int(span[1]),
            "begins after ",
            part["total"].min(),
        )
    if part.empty:
        return part, ""
    paper_share = paper_step / NORMAL_TRAINING[dataset]
    share = part[column] / total
    nearest = (share - paper_share).abs().idxmin()
    text = f"{words}{100 * share[nearest]:.0f} % of the normal training (paper: {100 * paper_share:.0f} %)"
    return part.loc[[nearest]], f"{part.loc[nearest, 'arm']}: {text}"


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a printable form of ``table_1``; runs as for ``deficits``."""
    name, arms = metric_of(runs), table_1(runs)
    differences, control = compare_deficits(runs)
    metric = replace(metric_named(name), factor=1.0)  # table 1 is in printed units
    worse = []
    for arm in differences.itertuples():
        worse.append("" if arm.place == "none" else f"{arm.worse} of {arm.pairs}")
    cells = {
        "low precision": arms.arm,
        "experiment": arms.experiment,
        f"{name} {metric.unit}".rstrip(): metric.text(arms["mean"]),
        "std": metric.text(arms["std"]),
        "n": arms.n,
        f"minus {control} [95 %]": intervals(metric_named(name), differences),
        "worse": worse,
        "diverged": arms.diverged,
        "paper": ["–" if np.isnan(value) else f"{value:g}" for value in arms.paper],
    }
    return pd.DataFrame(cells)


def finding(runs: pd.DataFrame) -> str:
    """Return the finding of a critical-period experiment in a sentence.

    It compares the longest deficit at the start with its control, or with "no deficit" if arms have no controls; and
    the earliest window with the latest one that leaves time after it. An effect is significant when its 95 % interval
    over seeds excludes 0. With fewer than ``MIN_SEEDS`` common seeds no comparison is made.
    """
    arms, control = compare_deficits(runs)
    parts = list(
        filter(None, (_start_finding(runs, arms, control), _window_finding(runs, arms)))
    )
    if not parts:
        return "Nothing was trained with a deficit and without one"
    text = "; ".join(dict.fromkeys(parts))
    return f"{text[0].upper()}{text[1:]}"


def _start_finding(runs: pd.DataFrame, arms: pd.DataFrame, control: str) -> str:
    is_start = (arms["experiment"] == "length") & (arms["place"] == "start")
    if not is_start.any():
        return ""
    longest = arms[is_start].sort_values("stop").iloc[-1]
    if longest["pairs"] < MIN_SEEDS:
        return f"{plural(int(longest['pairs']), 'seed')}: no comparison"

    metric = metric_named(metric_of(runs))
    better_low, better_high = sorted(
        (metric.better * longest["low"], metric.better * longest["high"])
    )
    deficit = f"{longest['stop']:,} steps of low precision first"
    if control == "control of equal length":
        control = "training of equal length"
    unit = "points" if metric.factor == 100 else metric.name
    size = f"{abs(metric.factor * longest['difference']):.1f} {unit}"
    if better_high < 0:
        return f"{deficit} cost {size} against {control}"
    if better_low > 0:
        return f"{deficit} gain {size} against {control}"
    return f"no clear damage by {deficit}"


def _window_finding(runs: pd.DataFrame, arms: pd.DataFrame) -> str:
    windows = arms[
        (arms["experiment"] == "window") & arms["place"].isin(["start", "inside"])
    ]
    dates = windows.sort_values("start", kind="stable")
    if dates["start"].nunique() < 2:
        return ""
    metric = metric_of(runs)
    first, last = (_arm(runs, line) for line in (_line(dates, 0), _line(dates, -1)))
    values = metric_named(metric).better * paired(first, last, metric)
    if len(values) < MIN_SEEDS:
        return f"{plural(len(values), 'seed')}: no comparison"
    _, low, high = interval(values)
    if high < 0:
        return "an early window harms more than a late one"
    if low > 0:
        return "a late window harms more than an early one"
    return "no clear difference between early and late windows"


def _line(arms: pd.DataFrame, position: int) -> Any:
    return list(arms.itertuples())[position]


def figure_8(runs: pd.DataFrame, heading: str = "") -> Figure:
    """Draw a critical-period experiment: a dot per seed, lines through the means, controls of the same length.

    Left: deficits of R steps at the start, which make training R steps longer. Right: windows of low precision within
    a training of fixed length. The learning curve of training without a deficit is drawn in grey over both, its steps
    and its quality on the same axes; it is cut where it is worse than all runs. If arms have no controls, training of
    the normal length without a deficit is a line across both panels.

    Args:
        runs: of one experiment, see ``deficits``.
        heading: title instead of ``finding``.

    Paper: figure 8.
    Differs: single seeds, both controls (the same length at q_max, the same low steps at the end) are ours.
    """
    name = metric_of(runs)
    metric, arms = metric_named(name), deficits(runs)
    controlled = has_controls(arms)
    arms["mean"] *= metric.factor
    values = runs.assign(value=metric.factor * runs[name]).groupby(["arm", "recipe"])[
        "value"
    ]
    dots = {key: part.dropna().to_numpy() for key, part in values}
    panels = [kind for kind in ("length", "window") if (arms.experiment == kind).any()]
    with subplots(
        1, len(panels), figsize=(max(5 * len(panels), 6.4), 4.2), sharey=True
    ) as (figure, axes):
        for ax, kind in zip(axes[0], panels, strict=True):
            part = arms[arms.experiment == kind]
            seeds = [dots[r.arm, r.recipe] for r in part.itertuples()]
            _length(ax, part, seeds, controlled) if kind == "length" else _window(
                ax, part, seeds
            )
            label = (
                "control: q_max, same length"
                if controlled
                else "no deficit, normal length"
            )
            ax.plot([], [], color=COLORS["static"], label=label)
        limits = axes[0][0].get_ylim()  # shared, and those of the runs
        for ax, kind in zip(axes[0], panels, strict=True):
            _learning_curve(
                ax, runs, min(arms[arms.experiment == kind].total), name, metric
            )
            ax.set_ylim(limits)
            # Above the axes the legend covers no point.
            ax.legend(
                fontsize=SMALL_FONT_SIZE,
                loc="lower left",
                bbox_to_anchor=(0, 1),
                ncols=2,
            )
        if metric.better < 0:
            axes[0][0].invert_yaxis()
        axes[0][0].set_ylabel(metric.label)
        set_finding(figure, heading or with_smoke_warning(finding(runs), runs))
        first = runs.iloc[0]
        bits = f"{first['q_min']} bits in a deficit, else {first['q_max']}; a dot is a run, lines join means"
        write_caption(figure, f"{caption(runs)}; {bits}")
    return figure


def _length(
    ax: Axes, part: pd.DataFrame, dots: list[np.ndarray], controlled: bool
) -> None:
    """Draw deficits that make training longer over their length R, and the controls at the same R.

    Args:
        ax: axes.
        part: lines of ``deficits``.
        dots: values of the seeds, one array per line.
        controlled: whether all arms have controls; otherwise the normal training is drawn as a line.
    """
    # R of a control, which has no deficit, is what it is longer than the shortest training
    x = part.stop.where(part.place == "start", part.total - min(part.total))
    for place, label, color, style in (
        ("start", "low precision first", COLORS["large"], "o-"),
        ("end", "low precision last", COLORS["medium"], "^--"),
        ("none", None, COLORS["static"], "s-"),
    ):
        is_place, clean = part.place == place, place == "none"
        for r, seeds in zip(
            x[is_place],
            [d for d, h in zip(dots, is_place, strict=True) if h],
            strict=True,
        ):
            alpha, size = (0.25, 3) if clean else (0.35, 4)
            ax.plot(
                np.full(len(seeds), r),
                seeds,
                style[0],
                color=color,
                alpha=alpha,
                markersize=size,
            )
        if is_place.any():
            size, width = (3, 1.2) if clean else (0, None)
            ax.plot(
                x[is_place],
                part["mean"][is_place],
                style,
                color=color,
                label=label,
                markersize=size,
                linewidth=width,
            )
        if clean and not controlled and is_place.any():
            ax.axhline(
                part["mean"][is_place].iloc[0],
                color=color,
                linewidth=0.8,
                linestyle=":",
            )
    ax.set_xlabel("R: steps at low precision")


def _window(ax: Axes, part: pd.DataFrame, dots: list[np.ndarray]) -> None:
    """Draw windows over their first step, and the control as a band over all of them."""
    low = part[part.place != "none"]
    for r, seeds in zip(part.itertuples(), dots, strict=True):
        if r.place != "none":
            ax.plot(
                np.full(len(seeds), r.start),
                seeds,
                "o",
                color=COLORS["large"],
                alpha=0.35,
                markersize=4,
            )
        elif len(seeds):
            starts = sorted(set(low.start))
            ax.axhspan(
                min(seeds), max(seeds), color=COLORS["static"], alpha=0.08, linewidth=0
            )
            ax.plot(
                starts, [r.mean] * len(starts), color=COLORS["static"], linewidth=1.2
            )
    ax.plot(
        low.start,
        low["mean"],
        "o-",
        color=COLORS["large"],
        label="window of low precision",
        markersize=0,
    )
    at_end = (
        " (the last one has no time left after it)"
        if (low.place == "end").any()
        else ""
    )
    ax.set_xlabel(f"first step of the window{at_end}")


def _learning_curve(
    ax: Axes, runs: pd.DataFrame, total: int, name: str, metric: Metric
) -> None:
    """Draw the mean learning curve of the shortest training without a deficit."""
    is_clean = (runs["stop"] == 0) & (runs["total_steps"] == total)
    clean = runs[(runs["status"] == "ok") & is_clean]
    curves = []
    for evaluations in clean["evaluations"]:
        curves.append({e["step"]: e["test"][name] for e in evaluations})
    common_steps = set.intersection(*map(set, curves)) if curves else set()
    steps = sorted(common_steps)
    if len(steps) < 2:
        return

    means = []
    for step in steps:
        values = [curve[step] for curve in curves]
        means.append(metric.factor * np.mean(values))
    ax.plot(
        steps,
        means,
        color=MUTED_COLOR,
        linewidth=1,
        zorder=0,
        label="learning curve without a deficit",
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield figure 8 and table 1 of every critical-period experiment with a run that did not fail."""
    for name, group in with_unique_names(deficit_groups(runs)):
        if (group["status"] != "failed").any():
            title = f"Critical learning periods: {name}"
            alt = "quality after a deficit, with controls"
            yield Section(title, (), figure_8(group), alt, summary(group))
