"""Critical learning periods: numbers, table, figure.  Paper: section 5, figure 8, table 1."""

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
from cpt_lab.analysis.captions import caption, warned
from cpt_lab.analysis.metrics import (
    intervals,
    metric_named,
    metric_of,
    plural,
    spread_text,
)
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.run_groups import deficit_groups, with_unique_names
from cpt_lab.analysis.statistics import interval, paired
from cpt_lab.analysis.style import (
    COLORS,
    QUIET,
    SMALL,
    set_finding,
    subplots,
    write_caption,
)
from cpt_lab.experiments.registry import DATASETS
from cpt_lab.experiments.schema import Metric

MIN_SEEDS = 3  # fewer compare nothing

# Steps, epochs or thousands of steps of the normal training in table 1, which deficits are a share of.
NORMAL_TRAINING = {"cifar10": 256, "imagenet": 150}
NETWORKS = {"cifar10": "ResNet-74", "imagenet": "ResNet-18"}  # of table 1


def deficits(runs: pd.DataFrame, metric: str | None = None) -> pd.DataFrame:
    """Return one line per arm of a critical-period experiment, each compared with its control, by seed.

    The control of an arm is the training of the same length, with the same learning rates, at q_max throughout.

    Args:
        runs: of one such experiment (``deficit_groups``).
        metric: None takes the main one of the task.

    Returns:
        Columns: experiment ("length": low steps at the start make training longer; "window": they lie within a fixed
        length), arm, recipe (as in ``runs``), place ("none", "start", "inside", "end"), start, stop, total (steps);
        mean, std, n and how many of them diverged; difference to the control with low and high (95 %, paired), worse
        (seeds below the control); paper_arm, the name in the paper's table 1.

    Paper: section 5, figure 8, table 1.
    """
    metric = metric or metric_of(runs)
    if (runs["kind"] != "deficit").any() or runs["start"].isna().any():
        raise ValueError("rows of deficits with at most one window are needed")
    # A recipe is one length of training with its learning rates: its arms share a control.
    families = dict(list(runs.groupby("recipe", sort=False)))
    is_window = {
        key: bool(((f["start"] > 0) & (f["stop"] < f["total_steps"])).any())
        for key, f in families.items()
    }
    after = _normal_length(
        [f for key, f in families.items() if not is_window[key]],
        list(families.values()),
    )
    lines = []
    for key, family in families.items():
        total = int(family["total_steps"].iloc[0])
        control = family[family["stop"] == 0]
        at_start = int(max(family.loc[family["start"] == 0, "stop"], default=0))
        length = not is_window[key] and total - at_start == after
        for arm, part in family.groupby("arm", sort=False):
            line = {
                "arm": arm,
                "recipe": key,
                **_against(part, control, metric),
                "total": total,
            }
            # Where windows lie within the normal length, the training without a deficit serves both experiments.
            both = line["place"] == "none" and total == after and not length
            for experiment in (
                ["length"] if length else ["window", "length"] if both else ["window"]
            ):
                paper_arm = _paper_arm(
                    experiment, line["place"], str(arm), total == after
                )
                lines.append({"experiment": experiment, **line, "paper_arm": paper_arm})
    out = pd.DataFrame(lines)
    return out.sort_values(
        ["experiment", "total", "start", "stop"], kind="stable"
    ).reset_index(drop=True)


def _normal_length(candidates: list[pd.DataFrame], families: list[pd.DataFrame]) -> int:
    """Steps of the normal training, which a deficit at the start comes before; 0 when there is no such experiment.

    It is what is left of most families after their deficit at the start. A family of windows can look the same, when
    its one window lies at the start: a length at which something was trained without a deficit goes first.
    """
    unharmed = {
        int(f["total_steps"].iloc[0]) for f in families if (f["stop"] == 0).any()
    }
    left = Counter(
        int(f["total_steps"].iloc[0] - max(f.loc[f["start"] == 0, "stop"], default=0))
        for f in candidates
    )
    return max(left, key=lambda n: (n in unharmed, left[n], n), default=0)


def _against(part: pd.DataFrame, control: pd.DataFrame, metric: str) -> dict[str, Any]:
    start, stop, total = (
        int(part[name].iloc[0]) for name in ("start", "stop", "total_steps")
    )
    values = part.groupby("seed")[metric].first()
    difference = paired(part, control, metric) if stop else values.iloc[:0]
    mean, low, high = interval(difference)
    return {
        "place": "none"
        if not stop
        else "start"
        if not start
        else "end"
        if stop == total
        else "inside",
        "start": start,
        "stop": stop,
        "mean": values.mean(),
        "std": values.std(),
        "n": int(values.count()),
        "diverged": int(part["diverged"].sum()),
        "difference": mean,
        "low": low,
        "high": high,
        "worse": int((metric_named(metric).better * difference < 0).sum()),
    }


def _paper_arm(experiment: str, place: str, arm: str, shortest: bool) -> str:
    """The name of an arm in the paper's table 1; controls and ends are ours."""
    if place == "none":
        return "no deficit" if experiment == "length" and shortest else ""
    if (place == "start") == (experiment == "length") and place != "end":
        return arm.split(" of ")[0]
    return ""


def table_1(runs: pd.DataFrame) -> pd.DataFrame:
    """Put a critical-period experiment beside table 1 of the paper: the columns of ``deficits``, in percent, and paper.

    ``paper`` is NaN where the paper has no such number, which is everywhere but at paper scale.

    Paper: table 1.
    """
    found, known = (
        deficits(runs),
        paper_numbers.of_experiment(runs, "table_1").set_index("arm")["value"],
    )
    found[["mean", "std", "difference", "low", "high"]] *= metric_named(
        metric_of(runs)
    ).factor
    found["paper"] = [float(known.get(arm, float("nan"))) for arm in found.paper_arm]
    return found


def has_controls(found: pd.DataFrame) -> bool:
    """Return whether every arm of ``deficits`` with a deficit has a training of the same length without one."""
    free = found[found["place"] == "none"]
    low = found[found["place"] != "none"]
    return set(low["recipe"]) <= set(free["recipe"])


def minus_no_deficit(runs: pd.DataFrame) -> pd.DataFrame:
    """Return ``deficits`` with each arm compared with "no deficit" of the normal length instead of its control.

    The normal length is that of the shortest training without a deficit; for windows, of the shortest within which
    there are windows. A deficit at the start makes training longer than that.

    Paper: table 1, which has no other control.
    """
    metric = metric_of(runs)
    better = metric_named(metric).better
    found = deficits(runs)
    columns = ["difference", "low", "high", "worse"]
    for line in found.itertuples():
        normal = _no_deficit(found, line.experiment)
        if line.place == "none" or normal is None:
            found.loc[line.Index, columns] = [np.nan, np.nan, np.nan, 0]
            continue
        difference = paired(_arm(runs, line), _arm(runs, normal), metric)
        found.loc[line.Index, columns] = [
            *interval(difference),
            int((better * difference < 0).sum()),
        ]
    return found


def _no_deficit(found: pd.DataFrame, experiment: str) -> Any:
    """Return the line of the shortest training without a deficit, of an experiment if it has one; None without any."""
    free = found[found["place"] == "none"]
    same = free[free["experiment"] == experiment]
    choice = (same if len(same) else free).sort_values("total", kind="stable")
    return next(choice.itertuples(), None)


def _arm(runs: pd.DataFrame, line: Any) -> pd.DataFrame:
    return runs[(runs["arm"] == line.arm) & (runs["recipe"] == line.recipe)]


def compare_deficits(runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return ``deficits`` and what its differences are to: the controls, or "no deficit" where some have no control."""
    found = deficits(runs)
    if has_controls(found):
        return found, "control of equal length"
    return minus_no_deficit(runs), "no deficit"


def table_1_beside_paper(runs: pd.DataFrame) -> pd.DataFrame:
    """Return table 1 of the paper with the nearest arm of an experiment beside each of its numbers.

    At paper scale that is the same arm. On stand-ins it is the arm whose deficit at the start is nearest in length, or
    whose window is nearest in start, as a share of the normal training; the cell says both shares. Differences are to
    "no deficit" of the normal length, by seed.

    Args:
        runs: of one experiment, see ``deficits``. ImageNet stands beside the paper's ImageNet, all others beside its
            CIFAR-10.

    Paper: table 1.
    """
    dataset = "imagenet" if runs["dataset"].iloc[0] == "imagenet" else "cifar10"
    numbers = paper_numbers.numbers()
    numbers = numbers[
        (numbers["artefact"] == "table_1") & (numbers["dataset"] == dataset)
    ]
    found, metric = (
        minus_no_deficit(runs),
        replace(metric_named(metric_of(runs)), digits=2),
    )
    same = len(paper_numbers.of_experiment(runs, "table_1")) > 0
    lines = []
    for p in numbers.itertuples():
        if same:
            nearest = found[found["paper_arm"] == p.arm]
            label = "" if nearest.empty else nearest["arm"].iloc[0]
        else:
            nearest, label = nearest_arm(found, p.arm, dataset)
        lines.append(
            (p.arm, f"{p.value:.2f} +- {p.std:.2f}", *_beside(nearest, label, metric))
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


def _beside(nearest: pd.DataFrame, label: str, metric: Metric) -> tuple[str, str, str]:
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
    found: pd.DataFrame, paper_arm: str, dataset: str
) -> tuple[pd.DataFrame, str]:
    """Return the line of ``deficits`` nearest to an arm of table 1, and its name with both shares.

    Args:
        found: of one experiment.
        paper_arm: such as "no deficit", "[0, 16K)" or "[32K, 160K)".
        dataset: of table 1, "cifar10" or "imagenet".

    Returns:
        One line, none where no such deficit was trained; and, such as "[0, 195) of 4095: 5 % of the normal training
        (paper: 6 %)", "" of none.
    """
    normal = _no_deficit(found, "length")
    span = re.fullmatch(r"\[(\d+)K?, (\d+)K?\)", paper_arm)
    if normal is None:
        return found.iloc[:0], ""
    if span is None:
        return found.loc[[normal.Index]], normal.arm
    if span[1] == "0":
        part = found[(found["experiment"] == "length") & (found["place"] == "start")]
        column, wanted, words, total = "stop", int(span[2]), "", normal.total
    else:
        part = found[(found["experiment"] == "window") & (found["place"] == "inside")]
        column, wanted, words, total = (
            "start",
            int(span[1]),
            "begins after ",
            part["total"].min(),
        )
    if part.empty:
        return part, ""
    paper_share = wanted / NORMAL_TRAINING[dataset]
    share = part[column] / total
    nearest = (share - paper_share).abs().idxmin()
    text = f"{words}{100 * share[nearest]:.0f} % of the normal training (paper: {100 * paper_share:.0f} %)"
    return part.loc[[nearest]], f"{part.loc[nearest, 'arm']}: {text}"


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return ``table_1`` for people; runs as for ``deficits``."""
    name, found = metric_of(runs), table_1(runs)
    differences, control = compare_deficits(runs)
    metric = replace(metric_named(name), factor=1.0)  # table 1 is in printed units
    cells = {
        "low precision": found.arm,
        "experiment": found.experiment,
        f"{name} {metric.unit}".rstrip(): metric.text(found["mean"]),
        "std": metric.text(found["std"]),
        "n": found.n,
        f"minus {control} [95 %]": intervals(metric_named(name), differences),
        "worse": [
            f"{r.worse} of {r.n}" if r.place != "none" else ""
            for r in differences.itertuples()
        ],
        "diverged": found.diverged,
        "paper": [f"{p:g}" if p == p else "–" for p in found.paper],
    }
    return pd.DataFrame(cells)


def finding(runs: pd.DataFrame) -> str:
    """Return the finding of a critical-period experiment in a sentence.

    It is about the longest deficit at the start, against its control, or against "no deficit" where arms have no
    controls; and about the earliest window against the latest one that leaves time after it. Effects are clear where
    their 95 % interval over seeds excludes 0. Fewer than ``MIN_SEEDS`` seeds compare nothing.
    """
    found, control = compare_deficits(runs)
    parts = list(
        filter(
            None, (_start_finding(runs, found, control), _window_finding(runs, found))
        )
    )
    if not parts:
        return "Nothing was trained with a deficit and without one"
    text = "; ".join(dict.fromkeys(parts))
    return f"{text[0].upper()}{text[1:]}"


def _start_finding(runs: pd.DataFrame, found: pd.DataFrame, control: str) -> str:
    low = found[(found["experiment"] == "length") & (found["place"] == "start")]
    if low.empty:
        return ""
    longest = low.sort_values("stop").iloc[-1]
    if longest["n"] < MIN_SEEDS:
        return f"{plural(int(longest['n']), 'seed')}: no comparison"
    metric = metric_named(metric_of(runs))
    better_low, better_high = sorted(
        (metric.better * longest["low"], metric.better * longest["high"])
    )
    where = f"{longest['stop']:,} steps of low precision first"
    against = (
        "training of equal length" if control == "control of equal length" else control
    )
    size = f"{abs(metric.factor * longest['difference']):.1f} {'points' if metric.factor == 100 else metric.name}"
    if better_high < 0:
        return f"{where} cost {size} against {against}"
    if better_low > 0:
        return f"{where} gain {size} against {against}"
    return f"no clear damage by {where}"


def _window_finding(runs: pd.DataFrame, found: pd.DataFrame) -> str:
    windows = found[
        (found["experiment"] == "window") & found["place"].isin(["start", "inside"])
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


def _line(found: pd.DataFrame, position: int) -> Any:
    return list(found.itertuples())[position]


def figure_8(runs: pd.DataFrame, heading: str = "") -> Figure:
    """Draw a critical-period experiment: a dot per seed, lines through the means, controls of the same length.

    Left: deficits of R steps at the start, which make training R steps longer. Right: windows of low precision within
    a training of fixed length. The learning curve of training without a deficit is drawn in grey over both, its steps
    and its quality on the same axes; where it is worse than all runs it is cut. Where arms have no controls, training
    of the normal length without a deficit is a line across both panels.

    Args:
        runs: of one experiment, see ``deficits``.
        heading: instead of ``finding``.

    Paper: figure 8.
    Differs: single seeds, both controls (the same length at q_max, the same low steps at the end) are ours.
    """
    name = metric_of(runs)
    drawn, found = metric_named(name), deficits(runs)
    controlled = has_controls(found)
    found["mean"] *= drawn.factor
    values = runs.assign(value=drawn.factor * runs[name]).groupby(["arm", "recipe"])[
        "value"
    ]
    dots = {key: part.dropna().to_numpy() for key, part in values}
    panels = [kind for kind in ("length", "window") if (found.experiment == kind).any()]
    with subplots(
        1, len(panels), figsize=(max(5 * len(panels), 6.4), 4.2), sharey=True
    ) as (figure, axes):
        for ax, kind in zip(axes[0], panels, strict=True):
            part = found[found.experiment == kind]
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
                ax, runs, min(found[found.experiment == kind].total), name, drawn
            )
            ax.set_ylim(limits)
            ax.legend(
                fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), ncols=2
            )  # above the axes: over no point
        if drawn.better < 0:
            axes[0][0].invert_yaxis()
        axes[0][0].set_ylabel(drawn.label)
        set_finding(figure, heading or warned(finding(runs), runs))
        first = runs.iloc[0]
        bits = f"{first['q_min']} bits in a deficit, else {first['q_max']}; a dot is a run, lines join means"
        write_caption(figure, f"{caption(runs)}; {bits}")
    return figure


def _length(
    ax: Axes, part: pd.DataFrame, dots: list[np.ndarray], controlled: bool
) -> None:
    """Draw deficits that make training longer over their length R, the controls at the same R; dots per line."""
    # R of a control, which has no deficit, is what it is longer than the shortest training
    x = part.stop.where(part.place == "start", part.total - min(part.total))
    for place, label, color, style in (
        ("start", "low precision first", COLORS["large"], "o-"),
        ("end", "low precision last", COLORS["medium"], "^--"),
        ("none", None, COLORS["static"], "s-"),
    ):
        here, clean = part.place == place, place == "none"
        for r, seeds in zip(
            x[here], [d for d, h in zip(dots, here, strict=True) if h], strict=True
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
        if here.any():
            size, width = (3, 1.2) if clean else (0, None)
            ax.plot(
                x[here],
                part["mean"][here],
                style,
                color=color,
                label=label,
                markersize=size,
                linewidth=width,
            )
        if clean and not controlled and here.any():
            ax.axhline(
                part["mean"][here].iloc[0], color=color, linewidth=0.8, linestyle=":"
            )
    ax.set_xlabel("R: steps at low precision")


def _window(ax: Axes, part: pd.DataFrame, dots: list[np.ndarray]) -> None:
    """Draw windows over their first step; the control, which has none, is a band over all of them."""
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
    clean = runs[
        (runs["status"] == "ok") & (runs["stop"] == 0) & (runs["total_steps"] == total)
    ]
    curves = [
        {e["step"]: e["test"][name] for e in evaluations}
        for evaluations in clean["evaluations"]
    ]
    steps = (
        sorted(set.intersection(*map(set, curves))) if curves else []
    )  # those that all seeds have
    if len(steps) < 2:
        return
    means = [
        metric.factor * np.mean([curve[step] for curve in curves]) for step in steps
    ]
    ax.plot(
        steps,
        means,
        color=QUIET,
        linewidth=1,
        zorder=0,
        label="learning curve without a deficit",
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield figure 8 and table 1 of every critical-period experiment of which anything ran."""
    for name, group in with_unique_names(deficit_groups(runs)):
        if (group["status"] != "failed").any():
            drawn, alt = figure_8(group), "quality after a deficit, with controls"
            yield Section(
                f"Critical learning periods: {name}", (), drawn, alt, summary(group)
            )
