"""How figures look: colours, labels, layout, titles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from cpt_core.analysis.groups import title_of

# colour-blind safe (Okabe and Ito)
COLORS = {"large": "#D55E00", "medium": "#009E73", "small": "#0072B2", "static": "#222222"}

LABELS = {
    "relative_cost": "training cost relative to static q_max (BitOps)",
    "noise_exposure": "noise exposure: mean 4^-q relative to static q_max",
}

STYLE: Any = {
    "figure.dpi": 100,
    "savefig.bbox": "tight",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


@contextmanager
def drawing(rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, an array (rows, columns), in our style; lay it out in the end.

    The figure is closed, so that a notebook shows it once: as the value of its cell.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(rows, columns, squeeze=False, **options)
        try:
            yield figure, axes
            figure.tight_layout()
        finally:
            plt.close(figure)


def title(runs: pd.DataFrame, what: str = "") -> str:
    """Return the title of a figure: what was trained and is shown, over how many seeds; a warning at smoke scale.

    The name of the user's own data is no formula, also with dollars in it.
    """
    warning = "smoke scale: not a result. " if runs["scale"].iloc[0] == "smoke" else ""
    named = title_of(runs).replace("$", r"\$")
    return f"{warning}{named}{what}, {counted(runs['seed'].nunique(), 'seed')}"


def counted(n: int, word: str) -> str:
    """Return a number and a word, in the plural where it needs one."""
    return f"{n} {word}" + "s" * (n != 1)
