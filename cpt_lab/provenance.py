"""Provenance of result rows: commit, libraries, processor and threads, which must be equal for bit-for-bit repetition.

>>> sorted(source())
['commit', 'dirty', 'python', 'started']
"""

import os
import platform
import re
import subprocess
import sys
import warnings
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, NamedTuple

from cpt_extras.cpu_info import cpu
from cpt_lab.paths import CHECKOUT, ROOT, results_dir
from cpt_lab.resources import MachineWarning

# Modules that a run may import, by the distribution that installs them.
RECORDED_LIBRARIES = {
    "cpt-core": "cpt_core",
    "torch": "torch",
    "numpy": "numpy",
    "scipy": "scipy",
    "torchvision": "torchvision",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "torchmetrics": "torchmetrics",
    "pycocotools": "pycocotools",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "dgl": "dgl",
    "ogb": "ogb",
    "pandas": "pandas",
    "triton": "triton",
}
SWITCHES = "ATEN_CPU_CAPABILITY MKL_CBWR MKL_ENABLE_INSTRUCTIONS ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA".split()
SWITCHES += ["CPT_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG"]


def source() -> dict[str, Any]:
    """Return the time, the Python version and the commit of the checkout."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **commit(),
    }


_has_warned_of_commit = False


def told_of_commit() -> None:
    """Suppress the warning of an unknown commit, because the user has seen it."""
    global _has_warned_of_commit
    _has_warned_of_commit = True


class Commit(NamedTuple):
    """The commit of the checkout."""

    name: str | None  # None where it is not known
    dirty: bool | None  # whether tracked files differ from it
    reason: str = ""  # why it is not known


def commit() -> dict[str, Any]:
    """Return the commit of the checkout and whether tracked files differ from it; None where it is not known.

    Warns:
        MachineWarning: once in a process, of a checkout whose commit is not known.
    """
    global _has_warned_of_commit
    name, dirty, reason = find_commit()
    if name is None and CHECKOUT is not None and not _has_warned_of_commit:
        _has_warned_of_commit = True
        warnings.warn(
            f"rows name no commit (null): {reason}; `cpt doctor` checks this machine",
            MachineWarning,
            2,
        )
    return {"commit": name, "dirty": dirty}


def find_commit() -> Commit:
    """Return the commit of the checkout and whether tracked files differ from it, or why that is not known.

    Committed rows under ``data/results`` do not count: a new row there does not make the tree of the next run dirty.
    """
    if CHECKOUT is None:
        return Commit(
            None,
            None,
            "the package is installed from a wheel, which holds no repository",
        )
    if not (CHECKOUT / ".git").exists():
        return Commit(
            None, None, f"{CHECKOUT} is no repository: there is no .git in it"
        )
    try:
        top, name = _git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        if not os.path.samefile(
            top, CHECKOUT
        ):  # if .git is damaged, git searches the folders above
            return Commit(
                None,
                None,
                f"{CHECKOUT / '.git'} is no repository, and git takes that of {top}",
            )
        but_rows = (
            "--",
            ".",
            f":(exclude){results_dir().relative_to(ROOT).as_posix()}",
        )
        changed = _git("status", "--porcelain", "-uno", *but_rows).strip()
    except FileNotFoundError:
        return Commit(None, None, "git is not installed")
    except (OSError, ValueError) as error:
        return Commit(None, None, f"git cannot read {CHECKOUT}: {error}")
    return Commit(name, bool(changed))


def _git(*words: str) -> str:
    """Run git in the checkout and return its output; the owner and git's environment variables are ignored.

    Git trusts no repository of another user, because its configuration may name programs that git then runs. The code
    of this repository runs already. Optional locks are not taken, because many runs call git at once.

    Raises:
        ValueError: with git's reason.
    """
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    } | {"LC_ALL": "C"}
    options = ("-c", "safe.directory=*", "--no-optional-locks", "-C", str(CHECKOUT))
    # The second attempt ignores the user's settings, which may be in the home of another user.
    for settings in ({}, {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}):
        completed = subprocess.run(
            ["git", *options, *words],
            capture_output=True,
            text=True,
            env=plain | settings,
        )
        if not completed.returncode:
            return completed.stdout
    lines = completed.stderr.strip().splitlines() or [f"status {completed.returncode}"]
    raise ValueError(lines[0].removeprefix("fatal: "))


def versions() -> dict[str, str]:
    """Return the versions of the libraries that this process has imported."""
    return {
        name: version(name)
        for name, module in RECORDED_LIBRARIES.items()
        if module in sys.modules
    }


def version(name: str) -> str:
    """Return the version of a library as it is installed here, or "not installed"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def machine() -> dict[str, Any]:
    """Return the CPU with its instructions, the instructions that torch uses, threads, BLAS and oneDNN.

    ``switches`` holds the environment variables that choose how it computes, where there are any.
    """
    import torch

    config = torch.__config__.show()

    def built_with(pattern: str) -> str | None:
        match = re.search(pattern, config)
        return match[1] if match else None

    return {
        **cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "blas": built_with(r"BLAS_INFO=(\w+)"),
        "mkl": built_with(r"Math Kernel Library Version ([\d.]+)"),
        "onednn": built_with(r"MKL-DNN v([\d.]+)"),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
    }
