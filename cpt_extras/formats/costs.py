"""Costs of a product beside BitOps: each a value with its unit and its source.  Beyond the paper.

A product of a layer is so many multiply-accumulates (MACs) of two operands, which it reads, and a result, which it
writes. A cost prices a MAC by the formats of the operands, or an element by the format in which it is moved. None
counts what a format takes beside its elements: scales of ranges and blocks (but for their bytes, in "traffic"), sums of
zero points, Hadamard rotations, rounding.

>>> from cpt_extras.formats.format import FORMATS
>>> four, eight = FORMATS["e2m1"], FORMATS["e4m3"]
>>> COSTS["bitops"].per_mac(four, eight), COSTS["ace"].per_mac(four, eight), COSTS["multiplier"].per_mac(four, eight)
(0.03125, 32.0, 44.0)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cpt_core.validation import check_choice
from cpt_extras.formats.format import FORMATS, FULL, Format

FLOAT32 = FORMATS["float32"]


class Operands(NamedTuple):
    """The formats of a layer's operands in a training step; the two of the output's gradient are one by default."""

    activation: Format
    weight: Format
    error: Format  # of the error product, dx = dy w
    weight_gradient: Format  # of the weight-gradient product, dw = x dy


# a pass of a layer -> the roles of the operands of its product
PASSES: Mapping[str, tuple[str, str]] = {
    "forward": ("activation", "weight"),
    "error": ("error", "weight"),
    "weight": ("weight_gradient", "activation"),
}


@dataclass(frozen=True)
class Cost:
    """What a product costs.

    Attributes:
        name: in ``COSTS``.
        unit: of a price.
        source: the publication with its table or section, or "ours".
        about: the model in words, and how it goes with BitOps.
        per_mac: the price of a MAC by the formats of its operands, which may change places.
        per_element: the price of an element that is read or written, by its format.
    """

    name: str
    unit: str
    source: str
    about: str
    per_mac: Callable[[Format, Format], float] = lambda a, b: 0.0
    per_element: Callable[[Format], float] = lambda f: 0.0

    def product(
        self,
        a: Format,
        b: Format,
        macs: float = 1,
        elements: tuple[float, float, float] = (1, 1, 1),
    ) -> float:
        """Return the price of a product: its MACs, and each element moved once; results are written in float32.

        Args:
            a: format of the first operand.
            b: format of the second.
            macs: multiply-accumulates.
            elements: of the first operand, of the second, of the result.
        """
        first, second, result = elements
        moved = (
            first * self.per_element(a)
            + second * self.per_element(b)
            + result * self.per_element(FLOAT32)
        )
        return macs * self.per_mac(a, b) + moved

    def step(self, operands: Operands) -> float:
        """Return the price of a training step per forward MAC: one forward and two backward products of that size.

        Of a cost by elements: per element, of products whose operands and results have as many elements each.
        """
        return sum(
            self.product(getattr(operands, a), getattr(operands, b))
            for a, b in PASSES.values()
        )


def _bits(a: Format, b: Format) -> float:
    return float(a.bits * b.bits)


def _exponent(f: Format) -> int:
    """Bits of an exponent: all but the sign, of a power of two; none, of whole numbers."""
    return f.bits - 1 if f.kind == "log2" else f.exponent


ACCUMULATOR = 32  # bits: an integer, or a float32, of which 24 are added and 8 compared


# picojoules at 45 nm and 0.9 V: kind -> significands of the two multiplications of the table, with their energies
MULTIPLICATION = {
    "integer": ((8, 0.2), (32, 3.1)),
    "float": ((11, 1.1), (24, 3.7)),
}  # int8, int32; fp16, fp32
ADDITION = {"integer": 0.1, "float": 0.9}  # int32, fp32


def _picojoules(a: Format, b: Format) -> float:
    kind = "float" if _exponent(a) or _exponent(b) else "integer"
    (narrow, less), (wide, more) = MULTIPLICATION[kind]
    power = math.log(more / less) / math.log(wide**2 / narrow**2)
    return less * (a.significand * b.significand / narrow**2) ** power + ADDITION[kind]


COSTS: Mapping[str, Cost] = {
    cost.name: cost
    for cost in (
        Cost(
            "bitops",
            "32 x 32-bit MACs",
            "Wolfe and Kyrillidis, arXiv 2403.02243, section 4.1",
            "The product of the bits of both operands, of 32^2. Floats count with sign and exponent.",
            per_mac=lambda a, b: _bits(a, b) / FULL**2,
        ),
        Cost(
            "ace",
            "bit x bit MACs",
            "Zhang, Zhang and Lew, PokeBNN, arXiv 2112.00133: arithmetic computation effort",
            "The sum over MACs of the product of the bits of both operands, floats with all their bits; additions and "
            "elementwise work cost nothing. Made for inference; here it is summed over the products of training. 1024 "
            "times BitOps, so that both rank alike.",
            per_mac=_bits,
        ),
        Cost(
            "multiplier",
            "full adders",
            "ours: an array multiplier and ripple-carry adders",
            "A MAC of significands of p_a and p_b bits and exponents of e_a and e_b: p_a p_b + max(e_a, e_b) + 32, the "
            "last for the accumulation in 32 bits. A float's significand is its mantissa with the leading one, a whole "
            "number's all its bits, a power of two's one bit; shifters, normalisation and signs are not counted. Of "
            "whole numbers 1024 times BitOps, and 32 for every MAC.",
            per_mac=lambda a, b: float(
                a.significand * b.significand
                + max(_exponent(a), _exponent(b))
                + ACCUMULATOR
            ),
        ),
        Cost(
            "traffic",
            "bytes",
            "ours: every element of operands and results moved once",
            "Operands in their formats, with their share of a block's scale; results in float32, as layers hand them "
            "on. Nothing is moved twice: no cache is too small. Scales of whole tensors are not counted.",
            per_element=lambda f: f.bits_per_element / 8,
        ),
        Cost(
            "energy",
            "pJ",
            "Horowitz, Computing's energy problem, ISSCC 2014, figure 1.1.9: 45 nm, 0.9 V",
            "A multiplication and an addition into 32 bits, without memory. The table has multiplications int8 0.2, "
            "int32 3.1, fp16 1.1, fp32 3.7 and additions int32 0.1, fp32 0.9. Other widths are ours: the power of "
            "p_a p_b, the product of the significands, through both points of the kind; a product with a float or a "
            "power of two is one of floats.",
            per_mac=_picojoules,
        ),
    )
}


def cost_named(name: str) -> Cost:
    """Return a cost of ``COSTS``; ValueError names them."""
    if isinstance(name, str) and name == "seconds":
        raise ValueError(
            f"unknown cost 'seconds'; choose from {', '.join(COSTS)}; for seconds give a "
            "function from bits to the seconds of a step on your machine"
        )
    return COSTS[check_choice("cost", name, COSTS)]
