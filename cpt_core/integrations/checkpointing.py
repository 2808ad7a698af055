"""What a checkpoint computes again, quantised as it was before: torch's, or another ``torch.autograd.Function``.

A checkpoint around a function of a module calls it once more in the backward pass. The module's own forward, in which
products are caught, has ended by then.
"""

from __future__ import annotations

from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from cpt_core.quantization.operations import Products


def catch_again(products: Products, hooks: Any) -> None:
    """Let products be caught in what is computed again, of the innermost checkpoint inside a module's forward.

    Args:
        hooks: on tensors that are saved now, as torch keeps them; those of a checkpoint that is not reentrant know it.
    """
    if hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook."):
        held = dict(zip(hooks[0].__code__.co_freevars, hooks[0].__closure__, strict=True))
        _catch(products, held["frame"].cell_contents, "recompute_fn")
    if torch.is_grad_enabled():
        return
    running = set()  # what a checkpoint keeps and runs now it will run again
    for frame, _ in walk_stack(None):
        context = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if isinstance(context, FunctionCtx):
            for name in [name for name, kept in vars(context).items() if _code_of(kept) in running]:
                _catch(products, context, name)
        running.add(frame.f_code)
        if frame.f_code is Products.around.__code__ and frame.f_locals["self"] is products:
            return


def _code_of(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _catch(products: Products, checkpoint: Any, name: str) -> None:
    again = getattr(checkpoint, name)
    if not (isinstance(again, partial) and again.func == products.around):
        setattr(checkpoint, name, partial(products.around, again))
