"""Rounding operators in C++ and Triton against plain torch, bit for bit."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from helpers import INF, NAN, identical, normal, refused
from kernels.samples import FORMAT_GRIDS, has_range, samples

from cpt_core.quantization import rounding
from cpt_core.quantization.roles import Quantizer
from cpt_core.quantization.rounding import RANGE_FUNCTIONS
from cpt_extras.formats import format_rounding
from cpt_extras.formats.format import Format
from cpt_extras.formats.format_rounding import round_blocks
from cpt_extras.formats.ladder_rounding import on_level
from cpt_extras.formats.quantizer import FormatQuantizer
from cpt_extras.kernels import grids, integer_reference, operators

plain = torch.ops.cpt_reference
AFFINE_GRIDS = [name + end for name in RANGE_FUNCTIONS for end in ("", "+zero")]
# bits, noise key, whether values are clipped; a grid of 16 bits has ties among large numbers
SETTINGS = (
    (1, 7, True),
    (4, None, True),
    (4, 7, False),
    (8, -7, True),
    (16, None, False),
    (16, 7, True),
)


def num_steps(bits):
    return torch.tensor(2.0**bits - 1)


def as_key(key):
    return None if key is None else torch.tensor(key)


def check_rounding(kernels, x, grid, bits, key, clip):
    """Check the operators of a backend that round a tensor, or the numbers around its range."""
    steps, key, case = num_steps(bits), as_key(key), (grid, bits, key, clip)
    low, width = plain.range(x, grid)
    found = kernels.fake_quantize(x, steps, grid, key)
    if kernels.name == "cpp" or not grid.startswith("per_sample_mean"):
        expected = plain.fake_quantize(x, steps, grid, key)
        assert identical(found, expected), case
        assert identical(kernels.range(x, grid), (low, width)), case
    else:  # a GPU orders the sum of a mean otherwise
        torch.testing.assert_close(tuple(found[1:]), (low, width), equal_nan=True)
        clips = rounding.clips(grid, key is not None)
        expected = plain.round_in_range(x, *found[1:], steps, grid, key, clips)
        assert identical(found[:1], [expected]), case
    assert found[0].stride() == plain.fake_quantize(x, steps, grid, key)[0].stride()
    around = x * 1.1 + 0.01, low, width, steps, key, clip
    on_grid = kernels.round_to_grid(*around)
    assert identical([on_grid], [plain.round_to_grid(*around)]), case
    if bits <= 8:
        codes, expected = kernels.encode(*around), integer_reference.encode(*around)
        assert torch.equal(codes, expected), case
        assert codes.stride() == expected.stride(), case


@pytest.mark.parametrize("name", samples(1))
def test_backends_round_every_sample_identically(kernels, name):
    """Compare C++ on all grids, and Triton's slow interpreter on two of ten, in one setting each."""
    x, first = samples(kernels.size)[name], list(samples(1)).index(name)
    step = 1 if kernels.name == "cpp" else 5
    for i in range(first % step, len(AFFINE_GRIDS), step):
        settings = SETTINGS if kernels.name == "cpp" else [SETTINGS[(first + i) % 6]]
        for setting in settings:
            if has_range(x, AFFINE_GRIDS[i]):
                check_rounding(kernels, x, AFFINE_GRIDS[i], *setting)


@pytest.mark.parametrize("bits", range(1, 17))
def test_backends_round_ties_identically(kernels, bits):
    n = 2**bits - 1  # a grid of step 1
    x = torch.cat([torch.arange(0.0, min(n, 40), 0.5), torch.tensor([n - 0.5, n])])
    for key in (None, torch.tensor(bits)):
        args = x, num_steps(bits), "per_tensor", key
        assert identical(kernels.fake_quantize(*args), plain.fake_quantize(*args))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_cpp_kernels_ignore_thread_count(cpp_kernels, threaded, threads):
    x, steps, key = normal(400, 900), num_steps(3), torch.tensor(3)
    threaded(threads)
    for grid in ("per_tensor", "per_row"):
        expected = plain.fake_quantize(x, steps, grid, key)
        assert identical(torch.ops.cpt.fake_quantize(x, steps, grid, key), expected)


RANGES = [(1.0, 2.0), (NAN, 1.0), (0.3, INF), (-INF, INF), (-1e-3, 0.0)]


@pytest.mark.parametrize("current", RANGES)
def test_backends_track_running_ranges_identically(kernels, current):
    current = torch.tensor(current)
    running, expected = (torch.tensor([0.3, 1.7, 0.6]) for _ in range(2))
    for _ in range(3):
        kernels.track_(running, *current)
        rounding.track(expected, *current)
    assert torch.equal(running, expected)
    stays = torch.equal(running, torch.tensor([0.3, 1.7, 0.6]))
    assert stays == (not current.isfinite().all())


def test_backends_accept_empty_tensors(kernels):
    zero = torch.zeros(())
    empty = torch.empty(0, 3)
    rounded = kernels.round_to_grid(empty, zero, zero, zero, None, False)
    assert rounded.shape == (0, 3)
    found = kernels.fake_quantize(empty, zero, "per_row", None)
    assert [t.shape for t in found] == [(0, 3), (0, 1), (0, 1)]
    if kernels.name != "cpp":
        message = r"shape \(0, 3\) has no range per_position: it is empty"
        refused(message, kernels.range, empty, "per_position")


def test_hash_noise_accepts_zero_elements():
    assert rounding.hash_noise(torch.tensor(1), 0).shape == (0,)


@pytest.mark.parametrize("bad", [torch.tensor(3.0, dtype=torch.float64), torch.ones(2)])
def test_fake_quantize_rejects_invalid_arguments(cpp_kernels, bad):
    quantize, x = torch.ops.cpt.fake_quantize, torch.ones(3)
    message = "levels must be one float32"
    refused(message, quantize, x, bad, "per_tensor", None, error=RuntimeError)
    either = KeyError, RuntimeError
    refused("rows", quantize, x, num_steps(2), "rows", None, error=either)


# --- int8 ---------------------------------------------------------------------------------------

ENCODED = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "gaps": lambda x: x[:, :, ::2],
    "repeated": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}
IMAGES = (2, 3, 5, 7), (3, 16, 16, 16), (1, 37, 9, 63), (2, 1, 4, 4), (4, 20, 1, 1)


@pytest.mark.parametrize("layout", ENCODED)
def test_encode_writes_channels_last(kernels, layout):
    """Write equal codes in either layout, since the noise counts elements row by row."""
    for shape in IMAGES if kernels.name == "cpp" else IMAGES[:1]:
        x = ENCODED[layout](normal(*shape))
        for granularity in ("per_tensor", "per_channel"):
            low, width = plain.range(x, granularity)
            for key in (None, torch.tensor(7)):
                clipped = x, low, width * 0.9, num_steps(8), key, True
                expected = plain.encode(*clipped)
                codes = kernels.encode(*clipped, True)
                assert codes.permute(0, 2, 3, 1).is_contiguous()
                assert torch.equal(codes, expected)
                assert torch.equal(plain.encode(*clipped, True), expected)


@pytest.mark.parametrize(
    ("rows", "columns", "groups"), [(1, 1, 1), (37, 5, 1), (6, 300, 1), (70, 33, 5)]
)
def test_backends_dequantize_matmul_identically(kernels, rows, columns, groups):
    generator = torch.Generator().manual_seed(0)
    ints = partial(torch.randint, generator=generator, dtype=torch.int32)
    product = ints(-(2**20), 2**20, (rows, columns))
    row_codes, column_codes = (
        ints(-128, 128, (2, rows)),
        ints(-128, 128, (2, groups * columns)),
    )
    tables = row_codes, normal(3, rows), column_codes, normal(4, groups * columns)
    found, expected = product.clone(), product.clone()
    kernels.affine_(found, *tables)
    integer_reference.dequantize_matmul_(expected, *tables)
    assert torch.equal(found, expected)
    assert not torch.equal(found, product)


# --- number formats -----------------------------------------------------------------------------

N = num_steps(4)
FORMAT_SAMPLES = [
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


@pytest.mark.parametrize("grid", FORMAT_GRIDS)
@pytest.mark.parametrize("key", [None, 7])
def test_families_round_formats_identically(cpp_kernels, grid, key):
    key, all_samples = as_key(key), samples(5)
    for x in (all_samples[name] for name in FORMAT_SAMPLES):
        if not has_range(x, grid):
            continue
        expected = grids.fake_quantize(x, N, grid, key)
        assert (expected[0].dtype, expected[0].shape) == (x.dtype, x.shape)
        low, width = rounding.range_of(x, grid.partition("|")[0])
        for family in operators.FAMILIES:
            ops = getattr(torch.ops, family)
            assert identical(ops.fake_quantize(x, N, grid, key), expected)
            again = ops.round_in_range(x, low, width, N, grid, key, False)
            assert identical([again, low, width], expected)
        if x.dtype != torch.float32:
            in_float32 = grids.fake_quantize(x.float(), N, grid, key)[0]
            assert identical([expected[0]], [in_float32.to(x.dtype)])


BLOCK_FORMATS = (
    "nvfp4",
    "mxfp4",
    "mxfp6_e3m2",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxint8",
    "mx(symmetric4,32)",
    "mx(e2m1,600)",
    "mx(e4m3,32):saturate=0",
    "mx(e3m0,32)",
    "mx(e5m10,32)",
)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("key", [None, 7])
def test_cpp_round_blocks_equals_plain_torch(cpp_kernels, name, key):
    format, key = Format.of(name), as_key(key)
    blocks = normal(90, format.block)
    for x in (blocks, blocks * 1e-40, blocks * 1e37, blocks * blocks.exp(), blocks * 0):
        x = x.clone()
        x[:3, 1], x[3:6, 2], x[6:9, 3], x[9:12] = NAN, INF, -INF, 0
        largest = x.nan_to_num(0, 0, 0).abs().amax(1, True) / format.largest / 448
        scales = [None] if format.scale == "e8m0" else [largest.max(), largest]
        for scale in scales:
            scale = None if scale is None else scale.clamp_min(2.0**-126)
            expected = round_blocks(x, scale, format, key)
            found = grids.round_blocks_in_cpp(x, scale, format, key)
            assert identical([found], [expected])
            signs = [y.nan_to_num(7.0).signbit() for y in (found, expected)]
            assert torch.equal(*signs)


@pytest.mark.parametrize("name", BLOCK_FORMATS[:-3])
def test_block_formats_run_in_cpp(cpp_kernels, name):
    def fail(*_):
        raise AssertionError("plain torch")

    x = normal(64, Format.of(name).block)
    with patch.object(format_rounding, "round_blocks", fail):
        y = torch.ops.cpt.fake_quantize(x, N, f"per_tensor|{name}", None)[0]
    assert not torch.equal(x, y)


def test_affine_format_has_grid_of_its_bits():
    x, format = normal(6, 9), Format.affine(4)
    level = FormatQuantizer("per_tensor", format=format)
    assert FormatQuantizer("per_row", format=format).grid == "per_row"
    assert on_level(Quantizer("per_row"), level).grid == "per_tensor"
    expected = grids.fake_quantize(x, N, "per_row", None)
    by_name = torch.ops.cpt.fake_quantize(x, num_steps(1), "per_row|affine4", None)
    assert identical(
        by_name, expected
    )  # the format's number of steps, not the tensor's
    stored = operators.round_in_range(x, *expected[1:], N, "per_row", clip=True)
    on_grid = operators.active.round_to_grid(x, *expected[1:], N, None, True)
    assert identical([stored], [on_grid])


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", operators.FAMILIES)
@pytest.mark.parametrize("key", [None, 4])
def test_fake_quantize_passes_gradients_unchanged(cpp_kernels, family, key):
    ops, key = getattr(torch.ops, family), as_key(key)
    x, gradient = normal(4, 6, 8).requires_grad_(), normal(4, 6, 8) * 3
    for grid in ("per_row", *FORMAT_GRIDS):
        y, low, width = ops.fake_quantize(x, N, grid, key)
        assert not low.requires_grad
        assert not width.requires_grad
        outputs = [y, ops.round_in_range(x, low / 4, width / 4, N, grid, key, True)]
        if "|" not in grid:
            outputs.append(ops.round_to_grid(x, low, width, N, key, True))
        for output in outputs:
            assert torch.equal(torch.autograd.grad(output, x, gradient)[0], gradient)
        assert not ops.encode(x, low, width, N, key, True).requires_grad


@pytest.mark.parametrize("key", [None, 5])
def test_quantize_gradient_rounds_to_formats(cpp_kernels, key):
    """Round gradients to formats through the C++ node, which does not implement formats."""
    y, gradient, key = normal(6, 8).requires_grad_(), normal(6, 8), as_key(key)
    grid = "per_row|e5m2"
    expected = grids.fake_quantize(gradient, N, grid, key)[0]
    torch.ops.cpt.quantize_gradient(y * 1, N, key, grid).backward(gradient.clone())
    assert torch.equal(y.grad, expected)
    assert key is None or int(key) == 6
