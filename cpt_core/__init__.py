"""Cyclic precision training: schedules, quantised training and its cost in bit operations.

Reference implementation of *Better Schedules for Low Precision Training of Deep Neural Networks* (Wolfe and
Kyrillidis).  Names are resolved on first use, so ``import cpt_core`` takes neither torch nor time.  What a training
needs is here; the rest is in rooms, such as ``cpt.search.sensitivity`` and ``cpt.diagnostics.record``.

>>> import cpt_core as cpt
>>> cpt.make_schedule("RR", q_min=3, q_max=8, total_steps=64_000).savings
'large'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core import bitops as bitops
    from cpt_core import quantization as quantization
    from cpt_core import schedules as schedules
    from cpt_core.bitops.plan import count_bitops as count_bitops
    from cpt_core.bitops.summary import summary as summary
    from cpt_core.extensions import FORMATS as FORMATS
    from cpt_core.extensions import BitOpsLedger as BitOpsLedger
    from cpt_core.extensions import DelayedSchedule as DelayedSchedule
    from cpt_core.extensions import Format as Format
    from cpt_core.extensions import FormatLadder as FormatLadder
    from cpt_core.extensions import FunctionSchedule as FunctionSchedule
    from cpt_core.extensions import LayeredSchedule as LayeredSchedule
    from cpt_core.extensions import QuantizationWarning as QuantizationWarning
    from cpt_core.extensions import RoleSchedules as RoleSchedules
    from cpt_core.extensions import backend as backend
    from cpt_core.extensions import check as check
    from cpt_core.extensions import diagnostics as diagnostics
    from cpt_core.extensions import export as export
    from cpt_core.extensions import formats as formats
    from cpt_core.extensions import kernels as kernels
    from cpt_core.extensions import quantize as quantize
    from cpt_core.extensions import search as search
    from cpt_core.extensions import solve_schedule as solve_schedule
    from cpt_core.graphs.graph import Graph as Graph
    from cpt_core.graphs.layers import GraphConv as GraphConv
    from cpt_core.graphs.layers import SAGEConv as SAGEConv
    from cpt_core.quantization.convert import QuantConfig as QuantConfig
    from cpt_core.quantization.convert import quantize_ as quantize_
    from cpt_core.quantization.convert import restore_ as restore_
    from cpt_core.quantization.scheduler import PrecisionScheduler as PrecisionScheduler
    from cpt_core.quantization.scheduler import precision as precision
    from cpt_core.schedules.deficit import DeficitSchedule as DeficitSchedule
    from cpt_core.schedules.make import make_schedule as make_schedule
    from cpt_core.schedules.make import schedule_from_dict as schedule_from_dict
    from cpt_core.schedules.profiles import SUITE as SUITE
    from cpt_core.schedules.schedule import CyclicSchedule as CyclicSchedule
    from cpt_core.schedules.schedule import StaticSchedule as StaticSchedule
else:
    from cpt_core.lazy_imports import attach

    __all__, __getattr__, __dir__ = attach(__name__)

__version__ = "0.3.0"
