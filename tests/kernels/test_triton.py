"""Triton kernels without a device: noise, tiles, and machine code for several GPUs."""

from functools import partial

import pytest
import torch
from quantization.test_quantizers import splitmix_and_finaliser

from cpt_extras.kernels import backend, operators
from cpt_extras.kernels.triton import tiles

triton = pytest.importorskip("triton", reason="triton comes with torch for CUDA")
tl = triton.language


def _draw(key, out, start, count: tl.constexpr):
    i = tl.arange(0, count)
    tl.store(out + i, _uniform(key, start + i.to(tl.int64), True))  # noqa: F821


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**34 - 5])
@pytest.mark.parametrize("key", [0, 5, -(2**63), 2**63 - 1])
def test_triton_noise_matches_hash_reference(interpreted, monkeypatch, key, start):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(globals(), "_uniform", interpreted._uniform)
    noise = torch.empty(128)
    triton.jit(_draw)[(1,)](torch.tensor(key), noise, start, count=128)
    expected = [splitmix_and_finaliser(key, i) for i in range(start, start + 128)]
    assert noise.tolist() == expected


def test_triton_registers_every_operator(interpreted):
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    with torch.library._scoped_library("cpt_registered", "DEF") as library:
        for name, schema in operators.SCHEMAS.items():
            library.define(name + schema)
        interpreted.register(library)
        registered = {
            name
            for name in operators.SCHEMAS
            if has_kernel(f"cpt_registered::{name}", "CUDA")
        }
    made_of_torch_operations = {"round_in_range", "linear"}
    assert registered == set(operators.SCHEMAS) - made_of_torch_operations


def test_triton_backend_reports_failing_kernels(monkeypatch):
    """Name the reason if the kernels of Triton cannot run."""
    from cpt_extras.kernels.triton import operators as triton_kernels

    def fail(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", fail)
    reason = "Triton's kernels do not run (RuntimeError: Failed to find C compiler.)"
    assert backend._load_triton(False) == ("reference", reason)
    assert triton_kernels.unsupported_reason() == reason
    message = "asks for the Triton kernels, but Triton's kernels do not run"
    with pytest.raises(RuntimeError, match=message):
        backend._load_triton(True)


@pytest.mark.parametrize(
    ("shape", "strides", "granularity", "programs"),
    [
        ((64, 64, 3, 3), None, "per_channel", [64]),
        ((64, 64, 3, 3), (576, 1, 192, 64), "per_channel", [64]),
        ((768, 3072), None, "per_row", [768]),
        ((32, 12, 64, 128), (98304, 64, 1, 768), "per_row", [768]),  # keys
        ((32, 128, 768), None, "per_position", [384, 768]),
        ((169343, 512), None, "per_row", [21168]),
        ((20, 650), None, "per_tensor", [1]),
        ((128, 16, 32, 32), None, "per_tensor", [512, 512]),
        ((256, 64, 112, 112), None, "per_tensor", [392, 6272]),
    ],
)
def test_tile_plan_launches_once_for_short_rows(shape, strides, granularity, programs):
    strides = strides or tiles.contiguous_strides(shape)
    range_strides = tiles.range_shape(shape, granularity)[1]
    plan = tiles.plan_tiles(shape, strides, strides, range_strides, False)
    launches = [plan.whole] if plan.whole else [plan.extremes, plan.rounding]
    assert [launch.programs for launch in launches] == programs


# --- machine code -------------------------------------------------------------------------------


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
def compile_for(monkeypatch, tmp_path):
    """Choose a GPU; return (name, compiled kernel) of every launch on meta tensors."""
    launches, driver = [], triton.runtime.driver
    before = dict(vars(driver))

    def launch(kernel, grid):
        def run(*args, **options):
            compiled = kernel.warmup(*args, grid=grid, **options)
            launches.append((kernel.fn.__name__, compiled))

        return run

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


# Instructions that round differently from torch, or that spill registers to memory.
FORBIDDEN = "fma.rn", "div.full", "div.approx", ".ftz", ".local"
ROUNDING_KERNELS = "_whole_rows", "_round"
SMALL_KERNELS = "_join", "_track", "_affine"  # which read too little for vectors


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 100])  # and 90 below
def test_triton_compiles_vectorised_machine_code(compile_for, set_tiles, capability):
    from cpt_extras.kernels.triton import operators as triton_kernels

    launches = compile_for(capability)
    # four elements per thread instead of sixteen: ptxas is done sooner
    set_tiles({"TILE_ELEMENTS": 512, "MAX_WHOLE_ROW_TILE": 512})
    steps, key, ints = meta(), meta(dtype=torch.int64), partial(meta, dtype=torch.int32)
    triton_kernels.fake_quantize(meta(64, 32, 3, 3), steps, "per_channel", None)
    triton_kernels.fake_quantize(meta(32, 128, 768), steps, "per_position", key)
    triton_kernels.range_of(meta(64, 64, 56, 56), "per_tensor")
    triton_kernels.track(meta(3), steps, steps)
    codes = triton_kernels.encode(meta(64, 512), steps, steps, steps, key, True)
    assert codes.dtype == torch.int8
    tables = ints(2, 64), meta(3, 64), ints(2, 512), meta(4, 512)
    triton_kernels.affine(ints(64, 512), *tables)
    names = "_whole_rows _extremes _round _extremes _join _track _round _affine"
    assert [name for name, _ in launches] == names.split()
    for name, kernel in launches:
        code = kernel.asm["ptx"]
        assert len(kernel.asm["cubin"]) > 1000
        assert f".target sm_{capability}" in code
        assert not [word for word in FORBIDDEN if word in code], name
        for instruction in ("div.rn.f32", "cvt.rni.f32.f32"):
            assert (instruction in code) == (name in ROUNDING_KERNELS)
        assert "ld.global.v4" in code or name in SMALL_KERNELS  # 16 bytes at once


@pytest.mark.slow
def test_triton_uses_64_bit_offsets(compile_for):
    from cpt_extras.kernels.triton import operators as triton_kernels

    launches, key = compile_for(90), meta(dtype=torch.int64)
    triton_kernels.fake_quantize(meta(2**16, 2**17), meta(), "per_tensor", key)
    triton_kernels.fake_quantize(meta(2**10, 2**15), meta(), "per_tensor", None)
    assert [name for name, _ in launches] == ["_extremes", "_round"] * 2
    # an address from an index of 32 bits
    from_32_bits = ["mad.wide.s32" in kernel.asm["ptx"] for _, kernel in launches]
    assert from_32_bits == [False, False, True, True]
