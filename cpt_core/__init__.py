"""Cyclic precision training: schedules, quantised training and its cost in bit operations.

Reference implementation of *Better Schedules for Low Precision Training of Deep Neural Networks* (Wolfe and
Kyrillidis).  Names are resolved on first use, so ``import cpt_core`` needs neither torch nor time.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULE_OF = {
    "schedules": ("make_schedule", "schedule_from_dict", "FunctionSchedule", "CyclicSchedule", "StaticSchedule", "SUITE"),
}
_HOME = {name: module for module, names in _MODULE_OF.items() for name in names}
__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"cpt_core.{_HOME[name]}"), name)
    raise AttributeError(f"module 'cpt_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
