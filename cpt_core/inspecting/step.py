"""A training step on given inputs, of any model: its seconds, what it saves for its backward pass, and whose these are.

>>> step = TrainingStep(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.ones(5, 4),))
>>> step.seconds() > 0, step.saved().total()  # bytes: what ReLU saves
(True, 60)
"""

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from cpt_core.bitops.watch import Path, floating_in, tensors_in
from cpt_core.checks import choose


class TrainingStep(Path):
    """Forward and backward pass of a model on given inputs; gradients are computed, not kept, and nothing is updated.

    Args:
        model: on the device of the inputs, anyone's.
        modules: those of its modules that ``shares`` and ``saved`` tell apart, by name.

    Raises:
        ValueError: for a model on another device than the CPU or a GPU with CUDA.

    What runs inside a module is its own unless a module inside is told apart; and so is the backward pass of every
    node of the graph that was made meanwhile: nodes are numbered as they are made.
    """

    def __init__(
        self, model: nn.Module, inputs: tuple[Any, ...], modules: Mapping[str, nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.model, self.inputs, self.modules = model, inputs, modules or {}
        self.trained = [t for t in (*model.parameters(), *tensors_in(inputs)) if t.requires_grad]
        self.device = next((t.device for t in self.trained), torch.device("cpu"))
        choose("device of a model to time", self.device.type, ("cpu", "cuda"))
        self._gradients: list[Tensor] | None = None  # of the outputs, the same in every step
        self._spans: list[tuple[str, Any, Any]] = []  # a module's name, and marks of time at start and end
        self._since: Any = None
        self._from: list[int] = []  # numbers of nodes from which on ...
        self._owner: list[str | None] = []  # ... this module is the innermost that runs

    def seconds(self) -> float:
        """Run a step and return its seconds; here and below ValueError when no output of the model needs a gradient."""
        self._synchronize()
        start = time.perf_counter()
        self._backward(self._forward())
        self._synchronize()
        return time.perf_counter() - start

    def shares(self) -> dict[str, float]:
        """Run a step and return the share of its time that every module had that ran."""
        self._synchronize()
        begin = self._mark()
        with self._following():
            outputs = self._forward()
        self._watch_graph(outputs)
        self._backward(outputs)
        end = self._mark()
        self._synchronize()
        found: defaultdict[str, float] = defaultdict(float)
        for name, *marks in self._spans:
            found[name] += _between(*marks) / _between(begin, end)
        return found

    def saved(self) -> Counter[str | None]:
        """Run a step and return the bytes that its forward pass leaves for its backward pass, by module, None outside.

        Without parameters, buffers and inputs, which are there anyway.
        """
        known = {storage_of(t) for t in (*self.model.parameters(), *self.model.buffers(), *tensors_in(self.inputs))}
        held: dict[StorageWeakRef, tuple[str | None, int]] = {}

        def pack(x: Tensor) -> Tensor:
            key = storage_of(x)
            if key is not None and key not in known:
                held.setdefault(key, (self.names[-1] if self.names else None, x.untyped_storage().nbytes()))
            return x.detach()  # what a node saves of its own result would hold the node

        with self._following(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            outputs = self._forward()
        found: Counter[str | None] = Counter()
        for key, (name, size) in held.items():
            found[name] += 0 if key.expired() else size
        self._backward(outputs)
        return found

    def _forward(self) -> list[Tensor]:
        """Return the outputs that need a gradient."""
        found = [y for y in floating_in(self.model(*self.inputs)) if y.requires_grad]
        if not found:
            raise ValueError(f"no output of {type(self.model).__name__} needs a gradient: there is no step to measure")
        return found

    def _backward(self, outputs: list[Tensor]) -> None:
        if self._gradients is None:
            self._gradients = [torch.randn_like(y) for y in outputs]
        torch.autograd.grad(outputs, self.trained, self._gradients, allow_unused=True)

    def _following(self) -> AbstractContextManager[None]:
        """Keep account of the module that is running, from now on."""
        self.names, self._spans, self._from, self._owner = [], [], [], []
        return self.following(self.modules)

    def pause(self) -> None:
        """Take the time of the module that ran."""
        if self.names:
            self._spans.append((self.names[-1], self._since, self._mark()))

    def resume(self) -> None:
        """Begin with that of another."""
        self._from.append(torch.autograd._get_sequence_nr())
        self._owner.append(self.names[-1] if self.names else None)
        self._since = self._mark()

    def _watch_graph(self, outputs: list[Tensor]) -> None:
        """Time every node of the graph that a module made."""
        left: list[Any] = [y.grad_fn for y in outputs]
        seen: set[Any] = {None}
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                left += [following for following, _ in node.next_functions]
                place = bisect_right(self._from, node._sequence_nr()) - 1
                if place >= 0 and (name := self._owner[place]) is not None:
                    self._watch_node(node, name)

    def _watch_node(self, node: Any, name: str) -> None:
        start: list[Any] = []
        node.register_prehook(lambda _: start.append(self._mark()))
        node.register_hook(lambda *_: self._spans.append((name, start.pop(), self._mark())))

    def _mark(self) -> Any:
        """Return a point in time: on a GPU one of its own time, when it has done what it was asked so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _between(start: Any, end: Any) -> float:
    return float(end - start) if isinstance(start, float) else start.elapsed_time(end) / 1e3


def storage_of(x: Tensor) -> StorageWeakRef | None:
    """Return what tells whose memory a tensor uses; None for a sparse tensor, which has none of its own."""
    try:
        return StorageWeakRef(x.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None
