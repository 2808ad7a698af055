"""Quality against cost of schedules: numbers, table, figure.  Paper: sections 4.2 to 4.5, figures 3, 4, 6, 7.

``by_arm`` computes means and costs of the arms, ``pareto`` the arms that no other arm beats, ``figure_3`` draws them
and ``finding`` puts them into a sentence. Values are as stored, so accuracies are shares.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_core.schedules.cost import step_cost
from cpt_core.schedules.profiles import SCHEDULES
from cpt_lab.analysis import paper_numbers
from cpt_lab.analysis.captions import caption, with_smoke_warning
from cpt_lab.analysis.metrics import metric_named, metric_of, plural
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.run_groups import (
    AGGREGATION_NAMES,
    at_q_max,
    quality_cost_groups,
    reduced_gradient_bits,
    with_unique_names,
)
from cpt_lab.analysis.statistics import (
    ALPHA,
    check_one_run_per_seed,
    interval,
    paired,
    spearman,
)
from cpt_lab.analysis.style import (
    COLORS,
    MUTED_COLOR,
    PAPER_COLOR,
    PROFILE_COLORS,
    PROFILE_TEXT,
    SMALL_FONT_SIZE,
    legend_below,
    name_points,
    set_finding,
    subplots,
    write_caption,
)
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.schema import Metric

SAVINGS_GROUPS = ("large", "medium", "small")  # of savings
MIN_SEEDS = 3  # with fewer seeds no comparison is made

# Figures of several q_max share a panel: schedules of 8 bits and more have a dark outline, as in the paper.
OUTLINED_BITS = 8
STATIC_COLORS = (COLORS["static"], "#6B6B6B", "#6B4F2A")  # from the largest q_max down
PROFILE_NAMES = {
    "linear": "linear",
    "cosine": "cosine",
    "rex": "REX",
    "exponential": "exponential",
    "own": "own profile",
}
MARKER_NAMES = {
    "o": "repeated",
    "^": "triangular, vertical mirror",
    "v": "triangular, horizontal mirror",
    "D": "own schedule",
}
GIGA = 1e9  # multiplications of two 32-bit numbers in a GBitOp
PAPER_UNIT = 1e13  # BitOps in what the paper prints as one GBitOp
X_LABELS = {
    "relative_cost": "training cost relative to static {top} (BitOps)",
    "noise_exposure": "noise exposure: mean of 4^-bits relative to static {top}",
}


def by_arm(runs: pd.DataFrame) -> pd.DataFrame:
    """Return mean, standard deviation (n - 1) and n of the main metric per arm of one experiment, with costs.

    ``diverged`` counts the runs that broke and are included in n with the worst value of the task, ``failed`` those
    that are not included and have to be run again (``run_table.table``). Values are as stored: accuracies are shares.

    Raises:
        ValueError: when there are no runs, when they mix data sets, models, scales, presets, recipes or bits of the
            gradients, or when an arm has two runs with one seed.
    """
    metric = metric_of(runs)
    if runs.empty:
        raise ValueError("there are no rows; run the grid first")
    for column in ("dataset", "model", "scale", "preset", "q_min", "recipe"):
        if runs[column].nunique() > 1:
            raise ValueError(
                f"rows mix {column}s: {', '.join(sorted(map(str, runs[column].unique())))}; choose one"
            )
    for q_max, part in runs.groupby("q_max"):
        bits = part["q_grad"].dropna().unique()
        if len(bits) > 1:
            raise ValueError(
                f"rows of q_max {q_max} mix q_grads: {', '.join(map(str, sorted(bits)))}; choose one"
            )
    check_one_run_per_seed(runs, ("q_max", "arm"))
    failed = (runs["status"] == "failed") & ~runs["diverged"]
    groups = runs.assign(failed=failed).groupby(["q_max", "arm"], sort=False)
    shared_values = {
        name: (name, "first")
        for name in ("savings", "relative_cost", "noise_exposure", "share_at_q_min")
    }
    measured = {
        "mean": (metric, "mean"),
        "std": (metric, "std"),
        "n": (metric, "count"),
    }
    counts = {name: (name, "sum") for name in ("diverged", "failed")}
    return groups.agg(**shared_values, **measured, **counts).reset_index()


def on_common_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of one experiment on the seeds that all arms have; all runs if there is no such seed.

    Means over different seeds may differ by their seeds alone. Arms without any value do not count; an arm at another
    q_max is another arm.
    """
    valued = runs[runs[metric_of(runs)].notna()]
    num_arms = len(valued.drop_duplicates(["q_max", "arm"]))
    arms_by_seed = (
        valued.drop_duplicates(["seed", "q_max", "arm"]).groupby("seed").size()
    )
    common_seeds = arms_by_seed.index[arms_by_seed == num_arms]
    common = runs[runs["seed"].isin(common_seeds)]
    return common if len(common) else runs


def pareto(arms: pd.DataFrame, better: int = 1) -> pd.Series:
    """Return which arms of ``by_arm`` no other arm beats by being as cheap and better, or as good and cheaper.

    ``better`` is -1 for a metric of which less is better.
    """
    costs = arms["relative_cost"].to_numpy()
    qualities = better * arms["mean"].to_numpy()
    is_beaten = []
    for cost, quality in zip(costs, qualities, strict=True):
        is_no_worse = (costs <= cost) & (qualities >= quality)
        is_better = (costs < cost) | (qualities > quality)
        is_beaten.append((is_no_worse & is_better).any())
    is_on_front = ~np.array(is_beaten, dtype=bool) & ~np.isnan(qualities)
    return pd.Series(is_on_front, index=arms.index)


def paired_difference(
    runs: pd.DataFrame, a: str, b: str, metric: str | None = None
) -> pd.Series:
    """Return metric(a) - metric(b) by seed, at the largest q_max.

    ``a`` and ``b`` are arms or savings groups ("large", "medium", "small"); ``metric`` None takes the main one.
    """
    metric = metric or metric_of(runs)
    runs = at_q_max(runs, None)
    return paired(runs_of(runs, a), runs_of(runs, b), metric)


def runs_of(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the runs of an arm or of a savings group ("large", "medium", "small").

    Raises:
        ValueError: without any such run.
    """
    part = runs[runs["savings" if name in SAVINGS_GROUPS else "arm"] == name]
    if part.empty:
        raise ValueError(
            f"no rows for {name!r}; there are {', '.join(sorted(runs['arm'].unique()))}"
        )
    return part


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a printable table of the arms of one experiment, by cost, with the paper's numbers.

    Means are over all n seeds of an arm; the Pareto front is that of the seeds that all arms have.
    """
    name = metric_of(runs)
    metric = metric_named(name)
    cost_header = "relative cost"
    if runs["q_max"].nunique() > 1:
        runs = relative_to_largest(runs)
        cost_header = f"cost relative to static {runs['q_max'].max()}"

    arms = by_arm(runs)
    common_arms = by_arm(on_common_seeds(runs))
    keys = ["q_max", "arm"]
    best = common_arms[pareto(common_arms, metric.better)][keys]
    arm_index = pd.MultiIndex.from_frame(arms[keys])
    is_on_front = arm_index.isin(pd.MultiIndex.from_frame(best))

    cells = {
        "arm": arms.arm,
        "savings": arms.savings,
        "q_max": arms.q_max,
        cost_header: arms.relative_cost.map("{:.3f}".format),
        "noise exposure": arms.noise_exposure.map("{:.0f}".format),
        f"{name} {metric.unit}".rstrip(): metric.text(arms["mean"]),
        "std": metric.text(arms["std"]),
        "n": arms.n,
        "paper": _printed(runs, arms),
        "Pareto front": np.where(is_on_front, "yes", ""),
        "diverged": arms.diverged,
        "failed": arms.failed,
    }
    table = pd.DataFrame(cells)
    return table.iloc[arms.relative_cost.argsort(kind="stable")]


def _printed(runs: pd.DataFrame, arms: pd.DataFrame) -> list[str]:
    """Return the number that the paper prints for every arm, with its place; or that it prints none."""
    first = runs.iloc[0]
    artefact = EXPERIMENTS[first["task"]].artefact
    numbers = paper_numbers.experiment_numbers(runs, artefact)
    printed_values = {}
    for p in numbers.drop_duplicates(["arm", "q_max"]).itertuples():
        printed_values[p.arm, p.q_max] = f"{p.value:g} ({p.place})"
    unknown = "not in the paper"
    if first["scale"] == "paper":
        unknown = "drawn, no number printed"
    return [printed_values.get((r.arm, r.q_max), unknown) for r in arms.itertuples()]


def finding(runs: pd.DataFrame) -> str:
    """Return the finding of an experiment of quality against cost in a sentence, one line per aggregation.

    With fewer than ``MIN_SEEDS`` seeds no comparison is made. Quality rises or falls with cost if the rank correlation
    over the schedules of the largest q_max has one sign: the 95 % interval of its mean over seeds excludes 0. That is
    about these schedules; ``predictors.rank_correlation`` tests it for schedules in general. A schedule exceeds static
    q_max, or falls below it, if the interval of its differences by seed excludes 0; these intervals hold 1 - 0.05 / the
    number of schedules (Bonferroni).
    """
    parts = sorted(runs.groupby("aggregation"), key=lambda part: part[0])
    if len(parts) == 1:
        return _finding(runs)
    return "\n".join(
        f"{AGGREGATION_NAMES[kind]}: {_finding(part)}" for kind, part in parts
    )


def _finding(runs: pd.DataFrame) -> str:
    tops = sorted(runs["q_max"].unique(), reverse=True)
    comparisons = [_against_static(at_q_max(runs, top)) for top in tops]
    seeds = comparisons[0].seeds
    if 0 <= seeds < MIN_SEEDS:
        return f"{plural(seeds, 'seed')}: no comparison"

    with_schedules = [c for c in comparisons if c.schedules]
    words = "; ".join(c.words for c in with_schedules or comparisons[:1])
    if any(c.schedules > 1 and c.seeds >= MIN_SEEDS for c in comparisons):
        words += " (corrected for several comparisons)"
    relation = _relation(runs) if comparisons[0].schedules > 1 else ""
    if relation:
        return f"{relation}; {words}"
    return f"{words[0].upper()}{words[1:]}"


def _relation(runs: pd.DataFrame) -> str:
    """Return the relation of quality and cost over the schedules of the largest q_max; "" for fewer than three."""
    name = metric_of(runs)
    schedules = at_q_max(runs, None)
    schedules = schedules[schedules["savings"] != "static"]
    check_one_run_per_seed(schedules)
    wide = schedules.pivot_table(index="seed", columns="arm", values=name).dropna()
    if wide.shape[1] < 3:
        return ""
    cost = schedules.groupby("arm")["relative_cost"].first()[wide.columns]
    quality = metric_named(name).better * wide.to_numpy(dtype=float)
    strengths = spearman(cost.to_numpy(dtype=float), quality)
    _, low, high = interval(strengths[~np.isnan(strengths)])
    if low > 0:
        return "Of these schedules the costlier are better"
    if high < 0:
        return "Of these schedules the costlier are worse"
    return "No clear relation between cost and quality"


class _Comparison(NamedTuple):
    """Comparison of the schedules of one q_max with static q_max."""

    words: str
    seeds: int  # seeds that every schedule shares with static q_max; -1 if nothing can be compared
    schedules: int  # number of schedules


def _against_static(runs: pd.DataFrame) -> _Comparison:
    """Compare the schedules of one q_max with static q_max, by seed."""
    name, top = metric_of(runs), runs["q_max"].iloc[0]
    valued = runs[runs[name].notna()]
    static = valued[valued["arm"] == f"static {top}"]
    schedules = [
        part for arm, part in valued[valued["savings"] != "static"].groupby("arm")
    ]
    if not schedules:
        return _Comparison(f"static precision alone ran at q_max {top}", -1, 0)
    if static.empty:
        return _Comparison(f"static {top} did not run", -1, len(schedules))
    better = metric_named(name).better
    differences = [better * paired(part, static, name) for part in schedules]
    seeds = min(len(values) for values in differences)
    if seeds < MIN_SEEDS:
        return _Comparison(
            f"static {top}: {plural(seeds, 'seed')}, no comparison",
            seeds,
            len(schedules),
        )
    bounds = [interval(values, ALPHA / len(schedules)) for values in differences]
    above = sum(low > 0 for _, low, _ in bounds)
    below = sum(high < 0 for _, _, high in bounds)
    exceed = "exceeds" if above == 1 else "exceed"
    fall = "falls" if below == 1 else "fall"
    words = (
        f"{above} of {plural(len(schedules), 'schedule')} {exceed} static {top}, "
        f"{below} {fall} below"
    )
    return _Comparison(words, seeds, len(schedules))


def relative_to_largest(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with costs and noise exposure relative to static precision at their largest q_max.

    In rows they are relative to static precision at the run's own q_max. Costs are converted by the BitOps of both.
    """
    full, top = full_bitops(runs), runs["q_max"].max()
    cost, noise = {}, {}
    for q_max in runs["q_max"].unique():
        cost[q_max] = full[q_max] / full[top]
        noise[q_max] = 4.0 ** (top - q_max)
        if np.isnan(cost[q_max]):
            cost[q_max] = float(step_cost(q_max, q_max) / step_cost(top, top))
    converted = {
        "relative_cost": runs["relative_cost"] * runs["q_max"].map(cost).astype(float),
        "noise_exposure": runs["noise_exposure"]
        * runs["q_max"].map(noise).astype(float),
    }
    return runs.assign(**converted)


def full_bitops(runs: pd.DataFrame) -> pd.Series:
    """Return the BitOps of training at static q_max, by q_max; NaN if no run has BitOps."""
    return (
        (runs["bitops"] / runs["relative_cost"])
        .astype(float)
        .groupby(runs["q_max"].to_numpy())
        .median()
    )


def figure_3(
    runs: pd.DataFrame, *, xs: Sequence[str] = ("relative_cost",), front: bool = False
) -> Figure:
    """Draw quality against cost, one point per schedule: mean over seeds, bar = one standard deviation.

    Colours are profiles, shapes repeated and triangular schedules; schedules of several q_max share a panel, and each
    aggregation has a panel. Arms are drawn on the seeds that all arms of their q_max have, if there are any. Static
    precisions are joined by a line. The paper's numbers are grey: a difference to static precision is a bar above or
    below the measured static baseline, at the cost of the measured schedules. Up is better in every figure: the axis of
    perplexities is reversed. The title is ``finding``.

    Args:
        runs: of one experiment, which may have several q_max and both aggregations.
        xs: one panel for each of "relative_cost", "noise_exposure".
        front: join the arms that no other arm beats in both cost and quality (the Pareto front) by a dotted line;
            with fewer than ``MIN_SEEDS`` seeds there is no front.

    Paper: figures 3, 4 (detection), 6 (graphs) and 7 (language).
    Differs: the static line and the panel against noise exposure are ours.
    """
    metric = metric_named(metric_of(runs))
    common = _on_common_seeds(runs)
    panels = _panels(common, metric, xs)
    rows, columns = (
        (len(panels) // len(xs), len(xs)) if len(xs) > 1 else (1, len(panels))
    )
    size = (6.4 if columns == 1 else 5.4 * columns, 4.5 * rows)
    with subplots(rows, columns, figsize=size, sharey=True) as (figure, axes):
        _label_marks(axes[0][0], panels)
        for ax, panel in zip(axes.flat, panels, strict=True):
            _draw_panel(ax, panel, metric)
            if (
                front
                and panel.x == "relative_cost"
                and panel.arms["n"].min() >= MIN_SEEDS
            ):
                _draw_front(ax, panel.arms, metric)
        if metric.better < 0:
            axes[0][0].invert_yaxis()  # shared
        for line in axes:
            line[0].set_ylabel(metric.label)
        legend_below(figure, axes[0][0])
        set_finding(figure, with_smoke_warning(finding(common), runs))
        encoding = "points are means over seeds, bars one standard deviation"
        write_caption(figure, f"{caption(common, runs)}; {encoding}")
        for ax, panel in zip(axes.flat, panels, strict=True):
            named_arms = panel.arms[
                (panel.arms.savings != "static") & panel.arms["mean"].notna()
            ]
            colors = [PROFILE_TEXT[_profile(arm)] for arm in named_arms.arm]
            name_points(
                ax,
                list(named_arms.arm),
                named_arms[panel.x],
                named_arms["mean"],
                colors,
            )
    return figure


class _Panel(NamedTuple):
    """A panel of figure 3: arms in drawn units over one measure of cost."""

    name: str  # of the aggregation; "" if the figure has one aggregation
    x: str  # column of the horizontal axis
    # costs are relative to static precision at the largest q_max, as in ``arms``
    runs: pd.DataFrame
    arms: pd.DataFrame  # of ``by_arm``, with mean and std in drawn units


def _on_common_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs on the seeds that all arms of their q_max and aggregation have."""
    parts = [
        on_common_seeds(part)
        for _, part in runs.groupby(["q_max", "aggregation"], sort=False)
    ]
    return pd.concat(parts) if parts else runs


def _panels(runs: pd.DataFrame, metric: Metric, xs: Sequence[str]) -> list[_Panel]:
    if runs["recipe_but_aggregation"].nunique() != 1:
        by_arm(runs)  # raises: the message says what is mixed
    several = runs["aggregation"].nunique() > 1
    panels = []
    for kind, part in sorted(runs.groupby("aggregation"), key=lambda part: part[0]):
        converted = relative_to_largest(part)
        arms = by_arm(converted)
        arms = arms.assign(
            mean=metric.factor * arms["mean"], std=metric.factor * arms["std"]
        )
        name = AGGREGATION_NAMES[kind] if several else ""
        panels += [_Panel(name, x, converted, arms) for x in xs]
    return panels


def _draw_panel(ax: Axes, panel: _Panel, metric: Metric) -> None:
    arms, x, top = panel.arms, panel.x, panel.runs["q_max"].max()
    worst = _worst(arms, metric)
    for color, (_, static) in zip(
        STATIC_COLORS,
        _by_q_max(arms[(arms.savings == "static") & ~worst]),
        strict=False,
    ):
        _draw_static(ax, static.sort_values(x), x, color)
    for r in arms[(arms.savings != "static") & arms["mean"].notna()].itertuples():
        color = PROFILE_COLORS[_profile(r.arm)]
        edge = COLORS["static"] if r.q_max >= OUTLINED_BITS else color
        std = r.std if r.n > 1 else None
        ax.errorbar(
            [getattr(r, x)],
            [r.mean],
            None if std is None else [std],
            fmt=_marker(r.arm),
            color=color,
            markersize=7.5,
            markeredgecolor=edge,
            markeredgewidth=1.1,
            capsize=2,
            elinewidth=1,
            zorder=3,
        )
    if worst.any():
        several = arms.q_max.nunique() > 1
        names = []
        for r in arms[worst].itertuples():
            bits = f"{r.arm} bits (q_max {r.q_max})" if several else f"{r.arm} bits"
            names.append(f"{bits} {r.mean:.0f} {metric.unit}".rstrip())
        ax.set_title(
            f"below the axis: {', '.join(names)}", loc="right", fontsize=SMALL_FONT_SIZE
        )
    if panel.name:
        ax.set_title(panel.name, loc="left", fontsize=9)
    ax.set_xlabel(X_LABELS.get(x, x).format(top=top))
    if x == "relative_cost":
        _draw_printed(ax, panel, metric)
        _draw_bitops(ax, panel)
    if x == "noise_exposure":
        ax.set_xscale("log", base=2)
    ax.margins(x=0.1, y=0.12)


def _by_q_max(arms: pd.DataFrame) -> list[tuple[int, pd.DataFrame]]:
    return sorted(arms.groupby("q_max"), key=lambda part: -part[0])


def _draw_static(ax: Axes, static: pd.DataFrame, x: str, color: str) -> None:
    std = static["std"].where(static["n"] > 1).fillna(0)
    ax.errorbar(
        static[x],
        static["mean"],
        std,
        color=color,
        marker="s",
        markersize=10,
        linewidth=1,
        capsize=2,
        zorder=1,
    )
    for r in static.itertuples():
        bits = r.arm.split()[-1]  # in the point itself: nothing can lie over it
        ax.text(
            getattr(r, x),
            r.mean,
            bits,
            color="white",
            fontsize=SMALL_FONT_SIZE,
            ha="center",
            va="center_baseline",
            zorder=4,
        )


def _draw_front(ax: Axes, arms: pd.DataFrame, metric: Metric) -> None:
    best = arms[pareto(arms, metric.better) & ~_worst(arms, metric)].sort_values(
        "relative_cost"
    )
    ax.step(
        best["relative_cost"],
        best["mean"],
        where="post",
        color=PAPER_COLOR,
        linestyle=":",
        zorder=0.5,
        label="Pareto front",
    )


def _profile(arm: str) -> str:
    profile = SCHEDULES[arm].profile if arm in SCHEDULES else "own"
    return profile if profile in PROFILE_COLORS else "own"


def _marker(arm: str) -> str:
    if arm not in SCHEDULES:
        return "D"
    if not SCHEDULES[arm].triangular:
        return "o"
    return "^" if SCHEDULES[arm].mirror == "vertical" else "v"


def _label_marks(ax: Axes, panels: Sequence[_Panel]) -> None:
    """Add the meaning of the drawn colours, shapes and outlines to the legend."""
    arms = pd.concat([panel.arms for panel in panels])
    schedules = arms[arms.savings != "static"]
    look: dict[str, Any] = {"linestyle": "none", "markersize": 7.5}
    for profile, name in PROFILE_NAMES.items():
        if profile in {_profile(arm) for arm in schedules.arm}:
            ax.plot(
                [], [], marker="o", color=PROFILE_COLORS[profile], label=name, **look
            )
    for marker, name in MARKER_NAMES.items():
        if marker in {_marker(arm) for arm in schedules.arm}:
            ax.plot([], [], marker=marker, color=MUTED_COLOR, label=name, **look)
    if schedules.q_max.nunique() > 1:
        for q_max in sorted(schedules.q_max.unique(), reverse=True):
            outlined = q_max >= OUTLINED_BITS
            edge = COLORS["static"] if outlined else "#BBBBBB"
            name = f"q_max {q_max}: {'dark' if outlined else 'no'} outline"
            ax.plot(
                [],
                [],
                marker="o",
                color="#BBBBBB",
                markeredgecolor=edge,
                label=name,
                **look,
            )
    static = _by_q_max(arms[arms.savings == "static"])
    gradient_bits = panels[0].runs.groupby("q_max")["q_grad"].first()
    for color, (q_max, _) in zip(STATIC_COLORS, static, strict=False):
        name = "static precision (bits)"
        if len(static) > 1:
            name += f", gradients of {gradient_bits[q_max]} bits"
        ax.plot(
            [], [], marker="s", color=color, linewidth=1, markersize=7.5, label=name
        )


def _draw_bitops(ax: Axes, panel: _Panel) -> None:
    """Add a second axis on top: the cost in GBitOps."""
    full = full_bitops(panel.runs)[panel.runs["q_max"].max()]
    if np.isnan(full):
        return
    if panel.runs["scale"].iloc[0] == "paper":
        factor = full / PAPER_UNIT
        unit = "10^13 BitOps, printed as GBitOps in the paper"
    else:
        factor = full / GIGA
        unit = "GBitOps"

    def to_bitops(relative_cost: Any) -> Any:
        return relative_cost * factor

    def from_bitops(bitops: Any) -> Any:
        return bitops / factor

    axis = ax.secondary_xaxis("top", functions=(to_bitops, from_bitops))
    axis.set_xlabel(f"training cost in {unit}", fontsize=9)
    axis.tick_params(labelsize=SMALL_FONT_SIZE + 0.5)


def _draw_printed(ax: Axes, panel: _Panel, metric: Metric) -> None:
    """Draw the paper's numbers in grey: differences to static precision, values, and costs at paper scale."""
    lines = paper_numbers.figure_numbers(panel.runs)
    differences = lines[
        (lines["minus"] == "static")
        & (lines["metric"] == metric.name)
        & (lines["unit"] == "points")
    ]
    for p in differences.itertuples():
        _draw_difference(ax, panel.arms, p)
    if lines["own_data"].all():
        return
    points = _printed_values(lines, panel.arms, metric)
    if points:
        ax.plot(
            *zip(*points, strict=True),
            "x",
            color=PAPER_COLOR,
            markersize=8,
            markeredgewidth=2,
            label="paper: quality",
        )
    costs = _printed_costs(lines, full_bitops(panel.runs)[panel.runs["q_max"].max()])
    if costs:
        look: dict[str, Any] = {
            "color": PAPER_COLOR,
            "markersize": 8,
            "clip_on": False,
            "label": "paper: printed costs",
        }
        ax.plot(
            costs, [1.0] * len(costs), "v", transform=ax.get_xaxis_transform(), **look
        )


def _printed_values(
    lines: pd.DataFrame, arms: pd.DataFrame, metric: Metric
) -> list[tuple[float, float]]:
    """Return (cost, quality) of the arms with a quality printed in the paper."""
    points = []
    for p in lines[
        (lines["minus"] == "") & (lines["metric"] == metric.name)
    ].itertuples():
        matching_arms = arms[(arms.arm == p.arm) & (arms.q_max == p.q_max)]
        points += [(cost, p.value) for cost in matching_arms["relative_cost"]]
    return points


def _printed_costs(lines: pd.DataFrame, full: float) -> list[float]:
    """Return the costs printed in the paper, relative to static q_max with ``full`` BitOps."""
    bitops = lines.loc[lines["metric"] == "bitops", "value"]
    saved = lines.loc[lines["metric"] == "saved", "value"]
    return sorted({*(PAPER_UNIT * bitops / full), *(1 - saved / 100)})


def _draw_difference(ax: Axes, arms: pd.DataFrame, p: Any) -> None:
    """Draw a printed difference to static precision as a bar from the measured static baseline, if both arms ran."""
    q_max = arms.q_max.max() if np.isnan(p.q_max) else int(p.q_max)
    q_max_arms = arms[arms.q_max == q_max]
    static = q_max_arms[q_max_arms.arm == f"static {q_max}"]["mean"]
    compared_arms = q_max_arms[
        (q_max_arms.arm == p.arm) | (q_max_arms.savings == p.arm)
    ]
    if static.empty or compared_arms.empty or static.isna().any():
        return
    level, x = static.iloc[0], compared_arms["relative_cost"].mean()
    low, high = level + p.value, level + (p.value if np.isnan(p.to) else p.to)
    name = f"{p.arm} savings" if p.arm in SAVINGS_GROUPS else p.arm
    where = f"paper, on its own data ({p.data})" if p.own_data else "paper"
    label = f"{where}: {name} minus static {q_max}"
    if low == high:
        ax.plot(
            [x],
            [low],
            marker="_",
            color=PAPER_COLOR,
            linestyle="none",
            markersize=16,
            markeredgewidth=4,
            label=label,
        )
    else:
        ax.plot(
            [x, x],
            [low, high],
            color=PAPER_COLOR,
            alpha=0.6,
            linewidth=9,
            solid_capstyle="butt",
            label=label,
        )


def _worst(arms: pd.DataFrame, metric: Metric) -> pd.Series:
    """Return the static precisions that fail to train; they are named, not drawn, to keep the scale of the axis."""
    schedules = arms[arms.savings != "static"]
    means = (schedules if len(schedules) else arms)["mean"]
    if metric.better > 0:
        limit = means.min() - 15
    else:
        value_range = means.max() - means.min()
        limit = 1.15 * means.min() + 1.5 * value_range
    is_beyond = metric.better * arms["mean"] < metric.better * limit
    return (arms.savings == "static") & is_beyond


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield figure and table of every recipe with all its q_max, the largest experiments first."""
    groups = with_unique_names(recipe_groups(runs))
    for name, group in sorted(groups, key=_sort_key):
        figure = None
        if group["arm"].nunique() > 1:
            xs = ("relative_cost", "noise_exposure")
            figure = figure_3(group, xs=xs, front=True)
        table = summary(group)
        constant_values = {
            "paper": "not in the paper",
            "std": "–",
            "failed": 0,
            "q_max": group["q_max"].iloc[0],
        }
        constant_columns = [
            column
            for column, value in constant_values.items()
            if (table[column] == value).all()
        ]
        alt = f"{metric_of(group)} against cost"
        yield Section(name, (), figure, alt, table.drop(columns=constant_columns))


def recipe_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the experiments of quality against cost with all their q_max."""
    parts = quality_cost_groups(runs)
    if not parts:
        return []
    pooled = pd.concat(parts)
    columns = [pooled[name] for name in ("recipe", "preset", "scale")]
    columns.append(reduced_gradient_bits(pooled))
    return [part for _, part in pooled.groupby(columns, sort=False)]


def _sort_key(named_group: tuple[str, pd.DataFrame]) -> tuple[bool, int]:
    group = named_group[1]
    return group["scale"].iloc[0] != "paper", -group["arm"].nunique()
