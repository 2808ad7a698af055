"""Grid strings, which tell kernels what to round to, and rounding to them in plain torch.

A grid string is a granularity, then "+zero" if 0 must be one of its points, then "|" and the name of a number format if
it has one: "per_row", "per_tensor+zero", "per_row|e2m1". ``FormatQuantizer.grid`` makes them. Arguments of operators
named ``granularity`` may be such a grid.

>>> import torch
>>> x = torch.tensor([[0.1, 0.5, -6.0], [1.0, 2.0, 12.0]])
>>> fake_quantize(x, torch.tensor(15.0), "per_row|e2m1", None)[0].tolist()
[[0.0, 0.5, -6.0], [1.0, 2.0, 12.0]]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpt_core.quantization import rounding
from cpt_core.quantization.roles import ZERO_POINT

if TYPE_CHECKING:
    from cpt_extras.formats.format import Format


def parse_grid(grid: str) -> tuple[str, Format | None]:
    """Return the granularity of a grid string and its number format; None for an affine grid, defined by ``levels``."""
    if grid not in _parsed_grids:  # a dict, since compilers cannot trace lru_cache
        granularity, _, name = grid.partition("|")
        _parsed_grids[grid] = (
            granularity.removesuffix(ZERO_POINT),
            _format_named(name) if name else None,
        )
    return _parsed_grids[grid]


def is_plain(grid: str) -> bool:
    """Return whether a grid is affine, with the minimum of its range as a point: the paper's."""
    return "|" not in grid and not rounding.has_zero_point(grid)


def _format_named(name: str) -> Format:
    from cpt_extras.formats.format import Format

    return Format.of(name)


_parsed_grids: dict[str, tuple[str, Format | None]] = {}


def fake_quantize(
    x: Tensor, levels: Tensor, grid: str, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a tensor on its own range.

    Args:
        x: a tensor that is not empty.
        levels: number of steps of an affine grid, 0-d.
        grid: a grid string.
        key: noise key; None rounds to nearest.

    Returns:
        The rounded tensor, and minimum and width of its ranges.
    """
    low, width = rounding.range_of(x, grid.partition("|")[0])
    clip = rounding.clips(grid, key is not None)
    return round_in_range(x, low, width, levels, grid, key, clip), low, width


def round_in_range(
    x: Tensor,
    low: Tensor,
    width: Tensor,
    levels: Tensor,
    grid: str,
    key: Tensor | None,
    clip: bool,
    in_blocks: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Round to the grid of a given range, such as a stored one.

    A number format has its own points and always clips; MX formats and unscaled formats ignore the range.

    Args:
        x: the tensor.
        low: minimum of the range, broadcastable to x.
        width: its width.
        levels: number of steps of an affine grid, 0-d.
        grid: a grid string.
        key: noise key; None rounds to nearest.
        clip: whether to clip to the range.
        in_blocks: replacement of ``format_rounding.round_blocks`` with equal results.

    Raises:
        ValueError: if the blocks of a format do not divide a row.
    """
    granularity, format = parse_grid(grid)
    if rounding.has_zero_point(grid):  # number formats have 0 anyway
        return rounding.round_with_zero_point(x, low, width, levels, key)
    if format is None:
        return rounding.round_to_grid(x, low, width, levels, key, clip)
    from cpt_extras.formats.format_rounding import round_to_format

    return round_to_format(x, low, width, granularity, format, key, in_blocks)


def round_blocks_in_cpp(
    x: Tensor, range_scale: Tensor | None, format: Format, key: Tensor | None
) -> Tensor:
    """Round blocks by the C++ operator, unsupported formats in plain torch; see ``format_rounding.round_blocks``.

    Unsupported are formats that do not saturate, those that torch rounds itself, and those whose rounding needs
    float64, has no mantissa, or keeps infinity under a scale in e4m3.
    """
    from cpt_extras.formats.format_rounding import NATIVE_DTYPES, round_blocks

    is_native = (format.exponent, format.mantissa, format.specials) in NATIVE_DTYPES
    has_plain_sums = (
        1 <= format.mantissa <= 20 and format.max_exponent + 24 - format.mantissa <= 127
    )
    keeps_infinity = format.specials == "infinity" and range_scale is not None
    is_symmetric = format.kind == "symmetric"
    is_supported = format.saturate and (is_symmetric or has_plain_sums)
    if is_native or keeps_infinity or not is_supported:
        return round_blocks(x, range_scale, format, key)
    return torch.ops.cpt.round_blocks(
        x,
        range_scale,
        format.mantissa,
        0 if is_symmetric else format.min_exponent,
        format.max_exponent,
        format.largest,
        is_symmetric,
        key,
    )
