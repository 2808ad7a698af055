"""Figures with alt text, sharp rendering in notebooks, and their data in numbers. Needs matplotlib."""

import base64
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

PIXEL_RATIO = 2  # pixels of the PNG per pixel on the page
PIXELS_PER_INCH = 96  # as on every page, so that letters keep their size in points
MAX_COLOURS = 128  # of the PNG, which is a third as large with them


class AltTextFigure(Figure):
    """A matplotlib figure with alt text, for screen readers and pages without pictures.

    ``subplots`` makes one.
    """

    alt = ""  # alt text; if empty, it is made from titles, axes and legends

    def description(self) -> str:
        """Return the alt text in one line."""
        return " ".join((self.alt or _caption(self)).split())

    def _ipython_display_(self) -> None:
        """Show the figure in a notebook, in place of IPython's coarse picture without alt text."""
        from IPython.display import display

        self.show_by(display)

    def show_by(self, display: Callable[..., Any]) -> None:
        """Show the figure through a function like IPython's ``display``, such as a handle's ``update``."""
        png, width, height = picture(self)
        alt = self.description()
        text = "\n".join([f"<Figure: {alt}>", *describe_data(self)])
        content = {"image/png": base64.b64encode(png).decode(), "text/plain": text}
        metadata = {"image/png": {"alt": alt, "width": width, "height": height}}
        display(content, raw=True, metadata=metadata)


def picture(figure: Figure) -> tuple[bytes, int, int]:
    """Return a figure as a PNG, with its width and height in pixels on the page."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer,
        format="png",
        dpi=PIXEL_RATIO * PIXELS_PER_INCH,
        bbox_inches="tight",
        facecolor="white",
    )
    small = (
        Image.open(buffer)
        .convert("RGB")
        .quantize(MAX_COLOURS, dither=Image.Dither.NONE)
    )
    buffer = io.BytesIO()
    small.save(buffer, format="png", optimize=True)
    return buffer.getvalue(), small.width // PIXEL_RATIO, small.height // PIXEL_RATIO


STYLE: Any = {
    "figure.dpi": 100,
    "savefig.bbox": "tight",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


@contextmanager
def subplots(
    rows: int = 1, columns: int = 1, alt: str = "", **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, an array (rows, columns), in the style of this project.

    The figure is closed at the end, so that a notebook shows it once, as the value of its cell.

    Args:
        rows: number of rows.
        columns: number of columns.
        alt: alt text; if empty, it is made from titles, axes and legends.
        options: further arguments of ``plt.subplots``.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows,
            columns,
            squeeze=False,
            layout="constrained",
            FigureClass=AltTextFigure,
            **options,
        )
        figure.alt = alt
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def integer_ticks(axis: Axis) -> None:
    """Put the ticks of an axis of bits or levels at whole numbers."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


# --- numbers ----------------------------------------------------------------------------------------

SIGNIFICANT_DIGITS = (
    6  # shows a change by a thousandth, and hides differences between machines
)
RELATIVE_NOISE = 1e-9  # values this near to 0 are 0, and those this near below a rounding edge are rounded up


def describe_data(figure: Figure) -> list[str]:
    """Return the drawn data in numbers, a line for each axes that hold any, so that a text diff shows a change.

    Such as ``1: 12 parts, 240 points; x 0.1875..1, mean 0.52; y 20.9..96.4, mean 54.1; xy mean 31.2``. Parts are lines,
    error bars and areas; "xy mean" is the mean of the products x y, which tells which y belongs to which x. Texts and
    the lines that join them to points are not data, since their places depend on letter widths.
    """
    lines = []
    for number, ax in enumerate(figure.axes, 1):
        phrases = _data_phrases(ax)
        for image in ax.images:
            pixels: np.ndarray = np.ma.compressed(np.ma.asarray(image.get_array()))
            phrases.append(f"picture {_range_phrase(pixels)}")
        if phrases:
            lines.append(f"{number}: {'; '.join(phrases)}")
    return lines


def _data_phrases(ax: Axes) -> list[str]:
    """Return counts, ranges and means of the points of one axes; nothing if it has none."""
    parts = [(x, y) for x, y in _parts(ax) if len(x) + len(y)]
    if not parts:
        return []

    x, y = (np.concatenate(values) for values in zip(*parts, strict=True))
    products = [a * b for a, b in parts if len(a) == len(b)]
    xy = np.concatenate(products or [x[:0]])

    num_points = max(len(x), len(y))
    phrases = [
        f"{_count_phrase(len(parts), 'part')}, {_count_phrase(num_points, 'point')}"
    ]
    for name, values in (("x", x), ("y", y)):
        if len(values):
            phrases.append(f"{name} {_range_phrase(values)}")
    if len(xy):
        phrases.append(f"xy mean {_mean(xy)}")
    return phrases


def _parts(ax: Axes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield x and y of everything that is drawn; one of them is empty for a line or area across the whole axes."""
    parts: list[tuple[Any, Any]] = [
        (line.get_xydata(), line.get_transform())
        for line in ax.lines
        if line.get_in_layout()  # lines that join names to points are not in the layout
    ]
    for collection in ax.collections:
        if collection.get_offset_transform().contains_branch(ax.transData):
            offsets = collection.get_offsets()
            parts.append((offsets, collection.get_offset_transform()))
        else:
            paths = [path.vertices for path in collection.get_paths()]
            vertices = np.concatenate([np.zeros((0, 2)), *paths])
            parts.append((vertices, collection.get_transform()))
    for patch in ax.patches:
        vertices = patch.get_patch_transform().transform(patch.get_path().vertices)
        parts.append((vertices, patch.get_data_transform()))

    for vertices, transform in parts:
        points: np.ndarray = np.ma.filled(np.ma.asarray(vertices, dtype=float), np.nan)
        points = points[np.isfinite(points).all(1)]
        has_x, has_y = transform.contains_branch_seperately(ax.transData)
        nothing = points[:0, 0]
        yield points[:, 0] if has_x else nothing, points[:, 1] if has_y else nothing


def _count_phrase(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _range_phrase(values: np.ndarray) -> str:
    low, high = (_number(float(v), values) for v in (values.min(), values.max()))
    return f"{low}..{high}, mean {_mean(values)}"


def _mean(values: np.ndarray) -> str:
    # fsum is exact, so that the order in which parts are drawn does not matter
    return _number(math.fsum(values) / len(values), values)


def _number(value: float, values: np.ndarray) -> str:
    """Format a number; "0" for what is rounding noise beside the largest of ``values``."""
    if abs(value) <= RELATIVE_NOISE * abs(values).max():
        return "0"
    return f"{value * (1 + RELATIVE_NOISE):.{SIGNIFICANT_DIGITS}g}"


# --- words ------------------------------------------------------------------------------------------


def _caption(figure: Figure) -> str:
    """Return the texts of titles, axes, legends and captions, each once."""
    heading = figure.get_suptitle()
    panels, names = [], []
    for ax in figure.axes:
        x, y = _label(ax, "x"), _label(ax, "y")
        axes = f"{y} against {x}" if x and y else x or y
        title = ax.get_title() or ax.get_title(loc="left")
        panels.append(": ".join(filter(None, (title, axes))))
        names += ax.get_legend_handles_labels()[1]
    captions = [text.get_text() for text in figure.texts if text.get_text() != heading]
    sentences = [
        heading,
        "; ".join(_unique(panels)),
        ", ".join(_unique(names)),
        *captions,
    ]
    return ". ".join(filter(None, sentences)).replace(r"\$", "$")


def _label(ax: Any, way: str) -> str:
    """Return the label of an axis, or that of axes that share it."""
    shared = getattr(ax, f"get_shared_{way}_axes")().get_siblings(ax)
    labels = [getattr(other, f"get_{way}label")() for other in (ax, *shared)]
    return next(filter(None, labels), "")


def _unique(words: list[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, words)))
