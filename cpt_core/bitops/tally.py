"""Counted work of layers, by pass and formats of the operands, and its BitOps.

A format is the bits of a uniform grid, 32 for float32, or a number format, which has ``bits``. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from cpt_core.bitops.conventions import PASS_OPERANDS, is_matmul, row_name
from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import RoleLevels

if TYPE_CHECKING:
    from cpt_core.quantization.op_interception import Operation

Formats = RoleLevels  # the format of every role
IN_FLOAT32 = Formats(FULL_PRECISION, FULL_PRECISION, FULL_PRECISION, FULL_PRECISION)


class CountedPass(NamedTuple):
    """A pass of a layer: its name in ``PASS_OPERANDS``, and the formats of both operands."""

    layer: str
    name: str
    first: Any
    second: Any

    @property
    def squared_bits(self) -> int:
        """The product of the bits of both operands."""
        return bits_of(self.first) * bits_of(self.second)


@dataclass
class ForwardMacs:
    """MACs of the matmuls and convolutions of forward passes by layer: the one definition of shares.

    ``check``, ``summary``, ``count_bitops`` and ``BitOpsLedger`` say with it what share of a model runs quantised. Left
    out is what no layer rounds, although it has a price: normalisation, the gates of LSTMs, upsampling, and sums over
    neighbours.
    """

    quantized: Counter[str] = field(default_factory=Counter)
    float32: Counter[str] = field(default_factory=Counter)

    def add(self, layer: str, macs: int, is_quantized: bool) -> None:
        """Add an operation of a layer; ``is_quantized``: both of its operands."""
        counter = self.quantized if is_quantized else self.float32
        counter[layer] += macs

    @property
    def total(self) -> int:
        """All MACs."""
        return self.quantized.total() + self.float32.total()

    @property
    def quantized_share(self) -> float:
        """The share of all MACs that runs quantised; 1 where there are none."""
        return self.quantized.total() / self.total if self.total else 1.0

    def float32_shares(self) -> dict[str, float]:
        """Return layer -> its share of all MACs, of those that run in float32."""
        return {
            layer: macs / self.total for layer, macs in self.float32.items() if macs
        }


@dataclass
class Tally:
    """Sums over operations, exact integers: MACs, and for other prices than BitOps ``Operation.elements``."""

    macs: Counter[CountedPass] = field(default_factory=Counter)
    elements: dict[CountedPass, tuple[int, ...]] = field(default_factory=dict)
    forward: ForwardMacs = field(default_factory=ForwardMacs)

    def add(
        self,
        operation: Operation,
        passes: Iterable[str],
        formats: Formats,
        times: int = 1,
    ) -> None:
        """Add passes of an operation."""
        for name in passes:
            first, second = (getattr(formats, role) for role in PASS_OPERANDS[name])
            counted = CountedPass(row_name(operation), name, first, second)
            self.macs[counted] += times * operation.macs
            if name == "forward" and is_matmul(operation):
                self.forward.add(
                    counted.layer,
                    times * operation.macs,
                    FULL_PRECISION not in (first, second),
                )
            before = self.elements.get(counted, (0, 0, 0))
            self.elements[counted] = tuple(
                n + times * m for n, m in zip(before, operation.elements, strict=True)
            )

    def total(self) -> float:
        """Return the BitOps of all passes."""
        return (
            sum(macs * counted.squared_bits for counted, macs in self.macs.items())
            / FULL_PRECISION**2
        )

    def squared_bits(self) -> dict[str, Counter[str]]:
        """Return layer -> pass -> squared bits x MACs."""
        by_layer: dict[str, Counter[str]] = {}
        for counted, macs in self.macs.items():
            by_layer.setdefault(counted.layer, Counter())[counted.name] += (
                macs * counted.squared_bits
            )
        return by_layer


def bits_of(format: Any) -> int:
    """Return the bits of an element."""
    return format if isinstance(format, int) else format.bits


def widest(formats: Iterable[Formats]) -> Formats:
    """Return the formats of most bits, role by role."""
    distinct = dict.fromkeys(formats)  # of many layers, often one
    return Formats(*(max(role, key=bits_of) for role in zip(*distinct, strict=True)))


def describe_float32(shares: Mapping[str, float], where: str = "float32") -> str:
    """Return in words which ``ForwardMacs`` run in float32, and where; ``where`` has all layers."""
    if not shares:
        return "all matmuls and convolutions run quantised"
    share, named = f"{sum(shares.values()):.1%}", largest_layers(shares, ".1%", where)
    return f"{share} of the forward MACs of matmuls and convolutions run in float32: {named}"


def largest_layers(by_layer: Mapping[str, float], form: str, where: str) -> str:
    """Name the three layers with the largest numbers; ``where`` has the others."""
    largest = sorted(by_layer, key=lambda layer: -by_layer[layer])
    named = [f"{_in_words(layer)} {by_layer[layer]:{form}}" for layer in largest[:3]]
    if len(largest) > 3:
        named.append(f"{len(largest) - 3} more in .{where}")
    return ", ".join(named)


def _in_words(layer: str) -> str:
    """Return the name of a layer, which may be a number as in ``nn.Sequential``, so that no one reads it as one."""
    if not layer:
        return "(model)"
    return f"layer {layer}" if layer.replace(".", "").isdigit() else layer
