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

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from cpt_core.checks import library
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels.operators import linear
from cpt_core.quantization.precision import HALF, LayerPrecision
from cpt_core.schedules.schedule import Levels

if TYPE_CHECKING:
    from cpt_core.quantization.convert import QuantConfig

PASSES = ("forward", "error", "weight")  # y = x w;  dx = dy w;  dw = x dy
ONE_RANGE = ("per_tensor", "per_sample_mean")  # grids with one range for a whole tensor
ON_CODES = {  # products on codes -> their place in a room of their own, opened when a layer is asked for them
    "linear": "layers:linear_on_codes",
    "conv2d": "layers:conv2d_on_codes",
    "matmul": "layers:product_on_codes",
    "lstm": "lstm:cell_on_codes",
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
        precision.execution, precision.splits, precision.sums = config.execution, cls.SPLITS, cls.SUMS
        precision.lengths = cls.lengths(module)
        precision.ladders = config.ladder  # type: ignore[assignment]  # Levels since the configuration was made
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


def in_float32(precision: LayerPrecision, x: Tensor, products: Callable[..., Any], *inputs: Any) -> Any:
    """Return ``products(*inputs)``, computed in float32 where a plain layer would answer ``x`` in half precision.

    That is under autocast, or in a model of that type, where bfloat16 would leave 17 of the 256 values of an 8-bit grid
    between 10 and 11. The result is rounded to what the plain layer would return; the gradient is quantised before it
    is rounded, too. Modules around the layer do not see its products.
    """
    if seen():
        with unseen():
            return in_float32(precision, x, products, *inputs)
    kind, half = x.device.type, x.dtype if x.dtype in HALF else None
    if x.dtype == torch.float32 and not x.is_meta and torch.is_autocast_enabled(kind):
        half = torch.get_autocast_dtype(kind)
    if half is None or not precision.now.active:
        return products(*inputs)
    with torch.autocast(kind, enabled=False):
        found = products(*map(_float32, inputs))
    return tuple(y.to(half) for y in found) if isinstance(found, tuple) else found.to(half)


def _float32(value: Any) -> Any:
    if isinstance(value, tuple):  # features of sources and destinations
        return tuple(map(_float32, value))
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


class _QuantConv(QuantizedLayer):
    """A convolution with quantised input, weight (one range per output channel), bias and output gradient.

    Differs: biases are quantised (one range) wherever there are any; the authors' classification code cannot run with
        biases at all.
    """

    KIND = "conv"
    SPLITS = True
    SUMS: ClassVar = {"input": 1, "weight": 1, "grad": 1}  # over channels (and places)

    @classmethod
    def lengths(cls, module: Any) -> Levels:
        """Channels."""
        inside, out = module.in_channels, module.out_channels
        return Levels((inside,), (inside // module.groups,), (out,), (out,))

    def forward(self, x: Tensor) -> Tensor:
        """Convolve; shapes as in the module this was made from."""
        return in_float32(self.precision, x, self._convolve, x)

    def _convolve(self, x: Tensor) -> Tensor:
        alone = x.dim() == len(self.kernel_size) + 1  # type: ignore[attr-defined]
        if alone and any(q.along_sum for q in self.precision.quantizers.values()):  # they look for channels behind it
            return self._convolve(x.unsqueeze(0)).squeeze(0)
        x, weight, bias = self._operands(x, self.weight, self.bias)  # type: ignore[attr-defined]
        return self.precision.multiplied(self._conv_forward, x, weight, bias)  # type: ignore[attr-defined]


class QuantConv1d(_QuantConv, nn.Conv1d):
    """``nn.Conv1d`` with quantised operands."""

    FLOAT = nn.Conv1d


class QuantConv2d(_QuantConv, nn.Conv2d):
    """``nn.Conv2d`` with quantised operands; groups, dilation and every padding as in the original."""

    FLOAT = nn.Conv2d

    def _convolve(self, x: Tensor) -> Tensor:
        batch = x.unsqueeze(0) if self._is_image(x) else x
        if self.precision.on_codes(x) and self._takes(batch) and not self.not_on_codes():
            geometry = self.stride, self.padding, self.dilation
            y = on_codes("conv2d", self.precision, batch, self.weight, self.bias, *geometry)
            return y if batch is x else y.squeeze(0)
        return super()._convolve(x)

    def _is_image(self, x: Tensor) -> bool:
        """Whether ``x`` is (C, H, W) with the ranges of a batch of one, which those of samples or positions are not."""
        return x.dim() == 3 and all(self.precision.quantizers[r].grid == "per_tensor" for r in ("input", "grad"))

    def _takes(self, x: Tensor) -> bool:
        """Whether ``x`` is a batch that the layer can convolve; of another torch says what is wrong."""
        if x.dim() != 4 or x.shape[1] != self.in_channels or isinstance(self.padding, str):
            return False
        sizes = zip(x.shape[2:], self.padding, self.dilation, self.kernel_size, strict=True)
        return all(n + 2 * p > d * (k - 1) for n, p, d, k in sizes)

    def not_on_codes(self) -> str:
        """Return why no product of this layer has an integer form, or ""."""
        if self.groups > 1:
            return f"it has {self.groups} groups"
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return f"its padding is {self.padding if isinstance(self.padding, str) else self.padding_mode!r}"
        shared = self.precision.quantizers["input"].grid in ONE_RANGE
        return "" if shared else "its inputs have several ranges"


class QuantConv3d(_QuantConv, nn.Conv3d):
    """``nn.Conv3d`` with quantised operands."""

    FLOAT = nn.Conv3d


class QuantLinear(QuantizedLayer, nn.Linear):
    """``nn.Linear`` with quantised input, weight (one range per output row), bias and output gradient."""

    FLOAT = nn.Linear
    KIND = "linear"
    SPLITS = True

    @classmethod
    def lengths(cls, module: Any) -> Levels:
        """Features."""
        return Levels((module.in_features,), (module.in_features,), (module.out_features,), (module.out_features,))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; x (..., in_features), result (..., out_features)."""
        return in_float32(self.precision, x, self._multiply, x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self.precision.on_codes(x):
            return on_codes("linear", self.precision, x, self.weight, self.bias)
        x, weight, bias = self._operands(x, self.weight, self.bias)
        return self.precision.multiplied(linear, x, weight, bias)

    def not_on_codes(self) -> str:
        """Some product always has one."""
        return ""
