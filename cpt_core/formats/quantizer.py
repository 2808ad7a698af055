"""Quantisers as values: how a tensor is brought onto a number format.  Paper: figure 1.

Every role of a layer has one (``QUANTIZERS``), and so has every level of a ladder. The role's says which elements share
a range and how they are rounded; the level's says to which format, and may say the rest, too. ``role.on(level)`` is
what is in force. Nothing here computes on tensors.

>>> role = Quantizer("per_row")
>>> role.on(Quantizer.of("e2m1")).grid
'per_row|e2m1'
>>> role.on(Quantizer.of("affine4")) is role  # of the paper's grids a schedule tells the bits, and nothing else changes
True
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from cpt_core.checks import choose, declared, shown, whole
from cpt_core.formats.format import OPTIONS, Format

GRANULARITIES = ("per_tensor", "per_channel", "per_row", "per_position", "per_sample_mean")
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Quantizer:
    """How a tensor is quantised.

    Attributes:
        granularity: which elements share a range, a name of ``GRANULARITIES``; None, at a level, takes that of the
            role, but one range per tensor for NVFP4. Ranges other than "per_tensor" are those of the tensor at hand in
            evaluation, too.
        rounding: "nearest" (half to even) or "stochastic" (unbiased inside the range); None: the role's, or "nearest".
        running: keep a running range during training and use it in evaluation.
        format: which numbers there are; None for the paper's grids, whose bits a schedule tells.
        hadamard: size of the random Hadamard rotation of both operands of a product along its sum; 0 for none.
        grid: what kernels are told: the granularity, and where there is a format, "|" and its name.
        along_sum: whether it works along the dimension over which a product sums, as blocks and rotations do.
    """

    granularity: str | None = None
    rounding: str | None = None
    running: bool = False
    format: Format | None = None
    hadamard: int = 0
    grid: str = field(init=False, repr=False, compare=False)  # made once: compilers do not follow its making
    along_sum: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the values."""
        declared(type(self), vars(self))
        if self.granularity is not None:
            choose("granularity", self.granularity, GRANULARITIES)
        if self.rounding is not None:
            choose("rounding", self.rounding, ROUNDINGS)
        if self.running and self.granularity != "per_tensor":
            raise ValueError(f"a running range needs granularity 'per_tensor', got {self.granularity!r}")
        size = whole("hadamard", self.hadamard, 0)
        if size & (size - 1):
            raise ValueError(f"a Hadamard rotation has a power of two as its size, got {size}")
        if self.format is None and size:
            raise ValueError("a Hadamard rotation belongs to a format; name one, such as Format.affine(4)")
        object.__setattr__(self, "hadamard", size)
        object.__setattr__(self, "grid", grid_of(self.granularity or "", self))
        object.__setattr__(self, "along_sum", self.format is not None and bool(self.format.block or size))

    @classmethod
    def of(cls, value: Quantizer | Format | str) -> Quantizer:
        """Return the quantiser of a level: a value, a format, or its name with options, as ``str`` writes them."""
        if isinstance(value, Quantizer) and value.format is not None and not value.running:
            return value
        if isinstance(value, (Format, str)):
            return cls(format=value) if isinstance(value, Format) else _parsed(value)
        raise ValueError(f"a level has a Format, its name, or a Quantizer with one, not running; got {shown(value)}")

    @property
    def plain(self) -> bool:
        """Whether it is the paper's grid with nothing added: ranges and rounding as the role has them."""
        return self.format is None or (self.format.plain_affine and not self.running and not _options_text(self))

    def on(self, level: Quantizer | None) -> Quantizer:
        """Return what is in force at a level of a ladder; the paper's grids, and None, leave it as it is."""
        declared(Quantizer.on, {"level": level})
        if level is None or level.format is None or level.plain:
            return self
        granularity = level.granularity or ("per_tensor" if level.format.scale == "e4m3" else self.granularity)
        running = self.running and granularity == "per_tensor"  # others have as many ranges as the tensor at hand
        return replace(level, granularity=granularity, rounding=level.rounding or self.rounding, running=running)

    def __str__(self) -> str:
        """Return the name of its format with options; ``Quantizer.of`` reads it."""
        return f"{self.format or 'paper'}" + _options_text(self)


def grid_of(granularity: str, quantizer: Quantizer) -> str:
    """Return the grid of a quantiser with this granularity: the granularity alone for the paper's."""
    format = quantizer.format
    if format is None or format.plain_affine:
        return granularity
    return f"{granularity}|{format}"


def _options_text(quantizer: Quantizer) -> str:
    """Return the options of a level that are not the default, ":name=value" each."""
    values = {name: getattr(quantizer, name) for name in _READ}
    return "".join(f":{name}={value}" for name, value in values.items() if value != getattr(Quantizer, name))


_READ: dict[str, Any] = {"granularity": str, "rounding": str, "hadamard": int}


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Quantizer:
    """Read what ``Quantizer.__str__`` wrote, or a name of ``FORMATS``."""
    of_format, options = [], {}
    for part in text.split(":"):
        key, equals, value = part.partition("=")
        if key not in _READ:
            if equals:
                choose("option of a format", key, (*OPTIONS, *_READ))
            of_format.append(part)
            continue
        try:
            options[key] = _READ[key](value)
        except ValueError:
            raise ValueError(f"option {key!r} of format {text!r} cannot be {value!r}") from None
    return Quantizer(format=Format.of(":".join(of_format)), **options)
