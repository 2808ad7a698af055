"""Ladders of formats: what a schedule climbs, a format for each of its levels.  Beyond the paper.

A schedule says which level is in force at a step; the ladder says what that level is. On the ladder of the paper,
``AFFINE``, level q is the affine grid of q bits, and levels of 24 and more are float32. Whatever works on schedules,
such as solver, deficits, delays, allocation and range test, works on any ladder.

>>> ladder = FormatLadder({3: "mxfp4", 4: "nvfp4", 6: "e3m2", 8: "e4m3"})
>>> ladder.levels, str(ladder[6]), ladder.bits(3)
((3, 4, 6, 8), 'e3m2', 4)
>>> str(ladder.filled()[5])
'nvfp4'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from cpt_core.validation import check_int, check_types, short_repr
from cpt_extras.formats.costs import Operands, cost_named
from cpt_extras.formats.format import FORMATS, MOST_AFFINE, Format
from cpt_extras.formats.quantizer import FormatQuantizer

MOST_LEVEL = 32


class FormatLadder:
    """A format for every level; a value: equal ladders are equal, and hash alike.

    Args:
        formats: level, 1 to 32 -> format or its name, also with options of rounding ("mxfp4:rounding=stochastic"), or
            a ``FormatQuantizer``. Levels need not follow each other, but a schedule that stands on one that is missing
            is refused: see ``filled``.

    Raises:
        ValueError: for no levels, levels that are no whole numbers from 1 to 32, and what is no format.
    """

    def __init__(self, formats: Mapping[int, Format | FormatQuantizer | str]) -> None:
        """Read the formats."""
        if not isinstance(formats, Mapping) or not formats:
            raise ValueError(
                f"a ladder is a mapping, level -> format, of at least one level; got {formats!r}"
            )
        try:
            found = {
                check_int("level", level, 1, MOST_LEVEL): FormatQuantizer.of(value)
                for level, value in formats.items()
            }
        except ValueError as error:
            raise ValueError(f"formats of a ladder: {error}") from None
        self._levels = dict(sorted(found.items()))
        self._hash = hash(tuple(self._levels.items()))  # asked for at every step

    @classmethod
    def affine(cls) -> FormatLadder:
        """Return the paper's: level q is the affine grid of q bits, from 24 on float32."""
        return AFFINE

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels, from the lowest up."""
        return tuple(self._levels)

    def __getitem__(self, level: int) -> Format:
        """Return the format of a level; 32 is float32 on every ladder that says nothing else.

        Raises:
            ValueError: for a level that the ladder does not have; it names those there are.
        """
        format = self.quantizer(level).format
        assert format is not None
        return format

    def quantizer(self, level: int) -> FormatQuantizer:
        """Return the format of a level with how a tensor is brought onto it; errors as above."""
        level = check_int("level", level, 1, MOST_LEVEL)
        if level == MOST_LEVEL and level not in self._levels:
            return FormatQuantizer(format=FORMATS["float32"])
        if level not in self._levels:
            raise ValueError(
                f"the ladder has a hole at level {level}: its levels are {', '.join(map(str, self._levels))}; "
                "ladder.filled() holds each format until the next"
            )
        return self._levels[level]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the levels; so ``3 in ladder`` asks for one."""
        return iter(self._levels)

    def bits(self, level: int) -> int:
        """Return the bits of an element at a level, which BitOps count."""
        return self[level].bits

    def priced(self, level: int) -> Format:
        """Return what is priced at a level: its format, but for what BitOps count otherwise.

        Levels 24 to 31 of the paper's ladder have the numbers of float32 and count as floats of 24 to 31 bits.
        """
        found = self[level]
        if found.is_identity and MOST_AFFINE < level < found.bits and self == AFFINE:
            return Format.minifloat(8, level - 9)
        return found

    def cost(
        self, name: str = "bitops", gradients: Format | str | int | None = None
    ) -> Callable[[int], float]:
        """Return a function, level -> cost of a training step, such as ``solve_schedule(budget, ..., cost=...)`` takes.

        A step is a forward product and two backward products of the same size, see ``Cost.step``; weights and
        activations are at the level, the output's gradient at another.

        Args:
            name: of ``COSTS``.
            gradients: format of the output's gradient or its name, or a level of this ladder; None takes the highest
                level, which on the paper's ladder is float32: give it ``q_max`` for the paper's convention.

        Raises:
            ValueError: for another name or format; the function, for a level that the ladder does not have.

        >>> AFFINE.cost("ace", gradients=8)(4), FormatLadder({4: "e2m1", 8: "e4m3"}).cost("ace")(4)
        (80.0, 80.0)
        """
        check_types(self.cost, locals())
        cost = cost_named(name)
        if gradients is None:
            gradients = self.levels[-1]
        g = (
            Format.of(gradients)
            if isinstance(gradients, (Format, str))
            else self.priced(gradients)
        )

        @cache
        def step(level: int) -> float:
            q = self.priced(level)
            return cost.step(Operands(q, q, g, g))

        return step

    def check(self, levels: Iterable[int]) -> None:
        """Raise ValueError unless all levels of a schedule are here."""
        check_types(self.check, locals())
        for level in dict.fromkeys(levels):
            self[check_int("each of levels", level)]

    def filled(self) -> FormatLadder:
        """Return the ladder without holes: between two levels the format of the lower one."""
        found: dict[int, FormatQuantizer] = {}
        for level in range(self.levels[0], self.levels[-1] + 1):
            found[level] = self._levels.get(level) or found[level - 1]
        return FormatLadder(found)

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
        """Whether both have the same formats at the same levels."""
        return isinstance(other, FormatLadder) and self._levels == other._levels

    def __hash__(self) -> int:
        """Return a hash of levels and formats."""
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Names hash otherwise in another process."""
        return FormatLadder, (self._levels,)

    def __repr__(self) -> str:
        """Return what makes it."""
        if self == AFFINE:
            return "FormatLadder.affine()"
        return f"FormatLadder({ {level: str(value) for level, value in self._levels.items()} })"


def ladder_of(
    value: FormatLadder | Mapping[int, Format | FormatQuantizer | str] | None,
) -> FormatLadder:
    """Return a ladder given as one, as a mapping, or None for the paper's."""
    if value is None:
        return AFFINE
    return value if isinstance(value, FormatLadder) else FormatLadder(value)


_FINE = dict.fromkeys(range(MOST_AFFINE + 1, MOST_LEVEL + 1), FORMATS["float32"])
AFFINE = FormatLadder({q: Format.affine(q) for q in range(1, MOST_AFFINE + 1)} | _FINE)
# Those of recipes: keys of specs. Blocks of the second may be shorter at the end of a row, so that any layer has them.
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
