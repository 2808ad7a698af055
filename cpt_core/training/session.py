"""The set-up of a run and its optimizer step: one for training, the range test and calibration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cpt_core.checks import choose
from cpt_core.experiments.graph import GraphRecipe
from cpt_core.experiments.recipe import Recipe
from cpt_core.experiments.spec import RunSpec
from cpt_core.quantization.convert import PRESETS, QuantConfig, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler

if TYPE_CHECKING:  # the range test of one's own model takes no task, so it does without what the tasks import
    from cpt_core.tasks import Task


def quant_config(recipe: Recipe, seed: int) -> QuantConfig:
    """Return what a recipe quantises, and how."""
    base = PRESETS[recipe.quantized]
    aggregation = recipe.aggregation if isinstance(recipe, GraphRecipe) else "fp"
    return QuantConfig(base.float32, base.quantizers, recipe.running_start, seed, aggregation)


def task_of(spec: RunSpec) -> type[Task]:
    """Return the task class of a spec; ValueError names the tasks there are."""
    from cpt_core.tasks import TASKS

    return TASKS[choose("task", spec.recipe.task, tuple(TASKS))]


class Session:
    """A spec with everything that trains it. Initial weights depend on its seed alone.

    Args:
        task_class: a value of ``TASKS``.
        spec: what to train.
        device: "cpu" or "cuda".
        stand_in: random data of the same shapes instead of the task's own.

    Attributes:
        task: the data set with its model, loss and metric.
        model: converted, at the bits of step 0.
        optimizer: of the task.
        lr_at: the learning rate as a function of the step and the evaluations so far.
        scheduler: drives the bits of the model; whoever trains through the schedule steps it.
        carry: what the next step needs of the last one, such as the hidden state of an LSTM, or None.
    """

    def __init__(
        self, task_class: type[Task], spec: RunSpec, device: str | torch.device = "cpu", *, stand_in: bool = False
    ) -> None:
        torch.manual_seed(spec.seed)
        self.spec = spec
        self.task = task_class(spec, torch.device(device), stand_in)
        self.model = quantize_(self.task.model(), quant_config(spec.recipe, spec.seed))
        self.optimizer, self.lr_at = self.task.optimizer(self.model)
        self.scheduler = PrecisionScheduler(self.model, spec.schedule, spec.q_grad)
        self.carry: Any = None

    def step(self, batch: Any, lr: float) -> float:
        """Do one optimizer step at the bits in force and return the loss; one that is not finite changes no weight."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()  # an evaluation may have come before
        loss, self.carry = self.task.loss(self.model, batch, self.carry)
        value = float(loss.detach())  # waits for the GPU
        if math.isfinite(value):
            loss.backward()
            if self.spec.recipe.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.recipe.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return value
