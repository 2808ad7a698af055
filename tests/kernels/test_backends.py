"""Kernel backends against the reference, bit for bit: layouts, types, granularities, formats, gradients."""

import pytest
import torch
from helpers import EDGES, INF, NAN, identical, normal

from cpt_core.quantization import rounding as reference
from cpt_core.quantization.roles import Quantizer
from cpt_core.quantization.rounding import RANGE_FUNCTIONS
from cpt_extras.formats.format import Format
from cpt_extras.formats.ladder_rounding import on_level
from cpt_extras.formats.quantizer import FormatQuantizer
from cpt_extras.kernels import backend as backend_module
from cpt_extras.kernels import grids, operators


def layouts(n):
    """Return tensors in many memory layouts, with sizes that grow with ``n``."""
    return {
        "(n)": normal(77 * n * n),
        "(n, f)": normal(7 * n, 23 * n),
        "(n, l, f)": normal(3, 5, 11 * n),
        "(n, c, h, w)": normal(2 * n, 3, 5, 7),
        "channels_last": normal(2, 3 * n, 5, 7).contiguous(
            memory_format=torch.channels_last
        ),
        "channels_last_3d": normal(2, 3 * n, 3, 2, 4).contiguous(
            memory_format=torch.channels_last_3d
        ),
        "transposed": normal(7 * n, 20 * n).t(),
        "queries": normal(2, 5, 3, 4 * n).transpose(1, 2),
        "keys": normal(2, 5, 3, 4 * n).transpose(1, 2).transpose(2, 3),
        "any order": normal(2, 3, 4, 2, 3 * n).permute(4, 0, 3, 1, 2),
        "gaps": normal(6 * n, 24 * n)[:, ::3],
        "repeated": normal(5, 1).expand(5, 9 * n),
        "all the same": normal(1).expand(4, 3, 6 * n),
        "offset": normal(9 * n, 13 * n)[4:],
        "one": normal(1, 1, 1),
        "0-d": normal(),
    }


def numbers(n):
    """Return tensors of several types and with values that grids easily get wrong."""
    return {
        "float64": normal(4 * n, 30 * n).double(),
        "bfloat16": normal(4 * n, 30 * n).bfloat16(),
        "float16": normal(4 * n, 30 * n).half(),
        "a NaN": normal(5, 20 * n).index_fill(1, torch.tensor([3]), NAN),
        "a negative NaN": -normal(5, 20 * n).index_fill(1, torch.tensor([3]), NAN),
        "a NaN in a row": normal(5, 20 * n).index_fill(0, torch.tensor([3]), NAN),
        **EDGES,
        "ties": torch.arange(16.0).view(2, 8),
    }


LAYOUTS = (
    layouts(5)
    | numbers(5)
    | {"large": normal(700, 900), "float16, 4-d": normal(4, 6, 8, 10).half()}
)


def test_kernels_on_names_active_backend(monkeypatch):
    def on(kind):
        return backend_module.kernels_on(torch.device(kind))

    monkeypatch.setattr(backend_module, "_active", None)
    assert on("cpu") == "not loaded"
    monkeypatch.setattr(
        backend_module, "_active", backend_module.Backend("cpp", "triton", {})
    )
    monkeypatch.setattr(operators, "active", torch.ops.cpt)
    assert (on("cpu"), on("cuda")) == ("cpp", "triton")
    with backend_module.reference():
        assert (on("cpu"), on("cuda")) == ("reference", "reference")
        assert operators.active is torch.ops.cpt_reference
    assert (on("cpu"), on("cuda")) == ("cpp", "triton")


@pytest.mark.parametrize(
    "granularity",
    [name + end for name in sorted(RANGE_FUNCTIONS) for end in ("", "+zero")],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cpp_kernels_are_bit_identical(compiled, layout, granularity):
    x, plain = LAYOUTS[layout], torch.ops.cpt_reference
    if granularity.startswith("per_sample_mean") and x.dim() == 0:
        pytest.skip("nothing to take the mean over")
    assert identical(compiled.range(x, granularity), plain.range(x, granularity))
    # among the large numbers of a grid of 16 bits there are ties
    for bits, key, clip in (
        (1, 7, True),
        (4, None, True),
        (4, 7, False),
        (16, None, False),
        (16, 7, True),
    ):
        levels, key = (
            torch.tensor(2.0**bits - 1),
            None if key is None else torch.tensor(key),
        )
        found, expected = (
            ops.fake_quantize(x, levels, granularity, key) for ops in (compiled, plain)
        )
        assert identical(found, expected)
        assert (
            found[0].stride() == expected[0].stride()
        )  # what is computed with it takes the same path
        args = x * 1.1 + 0.01, expected[1], expected[2], levels, key, clip
        assert identical([compiled.round_to_grid(*args)], [plain.round_to_grid(*args)])


def test_identical_detects_one_wrong_bit():
    x = torch.ones(3)
    assert not identical([x], [torch.nextafter(x, torch.tensor(2.0))])
    assert not identical([x.double()], [x])
    assert not identical([torch.tensor([NAN])], [torch.tensor([7.0])])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_cpp_kernels_ignore_thread_count(compiled, threaded, threads):
    x, levels, key = normal(400, 900), torch.tensor(7.0), torch.tensor(3)
    expected = torch.ops.cpt_reference.fake_quantize(x, levels, "per_tensor", key)
    threaded(threads)
    assert identical(compiled.fake_quantize(x, levels, "per_tensor", key), expected)
    assert identical(
        compiled.fake_quantize(x, levels, "per_row", None)[1:],
        torch.ops.cpt_reference.range(x, "per_row"),
    )


@pytest.mark.parametrize("now", [(1.0, 2.0), (NAN, 1.0), (0.3, INF), (-1e-3, 0.0)])
def test_cpp_track_matches_reference(compiled, now):
    found, expected = (torch.tensor([0.3, 1.7, 0.6]) for _ in range(2))
    for _ in range(5):
        compiled.track_(found, *map(torch.tensor, now))
        torch.ops.cpt_reference.track_(expected, *map(torch.tensor, now))
    assert torch.equal(found, expected)
    assert (expected[0] == torch.tensor(0.3)) == (
        not torch.tensor(now).isfinite().all()
    )


# --- grids of formats ------------------------------------------------------------------------------

N = torch.tensor(15.0)
GRIDS = [
    "per_row|e4m3",
    "per_tensor|e5m2",
    "per_channel|symmetric4",
    "per_position|log2_4",
    "per_row|bf16",
]
GRIDS += [
    "per_tensor|mxfp8_e4m3:partial=1",
    "per_row|nvfp4:partial=1",
    "per_sample_mean|e2m1",
    "per_row|float32",
]
GRIDS += ["per_row|affine3:saturate=0", "per_row|e2m1", "per_channel|e2m1"]
NAMES = [
    "(n, l, f)",
    "(n, f)",
    "(n)",
    "0-d",
    "channels_last",
    "transposed",
    "gaps",
    "bfloat16",
    "float16",
    "float64",
]


def fits(layout, grid):
    """Return whether a layout has the dimensions that a grid needs."""
    return layout != "0-d" or not (
        "partial" in grid or grid.startswith(("per_row", "per_sample_mean"))
    )


@pytest.mark.parametrize(
    ("layout", "grid"), [(n, g) for n in NAMES for g in GRIDS if fits(n, g)]
)
def test_backends_round_formats_identically(cpp_kernels, layout, grid):
    x = LAYOUTS[layout]
    for key in (None, torch.tensor(7)):
        expected = grids.fake_quantize(x, N, grid, key)
        assert expected[0].dtype == x.dtype
        assert expected[0].shape == x.shape
        for ops in (torch.ops.cpt, torch.ops.cpt_reference):
            found = ops.fake_quantize(x, N, grid, key)
            assert identical(found, expected)
            assert identical(found[1:], reference.range_of(x, grid.partition("|")[0]))
            again = ops.round_in_range(x, *found[1:], N, grid, key, False)
            assert identical([again], [expected[0]])
    if x.dtype != torch.float32:
        assert identical(
            [expected[0]], [grids.fake_quantize(x.float(), N, grid, key)[0].to(x.dtype)]
        )


def test_affine_grid_matches_levels():
    x = normal(6, 9)
    four = Format.affine(4)
    assert FormatQuantizer("per_row", format=four).grid == "per_row"
    assert (
        on_level(Quantizer("per_row"), FormatQuantizer("per_tensor", format=four)).grid
        == "per_tensor"
    )
    low, width = reference.range_of(x, "per_row")
    expected = reference.round_to_grid(x, low, width, N, None, False), low, width
    assert identical(torch.ops.cpt.fake_quantize(x, N, "per_row", None), expected)
    assert identical(grids.fake_quantize(x, N, "per_row", None), expected)
    stored = operators.round_in_range(x, *expected[1:], N, "per_row", clip=True)
    assert identical(
        [stored], [operators.active.round_to_grid(x, *expected[1:], N, None, True)]
    )
    named = torch.ops.cpt.fake_quantize(x, torch.tensor(1.0), "per_row|affine4", None)
    assert identical(named, expected)  # its own n


@pytest.mark.parametrize("family", operators.FAMILIES)
@pytest.mark.parametrize("key", [None, torch.tensor(4)])
def test_fake_quantize_passes_gradients_unchanged(cpp_kernels, family, key):
    ops = getattr(torch.ops, family)
    x, g = normal(4, 6, 8).requires_grad_(), normal(4, 6, 8) * 3
    for grid in ("per_row", *GRIDS):
        y, low, width = ops.fake_quantize(x, N, grid, key)
        assert not low.requires_grad
        assert not width.requires_grad
        results = [y, ops.round_in_range(x, low / 4, width / 4, N, grid, key, True)]
        results += (
            [] if "|" in grid else [ops.round_to_grid(x, low, width, N, key, True)]
        )
        for result in results:
            assert torch.equal(
                torch.autograd.grad(result, x, g, retain_graph=True)[0], g
            )
        assert not ops.encode(x, low, width, N, key, True).requires_grad


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_quantize_gradient_rounds_to_formats(cpp_kernels, rounding):
    """Round gradients to formats through the C++ node, which does not implement formats."""
    y, g = normal(6, 8).requires_grad_(), normal(6, 8)
    key = torch.tensor(5) if rounding == "stochastic" else None
    expected = grids.fake_quantize(g, N, "per_row|e5m2", key)[0]
    torch.ops.cpt.quantize_gradient(y * 1, N, key, "per_row|e5m2").backward(g.clone())
    assert torch.equal(y.grad, expected)
    assert key is None or int(key) == 6


def test_hash_noise_accepts_zero_elements():
    assert reference.hash_noise(torch.tensor(1), 0).shape == (0,)
