"""What a training step takes on this device, by bits and layer: seconds and saved activations beside BitOps.

>>> from cpt_core.quantization.convert import quantize_
>>> model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
>>> measured = measure_cost(model, (torch.ones(5, 4),), bits=(3, 8), repeats=1)
>>> measured.bits, list(measured.layers), measured.seconds(3) > 0
((3, 8), ['0', '2'], True)
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from cpt_core.bitops.copies import as_it_was, floating_in, storage_of, tensors_in
from cpt_core.bitops.plan import BitOpsPlan, bits_per_layer, price
from cpt_core.bitops.trace import CONVENTIONS, trace
from cpt_core.checks import choose, whole
from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.quantizers import check_bits
from cpt_core.quantization.scheduler import precision
from cpt_core.quantization.summary import summary
from cpt_core.schedules.layered import LayeredSchedule
from cpt_core.schedules.measured import MeasuredCost, Spent
from cpt_core.schedules.schedule import Schedule, StaticSchedule


def measure_cost(
    model: nn.Module,
    inputs: tuple[Any, ...],
    schedule: Schedule | None = None,
    *,
    bits: Sequence[int] | None = None,
    q_grad: int | None = None,
    repeats: int = 7,
    convention: str = "paper",
) -> MeasuredCost:
    """Measure a training step of a converted model at every bit width of a schedule.

    A step is the forward pass and the backward pass of its outputs, for a gradient of random numbers; the loss and the
    optimizer, whose work does not depend on bits, are left out. All widths take turns, ``repeats`` times after one
    round that warms up, and medians count. Whole steps run undisturbed; in others, which alternate with them, every
    module that ``summary`` lists is timed: its forward, without the modules inside, and the backward of what that left
    in the graph. Its share of such a step is its share of the whole. All steps are eager, as ``execution`` and the mode
    of the model have it.

    The model is afterwards what it was: parameters, gradients, running ranges, noise, bits, and torch's random numbers;
    only ``summary`` knows from then on which layers its forward pass called.

    Args:
        model: converted by ``quantize_``, in training mode; on the device of the inputs.
        inputs: the arguments of its forward for one step; real data of the batch size that is meant.
        schedule: whose bit widths are measured, its ``q_max`` always with them.
        bits: the bit widths, instead of a schedule.
        q_grad: gradient bits of all steps; None takes ``q_max``, or the highest of ``bits``.
        repeats: of every kind of step.
        convention: of the BitOps, see ``count_bitops``.

    Raises:
        ValueError: for values out of range, neither or both of schedule and bits, a schedule with other bits in other
            layers, a model that is not converted, is in evaluation mode, or has no output that needs a gradient.
    """
    widths, q_grad = _asked(schedule, bits, q_grad)
    repeats = whole("repeats", repeats, 1)
    choose("convention", convention, CONVENTIONS)
    layer_precisions(model)  # at least one
    if not model.training:
        raise ValueError("the model is in evaluation mode; call model.train() to measure training steps")
    plans = _plans(model, inputs, widths, q_grad, convention)
    names = [row.name for row in summary(model).rows]
    whole_steps: defaultdict[int, list[float]] = defaultdict(list)
    parts: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
    saved: dict[int, Counter[str | None]] = {}
    with as_it_was(model), torch.compiler.set_stance("force_eager"), torch.enable_grad():
        step = TrainingStep(model, inputs)
        watch = _Watch(model, names, step.device)
        for repeat in range(repeats + 1):
            for q in widths:
                with precision(model, q, q_grad):  # on entry layers forget the weights that they keep from step to step
                    if not repeat:
                        saved[q] = watch.saved(step)
                    seconds = step.seconds()
                with precision(model, q, q_grad):
                    shares = watch.shares(step)
                if repeat:
                    whole_steps[q].append(seconds)
                    parts[q].append(shares)
    steps = {q: Spent(statistics.median(whole_steps[q]), saved[q].total(), plans[q].total) for q in widths}

    def part(name: str, q: int) -> Spent:
        share = statistics.median(shares[name] for shares in parts[q])
        return Spent(share * steps[q].seconds, saved[q][name], _bitops(plans[q], name))

    ran = [name for name in names if name in parts[widths[0]][0]]
    by_layer = {name: {q: part(name, q) for q in widths} for name in ran}
    return MeasuredCost(_said(step.device), q_grad, convention, steps, by_layer)


def _asked(schedule: Schedule | None, bits: Sequence[int] | None, q_grad: int | None) -> tuple[list[int], int]:
    """Return the bit widths to measure, the lowest first, and the gradient bits."""
    if (schedule is None) == (bits is None):
        raise ValueError("give a schedule, or the bits to measure, such as bits=(3, 8)")
    if schedule is not None:
        if not isinstance(schedule, Schedule) or isinstance(schedule, LayeredSchedule):
            raise ValueError(f"give one schedule for all layers, or bits=; got {type(schedule).__name__}")
        bits = [*schedule.bits().tolist(), schedule.q_max]
    widths = sorted({check_bits("bits", q) for q in bits or ()})
    if not widths:
        raise ValueError("bits must name at least one bit width, got none")
    highest = schedule.q_max if schedule is not None else widths[-1]
    return widths, highest if q_grad is None else check_bits("q_grad", q_grad)


def _plans(
    model: nn.Module, inputs: tuple[Any, ...], widths: list[int], q_grad: int, convention: str
) -> dict[int, BitOpsPlan]:
    """Return the BitOps of one step at each of the bit widths."""
    calls, uncounted = trace(model, inputs)
    static = {q: bits_per_layer(model, calls, StaticSchedule(q, 1), q_grad) for q in widths}
    return {q: price(calls, uncounted, bits, convention) for q, bits in static.items()}


def _bitops(plan: BitOpsPlan, layer: str) -> float:
    """Return the BitOps of a layer with those of its parts, which a plan has as "layer (part)"."""
    return sum(v for name, v in plan.by_layer.items() if name == layer or name.startswith(f"{layer} (".lstrip()))


def _said(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else device.type


class TrainingStep:
    """Forward and backward pass of a model, any model, on given inputs; gradients are computed and not kept.

    Args:
        model: on the device of the inputs.
        inputs: the arguments of its forward.
        around: makes the context of the forward pass, such as ``torch.autocast``.

    Raises:
        ValueError: when no output needs a gradient.
    """

    def __init__(
        self, model: nn.Module, inputs: tuple[Any, ...], around: Callable[[], AbstractContextManager[Any]] | None = None
    ) -> None:
        self.model, self.inputs, self.around = model, inputs, around
        self.trained = [t for t in (*model.parameters(), *tensors_in(inputs)) if t.requires_grad]
        self.device = next((t.device for t in self.trained), torch.device("cpu"))
        self._gradients: list[Tensor] | None = None

    def forward(self) -> list[Tensor]:
        """Run the forward pass and return the outputs that need a gradient."""
        if self.around is None:
            outputs = self.model(*self.inputs)
        else:
            with self.around():
                outputs = self.model(*self.inputs)
        found = [y for y in floating_in(outputs) if y.requires_grad]
        if not found:
            raise ValueError(f"no output of {type(self.model).__name__} needs a gradient: there is no step to measure")
        return found

    def backward(self, outputs: list[Tensor]) -> None:
        """Run the backward pass, for gradients of the outputs that are the same in every step."""
        if self._gradients is None:
            self._gradients = [torch.randn_like(y) for y in outputs]
        torch.autograd.grad(outputs, self.trained, self._gradients, allow_unused=True)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self) -> float:
        """Run a step and return its seconds."""
        self.synchronize()
        start = time.perf_counter()
        self.backward(self.forward())
        self.synchronize()
        return time.perf_counter() - start


class _Watch:
    """Attribute a step to the modules of a model: its time, and what autograd saves.

    A node of the graph belongs to the module in whose forward it was made: nodes are numbered as they are made.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], device: torch.device) -> None:
        self.modules = {name: model.get_submodule(name) for name in names}
        self.model, self.device = model, device
        self._running: list[str] = []  # names, the innermost last
        self._spans: list[tuple[str, Any, Any]] = []  # name, and marks of time at start and end
        self._since: Any = None
        self._from: list[int] = []  # numbers of nodes from which on ...
        self._owner: list[str | None] = []  # ... this module is the innermost that runs

    def shares(self, step: TrainingStep) -> dict[str, float]:
        """Run a step and return the share of its time that every module had that ran."""
        step.synchronize()
        begin = _mark(self.device)
        with self._following():
            outputs = step.forward()
        self._watch_graph(outputs)
        step.backward(outputs)
        end = _mark(self.device)
        step.synchronize()
        found: defaultdict[str, float] = defaultdict(float)
        for name, *marks in self._spans:
            found[name] += _between(*marks) / _between(begin, end)
        return found

    def saved(self, step: TrainingStep) -> Counter[str | None]:
        """Run a step and return the bytes that its forward pass left for its backward pass, by module, None outside."""
        known = {storage_of(t) for t in (*self.model.parameters(), *self.model.buffers(), *tensors_in(step.inputs))}
        held: dict[StorageWeakRef, tuple[str | None, int]] = {}

        def pack(x: Tensor) -> Tensor:
            key = storage_of(x)
            if key is not None and key not in known:
                held.setdefault(key, (self._running[-1] if self._running else None, x.untyped_storage().nbytes()))
            return x.detach()  # what a node saves of its own result would hold the node

        with self._following(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            outputs = step.forward()
        found: Counter[str | None] = Counter()
        for key, (name, size) in held.items():
            found[name] += 0 if key.expired() else size
        step.backward(outputs)
        return found

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Keep account of the module that is running."""
        self._running, self._spans, self._from, self._owner = [], [], [], []
        handles = []
        for name, module in self.modules.items():
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, *_: Any) -> None:
        self._turn()
        self._running.append(name)
        self._resume()

    def _leave(self, *_: Any) -> None:
        self._turn()
        self._running.pop()
        self._resume()

    def _turn(self) -> None:
        if self._running:
            self._spans.append((self._running[-1], self._since, _mark(self.device)))

    def _resume(self) -> None:
        self._from.append(torch.autograd._get_sequence_nr())
        self._owner.append(self._running[-1] if self._running else None)
        self._since = _mark(self.device)

    def _watch_graph(self, outputs: list[Tensor]) -> None:
        """Time every node of the graph that belongs to a module."""
        left, seen = [y.grad_fn for y in outputs], set()
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            left += [following for following, _ in node.next_functions]
            place = bisect_right(self._from, node._sequence_nr()) - 1
            if place >= 0 and (name := self._owner[place]) is not None:
                self._watch_node(node, name)

    def _watch_node(self, node: Any, name: str) -> None:
        start: list[Any] = []
        node.register_prehook(lambda _: start.append(_mark(self.device)))
        node.register_hook(lambda *_: self._spans.append((name, start.pop(), _mark(self.device))))


def _mark(device: torch.device) -> Any:
    """Return a point in time on a device: there, what was asked for before it is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(start: Any, end: Any) -> float:
    return float(end - start) if isinstance(start, float) else start.elapsed_time(end) / 1e3
