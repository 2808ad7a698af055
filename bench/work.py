"""Work of a call, counted instead of timed: the same on every machine, however busy it is.

Counted are the lines that Python runs, with calls and returns; the numbers that torch's operations read and write; the
bytes that are read from files; and the most memory that Python and numpy hold. A loop in C over a list or a text is in
none of them.
"""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

IO = Path("/proc/self/io")  # of Linux


class Work(NamedTuple):
    """What a call did.

    Attributes:
        lines: run by Python in this thread, calls and returns, of generators too.
        numbers: elements of the tensors that operations of torch got and returned.
        bytes_read: from files, 0 where the system does not tell.
        memory: bytes, the most at a time, of Python's objects and numpy's arrays.
    """

    lines: int
    numbers: int
    bytes_read: int
    memory: int


# below these what is constant outweighs what grows
MIN_WORK = Work(lines=4_000, numbers=4_000, bytes_read=40_000, memory=400_000)


class _CountingTensors(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, output))
        self.numbers += sum(leaf.numel() for leaf in leaves if hasattr(leaf, "numel"))
        return output


def count_work(call: Callable[[], Any]) -> Work:
    """Return the work of a call, which runs once."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        return trace

    gc.collect()
    tensors, before = _CountingTensors(), _bytes_read()
    former = sys.gettrace()
    tracemalloc.start()
    try:
        with tensors:
            sys.settrace(trace)
            call()
    finally:
        sys.settrace(former)
        _, memory = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return Work(lines, tensors.numbers, _bytes_read() - before, memory)


def ratios(small: Work, large: Work) -> dict[str, float]:
    """Return by how much each kind of work grows; without what stays below ``LEAST``."""
    pairs = zip(Work._fields, small, large, MIN_WORK, strict=True)
    return {
        name: b / max(a, minimum / 4) for name, a, b, minimum in pairs if b >= minimum
    }


def _bytes_read() -> int:
    try:
        return int(IO.read_text().split()[1])
    except OSError:
        return 0
