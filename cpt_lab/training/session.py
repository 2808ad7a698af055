"""The set-up of a run and its optimizer step: one for training, the range test and calibration."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cpt_core.quantization.convert import (
    QUANT_PRESETS,
    QuantConfig,
    all_precisions,
    quantize_,
)
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.scheduler import PrecisionScheduler
from cpt_extras.formats.ladder import LADDERS
from cpt_lab.experiments.graph import GraphRecipe
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.training import processes
from cpt_lab.training.cuda_graphs import Capture, CudaRecorder, unsupported_reason
from cpt_lab.training.device import arithmetic, check_arithmetic, lay_out

if TYPE_CHECKING:  # the range test of one's own model takes no task, so it does without what the tasks import
    from cpt_lab.tasks.base import Task


def quant_config(recipe: Recipe, seed: int) -> QuantConfig:
    """Return what a recipe quantises, and how."""
    base, start, ladder = (
        QUANT_PRESETS[recipe.quantized],
        recipe.running_start,
        LADDERS[recipe.ladder],
    )
    sums = recipe.aggregation if isinstance(recipe, GraphRecipe) else "fp"
    attention = "paper" if recipe.task == "entailment" else base.attention
    config = QuantConfig(
        base.float32,
        base.quantizers,
        start,
        seed,
        sums,
        recipe.execution,
        ladder,
        attention,
    )
    return config.with_shared_steps() if recipe.shared_steps else config


def constants_of(precision: LayerPrecision) -> tuple[Any, ...]:
    """Return what a captured step holds of a layer as constants: it serves where this is the same."""
    active = precision.active_bits
    requested = getattr(active, "requested", ())  # on a ladder
    formats = () if all(q is None or q.plain for q in requested) else requested
    caches_by_bits = precision.kind == "graph" and (
        "aggregation" in precision.quantizers or precision.execution != "simulated"
    )
    by_bits = caches_by_bits and precision.active_bits.formats.activation
    executes = precision.execution != "simulated" and (
        precision.int8_operands,
        precision.int8_gradient,
    )
    are_quantized = tuple(f is not None for f in active.formats)
    return are_quantized, active.splits_gradient, formats, by_bits, executes


class Session:
    """A spec with everything that trains it. Initial weights depend on its seed alone.

    Args:
        task_class: as ``task_of`` returns it.
        stand_in: random data of the same shapes instead of the task's own.

    Raises:
        ValueError: on a GPU, for a task whose optimizer is not fused: the others cannot leave a step out by themselves.
    """

    def __init__(
        self,
        task_class: "type[Task]",
        spec: RunSpec,
        device: str | torch.device = "cpu",
        *,
        stand_in: bool = False,
    ) -> None:
        self.spec, self.device = spec, torch.device(device)
        check_arithmetic(spec.recipe, self.device)
        self.arithmetic = partial(
            arithmetic, spec.recipe, self.device
        )  # a forward pass, in training and evaluation
        torch.manual_seed(spec.seed)
        self.task = task_class(spec, self.device, stand_in)
        self.metric = EXPERIMENTS[spec.recipe.task].metric  # the main one
        self.model = quantize_(self.task.model(), quant_config(spec.recipe, spec.seed))
        lay_out(self.model, spec.recipe)
        self.parallel: nn.Module = (
            self.model
        )  # or what steps call where several processes train
        self.optimizer, self.lr_at = self.task.optimizer(self.model)
        # at the bits of step 0; whoever trains through the schedule steps it
        self.scheduler = PrecisionScheduler(self.model, spec.schedule, spec.q_grad)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self._layers = list(all_precisions(self.model).values())
        for layer in self._layers:
            # The loss of the paper's recipe cannot be scaled, so small gradients need no warning.
            layer.awaits_first_gradient = False
        self.active_levels: list[
            Any
        ] = []  # of every layer, when ``kind`` was asked last
        self.capture: Capture | None = None  # records the step and replays it
        self._captures: list[Capture] = []
        self.forward: Any = (
            self.model
        )  # what an evaluation calls: the model, or what replays it
        reason = (
            "several processes"
            if processes.count() > 1
            else unsupported_reason(self.device, self.task.fixed_shape)
        )
        if not reason:
            self.capture = Capture(
                self._advance,
                CudaRecorder(self.device),
                self.kind,
                self.model.parameters(),
            )
            answers = Capture(
                lambda given, _: (self.model(*given), None),
                CudaRecorder(self.device),
                self.kind,
            )
            self.forward, self._captures = (
                lambda *given: answers(given, None)[0],
                [self.capture, answers],
            )
            self.lr = torch.zeros((), device=self.device)
            self.optimizer.register_load_state_dict_post_hook(
                lambda _: self.reset()
            )  # its state was exchanged
        self._why_not = reason
        self._on_device = (
            self.device.type != "cpu" or self.capture is not None
        )  # the step asks nothing of the host
        self.reset()

    @property
    def why_not_captured(self) -> str:
        """Why steps are not replayed, "" where they are or will be."""
        return self.capture.why_not if self.capture else self._why_not

    @property
    def captured(self) -> int:
        """Steps that were replayed so far."""
        return self.capture.replayed if self.capture else 0

    def kind(self) -> tuple[Any, ...]:
        """What a step depends on besides tensors: what is computed of constant features is kept for every q.

        And more bits than codes have are simulated in any case.
        """
        if self.active_levels != (now := [p.active_bits for p in self._layers]):
            parts = [constants_of(p) for p in self._layers]
            self.active_levels, self._kind = now, tuple(parts)
        return self._kind

    def batches(self, start: int) -> Iterator[Any]:
        """Yield the batches from step ``start`` on, of each the part of this process."""
        alone = processes.count() == 1
        return (
            self.task.batches(start)
            if alone
            else self.task.shared_batches(start, processes.share)
        )

    def reset(self) -> None:
        """Forget what steps leave for the next one, apart from what is trained."""
        self.carry: Any = None  # what the next step needs of the last one, such as the hidden state of an LSTM
        # 1 once a loss was not finite, else 0: float32, 0-d on the device, as fused optimizers want it
        self.diverged = torch.zeros((), device=self.device)
        for capture in self._captures:
            capture.reset()
        if (
            self.capture is not None
        ):  # the optimizer reads its learning rate, and counts its steps, on the device
            for group in self.optimizer.param_groups:
                group["lr"], group["fused"] = self.lr, True
                if "capturable" in group:
                    group["capturable"] = True
        if self._on_device:
            if not all(group.get("fused") for group in self.optimizer.param_groups):
                raise ValueError(
                    f"on {self.device} a task's optimizer must be fused, got {self.optimizer}"
                )
            self.optimizer.found_inf = self.diverged  # type: ignore[attr-defined]  # as GradScaler tells optimizers

    def step(self, batch: Any, lr: float) -> Tensor:
        """Do one optimizer step at the bits in force and return the loss, (0-d) on the device.

        From the first loss that is not finite on, no weight changes any more. Nothing here waits for a GPU: there the
        optimizer is called all the same, and reads on the device whether to do anything.
        """
        if (
            self.capture is None or not self.model.training
        ):  # an evaluation may have come before
            self.model.train()
        if self.capture is not None:
            self.lr.fill_(lr)
            loss, self.carry = self.capture(batch, self.carry)
            return loss
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss, self.carry = self._advance(batch, self.carry)
        return loss

    def _advance(self, batch: Any, carry: Any) -> tuple[Tensor, Any]:
        """Forward, backward and update: the loss of a batch, and what the next step needs."""
        with self.arithmetic():
            loss, carry = self.task.loss(self.parallel, batch, carry)
        value = processes.mean(loss.detach())
        self.diverged.logical_or_(~value.isfinite())
        if self._on_device or not self.diverged:
            loss.backward()
            if self.spec.recipe.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.recipe.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return value, carry
