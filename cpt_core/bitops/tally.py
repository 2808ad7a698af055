"""Sums of counted work, by layer, pass and formats, and their prices.

A format is the bits of a uniform grid, 32 for float32, or a number format, which has ``bits``. BitOps are priced here;
other prices register themselves in ``PRICES``: optional parts do, see ``extensions``. Nothing here needs torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cpt_core import extensions
from cpt_core.bitops.conventions import PASSES, Work
from cpt_core.checks import library
from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import Levels

if TYPE_CHECKING:
    import pandas as pd

Formats = Levels  # the format of every role
MAX_GRID_BITS = 23  # beyond, levels are floats with the exponent of float32
IN_FLOAT32 = Formats(FULL_PRECISION, FULL_PRECISION, FULL_PRECISION, FULL_PRECISION)


class Price(NamedTuple):
    """What an operation costs.

    Attributes:
        unit: of the price.
        of_operation: ``(a, b, macs, elements) -> price``: the formats of both operands, the multiply-accumulates, and
            how many elements of the first operand, the second and the result are moved.
    """

    unit: str
    of_operation: Callable[[Any, Any, float, tuple[float, float, float]], float]


def bits_of(format: Any) -> int:
    """Return the bits of an element."""
    return format if isinstance(format, int) else format.bits


def _bitops(a: Any, b: Any, macs: float, elements: tuple[float, float, float]) -> float:
    return macs * bits_of(a) * bits_of(b) / FULL_PRECISION**2


PRICES: dict[str, Price] = {"bitops": Price("32 x 32-bit MACs", _bitops)}


class Tally:
    """Multiply-accumulates and moved elements, exact integers; prices are computed when they are asked for."""

    def __init__(self) -> None:
        # layer -> (pass, format a, format b) -> MACs, and elements of both operands and the result
        self._sums: dict[str, dict[tuple[str, Any, Any], tuple[int, int, int, int]]] = {}

    def add(self, work: Work, passes: Iterable[str], formats: Formats, times: int = 1) -> None:
        """Add passes of an operation, at the formats of its operands."""
        for name in passes:
            sums = self._sums.setdefault(work.layer, {})
            a, b = (getattr(formats, role) for role in PASSES[name])
            macs, first, second, result = sums.get((name, a, b), (0, 0, 0, 0))
            x, y, z = work.moved(name)
            sums[name, a, b] = macs + times * work.macs, first + times * x, second + times * y, result + times * z

    def total(self, bits: int | None = None) -> float:
        """Return the BitOps of all operations, at the bits of their operands or all at others."""
        squared_bits = 0
        for sums in self._sums.values():
            for (_, a, b), (macs, *_) in sums.items():
                squared_bits += macs * (bits_of(a) * bits_of(b) if bits is None else bits**2)
        return squared_bits / FULL_PRECISION**2

    def float32(self) -> dict[str, float]:
        """Return layer -> its share of all forward MACs, of those that have an operand in float32."""
        float32_macs: Counter[str] = Counter()
        total = 0
        for layer, sums in self._sums.items():
            for (name, a, b), (macs, *_) in sums.items():
                if name == "forward":
                    total += macs
                    float32_macs[layer] += macs if FULL_PRECISION in (a, b) else 0
        return {layer: macs / total for layer, macs in float32_macs.items() if macs}

    def squared_bits(self) -> dict[str, Counter[str]]:
        """Return layer -> pass -> squared bits x MACs, exact integers."""
        by_layer: dict[str, Counter[str]] = {layer: Counter() for layer in self._sums}
        for layer, sums in self._sums.items():
            for (name, a, b), (macs, *_) in sums.items():
                by_layer[layer][name] += macs * bits_of(a) * bits_of(b)
        return by_layer

    def prices(self) -> dict[str, dict[str, float]]:
        """Return layer -> name of a price -> total, in its unit."""
        extensions.load("prices")
        by_layer: dict[str, dict[str, float]] = {}
        for layer, sums in self._sums.items():
            totals = dict.fromkeys(PRICES, 0.0)
            for (_, a, b), (macs, *elements) in sums.items():
                for name, price in PRICES.items():
                    totals[name] += price.of_operation(a, b, macs, tuple(elements))  # type: ignore[arg-type]
            by_layer[layer] = totals
        return by_layer


def total_prices(prices: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return name of a price -> total over layers."""
    return {name: float(sum(layer[name] for layer in prices.values())) for name in PRICES}


def price_table(prices: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """Return a row per layer and one of totals, a column per price, with its unit."""
    rows = {**prices, "total": total_prices(prices)}
    pandas = library("pandas", "lab")
    frame = pandas.DataFrame(list(rows.values()), index=pandas.Index(rows, name="layer"), columns=list(PRICES))
    return frame.rename(columns={name: f"{name} ({price.unit})" for name, price in PRICES.items()})


def describe_float32(shares: Mapping[str, float], where: str = "float32") -> str:
    """Return in words what share of the forward MACs runs in float32, and where; ``where`` has all layers."""
    if not shares:
        return "all forward MACs run quantised"
    return f"{sum(shares.values()):.1%} of the forward MACs run in float32: {largest_layers(shares, '.1%', where)}"


def largest_layers(by_layer: Mapping[str, float], form: str, where: str) -> str:
    """Name the three layers with the largest numbers; ``where`` has the others."""
    largest = sorted(by_layer, key=lambda layer: -by_layer[layer])
    named = [f"{layer or '(model)'} {by_layer[layer]:{form}}" for layer in largest[:3]]
    if len(largest) > 3:
        named.append(f"{len(largest) - 3} more in .{where}")
    return ", ".join(named)


def sort_key(format: Any) -> tuple[float, ...]:
    """Return what orders formats by bits; those that it does not tell apart cost the same."""
    if isinstance(format, int):
        exponent = 0 if format <= MAX_GRID_BITS else 8
        return format, format - exponent, exponent, format
    return format.bits, format.significand, format.exponent, format.bits_per_element


def widest(formats: Iterable[Formats]) -> Formats:
    """Return the formats of most bits, role by role."""
    distinct = set(formats)  # of many layers, often one
    return Formats(*(max(role, key=sort_key) for role in zip(*distinct, strict=True)))
