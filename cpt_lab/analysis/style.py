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

# colours of savings groups, safe for colour-blind readers (Okabe and Ito)
COLORS = {
    "large": "#D55E00",
    "medium": "#009E73",
    "small": "#0072B2",
    "static": "#222222",
    "own": "#CC79A7",
}

# the hues of ``COLORS`` for text: contrast of at least 4.5 to 1 on white
TEXT = {
    "large": "#B34F00",
    "medium": "#007D5B",
    "small": "#0072B2",
    "static": "#222222",
    "own": "#A84E82",
}
MUTED_COLOR = "#666666"  # for words of less weight
PAPER_COLOR = "#888888"  # for numbers that the paper prints

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

SMALL_FONT_SIZE = 8  # points: no word is smaller
TITLE_FONT_SIZE = 10  # points, of the title of a figure
LINE_SPACING = 1.35  # of captions, in sizes of their letters
LETTER_WIDTH = (
    0.54  # of the size of the letters: the mean width of a letter in a sentence
)


def legend_below(figure: Any, ax: Any) -> None:
    """Put the legend of one of several similar axes below all of them.

    It has as many columns as the figure's width allows.
    """
    handles, labels = ax.get_legend_handles_labels()
    for columns in range(len(labels), 0, -1):
        legend = figure.legend(
            handles,
            labels,
            fontsize=SMALL_FONT_SIZE,
            loc="outside lower center",
            ncols=columns,
        )
        width = legend.get_window_extent(figure.canvas.get_renderer()).width
        if width <= figure.bbox.width or columns == 1:
            return
        legend.remove()


def set_finding(figure: Any, finding: str) -> None:
    """Set a finding as the title of a figure, wrapped to the figure's width, with line breaks at semicolons."""
    letters = _letters(figure, TITLE_FONT_SIZE)
    lines: list[str] = []
    for line in finding.split("\n"):
        parts = [line] if len(line) <= letters else re.split(r"(?<=;) ", line)
        for part in parts:
            lines += textwrap.wrap(part, letters)
    figure.suptitle("\n".join(lines), fontsize=TITLE_FONT_SIZE, parse_math=False)


def write_caption(figure: Any, caption: str) -> None:
    """Write a caption below a figure and its legend, small and grey; the figure grows by the height of both.

    Call it after ``legend_below`` and before ``name_points``.
    """
    text = textwrap.fill(caption, _letters(figure, SMALL_FONT_SIZE))
    words = (
        LINE_SPACING * SMALL_FONT_SIZE * (text.count("\n") + 1) + 8
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
        "fontsize": SMALL_FONT_SIZE,
        "color": MUTED_COLOR,
        "ha": "center",
        "va": "bottom",
        "linespacing": LINE_SPACING,
    }
    figure.text(0.5, 3 / 72 / total, text, parse_math=False, **look)


def _letters(figure: Any, size: float) -> int:
    """Return how many letters of a font size, in points, fit into a line of the figure."""
    return int(72 * figure.get_figwidth() / (LETTER_WIDTH * size))


def interval_bar(ax: Any, y: float, ends: Iterable[float], **look: Any) -> None:
    """Draw mean, low and high of an interval at a height; the mean of a bootstrap may lie outside of it."""
    mean, low, high = ends
    below = max(mean - low, 0)
    above = max(high - mean, 0)
    look = {"fmt": "o", **look}
    ax.errorbar(mean, y, xerr=[[below], [above]], **look)


def name_points(
    ax: Any,
    names: Sequence[str],
    x: Sequence[float],
    y: Sequence[float],
    colors: Sequence[str],
) -> None:
    """Write names near their points, joined to them by thin lines, without overlaps.

    Call it when everything else is drawn, titles and legends too. Names without room are listed above the axes.
    """
    if not len(names):
        return
    if isinstance(ax.figure.get_layout_engine(), ConstrainedLayoutEngine):
        ax.figure.draw_without_rendering()
        ax.figure.set_layout_engine("none")  # nothing moves from here on
    ax.autoscale(False)
    points, sizes, lines = _drawn_shapes(ax)
    with redirect_stdout(None):  # it prints when it finds no place at all
        _, _, placed_texts, _ = textalloc.allocate(
            ax,
            list(x),
            list(y),
            list(names),
            x_scatter=points[:, 0],
            y_scatter=points[:, 1],
            scatter_sizes=sizes,
            x_lines=[line[:, 0] for line in lines],
            y_lines=[line[:, 1] for line in lines],
            textsize=SMALL_FONT_SIZE,
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
    missing = [
        name for name, text in zip(names, placed_texts, strict=True) if text is None
    ]
    if missing:
        missing_text = textwrap.fill(f"no room to name: {', '.join(missing)}", 60)
        heading = ax.get_title(loc="left")
        ax.set_title(
            f"{heading}\n{missing_text}".strip(),
            fontsize=SMALL_FONT_SIZE,
            loc="left",
            parse_math=False,
        )


def _drawn_shapes(ax: Any) -> tuple[np.ndarray, Any, list[np.ndarray]]:
    """Return the shapes drawn in axes.

    Returns:
        Points (N, 2); half their sizes in pixels (N,); lines, error bars and the outlines of texts and legends, each
        (M, 2).
    """
    lines = []
    for collection in ax.collections:
        if isinstance(collection, LineCollection):
            # The error bar of a single seed has no points.
            lines += [bar for bar in collection.get_segments() if len(bar)]
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
        (x_min, y_min), (x_max, y_max) = words.get_window_extent().get_points()
        ends = [
            (x_min, y_min),
            (x_max, y_min),
            (x_max, y_max),
            (x_min, y_max),
            (x_min, y_min),
            (x_max, y_max),
        ]
        lines.append(ax.transData.inverted().transform(ends))
    return np.concatenate(points), np.array(sizes), lines
