"""The levels in force in one quantised layer: what they are on its ladders, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from cpt_core.checks import check_bits
from cpt_core.formats.format import Format
from cpt_core.formats.ladder import AFFINE, ladder_of
from cpt_core.kernels.execution import execution, kernels_on
from cpt_core.kernels.integer import MOST_BITS, multiplies_codes
from cpt_core.quantization.fake_quantize import levels_of
from cpt_core.quantization.quantizers import Quantizer
from cpt_core.quantization.running import RunningState
from cpt_core.schedules.schedule import Levels

NOTHING = Levels(None, None, None, None)


class LevelState(RunningState):
    """The levels of a ``LayerPrecision``, their formats, and the tensors that products read.

    Attributes:
        name: of the layer in the model that was converted, for messages.
        execution: see ``QuantConfig``.
        ladders: what a level is, for every role of ``Levels``.
        lengths: of the dimensions over which products sum, for every role of ``Levels``: blocks must divide them.
        splits: whether the layer can quantise its gradient for each backward product by itself, and rotate operands.
        highest: levels of the schedule that drives the layer, of every role.
        driver: the scheduler that set the levels in force, None for levels set otherwise.
        quantizers: the quantiser of every role, with the format of the level in force.

    ``in_force`` alone says what the levels are. The products read ``levels`` and the other 0-d tensors with the number
    of steps of an affine grid, which are filled from it in place, so that a change of bits recompiles nothing; other
    formats are constants of compiled code: each that comes is compiled once, and where a model has more of them than
    ``torch._dynamo.config.recompile_limit``, which is 8, torch warns and runs the rest uncompiled, to the same numbers.
    They are no buffers: what copies, averages or broadcasts the buffers of a
    model (``AveragedModel``, ``functional_call``, DDP) would change the grid behind the bits.

    A copy (``deepcopy``, pickle) has the levels that ``precision`` or ``set_levels`` gave the original, but none that a
    scheduler did: nothing would move them on.

    Arguments as those of ``LayerPrecision``.
    """

    def __init__(self, quantizers: Mapping[str, Quantizer], key: int, running_start: str) -> None:
        super().__init__(quantizers, key, running_start)
        self.name = ""
        self.execution = "simulated"
        self.ladders = Levels(AFFINE, AFFINE, AFFINE, AFFINE)
        self.splits = False
        self.lengths = Levels((), (), (), ())
        self.highest: Levels | None = None
        self.driver: Any = None
        self.given = self.quantizers
        self.of_weights = frozenset(role for role in self.given if ladder_role(role) == "weight")
        self.levels, self.weight_levels, self.grad_levels, self.weight_grad_levels = _zeros("cpu")
        self._in_force: Levels | None = None
        self._formats = NOTHING
        self._quantizers_of: dict[Levels, dict[str, Quantizer]] = {}
        # what follows from it; compiled code reads these and would be specialised to the levels themselves
        self.is_set = self.quantizes = self.quantizes_weight = self.quantizes_gradient = self.apart = False
        self.fits_codes = False, False  # whether codes are asked for and hold the bits, forward and of gradients

    @property
    def in_force(self) -> Levels | None:
        """The level of every role, None as long as nobody has set any; assign what it was to put that back."""
        return self._in_force

    @in_force.setter
    def in_force(self, value: Levels | None) -> None:
        if value == self._in_force:
            return
        formats = self.formats(value)
        self._in_force, self._formats, self.is_set = value, formats, value is not None
        self.quantizes, self.quantizes_weight, *gradients = (f is not None for f in formats)
        self.quantizes_gradient, self.apart = any(gradients), _apart(formats)
        asked = self.execution != "simulated"
        fits = [f is not None and f.plain_affine and f.bits <= MOST_BITS for f in formats]
        # None leaves the levels of gradients as they are, and a backward pass may still read them
        gradient = self.fits_codes[1] if value is None or value.error is None else asked and fits[2]
        self.fits_codes = asked and fits[0] and fits[1] and not self.apart, gradient
        if formats not in self._quantizers_of:  # the same objects again for the same formats: compiled code looks
            self._quantizers_of[formats] = self._on(formats)
        self.quantizers = self._quantizers_of[formats]
        self._fill()

    def formats(self, levels: Levels | None) -> Levels:
        """Return the format of every role at its level, None for float32; ValueError for a hole in a ladder."""
        found = []
        for level, ladder in zip(levels or NOTHING, self.ladders, strict=True):
            format = None if level is None else ladder[level]
            found.append(None if format is None or format.is_identity else format)
        return Levels(*found)

    def _on(self, formats: Levels) -> dict[str, Quantizer]:
        """Return the quantisers with the formats of their roles; the paper's grids leave them as they are."""
        found = {role: quantizer.on(getattr(formats, ladder_role(role))) for role, quantizer in self.given.items()}
        if "bias" in found and formats.weight and formats.weight.block:  # a bias is no operand of a product
            found["bias"] = self.given["bias"].on(replace(formats.weight, partial=True))
        if _apart(formats):
            gradients = [role for role in self.given if ladder_role(role) == "error"]
            found |= {weight_role(role): self.given[role].on(formats.weight_gradient) for role in gradients}
        return found

    def _fill(self) -> None:
        tensors = self.levels, self.weight_levels, self.grad_levels, self.weight_grad_levels
        for level, format, steps in zip(self.in_force or NOTHING, self._formats, tensors, strict=True):
            if level is not None and (format is None or format.kind == "affine"):
                steps.fill_(levels_of(level if format is None else format.bits))

    @property
    def bits(self) -> int | None:
        """Forward level, of activations, which is bits on the paper's ladder; None for float32, or when none is set."""
        return self.in_force.activation if self.in_force else None

    @property
    def forward_format(self) -> Format | None:
        """The format of activations; None for float32."""
        return self._formats.activation

    @property
    def formats_in_force(self) -> Levels:
        """The format of every role; None for float32."""
        return self._formats

    @property
    def q_grad(self) -> int | None:
        """The gradients' level, of the error product, likewise."""
        return self.in_force.error if self.in_force else None

    def set_bits(self, bits: int | None, q_grad: int | None) -> None:
        """Set forward and gradient levels, each 1..32 or None for float32; see ``set_levels``."""
        self.set_levels(Levels(bits, bits, q_grad, q_grad))

    def set_levels(self, levels: Levels, driver: Any = None) -> None:
        """Set the level of every role, 1..32 or None for float32; 24 and more is the identity on the paper's ladder.

        Raises:
            ValueError: for other levels, or what ``check_levels`` refuses.
        """
        self.keep_apart()
        if levels != self._in_force:
            names = ("bits", "bits of weights", "q_grad", "q_grad of weights")
            checked = [None if q is None else check_bits(name, q) for name, q in zip(names, levels, strict=True)]
            if not self.is_set:
                execution()  # here, before anything is traced
            self.check_levels(Levels(*checked))
            self.in_force = Levels(*checked)
        self.driver = driver

    def check_levels(self, levels: Levels) -> None:
        """Raise ValueError for levels that are holes of a ladder, or whose formats this layer cannot take."""
        formats = self.formats(levels)
        where = f"layer {self.name!r}" if self.name else "this layer"
        if _apart(formats) and not self.splits:
            raise ValueError(
                f"{where} quantises its output's gradient once for both backward products; it cannot have one format "
                f"for the error ({formats.error or 'float32'}) and another for the weight gradient "
                f"({formats.weight_gradient or 'float32'})"
            )
        sizes = [f.hadamard if f else 0 for f in formats]
        if sizes[0] != sizes[1] or any(sizes[2:]) or (any(sizes) and not self.splits):
            raise ValueError(
                f"{where}: a Hadamard rotation belongs to both operands of the forward product of a linear layer, "
                "convolution or attention, with one size; got "
                + ", ".join(f"{size} for {role}" for role, size in zip(Levels._fields, sizes, strict=True))
            )
        for role, format, lengths in zip(Levels._fields, formats, self.lengths, strict=True):
            if format is None:
                continue
            block = max(format.hadamard, 0 if format.partial else format.block)
            if uneven := [n for n in lengths if block and n % block]:
                raise ValueError(
                    f"{where}: blocks of {block} ({format} for {role}) do not divide its {uneven[0]} features; "
                    "with partial=True the last block may be shorter, or leave the layer in float32"
                )
            if format.rounding == "stochastic" and role in ("activation", "weight"):
                raise ValueError(
                    f"{where}: operands are rounded to nearest, gradients may be stochastically; got {format}"
                )

    def constants(self) -> tuple[Any, ...]:
        """Return what code that was captured for other levels holds as constants: it serves where this is the same."""
        plain = all(f is None or f.plain_affine for f in self._formats)
        quantizes = tuple(f is not None for f in self._formats)
        return quantizes, self.apart, self.fits_codes, plain or self._formats

    @property
    def active(self) -> bool:
        """Whether anything is quantised."""
        return self.quantizes or self.quantizes_weight or self.quantizes_gradient

    def levels_for(self, role: str) -> Tensor:
        """Return the number of steps of the affine grid of an operand's role."""
        return self.weight_levels if role in self.of_weights else self.levels

    def follow(self, x: Tensor) -> None:
        """Be where ``x`` is, also when something other than ``to`` moved the model there, such as FSDP."""
        if self.levels.device != x.device and not x.is_meta:
            self._move(x.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # follow the model to another device but stay in float32 when it is cast to half precision
        self._move(fn(self.levels.new_empty(0)).device)
        return self

    @torch.inference_mode(False)  # what is made in a forward pass is written to elsewhere
    def _move(self, device: torch.device) -> None:
        super()._move(device)
        if device != self.levels.device:
            self.levels, self.weight_levels, self.grad_levels, self.weight_grad_levels = _zeros(device)
            self._fill()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the scheduler out of a copy."""
        return {**vars(self), "driver": self.driver is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Forget levels that a scheduler set; find the kernels in the process that a stored layer comes to."""
        super().__setstate__(state)
        driven, self.driver = vars(self).get("driver"), None  # layers that older releases stored have no driver
        if driven:
            self.in_force = None
        if self.is_set:
            execution()

    def extra_repr(self) -> str:
        """Show what is in force: bits or formats, how products are executed, which kernels round."""
        if not self.is_set:
            return f"bits=not set, execution={self.execution}"
        return f"{self._described()}, execution={self._executed()}, kernels={kernels_on(self.levels.device)}"

    def _executed(self) -> str:
        """Return the execution, and where it is another than was asked for."""
        if self.execution == "simulated" or not self.active:
            return self.execution
        if not self.fits_codes[0]:
            return f"{self.execution} (simulated at these bits)"
        slow = self.execution == "auto" and not multiplies_codes(self.levels.device)
        return f"{self.execution} (simulated on this device)" if slow else self.execution

    def _described(self) -> str:
        """Return the bits or formats in force."""
        if set(self.ladders) == {AFFINE} and self.in_force == Levels(self.bits, self.bits, self.q_grad, self.q_grad):
            return f"bits={self.bits or 'float32'}, q_grad={self.q_grad or 'float32'}"
        return ", ".join(f"{role}={f or 'float32'}" for role, f in self._formats._asdict().items())


def ladder_role(role: str) -> str:
    """Return the role of ``Levels`` whose ladder tells the level of a layer's role, such as "linear_weight"."""
    if role.endswith("weight_grad"):
        return "weight_gradient"
    return {"weight": "weight", "bias": "weight", "grad": "error"}.get(role.rpartition("_")[2], "activation")


def weight_role(role: str) -> str:
    """Return the role of a gradient where it is quantised for the weight gradient alone."""
    return role.removesuffix("grad") + "weight_grad"


def ladders_of(given: Any) -> Levels:
    """Return the ladder of every role, from what a ``QuantConfig`` takes."""
    if isinstance(given, Levels):
        return Levels(*map(ladder_of, given))
    if not isinstance(given, Mapping) or not any(isinstance(key, str) for key in given):
        return Levels(*[ladder_of(given)] * 4)
    ladders = dict(given)
    if "gradient" in ladders:
        if {"error", "weight_gradient"} & set(ladders):
            raise ValueError("give a ladder for gradient, or for error and weight_gradient, not both")
        ladders |= dict.fromkeys(("error", "weight_gradient"), ladders.pop("gradient"))
    if odd := [role for role in ladders if role not in Levels._fields]:
        raise ValueError(f"unknown role {odd[0]!r} of a ladder; choose from {', '.join(Levels._fields)}, gradient")
    if missing := [role for role in Levels._fields if role not in ladders]:
        raise ValueError(f"roles missing: {', '.join(missing)}; give each a ladder, None for the paper's")
    return Levels(**{role: ladder_of(ladder) for role, ladder in ladders.items()})


def _apart(formats: Levels) -> bool:
    return bool(formats.error != formats.weight_gradient)


def _zeros(device: torch.device | str) -> list[Tensor]:
    return [torch.zeros((), dtype=torch.float32, device=device) for _ in range(4)]
