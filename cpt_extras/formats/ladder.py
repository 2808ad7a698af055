"""Format ladders: a number format for every level of a schedule.  Beyond the paper.

A schedule determines the active level of a step; the ladder determines the format of that level. On the ladder of the
paper, ``AFFINE``, level q is the affine grid of q bits, and levels of 24 and more are float32. Solver, deficits,
delays, allocation and range test work on any ladder.

>>> ladder = FormatLadder({3: "mxfp4", 4: "nvfp4", 6: "e3m2", 8: "e4m3"})
>>> ladder.levels, str(ladder[6]), ladder.bits(3)
((3, 4, 6, 8), 'e3m2', 4)
>>> str(ladder.filled()[5])
'nvfp4'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from cpt_core.schedules.schedule import RoleLevels
from cpt_core.validation import check_int, check_types, short_repr
from cpt_extras.formats.costs import Operands, cost_named
from cpt_extras.formats.format import FORMATS, MAX_AFFINE_BITS, Format
from cpt_extras.formats.quantizer import FormatQuantizer

MAX_LEVEL = 32


class MatmulLadders(RoleLevels):
    """Ladder of every role of layers that round operands for every matmul, see ``matmul_rounding``.

    ``QuantConfig`` takes it as ``ladder``, and so do costs: both operands of a backward matmul have its level.
    """

    __slots__ = ()


class FormatLadder:
    """A format for every level. Ladders are values: those with equal formats are equal and have one hash.

    Args:
        formats: level, 1 to 32 -> format or its name, also with options of rounding ("mxfp4:rounding=stochastic"), or
            a ``FormatQuantizer``. Levels may be missing, but a schedule that uses a missing level is an error: see
            ``filled``.

    Raises:
        ValueError: for no levels, levels that are no whole numbers from 1 to 32, and values that are no formats.
    """

    def __init__(self, formats: Mapping[int, Format | FormatQuantizer | str]) -> None:
        """Read the formats."""
        if not isinstance(formats, Mapping) or not formats:
            raise ValueError(
                f"a ladder is a mapping, level -> format, of at least one level; got {formats!r}"
            )
        try:
            quantizers = {
                check_int("level", level, 1, MAX_LEVEL): FormatQuantizer.of(value)
                for level, value in formats.items()
            }
        except ValueError as error:
            raise ValueError(f"formats of a ladder: {error}") from None
        self._levels = dict(sorted(quantizers.items()))
        self._hash = hash(tuple(self._levels.items()))  # needed at every step

    @classmethod
    def affine(cls) -> FormatLadder:
        """Return the paper's ladder: level q is the affine grid of q bits, levels from 24 on are float32."""
        return AFFINE

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels, rising."""
        return tuple(self._levels)

    def __getitem__(self, level: int) -> Format:
        """Return the format of a level; level 32 is float32 unless the ladder has another format there.

        Raises:
            ValueError: for a level that the ladder does not have; it names the existing levels.
        """
        format = self.quantizer(level).format
        assert format is not None
        return format

    def quantizer(self, level: int) -> FormatQuantizer:
        """Return the format of a level with its ranges and rounding; ValueError for a missing level."""
        level = check_int("level", level, 1, MAX_LEVEL)
        if level == MAX_LEVEL and level not in self._levels:
            return FormatQuantizer(format=FORMATS["float32"])
        if level not in self._levels:
            raise ValueError(
                f"the ladder has a hole at level {level}: its levels are {', '.join(map(str, self._levels))}; "
                "ladder.filled() holds each format until the next"
            )
        return self._levels[level]

    def to_nearest(self) -> FormatLadder:
        """Return a ladder whose levels leave the rounding to the role where they ask for stochastic rounding."""
        return type(self)(
            {
                level: replace(quantizer, rounding=None)
                if quantizer.rounding == "stochastic"
                else quantizer
                for level, quantizer in self._levels.items()
            }
        )

    def __iter__(self) -> Iterator[int]:
        """Iterate over the levels, so that ``3 in ladder`` tests for a level."""
        return iter(self._levels)

    def bits(self, level: int) -> int:
        """Return the bits of an element at a level, which BitOps count."""
        return self[level].bits

    def priced(self, level: int) -> Format:
        """Return the format that prices a level.

        It is the format of the level, except for levels 24 to 31 of the paper's ladder: these have the numbers of
        float32, and BitOps count floats of 24 to 31 bits.
        """
        format = self[level]
        is_shorter_float = MAX_AFFINE_BITS < level < format.bits
        if format.is_identity and is_shorter_float and self == AFFINE:
            return Format.minifloat(8, level - 9)
        return format

    def cost(
        self, name: str = "bitops", gradients: Format | str | int | None = None
    ) -> Callable[[int], float]:
        """Return the cost of a training step as a function of its level, for ``solve_schedule(..., cost=...)``.

        A step is a forward matmul and two backward matmuls of equal size, see ``Cost.step``; weights and activations
        are at the level, output gradients in the format of ``gradients``.

        Args:
            name: of ``COSTS``.
            gradients: format of output gradients or its name, or a level of this ladder; None takes the highest level,
                which on the paper's ladder is float32: give ``q_max`` for the paper's convention.

        Raises:
            ValueError: for another name or format; the function, for a level that the ladder does not have.

        >>> AFFINE.cost("ace", gradients=8)(4), FormatLadder({4: "e2m1", 8: "e4m3"}).cost("ace")(4)
        (80.0, 80.0)
        """
        check_types(self.cost, locals())
        cost = cost_named(name)
        if gradients is None:
            gradients = self.levels[-1]
        if isinstance(gradients, (Format, str)):
            gradient_format = Format.of(gradients)
        else:
            gradient_format = self.priced(gradients)

        @cache
        def step(level: int) -> float:
            format = self.priced(level)
            return cost.step(Operands(format, format, gradient_format, gradient_format))

        return step

    def check(self, levels: Iterable[int]) -> None:
        """Raise ValueError unless the ladder has all ``levels``."""
        check_types(self.check, locals())
        for level in dict.fromkeys(levels):
            self[check_int("each of levels", level)]

    def filled(self) -> FormatLadder:
        """Return the ladder without missing levels: each gets the format of the next lower level."""
        quantizers: dict[int, FormatQuantizer] = {}
        for level in range(self.levels[0], self.levels[-1] + 1):
            quantizers[level] = self._levels.get(level) or quantizers[level - 1]
        return FormatLadder(quantizers)

    def to_dict(self) -> dict[str, str]:
        """Return a JSON-able description; ``from_dict`` gives an equal ladder."""
        return {str(level): str(value) for level, value in self._levels.items()}

    @classmethod
    def from_dict(cls, description: Mapping[Any, str]) -> FormatLadder:
        """Rebuild a ladder from ``to_dict()``."""
        check_types(cls.from_dict, locals())
        try:
            return cls({int(level): value for level, value in description.items()})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"description of a ladder: {error}; got {short_repr(description)}"
            ) from None

    def __eq__(self, other: object) -> bool:
        """Return whether two ladders have equal levels with equal formats."""
        return isinstance(other, FormatLadder) and self._levels == other._levels

    def __hash__(self) -> int:
        """Return a hash of levels and formats."""
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the formats without the hash, which differs between processes."""
        return FormatLadder, (self._levels,)

    def __repr__(self) -> str:
        """Return an expression that makes the ladder."""
        if self == AFFINE:
            return "FormatLadder.affine()"
        return f"FormatLadder({ {level: str(value) for level, value in self._levels.items()} })"


def as_ladder(
    value: FormatLadder | Mapping[int, Format | FormatQuantizer | str] | None,
) -> FormatLadder:
    """Return the ladder of a ``value``: a ladder, a mapping of levels to formats, or None for the paper's."""
    if value is None:
        return AFFINE
    return value if isinstance(value, FormatLadder) else FormatLadder(value)


_GRIDS = {q: Format.affine(q) for q in range(1, MAX_AFFINE_BITS + 1)}
_FLOAT32_LEVELS = range(MAX_AFFINE_BITS + 1, MAX_LEVEL + 1)
AFFINE = FormatLadder(_GRIDS | dict.fromkeys(_FLOAT32_LEVELS, FORMATS["float32"]))
# Ladders of recipes by name, which specs store. The last block of a row of "mx" may be shorter, so that any layer can
# take these formats.
LADDERS: Mapping[str, FormatLadder] = {
    "affine": AFFINE,
    "minifloat": FormatLadder({4: "e2m1", 5: "e2m2", 6: "e3m2", 7: "e3m3", 8: "e4m3"}),
    "mx": FormatLadder(
        {
            1: "mxfp4:partial=1",
            2: "mxfp6_e2m3:partial=1",
            3: "mxfp8_e4m3:partial=1",
            4: "bf16",
        }
    ),
}
