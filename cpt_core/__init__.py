"""Cyclic precision training: schedules, quantised training and its cost in bit operations.

Reference implementation of *Better Schedules for Low Precision Training of Deep Neural Networks* (Wolfe and
Kyrillidis).  Names are resolved on first use, so ``import cpt_core`` takes neither torch nor time.

>>> import cpt_core as cpt
>>> cpt.make_schedule("RR", q_min=3, q_max=8, total_steps=64_000).savings
'large'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from cpt_core.bitops.ledger import BitOpsLedger as BitOpsLedger
    from cpt_core.bitops.plan import BitOpsPlan as BitOpsPlan
    from cpt_core.bitops.plan import count_bitops as count_bitops
    from cpt_core.choosing.allocation import allocate as allocate
    from cpt_core.choosing.measuring import sensitivity as sensitivity
    from cpt_core.choosing.range_test import precision_range_test as precision_range_test
    from cpt_core.choosing.sensitivities import Sensitivity as Sensitivity
    from cpt_core.choosing.solver import solve_schedule as solve_schedule
    from cpt_core.formats.costs import COSTS as COSTS
    from cpt_core.formats.format import FORMATS as FORMATS
    from cpt_core.formats.format import Format as Format
    from cpt_core.formats.ladder import FormatLadder as FormatLadder
    from cpt_core.graphs.graph import Graph as Graph
    from cpt_core.graphs.layers import GraphConv as GraphConv
    from cpt_core.graphs.layers import SAGEConv as SAGEConv
    from cpt_core.inspecting.check import check as check
    from cpt_core.inspecting.measure import measure_cost as measure_cost
    from cpt_core.inspecting.measured import MeasuredCost as MeasuredCost
    from cpt_core.inspecting.record import Recording as Recording
    from cpt_core.inspecting.record import record as record
    from cpt_core.inspecting.summary import summary as summary
    from cpt_core.kernels.execution import Execution as Execution
    from cpt_core.kernels.execution import execution as execution
    from cpt_core.quantization.convert import QuantConfig as QuantConfig
    from cpt_core.quantization.convert import quantize_ as quantize_
    from cpt_core.quantization.convert import restore_ as restore_
    from cpt_core.quantization.coverage import QuantizationWarning as QuantizationWarning
    from cpt_core.quantization.export import export as export
    from cpt_core.quantization.fake_quantize import quantize as quantize
    from cpt_core.quantization.quantizers import QUANTIZERS as QUANTIZERS
    from cpt_core.quantization.quantizers import Quantizer as Quantizer
    from cpt_core.quantization.scheduler import PrecisionScheduler as PrecisionScheduler
    from cpt_core.quantization.scheduler import precision as precision
    from cpt_core.schedules.deficit import DeficitSchedule as DeficitSchedule
    from cpt_core.schedules.deficit import DelayedSchedule as DelayedSchedule
    from cpt_core.schedules.layered import LayeredSchedule as LayeredSchedule
    from cpt_core.schedules.make import make_schedule as make_schedule
    from cpt_core.schedules.make import schedule_from_dict as schedule_from_dict
    from cpt_core.schedules.profiles import PROFILES as PROFILES
    from cpt_core.schedules.profiles import SUITE as SUITE
    from cpt_core.schedules.profiles import Rex as Rex
    from cpt_core.schedules.roles import RoleSchedules as RoleSchedules
    from cpt_core.schedules.schedule import CyclicSchedule as CyclicSchedule
    from cpt_core.schedules.schedule import FunctionSchedule as FunctionSchedule

__version__ = "0.2.0"

_MODULES = {
    "schedules.profiles": "SUITE PROFILES Linear Cosine Exponential Rex Warped",
    "schedules.schedule": "CyclicSchedule FunctionSchedule TableSchedule StaticSchedule",
    "schedules.deficit": "DeficitSchedule DelayedSchedule",
    "schedules.make": "make_schedule schedule_from_dict",
    "inspecting.measured": "MeasuredCost",
    "schedules.roles": "RoleSchedules",
    "choosing.solver": "solve_schedule",
    "schedules.layered": "LayeredSchedule",
    "choosing.sensitivities": "Sensitivity",
    "choosing.allocation": "allocate",
    "formats.costs": "COSTS Cost Operands",
    "formats.format": "FORMATS Format",
    "formats.ladder": "FormatLadder",
    "graphs.graph": "Graph",
    "graphs.layers": "GraphConv SAGEConv",
    "kernels.execution": "execution Execution",
    "quantization.quantizers": "Quantizer QUANTIZERS",
    "quantization.fake_quantize": "quantize",
    "quantization.convert": "quantize_ restore_ QuantConfig",
    "quantization.coverage": "QuantizationWarning",
    "inspecting.summary": "summary",
    "inspecting.record": "record Recording",
    "quantization.export": "export",
    "quantization.scheduler": "PrecisionScheduler precision",
    "bitops.plan": "count_bitops BitOpsPlan",
    "inspecting.check": "check",
    "inspecting.measure": "measure_cost",
    "bitops.ledger": "BitOpsLedger",
    "choosing.precision_range": "PrecisionRange",
    "choosing.range_test": "precision_range_test RangeTestWarning",
    "choosing.measuring": "sensitivity",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cpt_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cpt_core.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
