"""Executors of int8 execution, which run an operation of a quantised layer in int8 where that is exact.

``quantize_`` loads this module, through ``cpt_core.extensions``, for every ``execution`` but "simulated". It fills
``OP_EXECUTORS``. An executor returns the result of an operation, or None where the operation has no int8 form at the
active bits; then it is simulated.

- "linear" and "conv2d": an ``nn.Linear`` or ``nn.Conv2d`` with its own weight;
- "matmul": the matmuls of the paper's attention; for "integer" only, as they are no faster than in float32.

"auto" is "integer" on CPUs with int8 instructions and "simulated" elsewhere. "integer" runs on all devices, and warns
where it is slower than float32, on GPUs and some CPUs. More than 8 bits, and float64, are simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import cpt_extras.int8.graph_layers
import cpt_extras.int8.lstm  # noqa: F401 - registers executors
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
OWN_WEIGHT_ROLES = ("weight", "computed_weight")


def _own_weight_role(precision: LayerPrecision, roles: Roles, kind: str) -> str:
    """Return the role of the weight if a layer of this kind multiplies its input by its own weight, else ""."""
    input_role, weight_role = _own_roles(precision, roles)
    is_own = (
        precision.kind == kind
        and input_role == "input"
        and weight_role in OWN_WEIGHT_ROLES
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
    """Compute ``F.linear`` of a linear layer in int8, or return None."""
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
    """Compute ``F.conv2d`` of a convolution in int8, or return None; ``options``: its arguments after the bias."""
    x, weight, _ = operands
    weight_role = _own_weight_role(precision, roles, "conv")
    if not weight_role or not runs_int8(precision, x):
        return None
    args, kwargs = options
    geometry = convolution_geometry(*args, **kwargs)
    has_one_range = (
        grid_without_zero_point(precision.quantizers["input"]) in ONE_RANGE_GRIDS
    )
    if geometry is None or not _has_windows(x, weight, geometry) or not has_one_range:
        return None
    return conv2d_int8(precision, *operands, *geometry, weight_role=weight_role)


def convolution_geometry(
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Geometry | None:
    """Return the geometry of a convolution; None if it has groups or a padding in words, unsupported in int8."""
    if groups != 1 or isinstance(padding, str):
        return None
    return Geometry(_pair(stride), _pair(padding), _pair(dilation))


def _pair(value: Any) -> tuple[int, int]:
    """Return an argument for height and width, which may be one number for both."""
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return sizes[0], sizes[-1]


def _has_windows(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Return whether the shapes fit, with a window at least; for others torch raises an error in simulation."""
    if x.dim() != 4 or x.shape[1] != weight.shape[1]:
        return False
    for axis in range(2):
        padded_size = x.shape[2 + axis] + 2 * geometry.padding[axis]
        reach = geometry.dilation[axis] * (weight.shape[2 + axis] - 1)
        if padded_size <= reach:
            return False
    return True


def matmul(
    precision: LayerPrecision,
    operands: Operands,
    roles: Roles,
    along: Along,
    options: Any,
) -> Tensor | None:
    """Compute ``first @ second`` of the paper's attention in int8, or return None; ``options``: ``MatmulOptions``."""
    first, second, bias = operands
    is_supported = options.is_paper_attention and bias is None
    has_matrices = first.dim() > 1 and second.dim() > 1
    if not (is_supported and has_matrices and runs_int8(precision, first)):
        return None
    # shapes that broadcast, such as those of outer products, have no int8 form
    if first.shape[:-2] != second.shape[:-2] or first.shape[-1] != second.shape[-2]:
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
