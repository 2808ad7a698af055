"""Set-up of a run and its optimizer step, which training, the range test and step timing share.

``quant_config`` translates a recipe into a quantisation config. ``Session`` builds task, model, optimizer and scheduler
of a spec; ``Session.step`` executes an optimizer step, on a GPU by replaying a CUDA graph once steps repeat.
"""

from collections.abc import Iterator
from dataclasses import replace
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
from cpt_lab.experiments.graph import GraphRecipe
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.training import process_group
from cpt_lab.training.cuda_graphs import Capture, CudaRecorder, unsupported_reason
from cpt_lab.training.device import arithmetic, check_arithmetic, set_memory_format

if TYPE_CHECKING:  # the range test of a user's model needs no task and none of the libraries that tasks import
    from cpt_lab.tasks.base import Task


def quant_config(recipe: Recipe, seed: int) -> QuantConfig:
    """Return the quantisation config of a recipe."""
    preset = QUANT_PRESETS[recipe.quantized]
    aggregation = recipe.aggregation if isinstance(recipe, GraphRecipe) else "fp"
    attention = "paper" if recipe.task == "entailment" else preset.attention
    config = QuantConfig(
        preset.float32,
        preset.quantizers,
        recipe.running_start,
        seed,
        aggregation,
        recipe.execution,
        recipe.formats,
        attention,
    )
    return config.with_shared_steps() if recipe.shared_steps else config


def quantize_model(model: nn.Module, spec: RunSpec) -> nn.Module:
    """Quantise a model in place as its spec says, and return it; ValueError if a recipe would leave no layer."""
    settings = spec.recipe
    if settings.low_bit_recipe is None:
        return quantize_(model, quant_config(settings, spec.seed))
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if len(linear) < 2:
        raise ValueError(
            f"ladder {settings.ladder!r}: expected a model with two linear layers or more, the last of which stays in "
            f"bfloat16; {settings.model} has {len(linear)}"
        )
    recipe = replace(settings.low_bit_recipe, wide_share=settings.wide_share)
    return recipe.quantize_(model, recipe.wide_layers(model) or linear[-1:], spec.seed)


def layer_constants(precision: LayerPrecision) -> tuple[Any, ...]:
    """Return the settings of a layer that a captured step holds as constants.

    A recorded step can replace another one if these settings are equal.
    """
    active = precision.active_bits
    requested = getattr(
        active, "requested", ()
    )  # only layers with a format ladder have it
    formats = () if all(q is None or q.plain for q in requested) else requested
    # Graph layers cache what they compute of constant features, for every number of bits.
    has_caches = precision.kind == "graph" and (
        "aggregation" in precision.quantizers or precision.execution != "simulated"
    )
    cached_bits = has_caches and precision.active_bits.formats.activation
    # Numbers of more bits than int8 holds are simulated in any case.
    int8_roles = precision.execution != "simulated" and (
        precision.int8_operands,
        precision.int8_gradient,
    )
    are_quantized = tuple(f is not None for f in active.formats)
    return are_quantized, active.splits_gradient, formats, cached_bits, int8_roles


class Session:
    """Everything that trains a spec: task, model, optimizer, scheduler. Initial weights depend on its seed alone.

    Args:
        task_class: task class of the spec, as ``load_task_class`` returns it.
        spec: what is trained.
        device: device to train on.
        stand_in: use random data of the same shapes instead of the task's own.

    Attributes:
        arithmetic: context manager of a forward pass, in training and evaluation.
        metric: main metric of the task.
        parallel: module that a step calls: the model, or its DistributedDataParallel wrapper.
        forward: function that an evaluation calls: the model, or its captured forward pass.
        scheduler: precision scheduler, at the bits of step 0; the caller of ``step`` steps it.
        active_levels: active bits of every layer at the last call of ``step_key``.
        capture: records and replays steps; None where steps are not captured.
        carry: state that the next step needs of the last one, such as the hidden state of an LSTM.
        diverged: 1 once a loss was not finite, else 0: float32, 0-d on the device, as fused optimizers need it.

    Raises:
        ValueError: on a GPU, for a task whose optimizer is not fused: only fused ones can skip a step by themselves.
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
        self.arithmetic = partial(arithmetic, spec.recipe, self.device)
        torch.manual_seed(spec.seed)
        self.task = task_class(spec, self.device, stand_in)
        self.metric = EXPERIMENTS[spec.recipe.task].metric
        self.model = quantize_model(self.task.build_model(), spec)
        set_memory_format(self.model, spec.recipe)
        self.parallel: nn.Module = self.model
        self.optimizer, self.lr_at = self.task.optimizer(self.model)
        self.scheduler = PrecisionScheduler(self.model, spec.schedule, spec.q_grad)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self._layers = list(all_precisions(self.model).values())
        for layer in self._layers:
            # The loss of the paper's recipe cannot be scaled, so small gradients need no warning.
            layer.awaits_first_gradient = False
        self.active_levels: list[Any] = []
        self.capture: Capture | None = None
        self._captures: list[Capture] = []
        self.forward: Any = self.model
        if process_group.size() > 1:
            self._unsupported_reason = "several processes"
        else:
            self._unsupported_reason = unsupported_reason(
                self.device, self.task.fixed_shape
            )
        if not self._unsupported_reason:
            self._set_up_capture()
        # On a device a step never waits for the host.
        self._on_device = self.device.type != "cpu" or self.capture is not None
        self.reset()

    def _set_up_capture(self) -> None:
        """Capture training steps and evaluation passes."""
        self.capture = Capture(
            self._advance,
            CudaRecorder(self.device),
            self.step_key,
            self.model.parameters(),
        )
        evaluation = Capture(
            lambda inputs, _: (self.model(*inputs), None),
            CudaRecorder(self.device),
            self.step_key,
        )
        self.forward = lambda *inputs: evaluation(inputs, None)[0]
        self._captures = [self.capture, evaluation]
        self.lr = torch.zeros((), device=self.device)
        # Loading a state exchanges the tensors that a recording reads.
        self.optimizer.register_load_state_dict_post_hook(lambda _: self.reset())

    @property
    def uncaptured_reason(self) -> str:
        """Reason why steps are not replayed, "" if they are or will be."""
        return self.capture.failure_reason if self.capture else self._unsupported_reason

    @property
    def captured(self) -> int:
        """Number of steps that were replayed so far."""
        return self.capture.replayed if self.capture else 0

    def step_key(self) -> tuple[Any, ...]:
        """Return what a step depends on besides tensors: the ``layer_constants`` of all layers."""
        levels = [p.active_bits for p in self._layers]
        if self.active_levels != levels:
            constants = [layer_constants(p) for p in self._layers]
            self.active_levels, self._step_key = levels, tuple(constants)
        return self._step_key

    def batches(self, start: int) -> Iterator[Any]:
        """Yield this process's part of every batch from step ``start`` on."""
        if process_group.size() == 1:
            return self.task.batches(start)
        return self.task.shared_batches(start, process_group.local_part)

    def reset(self) -> None:
        """Clear the carried state, the divergence flag and all recordings; weights and optimizer state stay."""
        self.carry: Any = None
        self.diverged = torch.zeros((), device=self.device)
        for capture in self._captures:
            capture.reset()
        if self.capture is not None:
            # A captured optimizer reads its learning rate, and counts its steps, on the device.
            for group in self.optimizer.param_groups:
                group["lr"], group["fused"] = self.lr, True
                if "capturable" in group:
                    group["capturable"] = True
        if self._on_device:
            if not all(group.get("fused") for group in self.optimizer.param_groups):
                raise ValueError(
                    f"on {self.device} a task's optimizer must be fused, got {self.optimizer}"
                )
            # GradScaler uses this attribute to tell fused optimizers to skip a step.
            self.optimizer.found_inf = self.diverged  # type: ignore[attr-defined]

    def step(self, batch: Any, lr: float) -> Tensor:
        """Execute one optimizer step at the active bits; return the loss (0-d, on the device).

        After the first loss that is not finite, no weight changes any more. Nothing here waits for a GPU: there the
        optimizer is always called, and reads on the device whether to skip the update.
        """
        # An evaluation may have come before.
        if self.capture is None or not self.model.training:
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
        """Execute forward pass, backward pass and update; return the loss and the state for the next step."""
        with self.arithmetic():
            loss, carry = self.task.loss(self.parallel, batch, carry)
        value = process_group.mean(loss.detach())
        self.diverged.logical_or_(~value.isfinite())
        if self._on_device or not self.diverged:
            loss.backward()
            if self.spec.recipe.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.recipe.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return value, carry
