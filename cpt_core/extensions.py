"""Where optional parts register: the only file of ``cpt_core`` that names what stands beside it.

An optional part is a module that fills extension points when it is imported: it replaces the rounding functions of
``quantization.fake_quantize``, adds handlers of functions (``register_handler``), executors (``EXECUTORS``), kinds of
schedules, or prices. The core loads one when a model or a configuration asks for it, and works without any.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

EXTENSIONS = {
    "kernels": "cpt_core.kernels.backend",  # C++ and Triton: the same bits, faster
    "formats": "cpt_core.formats.ladder_rounding",  # number formats other than the paper's grids
    "prices": "cpt_core.formats.prices",  # costs of a training step other than BitOps
    "layered": "cpt_core.schedules.layered",  # schedules of groups of layers
    "roles": "cpt_core.schedules.roles",  # schedules of weights, activations and gradients
    "adjusted": "cpt_core.choosing.solved_schedules",  # schedules for a budget: single steps changed
    "delayed": "cpt_core.choosing.solved_schedules",  # a delay before a schedule
    "warped": "cpt_core.choosing.solved_schedules",  # a profile that is read at a power
    "operations": "cpt_core.operations",  # functions of torch that few models use
    "recomputation": "cpt_core.operations.recomputation",  # activation checkpointing of functions inside modules
    "split_gradients": "cpt_core.operations.split_gradients",  # another format for each backward matmul
    "lstm": "cpt_core.kernels.lstm_layer",  # the LSTM as one operator
    "int8": "cpt_core.codes.register",  # execution on 8-bit integers
    "graph": "cpt_core.kernels.graph_layer",  # graph convolutions with fewer passes over the nodes
    "graph_modules": "cpt_core.integrations.graph_modules",  # copies of modules that torch.fx made
    "follow": "cpt_core.integrations.following",  # schedulers that step with an optimizer
    "dgl": "cpt_core.integrations.dgl",  # graph convolutions of DGL
}


def load(name: str) -> Any:
    """Import an optional part, which registers itself, and return its module; RuntimeError where it is not there."""
    if not is_installed(name):
        raise RuntimeError(f"{name!r} needs the package {EXTENSIONS[name].partition('.')[0]}, which is not installed")
    return importlib.import_module(EXTENSIONS[name])


def load_optional(name: str) -> None:
    """Import the optional part of a name, such as a kind of layer or schedule, if there is one."""
    if name in EXTENSIONS and is_installed(name):
        load(name)


def is_installed(name: str) -> bool:
    """Return whether the package of an optional part is installed."""
    return importlib.util.find_spec(EXTENSIONS[name].partition(".")[0]) is not None
