"""Paths of the project: folders of data, runs, committed rows and notebooks.

In a checkout, and in an unpacked source distribution, they are folders of the repository. A wheel carries the committed
rows, the paper's numbers and the notebooks inside the package, under ``shipped``; what it writes goes to
the user's folders, never beside the package.
"""

import os
import shlex
import sys
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path

from platformdirs import user_cache_path

PACKAGE = Path(str(files("cpt_lab")))

# The folder that holds the package: a checkout, or site-packages.
ROOT = PACKAGE.parent

_SHIPPED = PACKAGE / "shipped"

# The checkout that the package runs from; None when it is installed from a wheel.
CHECKOUT = None if _SHIPPED.is_dir() else ROOT


def work_dir() -> Path:
    """Return the folder that relative paths start from: the checkout, else the working directory."""
    return CHECKOUT or Path.cwd()


def _folder_from_environment(name: str) -> Path | None:
    """Return the folder that an environment variable names, with ``~`` expanded; None if it is not set."""
    value = os.environ.get(name)
    try:
        return Path(value).expanduser() if value else None
    except RuntimeError:
        raise ValueError(
            f"{name}={value}: this user has no home folder; give the whole path"
        ) from None


def data_dir() -> Path:
    """Return the folder of data sets: ``CPT_DATA_DIR``, else ``data/cache`` of the checkout, else the user's cache.

    A user without a home has ``data/cache`` in the working directory.
    """
    folder = _folder_from_environment("CPT_DATA_DIR")
    if folder:
        return folder
    if CHECKOUT is None:
        with suppress(RuntimeError):
            cache = user_cache_path("cpt_core", appauthor=False)
            if cache.is_absolute():  # older versions of platformdirs leave ~ as it is
                return cache
    return work_dir() / "data" / "cache"


def runs_dir() -> Path:
    """Return the folder that runs are written to: ``CPT_RUNS_DIR``, else ``runs`` in ``work_dir()``."""
    return _folder_from_environment("CPT_RUNS_DIR") or work_dir() / "runs"


def _shipped_folder(place: str) -> Path:
    """Return a folder of committed files: in the checkout, or inside an installed wheel."""
    return CHECKOUT / place if CHECKOUT else _SHIPPED / Path(place).name


results_dir = partial(_shipped_folder, "data/results")  # the result rows
paper_dir = partial(_shipped_folder, "data/paper")  # the numbers taken from the paper
cards_dir = partial(_shipped_folder, "data/cards")  # a page per data set
notebooks_dir = partial(_shipped_folder, "notebooks")
solutions_dir = partial(
    _shipped_folder, "notebooks/solutions"
)  # of the notebooks' exercises
sweeps_dir = partial(
    _shipped_folder, "notebooks/sweeps"
)  # the paper's sweeps as parameters for `papermill -f`
study_dir = partial(
    _shipped_folder, "examples/study"
)  # template of a study with the user's own model


def all_stores() -> list[Path]:
    """Return the committed stores and those under ``runs/`` but for smoke runs."""
    local_stores = [
        path
        for path in sorted(runs_dir().glob("*/*.jsonl"))
        if path.parent.name != "smoke"
    ]
    return [*sorted(results_dir().glob("*.jsonl")), *local_stores]


def command(words: str) -> str:
    """Return the shell command that runs ``cpt`` with some words by this Python, also if ``cpt`` is not on the path."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return f"{shlex.quote(str(python))} -m cpt_lab {words}"
