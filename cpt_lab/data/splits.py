"""Splits of a data set: their sizes, the samples that a limit chooses, and checks of labels.

Named data sets must have as many samples as a recipe asks for; the user's own data may be smaller.
"""

from collections.abc import Sized
from typing import Any

import numpy as np
import torch

from cpt_lab.data.random_streams import seeded_generator
from cpt_lab.experiments.schema import is_own

SPLITS = ("train", "valid", "test")
MAX_CLASSES = 10_000  # a data set with more samples may have as many classes as samples


def choose_samples(count: int, limit: int | None) -> list[int]:
    """Return the indices of at most ``limit`` of ``count`` samples, in order.

    They are drawn, as rows may be sorted, and are always the same.
    """
    order = torch.randperm(count, generator=seeded_generator(0))
    if limit is None or limit >= count:
        return list(range(count))
    return sorted(order[:limit].tolist())


def split_sizes(recipe: Any, count: int) -> tuple[int | None, int]:
    """Return how many of ``count`` training samples to train on (None: all others) and how many to hold out.

    Test samples are not among them. The user's own data may have fewer samples than the recipe asks for: then, or if
    more would be held out than trained on, at most a tenth is held out and the rest trained on.

    Raises:
        ValueError: for named data with fewer samples than the recipe asks for.
    """
    train, valid = recipe.train_images, recipe.valid_images
    required = valid + (valid if train is None else train)
    if is_own(recipe.dataset) and 1 < count < required:
        held_out = min(valid, max(1, count // 10))
        return train and min(train, count - held_out), held_out

    required = valid + (1 if train is None else train)
    if required > count:
        raise ValueError(
            f"{recipe.dataset}: {required} training and validation images wanted, there are {count}"
        )
    return train, valid


def title_with_sizes(title: str, recipe: Any, train: Sized, valid: Sized) -> str:
    """Return a title, with the numbers of images if they are fewer than the recipe asks for."""
    if len(valid) == recipe.valid_images and recipe.train_images in (None, len(train)):
        return title
    return f"{title}, {len(train):,} training and {len(valid):,} validation images"


def class_count(name: str, labels: Any) -> int:
    """Return the number of classes: one more than the largest label of the training data.

    Args:
        name: name of the labelled samples in errors.
        labels: (n,) whole numbers from 0.

    Raises:
        ValueError: for one class only, and for labels that are not 0, 1, 2, ...: each would be an output of the model.
    """
    smallest, largest = int(labels.min()), int(labels.max())
    if largest >= max(MAX_CLASSES, len(labels)):
        raise ValueError(
            f"{name}: label {largest} of {len(labels)}; classes must be numbered 0, 1, 2, ..."
        )
    if smallest == largest:
        raise ValueError(
            f"{name}: all {len(labels)} labels are {largest}; there is nothing to learn from one class"
        )
    if smallest > 0:
        raise ValueError(
            f"{name}: labels are {smallest} to {largest}; classes must be numbered 0, 1, 2, ..."
        )
    return largest + 1


def as_int64_vector(name: str, values: Any, missing: int | None = None) -> np.ndarray:
    """Return numbers of shape (n,) or (n, 1) as (n,) int64.

    Args:
        name: name of the numbers in errors.
        values: array or sequence of numbers.
        missing: number that replaces NaN; None refuses NaN.

    Raises:
        ValueError: for other shapes and types, and for numbers that are not whole: names the first.
    """
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iufb":
        raise ValueError(
            f"{name} must be whole numbers of shape (n,), got {array.dtype} {array.shape}"
        )

    if array.dtype.kind == "f":
        if missing is not None:
            array = np.where(np.isnan(array), missing, array)
        is_whole = (
            np.isfinite(array) & (array == np.floor(array)) & (np.abs(array) < 2.0**53)
        )
    elif array.dtype.kind == "u":
        is_whole = array <= np.iinfo(np.int64).max
    else:
        is_whole = np.ones(len(array), bool)
    if not is_whole.all():
        first = int((~is_whole).argmax())
        raise ValueError(
            f"{name} must be whole numbers, number {first} is {array[first]:.6g}"
        )
    return array.astype(np.int64)
