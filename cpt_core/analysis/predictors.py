"""What predicts the quality of a schedule before training: numbers and figure.  Paper: section 4.5."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_core.analysis.groups import experiments
from cpt_core.analysis.metrics import measure_of, metric_of
from cpt_core.analysis.quality_cost import at_q_max, tuned
from cpt_core.analysis.runs import table
from cpt_core.analysis.statistics import spearman
from cpt_core.analysis.style import COLORS, STYLE, image_tag
from cpt_core.sweeps.stores import Row

PREDICTORS = {"relative_cost": 1, "noise_exposure": -1, "share_at_q_min": -1}  # name -> expected sign


def predictors(
    rows: Iterable[Row], metric: str | None = None, *, static: bool = False, resamples: int = 2000
) -> pd.DataFrame:
    """Return how well cost, noise exposure and share of steps at q_min predict the quality of an arm before training.

    The rule, written down before the seeds that test it were run:

    - An experiment is one recipe at one q_max; the ten schedules and static q_max take part (``static``: all static
      precisions from q_min on as well), with the seeds that all of them have. It needs ten arms and two seeds.
    - The strength of a predictor is Spearman's rank correlation over arms with mean quality, with the sign turned so
      that the expected direction counts as positive: quality rises with cost, falls with noise and with time at q_min.
    - Seeds and arms are resampled together. A predictor is better than cost in an experiment when the 95 % interval of
      its strength minus that of cost lies above 0, worse when it lies below, else undecided.
    - It is the better predictor of quality when it is better than cost in at least two domains and worse in none.

    Args:
        rows: of one experiment.
        metric: None takes the main one of the task.
        static: see above.
        resamples: of the bootstrap.

    Returns:
        One line per predictor: strength, low, high (95 %), and against cost: difference, difference_low,
        difference_high; verdict "better", "worse" or "undecided"; arms, seeds.

    Raises:
        ValueError: for fewer than ten arms or two seeds, and when all arms are alike.

    Paper: section 4.5 (cost and quality correlate); the other predictors are not in the paper.
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
    runs = at_q_max(table(rows), None)
    if metric not in runs:
        raise ValueError(f"no run has a {metric}: ten arms and two seeds are needed")
    bits = runs["arm"].str.extract(r"^static (\d+)$")[0].astype("Int64")
    kept = (bits >= runs["q_min"]) if static else (bits == runs["q_max"])
    runs = runs[runs["savings"].isin(["large", "medium", "small"]) | kept.fillna(False)]
    wide = runs.pivot_table(index="arm", columns="seed", values=metric, aggfunc="first").dropna(axis=1)
    if len(wide) < 10 or wide.shape[1] < 2:
        raise ValueError(f"ten arms and two seeds are needed, there are {len(wide)} and {wide.shape[1]}")
    values = measure_of(metric).better * wide.to_numpy()
    n, seeds = values.shape
    if np.ptp(values) == 0:
        raise ValueError(f"all arms have the same {metric}; there is nothing to rank")
    first = runs.groupby("arm")[list(PREDICTORS)].first().loc[wide.index]
    xs = first.to_numpy().T * np.array([list(PREDICTORS.values())]).T
    rng = np.random.default_rng(0)
    arms = rng.integers(n, size=(resamples, n))
    chosen = rng.integers(seeds, size=(resamples, 1, seeds))
    quality = values[arms[:, :, None], chosen].mean(-1)
    strength = [spearman(x, values.mean(1)) for x in xs]
    sampled = np.array([spearman(x[arms], quality) for x in xs])
    lines = []
    for i, name in enumerate(PREDICTORS):
        difference = sampled[i] - sampled[0]
        low, high = np.nanpercentile(sampled[i], [2.5, 97.5])
        d_low, d_high = np.nanpercentile(difference, [2.5, 97.5])
        lines.append(
            {
                "predictor": name, "strength": float(strength[i]), "low": low, "high": high,
                "difference": float(strength[i] - strength[0]), "difference_low": d_low, "difference_high": d_high,
                "verdict": "better" if d_low > 0 else "worse" if d_high < 0 else "undecided",
                "arms": n, "seeds": seeds,
            }
        )  # fmt: skip
    return pd.DataFrame(lines)


def predictors_by_title(rows: Iterable[Row]) -> dict[str, pd.DataFrame]:
    """Return ``predictors`` of every experiment in the rows that is large enough, by what was trained."""
    found = {}
    for group in experiments(rows):
        title = next((row["title"] for row in group if row.get("title")), group[0]["spec"]["recipe"]["model"])
        try:
            found[f"{title}, {group[0]['spec']['scale']} scale"] = predictors(group)
        except ValueError:  # too few arms or seeds
            continue
    return found


def predictors_figure(found: Mapping[str, Any]) -> Figure:
    """Draw ``predictors`` of several experiments, by name: strength with its 95 % interval."""
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


def predictors_section(rows: list[Row]) -> list[str]:
    """What predicts the quality of a schedule, over all experiments that are large enough."""
    found = predictors_by_title(rows)
    if not found:
        return []
    words = {"better": " (better than cost)", "worse": " (worse than cost)", "undecided": " (undecided)"}
    lines = [
        f"<li>{html.escape(name)}: "
        + "; ".join(
            f"{r.predictor.replace('_', ' ')} {r.strength:.2f} [{r.low:.2f}, {r.high:.2f}]"
            + ("" if r.predictor == "relative_cost" else words[r.verdict])
            for r in frame.itertuples()
        )
        + "</li>"
        for name, frame in found.items()
    ]
    return [
        "<h2>What predicts the quality of a schedule?</h2>",
        image_tag(predictors_figure(found), "rank correlations of three predictors with quality"),
        f"<ul>{''.join(lines)}</ul>",
    ]


def show_predictors(found: dict[str, pd.DataFrame]) -> None:
    """Print tables of ``predictors`` by name."""
    for name, frame in found.items():
        print(f"{name} ({frame.arms.iloc[0]} arms, {frame.seeds.iloc[0]} seeds)")
        for r in frame.itertuples():
            line = f"  {r.predictor:<15}{r.strength:5.2f} [{r.low:+.2f}, {r.high:+.2f}]"
            if r.predictor != "relative_cost":
                line += f"   minus cost {r.difference:+.2f} [{r.difference_low:+.2f}, {r.difference_high:+.2f}]"
                line += f": {r.verdict}"
            print(line)
