"""Activation checkpointing, whose recomputation is quantised at the bits of the forward pass.

A checkpoint calls a function once more when ``backward()`` runs. Then the bits of layers, and their mode, may be
others; and where the checkpoint is around a *function* of a module, the forward of that module has ended, and the mode
is off. So the function that a checkpoint keeps, torch's or that of another ``torch.autograd.Function``, is replaced by
a ``CheckpointedFunction``: it notes the state of every layer that runs inside of it, and calls the function in these
states, as if inside the module.

A reentrant checkpoint calls the function with detached copies of its tensors, which have lost the marks of
``feature_axes``; a ``CheckpointedFunction`` restores these marks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import getargvalues
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from cpt_core.quantization.feature_axes import ATTRIBUTE, tensor_arguments
from cpt_core.quantization.op_interception import QuantizedOpsMode, RunningModule
from cpt_core.quantization.precision import LayerPrecision
from cpt_extras.operations.forward_state import ForwardState, in_state

if TYPE_CHECKING:
    from cpt_extras.operations.guarded_mode import GuardedMode

TORCH_HOOK = "_checkpoint_hook."  # begins the qualified names of the hooks of torch's checkpoints
# code of the method in which the mode runs a torch function, its local variable ``function``
RUN_FUNCTION = QuantizedOpsMode.run_function.__code__


class CheckpointedFunction:
    """A function that a checkpoint keeps, to be called in the backward pass.

    Args:
        function: what the checkpoint would call.
        mode: of the model.
        running: the module in whose forward the checkpoint is; None where it is around the whole model.
        marks: marks of ``feature_axes`` of the tensors that the function gets, in their order.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mode: GuardedMode,
        running: RunningModule | None,
        marks: list[Any],
    ) -> None:
        self.function, self.mode, self.marks = function, mode, marks
        self.running: RunningModule | None = None
        if (
            running is not None
        ):  # the entry of the stack itself holds the frame of the forward, with all of its tensors
            self.running = RunningModule(running.module, running.interception)
        self.states: dict[LayerPrecision, ForwardState] = {}

    def note(self, precision: LayerPrecision) -> None:
        """Store the state of a layer when it first runs inside, outside of any inner ``precision`` block."""
        state = self.states.get(precision)
        if state is None or (state.is_fixed and not precision.is_fixed):
            self.states[precision] = ForwardState.capture(precision)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as in the forward pass."""
        tensors = tensor_arguments(args, kwargs)
        if len(tensors) == len(self.marks):
            for x, mark in zip(tensors, self.marks, strict=True):
                if mark is not None:
                    setattr(x, ATTRIBUTE, mark)
        with in_state(self.states):
            if self.running is None:
                return self.function(*args, **kwargs)
            return self.mode.run_inside(self.running, self.function, *args, **kwargs)


def active_checkpoints(
    mode: GuardedMode, running: RunningModule | None, frame: Any, until: Any
) -> tuple[CheckpointedFunction, ...]:
    """Return the checkpoints in which code runs, from the outermost on where they are not reentrant.

    Args:
        mode: of the model.
        running: the innermost running module, in whose forward new checkpoints are.
        frame: of Python, from which reentrant checkpoints are searched.
        until: frame at which this search ends; None for that of the whole program.
    """
    checkpoints = [
        _wrap_function(holder, "recompute_fn", mode, running, [])
        for holder in _checkpoint_frames()
    ]
    if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        checkpoints += [
            _wrap_function(context, name, mode, running, marks)
            for context, name, marks in _reentrant_contexts(frame, until)
        ]
    return tuple(checkpoints)


def _wrap_function(
    holder: Any,
    name: str,
    mode: GuardedMode,
    running: RunningModule | None,
    marks: list[Any],
) -> CheckpointedFunction:
    """Wrap the function in an attribute of a checkpoint, and return the wrapper."""
    function = getattr(holder, name)
    if not isinstance(function, CheckpointedFunction):
        function = CheckpointedFunction(function, mode, running, marks)
        setattr(holder, name, function)
    return function


def _checkpoint_frames() -> list[Any]:
    """Return the call records of torch's non-reentrant checkpoints, found through their saved-tensor hooks."""
    autograd, hooks = torch._C._autograd, []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(hooks):
        autograd._push_saved_tensors_default_hooks(*pair)
    packs = [
        pack
        for pack, _ in reversed(hooks)
        if getattr(pack, "__qualname__", "").startswith(TORCH_HOOK)
    ]
    return [
        dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))[
            "frame"
        ].cell_contents
        for pack in packs
    ]


def _reentrant_contexts(frame: Any, until: Any) -> list[tuple[Any, str, list[Any]]]:
    """Return autograd contexts that hold the function which they are running: reentrant checkpoints.

    They will run that function again in the backward pass. With each context comes the name of the attribute that holds
    the function, and the marks of the tensors that the function gets.
    """
    contexts = []
    running = set()  # code of Python functions, and functions without code
    for caller, _ in walk_stack(frame):
        if caller is until:
            break
        code = caller.f_code
        if code is RUN_FUNCTION:
            running.add(caller.f_locals["function"])
        if code.co_name == "forward" and code.co_argcount:
            context = caller.f_locals.get(code.co_varnames[0])
            if isinstance(context, FunctionCtx):
                contexts += [
                    (context, name, _argument_marks(caller))
                    for name, value in vars(context).items()
                    if callable(value) and _code_of(value) in running
                ]
        running.add(code)
    return contexts


def _argument_marks(frame: Any) -> list[Any]:
    """Return the marks of the tensors among the arguments of a frame, in their order; None for one without a mark."""
    names, varargs, _, values = getargvalues(frame)
    arguments = [values[name] for name in names]
    if varargs is not None:
        arguments += values[varargs]
    return [getattr(x, ATTRIBUTE, None) for x in tensor_arguments(arguments, {})]


def _code_of(function: Any) -> Any:
    """Return the code that a callable runs; if it has none, the function as the mode receives it."""
    while isinstance(function, (partial, CheckpointedFunction)):
        function = function.func if isinstance(function, partial) else function.function
    if isinstance(getattr(function, "__self__", None), Tensor):
        return getattr(Tensor, function.__name__, None)
    for candidate in (getattr(function, "__func__", function), type(function).__call__):
        if hasattr(candidate, "__code__"):
            return candidate.__code__
    return function
