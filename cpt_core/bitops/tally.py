"""Tally of counted work: MACs by layer, pass and formats of the operands, and their BitOps.

A format is the bits of a uniform grid, 32 for float32, or a number format, which has an attribute ``bits``. This module
does not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from cpt_core.bitops.conventions import is_matmul, row_name
from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import Formats

if TYPE_CHECKING:
    from cpt_core.quantization.op_interception import Operation

MAX_LISTED_LAYERS = 3


IN_FLOAT32 = Formats(FULL_PRECISION, FULL_PRECISION, FULL_PRECISION, FULL_PRECISION)


class CountedPass(NamedTuple):
    """Pass of a layer with operands of given formats, the key of a tally.

    Attributes:
        layer: name of the layer.
        name: name of the pass in ``PASS_OPERANDS``.
        first: format of the first operand.
        second: format of the second operand.
    """

    layer: str
    name: str
    first: Any
    second: Any

    @property
    def squared_bits(self) -> int:
        """Product of the bits of both operands."""
        return bits_of(self.first) * bits_of(self.second)


@dataclass
class ForwardMacs:
    """Forward MACs of matmuls and convolutions by layer, quantised and in float32.

    ``check``, ``summary``, ``count_bitops`` and ``BitOpsLedger`` all compute the quantised share of a model with it.
    Normalisation, the gates of LSTMs, upsampling and sums over neighbours have a price but are never quantised, and are
    not included.

    Attributes:
        quantized: layer -> MACs that run quantised.
        float32: layer -> MACs that run in float32.
    """

    quantized: Counter[str] = field(default_factory=Counter)
    float32: Counter[str] = field(default_factory=Counter)

    def add(self, layer: str, macs: int, is_quantized: bool) -> None:
        """Add an operation of a layer; ``is_quantized``: whether both operands are quantised."""
        counter = self.quantized if is_quantized else self.float32
        counter[layer] += macs

    @property
    def total(self) -> int:
        """All MACs."""
        return self.quantized.total() + self.float32.total()

    @property
    def quantized_share(self) -> float:
        """Share of the MACs that run quantised; 1 if there are no MACs."""
        return self.quantized.total() / self.total if self.total else 1.0

    def shares(self) -> dict[str, float]:
        """Return layer -> share of the model's MACs."""
        macs = self.quantized + self.float32
        return {layer: count / self.total for layer, count in macs.items()}

    def float32_shares(self) -> dict[str, float]:
        """Return layer -> share of the model's MACs that runs in float32 in it."""
        return {
            layer: macs / self.total for layer, macs in self.float32.items() if macs
        }


def _bitops(macs: Mapping[CountedPass, int]) -> float:
    """Return the BitOps of passes."""
    squared_bits = sum(count * key.squared_bits for key, count in macs.items())
    return squared_bits / FULL_PRECISION**2


@dataclass
class Tally:
    """Sums over operations as exact integers.

    Attributes:
        macs: MACs of every pass.
        never_quantized: those of them that are of no matmul or convolution, but of normalisation, gates or sums.
        elements: sums of ``Operation.elements``, for prices other than BitOps.
        forward: forward MACs by layer.
    """

    macs: Counter[CountedPass] = field(default_factory=Counter)
    never_quantized: Counter[CountedPass] = field(default_factory=Counter)
    elements: dict[CountedPass, tuple[int, ...]] = field(default_factory=dict)
    forward: ForwardMacs = field(default_factory=ForwardMacs)

    def add(
        self,
        operation: Operation,
        passes: Iterable[str],
        formats: Formats,
        times: int = 1,
    ) -> None:
        """Add passes of an operation, ``times`` times."""
        for name in passes:
            first, second = formats.operands(name)
            key = CountedPass(row_name(operation), name, first, second)
            macs = times * operation.macs
            self.macs[key] += macs
            if not is_matmul(operation):
                self.never_quantized[key] += macs
            if name == "forward" and is_matmul(operation):
                is_quantized = FULL_PRECISION not in (first, second)
                self.forward.add(key.layer, macs, is_quantized)
            former = self.elements.get(key, (0, 0, 0))
            self.elements[key] = tuple(
                total + times * count
                for total, count in zip(former, operation.elements, strict=True)
            )

    def total(self) -> float:
        """Return the BitOps of all passes."""
        return _bitops(self.macs)

    def never_quantized_share(self) -> float:
        """Return the share of the BitOps that is of no matmul or convolution."""
        total = self.total()
        return _bitops(self.never_quantized) / total if total else 0.0

    def squared_bits(self) -> dict[str, Counter[str]]:
        """Return layer -> pass -> squared bits x MACs."""
        by_layer: dict[str, Counter[str]] = {}
        for key, macs in self.macs.items():
            passes = by_layer.setdefault(key.layer, Counter())
            passes[key.name] += macs * key.squared_bits
        return by_layer


def bits_of(format: Any) -> int:
    """Return the bits of an element of a format."""
    return format if isinstance(format, int) else format.bits


def widest(formats: Iterable[Formats]) -> Formats:
    """Return the format with most bits, role by role."""
    distinct = dict.fromkeys(formats)  # many layers often have the same formats
    return Formats(*(max(role, key=bits_of) for role in zip(*distinct, strict=True)))


@dataclass(frozen=True)
class NotIntercepted:
    """Work of a forward pass that was not intercepted, so that it runs in float32 and has no price.

    Attributes:
        shares: layer -> share of all forward MACs of matmuls and convolutions that was not intercepted in it.
        silent_layers: other converted layers that hold weights, of which no operation was intercepted.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    silent_layers: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.shares or self.silent_layers)


def describe_float32(
    shares: Mapping[str, float],
    where: str = "float32",
    not_intercepted: NotIntercepted | None = None,
) -> str:
    """Return sentences with the share of forward MACs in float32 and its largest layers.

    Args:
        shares: layer -> share of the intercepted forward MACs that runs in float32.
        where: name of the attribute that holds the shares of all layers.
        not_intercepted: work that was not intercepted.
    """
    not_intercepted = not_intercepted or NotIntercepted()
    if shares:
        share = f"{sum(shares.values()):.1%}"
        layers = largest_layers(shares, ".1%", where)
        lines = [
            f"{share} of the forward MACs of matmuls and convolutions run in float32: {layers}"
        ]
    elif not_intercepted:
        lines = ["all intercepted matmuls and convolutions run quantised"]
    else:
        lines = ["all matmuls and convolutions run quantised"]

    if not_intercepted.shares:
        share = f"{sum(not_intercepted.shares.values()):.1%}"
        layers = largest_layers(not_intercepted.shares, ".1%", "not_intercepted.shares")
        lines.append(
            f"{share} of all forward MACs are not intercepted: they run in float32 and are not counted here: {layers}; "
            "check(model, inputs) lists their operations"
        )
    if not_intercepted.silent_layers:
        names = [_display_name(name) for name in not_intercepted.silent_layers]
        shown = ", ".join(names[:MAX_LISTED_LAYERS])
        num_omitted = len(names) - MAX_LISTED_LAYERS
        more = (
            f", {num_omitted} more in .not_intercepted.silent_layers"
            if num_omitted > 0
            else ""
        )
        lines.append(
            f"no matmul or convolution was intercepted in {shown}{more}: others are not counted; "
            "check(model, inputs) lists those that it knows"
        )
    return "\n".join(lines)


def largest_layers(by_layer: Mapping[str, float], form: str, where: str) -> str:
    """Return the three layers with the largest values as text.

    Args:
        by_layer: layer -> value.
        form: format specification of a value.
        where: name of the attribute that holds all layers.
    """
    layers = sorted(by_layer, key=lambda layer: -by_layer[layer])
    descriptions = []
    for layer in layers[:MAX_LISTED_LAYERS]:
        descriptions.append(f"{_display_name(layer)} {by_layer[layer]:{form}}")
    num_omitted = len(layers) - len(descriptions)
    if num_omitted:
        descriptions.append(f"{num_omitted} more in .{where}")
    return ", ".join(descriptions)


def _display_name(layer: str) -> str:
    """Return the name of a layer for a sentence: "layer 0" for the first of an ``nn.Sequential``."""
    if not layer:
        return "(model)"
    is_number = layer.replace(".", "").isdigit()
    return f"layer {layer}" if is_number else layer
