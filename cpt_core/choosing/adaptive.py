"""Bits that rise when the loss stalls: the progressive rule of FracTrain (Fu and others, 2020, arXiv:2012.13113).

>>> import torch
>>> from cpt_core.quantization.convert import quantize_
>>> model = quantize_(torch.nn.Sequential(torch.nn.Linear(4, 2)))
>>> scheduler = AdaptiveScheduler(model, levels=(4, 8), steps_per_epoch=1)
>>> for step in range(6):
...     scheduler.step(torch.tensor(1.0))
>>> scheduler.ran.runs, round(scheduler.ran.relative_cost(8, 8), 2)
(((4, 5), (8, 1)), 0.51)
"""

import copy
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from cpt_core.checks import check_bits, declared, number, whole
from cpt_core.quantization.scheduler import PrecisionScheduler
from cpt_core.schedules.schedule import MOST_STEPS, Levels, TableSchedule

KEPT, FIRST = 5, 10  # epochs that are compared, and those whose mean loss says what is near


class AdaptiveScheduler(PrecisionScheduler):
    """Set the bits of a converted model by its training loss: ``step(loss)`` after every ``optimizer.step()``.

    When none of the last five epochs' mean losses differs from the newest by more than ``share`` of the mean over the
    first ten epochs, the next level begins, with an empty window and ``decay`` times that share.

    Args:
        model: a model converted by ``quantize_``.
        levels: bits, or levels of a ladder, that rise.
        steps_per_epoch: optimizer steps whose mean loss is looked at together.
        q_grad: gradient level; None takes the last of ``levels``.
        share: how much of a loss is little.
        decay: of ``share``, with every new level.

    How long each level lasts, and so the cost, is known afterwards: ``ran`` is the schedule so far. The state knows all
    of it, and a resumed training goes on bit for bit. Of several processes give each the mean of their losses.

    Raises:
        ValueError: for levels that do not rise, and other values.

    Beyond the paper. Differs: FracTrain lets gradients rise, too.
    """

    def __init__(
        self,
        model: nn.Module,
        levels: Sequence[int] = (3, 4, 6, 8),
        *,
        steps_per_epoch: int,
        q_grad: int | None = None,
        share: float = 0.05,
        decay: float = 0.3,
    ) -> None:
        declared(type(self).__init__, locals())
        self.levels = tuple(check_bits("each of levels", level) for level in levels)
        if not self.levels or any(a >= b for a, b in itertools.pairwise(self.levels)):
            raise ValueError(f"levels must rise, got {levels!r}")
        self.steps_per_epoch = whole("steps_per_epoch", steps_per_epoch, 1, MOST_STEPS)
        for name, value in (("share", share), ("decay", decay)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
        self.decay = decay
        self.state: dict[str, Any] = {"stage": 0, "share": float(share), "window": [], "first": [], "runs": [[0, 0]]}
        self.total: Tensor | float = 0.0  # of the losses of this epoch, on their device
        super().__init__(model, TableSchedule(tuple((level, 1) for level in self.levels)), q_grad)
        self.total_steps = MOST_STEPS

    def step(self, loss: Tensor | float) -> None:  # type: ignore[override]
        """Go to the next optimizer step; ``loss`` is that of the one that was made, and nothing waits for it."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(f"loss must be one number, got a tensor of shape {tuple(loss.shape)}")
        self.total = self.total + (loss.detach().float() if isinstance(loss, Tensor) else number("loss", loss))
        self.state["runs"][-1][1] += 1
        self.last_step += 1
        if self.last_step % self.steps_per_epoch == 0:
            self._after_epoch(float(self.total) / self.steps_per_epoch)
            self.total = 0.0
        self._apply()

    def _after_epoch(self, loss: float) -> None:
        if not math.isfinite(loss):
            said = f"the epoch that ends at step {self.last_step} has a loss that is not finite: it is left out"
            warnings.warn(said, stacklevel=3)
            return
        s = self.state
        s["window"] = [*s["window"], loss][-KEPT:]
        s["first"] = [*s["first"], loss][:FIRST]
        near = s["share"] * abs(sum(s["first"])) / len(s["first"])
        stalls = len(s["window"]) == KEPT and all(abs(x - loss) <= near for x in s["window"])
        if stalls and s["stage"] + 1 < len(self.levels):
            s |= {"stage": s["stage"] + 1, "share": self.decay * s["share"], "window": []}
            s["runs"].append([s["stage"], 0])

    @property
    def ran(self) -> TableSchedule:
        """The schedule of the steps that were made; ValueError where none was."""
        return TableSchedule(tuple((self.levels[stage], steps) for stage, steps in self.state["runs"] if steps))

    def get_last_bits(self) -> list[int]:
        """Return the level in force."""
        return [self.levels[self.state["stage"]]]

    def _of_step(self, pattern: str) -> Levels:
        (level,), gradients = self.get_last_bits(), self.q_grad or self.levels[-1]
        return Levels(level, level, gradients, gradients)

    def state_dict(self) -> dict[str, Any]:
        """Return that of ``PrecisionScheduler``, and what the rule knows."""
        known = copy.deepcopy(self.state)
        return super().state_dict() | {"adaptive": {**known, "total": float(self.total)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``; ValueError when it belongs to other levels, ladders or layers."""
        if "adaptive" not in state:
            raise ValueError("state must be what state_dict() of an AdaptiveScheduler returned, and lacks 'adaptive'")
        super().load_state_dict(state)
        self.state = copy.deepcopy(state["adaptive"])
        self.total = self.state.pop("total")
        self._apply()
