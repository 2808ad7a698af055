"""Number formats as values: which numbers an element may be, and the scale of a block.  Beyond the paper.

The paper's grid is ``Format.affine(q)``; the others are those of today's hardware. A ``FormatLadder`` puts any of them
on a precision schedule. Nothing here computes on tensors: ``cpt_extras.formats.format_rounding`` does.

How a tensor is brought onto one, such as its ranges and its rounding, is that of ``FormatQuantizer``.

>>> FORMATS["e2m1"].values().tolist()[8:]
[0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
>>> str(Format.mx("e2m1")), str(Format.mx("e2m1", block=16, partial=True))
('mxfp4', 'mx(e2m1,16):partial=1')
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cpt_core.validation import check_choice, check_int, check_types, short_repr

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("affine", "symmetric", "minifloat", "log2")
SPECIALS = ("none", "nan", "infinity")
FULL = 32  # bits of what is not quantised
UNSCALED = "unscaled"  # instead of a granularity: the values of an element as they are
MOST_AFFINE = (
    23  # float32 has 24 significant bits: from there on an affine grid changes nothing
)
BITS = {
    "affine": (1, MOST_AFFINE),
    "symmetric": (2, MOST_AFFINE),
    "minifloat": (3, FULL),
    "log2": (2, 8),
}


@dataclass(frozen=True)
class Format:
    """One number format; make it with ``affine``, ``symmetric``, ``minifloat``, ``log2``, ``mx``, ``nvfp4``.

    Attributes:
        kind: of an element. "affine": 2**bits steps between the ends of a range; "symmetric": whole numbers about 0;
            "minifloat": floating point with subnormals; "log2": powers of two, and 0.
        bits: of an element, sign and exponent included.
        exponent: bits of a minifloat's exponent.
        mantissa: bits of its mantissa, without the leading one.
        specials: what the highest exponent of a minifloat holds: "infinity" (with NaN, as in IEEE 754), "nan" (numbers
            but for the last code), "none" (numbers).
        block: elements along the last dimension that share a scale; 0 for one scale per range.
        scale: format of a block's scale: "e8m0" (a power of two) or "e4m3", with one float32 scale per tensor.
        partial: the last block of a row may be shorter; else a row that ``block`` does not divide is an error.
        saturate: numbers beyond the largest become the largest; else infinity, or NaN where there is none.
    """

    kind: str
    bits: int
    exponent: int = 0
    mantissa: int = 0
    specials: str = "none"
    block: int = 0
    scale: str = ""
    partial: bool = False
    saturate: bool = True

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("kind of a format", self.kind, KINDS)
        check_types(type(self), vars(self))
        check_choice("specials", self.specials, SPECIALS)
        for name in ("bits", "exponent", "mantissa", "block"):
            object.__setattr__(
                self, name, check_int(f"{name} of a format", getattr(self, name), 0)
            )
        check_int(f"bits of {self.kind} formats", self.bits, *BITS[self.kind])
        if self.kind == "minifloat":
            self._check_minifloat()
        elif self.exponent or self.mantissa or self.specials != "none":
            raise ValueError(
                f"only minifloats have exponent, mantissa and specials, got {self!r}"
            )
        if self.block or self.scale:
            if not (self.block and self.scale) or self.kind not in (
                "minifloat",
                "symmetric",
            ):
                raise ValueError(
                    "blocks of minifloats or whole numbers have a size and a scale, 'e8m0' or 'e4m3'"
                )
            check_choice("scale of a block", self.scale, ("e8m0", "e4m3"))

    def _check_minifloat(self) -> None:
        check_int("bits of a minifloat's exponent", self.exponent, 2, 8)
        check_int("bits of a minifloat's mantissa", self.mantissa, 0, 23)
        if self.bits != 1 + self.exponent + self.mantissa:
            raise ValueError(
                f"bits of a minifloat are 1 + exponent + mantissa, got {self.bits}"
            )
        if self.largest >= 2.0**128:
            raise ValueError(
                f"e{self.exponent}m{self.mantissa} with specials {self.specials!r} has numbers beyond the largest of "
                "float32, in which all is computed; give specials='infinity'"
            )

    # --- makers -------------------------------------------------------------------------------------------------------

    @classmethod
    def affine(cls, bits: int, **options: Any) -> Format:
        """Return the paper's grid: 2**bits steps between minimum and maximum; 1 to 23 bits.  Paper: figure 1."""
        return cls("affine", bits, **options)

    @classmethod
    def symmetric(cls, bits: int, **options: Any) -> Format:
        """Return whole numbers about 0, of 2 to 23 bits, the lowest left out: -127 to 127 of 8 bits."""
        return cls("symmetric", bits, **options)

    @classmethod
    def minifloat(
        cls, exponent: int, mantissa: int, specials: str | None = None, **options: Any
    ) -> Format:
        """Return a floating-point format with a sign, subnormals and the usual bias, 2**(exponent - 1) - 1.

        Args:
            exponent: its bits, 2 to 8.
            mantissa: its bits, 0 to 23.
            specials: see ``Format``; None: as OCP has them, "nan" for e4m3, "none" below 8 bits, else "infinity".
            options: of the other fields.
        """
        bits = (
            1
            + check_int("exponent", exponent, 0, FULL)
            + check_int("mantissa", mantissa, 0, FULL)
        )
        if specials is None:
            specials = (
                "none"
                if bits < 8
                else "nan"
                if (exponent, mantissa) == (4, 3)
                else "infinity"
            )
        return cls("minifloat", bits, exponent, mantissa, specials, **options)

    @classmethod
    def log2(cls, bits: int, **options: Any) -> Format:
        """Return powers of two of both signs, and 0: the largest is 1; 2 to 8 bits."""
        return cls("log2", bits, **options)

    @classmethod
    def mx(cls, element: Format | str, block: int = 32, **options: Any) -> Format:
        """Return blocks of an element format with a power of two as their scale: OCP's microscaling.

        Args:
            element: a minifloat, or "int8" for MXINT8, or a ``symmetric`` format.
            block: elements that share a scale.
            options: of the other fields.
        """
        chosen = (
            cls.symmetric(8)
            if isinstance(element, str) and element == "int8"
            else cls.of(element)
        )
        return replace(
            chosen, block=check_int("block", block, 1), scale="e8m0", **options
        )

    @classmethod
    def nvfp4(cls, block: int = 16, **options: Any) -> Format:
        """Return blocks of e2m1 with e4m3 scales and one float32 scale per tensor: NVFP4."""
        return replace(
            cls.minifloat(2, 1),
            block=check_int("block", block, 1),
            scale="e4m3",
            **options,
        )

    @classmethod
    def of(cls, value: Format | str) -> Format:
        """Return a format given by value, by a name of ``FORMATS``, or as ``str`` writes it."""
        if not isinstance(value, (Format, str)):
            raise ValueError(
                f"a format is a Format or its name, got {short_repr(value)}"
            )
        return value if isinstance(value, Format) else _parsed(value)

    # --- what it is ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return its name; ``Format.of`` reads it."""
        bare = replace(self, partial=False, saturate=True)
        if bare in _NAMES:
            name = _NAMES[bare]
        else:
            name = (
                f"e{self.exponent}m{self.mantissa}"
                if self.kind == "minifloat"
                else f"{self.kind}{self.bits}"
            )
            name = f"{_MAKERS[self.scale]}({name},{self.block})" if self.block else name
            if (
                self.kind == "minifloat"
                and self.specials
                != Format.minifloat(self.exponent, self.mantissa).specials
            ):
                name += f":specials={self.specials}"
        return name + ":partial=1" * self.partial + ":saturate=0" * (not self.saturate)

    @property
    def is_identity(self) -> bool:
        """Whether every float32 number is one of its values: float32 itself."""
        return self.kind == "minifloat" and self.exponent == 8 and self.mantissa == 23

    @property
    def plain_affine(self) -> bool:
        """Whether it is the paper's grid."""
        return self.kind == "affine" and self.saturate

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent of a minifloat."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def least_exponent(self) -> int:
        """Of the smallest normal number of a minifloat; of the smallest power of two of ``log2``."""
        return 2 - 2 ** (self.bits - 1) if self.kind == "log2" else 1 - self.bias

    @property
    def greatest_exponent(self) -> int:
        """Of the largest number."""
        return math.frexp(self.largest)[1] - 1

    @property
    def largest(self) -> float:
        """The largest finite value of an element: of ``affine`` on the range from 0 to 1."""
        if self.kind in ("affine", "log2"):
            return 1.0
        if self.kind == "symmetric":
            return 2.0 ** (self.bits - 1) - 1
        top = (
            2**self.exponent - 1 - self.bias - (self.specials == "infinity")
        )  # the highest exponent of numbers
        if self.specials != "nan":
            return (2 - 2.0**-self.mantissa) * 2.0**top
        return (
            (2 - 2.0 ** (1 - self.mantissa)) * 2.0**top
            if self.mantissa
            else 2.0 ** (top - 1)
        )

    @property
    def significand(self) -> int:
        """Bits that a multiplier of two elements takes in: the mantissa with its leading one; else the magnitude."""
        if self.kind == "minifloat":
            return self.mantissa + 1
        return {"log2": 1, "affine": self.bits, "symmetric": self.bits}[self.kind]

    @property
    def bits_per_element(self) -> float:
        """Bits in memory of an element with its share of a block's scale; scales of whole ranges are not counted."""
        return self.bits + (8 / self.block if self.block else 0)

    def values(self) -> Tensor:
        """Return all finite values of an element in order, float32, 0 once: of at most 2**16, not yet scaled.

        Those of ``affine`` are of the range from 0 to 1.
        """
        import torch  # descriptions are read without it

        if self.bits > 16:
            raise ValueError(
                f"{self} has 2**{self.bits} values; formats of at most 16 bits list them"
            )
        if self.kind == "affine":
            found = np.arange(2**self.bits) / (2**self.bits - 1)
        else:
            if self.kind == "symmetric":
                half = np.arange(1.0, self.largest + 1)
            elif self.kind == "log2":
                half = 2.0 ** np.arange(self.least_exponent, 1.0)
            else:
                stored, mantissa = np.divmod(
                    np.arange(1, 2 ** (self.bits - 1)), 2**self.mantissa
                )
                normal = stored > 0
                exponents = np.where(normal, stored - self.bias, self.least_exponent)
                half = (normal + mantissa * 2.0**-self.mantissa) * 2.0**exponents
                half = half[half <= self.largest]
            found = np.concatenate([-half[::-1], [0.0], half])
        return torch.from_numpy(found.astype(np.float32))


_MAKERS = {"e8m0": "mx", "e4m3": "nv"}
_FLAG = {"0": False, "1": True}
OPTIONS = ("specials", "partial", "saturate")


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Format:
    """Read what ``Format.__str__`` wrote, or a name of ``FORMATS``."""
    name, *rest = text.split(":")
    options: dict[str, Any] = {}
    for part in rest:
        key, _, value = part.partition("=")
        check_choice("option of a format", key, OPTIONS)
        if key != "specials" and value not in _FLAG:
            raise ValueError(f"option {key!r} of format {text!r} cannot be {value!r}")
        options[key] = _FLAG.get(value, value)
    if name in FORMATS:
        return replace(FORMATS[name], **options)
    if found := re.fullmatch(r"(mx|nv)\((\w+),(\d+)\)", name):
        scale = {v: k for k, v in _MAKERS.items()}[found[1]]
        return replace(
            _element(found[2], text), block=int(found[3]), scale=scale, **options
        )
    return replace(_element(name, text), **options)


def _element(name: str, text: str) -> Format:
    if found := re.fullmatch(r"e(\d)m(\d+)", name):
        return Format.minifloat(int(found[1]), int(found[2]))
    if found := re.fullmatch(r"(affine|symmetric|log2_)(\d+)", name):
        return Format(found[1].rstrip("_"), int(found[2]))
    check_choice("format", text, FORMATS)
    raise AssertionError  # it is none of them


# Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats Specification 1.0; NVFP4: NVIDIA's
# recipe (arXiv 2509.25149); bf16 and fp16 as torch has them.
FORMATS: Mapping[str, Format] = {
    **{f"affine{q}": Format.affine(q) for q in range(1, 9)},
    **{f"symmetric{q}": Format.symmetric(q) for q in range(2, 9)},
    **{
        f"e{e}m{m}": Format.minifloat(e, m)
        for e, m in ((4, 3), (5, 2), (3, 2), (2, 3), (2, 1))
    },
    "mxfp8_e4m3": Format.mx(Format.minifloat(4, 3)),
    "mxfp8_e5m2": Format.mx(Format.minifloat(5, 2)),
    "mxfp6_e3m2": Format.mx(Format.minifloat(3, 2)),
    "mxfp6_e2m3": Format.mx(Format.minifloat(2, 3)),
    "mxfp4": Format.mx(Format.minifloat(2, 1)),
    "mxint8": Format.mx(Format.symmetric(8)),
    "nvfp4": Format.nvfp4(),
    **{f"log2_{q}": Format.log2(q) for q in range(2, 9)},
    "bf16": Format.minifloat(8, 7),
    "fp16": Format.minifloat(5, 10),
    "float32": Format.minifloat(8, 23),
}
_NAMES = {value: name for name, value in FORMATS.items()}


def check_blocks(shape: Sequence[int], format: Format) -> None:
    """Raise ValueError unless the blocks of a format divide the last dimension, or the last block may be shorter."""
    if format.block and (
        not shape or (shape[-1] % format.block and not format.partial)
    ):
        raise ValueError(
            f"blocks of {format.block} do not divide the last dimension of a tensor of shape {tuple(shape)}; "
            f"with partial=True the last block of a row of {format} may be shorter"
        )
