"""The paper's figures, from schedules and from result rows.  Needs matplotlib, not torch.

Savings groups keep their colour everywhere; what is printed on an axis is always relative to static q_max.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cpt_core.experiments import deficits, equal_cost
from cpt_core.results import (
    Measure,
    aggregation_difference,
    by_arm,
    measure_of,
    metric_of,
    pareto,
    table,
    tuned,
)
from cpt_core.schedules import SUITE, Schedule, make_schedule
from cpt_core.stores import Row

# colour-blind safe (Okabe and Ito)
COLORS = {"large": "#D55E00", "medium": "#009E73", "small": "#0072B2", "static": "#222222"}
LABELS = {
    "relative_cost": "training cost relative to static q_max (BitOps)",
    "noise_exposure": "noise exposure: mean 4^-q relative to static q_max",
}
STYLE: Any = {
    "figure.dpi": 100,
    "savefig.bbox": "tight",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def figure_2(
    q_min: int = 3, q_max: int = 8, n_cycles: int = 8, total_steps: int = 64_000, names: Sequence[str] = tuple(SUITE)
) -> Figure:
    """Draw the schedules of the suite: precision before and after rounding at every step.

    Paper: figure 2.
    """
    made = {
        name: make_schedule(name, q_min=q_min, q_max=q_max, total_steps=total_steps, n_cycles=n_cycles)
        for name in names
    }
    titles = {f"{n}   {s.savings} savings, cost {s.relative_cost():.2f}": s for n, s in made.items()}
    return schedules(titles, f"Precision schedules between {q_min} and {q_max} bits, {n_cycles} cycles")


def schedules(found: Mapping[str, Schedule], title: str = "") -> Figure:
    """Draw schedules by name: precision before and after rounding at every step."""
    with plt.rc_context(STYLE):
        columns = 2
        rows = -(-len(found) // columns)
        figure, axes = plt.subplots(rows, columns, figsize=(9, 1.55 * rows), sharex=True, sharey=True, squeeze=False)
        for ax, (name, schedule) in zip(axes.flat, found.items(), strict=False):
            draw_schedule(ax, schedule)
            ax.set_title(name, fontsize=9)
        for ax in axes.flat[len(found) :]:
            ax.set_visible(False)
        for ax in axes[-1]:
            ax.set_xlabel("training step")
        for ax in axes[:, 0]:
            ax.set_ylabel("bits")
        figure.suptitle(title, fontsize=11)
        figure.tight_layout()
    plt.close(figure)
    return figure


def draw_schedule(ax: Axes, schedule: Schedule) -> None:
    """Draw one schedule on given axes: a thin line before rounding, a thick one after."""
    steps = np.arange(schedule.total_steps)
    color = COLORS.get(schedule.savings or "", COLORS["static"])
    ax.plot(steps, schedule.values(), color=color, alpha=0.4, linewidth=1)
    ax.step(steps, schedule.bits(), color=color, where="post", linewidth=1.6)
    ax.set_ylim(schedule.q_min - 0.6, schedule.q_max + 0.6)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))


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
        metric: column of ``results.table``, None for the main one of the task; accuracies are drawn in percent.
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
        figure.suptitle(_title(runs, arms), fontsize=10)
        figure.tight_layout()
    plt.close(figure)
    return figure


def figure_4(rows: Iterable[Row], **options: Any) -> Figure:
    """Draw mean average precision against cost for object detection; arguments as for ``figure_3``.

    Paper: figure 4.
    """
    return figure_3(rows, **options)


def figure_5(rows: Iterable[Row], bits: int = 8) -> Figure:
    """Draw FP-Agg against Q-Agg: validation accuracy while training, and the paired difference of every seed.

    Args:
        rows: of one recipe with both aggregations.
        bits: static precision of the curves; the right panel shows all arms that both aggregations have.

    Paper: figure 5.
    Differs: the panel of paired differences is ours.
    """
    rows = list(rows)
    names = {"fp": ("FP-Agg", COLORS["small"]), "quantized": ("Q-Agg", COLORS["large"])}
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
        for kind, (name, color) in names.items():
            curves = [
                [(e["step"], 100 * e.get("valid", e["test"])["accuracy"]) for e in row["evaluations"]]
                for row in rows
                if row["status"] == "ok"
                and (row["spec"]["recipe"]["aggregation"], row["spec"]["arm"]) == (kind, f"static {bits}")
            ]
            if not curves:
                raise ValueError(f"no finished run of static {bits} with {name}")
            steps, values = np.array(curves[0])[:, 0], np.array([[v for _, v in c] for c in curves])
            left.plot(steps, values.mean(0), color=color, label=f"{name}, static {bits} bits", linewidth=1.4)
            left.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
        left.set(xlabel="training step", ylabel="validation accuracy (%)")
        left.legend(loc="lower right", fontsize=8)
        difference = aggregation_difference(rows)
        arms = sorted(difference["arm"].unique(), key=lambda a: (not a.startswith("static"), a))
        for x, arm in enumerate(arms):
            values = 100 * difference[difference["arm"] == arm]["difference"].to_numpy()
            right.plot(np.full(len(values), x), values, "o", color=COLORS["static"], markersize=4, alpha=0.6)
            right.plot([x - 0.2, x + 0.2], [values.mean()] * 2, color=COLORS["static"], linewidth=1.6)
        right.axhline(0, color="#888888", linewidth=0.8)
        right.set_xticks(range(len(arms)), arms)
        right.set_xlim(-0.8, len(arms) - 0.2)
        right.set_ylabel("Q-Agg minus FP-Agg\ntest accuracy, points; a dot per seed")
        runs = table(rows)
        title = next((t for t in runs["title"] if t), "").replace(" (FP-Agg)", "").replace(" (Q-Agg)", "")
        warning = "smoke scale: not a result. " if runs["scale"].iloc[0] == "smoke" else ""
        seeds = runs["seed"].nunique()
        figure.suptitle(f"{warning}{title}, {seeds} seed{'s' * (seeds > 1)}", fontsize=10)
        figure.tight_layout()
    plt.close(figure)
    return figure


def figure_6(rows: Iterable[Row], **options: Any) -> Figure:
    """Draw accuracy against cost for node classification; arguments as for ``figure_3``.

    Paper: figure 6.
    """
    return figure_3(rows, **options)


def figure_7(rows: Iterable[Row], **options: Any) -> Figure:
    """Draw perplexity or accuracy against cost for language tasks; arguments as for ``figure_3``.

    Paper: figure 7.
    """
    return figure_3(rows, **options)


def figure_8(rows: Iterable[Row], metric: str | None = None) -> Figure:
    """Draw a critical-period experiment: a dot per seed, lines through the means, controls of the same length.

    Left: deficits of R steps at the start, which make training R steps longer. Right: windows of low precision within
    a training of fixed length. The learning curve of training without a deficit is drawn over both, on an axis of its
    own, at the right.

    Args:
        rows: of one experiment, see ``experiments.deficits``.
        metric: None takes the main one of the task.

    Paper: figure 8.
    Differs: single seeds, both controls (the same length at q_max, the same low steps at the end) are ours.
    """
    rows = list(rows)
    metric = metric or metric_of(rows)
    measure = measure_of(metric)
    found = deficits(rows, metric)
    found["mean"] *= measure.factor
    panels = [name for name in ("length", "window") if (found.experiment == name).any()]
    runs = table(rows)
    values = runs.assign(value=measure.factor * runs[metric]).groupby(["arm", "recipe"])["value"]
    dots = {key: part.dropna().to_numpy() for key, part in values}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(panels), figsize=(5.6 * len(panels), 4), sharey=True, squeeze=False)
        for ax, name in zip(axes[0], panels, strict=True):
            part = found[found.experiment == name]
            if name == "length":
                x = part.stop.where(part.place == "start", part.total - min(part.total))  # R, also of the controls
                lines = [
                    ("start", "low precision first", "large", "o-"),
                    ("end", "low precision last", "medium", "^--"),
                ]
                ax.set_xlabel("R: steps at low precision")
            else:
                x = part.start
                lines = [("window", "window of low precision", "large", "o-")]
                ax.set_xlabel("first step of the window; the last one has no time left after it")
            for place, label, color, style in lines:
                drawn = part[(part.place == place) if name == "length" else (part.place != "none")]
                for r in drawn.itertuples():
                    seeds = dots[r.arm, r.recipe]
                    ax.plot(
                        np.full(len(seeds), x[r.Index]), seeds, style[0], color=COLORS[color], alpha=0.35, markersize=4
                    )
                ax.plot(x[drawn.index], drawn["mean"], style, color=COLORS[color], label=label, markersize=0)
            control = part[part.place == "none"]
            for r in control.itertuples():
                seeds = dots[r.arm, r.recipe]
                at = [x[r.Index]] if name == "length" else sorted(set(x[part.place != "none"]))
                if name == "length":
                    ax.plot(np.full(len(seeds), at[0]), seeds, "s", color=COLORS["static"], alpha=0.25, markersize=3)
                else:
                    ax.axhspan(min(seeds), max(seeds), color=COLORS["static"], alpha=0.08, linewidth=0)
                    ax.plot(at, [r.mean] * len(at), color=COLORS["static"], linewidth=1.2)
            if name == "length":
                ax.plot(x[control.index], control["mean"], "s-", color=COLORS["static"], markersize=3, linewidth=1.2)
            ax.plot([], [], color=COLORS["static"], label="control: q_max, same length")
            ax.tick_params(labelleft=True)  # shared, but for the learning curve's axis beside it
            _learning_curve(ax, rows, min(part.total), metric)
            ax.legend(fontsize=8, loc="lower left")
        if measure.better < 0:
            axes[0][0].invert_yaxis()
        axes[0][0].set_ylabel(measure.label)
        lost = int(found.drop_duplicates(["arm", "recipe"]).diverged.sum())
        warning = "smoke scale: not a result. " if runs["scale"].iloc[0] == "smoke" else ""
        title = next((t for t in runs["title"] if t), runs["model"].iloc[0])
        schedule = rows[0]["spec"]["schedule"]
        figure.suptitle(
            f"{warning}{title}: {schedule['q_low']} instead of {schedule['q_high']} bits for a while, "
            f"{runs['seed'].nunique()} seed{'s' * (runs['seed'].nunique() > 1)}"
            + (f"; {lost} runs diverged" if lost else ""),
            fontsize=10,
        )
        figure.tight_layout()
    plt.close(figure)
    return figure


def _learning_curve(ax: Axes, rows: Iterable[Row], total: int, metric: str) -> None:
    """Draw the mean learning curve of the shortest training without a deficit, on a second axis."""
    clean = [row for row in rows if row["status"] == "ok" and not row["spec"]["schedule"]["windows"]]
    curves = [
        {e["step"]: e["test"][metric] for e in row["evaluations"]}
        for row in clean
        if row["spec"]["schedule"]["total_steps"] == total
    ]
    steps = sorted(set.intersection(*(set(c) for c in curves))) if curves else []
    if len(steps) < 2:
        return
    second = ax.twinx()
    factor = measure_of(metric).factor
    second.plot(
        steps, [factor * np.mean([c[t] for c in curves]) for t in steps], color="#999999", linewidth=1, zorder=0
    )
    second.set_ylabel("learning curve without a deficit (grey)", color="#777777", fontsize=8)
    second.tick_params(colors="#777777", labelsize=8)
    second.grid(visible=False)
    if measure_of(metric).better < 0:
        second.invert_yaxis()


def equal_cost_figure(rows: Iterable[Row], metric: str | None = None) -> Figure:
    """Draw what every way to spend the same BitOps gains or loses against RR: a dot per seed, mean and 95 % interval.

    One panel per budget; right of the line is better. Arguments as for ``experiments.equal_cost``.
    """
    rows = [row for row in rows if row["status"] == "ok"]
    metric = metric or metric_of(rows)
    measure = measure_of(metric)
    found = equal_cost(rows, metric)
    runs = table(rows)
    wide = (
        measure.better * measure.factor * runs.pivot_table(index="seed", columns="arm", values=metric, aggfunc="first")
    )
    bases = list(found.base.unique())
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(len(bases), 1, figsize=(7.5, 0.6 + 1.9 * len(bases)), sharex=True, squeeze=False)
        for ax, base in zip(axes[:, 0], bases, strict=True):
            arms = found[(found.base == base) & (found.arm != base)].reset_index(drop=True)
            for y, r in zip(range(len(arms))[::-1], arms.itertuples(), strict=True):
                gains = (wide[r.arm] - wide[base]).dropna()
                color = (
                    COLORS["static"] if r.arm.startswith("static") else COLORS["large" if "RR" in r.arm else "small"]
                )
                ax.plot(gains, np.full(len(gains), y), "o", color=color, alpha=0.3, markersize=4)
                ax.errorbar(
                    measure.factor * r.difference, y - 0.22,
                    xerr=[[measure.factor * (r.difference - r.low)], [measure.factor * (r.high - r.difference)]],
                    fmt="D", color=color, markersize=4, capsize=3,
                )  # fmt: skip
            ax.axvline(0, color="#888888", linewidth=0.8)
            ax.set_yticks(range(len(arms))[::-1], arms.arm, fontsize=8)
            ax.set_ylim(-0.6, len(arms) - 0.5)
            ax.set_title(f"at the cost of {base}", fontsize=9, loc="left")
        axes[-1, 0].set_xlabel(
            f"difference to RR at the same BitOps in {measure.label.split(' (')[0]} {measure.unit}; right is better"
        )
        warning = "smoke scale: not a result. " if runs["scale"].iloc[0] == "smoke" else ""
        title = next((t for t in runs["title"] if t), runs["model"].iloc[0])
        figure.suptitle(f"{warning}{title}", fontsize=10)
        figure.tight_layout()
    plt.close(figure)
    return figure


def predictors_figure(found: Mapping[str, Any]) -> Figure:
    """Draw ``experiments.predictors`` of several experiments, by name: strength with its 95 % interval."""
    names = {"relative_cost": ("cost", "large"), "noise_exposure": ("noise exposure", "small"),
             "share_at_q_min": ("share of steps at q_min", "medium")}  # fmt: skip
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(8, 1.2 + 0.62 * len(found)))
        for y, frame in zip(range(len(found))[::-1], found.values(), strict=True):
            for i, r in enumerate(frame.itertuples()):
                label, color = names[r.predictor]
                ax.errorbar(
                    r.strength, y - 0.2 * (i - 1), xerr=[[max(r.strength - r.low, 0)], [max(r.high - r.strength, 0)]],
                    fmt="o", color=COLORS[color], capsize=2, markersize=5, label=label if y == 0 else None,
                )  # fmt: skip
        ax.axvline(0, color="#888888", linewidth=0.8)
        labels = [textwrap.fill(name, 42) for name in found]
        ax.set_yticks(range(len(found))[::-1], labels, fontsize=8)
        ax.set_ylim(-0.6, len(found) - 0.4)
        ax.set_xlim(-1.05, 1.05)
        ax.set_xlabel("rank correlation with quality (expected sign)")
        ax.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
        figure.tight_layout()
    plt.close(figure)
    return figure


def _quality(ax: Axes, arms: Any, x: str, measure: Measure) -> None:
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


def _worst(arms: Any, measure: Measure, schedules: Any = None) -> Any:
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


def _title(runs: Any, arms: Any) -> str:
    scale = runs["scale"].iloc[0]
    title = next((t for t in runs["title"] if t), runs["model"].iloc[0])
    seeds = f"{runs['seed'].nunique()} seed" + "s" * (runs["seed"].nunique() > 1)
    lost = int(arms.diverged.sum() + arms.failed.sum())
    note = f"; {lost} runs diverged or failed" if lost else ""
    warning = "smoke scale: not a result. " if scale == "smoke" else ""
    return f"{warning}{title}, {scale} scale, {seeds}{note}"


def range_test(found: Any) -> Figure:
    """Draw a ``PrecisionRange``: the share of every seed against bits, their mean, and the threshold."""
    bits = list(found.bits) if found.mode == "continuing" else list(found.bits[:-1])  # f(q_max) is 1 by definition
    shares = np.array(found.shares, dtype=float)[:, : len(bits)]
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(6.4, 3.4))
        ax.axhline(found.threshold, color=COLORS["large"], linewidth=1, label=f"threshold {found.threshold:g}")
        for row in shares:
            ax.plot(bits, row, "o", color=COLORS["static"], markersize=4, alpha=0.5)
        ax.plot(bits, shares.mean(0), color=COLORS["static"], linewidth=1.4, label=f"mean of {len(shares)} seeds")
        if found.q_min in bits:
            ax.axvline(found.q_min, color=COLORS["small"], linestyle=":", label=f"q_min = {found.q_min}")
        what = (
            "share f(q) of the loss reduction\nat q_max"
            if found.mode == "reset"
            else "fall of the loss\n(share of its start)"
        )
        ax.set(xlabel="bits", ylabel=what)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(fontsize=8, loc="lower right")
        figure.suptitle(f"Precision range test, {found.dwell} steps at each precision\n{found.title}", fontsize=9)
        figure.tight_layout()
    plt.close(figure)
    return figure


# where pictures have boxes of their own, and where a model finds some: x1, y1, x2, y2 in pixels, and a word
Boxes = Sequence[tuple[Sequence[float], str]]


def pictures_with_boxes(pictures: Sequence[np.ndarray], rows: Mapping[str, Sequence[Boxes]]) -> Figure:
    """Draw pictures, uint8 (H, W, 3), once per row, with the boxes that each row gives for each of them."""
    colors = [COLORS["medium"], COLORS["large"], COLORS["small"]]
    with plt.rc_context({**STYLE, "axes.grid": False}):
        shape = (len(rows), len(pictures))
        figure, axes = plt.subplots(*shape, figsize=(2.2 * shape[1], 2.3 * shape[0]), squeeze=False)
        for line, (name, boxes), color in zip(axes, rows.items(), colors, strict=False):
            line[0].set_ylabel(name, fontsize=9)
            for ax, picture, here in zip(line, pictures, boxes, strict=True):
                ax.imshow(picture)
                ax.set(xticks=[], yticks=[], frame_on=False)
                for (x1, y1, x2, y2), word in here:
                    ax.add_patch(plt.Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, color=color, linewidth=1.6))
                    ax.text(x1, y1 - 1, word, color=color, fontsize=8, va="bottom")
        figure.tight_layout()
    plt.close(figure)
    return figure


def staircase(bits: Sequence[int] = (2, 3, 4)) -> Figure:
    """Draw the quantiser: value in, value out, on a range from -1 to 1."""
    x = np.linspace(-1, 1, 801)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(bits), figsize=(3.1 * len(bits), 3), sharey=True, squeeze=False)
        for ax, q in zip(axes[0], bits, strict=True):
            n = 2**q - 1
            ax.plot(x, x, color="#999999", linewidth=1)
            ax.plot(x, np.rint((x + 1) / 2 * n) / n * 2 - 1, color=COLORS["small"], linewidth=1.6)
            ax.set_title(f"{q} bits: {n + 1} levels", fontsize=10)
            ax.set_xlabel("value")
        axes[0][0].set_ylabel("quantised value")
        figure.tight_layout()
    plt.close(figure)
    return figure


def training_curve(losses: Sequence[float], bits: Sequence[int]) -> Figure:
    """Draw the training loss over the bits of every step."""
    with plt.rc_context(STYLE):
        figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 4), sharex=True, height_ratios=(2, 1))
        upper.plot(losses, color=COLORS["static"], linewidth=1)
        upper.set_ylabel("training loss")
        lower.step(range(len(bits)), bits, where="post", color=COLORS["medium"])
        lower.set(xlabel="training step", ylabel="bits")
        lower.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.tight_layout()
    plt.close(figure)
    return figure
