"""Pictures of any kind, read as eight-bit red, green and blue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cpt_core.checks import library
from cpt_lab.data.files import reading


def open_rgb(path: Path | str) -> Any:
    """Return the picture in a file, in PIL's mode RGB; ValueError names a file that is damaged."""
    with reading(Path(path)), library("PIL.Image", "vision").open(path) as image:
        return rgb(image)


def rgb(image: Any) -> Any:
    """Return a picture of PIL in mode RGB: grey ones get three equal channels, transparency is left out.

    Grey pictures of 16 bits are scaled to eight: PIL alone would cut off all above 255.

    Raises:
        ValueError: for pictures whose range of values is not known: 32-bit and floating ones.
    """
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError(f"a picture of 8 or 16 bits expected, got PIL's mode {image.mode}")
        image = library("PIL.Image", "vision").fromarray((values >> 8).astype(np.uint8))
    return image.convert("RGB")
