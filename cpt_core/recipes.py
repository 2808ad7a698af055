"""Every setting of every experiment in one table: scale -> "dataset/model" -> ``Recipe``.  Needs no torch.

``smoke`` proves that things run, ``demo`` shows a direction in seconds, ``paper`` is the paper's own setting.
``preset="authors"`` gives what the authors' scripts do where they differ from the paper's text.

>>> recipe("paper", "cifar10", "resnet74").steps
64000
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

SCALES = ("smoke", "demo", "paper")
PRESETS = ("ours", "authors")


@dataclass(frozen=True)
class Recipe:
    """All that defines a training run besides the schedule and the seed.

    Attributes:
        task: a key of ``TASKS``.
        dataset: "digits", "cifar10", "cifar100", "imagenet", a folder, or "train.npz,test.npz".
        model: a key of ``MODELS``.
        quantized: which layers are quantised, a key of ``convert.PRESETS``.
        steps: optimizer steps.
        batch: images per step; the last batch of an epoch may be smaller.
        lr: learning rate at the start; times 0.1 at each of ``milestones`` (shares of ``steps``).
        q_min: lowest bits of the schedules; ``n_cycles`` their number of cycles.
        momentum, weight_decay: of SGD; weight decay acts on all parameters.
        clip: largest total norm of the gradient, or None.
        size: side of the images in pixels; other images are resized.
        crop: pixels of zero padding before the random crop; 0 means no crop. "resized" crops as for ImageNet.
        flip: random horizontal flips.
        train_images, valid_images, test_images: how many are used; None means all. The validation images are held out
            of the training set; with 0 the best epoch is chosen on the test set, and the metric says so.
        evaluate_every: steps between evaluations; the end is always evaluated.
        running_start: rule of the running ranges, see ``LayerPrecision``.
        cycle_rule: see ``CyclicSchedule``.
        eval_bits: "q_max" or "current": bits of every evaluation but the last, which is done at both.
        seeds: seeds of a full grid at this scale; no part of a single run.
    """

    task: str
    dataset: str
    model: str
    quantized: str
    steps: int
    batch: int
    lr: float
    q_min: int
    n_cycles: int = 8
    milestones: tuple[float, ...] = (0.5, 0.75)
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float | None = None
    size: int = 32
    crop: int | str = 0
    flip: bool = False
    train_images: int | None = None
    valid_images: int = 0
    test_images: int | None = None
    evaluate_every: int = 0
    running_start: str = "corrected"
    cycle_rule: str = "exact"
    eval_bits: str = "q_max"
    seeds: tuple[int, ...] = field(default=(0, 1, 2), compare=False)


# --- embedded data: scikit-learn's 1,797 handwritten digits, 8 x 8 pixels -------------------------

DIGITS_MLP = Recipe(
    task="image", dataset="digits", model="mlp6", quantized="cifar",
    steps=600, batch=64, lr=0.03, clip=1.0, q_min=3, n_cycles=4,  # fragile on purpose: 2 bits fail, 3 bits hurt
    size=8, crop=1, train_images=897, valid_images=200, test_images=700, evaluate_every=100, seeds=(0, 1, 2, 3, 4),
)  # fmt: skip
DIGITS_RESNET = replace(  # BatchNorm makes networks robust: here the effect all but vanishes
    DIGITS_MLP, model="resnet8_w8", steps=400, lr=0.05, clip=None, evaluate_every=200, seeds=(0, 1)
)

# --- CIFAR: section 4.2 of the paper --------------------------------------------------------------

CIFAR = Recipe(
    task="image", dataset="cifar10", model="resnet74", quantized="cifar",
    steps=64_000, batch=128, lr=0.1, q_min=3, n_cycles=8,  # paper 4.2
    crop=4, flip=True, valid_images=5_000, evaluate_every=2_000,
)  # fmt: skip
CIFAR_DEMO = replace(  # 16 x 16 pixels, 2 bits: the paper's setting in five seconds
    CIFAR, model="resnet8_w8", steps=450, batch=32, q_min=2, n_cycles=4, size=16, crop=2, train_images=10_000,
    valid_images=1_000, test_images=2_000, evaluate_every=150, seeds=(0, 1, 2),
)  # fmt: skip

# --- ImageNet: section 4.2 ------------------------------------------------------------------------

IMAGENET = Recipe(
    task="image", dataset="imagenet", model="resnet18", quantized="imagenet",
    steps=90 * 5005, batch=256, lr=0.1, q_min=4, n_cycles=8,
    weight_decay=1e-4,  # the paper's text says 1e-5; the settings it cites, and the authors' code, have 1e-4
    size=224, crop="resized", flip=True, valid_images=10_000, evaluate_every=5 * 5005,
)  # fmt: skip

RECIPES: dict[str, dict[str, Recipe]] = {
    "smoke": {
        "digits/mlp6": replace(DIGITS_MLP, steps=190, n_cycles=2, crop=0, evaluate_every=0, seeds=(0,)),
        "digits/resnet8_w8": replace(DIGITS_RESNET, steps=40, n_cycles=2, evaluate_every=0, seeds=(0,)),
        "cifar10/resnet8_w8": replace(
            CIFAR_DEMO, steps=40, n_cycles=2, train_images=500, valid_images=100, test_images=100, seeds=(0,)
        ),
    },
    "demo": {
        "digits/mlp6": DIGITS_MLP,
        "digits/resnet8_w8": DIGITS_RESNET,
        "cifar10/resnet8_w8": CIFAR_DEMO,
        "cifar10/resnet20": replace(CIFAR_DEMO, model="resnet20", size=32, crop=4, batch=64, steps=2_000, q_min=3),
    },
    "paper": {
        f"{dataset}/{model}": replace(base, dataset=dataset, model=model)
        for base, datasets, models in (
            (CIFAR, ("cifar10", "cifar100"), ("resnet74", "resnet152", "mobilenetv2")),
            (IMAGENET, ("imagenet",), ("resnet18", "resnet34")),
        )
        for dataset in datasets
        for model in models
    },
}  # fmt: skip

# What the authors' scripts do where they differ from the paper's text; "" applies to every model.
# Differs: the defaults follow the paper except for ImageNet's weight decay, see there.
_AUTHORS_CIFAR: dict[str, dict[str, Any]] = {
    "": dict(
        valid_images=0, eval_bits="current", running_start="zero", cycle_rule="floor_plus_one", evaluate_every=390
    ),
    "mobilenetv2": dict(lr=0.03, q_min=4),
}
_AUTHORS_IMAGENET: dict[str, dict[str, Any]] = {
    "": dict(
        valid_images=0, eval_bits="current", running_start="zero", cycle_rule="floor", evaluate_every=5005,
        milestones=(30 / 90, 60 / 90), weight_decay=1e-4,
    ),
}  # fmt: skip
AUTHORS: dict[str, dict[str, dict[str, Any]]] = {
    "cifar10": _AUTHORS_CIFAR,
    "cifar100": _AUTHORS_CIFAR,
    "imagenet": _AUTHORS_IMAGENET,
}


def recipe(scale: str, dataset: str = "digits", model: str | None = None, preset: str = "ours") -> Recipe:
    """Look a recipe up.

    Args:
        scale: "smoke", "demo" or "paper".
        dataset: a named data set, or images of your own: a folder in ImageFolder layout uses ImageNet's recipe at
            paper scale, everything else CIFAR-10's.
        model: None takes the first model listed for the data set.
        preset: "ours" or "authors".

    Raises:
        ValueError: naming what there is.
    """
    _choose("scale", scale, SCALES)
    _choose("preset", preset, PRESETS)
    table = RECIPES[scale]
    family = dataset
    if is_own(dataset):
        family = "imagenet" if scale == "paper" and ".npz" not in dataset else "cifar10"
    models = [key.split("/")[1] for key in table if key.split("/")[0] == family]
    if not models:
        names = sorted({key.split("/")[0] for key in table})
        raise ValueError(
            f"no {scale} recipe for dataset {dataset!r}; choose from {', '.join(names)}, or your own images"
        )
    found = table[f"{family}/{_choose('model', model or models[0], tuple(models))}"]
    if preset == "authors":
        if scale != "paper" or family not in AUTHORS:
            raise ValueError(
                f"preset 'authors' exists at scale 'paper' for {', '.join(AUTHORS)}, not {scale}/{dataset}"
            )
        found = replace(found, **{**AUTHORS[family][""], **AUTHORS[family].get(found.model, {})})
    return replace(found, dataset=dataset)


def is_own(dataset: str) -> bool:
    """Whether ``dataset`` names the user's own files rather than a known data set."""
    return "/" in dataset or "\\" in dataset or dataset.endswith(".npz")


def _choose(what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(allowed)}")
    return value
