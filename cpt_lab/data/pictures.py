"""Pictures with boxes: the values that the readers make and the batches take, and synthetic scenes of digits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from cpt_lab.data.common import generator_of
from cpt_lab.data.image_readers import open_rgb

DIGITS = tuple(str(digit) for digit in range(10))

SCENES = 400  # pictures of a split whose number is left open

SIDES = (14, 36)  # smallest and largest side of a digit in a scene of 96 pixels

TRIES = 20  # to find a free place


@dataclass(frozen=True)
class Annotated:
    """A picture, by its file or in memory, and its objects.

    Objects are arrays, not tensors: processes that read files get thousands of them, and torch would send each tensor
    through a file descriptor of its own.
    """

    picture: Path | Tensor  # a file, or uint8 (3, H, W)
    size: tuple[int, int]  # height and width in pixels
    boxes: np.ndarray  # float32 (n, 4), x1, y1, x2, y2 in pixels from the upper left corner
    labels: np.ndarray  # int64 (n,)
    difficult: np.ndarray  # bool (n,)

    def read(self) -> Tensor:
        """Return the picture, uint8 (3, H, W); ValueError names a file that is damaged."""
        if isinstance(self.picture, Tensor):
            return self.picture
        return v2.functional.pil_to_tensor(open_rgb(self.picture))


@dataclass(frozen=True)
class DetectionData:
    """Annotated pictures, split three ways."""

    title: str  # what the numbers are measured on, as figures must call it
    classes: tuple[str, ...]  # their names
    # train, valid, test: the splits; ``valid`` is empty when nothing is held out
    train: tuple[Annotated, ...]
    valid: tuple[Annotated, ...]
    test: tuple[Annotated, ...]
    checksum: str  # of annotations and pixels, or of annotations and the sizes of the files


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


def scenes(part: str, count: int, size: int) -> tuple[Annotated, ...]:
    """Return made-up scenes: one to four handwritten digits of different sizes on black, none touching another.

    Digits of "train", "valid" and "test" come from different pictures of scikit-learn's set. A scene depends on its
    split, number and size alone. Boxes are exact: the smallest that holds all ink of a digit.
    """
    from sklearn.datasets import load_digits  # here, as it takes a second

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    first, last = {"train": (0, 1097), "valid": (1097, 1397), "test": (1397, 1797)}[part]
    chosen = order[first:last]
    return tuple(_scene(digits, chosen, generator_of(first, i), size) for i in range(count))


def _scene(digits: Any, chosen: np.ndarray, random: torch.Generator, size: int) -> Annotated:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    canvas = torch.zeros(size, size)
    boxes: list[list[int]] = []
    labels = []
    for _ in range(draw(1, 4)):
        index = chosen[draw(0, len(chosen) - 1)]
        side = draw(*(round(s * size / 96) for s in SIDES))
        ink = _enlarged(torch.from_numpy(digits.images[index]).float(), side)
        h, w = ink.shape
        for _ in range(TRIES):
            x, y = draw(0, size - w), draw(0, size - h)
            if all(x + w < a or c < x or y + h < b or d < y for a, b, c, d in boxes):
                canvas[y : y + h, x : x + w] = ink
                boxes.append([x, y, x + w, y + h])
                labels.append(int(digits.target[index]))
                break
    picture = canvas.clamp(0, 255).to(torch.uint8).expand(3, -1, -1).contiguous()
    return annotated_picture(picture, (size, size), boxes, labels, [False] * len(boxes))


def _enlarged(digit: Tensor, side: int) -> Tensor:
    """Return the ink of an 8 x 8 digit (0..16) enlarged to ``side`` pixels (0..255), cut to where there is any."""
    large = v2.functional.resize(digit[None] * (255 / 16), [side, side], antialias=True)[0]
    rows, columns = ((large >= 1).any(dim).nonzero() for dim in (1, 0))
    return large[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
