"""Data-parallel training of one run by the processes that ``torchrun`` starts.

    torchrun --nproc-per-node 4 -m cpt_lab run imagenet/resnet34

Every process trains on its part of each batch, rounds on ranges of the whole batch with rounding noise of its own, and
applies the mean of all gradients. The first process (rank 0) claims the runs, evaluates, and writes checkpoints and
rows. Without torchrun there is one process, and the functions return their arguments unchanged.
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


def size() -> int:
    """Return the number of processes that train a run."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def rank() -> int:
    """Return the rank of this process; 0 is the first."""
    return distributed.get_rank() if size() > 1 else 0


@contextmanager
def join_process_group() -> Iterator[bool]:
    """Join the process group if torchrun started this process; yield whether its rank is 0.

    Processes of higher ranks ignore signals: they stop at the step at which the first process stops.
    """
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        yield True
        return

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Python objects travel through CPU memory, so gloo is needed beside nccl.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    if rank():
        for number in (signal.SIGINT, signal.SIGTERM, *PASSED_ON):
            signal.signal(number, signal.SIG_IGN)
    try:
        yield not rank()
    finally:
        if not rank():
            broadcast(None)
        distributed.destroy_process_group()


def broadcast(value: Any) -> Any:
    """Return in every process the ``value`` that the first process passes."""
    values = [value]
    if size() > 1:
        distributed.broadcast_object_list(values)
    return values[0]


def run_on_first(work: Callable[[], Any]) -> Any:
    """Call ``work`` in the first process alone; return its result in all processes.

    The first process rounds on its own ranges meanwhile. An exception that ``work`` raises is raised in all processes.
    """
    outcome: Any = None
    if not rank():
        try:
            with own_ranges():
                outcome = work()
        except Exception as error:
            outcome = error
    outcome = broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def global_ranges() -> AbstractContextManager[None]:
    """Round on ranges of all processes inside a ``with`` block, if there are several."""
    return synced_ranges() if size() > 1 else nullcontext()


def local_part(batch: Any) -> Any:
    """Return this process's part of a batch, which is a tensor or a list.

    Samples that do not divide evenly, at the end of an epoch, are dropped. A batch with fewer samples than processes
    goes whole to each of them.
    """
    part_size = len(batch) // size()
    if not part_size:
        return batch
    return batch[rank() * part_size : (rank() + 1) * part_size]


def mean(loss: Tensor) -> Tensor:
    """Return the mean of a loss (0-d) over all processes."""
    if size() > 1:
        loss = loss / size()
        distributed.all_reduce(loss)
    return loss


def gather(value: Any) -> list[Any]:
    """Return the ``value`` of every process, in the order of their ranks."""
    values: list[Any] = [value] * size()
    if size() > 1:
        distributed.all_gather_object(values, value)
    return values
