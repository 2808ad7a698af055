"""Synthetic scenes of scikit-learn's digits, with their boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torchvision.transforms import v2

from cpt_lab.data.common import generator_of
from cpt_lab.data.pictures import Annotated, annotated_picture

DIGITS = tuple(str(digit) for digit in range(10))

SCENES = 400  # pictures of a split whose number is left open

SIDES = (14, 36)  # smallest and largest side of a digit in a scene of 96 pixels

TRIES = 20  # to find a free place


def scenes(part: str, count: int, size: int) -> tuple[Annotated, ...]:
    """Return made-up scenes: one to four handwritten digits of different sizes on black, none touching another.

    Digits of "train", "valid" and "test" come from different pictures of scikit-learn's set. A scene depends on its
    split, number and size alone. Boxes are exact: the smallest that holds all ink of a digit.
    """
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
