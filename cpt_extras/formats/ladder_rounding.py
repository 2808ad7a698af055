"""Rounding to the formats of a ladder: what a level is, for every role of a layer.  Beyond the paper.

``LadderGrids`` takes the place of ``quantization.active_bits.AffineGrids`` in layers whose configuration has a ladder.
It says which format is active, arranges an operand so that blocks lie along the dimension over which its operation
sums, and rotates both operands of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.active_bits import (
    ALL_FLOAT32,
    ActiveBits,
    AffineGrids,
    Roles,
)
from cpt_core.quantization.fake_quantize import INT64, load_kernels
from cpt_core.quantization.roles import (
    Quantizer,
    find_quantizer,
    level_field,
    weight_gradient_role,
)
from cpt_core.quantization.rounding import num_steps
from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import RoleLevels
from cpt_core.validation import check_int
from cpt_extras.formats.format import UNSCALED, Format, check_blocks
from cpt_extras.formats.format_rounding import rotate
from cpt_extras.formats.ladder import FormatLadder, ladder_of
from cpt_extras.formats.quantizer import FormatQuantizer, grid_of

# Role -> dimension over which its operation sums, where it is not the last; the roles of a layer itself have no prefix.
OPERATION_SUMS = {
    "attention_key": -2,
    "attention_value": -2,
    "conv_weight": 1,
    "conv_grad": 1,
}
LAYER_SUMS = {
    "conv": {"input": 1, "weight": 1, "computed_weight": 1, "grad": 1},
    "attention": {"key": -2, "value": -2},
    "graph": {"weight": -2},
}
NO_LENGTHS = RoleLevels((), (), (), ())


class LadderBits(ActiveBits):
    """The active formats of a layer; ``requested`` are the quantisers of the ladder's levels, None for float32."""

    def __init__(
        self,
        levels: RoleLevels | None,
        requested: RoleLevels,
        quantizers: Mapping[str, Quantizer],
    ) -> None:
        formats = RoleLevels(
            *(
                None if q is None else q.format.bits if q.plain else q.format
                for q in requested
            )
        )
        super().__init__(levels, formats, quantizers)
        self.requested = requested
        self.splits_gradient = requested.error != requested.weight_gradient
        for index, quantizer in enumerate(requested):
            if quantizer is not None and quantizer.format.kind == "affine":
                self.steps[index] = num_steps(quantizer.format.bits)


class LadderGrids(AffineGrids):
    """The formats of a ladder for every role.

    Args:
        ladders: of every role.
        sums: role -> dimension over which its operation sums, where it is not the last.
        lengths: of the dimensions over which operations sum, for every role: blocks must divide them.
        can_rotate: whether both operands of the layer's product can be rotated.
    """

    def __init__(
        self,
        ladders: RoleLevels,
        sums: Mapping[str, int],
        lengths: RoleLevels = NO_LENGTHS,
        can_rotate: bool = True,
    ) -> None:
        self.ladders, self.sums, self.lengths, self.can_rotate = (
            ladders,
            sums,
            lengths,
            can_rotate,
        )

    @classmethod
    def for_module(cls, ladders: RoleLevels, module: Any, kind: str) -> LadderGrids:
        """Return the grids of a layer of a kind."""
        lengths, can_rotate = NO_LENGTHS, kind not in ("lstm", "graph")
        if kind in LENGTHS:
            lengths = LENGTHS[kind](module)
        return cls(
            ladders, OPERATION_SUMS | LAYER_SUMS.get(kind, {}), lengths, can_rotate
        )

    def resolve(self, levels: RoleLevels | None, roles: Roles) -> ActiveBits:
        """Return what levels mean in a layer with these quantisers; ValueError for a hole in a ladder."""
        return _ladder_bits(levels, self.ladders, roles)

    def check(self, levels: RoleLevels, layer: str) -> None:
        """Raise ValueError for formats that a layer cannot take."""
        requested = requested_formats(levels, self.ladders)
        sizes = [q.hadamard if q else 0 for q in requested]
        if (
            sizes[0] != sizes[1]
            or any(sizes[2:])
            or (any(sizes) and not self.can_rotate)
        ):
            raise ValueError(
                f"{layer}: a Hadamard rotation belongs to both operands of the forward product of a linear layer, "
                "convolution or attention, with one size; got "
                + ", ".join(
                    f"{size} for {role}"
                    for role, size in zip(RoleLevels._fields, sizes, strict=True)
                )
            )
        for role, quantizer, lengths in zip(
            RoleLevels._fields, requested, self.lengths, strict=True
        ):
            if quantizer is not None:
                _check_format(role, quantizer, lengths, layer)

    def apply(
        self,
        precision: Any,
        role: str,
        x: Tensor,
        along: int | None,
        rounded: Callable[..., Tensor],
    ) -> Tensor:
        """Return ``rounded(role, x)``, with the dimension over which the operation sums put last for blocks."""
        quantizer = precision.quantizers[role]
        if not isinstance(quantizer, FormatQuantizer):
            return rounded(role, x)
        size = (
            quantizer.hadamard
            if role != "bias" and level_field(role) in ("activation", "weight")
            else 0
        )
        if not (quantizer.format.block or size):
            return rounded(role, x)
        if along is None:
            along = self.sums.get(role.replace("weight_grad", "grad"), -1)
        arranged = x if along == -1 else x.transpose(along, -1)
        arranged = rotate(arranged, size, precision.key) if size else arranged
        result = rounded(role, arranged)
        return result if along == -1 else result.transpose(along, -1)

    def priced(self, levels: RoleLevels) -> RoleLevels:
        """Return what every role is priced as: the bits of a grid, 32 for float32, or a number format."""
        return RoleLevels(
            *(
                _priced_format(ladder, level)
                for ladder, level in zip(self.ladders, levels, strict=True)
            )
        )

    def describe(self, active: ActiveBits) -> str:
        """Return the active formats in words."""
        if not isinstance(active, LadderBits) or all(
            q is None or q.plain for q in active.requested
        ):
            return super().describe(active)
        return ", ".join(
            f"{role}={q or 'float32'}" for role, q in active.requested._asdict().items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the ladders of every role, for checkpoints; {} for the paper's."""
        paper = ladder_of(None)
        ladders = {
            role: {} if x == paper else x.to_dict()
            for role, x in self.ladders._asdict().items()
        }
        return ladders if any(ladders.values()) else {}


def _priced_format(ladder: FormatLadder, level: int | None) -> Format | int:
    if level is None:
        return FULL_PRECISION
    format = ladder.priced(level)
    return format.bits if format.plain_affine or format.is_identity else format


def _check_format(
    role: str, quantizer: FormatQuantizer, lengths: tuple[int, ...], layer: str
) -> None:
    block = max(
        quantizer.hadamard, 0 if quantizer.format.partial else quantizer.format.block
    )
    if uneven := [n for n in lengths if block and n % block]:
        raise ValueError(
            f"{layer}: blocks of {block} ({quantizer} for {role}) do not divide its {uneven[0]} features; "
            "with partial=True the last block may be shorter, or leave the layer in float32"
        )
    if quantizer.rounding == "stochastic" and role in ("activation", "weight"):
        raise ValueError(
            f"{layer}: operands are rounded to nearest, gradients may be stochastically; got {quantizer}"
        )


# --- what the lengths of layers are -----------------------------------------------------------------------------------


def _linear_lengths(module: Any) -> RoleLevels:
    if type(module) is not nn.Linear:
        return NO_LENGTHS
    inside, out = (module.in_features,), (module.out_features,)
    return RoleLevels(inside, inside, out, out)


def _convolution_lengths(module: Any) -> RoleLevels:
    if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return NO_LENGTHS
    out = (module.out_channels,)
    return RoleLevels(
        (module.in_channels,), (module.in_channels // module.groups,), out, out
    )


def _lstm_lengths(module: Any) -> RoleLevels:
    """Return inputs of every layer and hidden states; gates."""
    if type(module) is not nn.LSTM:
        return NO_LENGTHS
    deeper = (
        {module.hidden_size * (1 + module.bidirectional)}
        if module.num_layers > 1
        else set()
    )
    inside = tuple(sorted({module.input_size, module.hidden_size} | deeper))
    return RoleLevels(
        inside, inside, (4 * module.hidden_size,), (4 * module.hidden_size,)
    )


def _graph_lengths(module: Any) -> RoleLevels:
    """Return features; what is added to the bias has those of the output."""
    inside, out = (
        int(getattr(module, "_in_feats", 0) or module._in_src_feats),
        int(module._out_feats),
    )
    return RoleLevels((inside, out), (inside,), (out,), (out,))


LENGTHS: dict[str, Callable[[Any], RoleLevels]] = {
    "linear": _linear_lengths,
    "conv": _convolution_lengths,
    "lstm": _lstm_lengths,
    "graph": _graph_lengths,
}


# --- what levels mean -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _ladder_bits(
    levels: RoleLevels | None, ladders: RoleLevels, roles: Roles
) -> LadderBits:
    requested = requested_formats(levels, ladders)
    splits = requested.error != requested.weight_gradient
    quantizers: dict[str, Quantizer] = {}
    for role, quantizer in roles:
        level = getattr(requested, level_field(role))
        if (
            role == "bias" and level and level.format.block
        ):  # a bias is no operand of a product
            level = replace(level, format=replace(level.format, partial=True))
        quantizers[role] = _shared(on_level(quantizer, level))
        if splits and level_field(role) == "error":
            quantizers[weight_gradient_role(role)] = _shared(
                on_level(quantizer, requested.weight_gradient)
            )
    return LadderBits(levels, requested, quantizers)


@cache
def _shared(quantizer: Quantizer) -> Quantizer:
    """Return the first quantiser of all that are equal: code that was compiled for it serves it alone."""
    return quantizer


def requested_formats(levels: RoleLevels | None, ladders: RoleLevels) -> RoleLevels:
    """Return the quantiser of every role's level, None for float32; ValueError for a hole in a ladder."""
    requested = (
        level and ladder.quantizer(level)
        for level, ladder in zip(levels or ALL_FLOAT32, ladders, strict=True)
    )
    return RoleLevels(
        *(None if q is None or q.format.is_identity else q for q in requested)
    )


def on_level(quantizer: Quantizer, level: FormatQuantizer | None) -> Quantizer:
    """Return the active quantiser of a role at a level of a ladder; the paper's grids, and None, leave it as it is."""
    if level is None or level.plain:
        return quantizer
    granularity = level.granularity or (
        "per_tensor" if level.format.scale == "e4m3" else quantizer.granularity
    )
    is_running = (
        quantizer.running and granularity == "per_tensor"
    )  # others have as many ranges as the tensor at hand
    rounding = level.rounding or quantizer.rounding
    zero_point = (
        quantizer.zero_point and level.format.plain_affine
    )  # every other format has 0
    return replace(
        level,
        granularity=granularity,
        rounding=rounding,
        running=is_running,
        zero_point=zero_point,
    )


def ladders_of(given: Any) -> RoleLevels:
    """Return the ladder of every role, from what a ``QuantConfig`` takes.

    Args:
        given: a ``FormatLadder``, level -> format, or None for the paper's, for all roles; or role -> such a ladder for
            the roles "activation", "weight" and "gradient", or instead of that "error" and "weight_gradient".

    Formats other than affine grids are simulated, and are constants of compiled code: each that comes is compiled once,
    and where a model has more of them than ``torch._dynamo.config.recompile_limit``, which is 8, torch warns and runs
    the rest uncompiled, to the same numbers.
    """
    if isinstance(given, RoleLevels):
        return RoleLevels(*map(ladder_of, given))
    if not isinstance(given, Mapping) or not any(isinstance(key, str) for key in given):
        return RoleLevels(*[ladder_of(given)] * 4)
    ladders = dict(given)
    if "gradient" in ladders:
        if {"error", "weight_gradient"} & set(ladders):
            raise ValueError(
                "give a ladder for gradient, or for error and weight_gradient, not both"
            )
        ladders |= dict.fromkeys(("error", "weight_gradient"), ladders.pop("gradient"))
    if odd := [role for role in ladders if role not in RoleLevels._fields]:
        raise ValueError(
            f"unknown role {odd[0]!r} of a ladder; choose from {', '.join(RoleLevels._fields)}, gradient"
        )
    if missing := [role for role in RoleLevels._fields if role not in ladders]:
        raise ValueError(
            f"roles missing: {', '.join(missing)}; give each a ladder, None for the paper's"
        )
    return RoleLevels(**{role: ladder_of(ladder) for role, ladder in ladders.items()})


def ladders_of_layer(precision: Any) -> RoleLevels:
    """Return the ladder of every role of a layer; the paper's where it has no others."""
    paper = ladder_of(None)
    return getattr(precision.grids, "ladders", RoleLevels(paper, paper, paper, paper))


# --- one tensor -------------------------------------------------------------------------------------------------------


def quantize_to_format(
    x: Tensor,
    format: Format | FormatQuantizer | str,
    quantizer: Quantizer | str | None,
    seed: int | None,
) -> Tensor:
    """Quantise a tensor to a number format on its own range, see ``tensor_rounding.quantize``."""
    level = FormatQuantizer.of(format)
    if (level.rounding == "stochastic") != (seed is not None):
        raise ValueError(
            f"stochastic rounding needs a seed, and nothing else takes one; got seed={seed!r} for format {level}"
        )
    if not level.format.is_identity:
        _check_tensor(x, level.format)
    if level.format.is_identity or x.numel() == 0:
        return x
    load_kernels()
    if quantizer is not None:
        grid = on_level(find_quantizer(quantizer), level).grid
    else:
        is_scaled = (
            level.format.kind in ("affine", "symmetric") or level.format.scale == "e4m3"
        )
        default = (
            "per_tensor" if is_scaled and level.format.scale != "e8m0" else UNSCALED
        )
        grid = grid_of(level.granularity or default, level.format)
    key = None
    if seed is not None:
        key = torch.tensor(check_int("seed", seed, *INT64), dtype=torch.int64).to(
            x.device
        )
    steps = torch.tensor(
        num_steps(level.format.bits), dtype=torch.float32, device=x.device
    )
    if grid.startswith(UNSCALED):
        none = torch.zeros_like(steps)
        return fake_quantize.operators.round_in_range(x, none, none, steps, grid, key)
    return fake_quantize.operators.fake_quantize(x, steps, grid, key)[0]


def _check_tensor(x: Tensor, format: Format) -> None:
    """Raise ValueError for a format wider than the tensor's type, and for blocks that cannot be rounded."""
    kind = torch.finfo(x.dtype)
    significand = 1 - int(math.log2(kind.eps))
    exponent = math.log2(kind.smallest_normal)
    needed = {"symmetric": format.bits - 1, "affine": format.bits}.get(
        format.kind, format.significand
    )
    is_floating = format.kind in ("minifloat", "log2")
    if needed > significand or (is_floating and not exponent <= format.least_exponent):
        raise ValueError(
            f"format {format} is wider than the tensor's type, {x.dtype}; convert it with .float() first"
        )
    check_blocks(x.shape, format)
    if format.block and not torch.compiler.is_compiling() and not x.is_meta:
        is_finite = x.isfinite()
        if not bool(is_finite.all()):
            place = tuple((~is_finite).nonzero()[0].tolist())
            raise ValueError(
                f"a block of {format} cannot hold {x[place].item()}, which stands at {place}"
            )
