"""Warning about a training loop that never calls ``PrecisionScheduler.step``: it would stay at the bits of step 0."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

MAX_UPDATES = 10  # of a weight at one step of a schedule: a critic is updated a few times in every step

# Hooks that have done their work. An optimizer iterates over its hooks, and the garbage collector may run meanwhile:
# so neither a hook nor a finalizer removes one, but the next scheduler does.
_finished_hooks: list[RemovableHandle] = []


def remove_finished_hooks() -> None:
    """Remove the hooks of schedulers that are gone or have been reported; not while an optimizer runs hooks."""
    while _finished_hooks:
        _finished_hooks.pop().remove()


def is_driving(scheduler: Any) -> bool:
    """Return whether a scheduler sets the bits of some layer at present."""
    layers = scheduler._layers.values()
    return any(layer.owning_scheduler is scheduler for layer in layers)


def warn_of_missing_steps(scheduler: Any, model: nn.Module) -> None:
    """Warn once when optimizers update a weight again and again while a ``PrecisionScheduler`` stays at one step.

    Counted are steps of torch's optimizers that hold the last trained parameter of the model: accumulated gradients,
    closures and several optimizers of one model are no further updates. Steps are not counted inside a ``precision``
    block, at the last step of the schedule, or while another scheduler drives the model.
    """
    remove_finished_hooks()
    schedules = [schedule for schedule, _ in scheduler.schedules.values()]
    if not any(_is_cyclic(schedule, scheduler.q_grad) for schedule in schedules):
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return
    scheduler_reference = weakref.ref(scheduler)
    weight_reference = weakref.ref(trained[-1])
    updates: Counter[int] = Counter()  # by step of the schedule, of the current one

    def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        scheduler, weight = scheduler_reference(), weight_reference()
        is_finished = handle in _finished_hooks
        if is_finished or scheduler is None or not is_driving(scheduler):
            return
        if scheduler.last_step >= scheduler.total_steps - 1:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p is weight for p in parameters):
            return
        step = scheduler.last_step
        if step not in updates:
            updates.clear()
        updates[step] += 1
        if updates[step] > MAX_UPDATES:
            _finished_hooks.append(handle)
            remedy = (
                "call step() of the PrecisionScheduler after every optimizer.step()"
            )
            if scheduler.follows:
                remedy = "the optimizer that the PrecisionScheduler follows has not stepped: give it the one that does"
            warnings.warn(
                f"{updates[step]} updates of the weights at step {step} of the schedule: {remedy}; until then the bits "
                "of this step stay active. Where several updates are one step of yours, as those of a critic, nothing "
                "is wrong",
                stacklevel=3,
            )

    handle = register_optimizer_step_post_hook(count)
    weakref.finalize(scheduler, _finished_hooks.append, handle)


def _is_cyclic(schedule: Any, q_grad: int | None) -> bool:
    """Return whether the levels of some role change."""
    return any(np.ptp(levels) for levels in schedule.levels(q_grad))
