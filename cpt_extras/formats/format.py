"""Number formats: the values of an element, and the scale of a block.  Beyond the paper.

The paper's grid is ``Format.affine(q)``; the other formats exist in today's hardware. A ``FormatLadder`` puts any of
them on a precision schedule. A ``Format`` describes numbers only: ``FormatQuantizer`` adds the ranges and the rounding
of a tensor, and ``cpt_extras.formats.format_rounding`` rounds tensors.

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
from numpy.typing import NDArray

from cpt_core.validation import check_choice, check_int, check_types, short_repr
from cpt_extras.former_names import FormerName

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_KINDS = ("affine", "symmetric", "minifloat", "log2")
SPECIALS = ("none", "nan", "infinity")
FLOAT32_BITS = 32
UNSCALED = "unscaled"  # granularity of elements without a scale
MAX_AFFINE_BITS = (
    23  # float32 has 24 significant bits: finer affine grids change nothing
)
MAX_BLOCK_ROWS = 1024
MAX_LISTED_BITS = 16  # formats of more bits do not list their values
BITS_RANGE = {  # smallest and largest number of bits, by kind
    "affine": (1, MAX_AFFINE_BITS),
    "symmetric": (2, MAX_AFFINE_BITS),
    "minifloat": (3, FLOAT32_BITS),
    "log2": (2, 8),
}


@dataclass(frozen=True)
class Format:
    """A number format; make it with ``affine``, ``symmetric``, ``minifloat``, ``log2``, ``mx``, ``nvfp4``.

    Attributes:
        kind: of an element. "affine": 2**bits steps between the ends of a range; "symmetric": whole numbers about 0;
            "minifloat": floating point with subnormals; "log2": powers of two, and 0.
        bits: of an element, sign and exponent included.
        exponent: bits of a minifloat's exponent.
        mantissa: bits of its mantissa, without the leading one.
        specials: special values at the highest exponent of a minifloat: "infinity" (with NaN, as in IEEE 754), "nan"
            (the last code only, all others are numbers), "none" (all codes are numbers).
        block: elements along the last dimension that share a scale; 0 for one scale per range.
        scale: format of a block's scale: "e8m0" (a power of two) or "e4m3", with one float32 scale per tensor.
        partial: the last block of a row may be shorter; else a row that ``block`` does not divide is an error.
        rows: rows, along the second-last dimension, that a block covers: 16 in NVIDIA's 16 x 16 blocks of weights. The
            last rows of a tensor may be fewer.
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
    rows: int = 1

    least_exponent = FormerName("least_exponent", "min_exponent")
    greatest_exponent = FormerName("greatest_exponent", "max_exponent")

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("kind of a format", self.kind, FORMAT_KINDS)
        check_types(type(self), vars(self))
        check_choice("specials", self.specials, SPECIALS)
        check_int("rows of a block", self.rows, 1, MAX_BLOCK_ROWS)
        for name in ("bits", "exponent", "mantissa", "block", "rows"):
            value = check_int(f"{name} of a format", getattr(self, name), 0)
            object.__setattr__(self, name, value)
        check_int(f"bits of {self.kind} formats", self.bits, *BITS_RANGE[self.kind])
        if self.kind == "minifloat":
            self._check_minifloat()
        elif self.exponent or self.mantissa or self.specials != "none":
            raise ValueError(
                f"only minifloats have exponent, mantissa and specials, got {self!r}"
            )
        if self.rows > 1 and not self.block:
            raise ValueError(
                f"rows={self.rows} needs a format with blocks, got {self!r}"
            )
        if self.block or self.scale:
            has_both = self.block and self.scale
            if not has_both or self.kind not in ("minifloat", "symmetric"):
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

    # --- constructors -------------------------------------------------------------------------------------------------

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
            exponent: number of bits of the exponent, 2 to 8.
            mantissa: number of bits of the mantissa, 0 to 23.
            specials: see ``Format``; None takes OCP's: "nan" for e4m3, "none" below 8 bits, else "infinity".
            options: values of further fields.
        """
        exponent_bits = check_int("exponent", exponent, 0, FLOAT32_BITS)
        mantissa_bits = check_int("mantissa", mantissa, 0, FLOAT32_BITS)
        bits = 1 + exponent_bits + mantissa_bits
        if specials is None:
            specials = _default_specials(exponent, mantissa)
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
            options: values of further fields.
        """
        if isinstance(element, str) and element == "int8":
            element_format = cls.symmetric(8)
        else:
            element_format = cls.of(element)
        block = check_int("block", block, 1)
        return replace(element_format, block=block, scale="e8m0", **options)

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
        """Return the format of a ``value``: a format, a name of ``FORMATS``, or a string that ``str`` wrote."""
        if not isinstance(value, (Format, str)):
            raise ValueError(
                f"a format is a Format or its name, got {short_repr(value)}"
            )
        return value if isinstance(value, Format) else _parse(value)

    # --- properties ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return the name of the format; ``Format.of`` reads it."""
        base = replace(self, partial=False, saturate=True, rows=1)
        name = _NAMES.get(base) or base._composed_name()
        if self.partial:
            name += ":partial=1"
        if not self.saturate:
            name += ":saturate=0"
        if self.rows > 1:
            name += f":rows={self.rows}"
        return name

    def _composed_name(self) -> str:
        """Return the name of a format that has none in ``FORMATS``."""
        if self.kind == "minifloat":
            name = f"e{self.exponent}m{self.mantissa}"
        else:
            name = f"{self.kind}{self.bits}"
        if self.block:
            name = f"{_BLOCK_PREFIXES[self.scale]}({name},{self.block})"
        if self.kind == "minifloat":
            if self.specials != _default_specials(self.exponent, self.mantissa):
                name += f":specials={self.specials}"
        return name

    @property
    def is_identity(self) -> bool:
        """True if rounding changes no float32 number: float32 itself."""
        return self.kind == "minifloat" and self.exponent == 8 and self.mantissa == 23

    @property
    def plain_affine(self) -> bool:
        """True for the paper's grid."""
        return self.kind == "affine" and self.saturate

    @property
    def bias(self) -> int:
        """The bias of a minifloat, which is subtracted from the stored exponent."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number of a minifloat, or of the smallest power of two of ``log2``."""
        return 2 - 2 ** (self.bits - 1) if self.kind == "log2" else 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number."""
        return math.frexp(self.largest)[1] - 1

    @property
    def largest(self) -> float:
        """The largest finite value of an element; of an ``affine`` format on the range from 0 to 1."""
        if self.kind in ("affine", "log2"):
            return 1.0
        if self.kind == "symmetric":
            return 2.0 ** (self.bits - 1) - 1
        top_exponent = 2**self.exponent - 1 - self.bias
        if self.specials == "infinity":
            top_exponent -= 1
        if self.specials != "nan":
            return (2 - 2.0**-self.mantissa) * 2.0**top_exponent
        if self.mantissa == 0:
            return 2.0 ** (top_exponent - 1)
        return (2 - 2.0 ** (1 - self.mantissa)) * 2.0**top_exponent

    @property
    def significand(self) -> int:
        """Bits of an operand of a multiplier: of the mantissa with its leading one, or of the magnitude."""
        if self.kind == "minifloat":
            return self.mantissa + 1
        return 1 if self.kind == "log2" else self.bits

    @property
    def bits_per_element(self) -> float:
        """Bits in memory of an element with its share of a block's scale; scales of whole ranges are not counted."""
        return self.bits + (8 / (self.block * self.rows) if self.block else 0)

    def values(self) -> Tensor:
        """Return all finite values of an element in order, float32, without a scale; 0 once.

        The values of an ``affine`` format are on the range from 0 to 1.

        Raises:
            ValueError: for a format of more than 16 bits.
        """
        import torch  # here, as formats are read without torch

        if self.bits > MAX_LISTED_BITS:
            raise ValueError(
                f"{self} has 2**{self.bits} values; formats of at most 16 bits list them"
            )
        if self.kind == "affine":
            values = np.arange(2**self.bits) / (2**self.bits - 1)
        else:
            positive = self._positive_values()
            values = np.concatenate([-positive[::-1], [0.0], positive])
        return torch.from_numpy(values.astype(np.float32))

    def _positive_values(self) -> NDArray[np.float64]:
        """Return the positive finite values of an element that is not affine, rising."""
        if self.kind == "symmetric":
            return np.arange(1.0, self.largest + 1)
        if self.kind == "log2":
            return 2.0 ** np.arange(self.min_exponent, 1.0)

        codes = np.arange(1, 2 ** (self.bits - 1))
        stored_exponent, mantissa = np.divmod(codes, 2**self.mantissa)
        normal = stored_exponent > 0
        exponents = np.where(normal, stored_exponent - self.bias, self.min_exponent)
        values = (normal + mantissa * 2.0**-self.mantissa) * 2.0**exponents
        return values[values <= self.largest]


def _default_specials(exponent: int, mantissa: int) -> str:
    """Return the special values of OCP's minifloats."""
    if 1 + exponent + mantissa < 8:
        return "none"
    return "nan" if (exponent, mantissa) == (4, 3) else "infinity"


_BLOCK_PREFIXES = {"e8m0": "mx", "e4m3": "nv"}  # of names, by the format of the scale
_FLAG_VALUES = {"0": False, "1": True}
FORMAT_OPTIONS = (
    "specials",
    "partial",
    "saturate",
    "rows",
)  # after the name of a format


@lru_cache(maxsize=1024)
def _parse(text: str) -> Format:
    """Return the format of a string that ``Format.__str__`` wrote, or of a name of ``FORMATS``."""
    name, *parts = text.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        key, _, value = part.partition("=")
        check_choice("option of a format", key, FORMAT_OPTIONS)
        if key == "rows" and value.isdecimal():
            options[key] = int(value)
            continue
        if key != "specials" and value not in _FLAG_VALUES:
            raise ValueError(f"option {key!r} of format {text!r} cannot be {value!r}")
        options[key] = _FLAG_VALUES.get(value, value)

    if name in FORMATS:
        return replace(FORMATS[name], **options)
    match = re.fullmatch(r"(mx|nv)\((\w+),(\d+)\)", name)
    if match is None:
        return replace(_parse_element(name, text), **options)
    prefix, element, block = match.groups()
    scales = {prefix: scale for scale, prefix in _BLOCK_PREFIXES.items()}
    return replace(
        _parse_element(element, text),
        block=int(block),
        scale=scales[prefix],
        **options,
    )


def _parse_element(name: str, text: str) -> Format:
    """Return the format of an element by its name; ValueError, with the whole ``text``, for other names."""
    minifloat = re.fullmatch(r"e(\d)m(\d+)", name)
    if minifloat:
        return Format.minifloat(int(minifloat[1]), int(minifloat[2]))
    integer = re.fullmatch(r"(affine|symmetric|log2_)(\d+)", name)
    if integer:
        return Format(integer[1].rstrip("_"), int(integer[2]))
    check_choice("format", text, FORMATS)
    raise AssertionError("check_choice raises for a name that is no format")


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
    if not format.block:
        return
    if not shape or (shape[-1] % format.block and not format.partial):
        raise ValueError(
            f"blocks of {format.block} do not divide the last dimension of a tensor of shape {tuple(shape)}; "
            f"with partial=True the last block of a row of {format} may be shorter"
        )
