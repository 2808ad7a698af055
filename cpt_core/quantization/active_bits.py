"""Active bits of a quantised layer: the grids that follow from the levels of its roles.

``ActiveBits`` holds them, ``active_bits`` computes them once per (levels, roles) for all layers.  ``AffineGrids``
defines the meaning of a level; number formats replace it by a subclass, see ``QuantConfig(ladder=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from cpt_core.quantization.roles import Quantizer, level_field, weight_gradient_role
from cpt_core.quantization.rounding import num_steps
from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import Formats, RoleLevels

ALL_FLOAT32 = RoleLevels(None, None, None, None)
# float32 has 24 significant bits, so a grid of 24 bits or more would change nothing
MAX_GRID_BITS = 23
# (role, quantiser) of a layer
Roles = tuple[tuple[str, Quantizer], ...]


class ActiveBits:
    """Grids of a layer at given levels, immutable; ``active_bits`` creates and caches it.

    It is no dataclass, because compiled code would be specialised to every field and recompiled for every level.

    Attributes:
        levels: level of every role, as it was set; None before it is.
        formats: format of every role: bits of a uniform grid, or a number format; None for float32.
        quantizers: quantiser of every role.
        is_set: whether levels have been set.
        activation: whether activations are quantised.
        weight: whether weights are quantised.
        gradient: whether the output gradient is quantised, for dgrad or for wgrad.
        splits_gradient: whether dgrad and wgrad use output gradients quantised to different formats.
        has_quantized_roles: whether any role is quantised.
        steps: n = 2**level - 1 of every role, also at levels of 24 and more, which use no grid; None for number formats
            and for no level.
    """

    def __init__(
        self,
        levels: RoleLevels | None,
        formats: RoleLevels,
        quantizers: Mapping[str, Quantizer],
    ) -> None:
        self.levels = levels
        self.formats = formats
        self.quantizers = quantizers
        self.is_set = levels is not None
        self.activation = formats.activation is not None
        self.weight = formats.weight is not None
        self.gradient = formats.error is not None or formats.weight_gradient is not None
        self.splits_gradient = formats.error != formats.weight_gradient
        self.has_quantized_roles = self.activation or self.weight or self.gradient
        self.steps: list[float | None] = []
        for level, format in zip(levels or ALL_FLOAT32, formats, strict=True):
            bits = level if format is None else format
            self.steps.append(num_steps(bits) if isinstance(bits, int) else None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore pickled attributes, with their names of release 0.3.0 translated."""
        if "active" in state:
            state["has_quantized_roles"] = state.pop("active")
        vars(self).update(state)

    def __deepcopy__(self, memo: Any) -> ActiveBits:
        """Return the object itself, which is immutable."""
        return self


class AffineGrids:
    """Meaning of levels on the paper's grids: q is the uniform grid of q bits, 24 and more is float32.

    A subclass may change the meaning of a level, the levels that a layer supports, how an operand is rounded, and which
    operands a matmul rounds.
    """

    def resolve(self, levels: RoleLevels | None, roles: Roles) -> ActiveBits:
        """Return the active bits of a layer with these quantisers at ``levels``."""
        return active_bits(levels, roles)

    def check(self, levels: RoleLevels, layer: str) -> None:
        """Raise ValueError for levels that a layer does not support."""

    def apply(
        self,
        precision: Any,
        role: str,
        x: Tensor,
        along: int | None,
        round_operand: Callable[..., Tensor],
    ) -> Tensor:
        """Return ``round_operand(role, x)``; ``along`` is the dimension over which the operation sums."""
        return round_operand(role, x)

    def to_nearest(self) -> AffineGrids:
        """Return grids on which no level asks for stochastic rounding; roles still may."""
        return self

    def multiply(
        self,
        precision: Any,
        compute: Callable[..., Tensor],
        operands: tuple[Tensor, Tensor, Tensor | None],
        roles: tuple[str | None, str | None],
        gradient: str,
        along: tuple[int | None, int | None],
    ) -> Tensor:
        """Return ``compute`` of rounded operands, with a rounded output gradient; see ``LayerPrecision.quantized``.

        Every tensor is rounded once, for all matmuls that take it.
        """
        first, second, bias = operands
        rounded_bias = (
            None if bias is None else precision.round_operand("bias", bias, None)
        )
        if roles[0] is not None:
            role = precision.layer_role(roles[0])
            first = precision.round_operand(role, first, along[0])
        if roles[1] is not None:
            role = precision.layer_role(roles[1])
            second = precision.round_operand(role, second, along[1])
        y: Tensor = precision.matmul_with_quantized_grad(
            compute, first, second, rounded_bias, role=precision.layer_role(gradient)
        )
        return y

    def priced(self, levels: RoleLevels) -> Formats:
        """Return the format of the level of each role."""
        formats = [FULL_PRECISION if level is None else level for level in levels]
        return Formats(*formats)

    def executed(self, levels: RoleLevels) -> Formats:
        """Return the format in which each role runs: 32 at levels that are float32."""
        active_formats = self.resolve(levels, ()).formats
        priced = self.priced(levels)
        formats = []
        for active, format in zip(active_formats, priced, strict=True):
            formats.append(FULL_PRECISION if active is None else format)
        return type(priced)(*formats)

    def describe(self, active: ActiveBits) -> str:
        """Return the active bits as text, such as "bits=4, q_grad=8"."""
        levels = active.levels or ALL_FLOAT32
        has_one_forward_level = levels.activation == levels.weight
        has_one_gradient_level = levels.error == levels.weight_gradient
        if has_one_forward_level and has_one_gradient_level:
            return f"bits={levels.activation or 'float32'}, q_grad={levels.error or 'float32'}"
        return ", ".join(
            f"{role}={bits or 'float32'}" for role, bits in levels._asdict().items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a description for checkpoints, {} for the paper's grids."""
        return {}


AFFINE_GRIDS = AffineGrids()


@lru_cache(maxsize=4096)
def active_bits(levels: RoleLevels | None, roles: Roles) -> ActiveBits:
    """Return the active bits of ``levels`` on the paper's grids."""
    grid_bits = [
        None if bits is None or bits > MAX_GRID_BITS else bits
        for bits in levels or ALL_FLOAT32
    ]
    grid_levels = RoleLevels(*grid_bits)
    quantizers = dict(roles)
    if grid_levels.error != grid_levels.weight_gradient:
        for role, quantizer in roles:
            if level_field(role) == "error":
                quantizers[weight_gradient_role(role)] = quantizer
    return ActiveBits(levels, grid_levels, quantizers)
