"""What the models of other libraries need when they are converted: refusals, a warning, copies of graph modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import fx, nn

from cpt_core import extensions
from cpt_core.quantization.convert import precision_of
from cpt_core.quantization.op_interception import HOOK
from cpt_extras import operations
from cpt_extras.diagnostics.float32_weights import float32_weights, warn_of_float32


def load_libraries(model: nn.Module) -> None:
    """Register the operators of other libraries, and the layers of those that a model has modules of."""
    operations.register_library_operators()
    if any(type(module).__module__.partition(".")[0] == "dgl" for module in model.modules()):
        extensions.load("dgl")


def check_modules(modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for modules that would silently stay in float32, or that use a name of converted modules."""
    for name, module in modules.items():
        _check_module(name, module)


def _check_module(name: str, module: Any) -> None:
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if "Attention" in type(module).__name__ and attention not in (None, "eager", "sdpa"):
        raise ValueError(
            f"the model computes attention with {attention!r}, which cannot be quantised; load it with "
            "attn_implementation='eager' (or 'sdpa')"
        )
    if hasattr(module, "precision"):
        raise ValueError(
            f"{type(module).__name__}.precision has a name that a quantised layer has for itself; rename it, or leave "
            f"the module out: QuantConfig(float32=({name!r},))"
        )


def list_float32_modules(model: nn.Module, excluded: Collection[str]) -> str:
    """Return the modules whose weights would stay in float32 unasked, as an error goes on with them."""
    kinds = float32_weights(model, excluded)[1]
    return "".join(f"; {count} {kind}" for kind, count in kinds.items())


def after_conversion(model: nn.Module, excluded: Collection[str]) -> None:
    """Let copies of graph modules be converted, and warn of weights that stay in float32 unasked."""
    for module in model.modules():
        if isinstance(module, fx.GraphModule) and hasattr(module, HOOK):
            _graph_modules().follow_copies(module)
    warn_of_float32(model, excluded)


def before_restoration(model: nn.Module) -> None:
    """Let copies of graph modules be converted no longer, and no scheduler drive what is restored."""
    for module in list(model.modules()):
        precision = precision_of(module)
        if precision is not None and precision.driver is not None:
            extensions.load("follow").release(precision)
        if isinstance(module, fx.GraphModule):
            _graph_modules().forget_copies(module)


def _graph_modules() -> Any:
    """Return the functions for copies of graph modules; few models have any."""
    from cpt_extras.integrations import graph_modules

    return graph_modules
