"""Critical learning periods: numbers, figure and table.  Paper: section 5, figure 8, table 1."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_core.analysis import metrics
from cpt_core.analysis.equal_cost import interval_text
from cpt_core.analysis.groups import experiment_name, without_length
from cpt_core.analysis.metrics import measure_of, metric_of
from cpt_core.analysis.runs import table
from cpt_core.analysis.statistics import interval
from cpt_core.analysis.style import COLORS, STYLE, image_tag
from cpt_core.paths import paper_dir
from cpt_core.sweeps.stores import Row


def deficit_experiments(rows: Iterable[Row]) -> list[list[Row]]:
    """Split off the rows of critical-period experiments, one list for each: one recipe but for its length."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["spec"]["schedule"]["kind"] == "deficit":
            groups.setdefault(without_length(row), []).append(row)
    return sorted(groups.values(), key=lambda rows: rows[0]["spec"]["scale"] != "paper")


def deficits(rows: Iterable[Row], metric: str | None = None) -> pd.DataFrame:
    """Return one line per arm of a critical-period experiment, each compared with its control, by seed.

    The control of an arm is the training of the same length, with the same learning rates, at q_max throughout.

    Args:
        rows: of one such experiment (``deficit_experiments``).
        metric: None takes the main one of the task.

    Returns:
        Columns: experiment ("length": low steps at the start make training longer; "window": they lie within a fixed
        length), arm, recipe (as in ``table``), place ("none", "start", "inside", "end"), start, stop, total (steps);
        mean, std, n and diverged runs; difference to the control with low and high (95 %, paired), worse (seeds below
        the control); paper_arm, the name in the paper's table 1.

    Paper: section 5, figure 8, table 1.
    """
    rows = list(rows)
    metric = metric or metric_of(rows)
    runs = table(rows)
    if metric not in runs:
        runs[metric] = float("nan")
    spans = [row["spec"]["schedule"].get("windows", [None, None]) for row in rows]
    if any(len(s) > 1 for s in spans):
        raise ValueError("rows of deficits with at most one window are needed")
    runs["start"] = [s[0][0] if s else 0 for s in spans]
    runs["stop"] = [s[0][1] if s else 0 for s in spans]
    runs["total"] = [row["spec"]["schedule"]["total_steps"] for row in rows]
    better = measure_of(metric).better
    families = list(runs.groupby("recipe", sort=False))
    is_window = {key: bool(((f.start > 0) & (f.stop < f.total)).any()) for key, f in families}
    # steps after a deficit at the start: those of a training without one, shared by most of these families
    unharmed = {int(f.total.iloc[0]) for _, f in families if (f.stop == 0).any()}
    clean = Counter(int(f.total.iloc[0] - max(f.stop[f.start == 0])) for key, f in families if not is_window[key])
    after = max(clean, key=lambda n: (n in unharmed, clean[n], n)) if clean else 0
    lines = []
    for key, family in families:
        total = int(family.total.iloc[0])
        control = family[family.stop == 0].groupby("seed")[metric].first()
        at_start = int(max(family.stop[family.start == 0], default=0))
        length = not is_window[key] and total - at_start == after
        for arm, part in family.groupby("arm", sort=False):
            start, stop = int(part.start.iloc[0]), int(part.stop.iloc[0])
            values = part.groupby("seed")[metric].first()
            difference = (values - control).dropna() if stop else values.iloc[:0]
            mean, low, high = interval(difference)
            place = "none" if not stop else "start" if not start else "end" if stop == total else "inside"
            experiments_of = ["length"] if length else ["window"]
            if place == "none" and total == after and "length" not in experiments_of:
                experiments_of.append("length")  # training without deficit serves both
            for experiment in experiments_of:
                lines.append(
                    {
                        "experiment": experiment, "arm": arm, "recipe": key, "place": place, "start": start,
                        "stop": stop, "total": total, "mean": values.mean(), "std": values.std(),
                        "n": int(values.count()),
                        "diverged": int((part.status == "diverged").sum()), "difference": mean, "low": low,
                        "high": high, "worse": int((better * difference < 0).sum()),
                        "paper_arm": _paper_arm(experiment, place, str(arm), total == after),
                    }
                )  # fmt: skip
    out = pd.DataFrame(lines)
    return out.sort_values(["experiment", "total", "start", "stop"], kind="stable").reset_index(drop=True)


def _paper_arm(experiment: str, place: str, arm: str, shortest: bool) -> str:
    """The name of an arm in the paper's table 1; controls and ends are ours."""
    if place == "none":
        return "no deficit" if experiment == "length" and shortest else ""
    if (place == "start") == (experiment == "length") and place != "end":
        return arm.split(" of ")[0]
    return ""


def table_1(rows: Iterable[Row], metric: str | None = None) -> pd.DataFrame:
    """Put a critical-period experiment beside table 1 of the paper: the columns of ``deficits``, in percent, and paper.

    ``paper`` is NaN where the paper has no such number, which is everywhere but at paper scale.

    Paper: table 1.
    """
    rows = list(rows)
    metric = metric or metric_of(rows)
    found = deficits(rows, metric)
    scaled = ["mean", "std", "difference", "low", "high"]
    found[scaled] *= measure_of(metric).factor
    spec = rows[0]["spec"]
    paper = pd.read_csv(paper_dir() / "numbers.csv")
    same = (paper.artefact == "table_1") & (paper.dataset == spec["recipe"]["dataset"])
    same &= (paper.model == spec["recipe"]["model"]) & (paper.metric == metric) & (spec["scale"] == "paper")
    known = paper[same].set_index("arm").value
    found["paper"] = [float(known.get(arm, float("nan"))) for arm in found.paper_arm]
    return found


def figure_8(rows: Iterable[Row], metric: str | None = None) -> Figure:
    """Draw a critical-period experiment: a dot per seed, lines through the means, controls of the same length.

    Left: deficits of R steps at the start, which make training R steps longer. Right: windows of low precision within
    a training of fixed length. The learning curve of training without a deficit is drawn over both, on an axis of its
    own, at the right.

    Args:
        rows: of one experiment, see ``deficits``.
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


def critical_periods_section(rows: list[Row]) -> list[str]:
    """Figure 8 and table 1 of every critical-period experiment."""
    parts = []
    for group in deficit_experiments(rows):
        if all(row["status"] == "failed" for row in group):
            continue
        measure = metrics.measure_of(metrics.metric_of(group))
        found = table_1(group)
        number = f"{{:.{measure.digits}f}}".format
        interval = [
            interval_text(r, 1.0, measure.digits) if r.difference == r.difference else "" for r in found.itertuples()
        ]
        shown = pd.DataFrame(
            {
                "low precision": found.arm,
                "experiment": found.experiment,
                f"{metrics.metric_of(group)} {measure.unit}".rstrip(): found["mean"].map(number),
                "std": found["std"].map(number).replace("nan", "–"),
                "n": found.n,
                "minus control of equal length [95 %]": interval,
                "worse": [f"{r.worse} of {r.n}" if r.place != "none" else "" for r in found.itertuples()],
                "diverged": found.diverged,
                "paper": [f"{p:g}" if p == p else "–" for p in found.paper],
            }
        )
        name = experiment_name(group).split(", q_min")[0].rsplit(",", 1)[0]
        parts += [
            f"<h2>Critical learning periods: {html.escape(name)}</h2>",
            image_tag(figure_8(group), "quality after a deficit, with controls"),
            shown.to_html(index=False, border=0),
        ]
    return parts


def show_deficits(rows: Sequence[Row]) -> None:
    """Print every arm of a critical-period experiment, and its difference to the control of equal length."""
    found = table_1(rows)
    measure = metrics.measure_of(metrics.metric_of(rows))
    for name, part in found.groupby("experiment", sort=False):
        print({"length": "deficits at the start, and at the end", "window": "windows within a fixed length"}[name])
        for r in part.itertuples():
            line = f"  {r.arm:<22}{r.mean:7.{measure.digits}f} +- {r.std:4.{measure.digits}f}  (n = {r.n})"
            if r.place != "none":
                line += f"   minus control {r.difference:+6.{measure.digits}f} [{r.low:+.{measure.digits}f}, "
                line += f"{r.high:+.{measure.digits}f}], worse in {r.worse}"
            print(line + (f", {r.diverged} diverged" if r.diverged else ""))
