"""What quantisation did to the tensors of a training, per layer and role, without changing it.  Beyond the paper.

::

    with cpt.diagnostics.record(model, every=100) as recording:
        ...  # the training loop
    recording.table()

In a recorded step every tensor that a layer rounds is rounded a second time, on the same grid and with the same noise,
and what that did to it is summed up on its device; when the step ends, one transfer brings the sums of all layers to
the host. Between recorded steps nothing is left but a counter.
"""

from __future__ import annotations

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
from cpt_extras.diagnostics.rounding_stats import GRADIENTS, SUMS, Key, RoundingStats
from cpt_extras.optional_libraries import import_optional

if TYPE_CHECKING:
    import pandas as pd

LEAST_GRADIENT_TO_NOISE = math.sqrt(3)
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
MOST_STEPS = 2000  # that are kept; beyond, every second is forgotten

SAME_ROLES = {
    "weight": ("weight", "computed_weight")
}  # a layer multiplies by its parameter, or by what it computes of it

NOT_SEEN = "no eager code rounded it in training at a recorded step"
COMPILED = "it is compiled: such code says nothing"
RECURRENCE = "rounded inside the recurrence: the gradient that the input's product has, with other noise"


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
    """What quantisation did, step by step; made by ``record``.

    Attributes:
        step: number of the optimizer step that is under way.
        open: whether the block is under way.
        every: one step of so many is recorded. Memory is bounded: with more than ``MOST_STEPS`` recorded, every second
            is forgotten and ``every`` doubles.

    A step ends with an ``optimizer.step()`` of torch that changes parameters of the model and follows a forward pass of
    it in training mode: passes whose gradients accumulate are one step, and so are several optimizers that step one
    after the other. What the block leaves unfinished counts as a step. Passes in evaluation mode are not recorded, nor
    is anything that stays in float32; sums and codes of constant features that a graph keeps are recorded when made.

    Losses and parameters are bit for bit those of a training that nobody records. A model that is copied or stored
    inside the block is not recorded in its copy.
    """

    def __init__(self, model: nn.Module, every: int = 100, step: int = 0) -> None:
        check_types(type(self).__init__, {"model": model})
        self.every, self.step = check_int("every", every, 1), check_int("step", step, 0)
        if "" in compiled_parts(model):
            raise ValueError(
                "a compiled model says nothing of its roundings; record one that is not compiled"
            )
        self._layers = all_precisions(model)
        self._model, self._modules = model, dict(model.named_modules())
        self._first = self.step
        self._own = {id(p) for p in model.parameters()}
        self._passes = self._counted = 0
        self._sums: dict[Key, list[Tensor]] = {}  # of the step under way, on the device
        self._kept: dict[int, dict[Key, np.ndarray]] = {}
        self._seen: set[str] = set()
        self._hooks = ExitStack()
        self.open = False

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the hooks from copies and pickles, which the model's hooks bring along."""
        return {**vars(self), "_hooks": ExitStack()}

    def __enter__(self) -> Self:
        """Start; ValueError when a layer is recorded already."""
        if odd := [name for name, p in self._layers.items() if p in _RECORDED]:
            raise ValueError(
                f"layer {odd[0]!r} is recorded already; leave that block first"
            )
        _RECORDED.update(self._layers.values())
        self._hooks.enter_context(
            self._model.register_forward_pre_hook(self._before_pass)
        )
        self._hooks.enter_context(register_optimizer_step_post_hook(self._after_step))
        self.open = True
        self._watch((self.step - self._first) % self.every == 0)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and keep what has been seen of the step under way."""
        self._watch(False)
        self._collect()
        self._hooks.close()
        self.open = False
        _RECORDED.difference_update(self._layers.values())

    # --- while it runs ------------------------------------------------------------------------------------------------

    def _before_pass(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling() and module.training:
            self._passes += 1

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not any(
            id(p) in self._own
            for group in optimizer.param_groups
            for p in group["params"]
        ):
            return
        if (
            self._passes and self._passes == self._counted
        ):  # another optimizer of the same step
            return
        self._counted = self._passes
        self._collect()
        self.step += 1
        self._watch((self.step - self._first) % self.every == 0)

    def _watch(self, on: bool) -> None:
        for name, precision in self._layers.items():
            precision.observer = (
                RoundingStats(name, precision, self._sums) if on else None
            )

    def _collect(self) -> None:
        """Bring the sums of the step to the host."""
        if not self._sums:
            return
        found = [sums for of_key in self._sums.values() for sums in of_key]
        host = iter(
            torch.stack([sums.to(found[0].device) for sums in found]).cpu().numpy()
        )  # the one transfer
        kept = {}
        for key, of_key in self._sums.items():
            several = np.stack([next(host) for _ in of_key])
            kept[key] = np.concatenate([several[:, :-2].sum(0), several[:, -2:].min(0)])
        self._kept[self.step] = kept
        self._seen |= {f"{layer}/{role}" for layer, role, *_ in kept}
        self._sums.clear()
        if len(self._kept) > MOST_STEPS:
            self._kept = {step: self._kept[step] for step in list(self._kept)[::2]}
            self.every *= 2

    # --- what it found ------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[int]:
        """Numbers of the recorded steps."""
        return list(self._kept)

    @property
    def unseen(self) -> dict[str, str]:
        """What is rounded in training and has no row so far, "layer/role", with the reason."""
        reasons: dict[str, str] = {}
        compiled = frozenset(compiled_parts(self._model))
        for name, precision in self._layers.items():
            if not precision.is_listed:
                continue
            roles = _own_roles(self._modules[name], precision)
            if (
                precision.kind == "attention"
            ):  # what such a module multiplies is known when it has run
                has_run = any(place.startswith(f"{name}/") for place in self._seen)
                roles = [] if has_run else ["its operations"]
            for role in roles:
                if not self._seen & {
                    f"{name}/{other}" for other in SAME_ROLES.get(role, (role,))
                }:
                    reasons[f"{name}/{role}"] = (
                        COMPILED if is_within(name, compiled) else NOT_SEEN
                    )
            if "hidden_l0" in precision.quantizers:
                reasons[f"{name}/grad of the hidden state's product"] = RECURRENCE
        return reasons

    def table(self) -> pd.DataFrame:
        """Return a row per recorded step, layer and role; with x what was rounded and q(x) what came of it:

        =================  ================================================================================
        level, bits, grid  in force: the level on its ladder, bits of an element; granularity and format, if any
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
        ``LEAST_GRADIENT_TO_NOISE`` or 4.8 dB (Chmiel et al., FP4 All the Way, arXiv 2505.19115).

        Differs: their rule for ``gradient_to_noise`` is about the gradient of all parameters and all noise in it; here
            are one layer's gradient of its output and the noise of rounding this tensor.
        """
        rows = [row for step in self._kept for row in self._rows(step)]
        return (
            import_optional("pandas", "lab")
            .DataFrame(rows, columns=list(COLUMNS))
            .astype(dict.fromkeys(STATISTICS, float))
        )

    def scalars(self, step: int | None = None) -> dict[str, float]:
        """Return the numbers of a recorded step, of the last one by default, by name: "layer/role/snr_db".

        TensorBoard takes them one by one: ``writer.add_scalar(name, number, step)``.

        Raises:
            ValueError: for a step that is not recorded, or when none is.
        """
        step = (self.steps or [-1])[-1] if step is None else check_int("step", step)
        if step not in self._kept:
            known = (
                f"{len(self._kept)} from {self.steps[0]} to {self.steps[-1]}"
                if self._kept
                else "none"
            )
            raise ValueError(f"step {step!r} is not recorded; recorded steps: {known}")
        found: dict[str, float | None] = {}
        for row in self._rows(step):
            place = f"{row['layer'] or 'model'}/{row['role']}"
            found |= {f"{place}/{name}": row[name] for name in ("level", *STATISTICS)}
        return {
            name: float(value) for name, value in found.items() if value is not None
        }

    def _rows(self, step: int) -> Iterator[dict[str, Any]]:
        for (layer, role, level, bits, grid), sums in self._kept[step].items():
            s = dict(zip(SUMS, sums.tolist(), strict=True))
            signal, noise = math.sqrt(s["squares"]), math.sqrt(s["errors"])
            ratio = signal / noise if noise else math.inf
            yield {
                "step": step,
                "layer": layer,
                "role": role,
                "level": level,
                "bits": bits,
                "grid": grid,
                "elements": int(s["elements"]),
                "low": s["low"],
                "high": -s["-high"],
                "relative_error": 1 / ratio if ratio else math.inf,
                "snr_db": 20 * math.log10(ratio) if ratio else -math.inf,
                "clipped": None
                if math.isnan(s["clipped"])
                else s["clipped"] / s["elements"],
                "underflow": s["underflow"] / max(s["nonzero"], 1),
                "levels_used": s["used"] / s["available"],
                "gradient_to_noise": ratio if level_field(role) in GRADIENTS else None,
            }


def _own_roles(layer: nn.Module, precision: LayerPrecision) -> list[str]:
    """Return the roles of a layer's own kind; that of a bias only where the layer, or a part of it, has one."""
    has_bias = any(
        "bias" in name.split(".")[-1] for name, _ in layer.named_parameters()
    )
    other = "linear_", "conv_", "attention_", "computed_", "masked_"
    own = [role for role in precision.quantizers if not role.startswith(other)]
    return [role for role in own if has_bias or role != "bias"]


_RECORDED: weakref.WeakSet[LayerPrecision] = weakref.WeakSet()
