"""Fixtures for tests of several kernel backends."""

import importlib.util
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import WITH_CUDA

from cpt_extras.kernels import backend, gemm_backend, operators
from cpt_extras.kernels.triton import tiles

# Sizes of Triton's tiles: every row in one block, or several of everything and 64-bit offsets.
WHOLE_ROWS = {
    "TILE_ELEMENTS": 4096,
    "MAX_WHOLE_ROW_TILE": 16384,
    "MIN_WIDE_OFFSET": 2**30,
}
PARTS_OF_ROWS = {
    "TILE_ELEMENTS": 256,
    "MAX_WHOLE_ROW_TILE": 4,
    "EXTREMES_PROGRAMS": 3,
    "ROUNDING_PROGRAMS": 2,
    "MAX_DIVIDED_COLUMNS": 8,
    "MIN_WIDE_OFFSET": 0,
}


@pytest.fixture
def set_tiles(monkeypatch):
    """Return a function that sets the sizes of Triton's tiles until the test ends."""

    def set_sizes(sizes):
        for name, value in sizes.items():
            monkeypatch.setattr(tiles, name, value)
        tiles.plan_tiles.cache_clear()

    yield set_sizes
    tiles.plan_tiles.cache_clear()


@pytest.fixture(scope="session")
def interpreted():
    """Load a second copy of the Triton kernels, for Triton's interpreter."""
    pytest.importorskip("triton", reason="triton comes with torch for CUDA")
    spec = importlib.util.find_spec("cpt_extras.kernels.triton.operators")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def interpreted_family(interpreted):
    """Return the operators of Triton's interpreter as a family."""
    library = operators._register("cpt_interpreted")
    interpreted.register(library, "CPU")
    yield torch.ops.cpt_interpreted
    library._destroy()


def run_on(family, device, name, *args):
    """Run an operator on a device, with arguments and results on the CPU."""
    moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
    with np.errstate(all="ignore"):  # the interpreter's numpy warns of infinities
        result = getattr(family, name)(*moved)
    if name.endswith("_") and device != "cpu":
        args[0].copy_(moved[0])
    if isinstance(result, torch.Tensor):
        return result.cpu()
    return result and [t.cpu() for t in result]


@pytest.fixture(
    params=[
        "cpp",
        "interpreter, whole rows",
        "interpreter, parts of rows",
        pytest.param("cuda, whole rows", marks=WITH_CUDA),
        pytest.param("cuda, parts of rows", marks=WITH_CUDA),
    ]
)
def kernels(request, set_tiles):
    """Return a backend's operators of CPU tensors as functions, and ``size`` for samples."""
    name, _, tile_sizes = request.param.partition(", ")
    if name == "cpp":
        request.getfixturevalue("cpp_kernels")
        family, device = torch.ops.cpt, "cpu"
    elif name == "cuda":
        assert backend.backend().cuda == "triton", backend.backend()
        family, device = torch.ops.cpt, "cuda"
    else:
        family, device = request.getfixturevalue("interpreted_family"), "cpu"
    if tile_sizes:
        set_tiles(WHOLE_ROWS if tile_sizes == "whole rows" else PARTS_OF_ROWS)
    functions = {op: partial(run_on, family, device, op) for op in operators.SCHEMAS}
    return SimpleNamespace(**functions, name=name, size=5 if name == "cpp" else 1)


@pytest.fixture
def threaded():
    """Set the number of threads, and restore it afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def undecided(monkeypatch):
    """Forget the chosen backend, and restore it afterwards."""
    monkeypatch.setattr(backend, "_active", None)
    before = operators.active, operators.has_cpp_gradient, gemm_backend.active
    yield
    operators.active, operators.has_cpp_gradient = before[:2]
    gemm_backend.use(before[2])
