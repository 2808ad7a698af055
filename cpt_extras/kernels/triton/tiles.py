"""How the Triton kernels cut a strided tensor up: a matrix whose rows have a range each, in tiles.  Nothing of Triton.

Rows are the dimensions that the range keeps, columns those that it reduces. Neighbours that are one dimension to every
stride are merged, and tiles are long in the direction in which elements lie side by side.

>>> plan = plan_of((64, 32, 3, 3), (288, 9, 3, 1), (288, 9, 3, 1), range_shape((64, 32, 3, 3), "per_channel")[1], False)
>>> plan.whole.rows.sizes, plan.whole.columns.sizes, (plan.whole.R, plan.whole.C)
((64,), (288,), (2, 512))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import NamedTuple

TILE = 4096  # elements of a tile; a quarter of it for tensors of less than 2**20
FUSED = 16384  # elements of the largest tile of whole rows
PARTS = 512  # programs that look for extremes where rows are few: some for every multiprocessor of a large device
BLOCKS = 8192  # programs that round where rows are few
WIDE = (
    2**30
)  # from this offset on indices are 64-bit numbers, which take longer to divide; programs may overshoot
LINE = 32  # elements of float32 that memory hands over at once
DIVIDED = 256  # columns of a tile whose indices must be divided up, so that several rows share the work

Ints = tuple[int, ...]

# granularity -> the dimensions that its range keeps
KEPT_DIMS: dict[str, Callable[[int], range]] = {
    "per_tensor": lambda dims: range(0),
    "per_channel": lambda dims: range(1 if dims > 1 else 0),
    "per_row": lambda dims: range(dims - 1),
    "per_position": lambda dims: range(1, max(dims - 1, 1)),
}


class Side(NamedTuple):
    """The dimensions of rows or of columns, the fastest first: sizes, strides in x, y, logical order and the range."""

    sizes: Ints
    x: Ints
    y: Ints
    logical: Ints
    range: Ints

    @property
    def length(self) -> int:
        """Rows or columns in all."""
        return prod(self.sizes)


class Tiles(NamedTuple):
    """Tiles of R rows by C columns; a program takes ``loops`` of them, one after the other, of a row's ``parts``."""

    rows: Side
    columns: Side
    R: int
    C: int
    loops: int
    parts: int
    programs: int
    warps: int


class Plan(NamedTuple):
    """Tiles of whole rows where such are small enough, of the search for extremes, and of rounding."""

    whole: Tiles | None
    extremes: Tiles
    rounding: Tiles
    wide: bool


@lru_cache(maxsize=4096)
def range_shape(shape: Ints, granularity: str) -> tuple[Ints, Ints]:
    """Return the shape of a range and its strides along the dimensions of the tensor.

    Raises:
        ValueError: for a range of no elements.
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
        stride if d in kept else 0 for d, stride in enumerate(contiguous(keepdim))
    )
    return keepdim[1:] if granularity == "per_position" else keepdim, strides


@lru_cache(maxsize=4096)
def plan_of(shape: Ints, x: Ints, y: Ints, range_: Ints, noise: bool) -> Plan:
    """Plan for a tensor that is not empty, from the strides of x, of y and of its range (0 where that is shared)."""
    order = sorted(
        (d for d, size in enumerate(shape) if size > 1), key=lambda d: (y[d], -d)
    )  # fastest first
    kept, reduced = (
        [d for d in order if bool(range_[d]) is keeps] for keeps in (True, False)
    )
    along_rows = bool(kept) and kept[0] == order[0]
    limit = TILE if prod(shape) >= 2**20 else TILE // 4
    none = (0,) * len(shape)
    logical = (
        contiguous(shape) if noise else none
    )  # they would only keep dimensions apart
    rows, columns = (
        _merge(dims, shape, x, y, logical, range_) for dims in (kept, reduced)
    )
    whole = _tiles(rows, columns, along_rows, limit, 1, FUSED)
    read, beside = (
        _merge(dims, shape, x, none, none, range_) for dims in (kept, reduced)
    )
    extremes = _tiles(read, beside, along_rows, limit, PARTS)
    if not kept:  # one range: rounding may take any dimension as columns
        rows, columns = columns[1:], columns[:1]
    rounding = _tiles(rows, columns, along_rows, limit, BLOCKS)
    ends = (
        sum((size - 1) * stride for size, stride in zip(shape, s, strict=True))
        for s in (x, y, contiguous(shape))
    )
    return Plan(
        whole if whole.C >= whole.columns.length else None,
        extremes,
        rounding,
        max(ends) >= WIDE,
    )


def _merge(dims: list[int], *of: Ints) -> list[Ints]:
    """Return (size, stride, ...) of dimensions, the fastest first, joining those that are one to all strides."""
    merged: list[Ints] = []
    for d in dims:
        size, *strides = (values[d] for values in of)
        if merged and all(
            a == b * merged[-1][0] for a, b in zip(strides, merged[-1][1:], strict=True)
        ):
            merged[-1] = (merged[-1][0] * size, *merged[-1][1:])
        else:
            merged.append((size, *strides))
    return merged


def _tiles(
    row_dims: list[Ints],
    column_dims: list[Ints],
    along_rows: bool,
    limit: int,
    programs: int,
    longest: int = 0,
) -> Tiles:
    """Choose tiles of about ``limit`` elements, ``longest`` where rows are long, for about ``programs`` programs."""
    rows, columns = (
        Side(*zip(*dims or [(1, 0, 0, 0, 0)], strict=True))
        for dims in (row_dims, column_dims)
    )
    lines = min(power_of_2(rows.length), LINE) if along_rows else 1
    C = min(power_of_2(columns.length), max(1, (longest or limit) // lines))
    if len(column_dims) > 1 and rows.length > 1 and not longest:
        C = min(C, DIVIDED)
    R = max(lines, min(power_of_2(rows.length), limit // C))
    blocks, chunks = -(-rows.length // R), -(-columns.length // C)
    loops = power_of_2(
        -(-chunks // max(1, programs // blocks))
    )  # few kernels to compile
    parts = -(-chunks // loops)
    return Tiles(
        rows, columns, R, C, loops, parts, blocks * parts, min(16, max(1, R * C // 512))
    )


def contiguous(shape: Ints) -> Ints:
    """Return the strides of a tensor in row-major order."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
