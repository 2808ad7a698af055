"""Precision schedules: the bits of every optimizer step, and the cost of a run at these bits.  Paper: sections 3 to 5.

The problem: a run trains at ``q_t`` bits at step t, between ``q_min`` and ``q_max``. The paper builds ten schedules
from four growth curves and compares them by quality and by cost.

The design: a schedule is a frozen value and a pure function of the 0-based step.

- profiles.py: a ``Profile`` is a growth curve from 0 to 1 over one cycle; ``SUITE`` names the paper's ten schedules.
- schedule.py: ``CyclicSchedule`` repeats a profile ``n_cycles`` times, S = q_min + (q_max - q_min) f(x), rounded to
  whole bits; a triangular one mirrors every other cycle. ``StaticSchedule`` is the baseline.
- deficit.py: ``DeficitSchedule`` has low precision inside windows, as experiments on critical learning periods do.
- make.py: ``make_schedule`` builds schedules by name, ``schedule_from_dict`` from the description in a checkpoint.
- cost.py: a matmul of ``a`` and ``b`` bits costs ``a * b / 32**2``; a training step has three of them.

The trade-offs: all bits of a run are computed once, as a numpy array, so a step is a look-up and the cost is exact. A
schedule that reacts to the loss of the run cannot be expressed. Nothing in this package needs torch.
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
