"""Quality against cost: numbers, statistics, figure and table.  Paper: sections 4.2 to 4.5, figures 3, 4, 6, 7."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from cpt_core.analysis import metrics
from cpt_core.analysis.groups import experiment_name
from cpt_core.analysis.metrics import measure_of, metric_of
from cpt_core.analysis.runs import table
from cpt_core.analysis.statistics import spearman
from cpt_core.analysis.style import COLORS, LABELS, STYLE, figure_title, image_tag
from cpt_core.experiments.recipe import Metric
from cpt_core.experiments.recipes import EXPERIMENTS
from cpt_core.paths import paper_dir
from cpt_core.sweeps.stores import Row


def figure_3(
    rows: Iterable[Row],
    *,
    xs: Sequence[str] = ("relative_cost",),
    metric: str | None = None,
    q_max: int | None = None,
    front: bool = False,
) -> Figure:
    """Draw quality against cost, one point per schedule: mean over seeds, bar = one standard deviation.

    Static precisions are joined by a line, the equal-cost baseline that the paper lacks. Up is better in every figure:
    the axis of perplexities is turned.

    Args:
        rows: of one experiment.
        xs: one panel for each of "relative_cost", "noise_exposure", "share_at_q_min".
        metric: column of ``runs.table``, None for the main one of the task; accuracies are drawn in percent.
        q_max: None takes the largest in the rows.
        front: join the arms that no other arm beats in both cost and quality (the Pareto front) by a dotted line.

    Paper: figure 3.
    Differs: the static line and the panel against noise exposure are ours.
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
    measure = measure_of(metric)
    arms = by_arm(rows, metric)
    arms = arms[arms.q_max == (q_max or arms.q_max.max())]
    arms[["mean", "std"]] *= measure.factor  # from here on in the units that are drawn
    runs = table(rows)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(xs), figsize=(5.4 * len(xs) + 0.6, 4.4), sharey=True, squeeze=False)
        for ax, x in zip(axes[0], xs, strict=True):
            _quality(ax, arms, x, measure)
            if front and x == "relative_cost":
                best = arms[pareto(arms, measure.better) & ~_worst(arms, measure)].sort_values(x)
                ax.step(best[x], best["mean"], where="post", color="#888888", linestyle=":", label="Pareto front")
        if measure.better < 0:
            axes[0][0].invert_yaxis()  # shared
        for ax, x in zip(axes[0], xs, strict=True):  # now that the limits of the shared axis stand
            _name_points(ax, arms[arms.savings != "static"], x)
        axes[0][0].set_ylabel(measure.label)
        axes[0][0].legend(fontsize=8, loc="lower right")
        figure.suptitle(figure_title(runs, arms), fontsize=10)
        figure.tight_layout()
    plt.close(figure)
    return figure


def _quality(ax: Axes, arms: Any, x: str, measure: Metric) -> None:
    schedules, static = arms[arms.savings != "static"], arms[arms.savings == "static"].sort_values(x)
    worst = _worst(static, measure, schedules)
    drawn = static[~worst]
    if len(drawn):
        ax.errorbar(
            drawn[x], drawn["mean"], drawn["std"].fillna(0), color=COLORS["static"], marker="s",
            markersize=4, linewidth=1, capsize=2, label="static precision (bits)", zorder=1,
        )  # fmt: skip
    for r in drawn.itertuples():
        place = (getattr(r, x), r.mean)
        ax.annotate(r.arm.split()[-1], place, (-4, -13), textcoords="offset points", fontsize=8, ha="right")
    for group in ("large", "medium", "small"):
        part = schedules[schedules.savings == group]
        if len(part):
            ax.errorbar(
                part[x], part["mean"], part["std"].fillna(0), color=COLORS[group], fmt="o", markersize=5,
                capsize=2, linewidth=1, alpha=0.9, label=f"{group} savings", zorder=2,
            )  # fmt: skip
    if x == "noise_exposure":
        ax.set_xscale("log", base=2)
    ax.margins(x=0.1, y=0.12)
    if worst.any():
        names = ", ".join(f"{r.arm} bits {r.mean:.0f} {measure.unit}".rstrip() for r in static[worst].itertuples())
        ax.annotate(f"below the axis: {names}", (0.02, 0.02), xycoords="axes fraction", fontsize=8)
    ax.set_xlabel(LABELS.get(x, x))


def _worst(arms: Any, measure: Metric, schedules: Any = None) -> Any:
    """Which static precisions fail to train and are named, not drawn: they would squeeze the others."""
    schedules = arms[arms.savings != "static"] if schedules is None else schedules
    means = (schedules if len(schedules) else arms)["mean"]
    spread = means.max() - means.min()
    limit = means.min() - 15 if measure.better > 0 else 1.15 * means.min() + 1.5 * spread
    return (arms.savings == "static") & (measure.better * arms["mean"] < measure.better * limit)


def _name_points(ax: Axes, arms: Any, x: str, gap: float = 0.05) -> None:
    """Write the names in a column below every cluster of points, joined to them by thin lines."""
    ax.get_xlim(), ax.get_ylim()  # matplotlib settles the limits when they are read
    to_axes = ax.transData + ax.transAxes.inverted()
    points = [(r.arm, r.savings, (getattr(r, x), r.mean)) for r in arms.itertuples() if r.mean == r.mean]
    placed = sorted((*to_axes.transform(point), arm, savings, point) for arm, savings, point in points)
    clusters: list[list[Any]] = []
    for p in placed:
        if clusters and p[0] - clusters[-1][-1][0] < gap:
            clusters[-1].append(p)
        else:
            clusters.append([p])
    for cluster in clusters:  # below the points: above and beside them runs the static line
        left = max(p[0] for p in cluster) + 0.01
        top = max(min(p[1] for p in cluster) - 0.13, 0.08 + gap * (len(cluster) - 1))
        for i, (_, _, arm, savings, point) in enumerate(sorted(cluster, key=lambda p: -p[1])):
            color = COLORS[savings]
            ax.annotate(
                arm, point, (left, top - i * gap), xycoords="data", textcoords="axes fraction", fontsize=8,
                va="center", color=color, arrowprops={"arrowstyle": "-", "lw": 0.4, "color": color, "alpha": 0.6},
            )  # fmt: skip


def experiment_section(rows: list[Row]) -> str:
    """The figure, the rank correlations and the table of an experiment."""
    rows = tuned(rows)
    arms, metric = by_arm(rows), metrics.metric_of(rows)
    measure = metrics.measure_of(metric)
    artefact = EXPERIMENTS[rows[0]["spec"]["recipe"]["task"]].artefact
    parts = [f"<h2>{html.escape(experiment_name(rows))}</h2>"]
    if len(arms) > 1:
        drawn = figure_3(rows, xs=("relative_cost", "noise_exposure"), front=True)
        parts.append(image_tag(drawn, f"{metric} against cost"))
    if (arms["mean"].notna() & (arms.savings != "static")).sum() >= 3:  # arms whose runs all failed have no mean
        for x, name in (("relative_cost", "cost"), ("noise_exposure", "noise exposure")):
            c = correlation(rows, x)
            spread = f"[{c['low']:.2f}, {c['high']:.2f}] (95 % bootstrap over {c['seeds']} seeds)"
            shown = spread if c["seeds"] > 1 else "(one seed)"
            what = f"{name} and quality ({metric}) over {c['arms']} arms"
            parts.append(f"<p>Rank correlation of {what}: {c['rho']:.2f} {shown}.</p>")
    lines = pd.DataFrame(
        {
            "arm": arms.arm,
            "savings": arms.savings,
            "relative cost": arms.relative_cost.map("{:.3f}".format),
            "noise exposure": arms.noise_exposure.map("{:.0f}".format),
            f"{metric} {measure.unit}".rstrip(): (measure.factor * arms["mean"]).map(f"{{:.{measure.digits}f}}".format),
            "std": (measure.factor * arms["std"]).map(f"{{:.{measure.digits}f}}".format).replace("nan", "–"),
            "n": arms.n,
            "paper": [_paper_value(p) for p in compare_with_paper(rows, artefact).itertuples()],
            "Pareto front": pareto(arms, measure.better).map({True: "yes", False: ""}),
            "diverged": arms.diverged,
            "failed": arms.failed,
        }
    )
    return "\n".join([*parts, lines.to_html(index=False, border=0)])


def _paper_value(line: Any) -> str:
    return line.place if line.paper != line.paper else f"{line.paper:g} ({line.place})"


def tuned(rows: Iterable[Row]) -> list[Row]:
    """Keep the rows at the learning rate that is best for their arm, where a recipe leaves it to be chosen.

    The choice is made per arm by the mean of the main metric over seeds on the validation set; the test set plays no
    part in it. Rows of recipes with one learning rate are all kept.

    Paper: section 4.4 (the learning rate of every schedule is chosen on held-out data).
    """
    rows = list(rows)
    found: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for row in rows:
        rates = found.setdefault(_tuning_key(row), {})
        values = [
            m["value"]
            for m in row.get("metrics", [])
            if (m["name"], m["split"], m["when"], m["precision"]) == (metric_of([row]), "valid", "final", "q_max")
        ]
        rates.setdefault(row["spec"]["recipe"]["lr"], []).extend(values)
    chosen = {}
    for key, rates in found.items():
        better = EXPERIMENTS[key[0]].metric.better
        finished = {lr: better * float(np.mean(values)) for lr, values in rates.items() if values}
        chosen[key] = max(finished, key=lambda lr: finished[lr]) if finished else min(rates)
    return [
        row
        for row in rows
        if len(row["spec"]["recipe"].get("learning_rates", ())) < 2
        or row["spec"]["recipe"]["lr"] == chosen[_tuning_key(row)]
    ]


def _tuning_key(row: Row) -> tuple[str, ...]:
    spec = row["spec"]
    recipe = {k: v for k, v in spec["recipe"].items() if k != "lr"}
    return recipe["task"], json.dumps(recipe, sort_keys=True), spec["arm"], str(spec["q_max"]), spec["preset"]


def by_arm(rows: Iterable[Row], metric: str | None = None) -> pd.DataFrame:
    """Return mean, standard deviation (n - 1) and n of a metric per arm, with costs and the number of diverged runs.

    Args:
        rows: of one experiment; where the learning rate is chosen per arm, those of the chosen one count (``tuned``).
        metric: a column of ``table``; None takes the main one of the task. Here and below values are as stored:
            accuracies are shares.

    Raises:
        ValueError: when there are no rows, or they mix data sets, models, scales, presets or recipes.
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
    runs = table(rows)
    if runs.empty:
        raise ValueError("there are no rows; run the grid first")
    for column in ("dataset", "model", "scale", "preset", "q_min", "recipe"):
        if runs[column].nunique() > 1:
            raise ValueError(f"rows mix {column}s: {', '.join(sorted(map(str, runs[column].unique())))}; choose one")
    if metric not in runs:
        runs[metric] = float("nan")
    groups = runs.groupby(["q_max", "arm"], sort=False)
    out = groups.agg(
        savings=("savings", "first"),
        relative_cost=("relative_cost", "first"),
        noise_exposure=("noise_exposure", "first"),
        share_at_q_min=("share_at_q_min", "first"),
        mean=(metric, "mean"),
        std=(metric, "std"),
        n=(metric, "count"),
    )
    out["diverged"] = groups["status"].agg(lambda s: int((s == "diverged").sum()))
    out["failed"] = groups["status"].agg(lambda s: int((s == "failed").sum()))
    return out.reset_index()


def at_q_max(runs: pd.DataFrame, q_max: int | None) -> pd.DataFrame:
    """Runs of one q_max: schedules of the same name at another one are other schedules."""
    return runs[runs["q_max"] == (runs["q_max"].max() if q_max is None else q_max)]


def pareto(arms: pd.DataFrame, better: int = 1) -> pd.Series:
    """Return which arms of ``by_arm`` no other arm beats: none is as cheap and better, or as good and cheaper.

    ``better`` is -1 for a metric of which less is better.
    """
    cost, mean = arms["relative_cost"].to_numpy(), better * arms["mean"].to_numpy()
    beaten = [
        bool(((cost <= c) & (mean >= m) & ((cost < c) | (mean > m))).any()) for c, m in zip(cost, mean, strict=True)
    ]
    return pd.Series(~np.array(beaten, dtype=bool) & ~np.isnan(mean), index=arms.index)


def paired_difference(
    rows: Iterable[Row], a: str, b: str, metric: str | None = None, q_max: int | None = None
) -> pd.Series:
    """Return metric(a) - metric(b) by seed, for arms or savings groups ("large", "medium", "small").

    ``metric`` None takes the main one of the task, ``q_max`` None the largest in the rows.
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
    runs = at_q_max(table(rows), q_max)

    return (of_arms(runs, a, metric) - of_arms(runs, b, metric)).dropna()


def of_arms(runs: pd.DataFrame, name: str, value: str) -> pd.Series:
    """Return a column of ``table`` by seed, for an arm or averaged over a savings group ("large", "medium", "small").

    Of a group only the seeds count that all its arms in the table have. ValueError when there is no such arm.
    """
    column = "savings" if name in ("large", "medium", "small") else "arm"
    part = runs[runs[column] == name]
    if part.empty:
        raise ValueError(f"no rows for {name!r}; there are {', '.join(sorted(runs['arm'].unique()))}")
    return (
        part.pivot_table(index="seed", columns="arm", values=value, aggfunc="first", dropna=False).dropna().mean(axis=1)
    )


def correlation(
    rows: Iterable[Row],
    x: str = "relative_cost",
    metric: str | None = None,
    resamples: int = 1000,
    q_max: int | None = None,
) -> dict[str, float]:
    """Return Spearman's rank correlation over arms between ``x`` and mean quality, with a bootstrap interval.

    Quality is the metric, or minus the metric where less is better, such as perplexity: a positive number always says
    that what has more of ``x`` is better. ``metric`` None takes the main one of the task.

    The ten schedules and the static baseline at q_max take part, with the seeds that all of them have (all seeds, if
    there is no such one); seeds are resampled (paired over arms), so the
    interval says how far other seeds might have moved the number; it is NaN for one seed. Keys: rho, low, high (95 %),
    arms, seeds. ``q_max`` None takes the largest in the rows.

    Paper: section 4.5 (cost and quality correlate).
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
    runs = at_q_max(table(rows), q_max)
    runs = runs[(runs["savings"] != "static") | (runs["arm"] == "static " + runs["q_max"].astype(str))]
    wide = runs.pivot_table(index="arm", columns="seed", values=metric, aggfunc="first")
    common = wide.dropna(axis=1)  # arms are compared on the seeds that all of them have
    wide = common if common.shape[1] else wide
    costs = runs.groupby("arm")[x].first().loc[wide.index].to_numpy()
    values = measure_of(metric).better * wide.to_numpy()
    if len(values) < 3:
        raise ValueError(f"a rank correlation needs at least three arms, there are {len(values)}")
    low = high = float("nan")
    if common.shape[1] > 1:  # one seed has no spread: no interval
        rng = np.random.default_rng(0)
        drawn = [rng.integers(values.shape[1], size=values.shape[1]) for _ in range(resamples)]
        low, high = np.nanpercentile(spearman(costs, values[:, drawn].mean(axis=2).T), [2.5, 97.5])
    rho = stats.spearmanr(costs, np.nanmean(values, axis=1)).statistic
    return {"rho": float(rho), "low": float(low), "high": float(high), "arms": len(values), "seeds": values.shape[1]}


def compare_with_paper(rows: Iterable[Row], artefact: str, metric: str | None = None) -> pd.DataFrame:
    """Put our numbers beside those printed in the paper (``data/paper/numbers.csv``).

    Args:
        rows: of one experiment.
        artefact: such as "figure_3"; numbers of the paper are matched by artefact, data set, model, q_max, arm, metric.
        metric: ours; None takes the main one of the task.

    Returns:
        Columns arm, q_max, cost, ours, std, n, paper, difference, place; accuracies in percent. Where the paper draws a
        point but prints no number, or has no such experiment (all that are not at paper scale), ``paper`` is NaN and
        ``place`` says so.
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
    factor = measure_of(metric).factor
    ours = by_arm(rows, metric)
    first = next(iter(table(rows).itertuples()))
    paper = pd.read_csv(paper_dir() / "numbers.csv")
    absent = "drawn, no number printed" if first.scale == "paper" else "not in the paper"
    same = (paper.artefact == artefact) & (paper.dataset == first.dataset) & (paper.model == first.model)
    known = paper[same & (paper.metric == metric) & (first.scale == "paper")]
    out = []
    for r in ours.itertuples():
        hit = known[(known.arm == r.arm) & (known.q_max == r.q_max)]
        value = float(hit.value.iloc[0]) if len(hit) else float("nan")
        out.append(
            {
                "arm": r.arm,
                "q_max": r.q_max,
                "cost": r.relative_cost,
                "ours": factor * r.mean,
                "std": factor * r.std,
                "n": r.n,
                "paper": value,
                "difference": factor * r.mean - value,
                "place": hit.place.iloc[0] if len(hit) else absent,
            }
        )
    return pd.DataFrame(out)
