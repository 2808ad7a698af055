"""Tensors and grids on which all backends of the rounding operators are compared."""

import torch
from helpers import EDGES, NAN, normal

CHANNELS_LAST = {"memory_format": torch.channels_last}
CHANNELS_LAST_3D = {"memory_format": torch.channels_last_3d}


def layouts(n):
    """Return tensors in many memory layouts, with sizes that grow with ``n``."""
    queries = normal(2, 5, 3, 4 * n).transpose(1, 2)
    return {
        "(n)": normal(77 * n * n),
        "(n, f)": normal(7 * n, 23 * n),
        "(n, l, f)": normal(3, 5, 11 * n),
        "(n, c, h, w)": normal(2 * n, 3, 5, 7),
        "channels_last": normal(2, 3 * n, 5, 7).contiguous(**CHANNELS_LAST),
        "channels_last_3d": normal(2, 3 * n, 3, 2, 4).contiguous(**CHANNELS_LAST_3D),
        "transposed": normal(7 * n, 20 * n).t(),
        "queries": queries,
        "keys": queries.transpose(2, 3),
        "any order": normal(2, 3, 4, 2, 3 * n).permute(4, 0, 3, 1, 2),
        "gaps": normal(6 * n, 24 * n)[:, ::3],
        "repeated": normal(5, 1).expand(5, 9 * n),
        "all the same": normal(1).expand(4, 3, 6 * n),
        "offset": normal(9 * n, 13 * n)[4:],
        "one": normal(1, 1, 1),
        "0-d": normal(),
    }


def special_values(n):
    """Return tensors of several types and with values that grids easily get wrong."""
    x, third = normal(5, 20 * n), torch.tensor([3])
    return {
        "float64": normal(4 * n, 30 * n).double(),
        "bfloat16": normal(4 * n, 30 * n).bfloat16(),
        "float16": normal(4 * n, 30 * n).half(),
        "a NaN": x.index_fill(1, third, NAN),
        "a negative NaN": -x.index_fill(1, third, NAN),
        "a NaN in a row": x.index_fill(0, third, NAN),
        **EDGES,
        "ties": torch.arange(16.0).view(2, 8),
    }


def samples(n):
    """Return all sample tensors by name."""
    return layouts(n) | special_values(n)


FORMAT_GRIDS = (
    "per_row|e4m3",
    "per_tensor|e5m2",
    "per_channel|symmetric4",
    "per_position|log2_4",
    "per_row|bf16",
    "per_tensor|mxfp8_e4m3:partial=1",
    "per_row|nvfp4:partial=1",
    "per_sample_mean|e2m1",
    "per_row|float32",
    "per_row|affine3:saturate=0",
    "per_row|e2m1",
    "per_channel|e2m1",
)


def has_range(x, grid):
    """Return whether a tensor has the dimensions that a grid needs."""
    needs_dims = "partial" in grid or grid.startswith(("per_row|", "per_sample_mean"))
    return x.dim() > 0 or not needs_dims
