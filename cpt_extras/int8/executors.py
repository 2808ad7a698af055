"""Executors of integer execution: layers multiply 8-bit integers where that is exact.

``quantize_`` loads this module, by ``cpt_core.extensions``, for every ``execution`` but "simulated". It fills
``OP_EXECUTORS``: an executor returns the result of an operation on 8-bit integers, or None where the operation has no
integer form at the bits in effect; it is simulated then.

- "linear" and "conv2d": of an ``nn.Linear`` or ``nn.Conv2d`` by its own weight;
- "matmul": of two activations, as attention has them; for "integer" alone, as these are no faster than in float32.

"auto" is "integer" on CPUs with instructions for such matmuls and "simulated" elsewhere. "integer" runs on all devices,
on GPUs and some CPUs slower than float32: a warning says so. More than 8 bits, and float64, are simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import cpt_extras.int8.graph_layers
import cpt_extras.int8.lstm  # noqa: F401 - likewise
from cpt_core.quantization.op_interception import OP_EXECUTORS
from cpt_core.quantization.precision import LayerPrecision
from cpt_extras.int8.convolution import Geometry
from cpt_extras.int8.execution import describe_execution as describe_execution
from cpt_extras.int8.execution import note_active_bits as note_active_bits
from cpt_extras.int8.execution import runs_int8
from cpt_extras.int8.fallback import ONE_RANGE_GRIDS, grid_without_zero_point
from cpt_extras.int8.fallback import describe_int8 as describe_int8
from cpt_extras.int8.layers import conv2d_int8, linear_int8, matmul_int8

Operands = tuple[Tensor, Tensor, Tensor | None]
Roles = tuple[str, str]
Along = tuple[int | None, int | None]
OWN_WEIGHTS = ("weight", "computed_weight")  # roles of a weight of the layer itself


def _own_weight_role(precision: LayerPrecision, roles: Roles, kind: str) -> str:
    """Return the role of the weight of an operation of a layer of a kind by its own weight; "" for any other."""
    input_role, weight_role = _own_roles(precision, roles)
    is_own = (
        precision.kind == kind and input_role == "input" and weight_role in OWN_WEIGHTS
    )
    return weight_role if is_own else ""


def _own_roles(precision: LayerPrecision, roles: Roles) -> Roles:
    return precision.layer_role(roles[0]), precision.layer_role(roles[1])


def linear(
    precision: LayerPrecision,
    operands: Operands,
    roles: Roles,
    along: Along,
    options: Any,
) -> Tensor | None:
    """Compute ``F.linear`` of a linear layer on 8-bit integers."""
    weight_role = _own_weight_role(precision, roles, "linear")
    if not weight_role or not runs_int8(precision, operands[0]):
        return None
    return linear_int8(precision, *operands, weight_role=weight_role)


def conv2d(
    precision: LayerPrecision,
    operands: Operands,
    roles: Roles,
    along: Along,
    options: Any,
) -> Tensor | None:
    """Compute ``F.conv2d`` of a convolution on 8-bit integers; ``options``: its arguments behind the bias."""
    x, weight, _ = operands
    weight_role = _own_weight_role(precision, roles, "conv")
    if not weight_role or not runs_int8(precision, x):
        return None
    rest, more = options
    geometry = convolution_geometry(*rest, **more)
    has_one_range = (
        grid_without_zero_point(precision.quantizers["input"]) in ONE_RANGE_GRIDS
    )
    if geometry is None or not _has_windows(x, weight, geometry) or not has_one_range:
        return None
    return conv2d_int8(precision, *operands, *geometry, weight_role=weight_role)


def convolution_geometry(
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Geometry | None:
    """Return the geometry of a convolution that has an integer form: no groups, and padding in numbers."""
    if groups != 1 or isinstance(padding, str):
        return None
    return Geometry(_pair(stride), _pair(padding), _pair(dilation))


def _pair(value: Any) -> tuple[int, int]:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return (sizes[0], sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _has_windows(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Return whether the shapes fit; of others torch says what is wrong."""
    if x.dim() != 4 or x.shape[1] != weight.shape[1]:
        return False
    sizes = zip(
        x.shape[2:], geometry.padding, geometry.dilation, weight.shape[2:], strict=True
    )
    return all(n + 2 * p > d * (k - 1) for n, p, d, k in sizes)


def matmul(
    precision: LayerPrecision,
    operands: Operands,
    roles: Roles,
    along: Along,
    options: Any,
) -> Tensor | None:
    """Compute ``first @ second`` of two activations on 8-bit integers."""
    first, second, bias = operands
    is_plain = along == (None, None) and bias is None and roles[1] != "linear_weight"
    if (
        not is_plain
        or not first.dim() > 1 < second.dim()
        or not runs_int8(precision, first)
    ):
        return None
    if (
        first.shape[:-2] != second.shape[:-2] or first.shape[-1] != second.shape[-2]
    ):  # as those of outer products
        return None
    return matmul_int8(
        precision,
        _own_roles(precision, roles),
        precision.layer_role("attention_grad"),
        *operands[:2],
    )


Executor = Callable[[LayerPrecision, Operands, Roles, Along, Any], Tensor | None]
_executors: dict[str, Executor] = {"linear": linear, "conv2d": conv2d}
for _execution in ("integer", "auto"):
    OP_EXECUTORS.update(
        {(_execution, _name): _executor for _name, _executor in _executors.items()}
    )
OP_EXECUTORS["integer", "matmul"] = matmul
