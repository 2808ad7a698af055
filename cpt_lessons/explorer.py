"""The explorer: one HTML page that trains a schedule beside static precision of the same cost, in the browser.

It needs no server, no kernel and no network; the digits of scikit-learn are in it. ``schedules.js`` has the schedules,
the costs and the static rival of ``cpt_core``, with the constants taken from there. ``training.js`` has its rounding,
its noise and the network of notebook 00. ``explorer.js`` is the page's own code.
"""

import posixpath
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from scipy import stats
from sklearn.datasets import load_digits

from cpt_core.schedules.profiles import SUITE, Exponential, Rex
from cpt_extras.files import write_text
from cpt_lab.analysis.rendering import render
from cpt_lab.analysis.statistics import ALPHA

STEPS, BATCH, LEARN = 400, 32, 1000  # of notebook 00
SEEDS = (3, 5, 10, 20, 40)
MAX_BITS, MAX_CYCLES = 12, 16
LESSON = "notebooks/00_start_here.html"  # beside the page of the course
LINK_SCHEMES = ("", "http", "https", "file")  # of addresses that lead to a page
SCRIPTS = {
    name: Path(__file__).with_name(f"{name}.js")
    for name in ("schedules", "training", "explorer")
}


def constants() -> dict[str, Any]:
    """Return what the scripts take from Python: the suite and its profiles, limits, the lengths of a training."""
    return {
        "suite": {name: asdict(entry) for name, entry in SUITE.items()},
        "rate": Exponential().rate,
        "d": Rex().d,
        "maxBits": MAX_BITS,
        "maxCycles": MAX_CYCLES,
        "steps": STEPS,
        "batch": BATCH,
        "learn": LEARN,
        "student": {n: stats.t.ppf(1 - ALPHA / 2, n - 1) for n in SEEDS},
    }


def digits() -> dict[str, str]:
    """Return the pictures of scikit-learn's digits, a letter a pixel from A (0) to Q (16), and their digits."""
    images, labels = load_digits(return_X_y=True)
    return {
        "images": (images.astype("uint8") + ord("A")).tobytes().decode("ascii"),
        "labels": "".join(map(str, labels)),
    }


def write_explorer(out: Path, home: str = "") -> Path:
    """Write the self-contained page, with links to ``home``; return its path.

    Raises:
        ValueError: for a ``home`` that is no page, such as a script.
        FileNotFoundError: where the folder of ``out`` is not there.
    """
    if urlsplit(home).scheme not in LINK_SCHEMES:
        raise ValueError(
            f"home: expected a page such as index.html or https://example.org/, got {home!r}"
        )
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent}")
    code = {name: path.read_text(encoding="utf-8") for name, path in SCRIPTS.items()}
    lesson = ""
    if urlsplit(home).scheme:
        lesson = urljoin(home, LESSON)
    elif home:  # urljoin would drop ".." at the start
        lesson = posixpath.join(posixpath.dirname(home), LESSON)
    write_text(
        out,
        render(
            "explorer.html.j2",
            constants=constants(),
            digits=digits(),
            home=home,
            lesson=lesson,
            code=code,
        ),
    )
    return out
