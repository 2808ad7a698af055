"""Where optional parts register: the only file of ``cpt_core`` that names what stands beside it.

An optional part is a module that fills extension points when it is imported: it replaces the rounding functions of
``quantization.fake_quantize``, adds handlers of functions (``register_handler``), executors (``EXECUTORS``), kinds of
schedules, or prices. The core loads one when a model or a configuration asks for it, and works without any. What helps
users of other libraries, such as warnings, is called through ``services``.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the public names of cpt_extras, which cpt_core passes on
    from cpt_extras import diagnostics as diagnostics
    from cpt_extras import formats as formats
    from cpt_extras import kernels as kernels
    from cpt_extras import search as search
    from cpt_extras.diagnostics.check import check as check
    from cpt_extras.diagnostics.float32_weights import (
        QuantizationWarning as QuantizationWarning,
    )
    from cpt_extras.diagnostics.ledger import BitOpsLedger as BitOpsLedger
    from cpt_extras.formats.format import FORMATS as FORMATS
    from cpt_extras.formats.format import Format as Format
    from cpt_extras.formats.ladder import FormatLadder as FormatLadder
    from cpt_extras.formats.tensor_rounding import quantize as quantize
    from cpt_extras.int8.export import export as export
    from cpt_extras.kernels.backend import backend as backend
    from cpt_extras.search.custom_schedules import FunctionSchedule as FunctionSchedule
    from cpt_extras.search.custom_schedules import TableSchedule as TableSchedule
    from cpt_extras.search.layered import LayeredSchedule as LayeredSchedule
    from cpt_extras.search.role_schedules import RoleSchedules as RoleSchedules
    from cpt_extras.search.solved_schedules import DelayedSchedule as DelayedSchedule
    from cpt_extras.search.solver import solve_schedule as solve_schedule

EXTENSIONS = {
    "kernels": "cpt_extras.kernels.backend",  # C++ and Triton: the same bits, faster
    "formats": "cpt_extras.formats.ladder_rounding",  # number formats other than the paper's grids
    "prices": "cpt_extras.formats.prices",  # costs of a training step other than BitOps
    "layered": "cpt_extras.search.layered",  # schedules of groups of layers
    "roles": "cpt_extras.search.role_schedules",  # schedules of weights, activations and gradients
    "adjusted": "cpt_extras.search.solved_schedules",  # schedules for a budget: single steps changed
    "delayed": "cpt_extras.search.solved_schedules",  # a delay before a schedule
    "table": "cpt_extras.search.custom_schedules",  # a table of bits, or a function
    "warped": "cpt_extras.search.solved_schedules",  # a profile that is read at a power
    "operations": "cpt_extras.operations",  # functions of torch that few models use
    "recurrences": "cpt_extras.operations.recurrences",  # packed sequences, two directions, GRUs and RNNs
    "guarded_mode": "cpt_extras.operations.guarded_mode",  # models that run in unusual ways
    "split_gradients": "cpt_extras.operations.split_gradients",  # another format for each backward matmul
    "lstm": "cpt_extras.kernels.lstm_layer",  # the LSTM as one operator
    "int8": "cpt_extras.int8.register",  # execution on 8-bit integers
    "graph": "cpt_extras.kernels.graph_layer",  # graph convolutions with fewer passes over the nodes
    "hosts": "cpt_extras.integrations.hosts",  # what the models of other libraries need when they are converted
    "wrappers": "cpt_extras.integrations.wrapped_names",  # names of layers in a model that another module wraps
    "processes": "cpt_extras.integrations.processes",  # noise of its own for every process, sharded weights
    "small_gradients": "cpt_extras.diagnostics.small_gradients",  # a warning of losses that should be scaled
    "exact_zeros": "cpt_extras.diagnostics.exact_zeros",  # a warning of pruned weights
    "empty_ranges": "cpt_extras.diagnostics.empty_ranges",  # a warning of evaluation without running ranges
    "added_modules": "cpt_extras.diagnostics.added_modules",  # a warning of layers that came after conversion
    "missing_steps": "cpt_extras.diagnostics.missing_steps",  # a warning for loops that never call step()
    "constant_features": "cpt_extras.kernels.constant_features",  # what is computed of them is computed once
    "follow": "cpt_extras.integrations.following",  # schedulers that step with an optimizer
    "dgl": "cpt_extras.integrations.dgl",  # graphs and graph convolutions of DGL
    "pyg": "cpt_extras.integrations.pyg",  # graphs of PyTorch Geometric
}


def load(name: str) -> Any:
    """Import an optional part, which registers itself, and return its module; RuntimeError where it is not there."""
    if not is_installed(name):
        raise RuntimeError(
            f"{name!r} needs the package {EXTENSIONS[name].partition('.')[0]}, which is not installed"
        )
    return importlib.import_module(EXTENSIONS[name])


def load_optional(name: str) -> Any:
    """Return the imported optional part of a name, such as a kind of layer or schedule; None if there is none."""
    return load(name) if name in EXTENSIONS and is_installed(name) else None


def services(name: str) -> Any:
    """Return the module of an optional part; where it is not installed, what warns and does nothing in its place."""
    module = load_optional(name)
    if module is None:
        warnings.warn(
            f"{EXTENSIONS[name]} is not installed; what it does is left out",
            stacklevel=2,
        )
    return module or NotInstalled()


class NotInstalled:
    """An optional part that is not there: its functions take anything, and return None."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def is_installed(name: str) -> bool:
    """Return whether the package of an optional part is installed."""
    return importlib.util.find_spec(EXTENSIONS[name].partition(".")[0]) is not None
