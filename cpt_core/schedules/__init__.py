"""Precision schedules: the bits of every optimizer step, and what a run at these bits costs.  Paper: sections 3 to 5.

The problem: a run trains at ``q_t`` bits at step t, between ``q_min`` and ``q_max``. The paper builds ten schedules
from four growth curves, and compares them by quality and by cost.

The design: a schedule is a frozen value and a pure function of the 0-based step. A ``Profile`` (profiles.py) is a curve
from 0 to 1 over one cycle; ``CyclicSchedule`` (schedule.py) repeats it ``n_cycles`` times and, where it is triangular,
turns every other cycle round; ``SUITE`` names the paper's ten. ``make_schedule`` (make.py) makes them by name, and
``schedule_from_dict`` from their description. ``DeficitSchedule`` (deficit.py) is that of critical learning periods.
cost.py prices the steps: a matmul of ``a`` and ``b`` bits costs ``a * b / 32**2``, a step three of them.

The trade-offs: all bits of a run are computed once, as a numpy array, so that a step is a look-up and a cost is exact;
a schedule that depends on what happens in the run has no place here. Nothing in this package needs torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core.extensions import TableSchedule as TableSchedule
    from cpt_core.schedules.profiles import PROFILES as PROFILES
    from cpt_core.schedules.profiles import Cosine as Cosine
    from cpt_core.schedules.profiles import Exponential as Exponential
    from cpt_core.schedules.profiles import Linear as Linear
    from cpt_core.schedules.profiles import Rex as Rex
else:
    from cpt_core.lazy_imports import attach

    __all__, __getattr__, __dir__ = attach(__name__)
