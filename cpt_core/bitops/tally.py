"""The work of a run by layer, pass and formats, and what it costs by every cost of ``COSTS``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cpt_core.bitops.trace import Call
from cpt_core.checks import library
from cpt_core.formats import costs
from cpt_core.formats.costs import COSTS, FLOAT32, Operands
from cpt_core.formats.format import Format
from cpt_core.schedules.cost import FULL_PRECISION

if TYPE_CHECKING:
    import pandas as pd

IN_FLOAT32 = Operands(FLOAT32, FLOAT32, FLOAT32, FLOAT32)
Work = tuple[int, int, int, int]  # MACs; elements of both operands and of the result


class Tally:
    """Multiply-accumulates and moved elements, kept exactly; prices are computed when they are asked for."""

    def __init__(self) -> None:
        self._work: dict[str, dict[tuple[str, Format, Format], Work]] = {}

    def add(self, call: Call, passes: tuple[str, ...], operands: Operands, times: int = 1) -> None:
        """Add the products of passes of a call, at the formats of its operands."""
        for name in passes:
            layer = self._work.setdefault(call.layer, {})
            a, b = (getattr(operands, role) for role in costs.PASSES[name])
            before = layer.get((name, a, b), (0, 0, 0, 0))
            now = (call.macs, *call.moved(name))
            layer[name, a, b] = tuple(x + times * y for x, y in zip(before, now, strict=True))  # type: ignore[assignment]

    def total(self, bits: int | None = None) -> float:
        """Return the BitOps of all products, at the bits of their operands or all at others."""
        products = (entry for work in self._work.values() for entry in work.items())
        found = (macs * (a.bits * b.bits if bits is None else bits**2) for (_, a, b), (macs, *_) in products)
        return sum(found) / FULL_PRECISION**2

    def float32(self) -> dict[str, float]:
        """Return layer -> its share of all forward MACs, of those that have an operand in float32."""
        forward = {
            layer: [(FLOAT32 in (a, b), macs) for (name, a, b), (macs, *_) in work.items() if name == "forward"]
            for layer, work in self._work.items()
        }
        every = sum(macs for work in forward.values() for _, macs in work)
        found = {layer: sum(macs for plain, macs in work if plain) for layer, work in forward.items()}
        return {layer: macs / every for layer, macs in found.items() if macs}

    def squared_bits(self) -> dict[str, Counter[str]]:
        """Return layer -> pass -> squared bits x MACs, exact integers."""
        found: dict[str, Counter[str]] = {layer: Counter() for layer in self._work}
        for layer, work in self._work.items():
            for (name, a, b), (macs, *_) in work.items():
                found[layer][name] += macs * a.bits * b.bits
        return found

    def prices(self) -> dict[str, dict[str, float]]:
        """Return layer -> name of a cost -> total, in its unit."""
        found: dict[str, dict[str, float]] = {layer: dict.fromkeys(COSTS, 0.0) for layer in self._work}
        for layer, work in self._work.items():
            for (_, a, b), (macs, first, second, result) in work.items():
                for name, cost in COSTS.items():
                    found[layer][name] += cost.product(a, b, macs, (first, second, result))
        return found


def mostly_float32(shares: Mapping[str, float], where: str = "float32") -> str:
    """Return in words what share of the forward MACs runs in float32, and where most of it; ``where`` is all of it."""
    if not shares:
        return "all forward MACs run quantised"
    return f"{sum(shares.values()):.1%} of the forward MACs run in float32: {largest(shares, '.1%', where)}"


def largest(of_layers: Mapping[str, float], form: str, where: str) -> str:
    """Name the three layers that have most, each with its number; ``where`` are the others."""
    most = sorted(of_layers, key=lambda layer: -of_layers[layer])
    named = [f"{layer or '(model)'} {of_layers[layer]:{form}}" for layer in most[:3]]
    if len(most) > 3:
        named.append(f"{len(most) - 3} more in .{where}")
    return ", ".join(named)


def totals(prices: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return name of a cost -> total over layers."""
    return {name: float(sum(layer[name] for layer in prices.values())) for name in COSTS}


def table(prices: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """Return a line per layer and one of totals, a column per cost, with its unit."""
    lines = {**prices, "total": totals(prices)}
    pandas = library("pandas", "lab")
    shown = pandas.DataFrame(list(lines.values()), index=pandas.Index(lines, name="layer"), columns=list(COSTS))
    return shown.rename(columns={name: f"{name} ({cost.unit})" for name, cost in COSTS.items()})


def rank(f: Format) -> tuple[float, ...]:
    """Return what orders formats by bits; those that it does not tell apart cost the same."""
    return f.bits, f.significand, f.exponent, f.bits_per_element


def widest(found: Iterable[Operands]) -> Operands:
    """Return the operands of most bits, role by role."""
    distinct = {tuple(map(id, operands)): operands for operands in found}.values()  # of many layers, often one
    return Operands(*(max(role, key=rank) for role in zip(*distinct, strict=True)))
