"""What is in force in a quantised layer: what the levels of its roles mean, made once for all layers alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from cpt_core.formats.ladder import ladder_of
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels.reference import CODE_BITS
from cpt_core.quantization.fake_quantize import levels_of
from cpt_core.schedules.schedule import Levels

NOTHING = Levels(None, None, None, None)
Roles = tuple[tuple[str, Quantizer], ...]  # of a layer, each with its quantiser


class InForce:
    """What follows from the levels of a layer; never changed. Make it with ``meaning``.

    No dataclass: compiled code would be specialised to all of its fields, and it is to serve every level.
    """

    def __init__(self, levels: Levels | None, ladders: Levels, roles: Roles, codes: bool) -> None:
        """Work it out; ``codes``: the layer is to multiply codes. Without levels nothing is in force yet."""
        self.made_of = levels, ladders, roles, codes
        self.levels, self.is_set = levels, levels is not None
        # of every role a quantiser with a format, and that format; None for float32
        self.asked = asked = asked_of(levels, ladders)
        self.formats = formats = Levels(*(q and q.format for q in asked))
        self.activation, self.weight, *gradients = (f is not None for f in formats)
        # an output's gradient, for any of its products; whether for each of them by itself
        self.gradient, self.apart = any(gradients), asked.error != asked.weight_gradient
        self.active = self.activation or self.weight or self.gradient
        self.steps = [  # n = 2**q - 1 of the affine grid of every role; None where nothing reads them
            levels_of(level if format is None else format.bits)
            if level is not None and (format is None or format.kind == "affine")
            else None
            for level, format in zip(levels or NOTHING, formats, strict=True)
        ]
        fits = [codes and q is not None and q.plain and q.format.bits <= CODE_BITS for q in asked]
        # whether codes are asked for and hold the operands, and gradients
        self.on_codes, self.gradient_on_codes = fits[0] and fits[1] and not self.apart, fits[2]
        self.quantizers: dict[str, Quantizer] = {}  # of the layer's roles, with what their levels ask for
        for role, quantizer in roles:
            level = getattr(asked, ladder_role(role))
            if role == "bias" and level and level.format.block:  # a bias is no operand of a product
                level = replace(level, format=replace(level.format, partial=True))
            self.quantizers[role] = _one(quantizer.on(level))
            if self.apart and ladder_role(role) == "error":
                self.quantizers[weight_role(role)] = _one(quantizer.on(asked.weight_gradient))

    def __deepcopy__(self, memo: Any) -> InForce:
        """Copies share it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Stored layers find that of their process."""
        return meaning, self.made_of

    def constants(self) -> tuple[Any, ...]:
        """Return what code that was captured for other levels holds as constants: it serves where this is the same."""
        plain = all(q is None or q.plain for q in self.asked)
        quantizes = tuple(q is not None for q in self.asked)
        return quantizes, self.apart, self.on_codes, self.gradient_on_codes, plain or self.asked


@lru_cache(maxsize=4096)
def meaning(levels: Levels | None, ladders: Levels, roles: Roles, codes: bool) -> InForce:
    """Return what levels mean in a layer with these ladders and quantisers; ValueError for a hole in a ladder."""
    return InForce(levels, ladders, roles, codes)


@cache
def _one(quantizer: Quantizer) -> Quantizer:
    """Return the first quantiser of all that are equal: code that was compiled for it serves it alone."""
    return quantizer


def asked_of(levels: Levels | None, ladders: Levels) -> Levels:
    """Return what every role's level asks for, None for float32; ValueError for a hole in a ladder."""
    asked = (level and ladder.quantizer(level) for level, ladder in zip(levels or NOTHING, ladders, strict=True))
    return Levels(*(None if q is None or q.format.is_identity else q for q in asked))


def check_formats(asked: Levels, lengths: Levels, splits: bool, where: str) -> None:
    """Raise ValueError for formats that a layer cannot take.

    Args:
        asked: by the level of every role, None for float32.
        lengths: of the dimensions over which products sum, for every role: blocks must divide them.
        splits: whether the layer can quantise a gradient for each product by itself, and rotate operands.
        where: the layer, for messages.
    """
    if asked.error != asked.weight_gradient and not splits:
        raise ValueError(
            f"{where} quantises its output's gradient once for both backward products; it cannot have one format "
            f"for the error ({asked.error or 'float32'}) and another for the weight gradient "
            f"({asked.weight_gradient or 'float32'})"
        )
    sizes = [q.hadamard if q else 0 for q in asked]
    if sizes[0] != sizes[1] or any(sizes[2:]) or (any(sizes) and not splits):
        raise ValueError(
            f"{where}: a Hadamard rotation belongs to both operands of the forward product of a linear layer, "
            "convolution or attention, with one size; got "
            + ", ".join(f"{size} for {role}" for role, size in zip(Levels._fields, sizes, strict=True))
        )
    for role, level, own in zip(Levels._fields, asked, lengths, strict=True):
        if level is None:
            continue
        block = max(level.hadamard, 0 if level.format.partial else level.format.block)
        if uneven := [n for n in own if block and n % block]:
            raise ValueError(
                f"{where}: blocks of {block} ({level} for {role}) do not divide its {uneven[0]} features; "
                "with partial=True the last block may be shorter, or leave the layer in float32"
            )
        if level.rounding == "stochastic" and role in ("activation", "weight"):
            raise ValueError(f"{where}: operands are rounded to nearest, gradients may be stochastically; got {level}")


def ladder_role(role: str) -> str:
    """Return the role of ``Levels`` whose ladder tells the level of a layer's role, such as "linear_weight"."""
    if role.endswith("weight_grad"):
        return "weight_gradient"
    return {"weight": "weight", "bias": "weight", "grad": "error"}.get(role.rpartition("_")[2], "activation")


def weight_role(role: str) -> str:
    """Return the role of a gradient where it is quantised for the weight gradient alone."""
    return role.removesuffix("grad") + "weight_grad"


def ladders_of(given: Any) -> Levels:
    """Return the ladder of every role, from what a ``QuantConfig`` takes."""
    if isinstance(given, Levels):
        return Levels(*map(ladder_of, given))
    if not isinstance(given, Mapping) or not any(isinstance(key, str) for key in given):
        return Levels(*[ladder_of(given)] * 4)
    ladders = dict(given)
    if "gradient" in ladders:
        if {"error", "weight_gradient"} & set(ladders):
            raise ValueError("give a ladder for gradient, or for error and weight_gradient, not both")
        ladders |= dict.fromkeys(("error", "weight_gradient"), ladders.pop("gradient"))
    if odd := [role for role in ladders if role not in Levels._fields]:
        raise ValueError(f"unknown role {odd[0]!r} of a ladder; choose from {', '.join(Levels._fields)}, gradient")
    if missing := [role for role in Levels._fields if role not in ladders]:
        raise ValueError(f"roles missing: {', '.join(missing)}; give each a ladder, None for the paper's")
    return Levels(**{role: ladder_of(ladder) for role, ladder in ladders.items()})
