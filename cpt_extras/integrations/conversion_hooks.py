"""Hooks of ``quantize_`` and ``restore_`` for models of other libraries: checks, a warning, copies of graph modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cpt_core import extensions
from cpt_core.quantization.convert import is_uninitialized, precision_of
from cpt_core.quantization.op_interception import HOOK
from cpt_extras import operations
from cpt_extras.diagnostics.float32_weights import float32_weights, warn_of_float32

# packages whose modules round their own weights, or hold integers
QUANTIZING_MODULES = (
    "torch.ao.nn.qat",
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.qat",
    "torch.ao.nn.intrinsic.quantized",
    "torchao.",
    "brevitas.",
    "bitsandbytes.",
)


def load_libraries(model: nn.Module) -> None:
    """Register operators of imported libraries, and the layers of DGL if the model contains any."""
    operations.register_library_operators()
    if any(
        type(module).__module__.partition(".")[0] == "dgl" for module in model.modules()
    ):
        extensions.load("dgl")


def check_modules(modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for modules that would silently stay in float32, or that use a name of converted modules."""
    for name, module in modules.items():
        _check_module(name, module)


def _check_module(name: str, module: Any) -> None:
    if is_uninitialized(module):
        raise ValueError(
            f"module {name!r} is a lazy {type(module).__name__} without weights: run the model once, as model(x), "
            f"before quantize_(model); or leave the module out: QuantConfig(float32=({name!r},))"
        )
    if _quantizes_by_itself(module):
        raise ValueError(
            f"module {name!r}, a {type(module).__name__} of {type(module).__module__}, quantises by itself: call "
            "quantize_ on the model as it was before that library prepared or converted it, or leave the module out: "
            f"QuantConfig(float32=({name!r},))"
        )
    for parameter_name, parameter in module._parameters.items():
        if is_traceable_wrapper_subclass(parameter):
            raise ValueError(
                f"weight {parameter_name!r} of module {name!r} is a {type(parameter).__name__}, which is no plain "
                "tensor: it may be quantised already, and cannot be rounded. Call quantize_ on the model with its "
                f"floating-point weights, or leave the module out: QuantConfig(float32=({name!r},))"
            )
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if "Attention" in type(module).__name__ and attention not in (
        None,
        "eager",
        "sdpa",
    ):
        raise ValueError(
            f"the model computes attention with {attention!r}, which cannot be quantised; load it with "
            "attn_implementation='eager' (or 'sdpa')"
        )
    if hasattr(module, "precision"):
        raise ValueError(
            f"{type(module).__name__}.precision has a name that a quantised layer has for itself; rename it, or leave "
            f"the module out: QuantConfig(float32=({name!r},))"
        )


def _quantizes_by_itself(module: nn.Module) -> bool:
    """Return whether a module, of torch or another library, rounds its own operands, or holds integers."""
    kinds = type(module).__mro__
    return any(
        k.__name__ == "FakeQuantizeBase" or k.__module__.startswith(QUANTIZING_MODULES)
        for k in kinds
    )


def list_float32_modules(model: nn.Module, excluded: Collection[str]) -> str:
    """Return a list of modules whose weights stay in float32, for the end of an error message."""
    kinds = float32_weights(model, excluded)[1]
    return "".join(f"; {count} {kind}" for kind, count in kinds.items())


def after_conversion(model: nn.Module, excluded: Collection[str]) -> None:
    """Let copies of graph modules be converted, and warn of weights that stay in float32 unasked."""
    for module in model.modules():
        if isinstance(module, fx.GraphModule) and hasattr(module, HOOK):
            _graph_modules().convert_copies(module)
    warn_of_float32(model, excluded)


def before_restoration(model: nn.Module) -> None:
    """Let copies of graph modules be converted no longer, and no scheduler drive what is restored."""
    driven = []
    for module in list(model.modules()):
        precision = precision_of(module)
        if precision is not None and precision.owning_scheduler is not None:
            driven.append(precision)
        if isinstance(module, fx.GraphModule):
            _graph_modules().forget_copies(module)
    if driven:
        extensions.load("follow").release(driven)


def _graph_modules() -> Any:
    """Return the functions for copies of graph modules; few models have any."""
    from cpt_extras.integrations import graph_modules

    return graph_modules
