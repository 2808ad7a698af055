"""Figures that notebooks show sharp, with a description in words and numbers of what is drawn. Needs matplotlib."""

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

SHARP = 2  # pixels of the picture per pixel of its size on the page
INCH = 96  # pixels, as on every page: a letter of 8 points is shown at 8 points
SHADES = 128  # colours of the picture: lines and letters need no more, and it is a third as large


class AltTextFigure(Figure):
    """A figure that says what it shows: for readers who hear a page, and where pictures are not loaded.

    ``drawing`` makes one.
    """

    alt = ""  # what it shows, in words; where it is empty, they are made from its titles, axes and legends

    def description(self) -> str:
        """Return what it shows in words, in one line."""
        return " ".join((self.alt or _words(self)).split())

    def _ipython_display_(self) -> None:
        """Show itself in a notebook, which knows figures already and would show them coarse and without words."""
        from IPython.display import display

        self.show_by(display)

    def show_by(self, display: Callable[..., Any]) -> None:
        """Show itself by a function that takes what IPython's ``display`` does, such as a handle's ``update``."""
        png, width, height = picture(self)
        words = self.description()
        said = "\n".join([f"<Figure: {words}>", *data_of(self)])
        shown = {"image/png": base64.b64encode(png).decode(), "text/plain": said}
        display(
            shown,
            raw=True,
            metadata={"image/png": {"alt": words, "width": width, "height": height}},
        )


def picture(figure: Figure) -> tuple[bytes, int, int]:
    """Return a figure as a PNG, and the width and height in pixels at which it is to be shown."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="png", dpi=SHARP * INCH, bbox_inches="tight", facecolor="white"
    )
    small = Image.open(buffer).convert("RGB").quantize(SHADES, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    small.save(buffer, format="png", optimize=True)
    return buffer.getvalue(), small.width // SHARP, small.height // SHARP


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
    """Yield a figure and its axes, an array (rows, columns), in our style; lay it out in the end.

    The figure is closed, so that a notebook shows it once: as the value of its cell. ``alt`` says what it shows; where
    it is empty, titles, axes and legends do.
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

DIGITS = 6  # of a number: a value that moves by a thousandth is seen, the last digits of a machine are not
NOISE = 1e-9  # relative: what is nearer to 0 is 0, and what lies this near to a rounding edge is rounded up


def data_of(figure: Figure) -> list[str]:
    """Return what is drawn in numbers: a line for each axes that hold data, so that who compares text sees a change.

    Such as ``1: 12 parts, 240 points; x 0.1875..1, mean 0.52; y 20.9..96.4, mean 54.1; xy mean 31.2``: lines, error
    bars and areas are parts; the mean of the products tells which y belongs to which x. Words and what joins them to
    their points are no data: where they find room depends on letters.
    """
    said = []
    for number, ax in enumerate(figure.axes, 1):
        parts = [(x, y) for x, y in _parts(ax) if len(x) + len(y)]
        words = []
        if parts:
            x, y = (np.concatenate(values) for values in zip(*parts, strict=True))
            xy = np.concatenate(
                [a * b for a, b in parts if len(a) == len(b)] or [x[:0]]
            )
            words += [
                f"{_counted(len(parts), 'part')}, {_counted(max(len(x), len(y)), 'point')}"
            ]
            words += [
                f"{name} {_spread(values)}"
                for name, values in (("x", x), ("y", y))
                if len(values)
            ]
            words += [f"xy mean {_mean(xy)}"] if len(xy) else []
        words += [
            f"picture {_spread(np.ma.compressed(np.ma.asarray(image.get_array())))}"
            for image in ax.images
        ]
        if words:
            said.append(f"{number}: {'; '.join(words)}")
    return said


def _parts(ax: Axes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield x and y of everything that is drawn; one of them is empty for a line or area across the whole axes."""
    drawn: list[tuple[Any, Any]] = [
        (line.get_xydata(), line.get_transform())
        for line in ax.lines
        if line.get_in_layout()  # those that join names to points are not
    ]
    for c in ax.collections:
        if c.get_offset_transform().contains_branch(ax.transData):
            drawn.append((c.get_offsets(), c.get_offset_transform()))
        else:
            drawn.append(
                (
                    np.concatenate(
                        [np.zeros((0, 2)), *(p.vertices for p in c.get_paths())]
                    ),
                    c.get_transform(),
                )
            )
    for patch in ax.patches:
        vertices = patch.get_patch_transform().transform(patch.get_path().vertices)
        drawn.append((vertices, patch.get_data_transform()))
    for vertices, transform in drawn:
        there: np.ndarray = np.ma.filled(np.ma.asarray(vertices, dtype=float), np.nan)
        there = there[np.isfinite(there).all(1)]
        of_x, of_y = transform.contains_branch_seperately(ax.transData)
        yield there[: len(there) * of_x, 0], there[: len(there) * of_y, 1]


def _counted(n: int, word: str) -> str:
    return f"{n} {word}{'s' * (n != 1)}"


def _spread(values: np.ndarray) -> str:
    low, high = (_number(float(v), values) for v in (values.min(), values.max()))
    return f"{low}..{high}, mean {_mean(values)}"


def _mean(values: np.ndarray) -> str:
    return _number(
        math.fsum(values) / len(values), values
    )  # in whatever order they are drawn


def _number(value: float, among: np.ndarray) -> str:
    return (
        "0"
        if abs(value) <= NOISE * abs(among).max()
        else f"{value * (1 + NOISE):.{DIGITS}g}"
    )


# --- words ------------------------------------------------------------------------------------------


def _words(figure: Figure) -> str:
    """Say what stands in titles, at axes, in legends and in captions, each once."""
    heading = figure.get_suptitle()
    panels, names = [], []
    for ax in figure.axes:
        x, y = _label(ax, "x"), _label(ax, "y")
        drawn = f"{y} against {x}" if x and y else x or y
        panels.append(
            ": ".join(filter(None, (ax.get_title() or ax.get_title(loc="left"), drawn)))
        )
        names += ax.get_legend_handles_labels()[1]
    captions = [text.get_text() for text in figure.texts if text.get_text() != heading]
    said = [heading, "; ".join(_once(panels)), ", ".join(_once(names)), *captions]
    return ". ".join(filter(None, said)).replace(r"\$", "$")


def _label(ax: Any, way: str) -> str:
    """The label of an axis, which may stand at another that shares it."""
    shared = getattr(ax, f"get_shared_{way}_axes")().get_siblings(ax)
    labels = [getattr(other, f"get_{way}label")() for other in (ax, *shared)]
    return next(filter(None, labels), "")


def _once(words: list[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, words)))
