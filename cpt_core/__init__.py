"""Cyclic precision training (CPT): schedules, quantised training and its cost in bit operations.

Reference implementation of *Better Schedules for Low Precision Training of Deep Neural Networks* (Wolfe and
Kyrillidis).

The problem: training at few bits is cheaper but loses accuracy. CPT varies the number of bits q_t of weights and
activations over the run, between ``q_min`` and ``q_max``, with gradients at ``q_max``; the paper compares ten such
schedules by accuracy and by cost. That needs a training loop in which the bits change at every optimizer step.

The design is three lines around an ordinary loop:

    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=64_000)

    cpt.quantize_(model)                                 # 1: in place
    precision = cpt.PrecisionScheduler(model, schedule)  # 2: sets the bits of step 0
    precision.step()                                     # 3: in the loop, after optimizer.step()

- ``make_schedule`` (schedules) returns the bits of every step.
- ``quantize_`` (quantization) registers hooks on the modules. While the model runs, a ``TorchFunctionMode`` intercepts
  its matmuls and convolutions. Instead of y = f(a, b) it computes y = f(q(a), q(b)), where q rounds to a uniform grid
  of 2**bits values; in the backward pass dy is rounded before both backward GEMMs (dgrad and wgrad).
- ``precision.step()`` writes 2**bits - 1 of the next optimizer step into four 0-d tensors of every layer (activations,
  weights, gradients for dgrad and for wgrad), so that neither eager nor compiled code changes.
- ``count_bitops`` (bitops) prices the run before it starts; ``graphs`` and ``models`` hold the graph convolutions and
  the networks of the paper.

The trade-offs: rounding is simulated, values lie on the grid but are stored in float32, so the cost in bit operations
is computed and not measured as time. Faster kernels, int8 execution, other number formats, precision search and
diagnostics are in ``cpt_extras``, which ``cpt_core`` re-exports but does not need.

Names are resolved on first use, so ``import cpt_core`` takes neither torch nor time.

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
    from cpt_core.extensions import recipes as recipes
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
