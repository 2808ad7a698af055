"""Activation checkpointing, whose recomputation is quantised at the bits of the forward pass.

A checkpoint calls a function once more when ``backward()`` runs. Then the bits of layers, and their mode, may be
others; and where the checkpoint is around a *function* of a module, the forward of that module has ended, and the mode
is off. So the function that a checkpoint keeps, torch's or that of another ``torch.autograd.Function``, is replaced by
a ``CheckpointedFunction``: it notes the state of every layer that runs inside of it, and calls the function in these
states, as if inside the module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from cpt_core.quantization.op_interception import RunningModule
from cpt_core.quantization.precision import LayerPrecision
from cpt_extras.operations.forward_state import ForwardState, in_state

if TYPE_CHECKING:
    from cpt_extras.operations.guarded_mode import GuardedMode

TORCH_HOOK = "_checkpoint_hook."  # begins the qualified names of the hooks of torch's checkpoints


class CheckpointedFunction:
    """A function that a checkpoint keeps, to be called in the backward pass.

    Args:
        function: what the checkpoint would call.
        mode: of the model.
        running: the module in whose forward the checkpoint is; None where it is around the whole model.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        mode: GuardedMode,
        running: RunningModule | None,
    ) -> None:
        self.function, self.mode = function, mode
        self.running: RunningModule | None = None
        if (
            running is not None
        ):  # the entry of the stack itself holds the frame of the forward, with all of its tensors
            self.running = RunningModule(
                running.module, running.interception, scores=list(running.scores)
            )
        self.states: dict[LayerPrecision, ForwardState] = {}

    def note(self, precision: LayerPrecision) -> None:
        """Store the state of a layer when it first runs inside, outside of any inner ``precision`` block."""
        state = self.states.get(precision)
        if state is None or (state.is_fixed and not precision.is_fixed):
            self.states[precision] = ForwardState.capture(precision)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as in the forward pass."""
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
        _wrap_function(holder, "recompute_fn", mode, running)
        for holder in _checkpoint_frames()
    ]
    if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        checkpoints += [
            _wrap_function(context, name, mode, running)
            for context, name in _reentrant_contexts(frame, until)
        ]
    return tuple(checkpoints)


def _wrap_function(
    holder: Any, name: str, mode: GuardedMode, running: RunningModule | None
) -> CheckpointedFunction:
    """Wrap the function in an attribute of a checkpoint, and return the wrapper."""
    function = getattr(holder, name)
    if not isinstance(function, CheckpointedFunction):
        function = CheckpointedFunction(function, mode, running)
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


def _reentrant_contexts(frame: Any, until: Any) -> list[tuple[Any, str]]:
    """Return autograd contexts that hold the function which they are running, with the attribute names.

    These are reentrant checkpoints: they will run that function again in the backward pass.
    """
    contexts = []
    running = set()  # what a checkpoint keeps and runs now it will run again
    for caller, _ in walk_stack(frame):
        if caller is until:
            break
        code = caller.f_code
        if code.co_name == "forward" and code.co_argcount:
            context = caller.f_locals.get(code.co_varnames[0])
            if isinstance(context, FunctionCtx):
                contexts += [
                    (context, name)
                    for name, value in vars(context).items()
                    if _code_of(value) in running
                ]
        running.add(code)
    return contexts


def _code_of(function: Any) -> Any:
    while isinstance(function, (partial, CheckpointedFunction)):
        function = function.func if isinstance(function, partial) else function.function
    if isinstance(function, nn.Module):
        function = type(function).__call__
    return getattr(getattr(function, "__func__", function), "__code__", None)
