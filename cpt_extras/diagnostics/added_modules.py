"""Modules that came into a model after ``quantize_``, such as a new head: which run in float32, and a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
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
    """Return modules with weights that were added to a converted model, and whose bits they have.

    Returns:
        Name of the module -> name of the layer whose bits its operations take, because it calls the module; None where
        they run in float32. Modules that the user left out are not among them.
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
    found: dict[str, str | None] = {}
    for name in added:
        root = next(
            (
                root
                for root in roots
                if name != root and f"{name}.".startswith(root and f"{root}.")
            ),
            None,
        )
        if (
            root is None
            or name in parts
            or _is_left_out(roots[root], name, root, modules)
        ):
            continue
        caller = _caller(name, modules)
        found[name] = (
            None if caller is None or caller.precision is None else caller.name
        )
    return found


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


def _is_left_out(
    interception: Interception, name: str, root: str, modules: Mapping[str, nn.Module]
) -> bool:
    """Return whether the user named a module, or what it is in, when the model was converted."""
    own_name = name.removeprefix(root).removeprefix(".")
    mode: Any = interception.mode
    inside = own_name.split(".")
    names = [".".join(inside[: depth + 1]) for depth in range(len(inside))]
    if any(fnmatchcase(place, pattern) for place in names for pattern in mode.float32):
        return True
    if mode.filter_fn is None:
        return False
    try:
        return not mode.filter_fn(modules[name], own_name)
    except LookupError:  # a table of names, which lacks the new ones
        return False


def _caller(name: str, modules: Mapping[str, nn.Module]) -> Interception | None:
    """Return the interception of the innermost module around another one that runs code of its own."""
    while name:
        name = name.rpartition(".")[0]
        around = modules[name]
        if HOOK in vars(around) and has_own_forward(around):
            interception: Interception = getattr(around, HOOK)
            return interception
    return None


def _traced_products(model: nn.Module) -> dict[str, list[str]]:
    """Return graphs that were traced from converted models, with the functions that run in float32 in them."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, fx.GraphModule) and HOOK not in vars(module):
            if any(HOOK in vars(part) for part in module.modules()):
                products = [
                    str(node.name) for node in module.graph.nodes if _is_product(node)
                ]
                if products:
                    found[name] = products
    return found


def _is_product(node: fx.Node) -> bool:
    target: Any = (
        getattr(Tensor, str(node.target), None)
        if node.op == "call_method"
        else node.target
    )
    return node.op in ("call_function", "call_method") and (
        target in OP_HANDLERS or target in COMPOSITE_OPS
    )


def warn_of_added_modules(model: nn.Module) -> None:
    """Warn once of every module that was added to a converted model and runs in float32."""
    modes = (
        getattr(module, HOOK).mode
        for module in model.modules()
        if hasattr(module, HOOK)
    )
    given = next(
        (mode.issued_warnings for mode in modes if isinstance(mode, ModelMode)),
        set[str](),
    )
    in_float32 = [
        name
        for name, layer in added_modules(model).items()
        if layer is None and name not in given
    ]
    if in_float32:
        given.update(in_float32)
        listed = ", ".join(
            f"{name!r} ({type(model.get_submodule(name)).__name__})"
            for name in in_float32[:5]
        )
        more = f" and {len(in_float32) - 5} more" if len(in_float32) > 5 else ""
        warnings.warn(
            f"{FallbackReason.ADDED_LATER.describe()}, and in float32: {listed}{more}. {REMEDY}",
            QuantizationWarning,
            stacklevel=4,
        )
    for name, products in _traced_products(model).items():
        if f"{name} traced" not in given:
            given.add(f"{name} traced")
            warnings.warn(
                f"{name or 'the model'} was {FallbackReason.TRACED_LATER.describe()}, and its matmuls "
                f"{', '.join(products)} run in float32: trace the model first, then call quantize_ on the GraphModule",
                QuantizationWarning,
                stacklevel=4,
            )
