"""Look of figures: colours, sizes, legends, names of points, titles and captions."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import textalloc
from matplotlib.collections import LineCollection
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cpt_extras.figures import integer_ticks as integer_ticks
from cpt_extras.figures import subplots as subplots

# colour-blind safe (Okabe and Ito)
COLORS = {
    "large": "#D55E00",
    "medium": "#009E73",
    "small": "#0072B2",
    "static": "#222222",
    "own": "#CC79A7",
}

# the same hues, for words: at least 4.5 to 1 on white
TEXT = {
    "large": "#B34F00",
    "medium": "#007D5B",
    "small": "#0072B2",
    "static": "#222222",
    "own": "#A84E82",
}
QUIET = "#666666"  # for words of less weight
PRINTED = "#888888"  # for numbers that the paper prints

# profiles of schedules, also from Okabe and Ito; "own" is any other profile
PROFILE_COLORS = {
    "linear": "#0072B2",
    "cosine": "#009E73",
    "rex": "#D55E00",
    "exponential": "#CC79A7",
    "own": "#8C510A",
}
PROFILE_TEXT = {
    "linear": "#0072B2",
    "cosine": "#007D5B",
    "rex": "#B34F00",
    "exponential": "#A84E82",
    "own": "#8C510A",
}

SMALL = 8  # points: no word is smaller
HEADING = 10  # points, of the title of a figure
LINE_SPACING = 1.35  # of captions, in sizes of their letters
LETTER_WIDTH = (
    0.54  # of the size of the letters: the mean width of a letter in a sentence
)


def legend_below(figure: Any, ax: Any) -> None:
    """Put the legend of one of several alike axes below all of them, in as many rows as the figure's width asks for."""
    handles, labels = ax.get_legend_handles_labels()
    for columns in range(len(labels), 0, -1):
        legend = figure.legend(
            handles, labels, fontsize=SMALL, loc="outside lower center", ncols=columns
        )
        width = legend.get_window_extent(figure.canvas.get_renderer()).width
        if width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


def set_finding(figure: Any, finding: str) -> None:
    """Make a finding the title of a figure, in lines that are no wider than the figure; they end at semicolons."""
    letters = _letters(figure, HEADING)
    lines: list[str] = []
    for line in finding.split("\n"):
        parts = [line] if len(line) <= letters else re.split(r"(?<=;) ", line)
        for part in parts:
            lines += textwrap.wrap(part, letters)
    figure.suptitle("\n".join(lines), fontsize=HEADING, parse_math=False)


def write_caption(figure: Any, caption: str) -> None:
    """Write a caption below a figure and its legend, small and grey; the figure grows by the height of both.

    To be called after ``legend_below`` and before ``name_points``.
    """
    text = textwrap.fill(caption, _letters(figure, SMALL))
    words = (
        LINE_SPACING * SMALL * (text.count("\n") + 1) + 8
    ) / 72  # inches, as all that follows
    renderer = figure.canvas.get_renderer()
    legends = sum(
        legend.get_window_extent(renderer).height / figure.dpi + 0.15
        for legend in figure.legends
    )
    width, height = figure.get_size_inches()
    total = height + words + legends
    figure.set_size_inches(width, total)
    low = (words + legends) / total
    figure.get_layout_engine().set(rect=(0, low, 1, 1 - low))
    for legend in (
        figure.legends
    ):  # a legend with an anchor has no margin of its own: the rectangle leaves it room
        legend.set_bbox_to_anchor(
            (0, words / total, 1, 1 - words / total), transform=figure.transFigure
        )
    look = {
        "fontsize": SMALL,
        "color": QUIET,
        "ha": "center",
        "va": "bottom",
        "linespacing": LINE_SPACING,
    }
    figure.text(0.5, 3 / 72 / total, text, parse_math=False, **look)


def _letters(figure: Any, size: float) -> int:
    """Return how many letters of a size, in points, fit beside each other into a figure."""
    return int(72 * figure.get_figwidth() / (LETTER_WIDTH * size))


def interval_bar(ax: Any, y: float, ends: Iterable[float], **look: Any) -> None:
    """Draw mean, low and high of an interval at a height; the mean of a bootstrap may lie outside of it."""
    mean, low, high = ends
    ax.errorbar(
        mean,
        y,
        xerr=[[max(mean - low, 0)], [max(high - mean, 0)]],
        **{"fmt": "o", **look},
    )


def name_points(
    ax: Any,
    names: Sequence[str],
    x: Sequence[float],
    y: Sequence[float],
    colors: Sequence[str],
) -> None:
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
            ax,
            list(x),
            list(y),
            list(names),
            x_scatter=points[:, 0],
            y_scatter=points[:, 1],
            scatter_sizes=sizes,
            x_lines=[line[:, 0] for line in lines],
            y_lines=[line[:, 1] for line in lines],
            textsize=SMALL,
            textcolor=list(colors),
            linecolor=[TEXT["static"]] * len(names),
            linewidth=0.5,
            max_distance=0.5,
            nbr_candidates=600,
            margin=0.006,
            draw_all=False,
            avoid_label_lines_overlap=True,
            in_layout=False,
            parse_math=False,
            plot_kwargs={"in_layout": False, "zorder": 10},
        )
    missing = [name for name, text in zip(names, written, strict=True) if text is None]
    if missing:
        said = textwrap.fill(f"no room to name: {', '.join(missing)}", 60)
        heading = ax.get_title(loc="left")
        ax.set_title(
            f"{heading}\n{said}".strip(), fontsize=SMALL, loc="left", parse_math=False
        )


def _drawn(ax: Any) -> tuple[np.ndarray, Any, list[np.ndarray]]:
    """Return what is drawn in axes: points (N, 2), half their sizes in pixels (N,), and lines (M, 2) with their bars.

    Words and legends count as lines around them.
    """
    bars = [c for c in ax.collections if isinstance(c, LineCollection)]
    lines = [
        bar for found in bars for bar in found.get_segments() if len(bar)
    ]  # a bar of one seed is none
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
        ends = [
            (left, low),
            (right, low),
            (right, high),
            (left, high),
            (left, low),
            (right, high),
        ]
        lines.append(ax.transData.inverted().transform(ends))
    return np.concatenate(points), np.array(sizes), lines
