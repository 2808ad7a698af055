"""Where a row comes from: commit, libraries, processor, threads - what must agree for a run to repeat bit for bit.

>>> sorted(source())
['commit', 'dirty', 'python', 'started']
"""

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from cpt_extras.cpu_info import cpu
from cpt_lab.paths import CHECKOUT, ROOT, results_dir

# Modules that may take part in a run, by the distribution that installs them.
LIBRARIES = {
    "cpt-core": "cpt_core", "torch": "torch", "numpy": "numpy", "scipy": "scipy", "torchvision": "torchvision",
    "pillow": "PIL", "scikit-learn": "sklearn", "torchmetrics": "torchmetrics", "pycocotools": "pycocotools",
    "transformers": "transformers", "tokenizers": "tokenizers", "dgl": "dgl", "ogb": "ogb", "pandas": "pandas",
    "triton": "triton",
}  # fmt: skip
SWITCHES = "ATEN_CPU_CAPABILITY MKL_CBWR MKL_ENABLE_INSTRUCTIONS ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA".split()
SWITCHES += ["CPT_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG"]


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

    ``switches`` holds the environment variables that choose how it computes, where there are any.
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
