"""Image classification: fields and settings of its recipes.  Paper: section 4.2, figure 3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cpt_core.experiments.recipe import Recipe


@dataclass(frozen=True)
class ImageRecipe(Recipe):
    """Image classification with SGD.

    Attributes:
        milestones: shares of ``steps`` at which the learning rate is multiplied by 0.1.
        momentum: of SGD.
        size: side of the images in pixels; other images are resized.
        crop: pixels of zero padding before the random crop; 0 means no crop. "resized" crops as for ImageNet.
        flip: random horizontal flips.
        train_images, valid_images, test_images: how many are used; None means all. The validation images are held out
            of the training set; with 0 the best epoch is chosen on the test set, and the metric says so.
    """

    milestones: tuple[float, ...] = (0.5, 0.75)
    momentum: float = 0.9
    size: int = 32
    crop: int | str = 0
    flip: bool = False
    train_images: int | None = None
    valid_images: int = 0
    test_images: int | None = None


DIGITS_MLP = ImageRecipe(
    task="image", dataset="digits", model="mlp6", quantized="cifar",
    steps=600, batch=64, lr=0.03, clip=1.0, q_min=3, n_cycles=4,  # fragile on purpose: 2 bits fail, 3 bits hurt
    size=8, crop=1, train_images=897, valid_images=200, test_images=700, evaluate_every=100, seeds=(0, 1, 2, 3, 4),
)  # fmt: skip

DIGITS_RESNET = replace(  # BatchNorm makes networks robust: here the effect all but vanishes
    DIGITS_MLP, model="resnet8_w8", steps=400, lr=0.05, clip=None, evaluate_every=200, seeds=(0, 1)
)

CIFAR = ImageRecipe(
    task="image", dataset="cifar10", model="resnet74", quantized="cifar",
    steps=64_000, batch=128, lr=0.1, q_min=3, n_cycles=8,  # paper 4.2
    crop=4, flip=True, valid_images=5_000, evaluate_every=2_000,
)  # fmt: skip

CIFAR_DEMO = replace(  # 16 x 16 pixels, 2 bits: the paper's setting in five seconds
    CIFAR, model="resnet8_w8", steps=450, batch=32, q_min=2, n_cycles=4, size=16, crop=2, train_images=10_000,
    valid_images=1_000, test_images=2_000, evaluate_every=150, seeds=(0, 1, 2),
)  # fmt: skip

IMAGENET = ImageRecipe(
    task="image", dataset="imagenet", model="resnet18", quantized="imagenet",
    steps=90 * 5005, batch=256, lr=0.1, q_min=4, n_cycles=8,
    weight_decay=1e-4,  # the paper's text says 1e-5; the settings it cites, and the authors' code, have 1e-4
    size=224, crop="resized", flip=True, valid_images=10_000, evaluate_every=5 * 5005,
)  # fmt: skip

# What the authors' scripts do where they differ from the paper's text; "" applies to every model.
# Differs: the defaults follow the paper except for ImageNet's weight decay, see there.
AUTHORS_CIFAR: dict[str, dict[str, Any]] = {
    "": dict(
        valid_images=0, eval_bits="current", running_start="zero", cycle_rule="floor_plus_one", evaluate_every=390
    ),
    "mobilenetv2": dict(lr=0.03, q_min=4),
}

AUTHORS_IMAGENET: dict[str, dict[str, Any]] = {
    "": dict(
        valid_images=0, eval_bits="current", running_start="zero", cycle_rule="floor", evaluate_every=5005,
        milestones=(30 / 90, 60 / 90), weight_decay=1e-4,
    ),
}  # fmt: skip
