"""Recording of rounding errors in a training, per layer and role, without changing it.  Beyond the paper.

::

    with cpt.diagnostics.record(model, every=100) as recording:
        ...  # the training loop
    recording.table()

In a recorded step every tensor that a layer rounds is rounded a second time, on the same grid and with the same noise,
and the errors are summed on its device; when the step ends, one transfer brings the sums of all layers to the host.
Between recorded steps only optimizer steps are counted.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cpt_core.quantization.convert import all_precisions
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import level_field
from cpt_core.validation import check_int, check_types
from cpt_extras.diagnostics.ledger import compiled_parts, is_within
from cpt_extras.diagnostics.rounding_stats import (
    GRADIENT_FIELDS,
    NUM_MINIMA,
    RoundingObserver,
    RoundingSums,
    StatsKey,
)
from cpt_extras.former_names import FormerName
from cpt_extras.optional_libraries import import_optional

if TYPE_CHECKING:
    import pandas as pd

MIN_GRADIENT_TO_NOISE = math.sqrt(3)
STATISTICS = (
    "low",
    "high",
    "relative_error",
    "snr_db",
    "clipped",
    "underflow",
    "levels_used",
    "gradient_to_noise",
)
COLUMNS = ("step", "layer", "role", "level", "bits", "grid", "elements", *STATISTICS)
MAX_RECORDED_STEPS = 2000  # with more, every second one is deleted

# a layer multiplies by its parameter, or by a tensor that it computes from it
EQUIVALENT_ROLES = {"weight": ("weight", "computed_weight")}

NOT_ROUNDED = "no eager code rounded it in training at a recorded step"
COMPILED = "it is compiled: compiled code is not recorded"
RECURRENCE = "rounded inside the recurrence: the gradient of the input's matmul, with other noise"


def record(model: nn.Module, every: int = 100, step: int = 0) -> Recording:
    """Return a ``Recording`` of a converted model; use it in a ``with`` block around the training loop.

    Args:
        model: converted by ``quantize_``; wrapped in DDP too, where every process records its own part of a batch.
        every: record one optimizer step of so many, the first one included.
        step: number of the first optimizer step inside the block, for a resumed training.

    Raises:
        ValueError: for ``every`` below 1, a negative ``step``, a model that is not converted or is recorded already,
            and the result of ``torch.compile``, of which nothing could be seen.
    """
    return Recording(model, every, step)


class Recording:
    """Rounding errors of a training, step by step; made by ``record``.

    Attributes:
        step: number of the current optimizer step.
        open: whether the ``with`` block is open.
        every: one step of so many is recorded. Memory is bounded: with more than ``MAX_RECORDED_STEPS`` recorded, every
            second one is deleted and ``every`` doubles.

    A step ends with an ``optimizer.step()`` of torch that changes parameters of the model and follows a forward pass of
    it in training mode: passes whose gradients accumulate are one step, and so are several optimizers that step one
    after the other. An unfinished step at the end of the block counts as a step. Passes in evaluation mode are not
    recorded, nor is anything that stays in float32; the cached sums and codes of a graph's constant features are
    recorded when they are computed.

    Losses and parameters are bit for bit equal to those of a training without a recording. Copies of the model that are
    made or stored inside the block are not recorded.
    """

    unseen = FormerName("unseen", "missing_roles")

    def __init__(self, model: nn.Module, every: int = 100, step: int = 0) -> None:
        check_types(type(self).__init__, {"model": model})
        self.every, self.step = check_int("every", every, 1), check_int("step", step, 0)
        if "" in compiled_parts(model):
            raise ValueError(
                "the roundings of a compiled model cannot be recorded; record one that is not compiled"
            )
        self._layers = all_precisions(model)
        self._model = model
        self._modules = dict(model.named_modules())
        self._first_step = self.step
        self._parameter_ids = {id(p) for p in model.parameters()}
        self._num_passes = 0
        self._num_passes_at_last_step = 0
        # of the current step, on the device; a list has the sums of every rounding
        self._sums: dict[StatsKey, list[Tensor]] = {}
        self._recorded: dict[int, dict[StatsKey, RoundingSums[float]]] = {}  # by step
        self._recorded_roles: set[str] = set()  # "layer/role"
        self._hooks = ExitStack()
        self.open = False

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the hooks from copies and pickles, which the model's hooks bring along."""
        return {**vars(self), "_hooks": ExitStack()}

    def __enter__(self) -> Self:
        """Start recording; ValueError when a layer is recorded already."""
        already_recorded = [n for n, p in self._layers.items() if p in _RECORDED]
        if already_recorded:
            raise ValueError(
                f"layer {already_recorded[0]!r} is recorded already; leave that block first"
            )
        _RECORDED.update(self._layers.values())
        self._hooks.enter_context(
            self._model.register_forward_pre_hook(self._before_pass)
        )
        self._hooks.enter_context(register_optimizer_step_post_hook(self._after_step))
        self.open = True
        self._observe((self.step - self._first_step) % self.every == 0)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop recording, and store the sums of the current step."""
        self._observe(False)
        self._collect()
        self._hooks.close()
        self.open = False
        _RECORDED.difference_update(self._layers.values())

    # --- recording ------------------------------------------------------------------------------------------------

    def _before_pass(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling() and module.training:
            self._num_passes += 1

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in self._parameter_ids for p in parameters):
            return
        is_further_optimizer = self._num_passes == self._num_passes_at_last_step
        if self._num_passes and is_further_optimizer:
            return

        self._num_passes_at_last_step = self._num_passes
        self._collect()
        self.step += 1
        self._observe((self.step - self._first_step) % self.every == 0)

    def _observe(self, is_recorded: bool) -> None:
        """Set the observers of all layers, or remove them."""
        for name, precision in self._layers.items():
            precision.observer = None
            if is_recorded:
                precision.observer = RoundingObserver(name, precision, self._sums)

    def _collect(self) -> None:
        """Bring the sums of the step to the host."""
        if not self._sums:
            return
        device_sums = list(itertools.chain.from_iterable(self._sums.values()))
        device = device_sums[0].device
        stacked = torch.stack([sums.to(device) for sums in device_sums])
        host_sums = iter(stacked.cpu().numpy())  # the only transfer of the step

        recorded = {}
        for key, roundings in self._sums.items():
            sums = np.stack([next(host_sums) for _ in roundings])
            total = sums[:, :-NUM_MINIMA].sum(0)
            minima = sums[:, -NUM_MINIMA:].min(0)
            recorded[key] = RoundingSums(*total.tolist(), *minima.tolist())
        self._recorded[self.step] = recorded
        self._recorded_roles |= {f"{key.layer}/{key.role}" for key in recorded}
        self._sums.clear()
        if len(self._recorded) > MAX_RECORDED_STEPS:
            every_second = list(self._recorded)[::2]
            self._recorded = {step: self._recorded[step] for step in every_second}
            self.every *= 2

    # --- results ------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[int]:
        """Numbers of the recorded steps."""
        return list(self._recorded)

    @property
    def missing_roles(self) -> dict[str, str]:
        """Reasons why roles that are rounded in training have no row so far, by "layer/role"."""
        reasons: dict[str, str] = {}
        compiled = frozenset(compiled_parts(self._model))
        for name, precision in self._layers.items():
            if not precision.is_listed:
                continue
            roles = _layer_roles(self._modules[name], precision)
            if precision.kind == "attention":
                # the operands of such a module are known when it has run
                places = self._recorded_roles
                has_run = any(place.startswith(f"{name}/") for place in places)
                roles = [] if has_run else ["its operations"]
            for role in roles:
                equivalent = EQUIVALENT_ROLES.get(role, (role,))
                places = {f"{name}/{other}" for other in equivalent}
                if self._recorded_roles.isdisjoint(places):
                    is_compiled = is_within(name, compiled)
                    reason = COMPILED if is_compiled else NOT_ROUNDED
                    reasons[f"{name}/{role}"] = reason
            if "hidden_l0" in precision.quantizers:
                reasons[f"{name}/grad of the hidden state's matmul"] = RECURRENCE
        return reasons

    def table(self) -> pd.DataFrame:
        """Return the statistics as a table: a row per recorded step, layer and role.

        With x the tensor before rounding and q(x) after it, the columns are

        =================  ================================================================================
        level, bits, grid  active level on its ladder, bits of an element, granularity and format, if any
        elements           of x, all passes of the step together
        low, high          ends of the range, the least and the greatest of several
        relative_error     ||q(x) - x|| / ||x||
        snr_db             signal-to-noise ratio 20 log10(||x|| / ||q(x) - x||), in dB
        clipped            share of the elements outside their range; NaN of blocks, which have ends of their own
        underflow          share of the elements other than 0 that became 0
        levels_used        distinct values of q(x) / values of an element, mean over the ranges (or blocks)
        gradient_to_noise  of gradients: ||x|| / ||q(x) - x||, see below
        =================  ================================================================================

        With sigma the standard deviation of the rounding noise and d elements, ||q(x) - x|| is sigma sqrt(d). Training
        with quantised gradients is expected to stall where ||gradient|| / (sigma sqrt(d)) falls below sqrt(3), which is
        ``MIN_GRADIENT_TO_NOISE`` or 4.8 dB (Chmiel et al., FP4 All the Way, arXiv 2505.19115).

        Differs: the rule of Chmiel et al. is about the gradient of all parameters and all noise in it;
            ``gradient_to_noise`` is of one layer's gradient of its output and the noise of rounding this tensor.
        """
        pandas = import_optional("pandas", "lab")
        rows = [row for step in self._recorded for row in self._rows(step)]
        table = pandas.DataFrame(rows, columns=list(COLUMNS))
        return table.astype(dict.fromkeys(STATISTICS, float))

    def scalars(self, step: int | None = None) -> dict[str, float]:
        """Return the numbers of a recorded step, of the last one by default, by name: "layer/role/snr_db".

        TensorBoard takes them one by one: ``writer.add_scalar(name, number, step)``.

        Raises:
            ValueError: for a step that is not recorded, or when none is.
        """
        step = (self.steps or [-1])[-1] if step is None else check_int("step", step)
        if step not in self._recorded:
            recorded_steps = "none"
            if self._recorded:
                recorded_steps = (
                    f"{len(self.steps)} from {self.steps[0]} to {self.steps[-1]}"
                )
            raise ValueError(
                f"step {step!r} is not recorded; recorded steps: {recorded_steps}"
            )

        scalars: dict[str, float] = {}
        for row in self._rows(step):
            place = f"{row['layer'] or 'model'}/{row['role']}"
            for name in ("level", *STATISTICS):
                if row[name] is not None:
                    scalars[f"{place}/{name}"] = float(row[name])
        return scalars

    def _rows(self, step: int) -> Iterator[dict[str, Any]]:
        for key, sums in self._recorded[step].items():
            signal, noise = math.sqrt(sums.squares), math.sqrt(sums.squared_errors)
            ratio = signal / noise if noise else math.inf
            has_clipping = not math.isnan(sums.clipped)
            is_gradient = level_field(key.role) in GRADIENT_FIELDS
            yield {
                "step": step,
                **key._asdict(),
                "elements": int(sums.elements),
                "low": sums.low,
                "high": -sums.negative_high,
                "relative_error": 1 / ratio if ratio else math.inf,
                "snr_db": 20 * math.log10(ratio) if ratio else -math.inf,
                "clipped": sums.clipped / sums.elements if has_clipping else None,
                "underflow": sums.underflows / max(sums.nonzero, 1),
                "levels_used": sums.distinct_values / sums.available_values,
                "gradient_to_noise": ratio if is_gradient else None,
            }


def _layer_roles(layer: nn.Module, precision: LayerPrecision) -> list[str]:
    """Return the roles that a layer rounds by its kind; a bias only where the layer, or a part of it, has one."""
    names = [name.rpartition(".")[2] for name, _ in layer.named_parameters()]
    has_bias = any("bias" in name for name in names)
    other_kinds = ("linear_", "conv_", "attention_", "computed_", "masked_")
    roles = [r for r in precision.quantizers if not r.startswith(other_kinds)]
    return [role for role in roles if has_bias or role != "bias"]


# layers that are recorded now, by any recording
_RECORDED: weakref.WeakSet[LayerPrecision] = weakref.WeakSet()
