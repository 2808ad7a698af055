"""The quantiser of every role: which elements share a range, and how they are rounded.  Paper: figure 1.

A tensor is rounded to a uniform grid of ``2**q`` values between the minimum and the maximum of its range.
``QUANTIZERS`` maps roles to quantisers. The roles also apply to operations outside of the paper's layers; there every
grid has a zero point. To add a quantiser, add a role here, and a granularity in ``rounding.py`` if it needs a new one.

>>> QUANTIZERS["linear_grad"].granularity, QUANTIZERS["linear_grad"].rounding
('per_position', 'stochastic')
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cpt_core.validation import check_choice, check_types

GRANULARITIES = (
    "per_tensor",
    "per_channel",
    "per_row",
    "per_position",
    "per_sample_mean",
)
ROUNDINGS = ("nearest", "stochastic")
ZERO_POINT = "+zero"  # suffix of a granularity: 0 is on the grid


@dataclass(frozen=True)
class Quantizer:
    """Quantiser of a role: granularity of ranges, rounding, and kind of grid.

    Attributes:
        granularity: which elements share a range, a name of ``GRANULARITIES``. Except for "per_tensor" with
            ``running``, ranges are computed from the tensor itself, also in evaluation.
        rounding: "nearest" (half to even) or "stochastic" (unbiased inside the range).
        running: keep a running range during training and use it in evaluation.
        zero_point: shift the grid by at most half a step so that 0 is on it, see ``rounding.round_with_zero_point``:
            masked and pruned values stay 0.
        grid: name of the grid for rounding functions: the granularity, with "+zero" for a zero point; number formats
            append their name.
    """

    granularity: str
    rounding: str = "nearest"
    running: bool = False
    zero_point: bool = field(default=False, kw_only=True)
    grid: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the fields and set ``grid``."""
        check_types(type(self), {**vars(self), "grid": self.granularity})
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("rounding", self.rounding, ROUNDINGS)
        if self.running and self.granularity != "per_tensor":
            raise ValueError(
                f"a running range needs granularity 'per_tensor', got {self.granularity!r}"
            )
        object.__setattr__(
            self, "grid", self.granularity + (ZERO_POINT if self.zero_point else "")
        )


# The roles of the authors' layers.
# Differs: the paper speaks of clipping; like the authors' code this is an affine grid between minimum and maximum.
QUANTIZERS: dict[str, Quantizer] = {
    "conv_input": Quantizer("per_tensor", "nearest", running=True),
    "conv_weight": Quantizer("per_channel", "nearest"),
    "conv_grad": Quantizer("per_tensor", "stochastic"),
    "linear_input": Quantizer("per_tensor", "nearest", running=True),
    "linear_weight": Quantizer("per_row", "nearest"),
    "linear_grad": Quantizer("per_position", "stochastic"),
    "graph_input": Quantizer("per_row", "nearest"),  # one range per node
    "graph_weight": Quantizer("per_row", "nearest"),
    # operand of the sum over neighbours, in Q-Agg
    "graph_aggregation": Quantizer("per_row", "nearest"),
    "graph_grad": Quantizer("per_position", "stochastic"),
    # one range per time step
    "lstm_input": Quantizer("per_tensor", "nearest", running=True),
    "lstm_hidden": Quantizer("per_tensor", "nearest", running=True),
    "lstm_weight": Quantizer("per_row", "nearest"),
    # one range per sequence and time step
    "lstm_grad": Quantizer("per_row", "stochastic"),
    "attention_query": Quantizer("per_row", "nearest"),  # one range per token and head
    # keys are transposed: one range per head and feature, over the tokens
    "attention_key": Quantizer("per_row", "nearest"),
    "attention_probabilities": Quantizer("per_row", "nearest"),
    "attention_value": Quantizer("per_row", "nearest"),
    "attention_grad": Quantizer("per_position", "stochastic"),
    "bias": Quantizer("per_tensor", "nearest"),
}


def find_quantizer(quantizer: Quantizer | str) -> Quantizer:
    """Return ``quantizer``, looked up in ``QUANTIZERS`` if it is a role; ValueError for an unknown role."""
    if isinstance(quantizer, Quantizer):
        if type(quantizer) is not Quantizer:
            raise ValueError(
                f"the quantizer of a role has no format, which a ladder gives; got {quantizer!r}"
            )
        return quantizer
    return QUANTIZERS[check_choice("quantizer", quantizer, QUANTIZERS)]


def level_field(role: str) -> str:
    """Return the field of ``RoleLevels`` with the level of a role, such as "weight" for "linear_weight"."""
    if role.endswith("weight_grad"):
        return "weight_gradient"
    fields = {"weight": "weight", "bias": "weight", "grad": "error"}
    return fields.get(role.rpartition("_")[2], "activation")


def weight_gradient_role(role: str) -> str:
    """Return the role of an output gradient that is quantised for the weight gradient (wgrad) alone."""
    return role.removesuffix("grad") + "weight_grad"
