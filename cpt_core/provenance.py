"""Where a row comes from: commit, libraries, processor, threads - what must agree for a run to repeat bit for bit.

>>> sorted(source())
['commit', 'dirty', 'python', 'started']
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from cpt_core.paths import CHECKOUT, ROOT, results_dir

CPU_INFO = Path("/proc/cpuinfo")
# Modules that may take part in a run, by the distribution that installs them.
LIBRARIES = {
    "cpt-core": "cpt_core", "torch": "torch", "numpy": "numpy", "scipy": "scipy", "torchvision": "torchvision",
    "pillow": "PIL", "scikit-learn": "sklearn", "torchmetrics": "torchmetrics", "pycocotools": "pycocotools",
    "transformers": "transformers", "tokenizers": "tokenizers", "dgl": "dgl", "ogb": "ogb", "pandas": "pandas",
    "triton": "triton",
}  # fmt: skip
WIDE = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "asimd", "sve")
SWITCHES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def source() -> dict[str, Any]:
    """Return the commit of the checkout, Python, and the time: what is known without torch."""
    return {"started": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version(), **commit()}


def commit() -> dict[str, Any]:
    """Return the commit of the checkout and whether tracked files differ from it; None without a repository.

    The rows kept under ``data/results`` take no part in a run: one that has just come makes the next one not dirty.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(CHECKOUT), *words], capture_output=True, text=True, check=True).stdout

    if CHECKOUT is None or not (CHECKOUT / ".git").exists():  # git would look for one in the folders above
        return {"commit": None, "dirty": None}
    try:
        but_rows = ("--", ".", f":(exclude){results_dir().relative_to(ROOT).as_posix()}")
        changed = git("status", "--porcelain", "-uno", *but_rows).strip()
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def versions() -> dict[str, str]:
    """Return the versions of the libraries that this process has imported."""
    return {name: version(name) for name, module in LIBRARIES.items() if module in sys.modules}


def version(name: str) -> str:
    """Return the version of a library as it is installed here, or "not installed"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def machine() -> dict[str, Any]:
    """Return what computes on the CPU: its model, the instructions it has and torch uses, threads, BLAS, oneDNN.

    ``switches`` holds the environment variables that choose other instructions, where there are any.
    """
    import torch

    config = torch.__config__.show()

    def built_with(pattern: str) -> str | None:
        found = re.search(pattern, config)
        return found[1] if found else None

    return {
        **cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "blas": built_with(r"BLAS_INFO=(\w+)"),
        "mkl": built_with(r"Math Kernel Library Version ([\d.]+)"),
        "onednn": built_with(r"MKL-DNN v([\d.]+)"),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
    }


def cpu() -> dict[str, Any]:
    """Return the model of the processor and its wide instructions, as the kernel of the system names them."""
    fields, there = _cpu_info()
    if not fields:  # not this system
        return {"cpu": platform.processor() or platform.machine(), "instructions": []}
    parts = [f"{name} {fields[name]}" for name in ("cpu family", "model", "stepping") if name in fields]
    name = fields.get("model name") or platform.machine()
    return {"cpu": ", ".join([name, *parts]), "instructions": [one for one in WIDE if one in there]}


def processor() -> tuple[str, ...]:
    """Return the maker of the processor and its widest instructions, such as "AuthenticAMD", "AVX2"; () if unknown."""
    fields, there = _cpu_info()
    widest = next((name for name, flag in (("AVX512", "avx512f"), ("AVX2", "avx2")) if flag in there), None)
    return (fields["vendor_id"], widest) if "vendor_id" in fields and widest else ()


def _cpu_info() -> tuple[dict[str, str], set[str]]:
    """Return what the kernel of the system says of the first processor, and its flags; nothing on other systems."""
    fields: dict[str, str] = {}
    try:
        text = CPU_INFO.read_text(encoding="utf-8")
    except OSError:
        return fields, set()
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields, set((fields.get("flags") or fields.get("Features") or "").split())
