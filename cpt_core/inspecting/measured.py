"""What a training step takes on a device, by bits and layer: the answer of ``inspecting.measure``.  Beyond the paper.

BitOps say what a step could cost on a machine with units of every width; this says what it costs on the one at hand.

>>> slow, fast = Spent(0.5, 400, 192.0), Spent(0.25, 100, 57.0)
>>> measured = MeasuredCost("a machine", 8, "paper", {3: fast, 8: slow}, {"fc": {3: fast, 8: slow}})
>>> measured.seconds(3), measured.other(8).seconds
(0.25, 0.0)
>>> from cpt_core.schedules.schedule import TableSchedule
>>> measured.relative_cost(TableSchedule(((3, 50), (8, 50))))
0.75
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cpt_core.checks import check_bits, declared, shown
from cpt_core.schedules.layered import LayeredSchedule
from cpt_core.schedules.roles import RoleSchedules
from cpt_core.schedules.schedule import Schedule


class Spent(NamedTuple):
    """What a training step takes, or the part of a layer.

    Attributes:
        seconds: of the forward and the backward pass.
        saved_bytes: what autograd holds between the two beside parameters, buffers and inputs: activations or their
            codes, and quantised weights.
        bitops: of the same, in units of one full-precision multiply-accumulate.
    """

    seconds: float
    saved_bytes: int
    bitops: float


@dataclass(frozen=True)
class MeasuredCost:
    """What a training step takes at each of some bit widths. ``print`` it for a table.

    Attributes:
        device: that it was measured on.
        q_grad: gradient bits, those of all widths.
        convention: of the BitOps, see ``count_bitops``.
        steps: bits -> what a whole step takes; seconds are medians.
        layers: layer -> bits -> its part, for every quantised layer and every other module with parameters of its own
            that ran; what is in none of them is ``other``.
    """

    device: str
    q_grad: int
    convention: str
    steps: Mapping[int, Spent]
    layers: Mapping[str, Mapping[int, Spent]]

    def __post_init__(self) -> None:
        declared(type(self), vars(self), parts=True)
        check_bits("q_grad", self.q_grad)
        if not self.steps or not all(check_bits("bits of steps", q) for q in self.steps):
            raise ValueError("steps must hold at least one bit width, got none")

    @property
    def bits(self) -> tuple[int, ...]:
        """The bit widths that were measured, the lowest first."""
        return tuple(sorted(self.steps))

    def seconds(self, bits: int) -> float:
        """Return the seconds of a step, without the optimizer's; for ``solve_schedule(budget, ..., cost=seconds)``.

        Raises:
            ValueError: for bits that were not measured.
        """
        return self._at(bits).seconds

    def other(self, bits: int) -> Spent:
        """Return what a step takes outside the layers: activation functions, sums, autograd itself; errors as above."""
        step, parts = self._at(bits), [spent[bits] for spent in self.layers.values()]
        return Spent(*(whole - sum(of_layers) for whole, *of_layers in zip(step, *parts, strict=True)))

    def relative_cost(self, schedule: Schedule) -> float:
        """Return the seconds of a step, the mean over a schedule, relative to static ``q_max``.

        Raises:
            ValueError: for a schedule with bits that were not measured, or with other bits in other layers.
        """
        declared(self.relative_cost, locals())
        if isinstance(schedule, LayeredSchedule | RoleSchedules):
            measured = "the same bits in all layers, weights and activations, and with the same gradients"
            raise ValueError(f"a {type(schedule).__name__} cannot be priced: steps were measured with {measured}")
        return schedule.relative_cost(cost=self.seconds)

    def _at(self, bits: int) -> Spent:
        if check_bits("bits", bits) not in self.steps:
            raise ValueError(f"{bits!r} bits were not measured; measured: {', '.join(map(str, self.bits))}")
        return self.steps[bits]

    def __str__(self) -> str:
        """Return a table by bits, relative to the highest, and one by layer, at the lowest and the highest bits."""
        low, high = self.bits[0], self.bits[-1]
        of, top = f"of {high}", self.steps[high]
        lines = [
            f"a training step without the optimizer's, {self.device}; gradients of {self.q_grad} bits",
            f"bits  {'ms':>9}  {of:>6}  {'saved MiB':>9}  {of:>6}  {f'BitOps, {self.convention}':>14}  {of:>6}",
        ]
        for q in self.bits:
            s = self.steps[q]
            shares = [f"{part / whole:6.3f}" if whole else f"{'-':>6}" for part, whole in zip(s, top, strict=True)]
            shown = f"{1e3 * s.seconds:9.3f}", f"{s.saved_bytes / 2**20:9.3f}", f"{s.bitops:14.5g}"
            cells = (f"{value}  {share}" for value, share in zip(shown, shares, strict=True))
            lines.append("  ".join([f"{q:4}", *cells]))
        rows = {**self.layers, "(other)": {q: self.other(q) for q in self.bits}}
        width = max(map(len, [*rows, "(model)"]))
        ends = tuple(dict.fromkeys((low, high)))
        heads = [f"{f'{unit} at {q}':>15}" for unit in ("ms", "saved MiB") for q in ends]
        lines += ["", "  ".join([f"{'layer':<{width}}", *heads])]
        for name, spent in rows.items():
            values = *(1e3 * spent[q].seconds for q in ends), *(spent[q].saved_bytes / 2**20 for q in ends)
            cells = (f"{value:15.3f}" for value in values)
            lines.append("  ".join([f"{name or '(model)':<{width}}", *cells]))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description; ``from_dict`` gives an equal object."""
        layers = {name: _plain(spent) for name, spent in self.layers.items()}
        return {**vars(self), "steps": _plain(self.steps), "layers": layers}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> MeasuredCost:
        """Return what ``to_dict`` described."""
        declared(cls.from_dict, locals())
        try:
            layers = {name: _spent(rows) for name, rows in d["layers"].items()}
            return cls(d["device"], d["q_grad"], d["convention"], _spent(d["steps"]), layers)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"d must be what to_dict() returned, got {shown(d)}: {error!r}") from None


def _plain(by_bits: Mapping[int, Spent]) -> list[list[Any]]:
    return [[q, *spent] for q, spent in by_bits.items()]


def _spent(rows: Iterable[list[Any]]) -> dict[int, Spent]:
    return {q: Spent(*values) for q, *values in rows}
