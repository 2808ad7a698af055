"""FP-Agg against Q-Agg: numbers, figure, table.  Paper: section 4.3, figure 5."""

from __future__ import annotations

import html
from collections.abc import Iterable

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_core.analysis.groups import experiment_name
from cpt_core.analysis.runs import table
from cpt_core.analysis.style import COLORS, STYLE, image_tag
from cpt_core.sweeps.stores import Row


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


def aggregation_section(rows: list[Row]) -> list[str]:
    """Figure 5 for every recipe that was run with both aggregations at static q_max."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        spec = row["spec"]
        recipe = {k: v for k, v in spec["recipe"].items() if k != "aggregation"}
        if row["status"] == "ok" and spec["arm"] == f"static {spec['q_max']}" and "aggregation" in spec["recipe"]:
            groups.setdefault(f"{recipe} {spec['q_max']} {spec['scale']}", []).append(row)
    parts = []
    for group in groups.values():
        if len({row["spec"]["recipe"]["aggregation"] for row in group}) == 2:
            d = 100 * aggregation_difference(group)["difference"]
            name = experiment_name(group).replace(" (FP-Agg)", "").replace(" (Q-Agg)", "")
            figure = figure_5(group, group[0]["spec"]["q_max"])
            parts.append(
                f"<h2>Figure 5: {html.escape(name)}</h2>"
                f"{image_tag(figure, 'validation accuracy with FP-Agg and Q-Agg')}"
                f"<p>Q-Agg minus FP-Agg, test accuracy at the end: {d.mean():+.2f} +- {d.std():.2f} points "
                f"({len(d)} seeds).</p>"
            )
    return parts


def aggregation_difference(rows: Iterable[Row], metric: str = "accuracy") -> pd.DataFrame:
    """Return metric(Q-Agg) - metric(FP-Agg) for every arm and seed that both have: columns arm, seed, difference.

    Rows must belong to one recipe but for the aggregation.

    Paper: section 4.3 (figure 5).
    """
    runs = table(rows)
    for column in ("dataset", "model", "scale", "q_max"):
        if runs[column].nunique() > 1:
            raise ValueError(f"rows mix {column}s: {', '.join(sorted(map(str, runs[column].unique())))}; choose one")
    wide = runs.pivot_table(index=["arm", "seed"], columns="aggregation", values=metric, aggfunc="first")
    if not {"fp", "quantized"} <= set(wide.columns):
        raise ValueError(f"rows of both aggregations are needed, there are: {', '.join(wide.columns) or 'none'}")
    difference = (wide["quantized"] - wide["fp"]).dropna()
    return difference.rename("difference").reset_index()
