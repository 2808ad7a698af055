"""Tiles in which the Triton kernels read a strided tensor, as a matrix whose rows have one range each.  No Triton here.

It contains ``plan_tiles``, which chooses the tiles of a tensor, and ``range_shape``, the shape of its ranges.

Rows are the dimensions that the range keeps, columns those that it reduces. Neighbouring dimensions are merged where
all strides allow it, and tiles are long in the direction in which elements lie side by side.

>>> strides = range_shape((64, 32, 3, 3), "per_channel")[1]
>>> plan = plan_tiles((64, 32, 3, 3), (288, 9, 3, 1), (288, 9, 3, 1), strides, False)
>>> plan.whole.rows.sizes, plan.whole.columns.sizes, (plan.whole.R, plan.whole.C)
((64,), (288,), (2, 512))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

TILE_ELEMENTS = 4096  # a quarter of it for tensors of less than 2**20 elements
MAX_WHOLE_ROW_TILE = 16384  # elements of the largest tile of whole rows
EXTREMES_PROGRAMS = (
    512  # programs that find extremes where rows are few: some for each multiprocessor
)
ROUNDING_PROGRAMS = 8192  # programs that round where rows are few

# From this offset on indices are 64-bit numbers, which take longer to divide. Programs may read beyond the end.
MIN_WIDE_OFFSET = 2**30
CACHE_LINE_ELEMENTS = 32  # elements of float32 that memory delivers at once
MAX_DIVIDED_COLUMNS = (
    256  # columns of a tile if their indices are divided: several rows share that work
)

Ints = tuple[int, ...]

# granularity -> function of the number of dimensions that returns those that the range keeps
KEPT_DIMS: dict[str, Callable[[int], range]] = {
    "per_tensor": lambda dims: range(0),
    "per_channel": lambda dims: range(1 if dims > 1 else 0),
    "per_row": lambda dims: range(dims - 1),
    "per_position": lambda dims: range(1, max(dims - 1, 1)),
}


class TileDims(NamedTuple):
    """Dimensions that are the rows, or the columns, of the matrix, the fastest first.

    Attributes:
        sizes: size of every dimension.
        x: strides in the tensor that is read.
        y: strides in the result.
        logical: strides in row-major order, by which rounding noise is drawn.
        range: strides in the ranges.
    """

    sizes: Ints
    x: Ints
    y: Ints
    logical: Ints
    range: Ints

    @property
    def length(self) -> int:
        """Number of rows or columns."""
        return prod(self.sizes)


class Tiles(NamedTuple):
    """Tiles of R rows by C columns, and the programs that compute them.

    Attributes:
        rows: dimensions of the rows.
        columns: dimensions of the columns.
        R: rows of a tile.
        C: columns of a tile.
        loops: tiles that a program computes, one after the other.
        parts: programs that share a row.
        programs: number of programs.
        warps: warps of a program.
    """

    rows: TileDims
    columns: TileDims
    R: int
    C: int
    loops: int
    parts: int
    programs: int
    warps: int


class Plan(NamedTuple):
    """Tiles of all kernels for one tensor.

    Attributes:
        whole: tiles of whole rows, whose range and rounding need one launch; None if rows are too long.
        extremes: tiles of the search for extremes.
        rounding: tiles of rounding.
        wide: whether offsets need 64 bits.
    """

    whole: Tiles | None
    extremes: Tiles
    rounding: Tiles
    wide: bool


@lru_cache(maxsize=4096)
def range_shape(shape: Ints, granularity: str) -> tuple[Ints, Ints]:
    """Return the shape of a range, and its strides along the dimensions of the tensor.

    Raises:
        ValueError: if the tensor is empty along a dimension that the range reduces.
    """
    kept = KEPT_DIMS[granularity](len(shape))
    if any(size == 0 for d, size in enumerate(shape) if d not in kept):
        raise ValueError(
            f"a tensor of shape {tuple(shape)} has no range {granularity}: it is empty"
        )
    if not kept and not (granularity == "per_row" and shape):
        return (), (0,) * len(shape)
    keepdim = tuple(size if d in kept else 1 for d, size in enumerate(shape))
    strides = tuple(
        stride if d in kept else 0
        for d, stride in enumerate(contiguous_strides(keepdim))
    )
    return keepdim[1:] if granularity == "per_position" else keepdim, strides


@lru_cache(maxsize=4096)
def plan_tiles(
    shape: Ints, x_strides: Ints, y_strides: Ints, range_strides: Ints, has_noise: bool
) -> Plan:
    """Return the tiles for a tensor that is not empty.

    Args:
        shape: of the tensor.
        x_strides: strides of the tensor.
        y_strides: strides of the result.
        range_strides: strides of its ranges, 0 along dimensions that share a range.
        has_noise: whether rounding draws noise, which depends on the place of an element in row-major order.
    """
    fastest_first = sorted(
        (d for d, size in enumerate(shape) if size > 1),
        key=lambda d: (y_strides[d], -d),
    )
    row_dims = [d for d in fastest_first if range_strides[d]]
    column_dims = [d for d in fastest_first if not range_strides[d]]
    along_rows = bool(row_dims) and row_dims[0] == fastest_first[0]
    tile = TILE_ELEMENTS if prod(shape) >= 2**20 else TILE_ELEMENTS // 4

    no_strides = (0,) * len(shape)
    # without noise, strides in row-major order would only keep dimensions from being merged
    logical = contiguous_strides(shape) if has_noise else no_strides
    strides = x_strides, y_strides, logical, range_strides
    rows = _merge(row_dims, shape, strides)
    columns = _merge(column_dims, shape, strides)
    whole = _choose_tiles(rows, columns, along_rows, tile, 1, MAX_WHOLE_ROW_TILE)

    read_strides = x_strides, no_strides, no_strides, range_strides
    read_rows = _merge(row_dims, shape, read_strides)
    read_columns = _merge(column_dims, shape, read_strides)
    extremes = _choose_tiles(
        read_rows, read_columns, along_rows, tile, EXTREMES_PROGRAMS
    )

    if not row_dims:  # one range: rounding may take any dimension as columns
        rows, columns = columns[1:], columns[:1]
    rounding = _choose_tiles(rows, columns, along_rows, tile, ROUNDING_PROGRAMS)

    last_offsets = [
        _last_offset(shape, s)
        for s in (x_strides, y_strides, contiguous_strides(shape))
    ]
    fits_whole_rows = whole.C >= whole.columns.length
    return Plan(
        whole if fits_whole_rows else None,
        extremes,
        rounding,
        max(last_offsets) >= MIN_WIDE_OFFSET,
    )


def _last_offset(shape: Ints, strides: Ints) -> int:
    """Return the offset of the last element of a tensor."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _merge(dims: list[int], shape: Ints, all_strides: Sequence[Ints]) -> list[Ints]:
    """Return (size, stride, stride, ...) of dimensions, the fastest first, merged where all strides allow it."""
    merged: list[Ints] = []
    for d in dims:
        size, strides = shape[d], [values[d] for values in all_strides]
        if merged and _continues(merged[-1], strides):
            merged[-1] = (merged[-1][0] * size, *merged[-1][1:])
        else:
            merged.append((size, *strides))
    return merged


def _continues(faster: Ints, strides: Sequence[int]) -> bool:
    """Return whether a dimension continues the next faster one, (size, *strides), in all tensors."""
    size, *faster_strides = faster
    return all(a == b * size for a, b in zip(strides, faster_strides, strict=True))


def _choose_tiles(
    row_dims: list[Ints],
    column_dims: list[Ints],
    along_rows: bool,
    tile: int,
    programs: int,
    max_whole_row_tile: int = 0,
) -> Tiles:
    """Choose the size of tiles, and how many programs share a row.

    Args:
        row_dims: dimensions of the rows, as ``_merge`` returns them.
        column_dims: dimensions of the columns.
        along_rows: whether neighbouring elements belong to different rows.
        tile: about as many elements has a tile.
        programs: at least about as many programs run.
        max_whole_row_tile: largest number of elements of a tile of whole rows; 0 if rows may be divided.
    """
    no_dims = [(1, 0, 0, 0, 0)]
    rows = TileDims(*zip(*row_dims or no_dims, strict=True))
    columns = TileDims(*zip(*column_dims or no_dims, strict=True))

    min_rows = 1
    if along_rows:
        min_rows = min(next_power_of_2(rows.length), CACHE_LINE_ELEMENTS)
    max_columns = max(1, (max_whole_row_tile or tile) // min_rows)
    C = min(next_power_of_2(columns.length), max_columns)
    if len(column_dims) > 1 and rows.length > 1 and not max_whole_row_tile:
        C = min(C, MAX_DIVIDED_COLUMNS)
    R = max(min_rows, min(next_power_of_2(rows.length), tile // C))

    row_blocks = -(-rows.length // R)
    column_blocks = -(-columns.length // C)
    programs_of_row = max(1, programs // row_blocks)
    # a power of two, so that few kernels are compiled
    loops = next_power_of_2(-(-column_blocks // programs_of_row))
    parts = -(-column_blocks // loops)
    warps = min(16, max(1, R * C // 512))
    return Tiles(rows, columns, R, C, loops, parts, row_blocks * parts, warps)


def contiguous_strides(shape: Ints) -> Ints:
    """Return the strides of a tensor in row-major order."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
