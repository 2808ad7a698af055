"""Object detection: fields and settings of its recipes.  Paper: section 4.2, figure 4."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cpt_core.experiments.recipe import Recipe


@dataclass(frozen=True)
class DetectionRecipe(Recipe):
    """Object detection with RetinaNet and Adam.

    Attributes:
        size: shorter side of the pictures in pixels, after resizing.
        max_size: longest that the longer side may get; a longer picture is made smaller.
        flip: mirror half of the training pictures, with their boxes.
        anchor: side of the smallest square anchor of a pyramid level, in strides of that level.
        pretrained: start from a backbone trained on ImageNet, and keep the statistics of its BatchNorm; from scratch
            there are none to keep, and BatchNorm works as usual.
        train_images, valid_images, test_images: how many are used; None means all. The validation pictures are held out
            of the training pictures; with 0 the best evaluation is chosen on the test set, and the metric says so.
    """

    size: int = 608
    max_size: int = 1024
    flip: bool = False
    anchor: int = 4
    pretrained: bool = False
    train_images: int | None = None
    valid_images: int = 0
    test_images: int | None = None

    def __post_init__(self) -> None:
        """Check the size."""
        if not 32 <= self.size < self.max_size:
            raise ValueError(f"size must be at least 32 and below max_size {self.max_size}, got {self.size}")


VOC2012 = DetectionRecipe(
    task="detection", dataset="voc2012", model="retinanet", quantized="all",
    steps=120 * 1430, batch=4, lr=1e-5, q_min=5, n_cycles=8,  # paper 4.2: 120 epochs of 5,717 pictures
    weight_decay=0.0, clip=0.1,  # authors' code
    pretrained=True, valid_images=500, evaluate_every=5 * 1430,
)  # fmt: skip

VOC_DEMO = replace(  # small pictures, from scratch: a few hundred steps on a CPU
    VOC2012, steps=240, lr=1e-4, n_cycles=4, pretrained=False, size=128, anchor=2, valid_images=0, evaluate_every=0,
    seeds=(0,),
)  # fmt: skip

SCENES = replace(
    VOC_DEMO, dataset="digit-scenes", model="retinanet_small", steps=200, batch=8, lr=2e-3, q_min=3, n_cycles=2,
    size=96, anchor=4, train_images=400, valid_images=50, test_images=100, seeds=(0, 1),
)  # fmt: skip

AUTHORS_VOC: dict[str, dict[str, Any]] = {
    "": dict(
        steps=120 * 715, batch=8, flip=True, valid_images=0, eval_bits="current", running_start="zero",
        cycle_rule="floor_plus_one", evaluate_every=5 * 715,
    ),
}  # fmt: skip

VOC_YEARS = ("voc2007", "voc2012")
