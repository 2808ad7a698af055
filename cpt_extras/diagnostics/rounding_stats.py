"""What rounding does to the tensors of one layer, summed up on their device; for ``record``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

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

GRADIENTS = ("error", "weight_gradient")  # what is rounded in the backward pass
# what is summed of a tensor; of the last two the least is kept
SUMS = (
    "elements",
    "squares",
    "errors",
    "clipped",
    "nonzero",
    "underflow",
    "used",
    "available",
    "low",
    "-high",
)
Key = tuple[str, str, int, int, str]  # layer, role, level, bits, grid


class RoundingStats:
    """Sums up what rounding does to the tensors of one layer; ``LayerPrecision.observe`` calls it."""

    def __init__(
        self, name: str, precision: LayerPrecision, sums: dict[Key, list[Tensor]]
    ) -> None:
        self.name, self.precision, self.sums = name, precision, sums

    @torch.no_grad()
    def __call__(self, role: str, x: Tensor, rows: Sequence[int] = ()) -> None:
        """Round ``x`` as its role wants; ``rows``: of parts with ranges of their own, the steps of an LSTM."""
        if x.numel() == 0 or not _has_numbers(x):
            return
        p, place = self.precision, level_field(role)
        quantizer, gradient = p.quantizers[role], place in GRADIENTS
        format = getattr(p.active_bits.formats, place)
        if format is None:  # also behind the block that set the precision of a gradient
            return
        if isinstance(format, int):  # the paper's grids have bits alone
            format = Format.affine(format)
        level = getattr(p.active_levels, place)
        levels = p.num_steps_for(role)
        if gradient:
            levels = p.grad_num_steps if place == "error" else p.weight_grad_num_steps
        key = p.noise_key if gradient and quantizer.rounding == "stochastic" else None
        parts, grid = [x.detach()], quantizer.grid
        if rows and quantizer.granularity == "per_tensor":
            if len(set(rows)) == 1:  # a part is as a channel
                parts = [parts[0].unflatten(0, (len(rows), -1))]
                grid = replace(quantizer, granularity="per_channel", running=False).grid
            else:
                parts = list(parts[0].split(list(rows)))
        of_key = self.sums.setdefault(
            (self.name, role, level, format.bits, quantizer.grid), []
        )
        of_key += [rounding_stats(part, levels, grid, key, format) for part in parts]

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A copy of a layer is not recorded, and neither is one that was stored."""
        return type(None), ()


def rounding_stats(
    x: Tensor, levels: Tensor, grid: str, key: Tensor | None, format: Format
) -> Tensor:
    """Round ``x`` on its own ranges; return what ``SUMS`` names, float64."""
    rounded, low, width = fake_quantize(x, levels, grid, key)
    high = low + width
    if (
        parse_grid(grid)[1] is None and format.bits <= CODE_BITS
    ):  # codes are counted ten times as fast
        if has_zero_point(grid):  # what is on the grid has its code
            codes = operators.active.encode(
                rounded, *shift_to_zero(low, width, levels), levels, None, True
            )
        else:
            codes = operators.active.encode(
                x, low, width, levels, key, clips(grid, key is not None)
            )
        used = _distinct(codes, low)
    elif format.block:  # of every block
        rest = -x.shape[-1] % format.block
        blocks = torch.cat(
            [rounded, rounded[..., -1:].expand(*x.shape[:-1], rest)], -1
        ).reshape(-1, format.block)
        used = _distinct(blocks, blocks[:, :1])
    else:
        used = _distinct(rounded, low)
    found = (
        x.new_tensor(x.numel(), dtype=torch.float64),
        torch.linalg.vector_norm(x, dtype=torch.float64).square(),
        torch.linalg.vector_norm(rounded - x, dtype=torch.float64).square(),
        _clipped(x, low, high, format),
        torch.count_nonzero(x),
        torch.count_nonzero((rounded == 0) & (x != 0)),
        used.sum(),
        x.new_tensor(float(used.numel() * _values(format)), dtype=torch.float64),
        low.min(),
        -high.max(),
    )
    return torch.stack([v.double() for v in found])


def _clipped(x: Tensor, low: Tensor, high: Tensor, format: Format) -> Tensor:
    """Return how many elements lie outside their range; NaN of blocks, which have ends of their own."""
    if format.block:
        return x.new_tensor(math.nan)
    if format.kind != "affine":
        high = torch.maximum(-low, high)
        low = -high
    slack = 1e-6 * torch.maximum(
        low.abs(), high.abs()
    )  # the ends themselves are rounded
    return torch.count_nonzero((x < low - slack) | (x > high + slack))


@lru_cache
def _values(format: Format) -> int:
    return (
        2**format.bits
        if format.kind == "affine" or format.bits > 16
        else len(format.values())
    )


def _distinct(rounded: Tensor, low: Tensor) -> Tensor:
    """Return how many distinct values or codes there are on every range, (ranges,); ``low`` as it is broadcast."""
    sizes = (1,) * (rounded.dim() - low.dim()) + tuple(low.shape)
    own = [d for d, size in enumerate(sizes) if size > 1]
    ranges = math.prod(rounded.shape[d] for d in own)
    of_ranges = rounded.movedim(own, list(range(len(own)))).reshape(ranges, -1)
    if rounded.dtype == torch.int8:
        found = torch.zeros(ranges, 256, dtype=torch.bool, device=rounded.device)
        return found.scatter_(1, of_ranges.long() + 128, True).sum(-1)
    ordered = of_ranges.sort(-1).values
    return (ordered[:, 1:] != ordered[:, :-1]).sum(-1) + 1


def _has_numbers(x: Tensor) -> bool:
    """Whether a tensor holds numbers now: no tracer, simulation or recording of kernels looks at them."""
    if type(x) not in (Tensor, nn.Parameter) or x.is_meta:
        return False
    return not (
        is_in_torch_dispatch_mode()
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )
