"""Quantised layers: ordinary modules of torch whose operands and output gradients are quantised.  Paper: figure 1.

A converted module keeps its parameters, its ``state_dict`` keys and its hooks; it gains one child, ``precision``,
which holds the bits, the running ranges and the noise. Make them with ``cpt_core.quantize_``.

>>> from cpt_core.quantization.convert import quantize_
>>> layer = quantize_(nn.Linear(4, 2))
>>> layer.precision.set_bits(4, q_grad=8)
>>> layer(torch.ones(3, 4)).shape
torch.Size([3, 2])
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from cpt_core import extensions
from cpt_core.checks import library
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import Quantizer
from cpt_core.schedules.schedule import Levels

if TYPE_CHECKING:
    from cpt_core.quantization.convert import QuantConfig

PASSES = ("forward", "error", "weight")  # y = x w;  dx = dy w;  dw = x dy
ONE_RANGE = ("per_tensor", "per_sample_mean")  # grids with one range for a whole tensor
ON_CODES = {  # products on codes -> their place in a room of their own, opened when a layer is asked for them
    "graph": "graph_layers:product_on_codes",
    "aggregation": "graph_layers:sum_on_codes",
}


@torch.compiler.disable
def on_codes(product: str, *operands: Any) -> Any:
    """Compute one of ``ON_CODES``; the operands are those of its function."""
    return library(f"cpt_core.codes.{ON_CODES[product]}", "")(*operands)


class Changed:
    """A module whose class ``quantize_`` has changed, to a quantised layer or to one that is left out inside others."""

    FLOAT: ClassVar[type[nn.Module]]

    def to_float(self) -> None:
        """Be again what it was, in place; only for exactly this class, see ``restore_``."""
        self.__class__ = self.FLOAT  # type: ignore[assignment]


class QuantizedLayer(Changed):
    """What converted modules have in common: conversion in place, and back."""

    KIND: ClassVar[str]  # prefix of the roles in QUANTIZERS
    PRECISION: ClassVar[type[LayerPrecision]] = LayerPrecision
    CATCHES: ClassVar[bool] = False  # it runs its own forward, whose products are caught, see ``operations``
    WHOLE: ClassVar[bool] = False  # its child modules are parts of it, never converted by themselves
    SPLITS: ClassVar[bool] = False  # gradients can differ between backward products, operands be rotated
    SUMS: ClassVar[Mapping[str, int]] = {}  # role -> dimension over which its product sums, where it is not the last
    precision: LayerPrecision

    @classmethod
    def from_float(cls, module: nn.Module, config: QuantConfig, key: int = 0) -> Self:
        """Turn ``module``, whose form this class is, into it, in place; ``key``: of its rounding noise."""
        device = next((p.device for p in module.parameters()), None)
        precision = cls.PRECISION(cls.roles(module, config), key, config.running_start).to(device)
        precision.execution, precision.splits = config.execution, cls.SPLITS
        if config.ladder is not None:
            precision.grids = extensions.load("formats").LadderGrids.for_module(config.ladder, module, cls.KIND)
        precision.train(module.training)
        module.__class__ = cls  # type: ignore[assignment]
        module.precision = precision
        return module  # type: ignore[return-value]

    @classmethod
    def roles(cls, module: nn.Module, config: QuantConfig) -> dict[str, Quantizer]:
        """Return the quantiser of every role of the layer: those of its ``KIND``, and that of biases."""
        own, given = f"{cls.KIND}_", config.quantizers.items()
        return {role.removeprefix(own): q for role, q in given if role.startswith(own) or role == "bias"}

    @classmethod
    def lengths(cls, module: nn.Module) -> Levels:
        """Return the lengths that blocks of each role have to divide, as far as the module tells them."""
        return Levels((), (), (), ())

    @classmethod
    def why_not(cls, module: nn.Module) -> str:
        """Return why a module of class ``FLOAT`` cannot be converted, or ""."""
        return ""

    @classmethod
    def check(cls, module: nn.Module) -> None:
        """Raise ValueError for a module that must not silently stay in float32, or that uses a name of layers."""
        kinds = [kind for kind in cls.__mro__ if issubclass(kind, Changed) and not issubclass(kind, nn.Module)]
        taken = {name for kind in kinds for name in (*vars(kind), *kind.__annotations__) if not name.startswith("__")}
        own = type(module).__mro__[: type(module).__mro__.index(nn.Module)] if cls.CATCHES else ()
        held = (vars(module), module._parameters, module._buffers, module._modules, *map(vars, own))
        if found := sorted(taken & set().union(*held)):
            raise ValueError(
                f"{type(module).__name__}.{found[0]} has a name that a quantised layer has for itself; rename it, or "
                "leave the module out: QuantConfig(float32=(...,))"
            )

    def not_on_codes(self) -> str:
        """Return why no product of this layer has an integer form, or ""."""
        return f"a {self.FLOAT.__name__} has no integer form"

    def to_float(self) -> None:
        """Undo ``from_float``."""
        if self.precision.driver is not None:
            self.precision.driver.release(self.precision)
        del self.precision
        super().to_float()

    def _operands(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        p = self.precision
        quantized_bias = None if bias is None else p.operand("bias", bias)
        return p.operand("input", x), p.operand("weight", weight), quantized_bias


# inside, no function of torch is shown to a mode, such as that which catches products
unseen = torch._C.DisableTorchFunction
TRACED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)  # whether compilers follow such modes


def seen() -> bool:
    """Whether a mode sees the functions of torch that are called now."""
    return (TRACED or not torch.compiler.is_compiling()) and torch._C._is_torch_function_mode_enabled()


# classes with a quantised form of their own -> that form; none of it is loaded before a model has the class
FORMS = {
    "cpt_core.graphs.layers.GraphConv": "quantization.graph_layers:QuantGraphConv",
    "cpt_core.graphs.layers.SAGEConv": "quantization.graph_layers:QuantSAGEConv",
    "dgl.nn.pytorch.conv.graphconv.GraphConv": "integrations.dgl:QuantDGLGraphConv",
    "dgl.nn.pytorch.conv.sageconv.SAGEConv": "integrations.dgl:QuantDGLSAGEConv",
}


def own_form(kind: type[nn.Module]) -> type[QuantizedLayer] | None:
    """Return the quantised form of a class, None where it has none of its own."""
    place = FORMS.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if place is None else pkgutil.resolve_name(f"cpt_core.{place}")


def module_kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or the one it had before it was converted."""
    return module.FLOAT if isinstance(module, Changed) else type(module)
