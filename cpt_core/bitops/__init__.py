"""Cost of training in bit operations (BitOps).  Paper: section 4.1.

The problem: the cost of a run must be known before it runs (``count_bitops``) and while it runs (``BitOpsLedger``), and
operations that were not quantised must be found (``check``). The three must agree.

The unit is one float32 multiply-accumulate (MAC). A matmul of operands with a and b bits costs MACs * a * b / 32**2. A
training step of a layer has three: forward, input gradient (dgrad) and weight gradient (wgrad).

The design: operations are counted where they run. The function mode that quantises them also reports each one as an
``Operation``: its layer, MACs, and which gradients are computed.

- counting.py: ``report_operations`` receives these reports, also from a model that is not converted.
- functions.py: counters of functions that are counted but not quantised, such as normalisation.
- tally.py: a ``Tally`` sums up (layer, pass, format a, format b) -> MACs, from which every price is computed: BitOps
  here, bytes and other costs in ``cpt_extras.formats``.
- conventions.py: the operations and passes that "paper" and "per_op" price.
- plan.py: ``count_bitops`` runs a copy of the model once on shapes alone (shadow.py) and prices a whole schedule.
- summary.py: what is quantised in a model and what is not, with the reason.

The trade-offs: counting needs no formula per layer and works for any model, but operations that no function mode
receives, such as compiled code or kernels of another library, are not counted; ``check`` finds them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core.bitops.plan import BitOpsPlan as BitOpsPlan
else:
    from cpt_core.lazy_imports import attach

    __all__, __getattr__, __dir__ = attach(__name__)
