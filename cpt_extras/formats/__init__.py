"""Number formats: FP8, FP6, FP4, MX, NVFP4, ladders of them, and what operations in them cost.  Beyond the paper.

The problem: the paper's level q is a uniform grid of q bits. Hardware has floating point formats of 8, 6 and 4 bits,
some with a scale per block; a schedule should be able to climb them.

The design: a ``Format`` is a value: the numbers of an element, and the scale of a block. A ``FormatLadder`` maps levels
of schedules to formats. ``ladder_rounding`` takes the place of the core's ``AffineGrids``: it says what a level is,
which levels a layer can take, and arranges blocks along the dimension over which an operation sums.
``format_rounding`` is the arithmetic in plain torch, equal to ml_dtypes on all values; ``tensor_rounding`` applies it,
or a grid, to single tensors. ``costs`` and ``prices`` price
counted work in units other than bit operations, each with its source.

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
