"""Schedulers that follow an optimizer through its hooks, for training loops of trainers.

Each step of the optimizer steps the scheduler, and the state of the optimizer holds that of the scheduler.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.scheduler import PrecisionScheduler
from cpt_extras.diagnostics.missing_steps import is_driving

KEY = "precision"  # of a scheduler in the state_dict of the optimizer that it follows
_schedulers: weakref.WeakKeyDictionary[Optimizer, PrecisionScheduler] = (
    weakref.WeakKeyDictionary()
)  # the last of each


def follow(optimizer: Optimizer, scheduler: PrecisionScheduler) -> None:
    """Let a scheduler follow an optimizer, or the one that accelerate or Lightning wrapped, alone.

    Raises:
        TypeError: for what is no optimizer, or takes no hooks.
        ValueError: where the optimizer is followed by a scheduler that drives other layers.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    former = _follower(optimizer)
    if former is not None:
        other_layers = set(former._layers.values()) - set(scheduler._layers.values())
        if any(layer.owning_scheduler is former for layer in other_layers):
            raise ValueError(
                "the optimizer is followed already, by a scheduler that drives other layers: make one scheduler for "
                "both models, PrecisionScheduler(nn.ModuleList([first, second]), ...)"
            )
    elif optimizer not in _schedulers:
        _add_hooks(optimizer)
    release(scheduler._layers.values())  # of whose schedulers one at most follows
    _schedulers[optimizer] = scheduler
    scheduler.follows = True


def release(layers: Iterable[LayerPrecision]) -> None:
    """Let no scheduler drive layers; a scheduler that drives none follows no optimizer."""
    schedulers = set()
    for layer in layers:
        schedulers.add(layer.owning_scheduler)
        layer.owning_scheduler = None
    for scheduler in schedulers - {None}:
        if not is_driving(scheduler):
            scheduler.follows = False


def _follower(optimizer: Optimizer) -> PrecisionScheduler | None:
    """Return the scheduler that follows an optimizer now."""
    scheduler = _schedulers.get(optimizer)
    return scheduler if scheduler is not None and scheduler.follows else None


def _add_hooks(optimizer: Optimizer) -> None:
    states = getattr(optimizer, "state", {}).values()  # none of a Lookahead
    if any(float(state.get("step", 1)) > 0 for state in states if state):
        warnings.warn(
            "the optimizer has a state already, and the schedule begins at step 0: to resume a run, make the "
            "PrecisionScheduler before optimizer.load_state_dict",
            stacklevel=4,
        )
    try:
        optimizer.register_state_dict_post_hook(_add_state)
        optimizer.register_load_state_dict_pre_hook(_load_state)
        optimizer.register_step_post_hook(_step)
    except (
        AttributeError
    ) as error:  # such as timm's Lookahead, which calls no constructor of torch's
        raise TypeError(
            f"{type(optimizer).__name__} takes no hooks; give the optimizer inside of it"
        ) from error


def _step(optimizer: Optimizer, *_: Any) -> None:
    """Step the scheduler after the optimizer, unless a GradScaler has found infinite gradients."""
    scheduler = _follower(optimizer)
    found_inf = getattr(
        optimizer, "found_inf", None
    )  # fused optimizers find that out by themselves
    if scheduler is not None and (found_inf is None or not found_inf):
        scheduler.advance()


def _add_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Add the state of the scheduler to that of its optimizer; a hook of ``state_dict``."""
    scheduler = _follower(optimizer)
    return state if scheduler is None else {**state, KEY: scheduler.state_dict()}


def _load_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Give the scheduler its state, and return the rest."""
    scheduler = _follower(optimizer)
    if scheduler is not None:
        if KEY not in state:
            raise ValueError(
                "the optimizer's state has no PrecisionScheduler: to start one there, make it after load_state_dict; "
                "with torch.distributed.checkpoint call step() and save its state_dict() yourself"
            )
        scheduler.load_state_dict(state[KEY])
    return {name: value for name, value in state.items() if name != KEY}
