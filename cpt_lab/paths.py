"""Where things are: every path of the project comes from here.

In a checkout, and in an unpacked source distribution, all lies in its folders. A wheel carries the committed rows, the
paper's numbers and the notebooks inside the package, under ``shipped``; what it writes goes to the user's own folders,
never beside the package.
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
    """Return the folder that relative paths of the user's mean: the checkout, else the working directory."""
    return CHECKOUT or Path.cwd()


def _given(name: str) -> Path | None:
    """Return the folder that a variable names; ``~`` is the user's home also where no shell has read it."""
    given = os.environ.get(name)
    try:
        return Path(given).expanduser() if given else None
    except RuntimeError:
        raise ValueError(
            f"{name}={given}: this user has no home folder; give the whole path"
        ) from None


def data_dir() -> Path:
    """Return the folder of data sets: ``CPT_DATA_DIR``, else ``data/cache`` of the checkout, else the user's cache.

    A user without a home has ``data/cache`` in the working directory.
    """
    if given := _given("CPT_DATA_DIR"):
        return given
    if CHECKOUT is None:
        with suppress(RuntimeError):
            cache = user_cache_path("cpt_core", appauthor=False)
            if cache.is_absolute():  # older versions of platformdirs leave ~ as it is
                return cache
    return work_dir() / "data" / "cache"


def runs_dir() -> Path:
    """Return the folder that runs are written to: ``CPT_RUNS_DIR``, else ``runs`` in ``work_dir()``."""
    return _given("CPT_RUNS_DIR") or work_dir() / "runs"


def _kept(place: str) -> Path:
    """Return a folder of what is committed: that of the checkout, or what a wheel carries of it."""
    return CHECKOUT / place if CHECKOUT else _SHIPPED / Path(place).name


results_dir = partial(_kept, "data/results")  # the result rows
paper_dir = partial(_kept, "data/paper")  # the numbers taken from the paper
cards_dir = partial(_kept, "data/cards")  # a page per data set
notebooks_dir = partial(_kept, "notebooks")
solutions_dir = partial(_kept, "notebooks/solutions")  # of the notebooks' exercises
sweeps_dir = partial(
    _kept, "notebooks/sweeps"
)  # the paper's sweeps as parameters for `papermill -f`
study_dir = partial(_kept, "examples/study")  # what a study of one's own begins with


def all_stores() -> list[Path]:
    """Return the committed stores and those under ``runs/`` but for smoke runs."""
    own = [p for p in sorted(runs_dir().glob("*/*.jsonl")) if p.parent.name != "smoke"]
    return [*sorted(results_dir().glob("*.jsonl")), *own]


def command(words: str) -> str:
    """Return a command of this package as it can be typed here: by this Python, whether or not it is on the path."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return f"{shlex.quote(str(python))} -m cpt_lab {words}"
