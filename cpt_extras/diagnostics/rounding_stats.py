"""Statistics of rounding errors, computed on the device of a tensor, for ``record``.

``compute_rounding_sums`` rounds one tensor and sums up its errors; a ``RoundingObserver`` does so for every tensor that
a layer rounds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import level_field
from cpt_core.quantization.rounding import clips, has_zero_point, shift_to_zero
from cpt_extras.formats.format import Format
from cpt_extras.int8.execution import CODE_BITS
from cpt_extras.kernels import operators
from cpt_extras.kernels.grids import parse_grid
from cpt_extras.kernels.operators import fake_quantize

GRADIENT_FIELDS = (
    "error",
    "weight_gradient",
)  # of tensors rounded in the backward pass
NUM_MINIMA = 2  # the last fields of RoundingSums: their minimum is taken, not their sum
MAX_ENUMERATED_BITS = 16  # formats of more bits are taken to use every code

Number = TypeVar("Number")


class StatsKey(NamedTuple):
    """Key of the sums of one layer, role and format.

    Attributes:
        layer: name of the layer.
        role: of the tensor in the layer.
        level: active level of the role on its ladder.
        bits: of an element.
        grid: granularity and format, see ``Quantizer.grid``.
    """

    layer: str
    role: str
    level: int
    bits: int
    grid: str


class RoundingSums(NamedTuple, Generic[Number]):
    """Sums over the elements of a tensor x and its rounded values q(x), as tensors or as floats.

    Attributes:
        elements: number of elements.
        squares: sum of x**2.
        squared_errors: sum of (q(x) - x)**2.
        clipped: number of elements outside their range; NaN of blocks.
        nonzero: number of elements other than 0.
        underflows: number of elements other than 0 that became 0.
        distinct_values: number of distinct values of q(x), summed over ranges.
        available_values: number of values of the format, summed over ranges.
        low: smallest low end of a range.
        negative_high: -1 times the largest high end of a range.
    """

    elements: Number
    squares: Number
    squared_errors: Number
    clipped: Number
    nonzero: Number
    underflows: Number
    distinct_values: Number
    available_values: Number
    low: Number
    negative_high: Number


class RoundingObserver:
    """Sums up the rounding errors of one layer; ``LayerPrecision.observe`` calls it with every rounded tensor."""

    def __init__(
        self,
        name: str,
        precision: LayerPrecision,
        sums: dict[StatsKey, list[Tensor]],
    ) -> None:
        self.name = name
        self.precision = precision
        self.sums = sums

    @torch.no_grad()
    def __call__(self, role: str, x: Tensor, rows: Sequence[int] = ()) -> None:
        """Add the rounding errors of ``x``.

        Args:
            role: of ``x`` in the layer.
            x: a tensor that the layer rounds.
            rows: lengths of parts with their own ranges, the steps of an LSTM.
        """
        if x.numel() == 0 or not _is_readable(x):
            return
        precision, field = self.precision, level_field(role)
        format = getattr(precision.active_bits.formats, field)
        if format is None:  # the block that set the precision of a gradient has ended
            return
        if isinstance(format, int):  # the paper's grids are given by their bits
            format = Format.affine(format)

        quantizer = precision.quantizers[role]
        is_gradient = field in GRADIENT_FIELDS
        if field == "error":
            num_steps = precision.grad_num_steps
        elif field == "weight_gradient":
            num_steps = precision.weight_grad_num_steps
        else:
            num_steps = precision.num_steps_for(role)
        is_stochastic = is_gradient and quantizer.rounding == "stochastic"
        noise_key = precision.noise_key if is_stochastic else None

        parts, grid = [x.detach()], quantizer.grid
        if rows and quantizer.granularity == "per_tensor":
            if len(set(rows)) == 1:  # parts of equal length are rounded as channels
                parts = [parts[0].unflatten(0, (len(rows), -1))]
                grid = replace(quantizer, granularity="per_channel", running=False).grid
            else:
                parts = list(parts[0].split(list(rows)))
        level = getattr(precision.active_levels, field)
        key = StatsKey(self.name, role, level, format.bits, quantizer.grid)
        self.sums.setdefault(key, []).extend(
            compute_rounding_sums(part, num_steps, grid, noise_key, format)
            for part in parts
        )

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Exclude the observer from copies and pickles of the layer."""
        return type(None), ()


def compute_rounding_sums(
    x: Tensor, num_steps: Tensor, grid: str, noise_key: Tensor | None, format: Format
) -> Tensor:
    """Round ``x`` on its own ranges; return its ``RoundingSums`` as one float64 tensor."""
    rounded, low, width = fake_quantize(x, num_steps, grid, noise_key)
    high = low + width
    is_plain_grid = parse_grid(grid)[1] is None
    if is_plain_grid and format.bits <= CODE_BITS:
        # distinct codes are counted ten times as fast as distinct values
        codes = _encode(x, rounded, low, width, num_steps, grid, noise_key)
        distinct = _count_distinct(codes, low)
    elif format.block:
        padding = -x.shape[-1] % format.block
        last = rounded[..., -1:].expand(*x.shape[:-1], padding)
        blocks = torch.cat([rounded, last], -1).reshape(-1, format.block)
        distinct = _count_distinct(blocks, blocks[:, :1])
    else:
        distinct = _count_distinct(rounded, low)

    available = float(distinct.numel() * _num_values(format))
    sums = RoundingSums(
        elements=x.new_tensor(x.numel(), dtype=torch.float64),
        squares=torch.linalg.vector_norm(x, dtype=torch.float64).square(),
        squared_errors=torch.linalg.vector_norm(
            rounded - x, dtype=torch.float64
        ).square(),
        clipped=_count_clipped(x, low, high, format),
        nonzero=torch.count_nonzero(x),
        underflows=torch.count_nonzero((rounded == 0) & (x != 0)),
        distinct_values=distinct.sum(),
        available_values=x.new_tensor(available, dtype=torch.float64),
        low=low.min(),
        negative_high=-high.max(),
    )
    return torch.stack([value.double() for value in sums])


def _encode(
    x: Tensor,
    rounded: Tensor,
    low: Tensor,
    width: Tensor,
    num_steps: Tensor,
    grid: str,
    noise_key: Tensor | None,
) -> Tensor:
    """Return the int8 codes of the rounded values of ``x``."""
    encode = operators.active.encode
    if has_zero_point(grid):  # rounded values are on the grid, and have its codes
        shifted_low, shifted_width = shift_to_zero(low, width, num_steps)
        return encode(rounded, shifted_low, shifted_width, num_steps, None, True)
    is_clipped = clips(grid, noise_key is not None)
    return encode(x, low, width, num_steps, noise_key, is_clipped)


def _count_clipped(x: Tensor, low: Tensor, high: Tensor, format: Format) -> Tensor:
    """Return the number of elements outside their range; NaN of blocks, which have ranges of their own."""
    if format.block:
        return x.new_tensor(math.nan)
    if format.kind != "affine":
        high = torch.maximum(-low, high)
        low = -high
    # the ends of the range are rounding results themselves
    slack = 1e-6 * torch.maximum(low.abs(), high.abs())
    return torch.count_nonzero((x < low - slack) | (x > high + slack))


@lru_cache
def _num_values(format: Format) -> int:
    if format.kind == "affine" or format.bits > MAX_ENUMERATED_BITS:
        return 2**format.bits
    return len(format.values())


def _count_distinct(rounded: Tensor, low: Tensor) -> Tensor:
    """Return the number of distinct values or codes on every range, (ranges,).

    Args:
        rounded: values or codes.
        low: low ends of the ranges, which broadcast to ``rounded``.
    """
    sizes = (1,) * (rounded.dim() - low.dim()) + tuple(low.shape)
    range_dims = [dim for dim, size in enumerate(sizes) if size > 1]
    num_ranges = math.prod(rounded.shape[dim] for dim in range_dims)
    first_dims = list(range(len(range_dims)))
    by_range = rounded.movedim(range_dims, first_dims).reshape(num_ranges, -1)
    if rounded.dtype == torch.int8:
        is_used = torch.zeros(num_ranges, 256, dtype=torch.bool, device=rounded.device)
        return is_used.scatter_(1, by_range.long() + 128, True).sum(-1)

    ordered = by_range.sort(-1).values
    return (ordered[:, 1:] != ordered[:, :-1]).sum(-1) + 1


def _is_readable(x: Tensor) -> bool:
    """Return whether the numbers of a tensor can be read: not in tracing, simulation or the capture of a CUDA graph."""
    if type(x) not in (Tensor, nn.Parameter) or x.is_meta:
        return False
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return not is_in_torch_dispatch_mode() and not is_captured
