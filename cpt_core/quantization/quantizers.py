"""Quantisers: one range per tensor, channel, row or position, and the quantiser of every role.  Paper: figure 1.

A tensor is rounded to a uniform grid of ``2**q`` levels between the minimum and the maximum of its range;
``fake_quantize`` does the rounding. Add a quantiser here: a role, and in ``kernels/reference.py`` a granularity if it
needs a new one.

>>> import torch
>>> QUANTIZERS["conv_weight"].range_of(torch.tensor([[0.0, 1.0], [2.0, 5.0]]))[1].tolist()
[[1.0], [3.0]]
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from cpt_core.checks import choose, declared, shown
from cpt_core.formats.format import Format
from cpt_core.kernels.grids import grid_of, parts_of
from cpt_core.kernels.operators import range_of, round_in_range
from cpt_core.kernels.reference import GRANULARITIES, Range, clips

IDENTITY_BITS = 24  # float32 has 24 significant bits: from here on quantisation changes nothing worth simulating


@dataclass(frozen=True)
class Quantizer:
    """How the tensor of one role is quantised.

    Args:
        granularity: a key of ``GRANULARITIES``; with a format of its own the grid of both, see ``on``.
        rounding: "nearest" (half to even) or "stochastic" (unbiased inside the range).
        running: keep a running range during training and use it in evaluation.

    Attributes:
        ranges: the granularity without the format.
        format: the format, None for the paper's grids.
        hadamard: size of the rotation of the operands, 0 for none.
        along_sum: whether it works along the dimension over which a product sums, as blocks and rotations do.
    """

    granularity: str
    rounding: str = "nearest"
    running: bool = False
    ranges: str = field(init=False, repr=False, compare=False)
    format: Format | None = field(init=False, repr=False, compare=False)
    hadamard: int = field(init=False, repr=False, compare=False)
    along_sum: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the names."""
        declared(type(self), vars(self))
        ranges, format = parts_of(self.granularity)
        object.__setattr__(self, "ranges", ranges)
        object.__setattr__(self, "format", format)  # read here: compilers do not follow the reading
        object.__setattr__(self, "hadamard", format.hadamard if format else 0)
        object.__setattr__(self, "along_sum", format is not None and bool(format.block or format.hadamard))
        choose("granularity", ranges, GRANULARITIES)
        choose("rounding", self.rounding, ("nearest", "stochastic"))
        if self.running and ranges != "per_tensor":
            raise ValueError(f"a running range needs granularity 'per_tensor', got {self.granularity!r}")

    def on(self, format: Format | None) -> Quantizer:
        """Return the quantiser for a format of a ladder; the paper's grids, and None, leave it as it is."""
        declared(Quantizer.on, {"format": format})
        if format is None or format.plain_affine:
            return self
        ranges = format.granularity or self.ranges
        running = self.running and ranges == "per_tensor"  # others have as many ranges as the tensor at hand has rows
        return replace(
            self, granularity=grid_of(ranges, format), rounding=format.rounding or self.rounding, running=running
        )

    def round_in(self, x: Tensor, range: Range, levels: Tensor) -> Tensor:
        """Round a tensor in a given range, to nearest; what is outside goes to its ends."""
        return round_in_range(x, *range, levels, self.granularity, None, True)

    def range_of(self, x: Tensor) -> Range:
        """Return the range of a tensor that is not empty."""
        check_floating(x)
        return range_of(x, self.granularity)

    @property
    def clips(self) -> bool:
        """Whether values of the tensor itself can lie outside its range."""
        return clips(self.granularity, self.rounding == "stochastic")


# The roles of the authors' layers.
# Differs: the paper speaks of clipping; like the authors' code this is an affine grid between minimum and maximum.
QUANTIZERS: dict[str, Quantizer] = {
    "conv_input": Quantizer("per_tensor", running=True),
    "conv_weight": Quantizer("per_channel"),
    "conv_grad": Quantizer("per_tensor", rounding="stochastic"),
    "linear_input": Quantizer("per_tensor", running=True),
    "linear_weight": Quantizer("per_row"),
    "linear_grad": Quantizer("per_position", rounding="stochastic"),
    "graph_input": Quantizer("per_row"),  # one range per node
    "graph_weight": Quantizer("per_row"),
    "graph_aggregation": Quantizer("per_row"),  # what enters the sum over neighbours, in Q-Agg
    "graph_grad": Quantizer("per_position", rounding="stochastic"),
    "lstm_input": Quantizer("per_tensor", running=True),  # at every time step
    "lstm_hidden": Quantizer("per_tensor", running=True),
    "lstm_weight": Quantizer("per_row"),
    "lstm_grad": Quantizer("per_row", rounding="stochastic"),  # one range per sequence, at every time step
    "attention_query": Quantizer("per_row"),  # one range per token and head
    "attention_key": Quantizer("per_row"),  # of the transposed keys: one range per head and feature, over the tokens
    "attention_probabilities": Quantizer("per_row"),
    "attention_value": Quantizer("per_row"),
    "attention_grad": Quantizer("per_position", rounding="stochastic"),
    "bias": Quantizer("per_tensor"),
}


def quantizer_of(quantizer: Quantizer | str) -> Quantizer:
    """Return a quantiser given by value or by role; ValueError names the roles."""
    if isinstance(quantizer, Quantizer):
        return quantizer
    return QUANTIZERS[choose("quantizer", quantizer, QUANTIZERS)]


def check_floating(x: Tensor) -> None:
    """Raise ValueError for no tensor, one whose grid would be cut to whole numbers, or that has no order."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, got {shown(x)}")
    if not x.is_floating_point():
        raise ValueError(f"only floating tensors can be quantised, got {x.dtype}; convert it with .float() first")
