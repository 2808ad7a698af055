"""What is quantised in a model, and what is not, with the reason.

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
in force in 1 layer: bits=not set, execution=simulated
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from cpt_core import extensions
from cpt_core.bitops.conventions import is_matmul, row_name
from cpt_core.bitops.plan import count_step
from cpt_core.bitops.tally import ForwardMacs, describe_float32
from cpt_core.quantization.convert import float32_reason, layer_parts, precision_of
from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_core.validation import check_types


@dataclass(frozen=True)
class LayerSummary:
    """One module with parameters of its own.

    Attributes:
        reason: why it is in float32, or "".
        share: of the multiply-accumulates of the forward pass's matmuls and convolutions; None without inputs.
        simulated: of a layer that is to compute on 8-bit integers: the passes that do not, with the reason; None where
            nobody asked for integers.
        note: the same in words, or that the module came after ``quantize_`` and whose bits it has, or "".
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
        """Whether it is quantised."""
        return not self.reason

    def __str__(self) -> str:
        return f"float32 ({self.reason})" if self.reason else f"quantised{self.note}"


@dataclass(frozen=True)
class Summary:
    """All modules with parameters or matmuls of their own; ``print`` it.

    Attributes:
        float32_shares: layer -> share of the ``ForwardMacs`` that runs in float32 there; None without inputs.
        in_force: what quantised layers do at present, as their ``repr`` says it -> how many of them do so.
    """

    rows: tuple[LayerSummary, ...]
    float32_shares: Mapping[str, float] | None = None
    active_levels: dict[str, int] = field(default_factory=dict)

    @property
    def quantized(self) -> list[LayerSummary]:
        """The quantised layers."""
        return [r for r in self.rows if r.quantized]

    @property
    def float32(self) -> list[LayerSummary]:
        """The modules that stay in float32."""
        return [r for r in self.rows if not r.quantized]

    def __str__(self) -> str:
        width = max([len(r.name) for r in self.rows] + [6])
        counted = self.float32_shares is not None
        lines = [
            f"{'module':<{width}}  {'kind':<16} {'parameters':>10}  {'  MACs  ' * counted}precision"
        ]
        for r in self.rows:
            share = f"{r.share or 0:6.1%}  " if counted else ""
            lines.append(
                f"{r.name or '(model)':<{width}}  {r.kind:<16} {r.parameters:>10,}  {share}{r}"
            )
        if self.float32_shares is not None:
            lines.append(describe_float32(self.float32_shares, "float32_shares"))
        for what, count in self.active_levels.items():
            lines.append(f"in force in {count} layer{'s' * (count > 1)}: {what}")
        return "\n".join(lines)


def summary(model: nn.Module, inputs: tuple[Any, ...] | None = None) -> Summary:
    """List every module that has parameters of its own, quantised or not, with the reason; and what is in force now.

    Args:
        model: any module; converted by ``quantize_`` or not.
        inputs: the arguments of its forward, of which only shapes matter. They add the share of every module in the
            ``ForwardMacs``, and modules that multiply without parameters.
    """
    check_types(summary, {"model": model})
    shares, float32_shares = ({}, None) if inputs is None else _shares(model, inputs)
    modules, parts = dict(model.named_modules()), layer_parts(model)
    late = extensions.load_optional("added_modules")
    added = {} if late is None else late.added_modules(model)
    rows = []
    in_force: Counter[str] = Counter()
    for name, module in modules.items():
        precision = precision_of(module)
        is_listed = precision is not None and precision.is_listed
        own = [p for p in module._parameters.values() if p is not None]
        if precision is not None and is_listed:
            in_force[precision.extra_repr()] += 1
        if not (is_listed or name in shares or own):
            continue
        layer = modules[
            parts.get(name, name)
        ]  # the module itself, or the whole that it is a part of
        share = None if inputs is None else shares.get(name, 0.0)
        if name in added:
            reason, details = _describe_added(added[name])
        else:
            reason, details = _describe_layer(layer, share)
        num_parameters = sum(
            0 if is_lazy(p) else p.numel() for p in own
        )  # a lazy module has no shapes yet
        rows.append(
            LayerSummary(
                name, type(module).__name__, num_parameters, reason, share, **details
            )
        )
    return Summary(tuple(rows), float32_shares, dict(in_force))


def _describe_added(caller: str | None) -> tuple[str, dict[str, Any]]:
    """Return the reason for float32, or "", and further fields of a module that came after ``quantize_``."""
    if caller is None:
        return FallbackReason.ADDED_LATER.describe(), {}
    added_later = FallbackReason.ADDED_LATER.describe()
    return "", {"note": f", with the bits of {caller or '(model)'}: {added_later}"}


def _describe_layer(
    layer: nn.Module, share: float | None
) -> tuple[str, dict[str, Any]]:
    """Return the reason for float32, or "", and further fields of a module."""
    precision = precision_of(layer)
    if precision is None:
        return float32_reason(layer), {}
    if not (precision.is_listed or share):
        return FallbackReason.NO_MATMUL_EXECUTED.describe(), {}
    if precision.execution == "simulated":
        return "", {}
    return "", extensions.load("int8").describe_int8(layer)


def _shares(
    model: nn.Module, inputs: tuple[Any, ...]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return module -> its share of the ``ForwardMacs``, and layer -> the share that is in float32 there."""
    converted = {
        name for name, m in model.named_modules() if precision_of(m) is not None
    }
    by_module, forward = ForwardMacs(), ForwardMacs()
    for operation in count_step(model, inputs):
        if is_matmul(operation):
            is_quantized = operation.owner in converted
            by_module.add(operation.layer, operation.macs, False)
            forward.add(row_name(operation), operation.macs, is_quantized)
    return by_module.float32_shares(), forward.float32_shares()
