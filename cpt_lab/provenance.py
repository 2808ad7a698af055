"""Where a row comes from: commit, libraries, processor, threads - what must agree for a run to repeat bit for bit.

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

# Modules that may take part in a run, by the distribution that installs them.
LIBRARIES = {
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
    """Return the commit of the checkout, Python, and the time: what is known without torch."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **commit(),
    }


_told = False  # that the commit is not known


def told_of_commit() -> None:
    """Note that the user has been told of a commit that is not known."""
    global _told
    _told = True


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
    global _told
    name, dirty, reason = find_commit()
    if name is None and CHECKOUT is not None and not _told:
        _told = True
        warnings.warn(
            f"rows name no commit (null): {reason}; `cpt doctor` checks this machine",
            MachineWarning,
            2,
        )
    return {"commit": name, "dirty": dirty}


def find_commit() -> Commit:
    """Return the commit of the checkout and whether tracked files differ from it, or why that is not known.

    The rows kept under ``data/results`` take no part in a run: one that has just come makes the next one not dirty.
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
        ):  # git looks for one in the folders above where .git is damaged
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
    """Return what git says of the checkout, whoever owns it and whatever the environment says of repositories.

    Git trusts no repository of another user, for its configuration may name programs that git then runs. The code of
    this one runs already. Locks that only make later calls faster are not taken: many runs ask at once.

    Raises:
        ValueError: with git's reason.
    """
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    } | {"LC_ALL": "C"}
    options = ("-c", "safe.directory=*", "--no-optional-locks", "-C", str(CHECKOUT))
    # the second time without the user's settings, which may be in the home of somebody else
    for settings in ({}, {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}):
        done = subprocess.run(
            ["git", *options, *words],
            capture_output=True,
            text=True,
            env=plain | settings,
        )
        if not done.returncode:
            return done.stdout
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    raise ValueError(lines[0].removeprefix("fatal: "))


def versions() -> dict[str, str]:
    """Return the versions of the libraries that this process has imported."""
    return {
        name: version(name)
        for name, module in LIBRARIES.items()
        if module in sys.modules
    }


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
