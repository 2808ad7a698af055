"""What training costs in bit operations (BitOps).  Paper: section 4.1.

The problem: the cost of a run is to be known before it runs (``count_bitops``), while it runs (``BitOpsLedger``), and
operations that were not quantised are to be found (``check``). All three have to agree.

The design: work is counted where it runs. The mode that quantises operations, ``quantization.op_interception``, also
reports them as ``Operation``: layer, multiply-accumulates, gradients. ``counting`` listens to it, and lets it run over
a model that is not converted; ``functions`` adds what only counts, such as normalisations. A ``Tally`` sums up

    (layer, pass, format a, format b) -> MACs

and all prices are functions of it: BitOps here, others in ``formats``. ``conventions`` says which operations a
convention prices. The plan runs a copy of the model on shapes alone, see ``shadow``.

The trade-offs: what no function mode sees, such as compiled code or an operation of another library, is not counted;
``check`` finds it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core.bitops.plan import BitOpsPlan as BitOpsPlan
else:
    from cpt_core.lazy_imports import attach

    __all__, __getattr__, __dir__ = attach(__name__)
