"""Critical learning periods: numbers, table, figure.  Paper: section 5, figure 8, table 1."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_lab.analysis import printed
from cpt_lab.analysis.groups import deficit_groups, named
from cpt_lab.analysis.metrics import intervals, metric_named, metric_of
from cpt_lab.analysis.pages import Section
from cpt_lab.analysis.statistics import interval, paired
from cpt_lab.analysis.style import COLORS, QUIET, drawing, title
from cpt_lab.experiments.recipe import Metric


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
    is_window = {key: bool(((f["start"] > 0) & (f["stop"] < f["total_steps"])).any()) for key, f in families.items()}
    after = _normal_length([f for key, f in families.items() if not is_window[key]], list(families.values()))
    lines = []
    for key, family in families.items():
        total = int(family["total_steps"].iloc[0])
        control = family[family["stop"] == 0]
        at_start = int(max(family.loc[family["start"] == 0, "stop"], default=0))
        length = not is_window[key] and total - at_start == after
        for arm, part in family.groupby("arm", sort=False):
            line = {"arm": arm, "recipe": key, **_against(part, control, metric), "total": total}
            # Where windows lie within the normal length, the training without a deficit serves both experiments.
            both = line["place"] == "none" and total == after and not length
            for experiment in ["length"] if length else ["window", "length"] if both else ["window"]:
                paper_arm = _paper_arm(experiment, line["place"], str(arm), total == after)
                lines.append({"experiment": experiment, **line, "paper_arm": paper_arm})
    out = pd.DataFrame(lines)
    return out.sort_values(["experiment", "total", "start", "stop"], kind="stable").reset_index(drop=True)


def _normal_length(candidates: list[pd.DataFrame], families: list[pd.DataFrame]) -> int:
    """Steps of the normal training, which a deficit at the start comes before; 0 when there is no such experiment.

    It is what is left of most families after their deficit at the start. A family of windows can look the same, when
    its one window lies at the start: a length at which something was trained without a deficit goes first.
    """
    unharmed = {int(f["total_steps"].iloc[0]) for f in families if (f["stop"] == 0).any()}
    left = Counter(int(f["total_steps"].iloc[0] - max(f.loc[f["start"] == 0, "stop"], default=0)) for f in candidates)
    return max(left, key=lambda n: (n in unharmed, left[n], n), default=0)


def _against(part: pd.DataFrame, control: pd.DataFrame, metric: str) -> dict[str, Any]:
    start, stop, total = (int(part[name].iloc[0]) for name in ("start", "stop", "total_steps"))
    values = part.groupby("seed")[metric].first()
    difference = paired(part, control, metric) if stop else values.iloc[:0]
    mean, low, high = interval(difference)
    return {
        "place": "none" if not stop else "start" if not start else "end" if stop == total else "inside",
        "start": start, "stop": stop, "mean": values.mean(), "std": values.std(), "n": int(values.count()),
        "diverged": int(part["diverged"].sum()), "difference": mean, "low": low, "high": high,
        "worse": int((metric_named(metric).better * difference < 0).sum()),
    }  # fmt: skip


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
    found, known = deficits(runs), printed.of_experiment(runs, "table_1").set_index("arm")["value"]
    found[["mean", "std", "difference", "low", "high"]] *= metric_named(metric_of(runs)).factor
    found["paper"] = [float(known.get(arm, float("nan"))) for arm in found.paper_arm]
    return found


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return ``table_1`` for people; runs as for ``deficits``."""
    name, found = metric_of(runs), table_1(runs)
    metric = replace(metric_named(name), factor=1.0)  # table 1 is in printed units
    cells = {
        "low precision": found.arm,
        "experiment": found.experiment,
        f"{name} {metric.unit}".rstrip(): metric.text(found["mean"]),
        "std": metric.text(found["std"]),
        "n": found.n,
        "minus control of equal length [95 %]": intervals(metric, found),
        "worse": [f"{r.worse} of {r.n}" if r.place != "none" else "" for r in found.itertuples()],
        "diverged": found.diverged,
        "paper": [f"{p:g}" if p == p else "–" for p in found.paper],
    }
    return pd.DataFrame(cells)


def figure_8(runs: pd.DataFrame, heading: str = "") -> Figure:
    """Draw a critical-period experiment: a dot per seed, lines through the means, controls of the same length.

    Left: deficits of R steps at the start, which make training R steps longer. Right: windows of low precision within
    a training of fixed length. The learning curve of training without a deficit is drawn in grey over both, its steps
    and its quality on the same axes; where it is worse than all runs it is cut.

    Args:
        runs: of one experiment, see ``deficits``.
        heading: instead of what was trained.

    Paper: figure 8.
    Differs: single seeds, both controls (the same length at q_max, the same low steps at the end) are ours.
    """
    name = metric_of(runs)
    drawn, found = metric_named(name), deficits(runs)
    found["mean"] *= drawn.factor
    values = runs.assign(value=drawn.factor * runs[name]).groupby(["arm", "recipe"])["value"]
    dots = {key: part.dropna().to_numpy() for key, part in values}
    panels = [kind for kind in ("length", "window") if (found.experiment == kind).any()]
    with drawing(1, len(panels), figsize=(5 * len(panels), 4.2), sharey=True) as (figure, axes):
        for ax, kind in zip(axes[0], panels, strict=True):
            part = found[found.experiment == kind]
            (_length if kind == "length" else _window)(ax, part, [dots[r.arm, r.recipe] for r in part.itertuples()])
            ax.plot([], [], color=COLORS["static"], label="control: q_max, same length")
        limits = axes[0][0].get_ylim()  # shared, and those of the runs
        for ax, kind in zip(axes[0], panels, strict=True):
            _learning_curve(ax, runs, min(found[found.experiment == kind].total), name, drawn)
            ax.set_ylim(limits)
            ax.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)  # above the axes: over no point
        if drawn.better < 0:
            axes[0][0].invert_yaxis()
        axes[0][0].set_ylabel(drawn.label)
        lost = int(found.drop_duplicates(["arm", "recipe"]).diverged.sum())
        first = runs.iloc[0]
        what = f": {first['q_min']} instead of {first['q_max']} bits for a while"
        figure.suptitle((heading or title(runs, what)) + (f"; {lost} runs diverged" if lost else ""), fontsize=10)
    return figure


def _length(ax: Axes, part: pd.DataFrame, dots: list[np.ndarray]) -> None:
    """Draw deficits that make training longer over their length R, the controls at the same R; dots per line."""
    # R of a control, which has no deficit, is what it is longer than the shortest training
    x = part.stop.where(part.place == "start", part.total - min(part.total))
    for place, label, color, style in (
        ("start", "low precision first", COLORS["large"], "o-"),
        ("end", "low precision last", COLORS["medium"], "^--"),
        ("none", None, COLORS["static"], "s-"),
    ):
        here, clean = part.place == place, place == "none"
        for r, seeds in zip(x[here], [d for d, h in zip(dots, here, strict=True) if h], strict=True):
            alpha, size = (0.25, 3) if clean else (0.35, 4)
            ax.plot(np.full(len(seeds), r), seeds, style[0], color=color, alpha=alpha, markersize=size)
        size, width = (3, 1.2) if clean else (0, None)
        ax.plot(x[here], part["mean"][here], style, color=color, label=label, markersize=size, linewidth=width)
    ax.set_xlabel("R: steps at low precision")


def _window(ax: Axes, part: pd.DataFrame, dots: list[np.ndarray]) -> None:
    """Draw windows over their first step; the control, which has none, is a band over all of them."""
    low = part[part.place != "none"]
    for r, seeds in zip(part.itertuples(), dots, strict=True):
        if r.place != "none":
            ax.plot(np.full(len(seeds), r.start), seeds, "o", color=COLORS["large"], alpha=0.35, markersize=4)
            continue
        starts = sorted(set(low.start))
        ax.axhspan(min(seeds), max(seeds), color=COLORS["static"], alpha=0.08, linewidth=0)
        ax.plot(starts, [r.mean] * len(starts), color=COLORS["static"], linewidth=1.2)
    ax.plot(low.start, low["mean"], "o-", color=COLORS["large"], label="window of low precision", markersize=0)
    ax.set_xlabel("first step of the window; the last one has no time left after it")


def _learning_curve(ax: Axes, runs: pd.DataFrame, total: int, name: str, metric: Metric) -> None:
    """Draw the mean learning curve of the shortest training without a deficit."""
    clean = runs[(runs["status"] == "ok") & (runs["stop"] == 0) & (runs["total_steps"] == total)]
    curves = [{e["step"]: e["test"][name] for e in evaluations} for evaluations in clean["evaluations"]]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []  # those that all seeds have
    if len(steps) < 2:
        return
    means = [metric.factor * np.mean([curve[step] for curve in curves]) for step in steps]
    ax.plot(steps, means, color=QUIET, linewidth=1, zorder=0, label="learning curve without a deficit")


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield figure 8 and table 1 of every critical-period experiment of which anything ran."""
    for name, group in named(deficit_groups(runs)):
        if (group["status"] != "failed").any():
            drawn, alt = figure_8(group), "quality after a deficit, with controls"
            yield Section(f"Critical learning periods: {name}", (), drawn, alt, summary(group))
