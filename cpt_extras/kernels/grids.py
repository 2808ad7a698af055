"""Grids: what kernels are told to round to.

A grid is a granularity, "+zero" where 0 is to be on it, and for a number format "|" and its name; see
``FormatQuantizer.grid``. What kernels call granularity may be such a grid.

>>> import torch
>>> x = torch.tensor([[0.1, 0.5, -6.0], [1.0, 2.0, 12.0]])
>>> fake_quantize(x, torch.tensor(15.0), "per_row|e2m1", None)[0].tolist()
[[0.0, 0.5, -6.0], [1.0, 2.0, 12.0]]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cpt_core.quantization import rounding
from cpt_core.quantization.roles import ZERO_POINT

if TYPE_CHECKING:
    from cpt_extras.formats.format import Format


def parse_grid(grid: str) -> tuple[str, Format | None]:
    """Return the granularity of a grid, and its format; None for the affine grid that levels tell of."""
    if grid not in _parsed_grids:  # a dict: compilers do not follow a cached function
        granularity, _, name = grid.partition("|")
        _parsed_grids[grid] = (
            granularity.removesuffix(ZERO_POINT),
            _format_named(name) if name else None,
        )
    return _parsed_grids[grid]


def _format_named(name: str) -> Format:
    from cpt_extras.formats.format import Format

    return Format.of(name)


_parsed_grids: dict[str, tuple[str, Format | None]] = {}


def fake_quantize(
    x: Tensor, levels: Tensor, grid: str, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a tensor that is not empty on its own range; return it with the range, which every format shares.

    Arguments as those of ``round_in_range``.
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
) -> Tensor:
    """Round to a grid, see the module, of a given range, such as a stored one.

    Arguments as those of ``rounding.round_to_grid``. A format has its own levels and always clips; the range plays no
    part for mx and for what is not scaled.

    Raises:
        ValueError: for a row that blocks do not divide.
    """
    granularity, format = parse_grid(grid)
    if rounding.has_zero_point(grid):  # number formats have 0 anyway
        return rounding.round_with_zero_point(x, low, width, levels, key)
    if format is None:
        return rounding.round_to_grid(x, low, width, levels, key, clip)
    from cpt_extras.formats.format_rounding import round_to_format

    return round_to_format(x, low, width, granularity, format, key)
