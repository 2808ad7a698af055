"""Summary of a model: the modules that are quantised, and those in float32 with the reason.

>>> import torch
>>> from cpt_core.quantization.convert import QuantConfig, quantize_
>>> model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), QuantConfig(float32=("1",)))
>>> [row.name for row in summary(model).quantized]
['0']
>>> print(summary(model, (torch.ones(5, 4),)))
module  kind             parameters    MACs  precision
0       Linear                   15   66.7%  quantised
1       Linear                    8   33.3%  float32 (not selected by quantize_)
33.3% of the forward MACs of matmuls and convolutions run in float32: layer 1 33.3%
active in 1 layer: bits=not set, execution=simulated
"""

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from cpt_core import extensions
from cpt_core.bitops.conventions import is_matmul, row_name
from cpt_core.bitops.plan import run_step
from cpt_core.bitops.tally import ForwardMacs, NotIntercepted, describe_float32
from cpt_core.quantization.convert import float32_reason, layer_parts, precision_of
from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_core.text_repr import show_text
from cpt_core.validation import ForwardInputs, check_types


@dataclass(frozen=True)
class LayerSummary:
    """Row of a summary: a module that holds parameters or runs matmuls.

    Attributes:
        name: name of the module in the model.
        kind: name of its class.
        parameters: number of its parameters, without those of child modules.
        reason: why it is in float32, or "".
        share: share of the model's forward MACs of matmuls and convolutions; None without inputs.
        simulated: pass -> reason why it is simulated instead of computed in int8; None if int8 was not requested.
        note: ``simulated`` as text, or a note that the module was added after ``quantize_``, or "".
    """

    name: str
    kind: str
    parameters: int
    reason: str
    share: float | None = None
    simulated: dict[str, str] | None = None
    note: str = ""

    @property
    def quantized(self) -> bool:
        """True if the module is quantised."""
        return not self.reason

    def __str__(self) -> str:
        return f"float32 ({self.reason})" if self.reason else f"quantised{self.note}"


@dataclass(frozen=True)
class Summary:
    """Summary of all modules that hold parameters or run matmuls; ``print`` it for a table.

    Attributes:
        rows: one row per module.
        float32_shares: layer -> share of the model's forward MACs that runs in float32 in it; None without inputs.
        active_precisions: bits and execution of quantised layers, as in their ``repr`` -> number of layers.
        not_intercepted: work that ran in float32 without being intercepted; in no share; empty without inputs.
    """

    rows: tuple[LayerSummary, ...]
    float32_shares: Mapping[str, float] | None = None
    active_precisions: dict[str, int] = field(default_factory=dict)
    not_intercepted: NotIntercepted = field(default_factory=NotIntercepted)

    @property
    def in_force(self) -> dict[str, int]:
        """Former name of ``active_precisions``."""
        warnings.warn(
            "Summary.in_force is now Summary.active_precisions",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.active_precisions

    @property
    def quantized(self) -> list[LayerSummary]:
        """The quantised layers."""
        return [r for r in self.rows if r.quantized]

    @property
    def float32(self) -> list[LayerSummary]:
        """The modules that stay in float32."""
        return [r for r in self.rows if not r.quantized]

    _repr_pretty_ = show_text

    def __str__(self) -> str:
        width = max([len(r.name or "(model)") for r in self.rows] + [6])
        has_macs = self.float32_shares is not None
        macs_header = "  MACs  " if has_macs else ""
        lines = [
            f"{'module':<{width}}  {'kind':<16} {'parameters':>10}  {macs_header}precision"
        ]
        for r in self.rows:
            share = f"{r.share or 0:6.1%}  " if has_macs else ""
            lines.append(
                f"{r.name or '(model)':<{width}}  {r.kind:<16} {r.parameters:>10,}  {share}{r}"
            )
        if self.float32_shares is not None:
            lines.append(
                describe_float32(
                    self.float32_shares, "float32_shares", self.not_intercepted
                )
            )
        for description, count in self.active_precisions.items():
            noun = "layer" if count == 1 else "layers"
            lines.append(f"active in {count} {noun}: {description}")
        return "\n".join(lines)


def summary(model: nn.Module, inputs: ForwardInputs | None = None) -> Summary:
    """Return all modules that hold parameters or run matmuls, with the reason for those in float32.

    Args:
        model: any module; converted by ``quantize_`` or not.
        inputs: the arguments of its forward, as for ``count_bitops``; only shapes matter. With them the summary
            contains the share of every module in the forward MACs, and modules that run matmuls without parameters.
    """
    check_types(summary, {"model": model})
    counted = _CountedModules() if inputs is None else _count(model, inputs)
    by_module = counted.macs
    shares = by_module.shares()
    modules, parts = dict(model.named_modules()), layer_parts(model)
    added_modules = extensions.load_optional("added_modules")
    added: dict[str, str | None] = {}
    if added_modules is not None:
        added.update(added_modules.added_modules(model))
    added.update(counted.callers)
    rows = []
    layers_by_description: Counter[str] = Counter()
    for name, module in modules.items():
        precision = precision_of(module)
        is_listed = precision is not None and precision.is_listed
        parameters = [p for p in module._parameters.values() if p is not None]
        if precision is not None and is_listed:
            layers_by_description[precision.extra_repr()] += 1
        if not (is_listed or name in shares or parameters):
            continue
        # the module itself, or the layer that it is a part of
        layer = modules[parts.get(name, name)]
        share = None if inputs is None else shares.get(name, 0.0)
        if name in added:
            reason, details = _describe_added(added[name])
        else:
            reason, details = _describe_layer(layer, share)
            if not reason and share and not by_module.quantized[name]:
                reason = FallbackReason.NO_QUANTIZED_MATMUL.describe()
        # a lazy module has no shapes yet
        num_parameters = sum(0 if is_lazy(p) else p.numel() for p in parameters)
        rows.append(
            LayerSummary(
                name, type(module).__name__, num_parameters, reason, share, **details
            )
        )
    return Summary(
        tuple(rows),
        counted.float32_shares,
        dict(layers_by_description),
        counted.not_intercepted,
    )


def _describe_added(caller: str | None) -> tuple[str, dict[str, Any]]:
    """Return the reason for float32, or "", and more fields of a module added after ``quantize_``."""
    if caller is None:
        return FallbackReason.ADDED_LATER.describe(), {}
    added_later = FallbackReason.ADDED_LATER.describe()
    return "", {"note": f", with the bits of {caller or '(model)'}: {added_later}"}


def _describe_layer(
    layer: nn.Module, share: float | None
) -> tuple[str, dict[str, Any]]:
    """Return the reason for float32, or "", and more fields of the row of ``layer``."""
    precision = precision_of(layer)
    if precision is None:
        return float32_reason(layer), {}
    if not (precision.is_listed or share):
        return FallbackReason.NO_MATMUL_EXECUTED.describe(), {}
    if precision.execution == "simulated":
        return "", {}
    return "", extensions.load("int8").describe_int8(layer)


class _CountedModules(NamedTuple):
    """Work of a forward pass by module.

    Attributes:
        macs: forward MACs of every module.
        callers: module that has no bits of its own -> layer whose bits its operations have.
        float32_shares: layer -> share of the forward MACs in float32; None without inputs.
        not_intercepted: work that was not intercepted.
    """

    macs: ForwardMacs = ForwardMacs()
    callers: Mapping[str, str | None] = {}
    float32_shares: Mapping[str, float] | None = None
    not_intercepted: NotIntercepted = NotIntercepted()


def _count(model: nn.Module, inputs: ForwardInputs) -> _CountedModules:
    """Return the work of a forward pass."""
    converted = {
        name for name, m in model.named_modules() if precision_of(m) is not None
    }
    by_module, forward = ForwardMacs(), ForwardMacs()
    callers: dict[str, str | None] = {}
    step = run_step(model, inputs)
    for operation in step.operations:
        if is_matmul(operation):
            is_quantized = operation.owner in converted
            by_module.add(operation.layer, operation.macs, is_quantized)
            forward.add(row_name(operation), operation.macs, is_quantized)
            if is_quantized and operation.layer not in converted:
                callers[operation.layer] = operation.owner
    return _CountedModules(
        by_module, callers, forward.float32_shares(), step.not_intercepted(model)
    )
