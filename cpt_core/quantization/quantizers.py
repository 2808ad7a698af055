"""The quantiser of every role: which elements share a range, and how they are rounded.  Paper: figure 1.

A tensor is rounded to a uniform grid of ``2**q`` levels between the minimum and the maximum of its range;
``fake_quantize`` does the rounding. Add a quantiser here: a role, and in ``kernels/reference.py`` a granularity if it
needs a new one.

>>> QUANTIZERS["linear_grad"].granularity, QUANTIZERS["linear_grad"].rounding
('per_position', 'stochastic')
"""

from __future__ import annotations

from cpt_core.checks import choose
from cpt_core.formats.quantizer import GRANULARITIES, Quantizer

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
    "graph_aggregation": Quantizer("per_row", "nearest"),  # what enters the sum over neighbours, in Q-Agg
    "graph_grad": Quantizer("per_position", "stochastic"),
    "lstm_input": Quantizer("per_tensor", "nearest", running=True),  # at every time step
    "lstm_hidden": Quantizer("per_tensor", "nearest", running=True),
    "lstm_weight": Quantizer("per_row", "nearest"),
    "lstm_grad": Quantizer("per_row", "stochastic"),  # one range per sequence, at every time step
    "attention_query": Quantizer("per_row", "nearest"),  # one range per token and head
    "attention_key": Quantizer("per_row", "nearest"),  # of transposed keys: per head and feature, over the tokens
    "attention_probabilities": Quantizer("per_row", "nearest"),
    "attention_value": Quantizer("per_row", "nearest"),
    "attention_grad": Quantizer("per_position", "stochastic"),
    "bias": Quantizer("per_tensor", "nearest"),
}


def quantizer_of(quantizer: Quantizer | str) -> Quantizer:
    """Return a quantiser given by value or by role; ValueError names the roles."""
    if isinstance(quantizer, Quantizer):
        if quantizer.granularity is None or quantizer.format is not None:  # what a ladder does not know has no price
            allowed = f"one of {', '.join(GRANULARITIES)}, and no format, which a ladder gives"
            raise ValueError(f"the quantizer of a role has a granularity, {allowed}; got {quantizer!r}")
        return quantizer
    return QUANTIZERS[choose("quantizer", quantizer, QUANTIZERS)]
