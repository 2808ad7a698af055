"""Compilation of the C++ kernels."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from cpt_extras.files import write_text


def compile_library(
    compiler: str, flags: tuple[str, ...], source: Path, library: Path
) -> str:
    """Compile a source and put the library in its place, with its digest; return why that failed, "" if not."""
    # torch.utils.cpp_extension knows these folders, too, but needs setuptools, and its import looks for CUDA and warns.
    home = Path(torch.__file__).parent
    headers = home / "include"
    includes = (
        headers,
        headers / "torch" / "csrc" / "api" / "include",
        sysconfig.get_paths()["include"],
    )
    handle, part = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        command = [
            compiler,
            "-std=c++20",
            *flags,
            *(f"-I{path}" for path in includes),
            str(source),
            "-o",
            part,
        ]
        command += [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            lines = [
                line for line in process.stderr.splitlines() if "error" in line
            ] or process.stderr.splitlines()
            return f"{compiler} failed: {lines[0] if lines else f'exit code {process.returncode}'}"
        os.chmod(part, 0o644)
        write_text(
            library.with_suffix(".sha256"),
            hashlib.sha256(Path(part).read_bytes()).hexdigest(),
        )
        os.replace(part, library)
    finally:
        Path(part).unlink(missing_ok=True)
    return ""
