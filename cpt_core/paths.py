"""Where things are: every path of the project comes from here, never from the folder a program is started in."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def data_dir() -> Path:
    """Return the folder that data sets are looked up in: ``CPT_DATA_DIR``, else ``data/cache``."""
    return Path(os.environ.get("CPT_DATA_DIR") or ROOT / "data" / "cache")


def runs_dir() -> Path:
    """Return the folder that runs are written to: ``CPT_RUNS_DIR``, else ``runs``."""
    return Path(os.environ.get("CPT_RUNS_DIR") or ROOT / "runs")


def results_dir() -> Path:
    """Return the folder of the committed result rows."""
    return ROOT / "data" / "results"


def paper_dir() -> Path:
    """Return the folder of the numbers taken from the paper."""
    return ROOT / "data" / "paper"


def notebooks_dir() -> Path:
    """Return the folder of the notebooks."""
    return ROOT / "notebooks"
