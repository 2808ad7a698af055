"""State of a layer in a forward pass, restored when its backward pass computes with the layer again.

When ``backward()`` runs, a scheduler may have changed the bits of a layer, or a ``precision`` block may have ended.
``ForwardState.capture(precision)`` stores the bits, the mode and the ranges of the forward pass, and ``in_state``
restores them inside a ``with`` block. Tensors are replaced and not overwritten, since other passes hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpt_core import extensions
from cpt_core.quantization.active_bits import ActiveBits
from cpt_core.quantization.fake_quantize import fill_steps
from cpt_core.quantization.precision import LayerPrecision

STEP_TENSORS = (
    "num_steps",
    "weight_num_steps",
    "grad_num_steps",
    "weight_grad_num_steps",
)
MODE_ATTRIBUTES = (
    "active_bits",
    "training",
    "filled_roles",
    "recomputes",
    "int8_operands",
    "int8_gradient",
)


class ForwardState(NamedTuple):
    """Bits, mode and ranges of a layer in a forward pass.

    Attributes:
        active_bits: bits and formats of every role.
        training: whether the layer is in training.
        filled_roles: roles whose running ranges are known to be filled.
        ranges: copies of its running ranges by name; none in training, which does not read them.
        is_fixed: whether the layer is in a ``precision`` block.
    """

    active_bits: ActiveBits
    training: bool
    filled_roles: frozenset[str]
    ranges: dict[str, Tensor]
    is_fixed: bool

    @classmethod
    def capture(cls, precision: LayerPrecision, evaluates: bool = True) -> ForwardState:
        """Return the state of a layer now; running ranges are copied only if ``evaluates``."""
        ranges = (
            {}
            if precision.training or not evaluates
            else {name: x.clone() for name, x in precision.ranges().items()}
        )
        return cls(
            precision.active_bits,
            precision.training,
            precision.filled_roles,
            ranges,
            precision.is_fixed,
        )

    def differs(self, precision: LayerPrecision) -> bool:
        """Return whether the layer may have left this state."""
        return (
            self.active_bits is not precision.active_bits
            or self.training != precision.training
            or bool(self.ranges)
        )

    @torch.inference_mode(False)
    def attributes(self, precision: LayerPrecision) -> dict[str, Any]:
        """Return the attributes that put a layer into this state, without those of its execution."""
        levels = {
            name: torch.zeros_like(getattr(precision, name)) for name in STEP_TENSORS
        }
        for tensor, steps in zip(levels.values(), self.active_bits.steps, strict=True):
            if steps is not None:
                fill_steps(tensor, steps)
        ranges = {
            name: x.to(precision.num_steps.device) for name, x in self.ranges.items()
        }
        mode = {"training": self.training, "filled_roles": self.filled_roles}
        return {
            "active_bits": self.active_bits,
            "recomputes": True,
            **mode,
            **levels,
            **ranges,
        }


@contextmanager
def in_state(states: Mapping[LayerPrecision, ForwardState]) -> Iterator[None]:
    """Put layers into the states of a forward pass inside a ``with`` block."""
    former: list[tuple[LayerPrecision, dict[str, Any]]] = []
    try:
        for precision, state in states.items():
            if not state.differs(precision):
                continue
            attributes = state.attributes(precision)
            former.append(
                (
                    precision,
                    {
                        name: getattr(precision, name)
                        for name in (*attributes, *MODE_ATTRIBUTES)
                    },
                )
            )
            vars(precision).update(attributes)
            if precision.execution != "simulated":
                extensions.load("int8").note_active_bits(precision)
        yield
    finally:
        for precision, attributes in reversed(former):
            vars(precision).update(attributes)
