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
    from cpt_core.bitops import BitOpsLedger as BitOpsLedger
    from cpt_core.bitops import BitOpsPlan as BitOpsPlan
    from cpt_core.bitops import count_bitops as count_bitops
    from cpt_core.budget import solve_schedule as solve_schedule
    from cpt_core.convert import QuantConfig as QuantConfig
    from cpt_core.convert import quantize_ as quantize_
    from cpt_core.convert import restore_ as restore_
    from cpt_core.convert import summary as summary
    from cpt_core.graph_layers import GraphConv as GraphConv
    from cpt_core.graph_layers import SAGEConv as SAGEConv
    from cpt_core.graph_ops import Graph as Graph
    from cpt_core.quantizers import QUANTIZERS as QUANTIZERS
    from cpt_core.quantizers import Quantizer as Quantizer
    from cpt_core.quantizers import quantize as quantize
    from cpt_core.range_test import precision_range_test as precision_range_test
    from cpt_core.scheduler import PrecisionScheduler as PrecisionScheduler
    from cpt_core.scheduler import precision as precision
    from cpt_core.schedules import PROFILES as PROFILES
    from cpt_core.schedules import SUITE as SUITE
    from cpt_core.schedules import CyclicSchedule as CyclicSchedule
    from cpt_core.schedules import DeficitSchedule as DeficitSchedule
    from cpt_core.schedules import DelayedSchedule as DelayedSchedule
    from cpt_core.schedules import FunctionSchedule as FunctionSchedule
    from cpt_core.schedules import Rex as Rex
    from cpt_core.schedules import make_schedule as make_schedule
    from cpt_core.schedules import schedule_from_dict as schedule_from_dict

__version__ = "0.1.0"

_MODULES = {
    "schedules": "make_schedule schedule_from_dict SUITE PROFILES CyclicSchedule FunctionSchedule TableSchedule "
    "StaticSchedule DeficitSchedule DelayedSchedule Linear Cosine Exponential Rex Warped",
    "budget": "solve_schedule",
    "quantizers": "quantize Quantizer QUANTIZERS",
    "graph_ops": "Graph",
    "graph_layers": "GraphConv SAGEConv",
    "convert": "quantize_ restore_ summary QuantConfig",
    "scheduler": "PrecisionScheduler precision",
    "bitops": "count_bitops BitOpsPlan BitOpsLedger",
    "range_test": "precision_range_test PrecisionRange RangeTestWarning",
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
