"""Figures of lesson 15 on detectors: overlaps and average precision."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torchvision.ops import box_iou

from cpt_lab.analysis.style import COLORS, SMALL_FONT_SIZE, legend_below, subplots
from cpt_lab.data.detection import backbone_weights
from cpt_lab.data.files import DataNotFoundError

Box = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels


def pretrained_or_scratch(scale: str) -> dict[str, Any]:
    """Say how detectors start at a scale; where ImageNet weights are missing, change the recipe to "from scratch".

    The paper starts from pretrained weights; the choice becomes part of every run and its title.
    """
    if scale != "paper":
        return {}
    try:
        print(f"the backbone starts from {backbone_weights().name}")
    except DataNotFoundError as missing:
        print(f"training starts from scratch, unlike the paper's: {missing}")
        return {"pretrained": False}
    return {}


def overlap(a: Box, b: Box) -> float:
    """Return the intersection over union of two boxes, by torchvision."""
    return box_iou(torch.tensor([a]), torch.tensor([b])).item()


def overlaps(object_box: Box, anchors: Sequence[Box]) -> Figure:
    """Draw an object with each anchor, their intersection filled, on 64 x 64 pixels."""
    alt = f"an object's box and {len(anchors)} anchors that cover it less and less"
    with subplots(1, len(anchors), alt, figsize=(2.1 * len(anchors), 2.5)) as (
        figure,
        axes,
    ):
        for ax, anchor in zip(axes[0], anchors, strict=True):
            shared = [
                *map(max, object_box[:2], anchor[:2]),
                *map(min, object_box[2:], anchor[2:]),
            ]
            for (x1, y1, x2, y2), group, filled in (
                (shared, "medium", True),
                (object_box, "small", False),
                (anchor, "large", False),
            ):
                style: dict[str, Any] = (
                    {"alpha": 0.35, "linewidth": 0}
                    if filled
                    else {"fill": False, "linewidth": 1.8}
                )
                name = {"medium": "shared", "small": "object", "large": "anchor"}[group]
                ax.add_patch(
                    plt.Rectangle(
                        (x1, y1),
                        x2 - x1,
                        y2 - y1,
                        color=COLORS[group],
                        label=name,
                        **style,
                    )
                )
            ax.set(xlim=(0, 64), ylim=(64, 0), xticks=[], yticks=[], aspect="equal")
            ax.set_title(f"overlap {overlap(object_box, anchor):.2f}", fontsize=10)
        legend_below(figure, axes[0][0])
        figure.suptitle(
            "Anchors that overlap an object by 0.5 or more must find it", fontsize=10
        )
    return figure


def precision_recall(hits: Sequence[bool], objects: int) -> Figure:
    """Draw precision over recall as more and more detections count, and the area that is the average precision.

    ``hits``: whether each detection found one of so many objects, the surest first.
    """
    num_hits = np.cumsum(hits)
    precisions, recalls = num_hits / np.arange(1, len(hits) + 1), num_hits / objects
    best = np.maximum.accumulate(precisions[::-1])[::-1]
    average = float(best[np.asarray(hits)].sum()) / objects
    alt = f"precision over recall of {len(hits)} detections of {objects} objects, and the area under its steps"
    with subplots(1, 1, alt, figsize=(5.6, 3.2)) as (figure, ((ax,),)):
        label = "after 1, 2, ... detections"
        ax.plot(
            recalls,
            precisions,
            "o-",
            color=COLORS["static"],
            linewidth=1,
            markersize=5,
            label=label,
        )
        ax.fill_between(
            [0, *recalls],
            [best[0], *best],
            step="pre",
            color=COLORS["small"],
            alpha=0.25,
            label="average precision",
        )
        ax.set(
            xlabel="recall: share of the objects found",
            ylabel="precision:\nshare of detections right",
        )
        ax.set(xlim=(0, 1.03), ylim=(0, 1.07))
        ax.set_title(
            f"Average precision is the filled area: {average:.3f}", fontsize=10
        )
        ax.legend(fontsize=SMALL_FONT_SIZE, loc="lower left")
    return figure
