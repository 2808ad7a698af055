"""Synthetic runs with known qualities for the tests of analyses."""

import numpy as np
import pandas as pd
from matplotlib.colors import to_hex

from cpt_lab.analysis.metrics import METRICS
from cpt_lab.analysis.rendering import terminal
from cpt_lab.analysis.run_table import table
from tests.helpers import row_of

DIVERGED_EVALUATION = {
    "step": 9,
    "test": dict.fromkeys(METRICS),
    "valid": dict.fromkeys(METRICS),
    "not_finite": ["test.loss"],
}


def rows_of(specs, value, metric="accuracy", noise=1e-4):
    """Return rows of a metric, a function of the spec plus a little noise, in a store "made_up.jsonl"."""
    rng = np.random.default_rng(0)
    rows = [row_of(s, value(s) + noise * rng.normal(), metric) for s in specs]
    return [{**row, "store": "somewhere/made_up.jsonl"} for row in rows]


def runs_of(specs, value=lambda spec: 0.5, metric="accuracy"):
    """Return a table of runs of a metric, a function of the spec."""
    return table(row_of(s, value(s), metric) for s in specs)


def by_arm(specs, values, metric="accuracy"):
    """Return rows of 80 % but for some arms."""
    return rows_of(specs, lambda s: values.get(s.arm, 0.8), metric)


def lost(rows, is_lost, status="diverged", error=""):
    """Return rows in which the runs of some arms and seeds have no result."""
    changed = []
    for row in rows:
        if is_lost(row["spec"]["arm"], row["spec"]["seed"]):
            evaluations = [*row["evaluations"], DIVERGED_EVALUATION]
            row = {**row, "status": status, "metrics": [], "error": error}
            row["evaluations"] = evaluations
        changed.append(row)
    return changed


def changed(rows, recipe=None, **spec):
    """Return rows with other values for some fields of their specs and recipes."""
    result = []
    for row in rows:
        fields = {**row["spec"], **spec}
        fields["recipe"] = {**fields["recipe"], **(recipe or {})}
        result.append({**row, "spec": fields})
    return result


def text_of(result):
    """Return a table with four digits, or the words of another result, for golden files."""
    if not isinstance(result, pd.DataFrame):
        return str(result)
    frame = result.copy()
    for name in frame.select_dtypes("number"):
        frame[name] = [number_text(value) for value in frame[name].astype(float)]
    return terminal(frame)


def number_text(value):
    """Return four digits of a number, without errors of arithmetic around zero."""
    return f"{round(value, 9) + 0.0:.4g}"


def figure_text(figure):
    """Return texts, lines and limits of a figure, for golden files.

    Which names of points find room depends on the last digits of positions, which differ between processors:
    names without room stand with the others.
    """
    caption = [t.get_text() for t in figure.texts if t is not figure._suptitle]
    lines = [f"title: {figure.get_suptitle()}", *(" ".join(t.split()) for t in caption)]
    for ax in figure.axes:
        titles = [ax.get_title(loc=place) for place in ("left", "center", "right")]
        titles[0], unplaced = without_unplaced_names(titles[0])
        lines.append(f"axes {[title for title in titles if title]}")
        lines.append(f"  x {ax.get_xlabel()!r} {ax.get_xscale()}")
        lines.append(f"  y {ax.get_ylabel()!r} inverted {ax.yaxis_inverted()}")
        lines += [f"  top {top.get_xlabel()!r}" for top in ax.child_axes]
        drawn = [x for x in ax.lines if len(x.get_xdata()) and x.get_in_layout()]
        lines += [f"  {line_text(line)}" for line in drawn]  # without lines to names
        lines.append(
            f"  texts {sorted([*unplaced, *(t.get_text() for t in ax.texts)])}"
        )
    for legend in figure.legends:
        lines.append(f"legend {[text.get_text() for text in legend.get_texts()]}")
    return "\n".join(lines)


def without_unplaced_names(title):
    """Return a title without its list of names that have no room, and those names."""
    words, _, names = title.partition("no room to name: ")
    names = " ".join(names.split())
    return words.strip(), names.split(", ") if names else []


def line_text(line):
    """Return label, marker, colours and at most eight points of a line."""
    label = line.get_label()
    words = ["" if label.startswith("_") else label, line.get_marker()]
    words += [to_hex(line.get_color()), to_hex(line.get_markeredgecolor())]
    points = [
        f"({number_text(x)}, {number_text(y)})"
        for x, y in line.get_xydata()[:8].astype(float)
    ]
    more = f" and {len(line.get_xdata()) - 8} more" if len(line.get_xdata()) > 8 else ""
    return f"{' '.join(words)}: {' '.join(points)}{more}"
