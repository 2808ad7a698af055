"""Counting while a model runs: every operation of a step, and when its gradient arrives.

The mode of a converted model reports its operations. A model that is not converted gets one that rounds nothing.
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
from cpt_core.bitops.conventions import NORM, PRODUCTS
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

# layers that the authors' counters know, and the functions that they compute; one with a forward of its own is no
# layer, but what runs in it
KNOWN_LAYERS = {
    "linear": nn.Linear,
    "conv1d": nn.Conv1d,
    "conv2d": nn.Conv2d,
    "conv3d": nn.Conv3d,
    "lstm": nn.LSTM,
}

MAX_DEPTH = (
    6  # of objects in an argument of a forward pass that are looked into for tensors
)
# called with every operation; returns what to call when its gradient arrives
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
                enter, leave = (
                    partial(_enter, _interception(mode, name, module)),
                    partial(_leave, mode),
                )
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
    """Forward pre-hook of modules without one of the mode: inside a converted module only the name changes."""
    mode = interception.mode
    if mode.on_operation is None:  # in a copy of a model that is counted
        return
    if mode.running.stack and mode.running.stack[-1].interception.precision is not None:
        interception = mode.running.stack[-1].interception._replace(
            name=interception.name
        )
    mode.enter(module, interception)


def _leave(mode: QuantizedOpsMode, module: nn.Module, args: Any, output: Any) -> None:
    mode.leave(module)


def _rename(module: nn.Module, name: str, undo: ExitStack) -> None:
    """Let operations have the name of a module in this model, which may be part of the converted one, or around it."""
    interception: Interception = getattr(module, HOOK)
    if interception.name != name:
        interception.mode.owners.clear()
        vars(module)[HOOK] = interception._replace(name=name)
        undo.callback(interception.mode.owners.clear)
        undo.callback(vars(module).update, {HOOK: interception})


class CountingMode(interception_mode_class()):  # type: ignore[misc]
    """The mode of a model that is not converted: its handlers round nothing."""

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
    """Calls a ``Report`` for the operations of a model, and what that returns when their gradients arrive."""

    def __init__(
        self, mode: QuantizedOpsMode, modules: Mapping[str, nn.Module], report: Report
    ) -> None:
        self.mode, self.modules, self.report = mode, modules, report
        self.outer_report = mode.on_operation
        self.ids = {id(module) for module in modules.values()}

    def __call__(self, operation: Operation, output: Any) -> None:
        if self.outer_report is not None:
            self.outer_report(operation, output)
        if not any(id(entry.module) in self.ids for entry in self.mode.running.stack):
            return  # it runs in another part of the converted model
        on_gradient = self.report(self._with_owner(operation))
        if on_gradient is None:
            return
        backward_passes = set[
            int
        ]()  # each counts once, whichever of several outputs its gradient comes through

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
            part = PRODUCTS
        is_converted = module is not None and precision_of(module) is not None
        is_layer = part in ("", NORM) and not is_converted
        owner = operation.layer if is_layer or operation.precision is not None else None
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
    """Return a copy of the arguments of a forward pass, on the ``meta`` device if asked for.

    No gradient passes from a copied tensor to the graph of the given one. Other objects are copied as far as they hold
    tensors, such as the cache of a language model. ``memo``: id of a tensor or object -> what stands for it.
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
        return _copy_of_container(value, copied)
    if isinstance(
        value, Graph
    ):  # the edges stay where they are: only their numbers matter
        shadow, constant = copy.copy(value), value.constant
        return shadow.set_constant(None if constant is None else copied(constant))
    memo[id(value)] = value  # an attribute may lead back
    if hasattr(
        value, "local_var"
    ):  # a graph of DGL, whose structure is no Python object
        memo[id(value)] = value if on_meta else _copy_of_dgl_graph(value, copied)
    elif _holds_tensors(value, depth=MAX_DEPTH):
        memo[id(value)] = shallow = copy.copy(value)
        vars(shallow).update({name: copied(part) for name, part in vars(value).items()})
    return memo[id(value)]


def _copy_of_container(value: Any, copied: Callable[[Any], Any]) -> Any:
    if isinstance(value, PackedSequence):  # its sizes stay on the CPU
        data, sizes, *order = value
        return PackedSequence(copied(data), sizes, *copied(order))
    if not isinstance(value, dict):
        return getattr(value, "_make", type(value))(copied(v) for v in value)
    shallow = {} if type(value) is dict else copy.copy(value)
    shallow.update({k: copied(v) for k, v in value.items()})
    return shallow


def _copy_of_dgl_graph(graph: Any, copied: Callable[[Any], Any]) -> Any:
    shallow = graph.local_var()
    frames = [shallow.nodes[kind].data for kind in graph.ntypes]
    frames += [shallow.edges[kind].data for kind in graph.canonical_etypes]
    for frame in frames:
        frame.update({name: copied(features) for name, features in frame.items()})
    return shallow


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
    """Return a copy of a tensor that no gradient passes."""
    return tensor.detach().to("meta") if on_meta else tensor.detach().clone()
