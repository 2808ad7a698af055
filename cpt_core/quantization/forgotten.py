"""Notice that nobody calls ``PrecisionScheduler.step``: the bits of step 0 would stay in force without a word."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cpt_core.quantization.convert import precision_of

if TYPE_CHECKING:
    from cpt_core.quantization.scheduler import PrecisionScheduler

UPDATES = 3  # sharpness-aware minimisation writes the weights twice a step, between two backward passes once
STARTS = 50  # of gradients from nothing, as after zero_grad(): measuring gradients at fixed weights does so, too


class ForgottenStep:
    """Warns, once, where a weight is updated again and again at one step of a schedule.

    The criterion: while the scheduler stood still, gradients came three times to a weight that had been written in
    place since its last gradients. Accumulated gradients write no weights, and do not count; nor does what an optimizer
    does inside its own step (LBFGS), a ``precision`` block, a schedule whose levels never change, or its last step.
    Fused optimizers, and ``p.data -= ...``, move no version counter; so fifty times new gradients, where the former
    ones were put away, say it too.

    It is a hook on one parameter of a quantised layer, the last that is trained, and looks at its version counter:
    nothing waits for a device, and compiled models are seen, too. Parameters that something replaced are not.
    """

    def __init__(self, scheduler: PrecisionScheduler, model: nn.Module) -> None:
        """Watch a model; nothing where no quantised layer is trained."""
        self.step, self.version, self.updates, self.starts = -1, 0, 0, 0
        self.scheduler: Callable[[], Any] = weakref.ref(scheduler)
        self.gradient: Callable[[], Tensor | None] = lambda: None
        layers = [module for module in model.modules() if precision_of(module) is not None]
        trained = [(p, m) for m in layers for p in m.parameters() if p.requires_grad]
        if trained:
            weight, layer = trained[-1]
            self.layer, self.precision = weakref.ref(layer), weakref.ref(layer.precision)
            self.handle = weight.register_post_accumulate_grad_hook(self)

    def __call__(self, weight: Tensor) -> None:
        """Look at the weight whose gradient has come."""
        scheduler, precision = self.scheduler(), self.precision()
        driver = getattr(precision, "driver", None)
        restored = getattr(self.layer(), "precision", None) is not precision
        if scheduler is None or restored or driver not in (None, scheduler):  # nobody is left, or another one came
            self.handle.remove()
            return
        if driver is None:
            return
        if scheduler.last_step != self.step:
            self.step, self.updates, self.starts = scheduler.last_step, 0, 0
        elif weight._version != self.version:
            self.updates += 1
        elif self.gradient() is not weight.grad:
            self.starts += 1
        self.version = weight._version
        self.gradient = weakref.ref(weight if weight.grad is None else weight.grad)  # a hook may have put it away
        if (self.updates < UPDATES and self.starts < STARTS) or self.step >= scheduler.total_steps - 1:
            return
        if _inside_an_optimizer():
            self.updates = self.starts = 0
            return
        self.handle.remove()
        do = "call step() of the PrecisionScheduler after every optimizer.step()"
        if scheduler.follows:
            do = "the optimizer that the PrecisionScheduler follows has not stepped: give it the one that does"
        warnings.warn(
            f"{max(self.updates, self.starts)} updates of the weights at step {self.step} of the schedule: {do}; until "
            "then the bits of this step stay in force. Where several updates are one step of yours, as those of a "
            "critic, nothing is wrong",
            stacklevel=2,
        )


def _inside_an_optimizer() -> bool:
    """Whether some thread is in the step of an optimizer, which may call for gradients; backward has its own thread."""
    frames = (frame for top in sys._current_frames().values() for frame, _ in walk_stack(top))
    return any(frame.f_globals.get("__name__") == "torch.optim.optimizer" for frame in frames)
