"""Number formats: FP8, FP6, FP4, MX, NVFP4, ladders of formats, and the costs of operations in them.

The problem: the paper's level q is a uniform grid of q bits. Hardware has floating-point formats of 8, 6 and 4 bits,
some with a scale per block, and a cyclic schedule should be able to use them. Beyond the paper.

The parts:

- ``format``: a ``Format`` describes the values of an element and the scale of a block; ``FORMATS`` names the common
  ones. ``quantizer`` adds the range and the rounding of a tensor.
- ``ladder``: a ``FormatLadder`` maps the levels of schedules to formats. ``ladder_rounding`` uses it in layers, instead
  of the core's ``AffineGrids``: it finds the active format of every role, checks which levels a layer supports, and
  arranges blocks along the dimension over which an operation sums.
- ``recipes`` names recipes of the field, such as NVIDIA's for NVFP4; ``matmul_rounding`` rounds the operands of each of
  the three matmuls of a linear layer for itself, as they do.
- ``format_rounding`` is the arithmetic in plain torch, equal to ml_dtypes on all values; ``tensor_rounding`` applies
  it, or a grid, to single tensors.
- ``costs`` and ``prices`` price counted operations in units other than BitOps, each with its source.

The design: formats, quantisers, ladders and costs are immutable values with names that read back, so that specs and
checkpoints can store them; they need no torch. A schedule does not know formats, only levels, so that every schedule
works on every ladder.

The trade-offs: all formats are simulated in float32, so this measures quality, not speed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_extras.formats.costs import COSTS as COSTS
    from cpt_extras.formats.costs import Cost as Cost
    from cpt_extras.formats.costs import Operands as Operands
else:
    from cpt_core.lazy_imports import attach

    __all__, __getattr__, __dir__ = attach(__name__)
