"""One way to see what runs in a model: which module is running, and every product that torch executes meanwhile.

What is priced (``trace``), checked (``inspecting.check``) and measured (``inspecting.step``) is seen like this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_core.bitops.products import Product, products_of


def within(name: str, outer: Iterable[str]) -> bool:
    """Whether a module is one of others, or inside one, by their names."""
    return any(other in ("", name) or name.startswith(f"{other}.") for other in outer)


class Path:
    """The ``names`` of the modules whose forward runs, the innermost last; subclasses say what a change means."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @contextmanager
    def following(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follow the forward passes of modules, inside the block.

        From before all other hooks, and also to the end of a forward pass that fails. A ScriptModule, which takes no
        hooks, is part of what is around it.
        """
        with ExitStack() as hooks:
            for name, module in modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    hooks.enter_context(module.register_forward_pre_hook(partial(self._entered, name), prepend=True))
                    hooks.enter_context(module.register_forward_hook(partial(self._left, name), always_call=True))
            yield

    def pause(self) -> None:
        """Whatever is to be done before another module is the innermost."""

    def resume(self) -> None:
        """Whatever is to be done when it is."""

    def _entered(self, name: str, *_: Any) -> None:
        self.pause()
        self.names.append(name)
        self.resume()

    def _left(self, name: str, *_: Any) -> None:
        if self.names and self.names[-1] == name:  # else something failed before it had entered
            self.pause()
            self.names.pop()
            self.resume()

    def __deepcopy__(self, memo: dict[int, Any]) -> Path:
        return self


class Watch(Path, TorchDispatchMode):
    """Sees every operation of torch; subclasses say what becomes of products, and of the rest."""

    def product(self, operation: Any, args: Sequence[Any], found: list[Product], out: Any) -> None:
        """Take note of an operation that computes products."""

    def other(self, operation: Any, args: Sequence[Any], out: Any) -> None:
        """Take note of one that computes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if found := products_of(func, args, kwargs or {}, out):
            self.product(func, args, found, out)
        else:
            self.other(func, args, out)
        return out
