"""Every setting of every experiment in one table: scale -> "dataset/model" -> ``Recipe``.  Needs no torch.

``smoke`` proves that things run, ``demo`` shows a direction in seconds, ``paper`` is the paper's own setting.
``preset="authors"`` gives what the authors' scripts do where they differ from the paper's text.

>>> recipe("paper", "cifar10", "resnet74").steps
64000
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpt_core.checks import choose
from cpt_core.experiments.detection import AUTHORS_VOC, SCENES, VOC2012, VOC_DEMO, VOC_YEARS, DetectionRecipe
from cpt_core.experiments.entailment import AUTHORS_XNLI, PAIRS_DEMO, TEMPLATES, XNLI, EntailmentRecipe
from cpt_core.experiments.graph import (
    ARXIV,
    AUTHORS_ARXIV,
    AUTHORS_PRODUCTS,
    DIGITS_GCN,
    DIGITS_SAGE,
    GRAPH_DEMO,
    OGB_GRAPHS,
    PRODUCTS,
    SAGE_DEMO,
    GraphRecipe,
)
from cpt_core.experiments.image import (
    AUTHORS_CIFAR,
    AUTHORS_IMAGENET,
    CIFAR,
    CIFAR_DEMO,
    DIGITS_MLP,
    DIGITS_RESNET,
    IMAGENET,
    ImageRecipe,
)
from cpt_core.experiments.language_model import AUTHORS_PTB, PTB, PTB_DEMO, PYDOC, LanguageModelRecipe
from cpt_core.experiments.recipe import PRESETS, SCALES, Deficits, Recipe, is_own

RECIPE_CLASSES: dict[str, type[Recipe]] = {
    "image": ImageRecipe,
    "detection": DetectionRecipe,
    "graph": GraphRecipe,
    "language_model": LanguageModelRecipe,
    "entailment": EntailmentRecipe,
}

RECIPES: dict[str, dict[str, Recipe]] = {
    "smoke": {
        "digits/mlp6": replace(DIGITS_MLP, steps=190, n_cycles=2, crop=0, evaluate_every=0, seeds=(0,)),
        "digits/resnet8_w8": replace(DIGITS_RESNET, steps=40, n_cycles=2, evaluate_every=0, seeds=(0,)),
        "cifar10/resnet8_w8": replace(
            CIFAR_DEMO, steps=40, n_cycles=2, train_images=500, valid_images=100, test_images=100, seeds=(0,)
        ),
        "digit-scenes/retinanet_small": replace(
            SCENES, steps=16, batch=2, size=64, train_images=32, valid_images=0, test_images=8, seeds=(0,)
        ),
        "own-pictures/retinanet": replace(VOC_DEMO, steps=16, n_cycles=2, batch=2, size=64),
        "digits-graph/gcn": replace(DIGITS_GCN, steps=40, n_cycles=2, evaluate_every=10, seeds=(0,)),
        "digits-graph/sage": replace(DIGITS_SAGE, steps=30, n_cycles=2, evaluate_every=0, seeds=(0,)),
        "own-graph/gcn": replace(GRAPH_DEMO, steps=16, n_cycles=2, evaluate_every=0, seeds=(0,)),
        "own-graph/sage": replace(SAGE_DEMO, steps=16, n_cycles=2, evaluate_every=0, seeds=(0,)),
        "pydoc/lstm": replace(
            PYDOC, steps=30, embedding=32, hidden=64, valid_tokens=2_000, test_tokens=4_000, seeds=(0,)
        ),
        "ptb/lstm": replace(PTB_DEMO, steps=30, train_tokens=20_000, vocabulary=500, valid_tokens=2_000,
                            test_tokens=4_000, seeds=(0,)),
        "templates/bert_small": replace(
            TEMPLATES, steps=40, n_cycles=2, valid_pairs=300, test_pairs=300, seeds=(0,)
        ),
        "own-pairs/bert_small": replace(
            PAIRS_DEMO, steps=16, n_cycles=2, train_pairs=500, valid_pairs=100, test_pairs=100, seeds=(0,)
        ),
    },
    "demo": {
        "digits/mlp6": DIGITS_MLP,
        "digits/resnet8_w8": DIGITS_RESNET,
        "cifar10/resnet8_w8": CIFAR_DEMO,
        "digit-scenes/retinanet_small": SCENES,
        "own-pictures/retinanet": VOC_DEMO,
        "digits-graph/gcn": DIGITS_GCN,
        "digits-graph/sage": DIGITS_SAGE,
        "own-graph/gcn": GRAPH_DEMO,
        "own-graph/sage": SAGE_DEMO,
        "pydoc/lstm": PYDOC,
        "ptb/lstm": PTB_DEMO,
        "templates/bert_small": TEMPLATES,
        "own-pairs/bert_small": PAIRS_DEMO,
        "cifar10/resnet20": replace(CIFAR_DEMO, model="resnet20", size=32, crop=4, batch=64, steps=2_000, q_min=3),
    },
    "paper": {
        "voc2012/retinanet": VOC2012,
        "own-pictures/retinanet": VOC2012,
        "ogbn-arxiv/gcn": ARXIV,
        "ogbn-products/sage": PRODUCTS,
        "own-graph/gcn": ARXIV,
        "own-graph/sage": PRODUCTS,
        "ptb/lstm": PTB,
        "xnli/bert": XNLI,
        "own-pairs/bert": XNLI,
        **{
        f"{dataset}/{model}": replace(base, dataset=dataset, model=model)
        for base, datasets, models in (
            (CIFAR, ("cifar10", "cifar100"), ("resnet74", "resnet152", "mobilenetv2")),
            (IMAGENET, ("imagenet",), ("resnet18", "resnet34")),
        )
        for dataset in datasets
        for model in models
        },
    },
}  # fmt: skip

# Differs: section 5 speaks of the settings of section 4; its deficits are longer than that training. Lengths, learning
# rates and the missing weight decay are those of the authors' scripts.
DEFICITS: dict[str, dict[str, Deficits]] = {
    "smoke": {
        "digits/mlp6": Deficits(
            dict(steps=120, weight_decay=0.0, q_min=2, train_images=300, crop=0, evaluate_every=40),
            lengths=(0, 60), windows=((0, 60),), window_steps=120, lr_after=True,
        ),
        "digits-graph/gcn": Deficits(
            dict(weight_decay=0.0, evaluate_every=10), lengths=(0, 20), windows=((0, 20),), window_steps=40,
        ),
    },
    "demo": {
        "digits/mlp6": Deficits(  # few images, 2 bits, no normalisation: damage shows
            dict(steps=400, weight_decay=0.0, q_min=2, train_images=300, test_images=1_297, crop=0, evaluate_every=25),
            lengths=(0, 50, 100, 200, 400), windows=((0, 200), (100, 300), (200, 400), (300, 500)), window_steps=600,
            lr_after=True,
        ),
        "own-graph/gcn": Deficits(
            dict(steps=48, weight_decay=0.0, evaluate_every=8), lengths=(0, 16, 32, 64),
            windows=((0, 32), (16, 48), (32, 64), (48, 80)), window_steps=96,
        ),
    },
    "paper": {
        "cifar10/resnet74": Deficits(
            dict(steps=256_000, weight_decay=0.0), lengths=(0, 16_000, 32_000, 64_000, 128_000, 256_000),
            windows=((0, 128_000), (16_000, 144_000), (32_000, 160_000), (64_000, 192_000)), window_steps=256_000,
            lr_after=True, unit=1_000, suffix="K",
        ),
        "imagenet/resnet18": Deficits(
            dict(steps=150 * 5005, weight_decay=0.0), lengths=(0, 25 * 5005, 100 * 5005), windows=(), window_steps=0,
            unit=5005,
        ),
        "ogbn-arxiv/gcn": Deficits(
            dict(steps=1_000, weight_decay=0.0), lengths=tuple(range(0, 1_001, 100)),
            windows=tuple((start, start + 500) for start in range(0, 401, 100)), window_steps=1_000,
        ),
    },
}  # fmt: skip

AUTHORS: dict[str, dict[str, dict[str, Any]]] = {
    "ptb": AUTHORS_PTB,
    "ogbn-arxiv": AUTHORS_ARXIV,
    "ogbn-products": AUTHORS_PRODUCTS,
    "cifar10": AUTHORS_CIFAR,
    "cifar100": AUTHORS_CIFAR,
    "imagenet": AUTHORS_IMAGENET,
    "voc2012": AUTHORS_VOC,
    "xnli": AUTHORS_XNLI,
}

OWN = {
    "image": "cifar10",
    "detection": "own-pictures",
    "graph": "own-graph",
    "language_model": "ptb",
    "entailment": "own-pairs",
}  # whose recipes the user's own data takes, by task

OWN_FAMILIES = ("own-pictures", "own-graph", "own-pairs")  # what no data set is called


def recipe(
    scale: str, dataset: str = "digits", model: str | None = None, preset: str = "ours", task: str = "image"
) -> Recipe:
    """Look a recipe up.

    Args:
        scale: "smoke", "demo" or "paper".
        dataset: a named data set, or data of your own: images in an ImageFolder use ImageNet's recipe at paper scale,
            other images CIFAR-10's; pictures with boxes, Pascal VOC 2007, and 2012 below paper scale, those of
            "own-pictures"; graphs, and OGB's below paper scale, those of "own-graph"; sentence pairs, and XNLI below
            paper scale, those of "own-pairs".
        model: None takes the first model listed for the data set.
        preset: "ours" or "authors".
        task: what the user's own data is for; a named data set has its own.

    Raises:
        ValueError: naming what there is.
    """
    choose("scale", scale, SCALES)
    choose("preset", preset, PRESETS)
    choose("task", task, tuple(OWN))
    table = RECIPES[scale]
    family = _family(scale, dataset, task)
    models = [key.split("/")[1] for key in table if key.split("/")[0] == family]
    if not models or dataset in OWN_FAMILIES:
        names = sorted({key.split("/")[0] for key in table} - set(OWN_FAMILIES))
        raise ValueError(f"no {scale} recipe for dataset {dataset!r}; choose from {', '.join(names)}, or your own data")
    found = table[f"{family}/{choose('model', model or models[0], tuple(models))}"]
    if preset == "authors":
        if scale != "paper" or family not in AUTHORS:
            raise ValueError(
                f"preset 'authors' exists at scale 'paper' for {', '.join(AUTHORS)}, not {scale}/{dataset}"
            )
        found = replace(found, **{**AUTHORS[family][""], **AUTHORS[family].get(found.model, {})})
    return replace(found, dataset=dataset)


def _family(scale: str, dataset: str, task: str) -> str:
    """The name in ``RECIPES`` under which a data set, or data of one's own, is found."""
    if is_own(dataset):
        return "imagenet" if scale == "paper" and task == "image" and ".npz" not in dataset else OWN[task]
    if dataset in VOC_YEARS and (dataset, scale) != ("voc2012", "paper"):
        return "own-pictures"
    if dataset in OGB_GRAPHS and scale != "paper":
        return "own-graph"
    if dataset == "xnli" and scale != "paper":
        return "own-pairs"
    return dataset


def deficits(
    scale: str, dataset: str = "digits", model: str | None = None, task: str = "image"
) -> tuple[Recipe, Deficits]:
    """Look up the recipe of a critical-period experiment, for the training after a deficit, and its deficits.

    Arguments and errors are those of ``recipe``. Where nothing special is known, deficits are shares of the recipe's
    own training: 1/4, 1/2 and all of its steps at the start, windows of half of it, no weight decay.

    Paper: section 5.
    """
    found = recipe(scale, dataset, model, task=task)
    settings = DEFICITS[scale].get(f"{_family(scale, dataset, task)}/{found.model}")
    if settings is None:
        n = found.steps
        quarters = tuple(n * k // 4 for k in range(4))
        settings = Deficits(
            dict(weight_decay=0.0, evaluate_every=found.evaluate_every or max(1, n // 10)),
            lengths=(0, *quarters[1:3], n),
            windows=tuple((start, start + n // 2) for start in quarters[:2]),
            window_steps=n,
            lr_after=isinstance(found, ImageRecipe),
        )
    return replace(found, **settings.changes), settings


def task_of_dataset(dataset: str) -> str | None:
    """Return the task of a named data set; None for the user's own data, which can be of any."""
    if is_own(dataset):
        return None
    if dataset in VOC_YEARS:
        return "detection"
    return next((r.task for table in RECIPES.values() for r in table.values() if r.dataset == dataset), None)
