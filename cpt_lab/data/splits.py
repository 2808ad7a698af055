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
MAX_CLASSES = 10_000  # where there are not as many samples


def choose_samples(there: int, limit: int | None) -> list[int]:
    """Return which of ``there`` samples are used, at most ``limit``: drawn, as rows may be sorted; always the same."""
    order = torch.randperm(there, generator=seeded_generator(0))
    return (
        [*range(there)]
        if limit is None or limit >= there
        else sorted(order[:limit].tolist())
    )


def split_sizes(recipe: Any, there: int) -> tuple[int | None, int]:
    """Return how many of ``there`` training samples are trained on (None: all that are left) and how many held out.

    Test samples are not among them. Named data must have what the recipe wants: ValueError when there are too few. Data
    of one's own may be smaller: where the wanted do not fit, or where more would be held out than trained on, at most a
    tenth is held out and the rest trained on.
    """
    train, valid = recipe.train_images, recipe.valid_images
    if (
        is_own(recipe.dataset)
        and there > 1
        and valid + (valid if train is None else train) > there
    ):
        held = min(valid, max(1, there // 10))
        return train and min(train, there - held), held
    if (wanted := valid + (1 if train is None else train)) > there:
        raise ValueError(
            f"{recipe.dataset}: {wanted} training and validation images wanted, there are {there}"
        )
    return train, valid


def title_with_sizes(title: str, recipe: Any, train: Sized, valid: Sized) -> str:
    """Return a title that says how many images there are, where ``split_sizes`` found fewer than the recipe wants."""
    as_wanted = len(valid) == recipe.valid_images and recipe.train_images in (
        None,
        len(train),
    )
    return (
        title
        if as_wanted
        else f"{title}, {len(train):,} training and {len(valid):,} validation images"
    )


def class_count(what: str, labels: Any) -> int:
    """Return how many classes there are: one more than the largest label of what is trained on.

    Args:
        what: they are labels of, for the errors.
        labels: (n,) whole numbers from 0.

    Raises:
        ValueError: for one class only, and where labels are no numbers of classes: every number is an output.
    """
    largest = int(labels.max())
    if largest >= max(MAX_CLASSES, len(labels)):
        raise ValueError(
            f"{what}: label {largest} of {len(labels)}; classes must be numbered 0, 1, 2, ..."
        )
    if int(labels.min()) == largest:
        raise ValueError(
            f"{what}: all {len(labels)} labels are {largest}; there is nothing to learn from one class"
        )
    if int(labels.min()) > 0:
        raise ValueError(
            f"{what}: labels are {int(labels.min())} to {largest}; classes must be numbered 0, 1, 2, ..."
        )
    return largest + 1


def as_int64_vector(what: str, values: Any, missing: int | None = None) -> np.ndarray:
    """Return numbers of shape (n,) or (n, 1) as (n,) int64.

    Args:
        what: name of the numbers in errors.
        values: array or sequence of numbers.
        missing: what NaN stands for; None refuses it.

    Raises:
        ValueError: for other shapes, for what is no number, and for numbers that are not whole: names the first.
    """
    given = np.asarray(values)
    if given.ndim == 2 and given.shape[1] == 1:
        given = given[:, 0]
    if given.ndim != 1 or given.dtype.kind not in "iufb":
        raise ValueError(
            f"{what} must be whole numbers of shape (n,), got {given.dtype} {given.shape}"
        )
    if given.dtype.kind == "f":
        given = given if missing is None else np.where(np.isnan(given), missing, given)
        wrong = ~(
            np.isfinite(given) & (given == np.floor(given)) & (np.abs(given) < 2.0**53)
        )
    else:
        wrong = (
            np.zeros(len(given), bool)
            if given.dtype.kind != "u"
            else given > np.iinfo(np.int64).max
        )
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"{what} must be whole numbers, number {first} is {given[first]:.6g}"
        )
    return given.astype(np.int64)
