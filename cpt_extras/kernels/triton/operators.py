"""Triton kernels of the rounding operators, for CUDA tensors, with the bits of the plain backend.

A tensor of any layout is read as a matrix in tiles (``tiles.py``): a row holds the elements that share a range.

    rows fit in a tile   1 launch     range and rounding of a tile that is read once
    they do not          2 launches   extremes of parts of rows; rounding, where every program joins the parts again

Joining in the second launch needs no counter and no atomics: nothing must be zero before, streams cannot meet, and a
captured CUDA graph can replay it. ``levels`` and the key of the noise are read on the device; Python reads no number.

Division is ``div_rn``: Triton's own "/" may be off by two units in the last place, and ties would move. Kernels are
compiled without fused multiply-add: k * scale + low is rounded twice, as in torch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from cpt_core.quantization import rounding
from cpt_extras.kernels import grids, integer_reference
from cpt_extras.kernels.triton.tiles import (
    KEPT_DIMS,
    Plan,
    next_power_of_2,
    plan_tiles,
    range_shape,
)

COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
PROPAGATE_NAN = tl.constexpr(tl.PropagateNan.ALL)
MIN_SCALE, DECAY = (
    tl.constexpr(rounding.MIN_SCALE),
    tl.constexpr(rounding.RUNNING_DECAY),
)


@triton.jit
def _wider(low, high, other_low, other_high):
    """Join two ranges; NaN stays NaN."""
    return tl.minimum(low, other_low, propagate_nan=PROPAGATE_NAN), tl.maximum(
        high, other_high, propagate_nan=PROPAGATE_NAN
    )


INTERPRETED = tl.constexpr(
    not isinstance(_wider, triton.JITFunction)
)  # TRITON_INTERPRET=1: on the CPU, for tests


@triton.jit
def _offset(index, sizes, strides):
    """Turn indices into offsets; the first dimension varies fastest."""
    at = index * 0
    for d in tl.static_range(len(sizes) - 1):
        at += index % sizes[d] * strides[d]
        index = index // sizes[d]
    return at + index * strides[len(sizes) - 1]


@triton.jit
def _indices(
    block,
    part,
    LOOPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows (R, 1) of a block and columns (1, C) of the first tile of a part."""
    if WIDE:
        block, part = block.to(tl.int64), part.to(tl.int64)
    return block * R + tl.arange(0, R)[:, None], part * (LOOPS * C) + tl.arange(0, C)[
        None, :
    ]


@triton.jit
def _rint(v):
    if INTERPRETED:  # has no libdevice
        below = tl.floor(v)
        up = (v - below > 0.5) | (
            (v - below == 0.5) & (below != 2.0 * tl.floor(0.5 * below))
        )
        return tl.where(up, below + 1.0, below)
    else:
        return libdevice.rint(v)


@triton.jit
def _uniform(key, index, WIDE: tl.constexpr):
    """Return the noise of elements, as ``rounding.hash_noise``: half a hash of the key and of the pair of places."""
    z = tl.load(key).to(tl.uint64) + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    pair = index >> 1
    h = pair.to(tl.uint32) ^ z.to(tl.uint32)
    if WIDE:
        h = h ^ ((pair >> 32).to(tl.uint32) * 0x9E3779B1)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = h ^ (z >> 32).to(tl.uint32)
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    half = tl.where(index & 1 == 0, h & 0xFFFF, h >> 16)
    return half.to(tl.float32) * 0.0000152587890625 + (0.00000762939453125 - 0.5)


@triton.jit
def _on_grid(
    v,
    low,
    width,
    levels,
    key,
    index,
    NOISE: tl.constexpr,
    CLIP: tl.constexpr,
    WIDE: tl.constexpr,
    CODES: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Round values to the grid, in the order of the plain path; or return their codes."""
    n = tl.load(levels)
    if ZERO:  # as ``rounding.round_with_zero_point``
        high = tl.maximum(low + width, 0.0, propagate_nan=PROPAGATE_NAN)
        bottom = tl.minimum(low, 0.0, propagate_nan=PROPAGATE_NAN)
        scale = tl.maximum(
            tl.div_rn(high - bottom, n), MIN_SCALE, propagate_nan=PROPAGATE_NAN
        )
        zero = tl.minimum(
            _rint(tl.div_rn(-bottom, scale)), n, propagate_nan=PROPAGATE_NAN
        )
        low, lows, highs = bottom * 0.0, -zero, n - zero
    else:
        scale = tl.maximum(tl.div_rn(width, n), MIN_SCALE, propagate_nan=PROPAGATE_NAN)
        lows, highs = 0.0, n
    v = tl.div_rn(v - low, scale)
    if NOISE:
        v = v + _uniform(key, index, WIDE)
    if CLIP:
        v = tl.minimum(
            tl.maximum(v, lows, propagate_nan=PROPAGATE_NAN),
            highs,
            propagate_nan=PROPAGATE_NAN,
        )
    k = _rint(v)
    if CODES:
        return (tl.where(k > 0.0, k, 0.0) - (n + 1.0) * 0.5).to(
            tl.int8
        )  # NaN is in the range
    else:
        return k * scale + low


@triton.jit
def _join_parts(lows, highs, row, rows, splits, SPLITS: tl.constexpr):
    """Join the extremes of the parts of rows: minimum and width, (R, 1)."""
    split = tl.arange(0, SPLITS)[None, :]
    inside = (row < rows) & (split < splits)
    low = tl.load(lows + row * splits + split, mask=inside, other=float("inf"))
    high = tl.load(highs + row * splits + split, mask=inside, other=float("-inf"))
    low, high = tl.reduce((low, high), 1, _wider, keep_dims=True)
    return low, high - low


@triton.jit
def _extremes(
    x,
    lows,
    highs,
    rows,
    columns,
    splits,
    row_sizes,
    row_x,
    row_range,
    column_sizes,
    column_x,
    SPLITS: tl.constexpr,
    LOOPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Extremes of a part of R rows, into (rows, splits); the ranges themselves where rows are not split."""
    split = tl.program_id(0) % splits
    row, column = _indices(tl.program_id(0) // splits, split, LOOPS, R, C, WIDE)
    x += _offset(row, row_sizes, row_x)
    low = tl.full((R, C), float("inf"), tl.float32)
    high = tl.full((R, C), float("-inf"), tl.float32)
    for i in range(LOOPS):
        c = column + i * C
        inside = (row < rows) & (c < columns)
        v = tl.load(x + _offset(c, column_sizes, column_x), mask=inside, other=0.0)
        low, high = _wider(
            low,
            high,
            tl.where(inside, v, float("inf")),
            tl.where(inside, v, float("-inf")),
        )
    low, high = tl.reduce((low, high), 1, _wider, keep_dims=True)
    if SPLITS > 1:
        at = row * splits + split
    else:
        at, high = _offset(row, row_sizes, row_range), high - low
    tl.store(lows + at, low, mask=row < rows)
    tl.store(highs + at, high, mask=row < rows)


@triton.jit
def _join(lows, highs, low, width, splits, row_sizes, row_range, SPLITS: tl.constexpr):
    """Join the parts of one row, for a range that no rounding follows."""
    row = tl.program_id(0) + tl.arange(0, 1)[:, None]
    value, wide = _join_parts(lows, highs, row, row + 1, splits, SPLITS)
    at = _offset(row, row_sizes, row_range)
    tl.store(low + at, value)
    tl.store(width + at, wide)


@triton.jit
def _round(
    x,
    y,
    low,
    width,
    lows,
    highs,
    levels,
    key,
    rows,
    columns,
    parts,
    splits,
    row_sizes,
    row_x,
    row_y,
    row_logical,
    row_range,
    column_sizes,
    column_x,
    column_y,
    column_logical,
    SPLITS: tl.constexpr,
    ONE_RANGE: tl.constexpr,
    NOISE: tl.constexpr,
    CLIP: tl.constexpr,
    CODES: tl.constexpr,
    ZERO: tl.constexpr,
    LOOPS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Round a part of R rows; with SPLITS > 1 join the parts of their range first, and store it."""
    this = tl.program_id(0) % parts
    row, column = _indices(tl.program_id(0) // parts, this, LOOPS, R, C, WIDE)
    if ONE_RANGE:  # range of the whole tensor, whatever the rows
        line = tl.arange(0, 1)[:, None]
        at, lines, first = line, 1, tl.program_id(0) == 0
    else:
        line = row
        at, lines, first = _offset(row, row_sizes, row_range), rows, this == 0
    if SPLITS > 1:
        minimum, wide = _join_parts(lows, highs, line, lines, splits, SPLITS)
        if first:
            tl.store(low + at, minimum, mask=line < lines)
            tl.store(width + at, wide, mask=line < lines)
    else:
        minimum = tl.load(low + at, mask=line < lines)
        wide = tl.load(width + at, mask=line < lines)
    x += _offset(row, row_sizes, row_x)
    y += _offset(row, row_sizes, row_y)
    logical = _offset(row, row_sizes, row_logical)
    for i in range(LOOPS):
        c = column + i * C
        inside = (row < rows) & (c < columns)
        v = tl.load(x + _offset(c, column_sizes, column_x), mask=inside, other=0.0)
        index = logical + _offset(c, column_sizes, column_logical)
        v = _on_grid(
            v, minimum, wide, levels, key, index, NOISE, CLIP, WIDE, CODES, ZERO
        )
        tl.store(y + _offset(c, column_sizes, column_y), v, mask=inside)


@triton.jit
def _whole_rows(
    x,
    y,
    low,
    width,
    levels,
    key,
    rows,
    columns,
    row_sizes,
    row_x,
    row_y,
    row_logical,
    row_range,
    column_sizes,
    column_x,
    column_y,
    column_logical,
    NOISE: tl.constexpr,
    CLIP: tl.constexpr,
    ZERO: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Range and rounding of R rows that fit in the block."""
    row, c = _indices(tl.program_id(0), tl.program_id(0) * 0, 1, R, C, WIDE)
    inside = (row < rows) & (c < columns)
    v = tl.load(
        x + _offset(row, row_sizes, row_x) + _offset(c, column_sizes, column_x),
        mask=inside,
        other=0.0,
    )
    ends = tl.where(inside, v, float("inf")), tl.where(inside, v, float("-inf"))
    minimum, high = tl.reduce(ends, 1, _wider, keep_dims=True)
    wide = high - minimum
    at = _offset(row, row_sizes, row_range)
    tl.store(low + at, minimum, mask=row < rows)
    tl.store(width + at, wide, mask=row < rows)
    index = _offset(row, row_sizes, row_logical) + _offset(
        c, column_sizes, column_logical
    )
    v = _on_grid(v, minimum, wide, levels, key, index, NOISE, CLIP, WIDE, False, ZERO)
    tl.store(
        y + _offset(row, row_sizes, row_y) + _offset(c, column_sizes, column_y),
        v,
        mask=inside,
    )


@triton.jit
def _affine(
    product,
    row_codes,
    row_values,
    column_codes,
    column_values,
    rows,
    columns,
    total,
    blocks,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Write float32 over the int32 of R x C sums of codes."""
    m = tl.program_id(0) // blocks * R + tl.arange(0, R)[:, None]
    n = tl.program_id(0) % blocks * C + tl.arange(0, C)[None, :]
    row, column = m < rows, n < columns
    sums, zero_a = (
        tl.load(row_codes + m, mask=row, other=0),
        tl.load(row_codes + rows + m, mask=row, other=0),
    )
    scale_a, scaled = (
        tl.load(row_values + m, mask=row, other=0),
        tl.load(row_values + rows + m, mask=row, other=0),
    )
    rest_a = tl.load(row_values + 2 * rows + m, mask=row, other=0)
    table_offset, inside = m // (rows // (total // columns)) * columns + n, row & column
    zero_b = tl.load(column_codes + table_offset, mask=inside, other=0)
    sums_b = tl.load(column_codes + total + table_offset, mask=inside, other=0)
    scale_b = tl.load(column_values + table_offset, mask=inside, other=0)
    rest_b = tl.load(column_values + total + table_offset, mask=inside, other=0)
    total_b = tl.load(column_values + 2 * total + table_offset, mask=inside, other=0)
    bias = tl.load(column_values + 3 * total + table_offset, mask=inside, other=0)
    at = product + m.to(tl.int64) * columns + n
    k = tl.load(at, mask=inside, other=0)
    t = (k - zero_b * sums - zero_a * sums_b).to(tl.float32)
    y = (scale_a * scale_b) * t + scaled * rest_b + rest_a * total_b + bias
    tl.store(at, y.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _track(running, low, width):
    """Let the running range follow a finite range: two products and a sum."""
    i = tl.arange(0, 4)
    minimum, wide = tl.load(low + i * 0), tl.load(width + i * 0)
    now = tl.where(i == 0, minimum, tl.where(i == 1, wide, 1.0))
    after = tl.load(running + i, mask=i < 3, other=0.0) * DECAY + now * (1 - DECAY)
    finite = (minimum - minimum == 0.0) & (wide - wide == 0.0)
    tl.store(running + i, after, mask=(i < 3) & finite)


def range_of(x: Tensor, granularity: str) -> rounding.Range:
    """Return the ranges of a tensor that is not empty, as ``rounding.range_of``."""
    granularity = grids.parse_grid(granularity)[0]
    if granularity not in KEPT_DIMS:
        return rounding.range_of(x, granularity)
    x = x.float()
    strides, low, width = _new_range(x, granularity)
    plan = plan_tiles(x.shape, x.stride(), x.stride(), strides, False)
    lows, highs, splits = _find_extremes(x, plan, low, width)
    if splits > 1:
        t = plan.extremes
        args = (lows, highs, low, width, t.parts, t.rows.sizes, t.rows.range)
        _launch(_join, t.rows.length, x, *args, SPLITS=splits)
    return low, width


def round_to_grid(
    x: Tensor,
    low: Tensor,
    width: Tensor,
    levels: Tensor,
    key: Tensor | None,
    clip: bool,
) -> Tensor:
    """Round ``x`` to the grid of a given range, as ``rounding.round_to_grid``."""
    if x.dtype != torch.float32:
        return round_to_grid(x.float(), low, width, levels, key, clip).to(x.dtype)
    return _round_in_range(x, torch.empty_like(x), low, width, levels, key, clip)


def encode(
    x: Tensor,
    low: Tensor,
    width: Tensor,
    levels: Tensor,
    key: Tensor | None,
    clip: bool,
    channels_last: bool = False,
) -> Tensor:
    """Return the codes of ``round_to_grid``, as ``integer_reference.encode``."""
    return _round_in_range(
        x.float(),
        integer_reference.empty_codes(x, channels_last),
        low,
        width,
        levels,
        key,
        clip,
    )


def _round_in_range(
    x: Tensor,
    y: Tensor,
    low: Tensor,
    width: Tensor,
    levels: Tensor,
    key: Tensor | None,
    clip: bool,
) -> Tensor:
    """Round ``x`` into ``y``: values, or codes where that is int8."""
    low, width = low.broadcast_to(x.shape), width.broadcast_to(x.shape)
    if low.stride() != width.stride():
        low, width = low.contiguous(), width.contiguous()
    plan = plan_tiles(x.shape, x.stride(), y.stride(), low.stride(), key is not None)
    _round_to(y, x, plan, (low, width, low, width), 1, levels, key, clip)
    return y


def fake_quantize(
    x: Tensor, levels: Tensor, granularity: str, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a tensor that is not empty on its own range, as ``grids.fake_quantize``."""
    kept, format = grids.parse_grid(granularity)
    if format is not None or kept not in KEPT_DIMS:
        return grids.fake_quantize(x, levels, granularity, key)
    if x.dtype != torch.float32:
        y, low, width = fake_quantize(x.float(), levels, granularity, key)
        return y.to(x.dtype), low, width
    noisy, clip = key is not None, rounding.clips(granularity, key is not None)
    zero = rounding.has_zero_point(granularity)
    strides, low, width = _new_range(x, kept)
    y = torch.empty_like(x)
    plan = plan_tiles(x.shape, x.stride(), y.stride(), strides, noisy)
    if (t := plan.whole) is not None:
        args = (
            x,
            y,
            low,
            width,
            levels,
            key if noisy else levels,
            t.rows.length,
            t.columns.length,
        )
        constants = {
            "NOISE": noisy,
            "CLIP": clip,
            "ZERO": zero,
            "WIDE": plan.wide,
            "R": t.R,
            "C": t.C,
        }
        _launch(
            _whole_rows,
            t.programs,
            x,
            *args,
            *t.rows,
            *t.columns[:-1],
            **constants,
            warps=t.warps,
        )
    else:
        lows, highs, splits = _find_extremes(x, plan, low, width)
        _round_to(
            y, x, plan, (low, width, lows, highs), splits, levels, key, clip, zero
        )
    return y, low, width


def affine(
    product: Tensor,
    row_codes: Tensor,
    row_values: Tensor,
    column_codes: Tensor,
    column_values: Tensor,
) -> None:
    """Convert int32 matmul sums to float32 values, in place, as ``integer_reference.dequantize_matmul_``."""
    rows, columns = product.shape
    C = min(next_power_of_2(columns), 256)
    R = max(1, 1024 // C)
    blocks = triton.cdiv(columns, C)
    tables = (row_codes, row_values, column_codes, column_values)
    sizes = (rows, columns, column_codes.shape[1], blocks)
    _launch(
        _affine,
        triton.cdiv(rows, R) * blocks,
        product,
        product,
        *tables,
        *sizes,
        R=R,
        C=C,
        warps=4,
    )


def track(running: Tensor, low: Tensor, width: Tensor) -> None:
    """Update a running range (3,) with the range of one call, in place, as ``rounding.track``."""
    _launch(_track, 1, running, running, low, width)


def unsupported_reason() -> str:
    """Return why the kernels cannot run here, "" if they can: Triton builds its launcher at first use, with gcc."""
    try:
        x = torch.zeros(2, 2, device="cuda")
        fake_quantize(x, x[0, 0], "per_row", None)
    except Exception as error:  # of Triton, of the compilers it calls, of the driver
        return f"Triton's kernels do not run ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    return ""


@cache
def register(library: torch.library.Library, key: str = "CUDA") -> None:
    """Put the kernels behind the operators of a library, for CUDA tensors; once is enough."""
    library.impl("range", range_of, key)
    library.impl("round_to_grid", round_to_grid, key)
    library.impl("fake_quantize", fake_quantize, key)
    library.impl("encode", encode, key)
    library.impl("affine_", affine, key)
    library.impl("track_", track, key)


def _new_range(x: Tensor, granularity: str) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Return strides of a range along the dimensions of ``x``, and memory for minimum and width."""
    shape, strides = range_shape(x.shape, granularity)
    low, width = (x.new_empty(shape) for _ in range(2))
    return strides, low, width


def _find_extremes(
    x: Tensor, plan: Plan, low: Tensor, width: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Launch ``_extremes``; return where it left them and the block that holds the parts, 1 if that is the range."""
    t = plan.extremes
    splits, rows, columns = next_power_of_2(t.parts), t.rows, t.columns
    if splits > 1:
        low, width = (x.new_empty(rows.length * t.parts) for _ in range(2))
    args = (x, low, width, rows.length, columns.length, t.parts)
    sides = (rows.sizes, rows.x, rows.range, columns.sizes, columns.x)
    constants = {
        "SPLITS": splits,
        "LOOPS": t.loops,
        "R": t.R,
        "C": t.C,
        "WIDE": plan.wide,
    }
    _launch(_extremes, t.programs, x, *args, *sides, **constants, warps=t.warps)
    return low, width, splits


def _round_to(
    y: Tensor,
    x: Tensor,
    plan: Plan,
    ranges: tuple[Tensor, ...],
    splits: int,
    levels: Tensor,
    key: Tensor | None,
    clip: bool,
    zero: bool = False,
) -> None:
    """Launch ``_round`` with (low, width, lows, highs)."""
    t, noisy = plan.rounding, key is not None
    counts = (t.rows.length, t.columns.length, t.parts, plan.extremes.parts)
    args = (
        x,
        y,
        *ranges,
        levels,
        key if noisy else levels,
        *counts,
        *t.rows,
        *t.columns[:-1],
    )
    constants = {
        "SPLITS": splits,
        "ONE_RANGE": not any(t.rows.range),
        "NOISE": noisy,
        "CLIP": clip,
        "LOOPS": t.loops,
    }
    constants |= {"CODES": y.dtype == torch.int8, "ZERO": zero}
    _launch(
        _round,
        t.programs,
        x,
        *args,
        **constants,
        R=t.R,
        C=t.C,
        WIDE=plan.wide,
        warps=t.warps,
    )


def _launch(
    kernel: Any, programs: int, x: Tensor, *args: Any, warps: int = 1, **constants: Any
) -> None:
    """Launch a kernel on the device of ``x``, unless that is empty."""
    if x.numel():
        with torch.cuda.device_of(x):  # Triton launches on the current device
            kernel[(programs,)](*args, **constants, num_warps=warps, **COMPILE_OPTIONS)
