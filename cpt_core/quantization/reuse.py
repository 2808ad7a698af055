"""Quantised weights, used again until the optimizer step: by shared layers, and over accumulated gradients.

>>> reuse, weight = Reuse(), torch.zeros(2, requires_grad=True)
>>> first = reuse(weight, 8, lambda: weight + 1)
>>> second = reuse(weight, 8, lambda: weight + 2)
>>> torch.equal(first, second)
True
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


@dataclass
class _Held:
    weight: weakref.ref[Tensor]
    state: tuple[Any, ...]
    values: Tensor


class _Again(torch.autograd.Function):
    """The values of an earlier rounding; the gradient goes to the weight unchanged, as it does in a new one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Reuse:
    """The quantised weights of one layer, each as long as its weight and the bits are the same.

    A weight has changed when its version counter has, or the place of its numbers. Writing through ``.data`` moves
    neither; so whatever ends a step forgets them too: an optimizer of torch, a step of the schedule, ``precision``,
    ``train`` and ``eval``.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._held: dict[int, _Held] = {}
        _ALL.add(self)

    def __call__(self, weight: Tensor, bits: int | None, quantize: Callable[[], Tensor]) -> Tensor:
        """Return ``quantize()``, or what it returned before for this weight."""
        if not _plain(weight):
            return quantize()
        state = bits, weight._version, weight.data_ptr()
        held = self._held.get(id(weight))
        if held is not None and held.weight() is weight and held.state == state:
            return _Again.apply(weight, held.values) if weight.requires_grad else held.values
        values = quantize()
        for gone in [k for k, v in self._held.items() if v.weight() is None]:  # made for one pass alone
            del self._held[gone]
        self._held[id(weight)] = _Held(weakref.ref(weight), state, values.detach())
        return values

    def clear(self) -> None:
        """Forget what is held."""
        self._held.clear()

    def __deepcopy__(self, memo: Any) -> Reuse:
        """A copy of a layer holds nothing."""
        return Reuse()

    def __reduce__(self) -> tuple[type[Reuse], tuple[()]]:
        """Neither does one that was stored."""
        return Reuse, ()


def _plain(weight: Tensor) -> bool:
    """Whether a weight is numbers that last: not watched, simulated or without a version."""
    return not (
        type(weight) not in (Tensor, torch.nn.Parameter)
        or weight.is_meta
        or torch.is_inference_mode_enabled()
        or weight.is_inference()
        or is_in_torch_dispatch_mode()
    )


def _clear_all(*_: Any) -> None:
    for reuse in _ALL:
        reuse.clear()


_ALL: weakref.WeakSet[Reuse] = weakref.WeakSet()
register_optimizer_step_post_hook(_clear_all)
