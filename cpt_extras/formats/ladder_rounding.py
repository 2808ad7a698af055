"""Rounding to the formats of a ladder, for every role of a layer.  Beyond the paper.

``LadderGrids`` replaces ``quantization.active_bits.AffineGrids`` in layers whose configuration has a ladder. It
determines the active format, arranges an operand so that blocks lie along the dimension over which its operation sums,
and rotates both operands of a matmul.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from cpt_core import extensions
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
from cpt_core.schedules.schedule import Formats, RoleLevels
from cpt_core.validation import check_int
from cpt_extras.formats.format import UNSCALED, Format, check_blocks
from cpt_extras.formats.format_rounding import rotate
from cpt_extras.formats.ladder import FormatLadder, MatmulLadders, as_ladder
from cpt_extras.formats.quantizer import FormatQuantizer, grid_of

# Dimension over which an operation sums, by role of the operand, where it is not the last one.
OPERATION_SUM_DIMS = {  # roles of intercepted operations, which have a prefix
    "attention_key": -2,
    "attention_value": -2,
    "conv_weight": 1,
    "conv_grad": 1,
}
LAYER_SUM_DIMS = {  # roles of a layer, by its kind
    "conv": {"input": 1, "weight": 1, "computed_weight": 1, "grad": 1},
    "attention": {"key": -2, "value": -2},
    "graph": {"weight": -2},
}
NO_LENGTHS = RoleLevels((), (), (), ())


class LadderBits(ActiveBits):
    """Active formats of a layer with ladders.

    Attributes:
        requested: quantiser of the active level of every role, None for float32.
    """

    def __init__(
        self,
        levels: RoleLevels | None,
        requested: RoleLevels,
        quantizers: Mapping[str, Quantizer],
    ) -> None:
        formats = RoleLevels(*map(_bits_or_format, requested))
        super().__init__(levels, formats, quantizers)
        self.requested = requested
        self.splits_gradient = requested.error != requested.weight_gradient
        for index, quantizer in enumerate(requested):
            if quantizer is not None and quantizer.format.kind == "affine":
                self.steps[index] = num_steps(quantizer.format.bits)


def _bits_or_format(quantizer: FormatQuantizer | None) -> Format | int | None:
    """Return the bits of a level of the paper's grids, the format of another level, None for float32."""
    if quantizer is None:
        return None
    return quantizer.format.bits if quantizer.plain else quantizer.format


class LadderGrids(AffineGrids):
    """Formats of a layer with a ladder for every role.

    Args:
        ladders: ladder of every role.
        sums: dimension over which an operation sums, by role, where it is not the last one.
        lengths: lengths of the dimensions over which operations sum, for every role: blocks must divide them.
        can_rotate: whether both operands of the layer's matmul can be rotated.
    """

    def __init__(
        self,
        ladders: RoleLevels,
        sums: Mapping[str, int],
        lengths: RoleLevels = NO_LENGTHS,
        can_rotate: bool = True,
    ) -> None:
        self.ladders = ladders
        self.sums = sums
        self.lengths = lengths
        self.can_rotate = can_rotate

    @classmethod
    def for_module(cls, ladders: RoleLevels, module: Any, kind: str) -> LadderGrids:
        """Return the grids of a layer of a kind."""
        lengths = SUM_LENGTHS[kind](module) if kind in SUM_LENGTHS else NO_LENGTHS
        sums = OPERATION_SUM_DIMS | LAYER_SUM_DIMS.get(kind, {})
        can_rotate = kind not in ("lstm", "graph")
        return cls(ladders, sums, lengths, can_rotate)

    def resolve(self, levels: RoleLevels | None, roles: Roles) -> ActiveBits:
        """Return the active formats of levels, for a layer with these quantisers; ValueError for a missing level."""
        return _ladder_bits(levels, self.ladders, roles)

    def check(self, levels: RoleLevels, layer: str) -> None:
        """Raise ValueError for formats that a layer cannot take."""
        requested = requested_formats(levels, self.ladders)
        sizes = [q.hadamard if q else 0 for q in requested]
        is_uneven = sizes[0] != sizes[1] or any(sizes[2:])
        if is_uneven or (any(sizes) and not self.can_rotate):
            size_by_role = zip(RoleLevels._fields, sizes, strict=True)
            size_list = ", ".join(f"{size} for {role}" for role, size in size_by_role)
            raise ValueError(
                f"{layer}: a Hadamard rotation belongs to both operands of the forward product of a linear layer, "
                f"convolution or attention, with one size; got {size_list}"
            )
        self._check_formats(requested, layer)

    def _check_formats(self, requested: RoleLevels, layer: str) -> None:
        """Raise ValueError for a format that does not fit the lengths of its sums."""
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
        """Return ``rounded(role, x)``, computed with the dimension of the operation's sum as the last one.

        Args:
            precision: of the layer.
            role: of ``x``.
            x: operand.
            along: dimension over which the operation sums; None looks it up by role.
            rounded: rounds an operand whose last dimension is summed.
        """
        quantizer = precision.quantizers[role]
        if not isinstance(quantizer, FormatQuantizer):
            return rounded(role, x)
        is_operand = role != "bias" and level_field(role) in ("activation", "weight")
        size = quantizer.hadamard if is_operand else 0
        if not (quantizer.format.block or size):
            return rounded(role, x)
        if along is None:
            along = self.sums.get(role.replace("weight_grad", "grad"), -1)
        arranged = x if along == -1 else x.transpose(along, -1)
        arranged = rotate(arranged, size, precision.key) if size else arranged
        result = rounded(role, arranged)
        return result if along == -1 else result.transpose(along, -1)

    def to_nearest(self) -> LadderGrids:
        """Return a copy on which no level asks for stochastic rounding."""
        grids = copy(self)
        # MatmulLadders have other prices
        ladders_type = type(self.ladders)
        grids.ladders = ladders_type(*(ladder.to_nearest() for ladder in self.ladders))
        return grids

    def priced(self, levels: RoleLevels) -> Formats:
        """Return the price class of every role: the bits of a grid, 32 for float32, or a number format."""
        return Formats(*map(_priced_format, self.ladders, levels))

    def describe(self, active: ActiveBits) -> str:
        """Return the active formats in words."""
        if not isinstance(active, LadderBits):
            return super().describe(active)
        if all(q is None or q.plain for q in active.requested):
            return super().describe(active)
        by_role = active.requested._asdict()
        return ", ".join(f"{role}={q or 'float32'}" for role, q in by_role.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the ladder of every role, for checkpoints; {} where all are the paper's."""
        paper = as_ladder(None)
        descriptions = {}
        for role, ladder in self.ladders._asdict().items():
            descriptions[role] = {} if ladder == paper else ladder.to_dict()
        return descriptions if any(descriptions.values()) else {}


def grids_for_module(ladders: RoleLevels, module: Any, kind: str) -> LadderGrids:
    """Return the grids of a layer of a kind for the ladders of a ``QuantConfig``."""
    grids_class = LadderGrids
    if isinstance(ladders, MatmulLadders):
        grids_class = extensions.load("matmuls").MatmulGrids
    return grids_class.for_module(ladders, module, kind)


def _priced_format(ladder: FormatLadder, level: int | None) -> Format | int:
    if level is None:
        return FULL_PRECISION
    format = ladder.priced(level)
    return format.bits if format.plain_affine or format.is_identity else format


def _check_format(
    role: str, quantizer: FormatQuantizer, lengths: tuple[int, ...], layer: str
) -> None:
    """Raise ValueError for a format that a role of a layer cannot take.

    Args:
        role: of the operand.
        quantizer: of the format.
        lengths: of the dimensions over which operations sum.
        layer: name of the layer.
    """
    format_block = 0 if quantizer.format.partial else quantizer.format.block
    block = max(quantizer.hadamard, format_block)
    indivisible = [n for n in lengths if block and n % block]
    if indivisible:
        raise ValueError(
            f"{layer}: blocks of {block} ({quantizer} for {role}) do not divide its {indivisible[0]} features; "
            "with partial=True the last block may be shorter, or leave the layer in float32"
        )
    if quantizer.rounding == "stochastic" and role in ("activation", "weight"):
        raise ValueError(
            f"{layer}: operands are rounded to nearest, gradients may be stochastically; got {quantizer}"
        )


# --- lengths of the sums of layers -----------------------------------------------------------------------------------


def _linear_lengths(module: Any) -> RoleLevels:
    if type(module) is not nn.Linear:
        return NO_LENGTHS
    in_lengths, out_lengths = (module.in_features,), (module.out_features,)
    return RoleLevels(in_lengths, in_lengths, out_lengths, out_lengths)


def _convolution_lengths(module: Any) -> RoleLevels:
    if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return NO_LENGTHS
    weight_lengths = (module.in_channels // module.groups,)
    out_lengths = (module.out_channels,)
    return RoleLevels((module.in_channels,), weight_lengths, out_lengths, out_lengths)


def _lstm_lengths(module: Any) -> RoleLevels:
    """Return the lengths of an LSTM: sums run over inputs of every layer and hidden states; gradients over gates."""
    if type(module) is not nn.LSTM:
        return NO_LENGTHS
    in_sizes = {module.input_size, module.hidden_size}
    if module.num_layers > 1:
        directions = 2 if module.bidirectional else 1
        in_sizes.add(module.hidden_size * directions)
    in_lengths = tuple(sorted(in_sizes))
    gate_lengths = (4 * module.hidden_size,)
    return RoleLevels(in_lengths, in_lengths, gate_lengths, gate_lengths)


def _graph_lengths(module: Any) -> RoleLevels:
    """Return the lengths of a graph layer; its activations include sums of neighbours with the output's features."""
    in_features = int(getattr(module, "_in_feats", 0) or module._in_src_feats)
    out_features = int(module._out_feats)
    return RoleLevels(
        (in_features, out_features), (in_features,), (out_features,), (out_features,)
    )


# by kind of a layer
SUM_LENGTHS: dict[str, Callable[[Any], RoleLevels]] = {
    "linear": _linear_lengths,
    "conv": _convolution_lengths,
    "lstm": _lstm_lengths,
    "graph": _graph_lengths,
}


# --- active formats of levels -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _ladder_bits(
    levels: RoleLevels | None, ladders: RoleLevels, roles: Roles
) -> LadderBits:
    requested = requested_formats(levels, ladders)
    splits_gradient = requested.error != requested.weight_gradient
    quantizers: dict[str, Quantizer] = {}
    for role, quantizer in roles:
        level = getattr(requested, level_field(role))
        if role == "bias" and level and level.format.block:
            # a bias is no operand of a matmul, so that its length is arbitrary
            level = replace(level, format=replace(level.format, partial=True))
        quantizers[role] = _shared(on_level(quantizer, level))
        if splits_gradient and level_field(role) == "error":
            weight_gradient = on_level(quantizer, requested.weight_gradient)
            quantizers[weight_gradient_role(role)] = _shared(weight_gradient)
    return LadderBits(levels, requested, quantizers)


@cache
def _shared(quantizer: Quantizer) -> Quantizer:
    """Return one object for equal quantisers, as compiled code is specialised to an object."""
    return quantizer


def requested_formats(levels: RoleLevels | None, ladders: RoleLevels) -> RoleLevels:
    """Return the quantiser of the level of every role, None for float32; ValueError for a missing level."""
    requested = []
    for level, ladder in zip(levels or ALL_FLOAT32, ladders, strict=True):
        quantizer = level and ladder.quantizer(level)
        is_float32 = quantizer is None or quantizer.format.is_identity
        requested.append(None if is_float32 else quantizer)
    return RoleLevels(*requested)


def on_level(quantizer: Quantizer, level: FormatQuantizer | None) -> Quantizer:
    """Return the active quantiser of a role at a level of a ladder.

    The paper's grids, and None for float32, do not change the quantiser of the role.
    """
    if level is None or level.plain:
        return quantizer
    granularity = quantizer.granularity
    if level.format.scale == "e4m3":
        granularity = "per_tensor"
    if level.granularity:
        granularity = level.granularity
    # other granularities have a number of ranges that depends on the tensor
    is_running = quantizer.running and granularity == "per_tensor"
    rounding = level.rounding or quantizer.rounding
    # every other format has the value 0
    zero_point = quantizer.zero_point and level.format.plain_affine
    return replace(
        level,
        granularity=granularity,
        rounding=rounding,
        running=is_running,
        zero_point=zero_point,
    )


def ladders_of(value: Any) -> RoleLevels:
    """Return the ladder of every role from the ``ladder`` argument of a ``QuantConfig``.

    Args:
        value: a ``FormatLadder``, a mapping of levels to formats, or None for the paper's, for all roles; or a mapping
            of roles to such ladders: for "activation", "weight" and "gradient", or "error" and "weight_gradient"
            instead of the last.

    Formats other than affine grids are simulated, and are constants of compiled code: each format is compiled once, and
    where a model has more of them than ``torch._dynamo.config.recompile_limit``, which is 8, torch warns and runs the
    rest uncompiled, with equal results.
    """
    if isinstance(value, RoleLevels):
        return type(value)(*map(as_ladder, value))
    is_by_role = isinstance(value, Mapping) and any(
        isinstance(key, str) for key in value
    )
    if not is_by_role:
        return RoleLevels(*[as_ladder(value)] * 4)

    ladders = dict(value)
    if "gradient" in ladders:
        if {"error", "weight_gradient"} & set(ladders):
            raise ValueError(
                "give a ladder for gradient, or for error and weight_gradient, not both"
            )
        ladders |= dict.fromkeys(("error", "weight_gradient"), ladders.pop("gradient"))
    unknown_roles = [role for role in ladders if role not in RoleLevels._fields]
    if unknown_roles:
        raise ValueError(
            f"unknown role {unknown_roles[0]!r} of a ladder; choose from {', '.join(RoleLevels._fields)}, gradient"
        )
    missing = [role for role in RoleLevels._fields if role not in ladders]
    if missing:
        raise ValueError(
            f"roles missing: {', '.join(missing)}; give each a ladder, None for the paper's"
        )
    return RoleLevels(**{role: as_ladder(ladder) for role, ladder in ladders.items()})


def ladders_of_layer(precision: Any) -> RoleLevels:
    """Return the ladder of every role of a layer; by default the paper's."""
    paper = as_ladder(None)
    return getattr(precision.grids, "ladders", RoleLevels(paper, paper, paper, paper))


# --- single tensors ---------------------------------------------------------------------------------------------------


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
    if level.hadamard:
        raise ValueError(
            f"format: a Hadamard rotation belongs to both operands of a matmul, got {level} for a single tensor"
        )
    if not level.format.is_identity:
        _check_tensor(x, level.format)
    if level.format.is_identity or x.numel() == 0:
        return x
    load_kernels()
    grid = _tensor_grid(level, quantizer)
    key = None
    if seed is not None:
        seed = check_int("seed", seed, *INT64)
        key = torch.tensor(seed, dtype=torch.int64).to(x.device)
    steps = num_steps(level.format.bits)
    steps_tensor = torch.tensor(steps, dtype=torch.float32, device=x.device)
    operators = fake_quantize.operators
    if grid.startswith(UNSCALED):
        no_range = torch.zeros_like(steps_tensor)
        return operators.round_in_range(x, no_range, no_range, steps_tensor, grid, key)
    return operators.fake_quantize(x, steps_tensor, grid, key)[0]


def _tensor_grid(level: FormatQuantizer, quantizer: Quantizer | str | None) -> str:
    """Return the grid of a single tensor: of a role's ``quantizer`` if given, else a range or no scale by format."""
    if quantizer is not None:
        return on_level(find_quantizer(quantizer), level).grid

    format = level.format
    has_range = format.kind in ("affine", "symmetric") or format.scale == "e4m3"
    default = UNSCALED
    if has_range and format.scale != "e8m0":
        default = "per_tensor"
    return grid_of(level.granularity or default, format)


def _check_tensor(x: Tensor, format: Format) -> None:
    """Raise ValueError for a format wider than the tensor's type, and for blocks that cannot be rounded."""
    dtype = torch.finfo(x.dtype)
    significand = 1 - int(math.log2(dtype.eps))
    min_exponent = math.log2(dtype.smallest_normal)
    min_significand = format.significand
    if format.kind == "symmetric":
        min_significand -= 1  # the sign
    is_floating = format.kind in ("minifloat", "log2")
    is_too_small = is_floating and not min_exponent <= format.min_exponent
    if min_significand > significand or is_too_small:
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
