"""Loading of data: worker processes and their memory, transfer to the device, a cache of the last data set.

``load_once`` keeps the data set that was loaded last, since a sweep runs many recipes on one data set.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cpt_lab.data.files import DataNotFoundError, fingerprint
from cpt_lab.data.random_streams import seeded_generator
from cpt_lab.experiments.schema import Recipe
from cpt_lab.paths import data_dir, work_dir
from cpt_lab.resources import shared_memory, usable_cores

MAX_DEFECTS = 10  # defects in one message
MAX_READERS = 32  # processes that read: more do not read faster than a GPU trains
PREFETCHED_BATCHES = 2  # batches that each of them keeps ready
R = TypeVar("R", bound=Recipe)
S = TypeVar("S")
T = TypeVar("T")


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


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device. A GPU copies it when it comes to it, and nobody waits."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def reader_count(batch_bytes: int) -> int:
    """Return how many processes read for a run: one per core that it may use, as far as their batches find room.

    Args:
        batch_bytes: of one batch of every kind that is read at a time, of training and of evaluation.

    Raises:
        OSError: where the shared memory has no room for the batches of one: the first would end the run by SIGBUS.

    Warns:
        UserWarning: where it has no room for those of all.
    """
    wanted, room = min(MAX_READERS, usable_cores()), shared_memory()
    each = PREFETCHED_BATCHES * batch_bytes
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


def make_loader(
    data: Dataset, device: torch.device, workers: int, **keys: Any
) -> DataLoader:
    """Return a loader that takes nothing from torch's random numbers: they belong to the model.

    Args:
        data: the data set.
        device: where its batches go next.
        workers: processes that read; 0 reads here.
        **keys: the batches: ``batch_sampler``, or ``sampler`` with ``batch_size=None``.
    """
    pinned = device.type == "cuda"
    ahead = PREFETCHED_BATCHES if workers else None
    return DataLoader(
        data,
        num_workers=workers,
        prefetch_factor=ahead,
        pin_memory=pinned,
        generator=seeded_generator(0),
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
        more = [f"and {len(wrong) - MAX_DEFECTS} more"] * (len(wrong) > MAX_DEFECTS)
        raise ValueError(
            "\n".join(
                [f"{len(wrong)} files are wrong:", *list(wrong)[:MAX_DEFECTS], *more]
            )
        )
    return found
