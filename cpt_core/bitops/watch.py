"""One way to see what runs in a model: which module is running, and every product that torch executes meanwhile.

``trace`` prices and ``inspecting.check`` checks what is seen like this: on a copy of the model, without data where
shapes are enough, or on the model itself, which is left as it was.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_core.bitops.products import Product, products_of
from cpt_core.checks import unsharded
from cpt_core.graphs.graph import Graph
from cpt_core.quantization.precision import LayerPrecision


def within(name: str, outer: Iterable[str]) -> bool:
    """Whether a module is one of others, or inside one, by their names."""
    return any(other in ("", name) or name.startswith(f"{other}.") for other in outer)


def another(ran: nn.Module | None, module: nn.Module) -> bool:
    """Whether a module that has the hooks of another is a copy of it, as an average of models has."""
    return ran not in (None, module) and not getattr(ran, "_is_replica", False)


class Path:
    """The ``names`` of the modules whose forward runs, the innermost last; subclasses say what a change means."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.followed: Mapping[str, nn.Module] = {}

    @contextmanager
    def following(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follow the forward passes of modules, inside the block.

        From before all other hooks, and also to the end of a forward pass that fails. A ScriptModule, which takes no
        hooks, is part of what is around it.
        """
        self.followed = modules
        with ExitStack() as hooks:
            for name, module in modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    hooks.enter_context(module.register_forward_pre_hook(partial(self._entered, name), prepend=True))
                    hooks.enter_context(module.register_forward_hook(partial(self._left, name), always_call=True))
                if (catching := getattr(module, "catching", None)) is not None:  # also where no hook is called
                    hooks.callback(setattr, catching, "watched", catching.watched)
                    catching.watched = partial(self.running, name)
            yield

    @contextmanager
    def calling(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Follow modules whose ``forward`` is called directly, of which no hook tells, inside the block."""
        with ExitStack() as undo:
            for name, module in modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    held, own = vars(module), module.forward
                    undo.callback(*((held.update, {"forward": own}) if "forward" in held else (held.pop, "forward")))
                    held["forward"] = wraps(own)(partial(self._called, name, module, own))
            yield

    def _called(self, name: str, module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.names[-1:] == [name]:
            return own(*args, **kwargs)
        with self.running(name):
            output = own(*args, **kwargs)
            self.ended(name, module, args, kwargs, output)
        return output

    def ended(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Whatever is to be done at the end of a forward that was called directly, of which no hook tells."""

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Follow what runs in a module inside the block, where that is not known yet."""
        if new := self.names[-1:] != [name]:
            self._entered(name)
        try:
            yield
        finally:
            if new:
                self._left(name)

    def pause(self) -> None:
        """Whatever is to be done before another module is the innermost."""

    def resume(self) -> None:
        """Whatever is to be done when it is."""

    def _entered(self, name: str, ran: nn.Module | None = None, *_: Any) -> None:
        if another(ran, self.followed[name]):
            return
        self.pause()
        self.names.append(name)
        self.resume()

    def _left(self, name: str, ran: nn.Module | None = None, *_: Any) -> None:
        if another(ran, self.followed[name]):
            return
        if self.names and self.names[-1] == name:  # else something failed before it had entered
            self.pause()
            self.names.pop()
            self.resume()

    def __deepcopy__(self, memo: dict[int, Any]) -> Path:
        return self


class Watch(Path, TorchDispatchMode):
    """Sees every operation of torch; subclasses say what becomes of products, and of the rest."""

    supports_higher_order_operators = True

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


def shadow_of(model: nn.Module, meta: bool) -> nn.Module:
    """Return a copy of a model in float32 that nobody watches, on the ``meta`` device if asked for.

    Raises:
        ValueError: when the model holds something that cannot be copied, or is sharded.
    """
    unsharded(model, "count and check")
    # a tensor that the model keeps from its last forward pass has a history, with which it cannot be copied
    memo: dict[int, Any] = {
        id(t): _bare(t, meta) for m in model.modules() for v in vars(m).values() for t in tensors_in(v) if t.grad_fn
    }
    try:
        shadow = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as problem:
        raise ValueError(
            f"cannot copy {type(model).__name__}, and operations are counted on a copy: {problem}; remove what the "
            "model keeps from an earlier forward pass, or count while it trains, with BitOpsLedger"
        ) from problem
    for module in shadow.modules():
        module._backward_hooks, module._backward_pre_hooks = {}, {}  # the copy's gradients are nobody's
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):  # of whoever watches the original, such as a ledger
                if isinstance(getattr(getattr(hook, "func", None), "__self__", None), Path):
                    del hooks[key]
        if isinstance(module, LayerPrecision):
            module.set_bits(None, None)
    return shadow.to("meta") if meta else shadow


def inputs_of(value: Any, meta: bool, memo: dict[int, Tensor]) -> Any:
    """Return a copy of the arguments of a forward pass, on the ``meta`` device if asked for."""
    if isinstance(value, Tensor):
        return memo.setdefault(id(value), _bare(value, meta).requires_grad_(value.requires_grad))
    if isinstance(value, Graph):  # the edges stay where they are: only their numbers matter
        shadow = copy.copy(value)
        constant = value.constant
        return shadow.set_constant(None if constant is None else inputs_of(constant, meta, memo))
    if isinstance(value, PackedSequence):  # its sizes stay on the CPU
        data, sizes, *order = value
        return PackedSequence(inputs_of(data, meta, memo), sizes, *inputs_of(order, meta, memo))
    if isinstance(value, (tuple, list)):
        return getattr(value, "_make", type(value))(inputs_of(v, meta, memo) for v in value)
    if isinstance(value, dict):
        return {k: inputs_of(v, meta, memo) for k, v in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, (type, Mapping)):
        yield from tensors_in([getattr(value, field.name, None) for field in fields(value)])
    elif isinstance(value, (Mapping, tuple, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def floating_in(value: Any) -> list[Tensor]:
    """Return the floating-point tensors among them."""
    return [t for t in tensors_in(value) if t.is_floating_point()]


@contextmanager
def as_it_was(model: nn.Module, inputs: Any = ()) -> Iterator[None]:
    """Run eager code with gradients; put buffers, gradients, the rounding noise and random numbers back afterwards."""
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    keys = [m.noise_key for m in modules if isinstance(m, LayerPrecision)]
    held = [(t, t.detach().clone()) for t in (*model.buffers(), *keys)]
    buffers = [(m._buffers, dict(m._buffers)) for m in modules]
    parameters = [p for m in modules for p in m._parameters.values() if p is not None and p.is_leaf]
    gradients = [(p, p.grad) for p in parameters]
    places = {t.device.index or 0 for t in (*parameters, *tensors_in(inputs)) if t.is_cuda}
    devices = sorted(places) if torch.cuda.is_initialized() else []  # else nothing has drawn there yet
    pythons, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        for p in parameters:
            p.grad = None
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), torch.enable_grad():
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)  # noqa: NPY002
        for p, gradient in gradients:
            p.grad = gradient
        for own, before in buffers:
            own.update(before)
        with torch.no_grad():
            for tensor, value in held:
                tensor.copy_(value)


def _bare(tensor: Tensor, meta: bool) -> Tensor:
    return tensor.detach().to("meta") if meta else tensor.detach().clone()
