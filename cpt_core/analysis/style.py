"""How figures look: colours, titles, pictures in a page."""

from __future__ import annotations

import base64
import io
from typing import Any

from matplotlib.figure import Figure

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


def figure_title(runs: Any, arms: Any) -> str:
    """Return what a figure shows, at which scale, over how many seeds."""
    scale = runs["scale"].iloc[0]
    title = next((t for t in runs["title"] if t), runs["model"].iloc[0])
    seeds = f"{runs['seed'].nunique()} seed" + "s" * (runs["seed"].nunique() > 1)
    lost = int(arms.diverged.sum() + arms.failed.sum())
    note = f"; {lost} runs diverged or failed" if lost else ""
    warning = "smoke scale: not a result. " if scale == "smoke" else ""
    return f"{warning}{title}, {scale} scale, {seeds}{note}"


def image_tag(figure: Figure, alt: str) -> str:
    """Return a figure as an HTML image that needs no other file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return f"<img alt='{alt}' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"
