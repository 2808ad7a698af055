"""An optimizer step, or a forward pass, recorded once on a GPU and replayed: thousands of small launches become one.

What is recorded is fixed: kernels, shapes, addresses, and every Python number in between. All that changes from step to
step must therefore lie in tensors that stay where they are: batch, carried state, learning rate, bits
(``LayerPrecision.num_steps``, filled in place) and the keys of the rounding noise, which kernels advance.
So one recording serves a whole schedule, and gives the numbers of the steps that it replaces. Hooks of the model, and
all else in Python, do not run in a replayed step.

``CPT_CAPTURE=0`` in the environment turns it off.
"""

import logging
import os
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

WARM_UP = 3  # steps of one kind, one after the other, before it is recorded: libraries choose and allocate in them
VARIABLE = "CPT_CAPTURE"
log = logging.getLogger(__name__)

Work = Callable[
    [Any, Any], tuple[Tensor, Any]
]  # (batch, carry) -> (loss, carry), without a word to the host


class CudaRecorder:
    """CUDA graphs, the only part that knows CUDA.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def warm_up(self, work: Callable[[], Any]) -> Any:
        """Do the work as the recorded one is done, on a stream beside the usual one, which waits for it."""
        usual = torch.cuda.current_stream()
        self.stream.wait_stream(usual)
        with torch.cuda.stream(self.stream):
            result = work()
        usual.wait_stream(self.stream)
        return result

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        """Capture the work without doing it; return what replays it, and the result that every replay overwrites.

        Threads that load data may use CUDA meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


def unsupported_reason(device: torch.device, fixed_shape: bool) -> str:
    """Return why the steps of a task are not captured, "" where they are."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if not torch.cuda.is_available():  # a device that only says that it is one
        return "torch sees no CUDA device"
    if os.environ.get(VARIABLE, "1") == "0":
        return f"{VARIABLE}=0"
    return "" if fixed_shape else "shapes differ from step to step"


class Capture:
    """Steps that are done as they are until they repeat, and replayed from then on.

    Args:
        work: one step; all its numbers lie in tensors.
        recorder: of the device.
        state: what the step depends on besides tensors, such as which layers quantise at all.
        written: tensors that the step changes and others look at: a replay would leave their versions as they were.
    """

    def __init__(
        self,
        work: Work,
        recorder: CudaRecorder,
        state: Callable[[], Hashable],
        written: Iterable[Tensor] = (),
    ) -> None:
        self.work, self.recorder, self.state, self.written = (
            work,
            recorder,
            state,
            list(written),
        )
        self.replayed, self.why_not = (
            0,
            "",
        )  # how many steps, and why no more is recorded where something went wrong
        self.reset()

    def reset(self) -> None:
        """Forget what was recorded: tensors that it reads or writes were exchanged."""
        self._recorded: dict[Hashable, _Recorded] = {}
        self._former: tuple[Hashable, list[Any]] = (
            "",
            [],
        )  # kind and tensors of the step before
        self._constant: list[
            bool
        ] = []  # which tensors were the same objects in all steps of that kind in a row
        self._count = 0  # of those steps

    def __call__(self, batch: Any, carry: Any) -> tuple[Tensor, Any]:
        """Do one step, in whatever way; the loss is the caller's to keep, the carry lasts until the next step."""
        leaves, structure = tree_flatten((batch, carry))
        kind = (kind_of((batch, carry)), self.state())
        found = self._recorded.get(kind)
        if found is None and not self.why_not and self._repeats(kind, leaves):
            found = self._record(kind, leaves, structure)
        if found is None:
            return self.recorder.warm_up(partial(self.work, batch, carry))
        if not found.fits(leaves):  # what seemed constant has changed
            del self._recorded[kind]
            return self(batch, carry)
        self.replayed += 1
        self._former = (
            "",
            [],
        )  # the row of equal steps ends: the last batch of an epoch is not recorded
        result = found(leaves)
        increment_version(self.written)
        return result

    def _repeats(self, kind: Hashable, leaves: list[Any]) -> bool:
        former, before = self._former
        if kind == former:
            same = [a is b for a, b in zip(leaves, before, strict=True)]
            self._constant = [
                a and b for a, b in zip(self._constant, same, strict=True)
            ]
            self._count += 1
        else:
            self._constant, self._count = [True] * len(leaves), 0
        self._former = (kind, leaves)
        return self._count >= WARM_UP

    def _record(
        self, kind: Hashable, leaves: list[Any], structure: Any
    ) -> "_Recorded | None":
        fixed = [
            a.clone() if isinstance(a, Tensor) and not same else a
            for a, same in zip(leaves, self._constant, strict=True)
        ]
        batch, carry = tree_unflatten(fixed, structure)
        try:
            replay, result = self.recorder.record(partial(self.work, batch, carry))
        except Exception as error:
            self.why_not = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning(
                "the steps of this run cannot be captured and go on one launch at a time: %s",
                self.why_not,
            )
            return None
        self._recorded[kind] = _Recorded(replay, result, fixed, self._constant)
        return self._recorded[kind]


class _Recorded:
    """A recorded step: the tensors it reads, what replays it, and where its results are."""

    def __init__(
        self,
        replay: Callable[[], Any],
        result: Any,
        leaves: list[Any],
        constant: list[bool],
    ) -> None:
        self.replay, self.result, self.leaves, self.constant = (
            replay,
            result,
            leaves,
            constant,
        )

    def fits(self, leaves: list[Any]) -> bool:
        """Whether what was constant still is."""
        return all(
            a is b
            for a, b, same in zip(leaves, self.leaves, self.constant, strict=True)
            if same
        )

    def __call__(self, leaves: list[Any]) -> tuple[Tensor, Any]:
        for mine, given, same in zip(self.leaves, leaves, self.constant, strict=True):
            if not same and isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)
        self.replay()
        loss, carry = self.result
        return tree_map(torch.clone, loss), carry


def kind_of(tree: Any) -> Hashable:
    """What must be equal for two steps to run the same kernels; an object that is no number is that object."""

    def kind(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
        return leaf if isinstance(leaf, bool | int | float | str | None) else id(leaf)

    leaves, structure = tree_flatten(tree)
    return structure, tuple(map(kind, leaves))
