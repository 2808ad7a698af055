"""Work of a call, counted instead of timed, so that it does not depend on the machine or its load.

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
    """Counted work of a call.

    Attributes:
        lines: lines, calls and returns that Python ran in this thread.
        numbers: elements of the inputs and outputs of torch's operations.
        bytes_read: bytes read from files; 0 if the system does not report them.
        memory: peak bytes of Python objects and numpy arrays.
    """

    lines: int
    numbers: int
    bytes_read: int
    memory: int


# Work below these figures is dominated by constant costs.
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
    """Run a call once and return its work."""
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
    """Return the growth of every kind of work that reaches ``MIN_WORK``."""
    pairs = zip(Work._fields, small, large, MIN_WORK, strict=True)
    return {
        name: b / max(a, minimum / 4) for name, a, b, minimum in pairs if b >= minimum
    }


def _bytes_read() -> int:
    try:
        return int(IO.read_text().split()[1])
    except OSError:
        return 0
