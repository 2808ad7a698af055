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

MAX_UPDATES = 10  # of a weight at one step of a schedule: a critic is updated a few times in every step


def is_driving(scheduler: Any) -> bool:
    """Return whether the bits of some layer are those of a scheduler now."""
    return any(
        layer.owning_scheduler is scheduler for layer in scheduler._layers.values()
    )


def warn_of_missing_steps(scheduler: Any, model: nn.Module) -> None:
    """Warn once when optimizers update a weight again and again while a ``PrecisionScheduler`` stays at one step.

    Counted are steps of torch's optimizers that hold the last trained parameter of the model: accumulated gradients,
    closures and several optimizers of one model are no further updates. Not counted is what happens inside a
    ``precision`` block, at the last step of the schedule, or while another scheduler drives the model.
    """
    levels = [
        role
        for schedule, _ in scheduler.schedules.values()
        for role in schedule.levels(scheduler.q_grad)
    ]
    if not any(np.ptp(role) for role in levels):  # static
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return
    scheduler_reference, weight_reference = (
        weakref.ref(scheduler),
        weakref.ref(trained[-1]),
    )
    updates: Counter[int] = Counter()  # of the present step of the schedule

    def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        scheduler, weight = scheduler_reference(), weight_reference()
        if (
            scheduler is None
            or not is_driving(scheduler)
            or scheduler.last_step >= scheduler.total_steps - 1
        ):
            return
        if not any(
            p is weight for group in optimizer.param_groups for p in group["params"]
        ):
            return
        step = scheduler.last_step
        if step not in updates:
            updates.clear()
        updates[step] += 1
        if updates[step] > MAX_UPDATES:
            handle.remove()
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
    weakref.finalize(scheduler, handle.remove)
