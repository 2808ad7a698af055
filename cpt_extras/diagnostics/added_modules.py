"""Modules that were added to a model after ``quantize_``, such as a new head, and the warning about them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from cpt_core.quantization.convert import (
    ModelMode,
    has_own_forward,
    holds_weights,
    layer_parts,
)
from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_core.quantization.op_interception import (
    COMPOSITE_OPS,
    HOOK,
    OP_HANDLERS,
    Interception,
)
from cpt_extras.diagnostics.float32_weights import QuantizationWarning

REMEDY = (
    "Change modules before quantize_; now call restore_(model), quantize_(model), and make a new PrecisionScheduler, "
    "which takes the state_dict of the former one where the names of the layers are the same"
)


def added_modules(model: nn.Module) -> dict[str, str | None]:
    """Return the modules with weights that were added to a converted model, and the layers that quantise them.

    Returns:
        Name of the module -> name of the layer whose bits its operations have, because it calls the module; None where
        they run in float32. Modules that the user excluded from quantisation are not listed.
    """
    modules = dict(model.named_modules())
    added = [
        name
        for name, module in modules.items()
        if HOOK not in vars(module) and holds_weights(module)
    ]
    if not added:
        return {}
    roots, parts = _converted_roots(modules), layer_parts(model)
    callers: dict[str, str | None] = {}
    for name in added:
        root = _root_around(name, roots)
        if root is None or name in parts:
            continue
        mode: Any = roots[root].mode
        name_in_root = name.removeprefix(root).removeprefix(".")
        if mode.excludes(modules[name], name_in_root):
            continue
        caller = _caller(name, modules)
        callers[name] = None
        if caller is not None and caller.precision is not None:
            callers[name] = caller.name
    return callers


def _root_around(name: str, roots: Mapping[str, Interception]) -> str | None:
    """Return the name of the converted model that a module is in; None without one."""
    for root in roots:
        prefix = f"{root}." if root else ""
        if name != root and f"{name}.".startswith(prefix):
            return root
    return None


def _converted_roots(modules: Mapping[str, nn.Module]) -> dict[str, Interception]:
    """Return the names of the models that ``quantize_`` was called with, each with the interception of a module."""
    roots: dict[str, Interception] = {}
    for name, module in modules.items():
        interception = vars(module).get(HOOK)
        if (
            interception is not None
            and isinstance(interception.mode, ModelMode)
            and f".{name}".endswith(f".{interception.name}".rstrip("."))
        ):
            roots[name.removesuffix(interception.name).removesuffix(".")] = interception
    return roots


def _caller(name: str, modules: Mapping[str, nn.Module]) -> Interception | None:
    """Return the interception of the innermost module around ``name`` that has its own forward."""
    while name:
        name = name.rpartition(".")[0]
        module = modules[name]
        if HOOK in vars(module) and has_own_forward(module):
            interception: Interception = getattr(module, HOOK)
            return interception
    return None


def _traced_matmuls(model: nn.Module) -> dict[str, list[str]]:
    """Return the graphs that were traced from converted models, with their matmuls, which run in float32."""
    matmuls_by_graph = {}
    for name, module in model.named_modules():
        if not isinstance(module, fx.GraphModule) or HOOK in vars(module):
            continue
        if not any(HOOK in vars(part) for part in module.modules()):
            continue
        matmuls = [str(node.name) for node in module.graph.nodes if _is_matmul(node)]
        if matmuls:
            matmuls_by_graph[name] = matmuls
    return matmuls_by_graph


def _is_matmul(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        target = getattr(Tensor, str(node.target), None)
    is_call = node.op in ("call_function", "call_method")
    return is_call and (target in OP_HANDLERS or target in COMPOSITE_OPS)


def warn_of_added_modules(model: nn.Module) -> None:
    """Warn once of every module that was added to a converted model and runs in float32."""
    issued_warnings = _issued_warnings(model)
    in_float32 = [
        name
        for name, layer in added_modules(model).items()
        if layer is None and name not in issued_warnings
    ]
    if in_float32:
        issued_warnings.update(in_float32)
        module_list = ", ".join(
            f"{name!r} ({type(model.get_submodule(name)).__name__})"
            for name in in_float32[:5]
        )
        more = f" and {len(in_float32) - 5} more" if len(in_float32) > 5 else ""
        warnings.warn(
            f"{FallbackReason.ADDED_LATER.describe()}, and in float32: {module_list}{more}. {REMEDY}",
            QuantizationWarning,
            stacklevel=4,
        )
    for name, matmuls in _traced_matmuls(model).items():
        if f"{name} traced" not in issued_warnings:
            issued_warnings.add(f"{name} traced")
            warnings.warn(
                f"{name or 'the model'} was {FallbackReason.TRACED_LATER.describe()}, and its matmuls "
                f"{', '.join(matmuls)} run in float32: trace the model first, then call quantize_ on the GraphModule",
                QuantizationWarning,
                stacklevel=4,
            )


def _issued_warnings(model: nn.Module) -> set[str]:
    """Return the names of the warnings that a converted model has issued; an update marks further ones as issued."""
    for module in model.modules():
        mode = getattr(module, HOOK).mode if hasattr(module, HOOK) else None
        if isinstance(mode, ModelMode):
            return mode.issued_warnings
    return set()
