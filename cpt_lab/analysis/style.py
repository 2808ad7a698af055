"""How figures look: colours, labels, layout, titles."""

import textwrap
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pandas as pd
import textalloc
from matplotlib.collections import LineCollection
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cpt_core.described import drawing as drawing
from cpt_core.described import whole as whole
from cpt_lab.analysis.groups import title_of
from cpt_lab.analysis.metrics import counted

# colour-blind safe (Okabe and Ito)
COLORS = {"large": "#D55E00", "medium": "#009E73", "small": "#0072B2", "static": "#222222", "own": "#CC79A7"}

# the same hues, for words: at least 4.5 to 1 on white
TEXT = {"large": "#B34F00", "medium": "#007D5B", "small": "#0072B2", "static": "#222222", "own": "#A84E82"}
QUIET = "#666666"  # for words of less weight

SMALL = 8  # points: no word is smaller

LABELS = {
    "relative_cost": "training cost relative to static q_max (BitOps)",
    "noise_exposure": "noise exposure: mean 4^-q relative to static q_max",
}


def legend_below(figure: Any, ax: Any) -> None:
    """Put the legend of one of several alike axes below all of them, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=SMALL, loc="outside lower center", ncols=len(labels))


def interval_bar(ax: Any, y: float, ends: Iterable[float], **look: Any) -> None:
    """Draw mean, low and high of an interval at a height; the mean of a bootstrap may lie outside of it."""
    mean, low, high = ends
    ax.errorbar(mean, y, xerr=[[max(mean - low, 0)], [max(high - mean, 0)]], **{"fmt": "o", **look})


def name_points(ax: Any, names: Sequence[str], x: Sequence[float], y: Sequence[float], colors: Sequence[str]) -> None:
    """Write names near their points, joined to them by thin lines, where they lie over nothing else.

    To be called when all else is drawn, titles and legends too. Names that find no place are listed above the axes.
    """
    if not len(names):
        return
    if isinstance(ax.figure.get_layout_engine(), ConstrainedLayoutEngine):
        ax.figure.draw_without_rendering()
        ax.figure.set_layout_engine("none")  # nothing moves from here on
    ax.autoscale(False)
    points, sizes, lines = _drawn(ax)
    with redirect_stdout(None):  # it prints when it finds no place at all
        _, _, written, _ = textalloc.allocate(
            ax, list(x), list(y), list(names), x_scatter=points[:, 0], y_scatter=points[:, 1], scatter_sizes=sizes,
            x_lines=[line[:, 0] for line in lines], y_lines=[line[:, 1] for line in lines], textsize=SMALL,
            textcolor=list(colors), linecolor=[TEXT["static"]] * len(names), linewidth=0.5, max_distance=0.5,
            nbr_candidates=600, margin=0.006, draw_all=False, avoid_label_lines_overlap=True, in_layout=False,
            parse_math=False, plot_kwargs={"in_layout": False, "zorder": 10},
        )  # fmt: skip
    missing = [name for name, text in zip(names, written, strict=True) if text is None]
    if missing:
        said = textwrap.fill(f"no room to name: {', '.join(missing)}", 60)
        ax.set_title(said, fontsize=SMALL, loc="left", parse_math=False)


def _drawn(ax: Any) -> tuple[np.ndarray, Any, list[np.ndarray]]:
    """Return what is drawn in axes: points (N, 2), half their sizes in pixels (N,), and lines (M, 2) with their bars.

    Words and legends count as lines around them.
    """
    bars = [c for c in ax.collections if isinstance(c, LineCollection)]
    lines = [bar for found in bars for bar in found.get_segments() if len(bar)]  # a bar of one seed is none
    points, sizes = [np.zeros((0, 2))], []
    for line in ax.lines:
        if line.get_transform() != ax.transData:  # such as axhline
            continue
        xy = line.get_xydata().astype(float)
        if line.get_marker() not in ("None", None):
            points.append(xy)
            sizes += [line.get_markersize() / 2 * ax.figure.dpi / 72] * len(xy)
        if line.get_linestyle() != "None" and len(xy):
            lines.append(xy)
    legend = ax.get_legend()
    for words in [*ax.texts, *([legend] if legend else [])]:
        (left, low), (right, high) = words.get_window_extent().get_points()
        ends = [(left, low), (right, low), (right, high), (left, high), (left, low), (right, high)]
        lines.append(ax.transData.inverted().transform(ends))
    return np.concatenate(points), np.array(sizes), lines


def title(runs: pd.DataFrame, what: str = "") -> str:
    """Return the title of a figure: what was trained and is shown, over how many seeds; a warning at smoke scale.

    The name of the user's own data is no formula, also with dollars in it.
    """
    warning = "smoke scale: not a result. " if runs["scale"].iloc[0] == "smoke" else ""
    named = title_of(runs).replace("$", r"\$")
    seeds = runs.groupby(["recipe", "q_max", "arm"])["seed"].nunique()
    fewer = f"{seeds.min()} to " if seeds.min() < seeds.max() else ""
    return f"{warning}{named}{what}, {fewer}{counted(seeds.max(), 'seed')}"
