"""Warning about a training loop that never calls ``PrecisionScheduler.step``: it would stay at the bits of step 0."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from cpt_core.quantization.scheduler import PrecisionScheduler

MAX_UPDATES = 10  # of a weight at one step of a schedule: a critic is updated a few times in every step


class MissingStepWarning:
    """Warns once when optimizers update a weight again and again while a scheduler stays at one step.

    Counted are steps of torch's optimizers that hold the last trained parameter of the model: accumulated gradients,
    closures and several optimizers of one model are no further updates. Not counted is what happens inside a
    ``precision`` block, at the last step of the schedule, or while another scheduler drives the model.
    """

    def __init__(self, scheduler: PrecisionScheduler, model: nn.Module) -> None:
        """Start counting, where a parameter is trained; it ends with the scheduler or after the warning."""
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            return
        self.scheduler, self.weight = weakref.ref(scheduler), weakref.ref(trained[-1])
        self.step = self.updates = 0
        self.handle = register_optimizer_step_post_hook(self)
        weakref.finalize(scheduler, self.handle.remove)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step of any optimizer."""
        scheduler, weight = self.scheduler(), self.weight()
        if scheduler is None or not scheduler.drives or scheduler.last_step >= scheduler.total_steps - 1:
            return
        if not any(p is weight for group in optimizer.param_groups for p in group["params"]):
            return
        if scheduler.last_step != self.step:
            self.step, self.updates = scheduler.last_step, 0
        self.updates += 1
        if self.updates > MAX_UPDATES:
            self.handle.remove()
            self._warn(scheduler)

    def _warn(self, scheduler: PrecisionScheduler) -> None:
        remedy = "call step() of the PrecisionScheduler after every optimizer.step()"
        if scheduler.follows:
            remedy = "the optimizer that the PrecisionScheduler follows has not stepped: give it the one that does"
        warnings.warn(
            f"{self.updates} updates of the weights at step {self.step} of the schedule: {remedy}; until then the bits "
            "of this step stay active. Where several updates are one step of yours, as those of a critic, nothing is "
            "wrong",
            stacklevel=4,
        )
