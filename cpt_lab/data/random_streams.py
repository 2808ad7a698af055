"""Random numbers of data: generators seeded by a key such as (seed, step, purpose), and the order of samples.

Equal keys give equal numbers in every process, so a resumed run and a run with other workers see the same batches.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from enum import IntEnum

import torch


class Stream(IntEnum):
    """Purposes of random numbers, the last part of their key, so that no two purposes share a stream."""

    ORDER = 0  # order of the samples of an epoch
    AUGMENT = 1  # augmentation of a batch
    IMAGE = 2  # augmentation of one image
    SAMPLE = 3  # sampling of neighbours in training
    EVALUATE = 4  # sampling of neighbours in evaluation


def seeded_generator(
    *numbers: int, device: str | torch.device = "cpu"
) -> torch.Generator:
    """Return a generator that is seeded by numbers, such as (seed, step, purpose).

    Equal numbers on an equal device give an equal stream.
    """
    seed = int.from_bytes(
        hashlib.sha256(repr(tuple(map(int, numbers))).encode()).digest()[:7]
    )
    return torch.Generator(device).manual_seed(seed)


def batch_keys(
    count: int, batch: int, seed: int, start: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield the keys (epoch, index of the sample) of every batch from step ``start`` on, without end.

    The last batch of an epoch may be smaller. One iterator serves all epochs, so that worker processes start once.
    """
    first, position = divmod(start, math.ceil(count / batch))
    for epoch in itertools.count(first):
        order = torch.randperm(
            count, generator=seeded_generator(seed, epoch, Stream.ORDER)
        ).tolist()
        for i in range(position * batch, count, batch):
            yield [(epoch, number) for number in order[i : i + batch]]
        position = 0
