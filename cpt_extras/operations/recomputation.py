"""Activation checkpointing inside a module: what is recomputed in the backward pass is intercepted as before.

A checkpoint around a module calls the module once more, and its hooks with it. A checkpoint around a *function* of a
module calls that function once more, when the forward of the module has ended and the mode is off. Here the function
that such a checkpoint keeps, torch's or that of another ``torch.autograd.Function``, is wrapped so that it runs as if
inside the module.
"""

from __future__ import annotations

from functools import partial
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:
    from cpt_extras.operations.guarded_mode import GuardedMode, GuardedModule


def intercept_recomputation(mode: GuardedMode, entry: GuardedModule, saved_tensor_hooks: Any) -> None:
    """Intercept what the innermost checkpoint inside the forward of a module recomputes.

    Args:
        mode: of the model.
        entry: the running module.
        saved_tensor_hooks: hooks on tensors that are saved now, as torch keeps them; None where there are none. Those
            of a checkpoint that is not reentrant know the function.
    """
    if saved_tensor_hooks is not None and saved_tensor_hooks[0].__qualname__.startswith("_checkpoint_hook."):
        hook = saved_tensor_hooks[0]
        captured = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
        _wrap(mode, entry, captured["frame"].cell_contents, "recompute_fn")
    if torch.is_grad_enabled():
        return
    running = set()  # what a checkpoint keeps and runs now it will run again
    for frame, _ in walk_stack(None):
        if frame is entry.frame:
            return
        context = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if isinstance(context, FunctionCtx):
            for name in [name for name, value in vars(context).items() if _code_of(value) in running]:
                _wrap(mode, entry, context, name)
        running.add(frame.f_code)


def _code_of(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _wrap(mode: GuardedMode, entry: GuardedModule, holder: Any, name: str) -> None:
    function = getattr(holder, name)
    is_wrapped = isinstance(function, partial) and function.func == mode.run_inside
    if not is_wrapped:
        setattr(holder, name, partial(mode.run_inside, entry, function))
