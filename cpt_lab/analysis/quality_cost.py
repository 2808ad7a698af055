"""Quality against cost: numbers, table, figure.  Paper: sections 4.2 to 4.5, figures 3, 4, 6, 7."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_lab.analysis import printed
from cpt_lab.analysis.groups import AGGREGATIONS, at_q_max, named, quality_cost_groups
from cpt_lab.analysis.metrics import metric_named, metric_of
from cpt_lab.analysis.pages import Section
from cpt_lab.analysis.statistics import paired
from cpt_lab.analysis.style import COLORS, LABELS, SMALL, TEXT, drawing, legend_below, name_points, title
from cpt_lab.experiments.recipe import Metric
from cpt_lab.experiments.recipes import EXPERIMENTS

GROUPS = ("large", "medium", "small")  # of savings


def by_arm(runs: pd.DataFrame) -> pd.DataFrame:
    """Return mean, standard deviation (n - 1) and n of the main metric per arm of one experiment, with costs.

    ``diverged`` are those of the n that broke and count with the worst value of the task, ``failed`` those that do not
    count and are to be run again (``runs.table``). Here and below values are as stored: accuracies are shares.

    Raises:
        ValueError: when there are no runs, or they mix data sets, models, scales, presets or recipes.
    """
    metric = metric_of(runs)
    if runs.empty:
        raise ValueError("there are no rows; run the grid first")
    for column in ("dataset", "model", "scale", "preset", "q_min", "recipe"):
        if runs[column].nunique() > 1:
            raise ValueError(f"rows mix {column}s: {', '.join(sorted(map(str, runs[column].unique())))}; choose one")
    failed = (runs["status"] == "failed") & ~runs["diverged"]
    groups = runs.assign(failed=failed).groupby(["q_max", "arm"], sort=False)
    alike = {name: (name, "first") for name in ("savings", "relative_cost", "noise_exposure", "share_at_q_min")}
    measured = {"mean": (metric, "mean"), "std": (metric, "std"), "n": (metric, "count")}
    lost = {name: (name, "sum") for name in ("diverged", "failed")}
    return groups.agg(**alike, **measured, **lost).reset_index()


def on_common_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of one experiment on the seeds that all arms have; all runs where there is no such seed.

    Means over different seeds may differ by their seeds alone. Arms of which no run has a value do not count; an arm at
    another q_max is another arm.
    """
    valued = runs[runs[metric_of(runs)].notna()]
    arms = valued.drop_duplicates(["seed", "q_max", "arm"]).groupby("seed").size()
    common = runs[runs["seed"].isin(arms.index[arms == len(valued.drop_duplicates(["q_max", "arm"]))])]
    return common if len(common) else runs


def pareto(arms: pd.DataFrame, better: int = 1) -> pd.Series:
    """Return which arms of ``by_arm`` no other arm beats: none is as cheap and better, or as good and cheaper.

    ``better`` is -1 for a metric of which less is better.
    """
    cost, mean = arms["relative_cost"].to_numpy(), better * arms["mean"].to_numpy()
    beaten = [((cost <= c) & (mean >= m) & ((cost < c) | (mean > m))).any() for c, m in zip(cost, mean, strict=True)]
    return pd.Series(~np.array(beaten, dtype=bool) & ~np.isnan(mean), index=arms.index)


def paired_difference(runs: pd.DataFrame, a: str, b: str, metric: str | None = None) -> pd.Series:
    """Return metric(a) - metric(b) by seed, at the largest q_max.

    ``a`` and ``b`` are arms or savings groups ("large", "medium", "small"); ``metric`` None takes the main one.
    """
    metric = metric or metric_of(runs)
    runs = at_q_max(runs, None)
    return paired(runs_of(runs, a), runs_of(runs, b), metric)


def runs_of(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the runs of an arm or of a savings group ("large", "medium", "small"); ValueError when there are none."""
    part = runs[runs["savings" if name in GROUPS else "arm"] == name]
    if part.empty:
        raise ValueError(f"no rows for {name!r}; there are {', '.join(sorted(runs['arm'].unique()))}")
    return part


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the arms of one experiment for people, by cost, beside the paper's numbers.

    Means are over all n seeds of an arm; the Pareto front is that of the seeds that all arms have.
    """
    name = metric_of(runs)
    metric, arms = metric_named(name), by_arm(runs)
    compared = by_arm(on_common_seeds(runs))
    best = compared[["q_max", "arm"]][pareto(compared, metric.better)]
    front = pd.MultiIndex.from_frame(arms[["q_max", "arm"]]).isin(pd.MultiIndex.from_frame(best))
    cells = {
        "arm": arms.arm,
        "savings": arms.savings,
        "q_max": arms.q_max,
        "relative cost": arms.relative_cost.map("{:.3f}".format),
        "noise exposure": arms.noise_exposure.map("{:.0f}".format),
        f"{name} {metric.unit}".rstrip(): metric.text(arms["mean"]),
        "std": metric.text(arms["std"]),
        "n": arms.n,
        "paper": _printed(runs, arms),
        "Pareto front": np.where(front, "yes", ""),
        "diverged": arms.diverged,
        "failed": arms.failed,
    }
    shown = pd.DataFrame(cells)
    return shown.iloc[arms.relative_cost.argsort(kind="stable")]


def _printed(runs: pd.DataFrame, arms: pd.DataFrame) -> list[str]:
    """What the paper prints of every arm (``data/paper/numbers.csv``), and where; or that it has no number of it."""
    first = runs.iloc[0]
    lines = printed.of_experiment(runs, EXPERIMENTS[first["task"]].artefact).drop_duplicates(["arm", "q_max"])
    known = {(p.arm, p.q_max): f"{p.value:g} ({p.place})" for p in lines.itertuples()}
    unknown = "drawn, no number printed" if first["scale"] == "paper" else "not in the paper"
    return [known.get((r.arm, r.q_max), unknown) for r in arms.itertuples()]


def figure_3(runs: pd.DataFrame, *, xs: Sequence[str] = ("relative_cost",), front: bool = False) -> Figure:
    """Draw quality against cost, one point per schedule: mean over seeds, bar = one standard deviation.

    The arms of a row of panels are drawn on the seeds that all of them have, if there are any. Static precisions are
    joined by a line, the equal-cost baseline that the paper lacks. Up is better in every figure: the axis of
    perplexities is turned. Every q_max has a row of panels, and so has every aggregation.

    Args:
        runs: of one experiment, which may have several q_max and both aggregations.
        xs: one panel for each of "relative_cost", "noise_exposure", "share_at_q_min".
        front: join the arms that no other arm beats in both cost and quality (the Pareto front) by a dotted line.

    Paper: figures 3, 4 (detection), 6 (graphs) and 7 (language).
    Differs: the static line and the panel against noise exposure are ours.
    """
    drawn = metric_named(metric_of(runs))
    lost = int((runs["diverged"] | (runs["status"] == "failed")).sum())
    parts = [on_common_seeds(part) for _, part in runs.groupby(["q_max", "aggregation"], sort=False)]
    runs = pd.concat(parts) if parts else runs
    rows = _rows(runs, drawn.factor)
    size = (4.7 * len(xs) + 0.6, 4.4 * len(rows))
    with drawing(len(rows), len(xs), figsize=size, sharey=True) as (figure, axes):
        panels = list(zip(axes.flat, *zip(*product(rows.values(), xs), strict=True), strict=True))
        for ax, arms, x in panels:
            _quality(ax, arms, x, drawn)
            if front and x == "relative_cost":
                best = arms[pareto(arms, drawn.better) & ~_worst(arms, drawn)].sort_values(x)
                ax.step(best[x], best["mean"], where="post", color="#888888", linestyle=":", label="Pareto front")
        if drawn.better < 0:
            axes[0][0].invert_yaxis()  # shared
        for line, what in zip(axes, rows, strict=True):
            line[0].set_ylabel(drawn.label)
            line[0].set_title(what, fontsize=9)
        legend_below(figure, axes[0][0])
        note = f"; {lost} runs diverged or failed" if lost else ""  # those that diverged are in the means
        figure.suptitle(title(runs, f", {runs['scale'].iloc[0]} scale") + note, fontsize=10)
        for ax, arms, x in panels:
            shown = arms[(arms.savings != "static") & arms["mean"].notna()]
            name_points(ax, list(shown.arm), shown[x], shown["mean"], [TEXT[group] for group in shown.savings])
    return figure


def _rows(runs: pd.DataFrame, factor: float) -> dict[str, pd.DataFrame]:
    """Arms, in drawn units, of every q_max and aggregation by their names, the largest q_max and FP-Agg first."""
    if runs["recipe_but_aggregation"].nunique() != 1:
        by_arm(runs)  # says what is wrong
    found = {}
    for (top, kind), part in sorted(runs.groupby(["q_max", "aggregation"]), key=lambda p: (-p[0][0], p[0][1])):
        words = [f"q_max {top}"] if runs["q_max"].nunique() > 1 else []
        words += [AGGREGATIONS[kind]] if runs["aggregation"].nunique() > 1 else []
        arms = by_arm(part)
        found[", ".join(words)] = arms.assign(mean=factor * arms["mean"], std=factor * arms["std"])
    return found


def _quality(ax: Axes, arms: pd.DataFrame, x: str, metric: Metric) -> None:
    schedules, static = arms[arms.savings != "static"], arms[arms.savings == "static"].sort_values(x)
    worst = _worst(arms, metric)[static.index]
    drawn = static[~worst]
    if len(drawn):
        ax.errorbar(
            drawn[x], drawn["mean"], drawn["std"].fillna(0), color=COLORS["static"], marker="s",
            markersize=10, linewidth=1, capsize=2, label="static precision (bits)", zorder=1,
        )  # fmt: skip
    for r in drawn.itertuples():
        bits = r.arm.split()[-1]  # in the point itself: nothing can lie over it
        ax.text(getattr(r, x), r.mean, bits, color="white", fontsize=SMALL, ha="center", va="center_baseline", zorder=4)
    for group in (*GROUPS, "own"):
        part = schedules[schedules.savings == group]
        if len(part):
            ax.errorbar(
                part[x], part["mean"], part["std"].fillna(0), color=COLORS[group], fmt="o", markersize=5,
                capsize=2, linewidth=1, alpha=0.9, zorder=2,
                label="own schedule" if group == "own" else f"{group} savings",
            )  # fmt: skip
    if x == "noise_exposure":
        ax.set_xscale("log", base=2)
    ax.margins(x=0.1, y=0.12)
    if worst.any():
        names = ", ".join(f"{r.arm} bits {r.mean:.0f} {metric.unit}".rstrip() for r in static[worst].itertuples())
        ax.set_title(f"below the axis: {names}", loc="right", fontsize=SMALL)
    ax.set_xlabel(LABELS.get(x, x))


def _worst(arms: pd.DataFrame, metric: Metric) -> pd.Series:
    """Which static precisions fail to train and are named, not drawn: they would squeeze the others."""
    schedules = arms[arms.savings != "static"]
    means = (schedules if len(schedules) else arms)["mean"]
    spread = means.max() - means.min()
    limit = means.min() - 15 if metric.better > 0 else 1.15 * means.min() + 1.5 * spread
    return (arms.savings == "static") & (metric.better * arms["mean"] < metric.better * limit)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the figure and the table of every experiment of quality against cost, those that show most first."""
    of = named(quality_cost_groups(runs))
    for name, group in sorted(of, key=lambda e: (e[1]["scale"].iloc[0] != "paper", -e[1]["arm"].nunique())):
        arms, metric = by_arm(group), metric_of(group)
        drawn = figure_3(group, xs=("relative_cost", "noise_exposure"), front=True) if len(arms) > 1 else None
        shown = summary(group)
        same = {"paper": "not in the paper", "std": "–", "failed": 0, "q_max": group["q_max"].iloc[0]}
        silent = [column for column, said in same.items() if (shown[column] == said).all()]
        yield Section(name, (), drawn, f"{metric} against cost", shown.drop(columns=silent))
