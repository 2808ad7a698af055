"""One run on several processes, which ``torchrun`` starts: each trains on its part of every batch.

    torchrun --nproc-per-node 4 -m cpt_lab run imagenet/resnet34

All round on ranges of the whole batch, with noise of their own, and take the mean of their gradients. The first one
leads: it claims the runs, evaluates, writes checkpoints and rows. Alone, all of this does nothing.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed

from cpt_extras.integrations.distributed import own_ranges, synced_ranges
from cpt_lab.signals import PASSED_ON


def count() -> int:
    """Return how many processes train a run."""
    return (
        distributed.get_world_size()
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


def rank() -> int:
    """Return the number of this process, 0 of the first."""
    return distributed.get_rank() if count() > 1 else 0


@contextmanager
def joined() -> Iterator[bool]:
    """Join the other processes, where torchrun started this one; yield whether it leads."""
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        yield True
        return
    if gpu := torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo"
    )  # objects go through CPUs
    if rank():  # they stop when the first one does, at the same step
        for number in (signal.SIGINT, signal.SIGTERM, *PASSED_ON):
            signal.signal(number, signal.SIG_IGN)
    try:
        yield not rank()
    finally:
        if not rank():
            tell(None)
        distributed.destroy_process_group()


def tell(what: Any) -> Any:
    """Return what the first process has said, in all of them."""
    said = [what]
    if count() > 1:
        distributed.broadcast_object_list(said)
    return said[0]


def by_first(work: Callable[[], Any]) -> Any:
    """Return in all processes what the first one computes, alone, on ranges of its own; raise what it raises."""
    found: Any = None
    if not rank():
        try:
            with own_ranges():
                found = work()
        except Exception as error:
            found = error
    if isinstance(found := tell(found), Exception):
        raise found
    return found


def agreed() -> AbstractContextManager[None]:
    """Round on ranges of all processes, where there are several."""
    return synced_ranges() if count() > 1 else nullcontext()


def share(of: Any) -> Any:
    """Return this process's part of a batch's tensor or list; what does not divide, at an epoch's end, is left out."""
    each = len(of) // count()
    return of[rank() * each : (rank() + 1) * each] if each else of


def mean(loss: Tensor) -> Tensor:
    """Return the mean of a loss, (0-d), over all processes."""
    if count() > 1:
        distributed.all_reduce(loss := loss / count())
    return loss


def gathered(what: Any) -> list[Any]:
    """Return what every process has."""
    said: list[Any] = [what] * count()
    if count() > 1:
        distributed.all_gather_object(said, what)
    return said
