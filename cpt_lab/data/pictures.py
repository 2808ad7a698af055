"""Pictures with boxes: the values that the readers make and the batches take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torchvision.transforms import v2

from cpt_lab.data.colours import open_rgb


@dataclass(frozen=True)
class Annotated:
    """A picture, by its file or in memory, and its objects.

    Objects are arrays, not tensors: processes that read files get thousands of them, and torch would send each tensor
    through a file descriptor of its own.

    Attributes:
        picture: a file, or uint8 (3, H, W).
        size: height and width in pixels.
        boxes: float32 (n, 4), x1, y1, x2, y2 in pixels from the upper left corner.
        labels: int64 (n,).
        difficult: bool (n,).
    """

    picture: Path | Tensor
    size: tuple[int, int]
    boxes: np.ndarray
    labels: np.ndarray
    difficult: np.ndarray

    def read(self) -> Tensor:
        """Return the picture, uint8 (3, H, W); ValueError names a file that is damaged."""
        if isinstance(self.picture, Tensor):
            return self.picture
        return v2.functional.pil_to_tensor(open_rgb(self.picture))


@dataclass(frozen=True)
class DetectionData:
    """Annotated pictures, split three ways.

    Attributes:
        title: what the numbers are measured on, as figures must call it.
        classes: their names.
        train, valid, test: the splits; ``valid`` is empty when nothing is held out.
        checksum: of annotations and pixels, or of annotations and the sizes of the files.
    """

    title: str
    classes: tuple[str, ...]
    train: tuple[Annotated, ...]
    valid: tuple[Annotated, ...]
    test: tuple[Annotated, ...]
    checksum: str


def annotated_picture(
    picture: Path | Tensor, size: tuple[int, int], boxes: Any, labels: Any, difficult: Any
) -> Annotated:
    """Return a picture with its boxes and labels in the types that ``Annotated`` has."""
    return Annotated(
        picture,
        size,
        np.array(boxes, dtype=np.float32).reshape(-1, 4),
        np.array(labels, dtype=np.int64),
        np.array(difficult, dtype=bool),
    )
