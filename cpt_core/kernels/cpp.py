"""Build ``operators.cpp`` once, into the user's cache, and load it.

The library's name holds what it depends on: source, flags, torch, instructions of the processor. It is written beside
its place and moved there, under a lock: processes that start at once build it once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

from cpt_core.paths import kernels_dir

log = logging.getLogger(__name__)
SOURCES = sorted(Path(__file__).parent.glob("*.cpp")) + sorted(Path(__file__).parent.glob("*.h"))
# No contraction: a fused multiply-add rounds once where torch's operations round twice. The others let loops with
# rounding and comparisons be vectorised and change no result.
FLAGS = ("-O3", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
WIDE = {
    "AVX2": ("-mavx2",),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
}


class NoKernelsError(RuntimeError):
    """The C++ kernels cannot be had here; the message says why."""


def compiler() -> str | None:
    """Return the C++ compiler: ``CXX``, else g++ or clang++, else None."""
    return shutil.which(os.environ.get("CXX") or "g++") or (None if "CXX" in os.environ else shutil.which("clang++"))


def load() -> str:
    """Load the kernels, build them first if need be, and return what they are.

    Raises:
        NoKernelsError: when there is no compiler, or it fails.
    """
    flags = (*FLAGS, *WIDE.get(capability(), ()))
    sources = [(path.name, path.read_text(encoding="utf-8")) for path in SOURCES]
    facts = (*sources, *flags, torch.__version__, sys.platform, platform.machine())
    name = f"cpt_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    folder = kernels_dir()
    library = folder / name
    if library.exists():
        try:
            _load(library)
        except NoKernelsError as error:  # cut short on a full disk, say
            log.warning("%s; they are built again", error)
        else:
            return f"{capability()}, {library}"
    if sys.platform == "win32":
        raise NoKernelsError("they are not built on Windows")
    if compiler() is None:
        raise NoKernelsError(f"there is no C++ compiler ({os.environ.get('CXX') or 'g++ or clang++'})")
    before = library.stat().st_mtime_ns if library.exists() else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}.lock"):
            if not library.exists() or library.stat().st_mtime_ns == before:  # nobody has built them meanwhile
                _build(library, flags)
    except OSError:  # a cache that cannot be written to
        with tempfile.TemporaryDirectory(prefix="cpt_kernels_") as own:
            _build(Path(own) / name, flags)
            _load(Path(own) / name)
        return f"{capability()}, built for this process alone: {folder} cannot be written to"
    _load(library)
    return f"{capability()}, {library}"


def capability() -> str:
    """Return the instructions that torch itself uses here, such as "AVX512"."""
    return torch.backends.cpu.get_cpu_capability()


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise NoKernelsError(f"{library} cannot be loaded: {error}") from None


def _build(library: Path, flags: tuple[str, ...]) -> None:
    # torch.utils.cpp_extension knows these folders, too, but needs setuptools, and its import looks for CUDA and warns.
    home = Path(torch.__file__).parent
    headers = home / "include"
    includes = (headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    found = compiler()
    assert found is not None
    handle, part = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        command = [found, "-std=c++20", *flags, *(f"-I{path}" for path in includes), str(SOURCES[0]), "-o", part]
        command += [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise NoKernelsError(f"{found} failed: {lines[0] if lines else f'exit code {done.returncode}'}")
        os.chmod(part, 0o644)
        os.replace(part, library)
    finally:
        Path(part).unlink(missing_ok=True)
