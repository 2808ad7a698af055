"""Costs of a matmul other than BitOps, with their units and sources.  Beyond the paper.

``COSTS`` lists them. A matmul of a layer consists of multiply-accumulates (MACs), of two operands, which it reads, and
of a result, which it writes. A cost prices a MAC by the formats of the operands, or an element by the format in which
it is moved. No cost counts the overhead of a format: scales of ranges and blocks (except their bytes, in "traffic"),
sums of zero points, Hadamard rotations, rounding.

>>> from cpt_extras.formats.format import FORMATS
>>> four, eight = FORMATS["e2m1"], FORMATS["e4m3"]
>>> COSTS["bitops"].per_mac(four, eight), COSTS["ace"].per_mac(four, eight), COSTS["multiplier"].per_mac(four, eight)
(0.03125, 32.0, 44.0)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cpt_core.schedules.schedule import PASS_OPERANDS
from cpt_core.validation import check_choice
from cpt_extras.formats.format import FLOAT32_BITS, FORMATS, Format

FLOAT32_FORMAT = FORMATS["float32"]


class Operands(NamedTuple):
    """Formats of a layer's operands in a training step.

    Attributes:
        activation: format of the input.
        weight: format of the weight.
        error: format of the output gradient in the matmul of the input gradient, dx = dy w.
        weight_gradient: format of the output gradient in the matmul of the weight gradient, dw = x dy.
    """

    activation: Format
    weight: Format
    error: Format
    weight_gradient: Format


# as ``PASS_OPERANDS``, but both operands of a backward matmul have the format of the gradient (``matmul_rounding``)
OPERANDS_PER_MATMUL: Mapping[str, tuple[str, str]] = {
    "forward": ("activation", "weight"),
    "error": ("error", "error"),
    "weight": ("weight_gradient", "weight_gradient"),
}


def _free(*formats: Format) -> float:
    """Return 0: a price of nothing."""
    return 0.0


@dataclass(frozen=True)
class Cost:
    """Cost model of a matmul.

    Attributes:
        name: key in ``COSTS``.
        unit: of a price.
        source: the publication with its table or section, or "ours".
        about: the model in words, and its relation to BitOps.
        per_mac: price of a MAC by the formats of its operands, in any order.
        per_element: price of an element that is read or written, by its format.
    """

    name: str
    unit: str
    source: str
    about: str
    per_mac: Callable[[Format, Format], float] = _free
    per_element: Callable[[Format], float] = _free

    def product(
        self,
        a: Format,
        b: Format,
        macs: float = 1,
        elements: tuple[float, float, float] = (1, 1, 1),
    ) -> float:
        """Return the price of a matmul: its MACs, and each element moved once; results are written in float32.

        Args:
            a: format of the first operand.
            b: format of the second operand.
            macs: number of multiply-accumulates.
            elements: numbers of elements of the first operand, the second operand and the result.
        """
        first, second, result = elements
        transfers = (
            first * self.per_element(a)
            + second * self.per_element(b)
            + result * self.per_element(FLOAT32_FORMAT)
        )
        return macs * self.per_mac(a, b) + transfers

    def step(self, operands: Operands, per_matmul: bool = False) -> float:
        """Return the price of a training step per forward MAC: one forward and two backward matmuls of equal size.

        For a cost by elements, the price is per element, of matmuls whose operands and results have equal sizes.

        Args:
            operands: formats of all roles.
            per_matmul: whether operands are rounded for every matmul, as ``OPERANDS_PER_MATMUL`` says.
        """
        by_pass = OPERANDS_PER_MATMUL if per_matmul else PASS_OPERANDS
        return sum(
            self.product(getattr(operands, a), getattr(operands, b))
            for a, b in by_pass.values()
        )


def _bits(a: Format, b: Format) -> float:
    return float(a.bits * b.bits)


def _wider_bits(a: Format, b: Format) -> int:
    return max(a.bits, b.bits)


# bits of the wider operand, at most -> time of a MAC, relative to one of 8 bits
TENSOR_CORE_TIMES = {4: 0.5, 8: 1.0, 16: 2.0, FLOAT32_BITS: 4.0}


def _tensor_core_time(a: Format, b: Format) -> float:
    bits = _wider_bits(a, b)
    return next(time for most, time in TENSOR_CORE_TIMES.items() if bits <= most)


def _exponent(f: Format) -> int:
    """Return the bits of the exponent of a format; a power of two has no other bits but the sign."""
    return f.bits - 1 if f.kind == "log2" else f.exponent


ACCUMULATOR_BITS = 32  # an integer, or a float32, of which 24 are added and 8 compared


class EnergyPoint(NamedTuple):
    """Energy of one multiplication of a published table.

    Attributes:
        significand: bits of the significand of both operands.
        picojoules: energy of the multiplication.
    """

    significand: int
    picojoules: float


# at 45 nm and 0.9 V: int8 and int32; fp16 and fp32
MULTIPLICATION_ENERGY = {
    "integer": (EnergyPoint(8, 0.2), EnergyPoint(32, 3.1)),
    "float": (EnergyPoint(11, 1.1), EnergyPoint(24, 3.7)),
}
ADDITION_PICOJOULES = {"integer": 0.1, "float": 0.9}  # int32; fp32


def _picojoules(a: Format, b: Format) -> float:
    kind = "float" if _exponent(a) or _exponent(b) else "integer"
    narrow, wide = MULTIPLICATION_ENERGY[kind]
    energy_ratio = wide.picojoules / narrow.picojoules
    power = math.log(energy_ratio) / math.log(
        wide.significand**2 / narrow.significand**2
    )
    relative_size = a.significand * b.significand / narrow.significand**2
    multiplication = narrow.picojoules * relative_size**power
    return multiplication + ADDITION_PICOJOULES[kind]


def _adders(a: Format, b: Format) -> float:
    exponent_adders = max(_exponent(a), _exponent(b))
    return float(a.significand * b.significand + exponent_adders + ACCUMULATOR_BITS)


COSTS: Mapping[str, Cost] = {
    cost.name: cost
    for cost in (
        Cost(
            "bitops",
            "32 x 32-bit MACs",
            "Wolfe and Kyrillidis, arXiv 2403.02243, section 4.1",
            "The product of the bits of both operands, of 32^2. Floats count with sign and exponent.",
            per_mac=lambda a, b: _bits(a, b) / FLOAT32_BITS**2,
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
            "wider_operand",
            "32 x 32-bit MACs",
            "ours: a unit as wide as its wider operand",
            "The square of the bits of the wider operand, of 32^2: BitOps of a unit that has one width for both "
            "operands. Where both have the same bits it is BitOps.",
            per_mac=lambda a, b: _wider_bits(a, b) ** 2 / FLOAT32_BITS**2,
        ),
        Cost(
            "tensor_core",
            "8-bit MACs",
            "NVIDIA, data sheet of HGX B200: dense peaks of FP4 9, of FP8, FP6 and INT8 4.5, of BF16 2.25, of TF32 1.1 "
            "PFLOPS",
            "The time of a MAC at the rate of the wider operand: up to 4 bits a half, up to 8 bits one, up to 16 bits "
            "two, else four. Widths between these run at the next wider rate; memory is not counted.",
            per_mac=_tensor_core_time,
        ),
        Cost(
            "multiplier",
            "full adders",
            "ours: an array multiplier and ripple-carry adders",
            "A MAC of significands of p_a and p_b bits and exponents of e_a and e_b: p_a p_b + max(e_a, e_b) + 32, the "
            "last for the accumulation in 32 bits. A float's significand is its mantissa with the leading one, a whole "
            "number's all its bits, a power of two's one bit; shifters, normalisation and signs are not counted. Of "
            "whole numbers 1024 times BitOps, and 32 for every MAC.",
            per_mac=_adders,
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
    """Return a cost of ``COSTS`` by name; ValueError, which lists the names, for another one."""
    if isinstance(name, str) and name == "seconds":
        raise ValueError(
            f"unknown cost 'seconds'; choose from {', '.join(COSTS)}; for seconds give a "
            "function from bits to the seconds of a step on your machine"
        )
    return COSTS[check_choice("cost", name, COSTS)]
