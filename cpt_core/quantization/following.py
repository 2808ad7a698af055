"""A scheduler that follows an optimizer: it steps, is saved and is loaded with it, in whoever's loop."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from cpt_core.quantization.scheduler import PrecisionScheduler

KEY = "precision"  # in the state_dict of the optimizer
_followers: weakref.WeakKeyDictionary[Optimizer, PrecisionScheduler] = weakref.WeakKeyDictionary()


def follow(optimizer: Optimizer, scheduler: PrecisionScheduler) -> None:
    """Let a scheduler follow an optimizer, or the one that accelerate or Lightning wrapped, alone."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if optimizer not in _followers:
        try:
            optimizer.register_state_dict_post_hook(lambda o, state: {**state, KEY: _followers[o].state_dict()})
            optimizer.register_load_state_dict_pre_hook(_load)
            optimizer.register_step_post_hook(lambda optimizer, *_: _followers[optimizer].advance())
        except AttributeError as error:  # such as timm's Lookahead, which calls no constructor of torch's
            raise TypeError(f"{type(optimizer).__name__} takes no hooks; give the optimizer inside of it") from error
    _followers[optimizer] = scheduler


def follows(scheduler: PrecisionScheduler) -> bool:
    """Return whether a scheduler follows some optimizer."""
    return any(s is scheduler for s in _followers.values())


def _load(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    if KEY not in state:
        said = "the optimizer's state has no PrecisionScheduler: to start one there, make it after load_state_dict"
        raise ValueError(f"{said}; with torch.distributed.checkpoint call step() and save its state_dict() yourself")
    _followers[optimizer].load_state_dict(state[KEY])
    return {name: value for name, value in state.items() if name != KEY}
