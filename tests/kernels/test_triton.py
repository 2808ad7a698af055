"""Triton kernels: equal bits in the interpreter, and machine code for several GPUs."""

import importlib.util
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import INF, NAN, WITH_CUDA, identical, normal
from kernels.test_backends import layouts, numbers
from quantization.test_quantizers import splitmix_and_finaliser

from cpt_core.quantization import rounding as reference
from cpt_core.quantization.rounding import RANGE_FUNCTIONS
from cpt_extras.kernels import grids, integer_reference, operators
from cpt_extras.kernels.backend import backend
from cpt_extras.kernels.triton import tiles

triton = pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch for CUDA"
)
tl = triton.language

WHOLE = {
    "TILE_ELEMENTS": 4096,
    "MAX_WHOLE_ROW_TILE": 16384,
    "MIN_WIDE_OFFSET": 2**30,
}  # rows in one block
EXTREMES_PROGRAMS = {
    "TILE_ELEMENTS": 256,
    "MAX_WHOLE_ROW_TILE": 4,
    "EXTREMES_PROGRAMS": 3,
    "ROUNDING_PROGRAMS": 2,
    "MAX_DIVIDED_COLUMNS": 8,
    "MIN_WIDE_OFFSET": 0,
}  # several of everything, 64 bits
KEPT = sorted(tiles.KEPT_DIMS)
LAYOUTS, VALUES = layouts(1), numbers(1)


@pytest.fixture(scope="module")
def interpreted():
    """Load a second copy of the module, with kernels for Triton's interpreter."""
    spec = importlib.util.find_spec("cpt_extras.kernels.triton.operators")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


@pytest.fixture(
    scope="module", params=["interpreter", pytest.param("cuda", marks=WITH_CUDA)]
)
def kernels(request):
    """Return the Triton operators as functions of CPU tensors."""
    if request.param == "cuda":
        assert backend().cuda == "triton", backend()
        family, device = torch.ops.cpt, "cuda"
    else:
        library = operators._register("cpt_interpreted")
        request.getfixturevalue("interpreted").register(library, "CPU")
        family, device = torch.ops.cpt_interpreted, "cpu"

    def run(name, *args):
        moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
        with np.errstate(
            all="ignore"
        ):  # the interpreter computes with numpy, which warns of infinities
            found = getattr(family, name)(*moved)
        for before, after in zip(args, moved, strict=True):
            if (
                name.endswith("_")
                and before is not after
                and isinstance(before, torch.Tensor)
            ):
                before.copy_(after)
        return (
            found.cpu()
            if isinstance(found, torch.Tensor)
            else found and [t.cpu() for t in found]
        )

    yield SimpleNamespace(
        **{name.rstrip("_"): partial(run, name) for name in operators.SCHEMAS}
    )
    if request.param != "cuda":
        library._destroy()


@pytest.fixture
def cut(monkeypatch):
    """Set the sizes of tiles."""

    def set_sizes(sizes):
        for name, value in sizes.items():
            monkeypatch.setattr(tiles, name, value)
        tiles.plan_tiles.cache_clear()

    yield set_sizes
    tiles.plan_tiles.cache_clear()


def check(kernels, x, granularity, bits, key, codes=True):
    found, expected = (
        f(x, torch.tensor(2.0**bits - 1), granularity, key)
        for f in (kernels.fake_quantize, grids.fake_quantize)
    )
    assert identical(found, expected)
    assert (
        found[0].stride() == expected[0].stride()
    )  # what is computed with it takes the same path
    if bits <= 8 and codes:
        given = x, *expected[1:], torch.tensor(2.0**bits - 1), key, key is not None
        codes, plain = kernels.encode(*given), integer_reference.encode(*given)
        assert torch.equal(codes, plain)
        assert codes.stride() == found[0].stride()
        if x.dim() == 4:
            last = kernels.encode(*given, True)
            assert last.permute(0, 2, 3, 1).is_contiguous()
            assert torch.equal(last, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_rounds_every_layout_identically(kernels, cut, layout):
    """Test layouts and granularities in pairs, since the interpreter is slow."""
    x = LAYOUTS[layout]
    for i, granularity in enumerate(KEPT, list(LAYOUTS).index(layout)):
        cut(EXTREMES_PROGRAMS if i % 2 else WHOLE)
        check(
            kernels,
            x,
            granularity,
            *((5, torch.tensor(-7)) if i % 2 else (3, None)),
            codes=i % 2,
        )
        check(
            kernels,
            x,
            f"{granularity}+zero",
            *((5, torch.tensor(-7)) if i % 2 else (3, None)),
            codes=False,
        )
        assert i % 2 or identical(
            kernels.range(x, granularity), reference.range_of(x, granularity)
        )  # else just seen


@pytest.mark.parametrize("sizes", [WHOLE, EXTREMES_PROGRAMS], ids=["whole", "parts"])
@pytest.mark.parametrize("values", VALUES)
def test_triton_rounds_special_values_identically(kernels, cut, values, sizes):
    cut(sizes)
    for end in ("", "+zero"):
        check(
            kernels,
            VALUES[values],
            ("per_row" if sizes is WHOLE else "per_tensor") + end,
            8,
            None,
            codes=not end,
        )


@pytest.mark.parametrize("bits", range(1, 17))
def test_triton_rounds_ties_at_every_precision(kernels, bits):
    n = 2**bits - 1  # a grid of step 1
    x = torch.cat([torch.arange(0.0, min(n, 40), 0.5), torch.tensor([n - 0.5, n])])
    check(kernels, x, "per_tensor", bits, None)
    check(kernels, x, "per_tensor", bits, torch.tensor(bits))


@pytest.mark.parametrize("granularity", sorted(RANGE_FUNCTIONS))
def test_triton_round_to_grid_matches_reference(kernels, granularity):
    for layout in ("(n, l, f)", "channels_last"):
        x = LAYOUTS[layout] * 1.1 + 0.01  # values on either side of the range
        low, width = reference.range_of(LAYOUTS[layout], granularity)
        each = width.expand_as(x).clone()
        for given, key, clip in (
            (width, None, False),
            (each, None, True),
            (width, torch.tensor(2), True),
        ):
            args = x, low, given, torch.tensor(7.0), key, clip
            assert identical(
                [kernels.round_to_grid(*args)], [reference.round_to_grid(*args)]
            )


def test_triton_takes_sample_mean_range_from_torch(kernels):
    """Round to the range that torch computes on the device, since the order of sums differs."""
    for layout, key in (("channels_last", None), ("(n, l, f)", torch.tensor(1))):
        x, levels = LAYOUTS[layout], torch.tensor(7.0)
        y, low, width = kernels.fake_quantize(x, levels, "per_sample_mean", key)
        assert identical(
            [y], [reference.round_to_grid(x, low, width, levels, key, key is not None)]
        )
        torch.testing.assert_close(
            (low, width), tuple(reference.range_of(x, "per_sample_mean"))
        )


def test_triton_kernels_accept_empty_tensors(kernels):
    low = torch.zeros(())
    assert kernels.round_to_grid(
        torch.empty(0, 3), low, low, low, None, False
    ).shape == (0, 3)
    y, low, width = kernels.fake_quantize(torch.empty(0, 3), low, "per_row", None)
    assert (y.shape, low.shape, width.shape) == ((0, 3), (0, 1), (0, 1))
    for granularity in ("per_tensor", "per_position"):
        with pytest.raises(
            ValueError, match=rf"shape \(0, 3\) has no range {granularity}: it is empty"
        ):
            kernels.range(torch.empty(0, 3), granularity)


def _draw(key, out, start, C: tl.constexpr):
    i = tl.arange(0, C)
    tl.store(out + i, _uniform(key, start + i.to(tl.int64), True))  # noqa: F821


@pytest.fixture
def draw(interpreted, monkeypatch):
    """Return a kernel that draws the rounding noise of elements from a given offset."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(globals(), "_uniform", interpreted._uniform)
    return triton.jit(_draw)


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**34 - 5])
@pytest.mark.parametrize("key", [0, 5, -(2**63), 2**63 - 1])
def test_triton_noise_matches_hash_reference(draw, key, start):
    found = torch.empty(128)
    draw[(1,)](torch.tensor(key), found, start, C=128)
    assert found.tolist() == [
        splitmix_and_finaliser(key, i) for i in range(start, start + 128)
    ]


@pytest.mark.parametrize(
    "now", [(1.0, 2.0), (NAN, 1.0), (0.3, INF), (-INF, INF), (-1e-3, 0.0)]
)
def test_triton_track_matches_reference(kernels, now):
    found, expected = (torch.tensor([0.3, 1.7, 0.6]) for _ in range(2))
    for _ in range(3):
        kernels.track(found, *map(torch.tensor, now))
        reference.track(expected, *map(torch.tensor, now))
    assert torch.equal(found, expected)
    assert (found[2] == 0.6) != np.isfinite(now).all()


@pytest.mark.parametrize(
    ("M", "N", "many"), [(1, 1, 1), (37, 5, 1), (6, 300, 1), (70, 33, 5)]
)
def test_triton_affine_matches_int8_reference(kernels, M, N, many):
    g = torch.Generator().manual_seed(0)
    product = torch.randint(-(2**20), 2**20, (M, N), generator=g, dtype=torch.int32)
    codes = [
        torch.randint(-128, 128, (2, n), generator=g, dtype=torch.int32)
        for n in (M, many * N)
    ]
    tables = codes[0], normal(3, M), codes[1], normal(4, many * N)
    found, expected = product.clone(), product.clone()
    kernels.affine(found, *tables)
    integer_reference.dequantize_matmul_(expected, *tables)
    assert torch.equal(found, expected)
    assert not torch.equal(found, product)


def test_triton_registers_every_operator(interpreted):
    with torch.library._scoped_library("cpt_registered", "DEF") as library:
        for name, schema in operators.SCHEMAS.items():
            library.define(name + schema)
        interpreted.register(library)
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        plain = {
            "round_in_range",
            "linear",
        }  # made of torch's own operations on every device
        assert all(
            has(f"cpt_registered::{name}", "CUDA") != (name in plain)
            for name in operators.SCHEMAS
        )


def test_triton_backend_reports_failing_kernels(monkeypatch):
    """Name the reason if the kernels of Triton cannot run."""
    from cpt_extras.kernels import backend as module
    from cpt_extras.kernels.triton import operators as triton_kernels

    def failing(*args, **kwargs):
        raise RuntimeError(
            "Failed to find C compiler.\nPlease specify via CC environment variable."
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", failing)
    reason = "Triton's kernels do not run (RuntimeError: Failed to find C compiler.)"
    assert module._load_triton(False) == ("reference", reason)
    assert triton_kernels.unsupported_reason() == reason
    with pytest.raises(
        RuntimeError,
        match=r"CPT_KERNELS=triton asks for the Triton kernels, but Triton's kernels do",
    ):
        module._load_triton(True)


PLANS = [  # shape, its strides or None, granularity, programs of every launch
    ((64, 64, 3, 3), None, "per_channel", [64]),
    ((64, 64, 3, 3), (576, 1, 192, 64), "per_channel", [64]),
    ((768, 3072), None, "per_row", [768]),
    ((32, 12, 64, 128), (98304, 64, 1, 768), "per_row", [768]),  # keys
    ((32, 128, 768), None, "per_position", [384, 768]),
    ((169343, 512), None, "per_row", [21168]),
    ((20, 650), None, "per_tensor", [1]),
    ((128, 16, 32, 32), None, "per_tensor", [512, 512]),
    ((256, 64, 112, 112), None, "per_tensor", [392, 6272]),
]


@pytest.mark.parametrize(("shape", "strides", "granularity", "programs"), PLANS)
def test_tile_plan_launches_once_for_short_rows(shape, strides, granularity, programs):
    strides = strides or tiles.contiguous_strides(shape)
    plan = tiles.plan_tiles(
        shape, strides, strides, tiles.range_shape(shape, granularity)[1], False
    )
    assert [
        t.programs
        for t in ([plan.whole] if plan.whole else [plan.extremes, plan.rounding])
    ] == programs


# --- without a device: machine code -------------------------------------------------------------------


class Gpu:
    """Driver of a GPU that does not exist, for compilation only."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_device(self):
        return -self.capability

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", self.capability, 32)


@pytest.fixture
def compiled_for(monkeypatch, tmp_path):
    """Choose a GPU, and collect the name and compiled kernel of every launch on meta tensors."""
    launches, driver = [], triton.runtime.driver
    before = dict(vars(driver))

    def launch(kernel, grid):
        return lambda *args, **kw: launches.append(
            (kernel.fn.__name__, kernel.warmup(*args, grid=grid, **kw))
        )

    def choose(capability):
        driver.set_active(Gpu(capability))
        return launches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.JITFunction, "__getitem__", launch)
    yield choose
    vars(driver).clear()
    vars(driver).update(before)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, device="meta", dtype=dtype)


@pytest.mark.parametrize("capability", [80, 100])  # and 90 below
def test_triton_compiles_vectorised_machine_code(compiled_for, cut, capability):
    from cpt_extras.kernels.triton import operators as triton_kernels

    launches = compiled_for(capability)
    cut(
        {"TILE_ELEMENTS": 512, "MAX_WHOLE_ROW_TILE": 512}
    )  # four elements per thread instead of sixteen: ptxas is done sooner
    levels, key = meta(), meta(dtype=torch.int64)
    triton_kernels.fake_quantize(meta(64, 32, 3, 3), levels, "per_channel", None)
    triton_kernels.fake_quantize(meta(32, 128, 768), levels, "per_position", key)
    triton_kernels.range_of(meta(64, 64, 56, 56), "per_tensor")
    triton_kernels.track(meta(3), levels, levels)
    ints = partial(meta, dtype=torch.int32)
    assert (
        triton_kernels.encode(meta(64, 512), levels, levels, levels, key, True).dtype
        == torch.int8
    )
    triton_kernels.affine(
        ints(64, 512), ints(2, 64), meta(3, 64), ints(2, 512), meta(4, 512)
    )
    names = [
        "_whole_rows",
        "_extremes",
        "_round",
        "_extremes",
        "_join",
        "_track",
        "_round",
        "_affine",
    ]
    assert [name for name, _ in launches] == names
    for name, kernel in launches:
        code = kernel.asm["ptx"]
        assert len(kernel.asm["cubin"]) > 1000
        assert f".target sm_{capability}" in code
        assert not [
            word
            for word in ("fma.rn", "div.full", "div.approx", ".ftz", ".local")
            if word in code
        ], name
        assert (
            ("div.rn.f32" in code)
            == ("cvt.rni.f32.f32" in code)
            == (name in ("_whole_rows", "_round"))
        )
        assert "ld.global.v4" in code or name in (
            "_join",
            "_track",
            "_affine",
        )  # 16 bytes at once


def test_triton_uses_64_bit_offsets(compiled_for):
    from cpt_extras.kernels.triton import operators as triton_kernels

    launches = compiled_for(90)
    triton_kernels.fake_quantize(
        meta(2**16, 2**17), meta(), "per_tensor", meta(dtype=torch.int64)
    )
    triton_kernels.fake_quantize(meta(2**10, 2**15), meta(), "per_tensor", None)
    assert [name for name, _ in launches] == ["_extremes", "_round"] * 2
    from_32_bits = [
        "mad.wide.s32" in kernel.asm["ptx"] for _, kernel in launches
    ]  # an address from an index
    assert from_32_bits == [False, False, True, True]
