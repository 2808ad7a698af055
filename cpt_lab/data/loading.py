"""Batches that other processes read: how many processes, and the memory that passes their batches on.

A batch stays bytes until it is on the device, in memory from which a GPU copies while it computes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from cpt_lab.data.common import generator_of
from cpt_lab.machine import shared_memory, usable_cores

MOST = 32  # processes: more do not read faster than a GPU trains
PREFETCH = 2  # batches that each of them keeps ready


def readers(batch_bytes: int) -> int:
    """Return how many processes read for a run: one per core that it may use, as far as their batches find room.

    Args:
        batch_bytes: of one batch of every kind that is read at a time, of training and of evaluation.

    Raises:
        OSError: where the shared memory has no room for the batches of one: the first would end the run by SIGBUS.

    Warns:
        UserWarning: where it has no room for those of all.
    """
    wanted, room = min(MOST, usable_cores()), shared_memory()
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


def loader(data: Dataset, device: torch.device, workers: int, **keys: Any) -> DataLoader:
    """Return a loader that takes nothing from torch's random numbers: they belong to the model.

    Args:
        device: where its batches go next.
        workers: processes that read; 0 reads here.
        **keys: the batches: ``batch_sampler``, or ``sampler`` with ``batch_size=None``.
    """
    pinned = device.type == "cuda"
    ahead = PREFETCH if workers else None
    return DataLoader(
        data, num_workers=workers, prefetch_factor=ahead, pin_memory=pinned, generator=generator_of(0), **keys
    )
