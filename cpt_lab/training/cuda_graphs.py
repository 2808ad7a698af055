"""Capture of optimizer steps and forward passes as CUDA graphs: thousands of kernel launches become one replay.

``Capture`` executes steps until they repeat, then records and replays them; ``CudaRecorder`` makes the CUDA graphs. A
recording is fixed: its kernels, shapes, addresses and all Python numbers in between. All that changes from step to step
must therefore lie in tensors that stay where they are: batch, carried state, learning rate, bits
(``LayerPrecision.num_steps``, filled in place) and the keys of the rounding noise, which the kernels advance by
themselves. One recording thus serves a whole schedule and gives the numbers of the steps that it replaces. Hooks of the
model, and all other Python code, do not run in a replayed step.

``CPT_CAPTURE=0`` in the environment turns capture off.
"""

import logging
import os
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

# Consecutive steps of one kind before it is recorded, in which libraries choose kernels and allocate memory.
CAPTURE_WARM_UP_STEPS = 3
CAPTURE_VARIABLE = "CPT_CAPTURE"
log = logging.getLogger(__name__)

# (batch, carry) -> (loss, carry), without synchronising with the host
StepFunction = Callable[[Any, Any], tuple[Tensor, Any]]


class CudaRecorder:
    """Recorder of CUDA graphs, the only class here that calls CUDA.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def warm_up(self, work: Callable[[], Any]) -> Any:
        """Execute ``work`` on a side stream, as recording does; the current stream waits for it."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = work()
        current.wait_stream(self.stream)
        return result

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        """Record ``work`` without executing it.

        Threads that load data may use CUDA meanwhile.

        Returns:
            The function that replays the recording, and the result that every replay overwrites.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


def unsupported_reason(device: torch.device, fixed_shape: bool) -> str:
    """Return why the steps of a task are not captured, "" if they are."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if (
        not torch.cuda.is_available()
    ):  # tests name a CUDA device on machines without one
        return "torch sees no CUDA device"
    if os.environ.get(CAPTURE_VARIABLE, "1") == "0":
        return f"{CAPTURE_VARIABLE}=0"
    return "" if fixed_shape else "shapes differ from step to step"


class Capture:
    """A step function that is executed until its steps repeat, and replayed from then on.

    Args:
        work: one step; all its numbers lie in tensors.
        recorder: recorder of the device.
        state: returns what the step depends on besides tensors, such as which layers quantise at all.
        written_tensors: tensors that the step changes and other code checks: a replay would not advance their version
            counters.

    Attributes:
        replayed: number of steps that were replayed.
        failure_reason: why nothing more is recorded after an error; "" without one.
    """

    def __init__(
        self,
        work: StepFunction,
        recorder: CudaRecorder,
        state: Callable[[], Hashable],
        written_tensors: Iterable[Tensor] = (),
    ) -> None:
        self.work, self.recorder, self.state = work, recorder, state
        self.written_tensors = list(written_tensors)
        self.replayed = 0
        self.failure_reason = ""
        self.reset()

    def reset(self) -> None:
        """Drop all recordings, because tensors that they read or write were exchanged."""
        self._recorded: dict[Hashable, _RecordedStep] = {}
        self._last_key: Hashable = ""
        self._last_leaves: list[Any] = []
        # For every leaf, whether all consecutive steps of the last kind had the same object; then how many they were.
        self._constant: list[bool] = []
        self._repeats_seen = 0

    def __call__(self, batch: Any, carry: Any) -> tuple[Tensor, Any]:
        """Execute or replay one step; the caller may keep the loss, the carry lasts until the next step."""
        leaves, structure = tree_flatten((batch, carry))
        key = (structure_key((batch, carry)), self.state())
        recorded = self._recorded.get(key)
        if recorded is None and not self.failure_reason and self._repeats(key, leaves):
            recorded = self._record(key, leaves, structure)
        if recorded is None:
            return self.recorder.warm_up(partial(self.work, batch, carry))
        if not recorded.fits(leaves):  # a leaf that seemed constant has changed
            del self._recorded[key]
            return self(batch, carry)

        self.replayed += 1
        # A replay ends the series of equal steps, so that the last, smaller batch of an epoch is not recorded.
        self._last_key, self._last_leaves = "", []
        result = recorded(leaves)
        increment_version(self.written_tensors)
        return result

    def _repeats(self, key: Hashable, leaves: list[Any]) -> bool:
        if key == self._last_key:
            unchanged = [a is b for a, b in zip(leaves, self._last_leaves, strict=True)]
            self._constant = [
                a and b for a, b in zip(self._constant, unchanged, strict=True)
            ]
            self._repeats_seen += 1
        else:
            self._constant, self._repeats_seen = [True] * len(leaves), 0
        self._last_key, self._last_leaves = key, leaves
        return self._repeats_seen >= CAPTURE_WARM_UP_STEPS

    def _record(
        self, key: Hashable, leaves: list[Any], structure: Any
    ) -> "_RecordedStep | None":
        fixed_leaves = [
            leaf.clone() if isinstance(leaf, Tensor) and not is_constant else leaf
            for leaf, is_constant in zip(leaves, self._constant, strict=True)
        ]
        batch, carry = tree_unflatten(fixed_leaves, structure)
        try:
            replay, result = self.recorder.record(partial(self.work, batch, carry))
        except Exception as error:
            self.failure_reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning(
                "the steps of this run cannot be captured and go on one launch at a time: %s",
                self.failure_reason,
            )
            return None
        self._recorded[key] = _RecordedStep(
            replay, result, fixed_leaves, self._constant
        )
        return self._recorded[key]


class _RecordedStep:
    """A recorded step: its replay function, its results, the leaves that it reads and which of them are constant."""

    def __init__(
        self,
        replay: Callable[[], Any],
        result: Any,
        leaves: list[Any],
        constant: list[bool],
    ) -> None:
        self.replay, self.result = replay, result
        self.leaves, self.constant = leaves, constant

    def fits(self, leaves: list[Any]) -> bool:
        """Return whether the constant leaves are identical to the recorded objects."""
        return all(
            leaf is recorded_leaf
            for leaf, recorded_leaf, is_constant in zip(
                leaves, self.leaves, self.constant, strict=True
            )
            if is_constant
        )

    def __call__(self, leaves: list[Any]) -> tuple[Tensor, Any]:
        for recorded_leaf, leaf, is_constant in zip(
            self.leaves, leaves, self.constant, strict=True
        ):
            if not is_constant and isinstance(recorded_leaf, Tensor):
                recorded_leaf.copy_(leaf, non_blocking=True)
        self.replay()
        loss, carry = self.result
        return tree_map_only(Tensor, torch.clone, loss), carry


def structure_key(tree: Any) -> Hashable:
    """Return a key that is equal for two trees on which a step runs equal kernels.

    It has the structure of the tree, the layout of tensors, and the values of numbers and strings; any other object is
    equal to itself alone.
    """

    def leaf_key(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
        return leaf if isinstance(leaf, bool | int | float | str | None) else id(leaf)

    leaves, structure = tree_flatten(tree)
    return structure, tuple(map(leaf_key, leaves))
