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

MAX_DEFECTS = 10  # files that one error names
MAX_READERS = 32  # worker processes: more do not read faster than a GPU trains
PREFETCHED_BATCHES = 2  # batches that each worker process keeps ready
R = TypeVar("R", bound=Recipe)
S = TypeVar("S")
T = TypeVar("T")


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: numbers derived from data must not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device; the copy to a GPU does not block the CPU."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def reader_count(batch_bytes: int) -> int:
    """Return the number of worker processes that read for a run.

    There is one per core that the run may use, unless shared memory has no room for the batches of so many.

    Args:
        batch_bytes: size of one training batch and one evaluation batch together.

    Raises:
        OSError: if the shared memory has no room for one process: its first batch would end the run by SIGBUS.

    Warns:
        UserWarning: if the shared memory limits the number of processes.
    """
    max_readers, free_bytes = min(MAX_READERS, usable_cores()), shared_memory()
    bytes_per_reader = PREFETCHED_BATCHES * batch_bytes
    if free_bytes is None or free_bytes // bytes_per_reader >= max_readers:
        return max_readers

    message = (
        f"/dev/shm has {free_bytes / 1e6:,.0f} MB for this run, and each of {max_readers} processes that read needs "
        f"{bytes_per_reader / 1e6:,.0f} MB; start the container with --ipc=host, or "
        f"--shm-size={max_readers * bytes_per_reader // 10**6 + 1}m"
    )
    if free_bytes < bytes_per_reader:
        raise OSError(message)
    warnings.warn(
        f"{message}: as it is only {free_bytes // bytes_per_reader} of them read",
        stacklevel=3,
    )
    return free_bytes // bytes_per_reader


def make_loader(
    data: Dataset, device: torch.device, workers: int, **keys: Any
) -> DataLoader:
    """Return a DataLoader that draws no random numbers from torch's global state, which belongs to the model.

    Args:
        data: the data set.
        device: device to which batches go next.
        workers: processes that read; 0 reads in this process.
        **keys: the batches: ``batch_sampler``, or ``sampler`` with ``batch_size=None``.
    """
    return DataLoader(
        data,
        num_workers=workers,
        prefetch_factor=PREFETCHED_BATCHES if workers else None,
        pin_memory=device.type == "cuda",
        generator=seeded_generator(0),
        **keys,
    )


# Key and value of the last call of ``load_once``, by its function.
_last: dict[Callable[..., Any], tuple[tuple, Any]] = {}


def load_once(load: Callable[[R], T], recipe: R, *fields: str) -> T:
    """Return ``load(recipe)``, cached from the last call if data and fields are equal.

    The cache notices changed files and another data folder.

    Args:
        load: loads the data of a recipe.
        recipe: recipe whose data is loaded.
        *fields: fields of the recipe on which the loaded data depend, besides the data set.
    """
    source = (
        recipe.dataset,
        data_dir().absolute(),
        work_dir().absolute(),
        fingerprint(recipe),
    )
    key = (*source, *(getattr(recipe, name) for name in fields))
    if load not in _last or _last[load][0] != key:
        _last.pop(load, None)  # there may not be memory for both
        _last[load] = key, load(recipe)
    return _last[load][1]


def read_each(read: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return ``read(item)`` of all items.

    Raises:
        ValueError: if items cannot be read: one line for each, ``MAX_DEFECTS`` at most.
        DataNotFoundError: if a missing file is the only defect. A single error is raised as it is, of either class.
    """
    values: list[T] = []
    wrong: dict[str, Exception] = {}
    for item in items:
        try:
            values.append(read(item))
        except (ValueError, DataNotFoundError) as error:
            wrong[str(error)] = error
    if len(wrong) == 1:
        raise next(iter(wrong.values()))
    if wrong:
        lines = [f"{len(wrong)} files are wrong:", *list(wrong)[:MAX_DEFECTS]]
        if len(wrong) > MAX_DEFECTS:
            lines.append(f"and {len(wrong) - MAX_DEFECTS} more")
        raise ValueError("\n".join(lines))
    return values
