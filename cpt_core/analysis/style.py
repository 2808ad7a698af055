"""How figures look: colours, labels, layout, titles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from cpt_core.analysis.groups import title_of
from cpt_core.analysis.metrics import counted

# colour-blind safe (Okabe and Ito)
COLORS = {"large": "#D55E00", "medium": "#009E73", "small": "#0072B2", "static": "#222222", "own": "#CC79A7"}

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
        figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", **options)
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def legend_below(figure: Any, ax: Any) -> None:
    """Put the legend of one of several alike axes below all of them, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(labels))


def title(runs: pd.DataFrame, what: str = "") -> str:
    """Return the title of a figure: what was trained and is shown, over how many seeds; a warning at smoke scale.

    The name of the user's own data is no formula, also with dollars in it.
    """
    warning = "smoke scale: not a result. " if runs["scale"].iloc[0] == "smoke" else ""
    named = title_of(runs).replace("$", r"\$")
    seeds = runs.groupby(["recipe", "q_max", "arm"])["seed"].nunique()
    fewer = f"{seeds.min()} to " if seeds.min() < seeds.max() else ""
    return f"{warning}{named}{what}, {fewer}{counted(seeds.max(), 'seed')}"
