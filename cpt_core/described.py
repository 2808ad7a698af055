"""Figures that notebooks show sharp and with a description in words. Needs matplotlib."""

from __future__ import annotations

import base64
import io
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

SHARP = 2  # pixels of the picture per pixel of its size on the page
INCH = 96  # pixels, as on every page: a letter of 8 points is shown at 8 points
SHADES = 128  # colours of the picture: lines and letters need no more, and it is a third as large


class DescribedFigure(Figure):
    """A figure that says what it shows: for readers who hear a page, and where pictures are not loaded.

    ``plt.subplots(FigureClass=DescribedFigure)`` makes one.

    Attributes:
        alt: what it shows, in words; where it is empty, they are made from its titles, axes and legends.
    """

    alt = ""

    def description(self) -> str:
        """Return what it shows in words, in one line."""
        return " ".join((self.alt or _words(self)).split())

    def _ipython_display_(self) -> None:
        """Show itself in a notebook, which knows figures already and would show them coarse and without words."""
        from IPython.display import display

        png, width, height = picture(self)
        words = self.description()
        shown = {"image/png": base64.b64encode(png).decode(), "text/plain": f"<Figure: {words}>"}
        display(shown, raw=True, metadata={"image/png": {"alt": words, "width": width, "height": height}})


def picture(figure: Figure) -> tuple[bytes, int, int]:
    """Return a figure as a PNG, and the width and height in pixels at which it is to be shown."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=SHARP * INCH, bbox_inches="tight", facecolor="white")
    small = Image.open(buffer).convert("RGB").quantize(SHADES, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    small.save(buffer, format="png", optimize=True)
    return buffer.getvalue(), small.width // SHARP, small.height // SHARP


def _words(figure: Figure) -> str:
    """Say what stands in titles, at axes and in legends, each once."""
    heading = figure.get_suptitle()
    panels, names = [], []
    for ax in figure.axes:
        x, y = _label(ax, "x"), _label(ax, "y")
        drawn = f"{y} against {x}" if x and y else x or y
        panels.append(": ".join(filter(None, (ax.get_title() or ax.get_title(loc="left"), drawn))))
        names += ax.get_legend_handles_labels()[1]
    said = [heading, "; ".join(_once(panels)), ", ".join(_once(names))]
    return ". ".join(filter(None, said)).replace(r"\$", "$")


def _label(ax: Any, way: str) -> str:
    """The label of an axis, which may stand at another that shares it."""
    shared = getattr(ax, f"get_shared_{way}_axes")().get_siblings(ax)
    labels = [getattr(other, f"get_{way}label")() for other in (ax, *shared)]
    return next(filter(None, labels), "")


def _once(words: list[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, words)))
