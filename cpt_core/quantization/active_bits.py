"""The active bits of a quantised layer, and what follows from them: cached, and shared by all layers alike.

``AffineGrids`` says what a level of a schedule is; number formats put a subclass in its place, see
``QuantConfig(ladder=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from cpt_core.quantization.roles import Quantizer, level_field, weight_gradient_role
from cpt_core.quantization.rounding import num_steps
from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import RoleLevels

ALL_FLOAT32 = RoleLevels(None, None, None, None)
MAX_GRID_BITS = (
    23  # float32 has 24 significant bits: from there on a grid changes nothing
)
Roles = tuple[tuple[str, Quantizer], ...]  # of a layer, each with its quantiser


class ActiveBits:
    """What follows from the levels of a layer; never changed. ``active_bits`` makes and caches it.

    No dataclass: compiled code would be specialised to all of its fields, and it is to serve every level.

    Attributes:
        levels: of every role, as they were set; None before any was.
        formats: what every role is rounded to: the bits of a uniform grid, or a number format; None for float32.
        gradient: whether the output's gradient is quantised, for one of its two uses at least.
        splits_gradient: whether both uses of the gradient are quantised by themselves.
        steps: n = 2**q - 1 of the grid of every role; None where nothing reads them.
    """

    def __init__(
        self,
        levels: RoleLevels | None,
        formats: RoleLevels,
        quantizers: Mapping[str, Quantizer],
    ) -> None:
        self.levels, self.formats, self.quantizers = levels, formats, quantizers
        self.is_set = levels is not None
        self.activation, self.weight, *gradients = (f is not None for f in formats)
        self.gradient = any(gradients)
        self.splits_gradient = formats.error != formats.weight_gradient
        self.has_quantized_roles = self.activation or self.weight or self.gradient
        pairs = zip(levels or ALL_FLOAT32, formats, strict=True)
        grids = [level if format is None else format for level, format in pairs]
        self.steps = [
            num_steps(bits) if isinstance(bits, int) else None for bits in grids
        ]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore pickled attributes, also those of release 0.3.0."""
        if "active" in state:
            state["has_quantized_roles"] = state.pop("active")
        vars(self).update(state)

    def __deepcopy__(self, memo: Any) -> ActiveBits:
        """Return itself: copies share it."""
        return self


class AffineGrids:
    """The paper's grids: level q is the uniform grid of q bits, 24 and more is float32.

    A subclass may change what a level is, which levels a layer can take, and what precedes the rounding of an operand.
    """

    def resolve(self, levels: RoleLevels | None, roles: Roles) -> ActiveBits:
        """Return what levels mean in a layer with these quantisers."""
        return active_bits(levels, roles)

    def check(self, levels: RoleLevels, layer: str) -> None:
        """Raise ValueError for levels that a layer cannot take."""

    def apply(
        self,
        precision: Any,
        role: str,
        x: Tensor,
        along: int | None,
        rounded: Callable[..., Tensor],
    ) -> Tensor:
        """Return ``rounded(role, x)``; ``along`` is the dimension over which the operation sums."""
        return rounded(role, x)

    def priced(self, levels: RoleLevels) -> RoleLevels:
        """Return what every role is priced as: the bits of a grid, 32 for float32, or a number format."""
        return RoleLevels(
            *(FULL_PRECISION if level is None else level for level in levels)
        )

    def describe(self, active: ActiveBits) -> str:
        """Return the active bits in words."""
        levels = active.levels or ALL_FLOAT32
        if (
            levels.activation == levels.weight
            and levels.error == levels.weight_gradient
        ):
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
    """Return what levels mean on the paper's grids."""
    formats = RoleLevels(
        *(None if q is None or q > MAX_GRID_BITS else q for q in levels or ALL_FLOAT32)
    )
    quantizers = dict(roles)
    if formats.error != formats.weight_gradient:
        quantizers |= {
            weight_gradient_role(role): q
            for role, q in roles
            if level_field(role) == "error"
        }
    return ActiveBits(levels, formats, quantizers)
