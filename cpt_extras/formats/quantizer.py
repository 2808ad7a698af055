"""Quantisers with a number format, for the levels of a ladder.

The ``Quantizer`` of a role determines the elements that share a range, and their rounding; the ``FormatQuantizer`` of a
level determines the format, and may replace range and rounding, too. This module computes nothing on tensors.

>>> str(FormatQuantizer.of("e2m1:rounding=stochastic"))
'e2m1:rounding=stochastic'
>>> FormatQuantizer.of("affine4").plain  # the paper's grid: a level changes the bits and nothing else
True
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cpt_core.quantization.roles import GRANULARITIES, ROUNDINGS, ZERO_POINT, Quantizer
from cpt_core.validation import check_choice, check_int, check_types, short_repr
from cpt_extras.formats.format import FORMAT_OPTIONS, Format


@dataclass(frozen=True)
class FormatQuantizer(Quantizer):
    """Number format, range and rounding of a tensor.

    Attributes:
        granularity: as for ``Quantizer``; None takes the granularity of the role, but one range per tensor for NVFP4.
        rounding: "nearest" or "stochastic"; None takes the rounding of the role.
        format: the number format.
        hadamard: size of the random Hadamard rotation of both operands of a matmul along its sum; 0 for none.
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
        """True for the paper's grid with the range and rounding of the role."""
        has_own_range = self.running or self.granularity is not None
        if has_own_range or self.rounding or self.hadamard:
            return False
        return self.format.plain_affine

    @classmethod
    def of(cls, value: FormatQuantizer | Format | str) -> FormatQuantizer:
        """Return the quantiser of a ``value``: a quantiser, a format, or its name with options."""
        if isinstance(value, FormatQuantizer) and not value.running:
            if value.zero_point:
                raise ValueError(
                    "zero_point: a level takes the zero point of the role, got True; use "
                    "QuantConfig().with_zero_points()"
                )
            return value
        if isinstance(value, Format):
            return cls(format=value)
        if isinstance(value, str):
            return _parse_format_quantizer(value)
        raise ValueError(
            f"a level has a Format, its name, or a FormatQuantizer that is not running; got {short_repr(value)}"
        )

    def __str__(self) -> str:
        """Return the name of the format with options; ``FormatQuantizer.of`` reads it."""
        text = str(self.format)
        for name in _OPTION_TYPES:
            value = getattr(self, name)
            if value:
                text += f":{name}={value}"
        return text


def grid_of(granularity: str, format: Format) -> str:
    """Return the name of the grid of a format with a granularity: the granularity alone for the paper's format."""
    return granularity if format.plain_affine else f"{granularity}|{format}"


_OPTION_TYPES: dict[str, Any] = {"granularity": str, "rounding": str, "hadamard": int}


@lru_cache(maxsize=1024)
def _parse_format_quantizer(text: str) -> FormatQuantizer:
    """Return the quantiser of a string that ``FormatQuantizer.__str__`` wrote, or of a name of ``FORMATS``."""
    format_parts, options = [], {}
    for part in text.split(":"):
        key, equals, value = part.partition("=")
        if key not in _OPTION_TYPES:
            if equals:
                check_choice(
                    "option of a format", key, (*FORMAT_OPTIONS, *_OPTION_TYPES)
                )
            format_parts.append(part)
            continue
        try:
            options[key] = _OPTION_TYPES[key](value)
        except ValueError:
            raise ValueError(
                f"option {key!r} of format {text!r} cannot be {value!r}"
            ) from None
    return FormatQuantizer(format=Format.of(":".join(format_parts)), **options)
