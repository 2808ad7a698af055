"""What notebook 04 shows of detectors: anchors, focal loss, average precision, four pictures learned by heart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torchvision.ops import box_iou, sigmoid_focal_loss

from cpt_core.quantization.scheduler import precision
from cpt_lab.analysis.style import COLORS, SMALL, drawing
from cpt_lab.data.detection import backbone_weights
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.data.pictures import Annotated
from cpt_lab.experiments import designs
from cpt_lab.tasks.detection import DetectionTask, mean_average_precision
from cpt_lab.training.train import train
from cpt_lessons.pictures import Boxes, pictures_with_boxes

Box = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels


def experiment(scale: str, dataset: str, schedules: Sequence[str], seeds: Sequence[int], preset: str) -> list[Any]:
    """Return the runs of figure 4 at a scale; smoke runs are CR, ER and two static precisions."""
    some = {"smoke": [2, 8], "demo": [3, 4, 8]}.get(scale)  # static precisions; None takes q_max alone
    arms = [s for s in schedules if s in ("CR", "ER")] if scale == "smoke" else schedules
    given: dict[str, Any] = {"schedules": arms, "static": some, "seeds": seeds or None, "preset": preset}
    return designs.quality_cost(scale, dataset, task="detection", **given, **pretrained_or_scratch(scale))


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


def overlaps(there: Box, anchors: Sequence[Box], size: int = 64) -> Figure:
    """Draw an object beside each of some anchors, on ``size`` x ``size`` pixels, what they share filled."""
    alt = f"an object's box and {len(anchors)} anchors that cover it less and less"
    with drawing(1, len(anchors), alt, figsize=(2.1 * len(anchors), 2.5)) as (figure, axes):
        for ax, anchor in zip(axes[0], anchors, strict=True):
            shared = [*map(max, there[:2], anchor[:2]), *map(min, there[2:], anchor[2:])]
            for (x1, y1, x2, y2), group, filled in (
                (shared, "medium", True), (there, "small", False), (anchor, "large", False)
            ):  # fmt: skip
                style: dict[str, Any] = {"alpha": 0.35, "linewidth": 0} if filled else {"fill": False, "linewidth": 1.8}
                name = {"medium": "shared", "small": "object", "large": "anchor"}[group]
                ax.add_patch(plt.Rectangle((x1, y1), x2 - x1, y2 - y1, color=COLORS[group], label=name, **style))
            ax.set(xlim=(0, size), ylim=(size, 0), xticks=[], yticks=[], aspect="equal")
            ax.set_title(f"overlap {overlap(there, anchor):.2f}", fontsize=10)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=SMALL, loc="outside lower center", ncols=3)
    return figure


def focal_loss(p: float, weight: float = 0.25) -> float:
    """Return the focal loss of one anchor with an object, by torchvision.

    Args:
        p: the probability that the model gives to the object.
        weight: alpha.
    """
    return float(sigmoid_focal_loss(torch.tensor(p, dtype=torch.float64).logit(), torch.tensor(1.0), alpha=weight))


def focal_loss_curves() -> Figure:
    """Draw cross entropy and focal loss, without its weight alpha, against the probability of the right answer."""
    p = np.linspace(0.02, 0.995, 200)
    alt = "cross entropy and focal loss falling with the probability of the right answer; focal loss falls far faster"
    with drawing(1, 1, alt, figsize=(6.4, 3)) as (figure, axes):
        ax = axes[0][0]
        for name, loss, group in (
            ("cross entropy: -log p", -np.log(p), "static"),
            ("focal loss: -(1 - p)² log p", -((1 - p) ** 2) * np.log(p), "small"),
        ):
            ax.plot(p, loss, color=COLORS[group], linewidth=1.8, label=name)
        ax.set_yscale("log")
        ax.set(xlabel="p, the probability of the right answer", ylabel="loss of an anchor")
        ax.legend(fontsize=9)
    return figure


def focal_loss_table(background: int, objects: int, says: Sequence[float], of_objects: float) -> None:
    """Print how much of the loss is background, by cross entropy and by focal loss, while training goes on.

    ``says`` are probabilities of an object that the model gives to background anchors, ``of_objects`` the one that it
    gives to anchors on objects.
    """

    def loss(p: float, there: float, focal: bool) -> float:
        logit, target = torch.tensor(p).logit(), torch.tensor(there)
        if focal:
            return float(sigmoid_focal_loss(logit, target, alpha=0.25, gamma=2))
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logit, target))

    print(f"{background:,} anchors on background, {objects} on objects; these are given the probability {of_objects:g}")
    print("probability of an object   share of background in the loss")
    print("     given to background    cross entropy     focal loss")
    for p in says:
        shares = []
        for focal in (False, True):
            empty, full = background * loss(p, 0.0, focal), objects * loss(of_objects, 1.0, focal)
            shares.append(100 * empty / (empty + full))
        print(f"{p:24g}   {shares[0]:12.1f} %   {shares[1]:10.1f} %")


def average_precision(hits: Sequence[bool], objects: int) -> float:
    """Return the average precision that the library's metric gives to detections of one class on one picture.

    Args:
        hits: whether each detection found an object that none before it had found, the surest first.
        objects: how many there are.
    """
    boxes = np.array([[20.0 * i, 0, 20 * i + 10, 10] for i in range(objects + len(hits))], dtype=np.float32)
    elsewhere, here = iter(boxes[objects:]), iter(boxes)
    found = np.array([next(here if hit else elsewhere) for hit in hits])
    there = Annotated(
        torch.zeros(3, 1, 1, dtype=torch.uint8), (10, 20 * len(boxes)), boxes[:objects],
        np.ones(objects, dtype=np.int64), np.zeros(objects, dtype=bool),
    )  # fmt: skip
    detections = {
        "boxes": torch.from_numpy(found),
        "labels": torch.ones(len(hits), dtype=torch.int64),
        "scores": torch.linspace(0.9, 0.1, len(hits)),
    }
    return mean_average_precision([(detections, there)])["map50"]


def precision_recall(hits: Sequence[bool], objects: int) -> Figure:
    """Draw precision over recall as more and more detections count, and the area that is the average precision.

    Args:
        hits: whether each detection found an object, the surest first.
        objects: how many there are.
    """
    found = np.cumsum(hits)
    precisions, recalls = found / np.arange(1, len(hits) + 1), found / objects
    best = np.maximum.accumulate(precisions[::-1])[::-1]
    alt = f"precision over recall of {len(hits)} detections of {objects} objects, and the area under its steps"
    with drawing(1, 1, alt, figsize=(5.6, 3.2)) as (figure, axes):
        ax = axes[0][0]
        ax.plot(
            recalls,
            precisions,
            "o-",
            color=COLORS["static"],
            linewidth=1,
            markersize=5,
            label="after 1, 2, ... of them",
        )
        ax.fill_between(
            [0, *recalls], [best[0], *best], step="pre", color=COLORS["small"], alpha=0.25, label="average precision"
        )
        ax.set(xlabel="recall: share of the objects found", ylabel="precision:\nshare of detections right")
        ax.set(xlim=(0, 1.03), ylim=(0, 1.07))
        ax.set_title(f"average precision {average_precision(hits, objects):.3f}", fontsize=10)
        ax.legend(fontsize=SMALL, loc="lower left")
    return figure


def show_curves(runs: pd.DataFrame) -> None:
    """Print the mean average precision of every run at each of its evaluations."""
    for run in runs.itertuples():
        found = [e for e in run.evaluations if "not_finite" not in e]
        curve = ", ".join(f"{100 * e['test']['map50']:.0f} after {e['step']}" for e in found)
        print(f"{run.arm:<9} mAP {curve} steps")


def learn_by_heart(steps: int = 70, at_least: float = 0.3) -> Figure:
    """Train a small detector with one cycle of CR on four scenes; draw what it finds on them before and after.

    Args:
        steps: of the optimizer.
        at_least: scores below are not drawn.
    """
    (spec,) = designs.quality_cost(
        "smoke", "digit-scenes", schedules=["CR"], static=[], steps=steps, n_cycles=1, train_images=4, batch=4, lr=3e-3
    )
    torch.manual_seed(spec.seed)
    task = DetectionTask(spec, torch.device("cpu"))
    untrained, _ = task.detect(task.model().eval(), task.data.train)
    run = train(DetectionTask, spec, progress=None)
    with precision(run.model.eval(), bits=spec.q_max):
        trained, _ = task.detect(run.model, task.data.train)
    scores = [100 * mean_average_precision(pairs)["map50"] for pairs in (untrained, trained)]

    def words(found: dict[str, Any], least: float = 0.0) -> Boxes:
        sure = found.get("scores", torch.ones(len(found["boxes"])))
        names = [task.data.classes[label] for label in found["labels"].tolist()]
        return [
            (box, f"{name} {score:.1f}" if least else name)
            for box, name, score in zip(found["boxes"].tolist(), names, sure.tolist(), strict=True)
            if score >= least
        ]

    pictures = [there for _, there in trained]
    figure = pictures_with_boxes(
        [there.read().permute(1, 2, 0).numpy() for there in pictures],
        {
            "what is there": [words({"boxes": a.boxes, "labels": a.labels}) for a in pictures],
            "found before training": [words(found, at_least) for found, _ in untrained],
            "found after training": [words(found, at_least) for found, _ in trained],
        },
    )
    figure.suptitle(
        f"by heart, not a result: {task.title}, {spec.recipe.steps} steps with {spec.arm}\nmAP on these pictures, "
        f"which it was trained on: {scores[0]:.0f} % before, {scores[1]:.0f} % after",
        fontsize=9,
    )
    return figure
