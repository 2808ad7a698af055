"""What all data share: errors for data that is not there, paths of the user's own, random numbers by key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from cpt_core.experiments.recipe import Recipe
from cpt_core.paths import data_dir, work_dir

R = TypeVar("R", bound=Recipe)
T = TypeVar("T")


class DataNotFoundError(FileNotFoundError):
    """A data set is not on this machine; the message names the command that gets it."""


def own_path(path: str) -> Path:
    """Resolve a path of the user's: relative ones are looked up in the data folder, then in ``work_dir()``."""
    given = Path(path.strip()).expanduser()
    if given.is_absolute() or (data_dir() / given).exists():
        return data_dir() / given
    return work_dir() / given


class Stream(IntEnum):
    """What random numbers are drawn for, the last part of their key: two purposes never share a stream."""

    ORDER = 0  # of the samples of an epoch
    AUGMENT = 1  # of a batch
    IMAGE = 2  # augmentation of one image
    SAMPLE = 3  # of neighbours, in training
    EVALUATE = 4  # of neighbours, in evaluation


def generator_of(*numbers: int) -> torch.Generator:
    """Return a generator whose stream is a function of the numbers alone, such as (seed, step, purpose)."""
    seed = int.from_bytes(hashlib.sha256(repr(tuple(map(int, numbers))).encode()).digest()[:7])
    return torch.Generator().manual_seed(seed)


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the samples (or batches) of an epoch, (count,) int64."""
    return torch.randperm(count, generator=generator_of(seed, epoch, Stream.ORDER))


_last: dict[Callable[..., Any], tuple[tuple, Any]] = {}


def load_once(load: Callable[[R], T], recipe: R, *fields: str) -> T:
    """Return ``load(recipe)``, from memory if the last call loaded the same: a sweep runs many recipes on one data set.

    Args:
        load: of it, the last result is kept in this process.
        recipe: names the data set.
        fields: of the recipe, on which what is loaded depends too.
    """
    key = (recipe.dataset, data_dir(), *(getattr(recipe, name) for name in fields))
    if load not in _last or _last[load][0] != key:
        _last.pop(load, None)  # there may not be memory for both
        _last[load] = key, load(recipe)
    return _last[load][1]
