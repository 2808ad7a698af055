"""Text and figure of lesson 17 on an LSTM."""

from typing import cast

from matplotlib.figure import Figure
from torch import Tensor

from cpt_lab.analysis.style import COLORS, MUTED_COLOR, TEXT, subplots
from cpt_lab.data.text import batchify, load_text
from cpt_lab.experiments.language_model import LanguageModelRecipe
from cpt_lab.experiments.registry import recipe


def characters() -> tuple[Tensor, Tensor, int]:
    """Return Python's reference text to learn from and to test on, in columns (T, 20), and how many characters it has.

    Every number is a character.
    """
    text = load_text(cast(LanguageModelRecipe, recipe("smoke", "pydoc")))
    return batchify(text.train, 20), batchify(text.test, 20), len(text.vocabulary)


# boxes and arrows of an LSTM step: centre, and words; the rounded ones are drawn in colour
_ROUNDED = {
    (1.6, 3.2): "q",
    (1.6, 1.0): "q",
    (3.0, 3.9): "q(W)",
    (3.0, 0.3): "q(U)",
    (4.4, 3.9): "q(b)",
}
_EXACT = {
    (0.4, 3.2): "input\n$x_t$",
    (0.4, 1.0): "state\n$h_{t-1}$",
    (3.0, 3.2): "product",
    (3.0, 1.0): "product",
    (4.4, 2.1): "sum:\ngates",
    (6.0, 2.1): "sigmoid,\ntanh",
    (7.5, 2.1): "cell $c_t$,\nstate $h_t$",
}
_ARROWS = [
    ((0.4, 3.2), (1.6, 3.2)),
    ((1.6, 3.2), (3.0, 3.2)),
    ((3.0, 3.9), (3.0, 3.2)),
    ((3.0, 3.2), (4.4, 2.1)),
    ((0.4, 1.0), (1.6, 1.0)),
    ((1.6, 1.0), (3.0, 1.0)),
    ((3.0, 0.3), (3.0, 1.0)),
    ((3.0, 1.0), (4.4, 2.1)),
    ((4.4, 3.9), (4.4, 2.1)),
    ((4.4, 2.1), (6.0, 2.1)),
    ((6.0, 2.1), (7.5, 2.1)),
]


def lstm_step() -> Figure:
    """Draw one step of an LSTM: what is rounded in colour, what stays in float32 in grey."""
    alt = (
        "One step of an LSTM. Input, state, both weights and the bias are rounded to q bits; the two products are "
        "added to the gates. Sigmoids, tanh, cell and new state stay in float32."
    )
    with subplots(1, 1, alt, figsize=(8, 3.1)) as (figure, ((ax,),)):
        texts = {}
        for boxes, group in ((_ROUNDED, "large"), (_EXACT, "static")):
            edge = COLORS[group] if boxes is _ROUNDED else "#999999"
            for (x, y), words in boxes.items():
                box = {
                    "boxstyle": "round,pad=0.35",
                    "facecolor": "white",
                    "edgecolor": edge,
                    "linewidth": 1.4,
                }
                text = ax.text(
                    x,
                    y,
                    words,
                    color=TEXT[group],
                    fontsize=9,
                    ha="center",
                    va="center",
                    bbox=box,
                )
                texts[x, y] = text.get_bbox_patch()
        for start, stop in _ARROWS:
            ends = {
                "patchA": texts[start],
                "patchB": texts[stop],
                "shrinkA": 1,
                "shrinkB": 1,
            }
            ax.annotate(
                "",
                stop,
                start,
                arrowprops={"arrowstyle": "->", "color": MUTED_COLOR, **ends},
            )
        ax.text(
            5.4, 0.55, "orange: rounded to $q_t$ bits", color=TEXT["large"], fontsize=9
        )
        ax.text(5.4, 0.2, "grey: float32", color=MUTED_COLOR, fontsize=9)
        ax.set(xlim=(-0.2, 8.2), ylim=(0, 4.2))
        ax.set_title(
            "A step rounds what it multiplies, and the bias; the rest stays in float32",
            fontsize=10,
        )
        ax.axis("off")
    return figure
