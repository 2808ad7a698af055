"""FP-Agg compared with Q-Agg: numbers, table, figure.  Paper: section 4.3, figure 5."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_lab.analysis.captions import caption, with_smoke_warning
from cpt_lab.analysis.metrics import plural
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.run_groups import (
    AGGREGATION_NAMES,
    aggregation_groups,
    with_unique_names,
)
from cpt_lab.analysis.statistics import interval, paired
from cpt_lab.analysis.style import (
    COLORS,
    legend_below,
    set_finding,
    subplots,
    write_caption,
)

MIN_SEEDS = 3  # with fewer seeds no comparison is made
AGGREGATION_COLORS = {"fp": COLORS["small"], "quantized": COLORS["large"]}


class _Split(NamedTuple):
    """Nodes whose accuracy is compared."""

    name: str  # in labels
    column: str  # of the accuracy in a table of runs
    evaluation: str  # key of the accuracy in an evaluation


_VALIDATION = _Split("validation", "valid", "valid")
_TEST = _Split("test", "accuracy", "test")


def _split(runs: pd.DataFrame) -> _Split:
    """Return the validation nodes, as in the paper, or the test nodes where a finished run has no others."""
    finished = runs.loc[runs["status"] == "ok", "valid"]
    return _VALIDATION if len(finished) and finished.notna().all() else _TEST


def aggregation_difference(
    runs: pd.DataFrame, metric: str = "accuracy"
) -> pd.DataFrame:
    """Return metric(Q-Agg) - metric(FP-Agg) for every arm and seed that both have: columns arm, seed, difference.

    All runs must belong to one recipe; only their aggregation may differ.

    Paper: section 4.3 (figure 5).
    """
    for column in ("dataset", "model", "scale", "q_max"):
        if runs[column].nunique() > 1:
            raise ValueError(
                f"rows mix {column}s: {', '.join(sorted(map(str, runs[column].unique())))}; choose one"
            )
    kinds = sorted(runs["aggregation"].unique())
    if not {"fp", "quantized"} <= set(kinds):
        raise ValueError(
            f"rows of both aggregations are needed, there are: {', '.join(kinds) or 'none'}"
        )
    differences_by_arm = {
        arm: paired(
            arm_runs[arm_runs["aggregation"] == "quantized"],
            arm_runs[arm_runs["aggregation"] == "fp"],
            metric,
        )
        for arm, arm_runs in runs.groupby("arm")
    }
    return (
        pd.concat(differences_by_arm, names=["arm", "seed"])
        .rename("difference")
        .reset_index()
    )


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a printable table of the differences of every arm, in points; runs as for ``aggregation_difference``."""
    split = _split(runs)
    points = (
        aggregation_difference(runs, split.column)
        .groupby("arm")["difference"]
        .agg(["mean", "std", "count"])
    )
    stds = ["–" if np.isnan(std) else f"{100 * std:.2f}" for std in points["std"]]
    num_diverged = runs.groupby("arm")["diverged"].sum().reindex(points.index)
    cells = {
        "model": runs["model"].iloc[0],
        "arm": points.index,
        f"Q-Agg minus FP-Agg, points of {split.name} accuracy": [
            f"{100 * mean:+.2f}" for mean in points["mean"]
        ],
        "std": stds,
        "seeds": points["count"].to_numpy(),
        "diverged": num_diverged.to_numpy(),
    }
    return pd.DataFrame(cells)


def finding(runs: pd.DataFrame, bits: int = 8) -> str:
    """Return a sentence that compares Q-Agg with FP-Agg at a static precision, by seed.

    They differ when the 95 % interval of the differences excludes 0; below ``MIN_SEEDS`` seeds no comparison is made.
    """
    differences = aggregation_difference(runs, _split(runs).column)
    points = 100 * differences[differences["arm"] == f"static {bits}"]["difference"]
    if len(points) < MIN_SEEDS:
        return f"{plural(len(points), 'seed')}: no comparison"
    mean, low, high = interval(points)
    if low <= 0 <= high:
        return f"No clear difference between Q-Agg and FP-Agg at {bits} bits"
    return f"Q-Agg {'gains' if mean > 0 else 'loses'} {abs(mean):.1f} points against FP-Agg at {bits} bits"


def figure_5(runs: pd.DataFrame, bits: int = 8) -> Figure:
    """Draw the learning curves of FP-Agg and Q-Agg, and the paired difference of every seed.

    Both panels show the accuracy on validation nodes, as in the paper; on test nodes if runs have no others.

    Args:
        runs: of one recipe with both aggregations.
        bits: static precision of the curves; the right panel shows all arms that both aggregations have.

    Paper: figure 5.
    Differs: the panel of paired differences is ours.
    """
    with subplots(1, 2, figsize=(10, 3.8)) as (figure, axes):
        split = _split(runs)
        _curves(axes[0, 0], runs, bits, split)
        _differences(axes[0, 1], aggregation_difference(runs, split.column), split)
        legend_below(figure, axes[0, 0])
        set_finding(figure, with_smoke_warning(finding(runs, bits), runs))
        write_caption(figure, caption(runs))
    return figure


def _curves(ax: Axes, runs: pd.DataFrame, bits: int, split: _Split) -> None:
    arm_runs = runs[runs["arm"] == f"static {bits}"]
    for kind, color in AGGREGATION_COLORS.items():
        name = AGGREGATION_NAMES[kind]
        kind_runs = arm_runs[arm_runs["aggregation"] == kind]
        finished = kind_runs.loc[kind_runs["status"] == "ok", "evaluations"]
        curves = [_learning_curve(evaluations, split) for evaluations in finished]

        num_diverged = int(kind_runs["diverged"].sum())
        label = f"{name}, static {bits} bits"
        if num_diverged:
            label += f" ({num_diverged} of {len(kind_runs)} diverged)"
        if not curves and not num_diverged:
            raise ValueError(f"no finished run of static {bits} with {name}")
        if not curves:
            ax.plot([], [], color=color, label=label)
            continue

        steps = np.array(curves[0])[:, 0]
        values = np.array([[value for _, value in curve] for curve in curves])
        ax.plot(steps, values.mean(0), color=color, label=label, linewidth=1.4)
        ax.fill_between(
            steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0
        )
    ax.set(xlabel="training step", ylabel=f"{split.name} accuracy (%)")


def _learning_curve(
    evaluations: list[dict[str, Any]], split: _Split
) -> list[tuple[int, float]]:
    """Return (step, accuracy in percent) of every evaluation."""
    return [(e["step"], 100 * e[split.evaluation]["accuracy"]) for e in evaluations]


def _differences(ax: Axes, differences: pd.DataFrame, split: _Split) -> None:
    arms = sorted(
        differences["arm"].unique(), key=lambda a: (not a.startswith("static"), a)
    )
    for x, arm in enumerate(arms):
        values = 100 * differences[differences["arm"] == arm]["difference"].to_numpy()
        ax.plot(
            np.full(len(values), x),
            values,
            "o",
            color=COLORS["static"],
            markersize=4,
            alpha=0.6,
        )
        ax.plot(
            [x - 0.2, x + 0.2],
            [values.mean()] * 2,
            color=COLORS["static"],
            linewidth=1.6,
        )
    ax.axhline(0, color="#888888", linewidth=0.8)
    ax.set_xticks(range(len(arms)), arms)
    ax.set_xlim(-0.8, len(arms) - 0.2)
    ax.set_ylabel(f"Q-Agg minus FP-Agg ({split.name}, points)")


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield figure 5 of every recipe that was run with both aggregations at static q_max."""
    for name, group in with_unique_names(aggregation_groups(runs)):
        yield Section(
            f"Figure 5: {name}",
            (),
            figure_5(group, int(group["q_max"].iloc[0])),
            f"{_split(group).name} accuracy with FP-Agg and Q-Agg",
            summary(group),
        )
