"""What all data share: random numbers by key, batches that other processes read, checks, memory of what was loaded."""

import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cpt_lab.data.files import DataNotFoundError, fingerprint
from cpt_lab.experiments.schema import Recipe, is_own
from cpt_lab.paths import data_dir, work_dir
from cpt_lab.resources import shared_memory, usable_cores

SPLITS = ("train", "valid", "test")
MOST_CLASSES = 10_000  # where there are not as many samples
MOST_NAMED = 10  # defects in one message
MAX_READERS = 32  # processes that read: more do not read faster than a GPU trains
PREFETCH = 2  # batches that each of them keeps ready
R = TypeVar("R", bound=Recipe)
S = TypeVar("S")
T = TypeVar("T")


class Stream(IntEnum):
    """What random numbers are drawn for, the last part of their key: two purposes never share a stream."""

    ORDER = 0  # of the samples of an epoch
    AUGMENT = 1  # of a batch
    IMAGE = 2  # augmentation of one image
    SAMPLE = 3  # of neighbours, in training
    EVALUATE = 4  # of neighbours, in evaluation


def generator_of(*numbers: int, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a generator whose stream is a function of the numbers and the device, such as (seed, step, purpose)."""
    seed = int.from_bytes(
        hashlib.sha256(repr(tuple(map(int, numbers))).encode()).digest()[:7]
    )
    return torch.Generator(device).manual_seed(seed)


def batch_keys(
    count: int, batch: int, seed: int, start: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield the keys (epoch, number) of every batch from step ``start`` on, without end.

    The last batch of an epoch may be smaller. One iterator serves all epochs: processes that read start once.
    """
    first, position = divmod(start, math.ceil(count / batch))
    for epoch in itertools.count(first):
        order = torch.randperm(
            count, generator=generator_of(seed, epoch, Stream.ORDER)
        ).tolist()
        for i in range(position * batch, count, batch):
            yield [(epoch, number) for number in order[i : i + batch]]
        position = 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: what is made of data must not depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def send(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device. A GPU copies it when it comes to it, and nobody waits."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def readers(batch_bytes: int) -> int:
    """Return how many processes read for a run: one per core that it may use, as far as their batches find room.

    Args:
        batch_bytes: of one batch of every kind that is read at a time, of training and of evaluation.

    Raises:
        OSError: where the shared memory has no room for the batches of one: the first would end the run by SIGBUS.

    Warns:
        UserWarning: where it has no room for those of all.
    """
    wanted, room = min(MAX_READERS, usable_cores()), shared_memory()
    each = PREFETCH * batch_bytes
    if room is None or room // each >= wanted:
        return wanted
    said = (
        f"/dev/shm has {room / 1e6:,.0f} MB for this run, and each of {wanted} processes that read needs "
        f"{each / 1e6:,.0f} MB; start the container with --ipc=host, or --shm-size={wanted * each // 10**6 + 1}m"
    )
    if room < each:
        raise OSError(said)
    warnings.warn(f"{said}: as it is only {room // each} of them read", stacklevel=3)
    return room // each


def loader(
    data: Dataset, device: torch.device, workers: int, **keys: Any
) -> DataLoader:
    """Return a loader that takes nothing from torch's random numbers: they belong to the model.

    Args:
        device: where its batches go next.
        workers: processes that read; 0 reads here.
        **keys: the batches: ``batch_sampler``, or ``sampler`` with ``batch_size=None``.
    """
    pinned = device.type == "cuda"
    ahead = PREFETCH if workers else None
    return DataLoader(
        data,
        num_workers=workers,
        prefetch_factor=ahead,
        pin_memory=pinned,
        generator=generator_of(0),
        **keys,
    )


_last: dict[Callable[..., Any], tuple[tuple, Any]] = {}


def load_once(load: Callable[[R], T], recipe: R, *fields: str) -> T:
    """Return ``load(recipe)``, from memory if the last call loaded the same: a sweep runs many recipes on one data set.

    Files that changed since, and another data folder, are noticed.

    ``fields``: of the recipe, on which what is loaded depends too.
    """
    where = (
        recipe.dataset,
        data_dir().absolute(),
        work_dir().absolute(),
        fingerprint(recipe),
    )
    key = (*where, *(getattr(recipe, name) for name in fields))
    if load not in _last or _last[load][0] != key:
        _last.pop(load, None)  # there may not be memory for both
        _last[load] = key, load(recipe)
    return _last[load][1]


def read_each(read: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return ``read(item)`` of all items; ValueError has a line for every one that cannot be read, ten at most."""
    found: list[T] = []
    wrong: dict[str, Exception] = {}
    for item in items:
        try:
            found.append(read(item))
        except (ValueError, DataNotFoundError) as error:
            wrong[str(error)] = error
    if len(wrong) == 1:
        raise next(iter(wrong.values()))
    if wrong:
        more = [f"and {len(wrong) - MOST_NAMED} more"] * (len(wrong) > MOST_NAMED)
        raise ValueError(
            "\n".join(
                [f"{len(wrong)} files are wrong:", *list(wrong)[:MOST_NAMED], *more]
            )
        )
    return found


def whole_numbers(what: str, values: Any, missing: int | None = None) -> np.ndarray:
    """Return numbers of shape (n,) or (n, 1) as (n,) int64.

    Args:
        what: they are, for the errors.
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


def class_count(what: str, labels: Any) -> int:
    """Return how many classes there are: one more than the largest label of what is trained on.

    Args:
        what: they are labels of, for the errors.
        labels: (n,) whole numbers from 0.

    Raises:
        ValueError: for one class only, and where labels are no numbers of classes: every number is an output.
    """
    largest = int(labels.max())
    if largest >= max(MOST_CLASSES, len(labels)):
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


def some_of(there: int, limit: int | None) -> list[int]:
    """Return which of ``there`` samples are used, at most ``limit``: drawn, as rows may be sorted; always the same."""
    order = torch.randperm(there, generator=generator_of(0))
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
