"""State of a layer in a forward pass, for computations of its backward pass that ask the layer again.

A layer may have other bits, or be in another mode, when ``backward()`` runs: a scheduler has gone on, or a block of
``precision`` is over. ``ForwardState.of(precision)`` notes what decided on the forward pass, and ``in_state`` lets the
layer have it again for the time of a ``with`` block. Tensors are exchanged and not filled, since other passes hold
them.
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

NUM_STEPS = (
    "num_steps",
    "weight_num_steps",
    "grad_num_steps",
    "weight_grad_num_steps",
)
OTHERS = (
    "active_bits",
    "training",
    "calibrated",
    "recomputes",
    "int8_operands",
    "int8_gradient",
)


class ForwardState(NamedTuple):
    """What decides on the forward pass of a layer.

    Attributes:
        now: the active bits.
        training: whether the layer is in training.
        calibrated: whether its running ranges are known to be filled.
        ranges: copies of its running ranges by name; none in training, which does not read them.
        fixed: whether the layer is in a ``precision`` block.
    """

    active_bits: ActiveBits
    training: bool
    calibrated: bool
    ranges: dict[str, Tensor]
    is_fixed: bool

    @classmethod
    def of(cls, precision: LayerPrecision, evaluates: bool = True) -> ForwardState:
        """Note the state of a layer; ``evaluates``: whether running ranges are read."""
        ranges = (
            {}
            if precision.training or not evaluates
            else {name: x.clone() for name, x in precision.ranges().items()}
        )
        return cls(
            precision.active_bits,
            precision.training,
            precision.calibrated,
            ranges,
            precision.is_fixed,
        )

    def differs(self, precision: LayerPrecision) -> bool:
        """Return whether a layer may be in another state now."""
        return (
            self.active_bits is not precision.active_bits
            or self.training != precision.training
            or bool(self.ranges)
        )

    @torch.inference_mode(False)
    def attributes(self, precision: LayerPrecision) -> dict[str, Any]:
        """Return the attributes of a layer in this state, but those that follow from its execution."""
        levels = {
            name: torch.zeros_like(getattr(precision, name)) for name in NUM_STEPS
        }
        for tensor, steps in zip(levels.values(), self.active_bits.steps, strict=True):
            if steps is not None:
                fill_steps(tensor, steps)
        ranges = {
            name: x.to(precision.num_steps.device) for name, x in self.ranges.items()
        }
        mode = {"training": self.training, "calibrated": self.calibrated}
        return {
            "active_bits": self.active_bits,
            "recomputes": True,
            **mode,
            **levels,
            **ranges,
        }


@contextmanager
def in_state(states: Mapping[LayerPrecision, ForwardState]) -> Iterator[None]:
    """Let layers be in the states of a forward pass."""
    former: list[tuple[LayerPrecision, dict[str, Any]]] = []
    try:
        for precision, state in states.items():
            if not state.differs(precision):
                continue
            attributes = state.attributes(precision)
            former.append(
                (
                    precision,
                    {name: getattr(precision, name) for name in (*attributes, *OTHERS)},
                )
            )
            vars(precision).update(attributes)
            if precision.execution != "simulated":
                extensions.load("int8").note_active_bits(precision)
        yield
    finally:
        for precision, attributes in reversed(former):
            vars(precision).update(attributes)
