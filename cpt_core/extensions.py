"""Registry of optional parts: the only file of ``cpt_core`` that names modules of ``cpt_extras``.

An optional part is a module that fills extension points when it is imported: it replaces the rounding functions of
``quantization.fake_quantize``, adds handlers of torch functions (``register_handler``), executors (``OP_EXECUTORS``),
kinds of schedules, or prices.  ``load`` imports a part that a model or a configuration needs and fails without it;
``load_optional`` returns None instead.  Parts that only help, such as warnings, are called through ``services``, which
returns a stub with a warning where ``cpt_extras`` is not installed.  So the core works without any of them.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # public names of cpt_extras that cpt_core re-exports
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
    from cpt_extras.formats.recipes import recipes as recipes
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
    "kernels": "cpt_extras.kernels.backend",  # C++ and Triton: bit-identical results, faster
    "formats": "cpt_extras.formats.ladder_rounding",  # number formats other than the paper's grids
    "matmuls": "cpt_extras.formats.matmul_rounding",  # operands that are rounded for each matmul of a layer
    "prices": "cpt_extras.formats.prices",  # costs of a training step other than BitOps
    "layered": "cpt_extras.search.layered",  # schedules of groups of layers
    "roles": "cpt_extras.search.role_schedules",  # schedules of weights, activations and gradients
    "adjusted": "cpt_extras.search.solved_schedules",  # schedules solved for a budget by changing single steps
    "delayed": "cpt_extras.search.solved_schedules",  # a delay before a schedule
    "table": "cpt_extras.search.custom_schedules",  # a table of bits, or a function
    "warped": "cpt_extras.search.solved_schedules",  # a profile read at a power of its argument
    "operations": "cpt_extras.operations",  # torch functions that few models call
    "recurrences": "cpt_extras.operations.recurrences",  # packed sequences, two directions, GRUs and RNNs
    "guarded_mode": "cpt_extras.operations.guarded_mode",  # models that run inside compilers, other modes or threads
    "split_gradients": "cpt_extras.operations.split_gradients",  # another format for each backward matmul
    "lstm": "cpt_extras.kernels.lstm_layer",  # the LSTM as one operator
    "int8": "cpt_extras.int8.executors",  # execution on 8-bit integers
    "graph": "cpt_extras.kernels.graph_layer",  # graph convolutions with fewer passes over the nodes
    "hosts": "cpt_extras.integrations.conversion_hooks",  # conversion of models of other libraries
    "wrappers": "cpt_extras.integrations.wrapped_names",  # layer names of models inside wrappers such as DDP
    "processes": "cpt_extras.integrations.data_parallel",  # rounding noise per process; check for sharded weights
    "small_gradients": "cpt_extras.diagnostics.small_gradients",  # warning: gradients too small for their grid
    "exact_zeros": "cpt_extras.diagnostics.exact_zeros",  # warning: pruned weights whose grid has no 0
    "empty_ranges": "cpt_extras.diagnostics.empty_ranges",  # warning: evaluation without running ranges
    "added_modules": "cpt_extras.diagnostics.added_modules",  # warning: layers added after conversion
    "not_intercepted": "cpt_extras.diagnostics.not_intercepted",  # MACs of operations without a handler
    "silent_layers": "cpt_extras.diagnostics.silent_layers",  # warning: weights of which no operation is intercepted
    "missing_steps": "cpt_extras.diagnostics.missing_steps",  # warning: training loops that never call step()
    "constant_features": "cpt_extras.kernels.constant_features",  # cache of results of features that never change
    "follow": "cpt_extras.integrations.optimizer_hooks",  # schedulers that step with an optimizer
    "dgl": "cpt_extras.integrations.dgl",  # graphs and graph convolutions of DGL
    "pyg": "cpt_extras.integrations.pyg",  # graphs of PyTorch Geometric
}


def load(name: str) -> Any:
    """Import an optional part and return its module; RuntimeError if it is not installed."""
    if not is_installed(name):
        raise RuntimeError(
            f"{name!r} needs the package {EXTENSIONS[name].partition('.')[0]}, which is not installed"
        )
    return importlib.import_module(EXTENSIONS[name])


def load_optional(name: str) -> Any:
    """Return the imported optional part ``name``, such as a kind of layer or schedule; None if there is none."""
    return load(name) if name in EXTENSIONS and is_installed(name) else None


def services(name: str) -> Any:
    """Return the module of an optional part, or a warning and a stub if it is not installed."""
    module = load_optional(name)
    if module is None:
        warnings.warn(
            f"{EXTENSIONS[name]} is not installed; what it does is left out",
            stacklevel=2,
        )
    return module or NotInstalled()


class NotInstalled:
    """Stub of an optional part that is not installed: its functions accept any arguments and return None."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def do_nothing(*args: Any, **kwargs: Any) -> None:
            return None

        return do_nothing


def is_installed(name: str) -> bool:
    """Return whether the package of an optional part is installed."""
    return importlib.util.find_spec(EXTENSIONS[name].partition(".")[0]) is not None
