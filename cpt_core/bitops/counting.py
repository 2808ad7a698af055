"""Counting of operations while a model runs, and of the gradients that arrive at them.

``report_operations`` passes every operation of a model to a callback.  The mode of a converted model reports its
operations itself; a model that is not converted gets a ``CountingMode``, which rounds nothing.  ``copy_inputs`` copies
the arguments of a forward pass, on the ``meta`` device if only shapes matter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import cpt_core.bitops.functions  # noqa: F401 - registers counters
from cpt_core.bitops.conventions import MATMULS, NORM
from cpt_core.graphs.graph import Graph
from cpt_core.quantization.convert import precision_of
from cpt_core.quantization.graph_handlers import graph_layer_of
from cpt_core.quantization.op_handlers import module_kind
from cpt_core.quantization.op_interception import (
    HOOK,
    Interception,
    Operation,
    QuantizedOpsMode,
    interception_mode_class,
)
from cpt_core.quantization.precision import LayerPrecision

# function -> layer class that the authors' counters know; a subclass that overrides forward does not count as a layer
KNOWN_LAYERS = {
    "linear": nn.Linear,
    "conv1d": nn.Conv1d,
    "conv2d": nn.Conv2d,
    "conv3d": nn.Conv3d,
    "lstm": nn.LSTM,
}

# depth of nested objects in a forward argument that are searched for tensors
MAX_DEPTH = 6
# callback for every operation, which returns a callback for the arrival of its gradient, or None
Report = Callable[[Operation], Callable[[], None] | None]


@contextmanager
def report_operations(
    model: nn.Module,
    report: Report,
    skipped: Collection[str] = (),
    unconverted_mode: type[CountingMode] | None = None,
) -> Iterator[None]:
    """Report every operation that runs in a model inside the block.

    Modules named in ``skipped``, such as compiled ones, get no hooks. A model that is not converted runs in the
    ``unconverted_mode``, which is ``CountingMode`` when None.
    """
    modules = dict(model.named_modules())
    mode = next(
        (getattr(m, HOOK).mode for m in model.modules() if hasattr(m, HOOK)), None
    )
    if mode is None:
        mode = (unconverted_mode or CountingMode)()
        mode.root = model
    reporter = _Reporter(mode, modules, report)
    with ExitStack() as undo:
        undo.callback(setattr, mode, "on_operation", mode.on_operation)
        mode.on_operation = reporter
        for name, module in modules.items():
            if hasattr(module, HOOK):
                _rename(module, name, undo)
            elif (
                not isinstance(module, (torch.jit.ScriptModule, LayerPrecision))
                and name not in skipped
            ):
                enter = partial(_enter, _interception(mode, name, module))
                leave = partial(_leave, mode)
                undo.enter_context(
                    module.register_forward_pre_hook(enter, prepend=True)
                )
                undo.enter_context(
                    module.register_forward_hook(leave, always_call=True)
                )
        yield


def _interception(mode: QuantizedOpsMode, name: str, module: nn.Module) -> Interception:
    kind = "graph" if graph_layer_of(module) is not None else module_kind(module)
    return Interception(mode, name, None, kind, False)


def _enter(interception: Interception, module: nn.Module, args: Any) -> None:
    """Push a module that has no interception of its own (forward pre-hook).

    Inside a converted module it uses the interception of that module, with its own name.
    """
    mode = interception.mode
    if mode.on_operation is None:  # the hook of a counted model, in a copy of the model
        return
    stack = mode.running.stack
    if stack and stack[-1].interception.precision is not None:
        interception = stack[-1].interception._replace(name=interception.name)
    mode.enter(module, interception)


def _leave(mode: QuantizedOpsMode, module: nn.Module, args: Any, output: Any) -> None:
    mode.leave(module)


def _rename(module: nn.Module, name: str, undo: ExitStack) -> None:
    """Use the module name of this model in reports; it may be part of the converted model, or contain it."""
    interception: Interception = getattr(module, HOOK)
    if interception.name != name:
        interception.mode.owners.clear()
        vars(module)[HOOK] = interception._replace(name=name)
        undo.callback(interception.mode.owners.clear)
        undo.callback(vars(module).update, {HOOK: interception})


class CountingMode(interception_mode_class()):  # type: ignore[misc]
    """Function mode of an unconverted model; its handlers do not round."""

    root: nn.Module

    def find_owners(self) -> list[tuple[Tensor, Interception]]:
        """Return the parameters of the model, each with its module."""
        return [
            (parameter, _interception(self, name, module))
            for name, module in self.root.named_modules()
            for parameter in module._parameters.values()
            if parameter is not None
        ]


class _Reporter:
    """Callback for operations that calls a ``Report``, and its result when the gradient arrives."""

    def __init__(
        self, mode: QuantizedOpsMode, modules: Mapping[str, nn.Module], report: Report
    ) -> None:
        self.mode, self.modules, self.report = mode, modules, report
        self.outer_report = mode.on_operation
        self.ids = {id(module) for module in modules.values()}
        # precision -> name of its layer in this model
        self.layers = {
            id(precision_of(module)): name
            for name, module in modules.items()
            if precision_of(module) is not None
        }

    def __call__(self, operation: Operation, output: Any) -> None:
        if self.outer_report is not None:
            self.outer_report(operation, output)
        # operations may run in a part of the converted model that is not counted
        if not any(id(entry.module) in self.ids for entry in self.mode.running.stack):
            return
        on_gradient = self.report(self._with_owner(operation))
        if on_gradient is None:
            return
        # a gradient that arrives through several outputs counts once per backward pass
        backward_passes = set[int]()

        def hook(gradient: Tensor) -> None:
            current = torch._C._current_graph_task_id()
            if current not in backward_passes:
                backward_passes.add(current)
                on_gradient()

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(hook)

    def _with_owner(self, operation: Operation) -> Operation:
        module = self.modules.get(operation.layer)
        part = operation.part
        if part == "" and not _is_known_layer(module, operation.function):
            part = MATMULS

        owner = None
        is_converted = module is not None and precision_of(module) is not None
        if operation.precision is not None:
            # an operation in a module added later has the bits of the layer around it
            owner = self.layers.get(id(operation.precision), operation.layer)
        elif part in ("", NORM) and not is_converted:
            owner = operation.layer
        return operation._replace(part=part, owner=owner)


def _is_known_layer(module: nn.Module | None, function: str) -> bool:
    kind = KNOWN_LAYERS.get(function, ())
    is_layer = isinstance(module, kind) and type(module).forward is kind.forward  # type: ignore[union-attr]
    return is_layer or function == "graph_linear"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, (type, Mapping)):
        yield from tensors_in(
            [getattr(value, field.name, None) for field in fields(value)]
        )
    elif isinstance(value, (Mapping, tuple, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def copy_inputs(value: Any, on_meta: bool, memo: dict[int, Any]) -> Any:
    """Return a copy of the arguments of a forward pass.

    Copied tensors are detached from the autograd graph. Other objects are copied if they hold tensors, such as the
    cache of a language model.

    Args:
        value: tensor, container or object.
        on_meta: whether to copy to the ``meta`` device.
        memo: id of a tensor or object -> its copy.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        memo[id(value)] = detached_copy(value, on_meta).requires_grad_(
            value.requires_grad
        )
        return memo[id(value)]
    copied = partial(copy_inputs, on_meta=on_meta, memo=memo)
    if isinstance(value, (tuple, list, dict)):
        return _copy_container(value, copied)
    if isinstance(value, Graph):
        # only numbers of edges matter, so that the edges are not copied
        shadow, constant = copy.copy(value), value.constant
        return shadow.set_constant(None if constant is None else copied(constant))
    memo[id(value)] = value  # attributes may refer back to it
    # a graph of DGL, whose structure is not a Python object
    if hasattr(value, "local_var"):
        memo[id(value)] = value if on_meta else _copy_dgl_graph(value, copied)
    elif _holds_tensors(value, depth=MAX_DEPTH):
        memo[id(value)] = shallow = copy.copy(value)
        vars(shallow).update({name: copied(part) for name, part in vars(value).items()})
    return memo[id(value)]


def _copy_container(value: Any, copied: Callable[[Any], Any]) -> Any:
    if isinstance(value, PackedSequence):
        data, sizes, *order = value  # the sizes must stay on the CPU
        return PackedSequence(copied(data), sizes, *copied(order))

    if isinstance(value, dict):
        shallow_copy = {} if type(value) is dict else copy.copy(value)
        shallow_copy.update({key: copied(element) for key, element in value.items()})
        return shallow_copy

    make = getattr(value, "_make", type(value))  # named tuples have _make
    return make(copied(element) for element in value)


def _copy_dgl_graph(graph: Any, copied: Callable[[Any], Any]) -> Any:
    shallow_copy = graph.local_var()
    frames = []
    for node_type in graph.ntypes:
        frames.append(shallow_copy.nodes[node_type].data)
    for edge_type in graph.canonical_etypes:
        frames.append(shallow_copy.edges[edge_type].data)

    for frame in frames:
        frame.update({name: copied(features) for name, features in frame.items()})
    return shallow_copy


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, (type, nn.Module, Graph)):
        return False
    parts: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    return any(_holds_tensors(part, depth - 1) for part in parts)


def detached_copy(tensor: Tensor, on_meta: bool) -> Tensor:
    """Return a copy of a tensor without autograd history."""
    return tensor.detach().to("meta") if on_meta else tensor.detach().clone()
