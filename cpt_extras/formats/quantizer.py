"""Quantisers with a number format: what a level of a ladder says of a tensor.

A role's ``Quantizer`` says which elements share a range and how they are rounded; that of a level says to which format,
and may say the rest, too. Nothing here computes on tensors.

>>> str(FormatQuantizer.of("e2m1:rounding=stochastic"))
'e2m1:rounding=stochastic'
>>> FormatQuantizer.of("affine4").plain  # of the paper's grids a schedule tells the bits, and nothing else changes
True
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cpt_core.quantization.roles import GRANULARITIES, ROUNDINGS, ZERO_POINT, Quantizer
from cpt_core.validation import check_choice, check_int, check_types, short_repr
from cpt_extras.formats.format import OPTIONS, Format


@dataclass(frozen=True)
class FormatQuantizer(Quantizer):
    """How a tensor is quantised to a number format.

    Attributes:
        granularity: as for ``Quantizer``; None takes that of the role, but one range per tensor for NVFP4.
        rounding: "nearest" or "stochastic"; None takes that of the role.
        format: which numbers there are.
        hadamard: size of the random Hadamard rotation of both operands of a product along its sum; 0 for none.
        grid: the granularity, "+zero" for a zero point, "|", and the name of the format.
    """

    granularity: str | None = None  # type: ignore[assignment]
    rounding: str | None = None  # type: ignore[assignment]
    format: Format = field(kw_only=True)
    hadamard: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        check_types(type(self), {**vars(self), "grid": ""})
        if self.granularity is not None:
            check_choice("granularity", self.granularity, GRANULARITIES)
        if self.rounding is not None:
            check_choice("rounding", self.rounding, ROUNDINGS)
        if self.running and self.granularity != "per_tensor":
            raise ValueError(
                f"a running range needs granularity 'per_tensor', got {self.granularity!r}"
            )
        size = check_int("hadamard", self.hadamard, 0)
        if size & (size - 1):
            raise ValueError(
                f"a Hadamard rotation has a power of two as its size, got {size}"
            )
        object.__setattr__(self, "hadamard", size)
        granularity = (self.granularity or "") + (ZERO_POINT if self.zero_point else "")
        object.__setattr__(self, "grid", grid_of(granularity, self.format))

    @property
    def plain(self) -> bool:
        """Whether it is the paper's grid with nothing added: ranges and rounding as the role has them."""
        return self.format.plain_affine and not (
            self.running or self.granularity or self.rounding or self.hadamard
        )

    @classmethod
    def of(cls, value: FormatQuantizer | Format | str) -> FormatQuantizer:
        """Return the quantiser of a level: a value, a format, or its name with options, as ``str`` writes them."""
        if isinstance(value, FormatQuantizer) and not value.running:
            return value
        if isinstance(value, Format):
            return cls(format=value)
        if isinstance(value, str):
            return _parsed(value)
        raise ValueError(
            f"a level has a Format, its name, or a FormatQuantizer that is not running; got {short_repr(value)}"
        )

    def __str__(self) -> str:
        """Return the name of its format with options; ``FormatQuantizer.of`` reads it."""
        options = {
            name: getattr(self, name) for name in _OPTION_TYPES if getattr(self, name)
        }
        return str(self.format) + "".join(
            f":{name}={value}" for name, value in options.items()
        )


def grid_of(granularity: str, format: Format) -> str:
    """Return the grid of a format with a granularity: the granularity alone for the paper's."""
    return granularity if format.plain_affine else f"{granularity}|{format}"


_OPTION_TYPES: dict[str, Any] = {"granularity": str, "rounding": str, "hadamard": int}


@lru_cache(maxsize=1024)
def _parsed(text: str) -> FormatQuantizer:
    """Read what ``FormatQuantizer.__str__`` wrote, or a name of ``FORMATS``."""
    format_parts, options = [], {}
    for part in text.split(":"):
        key, equals, value = part.partition("=")
        if key not in _OPTION_TYPES:
            if equals:
                check_choice("option of a format", key, (*OPTIONS, *_OPTION_TYPES))
            format_parts.append(part)
            continue
        try:
            options[key] = _OPTION_TYPES[key](value)
        except ValueError:
            raise ValueError(
                f"option {key!r} of format {text!r} cannot be {value!r}"
            ) from None
    return FormatQuantizer(format=Format.of(":".join(format_parts)), **options)
