"""Reasons why an operation of a converted model runs in float32, or is simulated where int8 was requested.

It contains one enum, ``FallbackReason``, whose values are the texts that ``summary``, ``check`` and warnings print.
Names in braces stand for a layer, a setting or a number, and ``describe`` fills them in. ``docs/fallbacks.md`` lists
every member with its remedy. The module imports no torch, so that reports can name reasons without loading it.
"""

from __future__ import annotations

from enum import Enum, unique


@unique
class FallbackReason(Enum):
    """Reason why a layer or one of its matmuls is not quantised, or not computed in int8.

    >>> FallbackReason.NO_MATMUL.describe()
    'no matmul or convolution found in its forward()'
    >>> FallbackReason.RANGE_PER_SLICE.describe(operands="weights", slice="row")
    'weights have a range per row'
    """

    # A module stays in float32.
    NOT_SELECTED = "not selected by quantize_"
    UNINITIALIZED = "lazy and without shapes: run the model once, then call quantize_"
    NO_MATMUL = "no matmul or convolution found in its forward()"
    NO_MATMUL_EXECUTED = "no matmul or convolution has run in it yet"
    NO_QUANTIZED_MATMUL = (
        "all its matmuls run in float32: sums over one element, or out="
    )
    ADDED_LATER = "added after quantize_"
    TRACED_LATER = "traced by torch.fx after quantize_"
    NO_GRAPH_WEIGHT = "graph convolution without a weight of its own"
    UNSUPPORTED_AGGREGATOR = (
        "aggregator {aggregator!r} is not supported, only 'mean' is"
    )

    # Operations of a step run in float32, as ``check`` found.
    NOT_INTERCEPTED = "not intercepted"
    BYPASSED = "listed as quantised, but used in float32"

    # A layer with execution "integer" or "auto" simulates some or all of its matmuls.
    NO_FAST_INT8 = "execution='auto', and this device has no fast int8 matmul"
    SMALL_MATMULS = "execution='auto', and many small matmuls are no faster in int8"
    UNSUPPORTED_LAYER = "{layer} has no int8 implementation"
    UNSUPPORTED_ATTENTION = (
        "only the attention module of the paper has an int8 implementation"
    )
    CONV_GROUPS = "convolution with {groups} groups"
    CONV_PADDING = "convolution with padding={padding!r}"
    INT32_OVERFLOW = "sums over the gates may overflow 32-bit integers"
    STATE_ZERO_POINT = "the grid of the hidden state has a zero point"
    SEVERAL_RANGES = "{operands} have several ranges"
    RANGE_PER_SLICE = "{operands} have a range per {slice}"
    RANGE_PER_TIME_STEP = "every time step has a range of its own"
    MEAN_GRADIENT = "the mean divides the gradient of every node by its own degree"
    FORMAT_WITHOUT_INT8 = (
        "at level {level} the {role} is in {number_format}, which is no int8 format"
    )

    def describe(self, **fields: object) -> str:
        """Return the text with its names in braces replaced by ``fields``."""
        return self.value.format(**fields)
