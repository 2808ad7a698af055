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


def _choose(what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(allowed)}")
    return value


@dataclass(frozen=True)
class Recipe:
    """All that defines a training run besides the schedule and the seed; what every task has.

    Attributes:
        task: a key of ``TASKS``.
        dataset: a named data set, or files of the user's own.
        model: the name of a model.
        quantized: which layers are quantised, a key of ``convert.PRESETS``.
        steps: optimizer steps.
        batch: samples per step; the last batch of an epoch may be smaller.
        lr: learning rate at the start.
        q_min: lowest bits of the schedules; ``n_cycles`` their number of cycles.
        weight_decay: of the optimizer, on all parameters.
        clip: largest total norm of the gradient, or None.
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
    weight_decay: float = 1e-4
    clip: float | None = None
    evaluate_every: int = 0
    running_start: str = "corrected"
    cycle_rule: str = "exact"
    eval_bits: str = "q_max"
    seeds: tuple[int, ...] = field(default=(0, 1, 2), compare=False)


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


@dataclass(frozen=True)
class GraphRecipe(Recipe):
    """Node classification with Adam and a cosine learning rate. A ``batch`` of 0 trains on the full graph.

    Attributes:
        final_lr: learning rate at the end as a share of ``lr``.
        hidden: width of the hidden layers; ``layers`` the number of graph convolutions.
        dropout: on the input of every layer but the first.
        norm: after every hidden layer: "matrix" (over all nodes and features), "node" or "none".
        self_loops: add an edge from every node to itself.
        standardize: shift and scale every feature to mean 0 and variance 1 over all nodes.
        loss: "cross_entropy", or "nll_raw": the negative log-likelihood of logits that are no log-probabilities, as in
            the authors' Arxiv script. It has no lower bound and is there to be compared with.
        aggregation: the sum over neighbours in float32, "fp" (FP-Agg), or "quantized" (Q-Agg).
        fanout: neighbours sampled for every node and layer when training in batches.
        inference: "sampled" evaluates with samples as in training, "exact" with all neighbours, layer by layer.
    """

    final_lr: float = 0.1
    hidden: int = 512
    layers: int = 3
    dropout: float = 0.2
    norm: str = "matrix"
    self_loops: bool = True
    standardize: bool = False
    loss: str = "cross_entropy"
    aggregation: str = "fp"
    fanout: int = 32
    inference: str = "sampled"

    def __post_init__(self) -> None:
        """Check the choices."""
        for name, allowed in (
            ("norm", ("matrix", "node", "none")),
            ("loss", ("cross_entropy", "nll_raw")),
            ("aggregation", ("fp", "quantized")),
            ("inference", ("sampled", "exact")),
        ):
            _choose(name, getattr(self, name), allowed)


@dataclass(frozen=True)
class LanguageModelRecipe(Recipe):
    """Language modelling with an LSTM and SGD. ``batch`` is the number of columns of the text.

    Attributes:
        length: words of a batch in every column.
        embedding: width of the embeddings; ``hidden`` that of the LSTM, ``layers`` the number of its layers.
        dropout: on the LSTM's output, and on the embeddings unless ``drop_embedding`` is False.
        lr_rule: "plateau" divides the rate by ``lr_division`` after every evaluation whose validation loss is not the
            best so far, "cosine" lowers it to ``final_lr`` times ``lr``.
        unit: "words" or "characters".
        vocabulary: how many of the most frequent words are known; None means all of the training text.
        train_tokens, valid_tokens, test_tokens: how many are used from the start of each text; None means all.
        evaluation_batch: columns in evaluation.
    """

    length: int = 35
    embedding: int = 800
    hidden: int = 800
    layers: int = 1
    dropout: float = 0.5
    drop_embedding: bool = True
    lr_rule: str = "plateau"
    lr_division: float = 5.0
    final_lr: float = 0.05
    unit: str = "words"
    vocabulary: int | None = None
    train_tokens: int | None = None
    valid_tokens: int | None = None
    test_tokens: int | None = None
    evaluation_batch: int = 10

    def __post_init__(self) -> None:
        """Check the choices."""
        _choose("lr_rule", self.lr_rule, ("plateau", "cosine"))
        _choose("unit", self.unit, ("words", "characters"))
        if self.lr_rule == "plateau" and not self.evaluate_every:
            raise ValueError("lr_rule 'plateau' needs evaluations: give evaluate_every, or lr_rule='cosine'")


@dataclass(frozen=True)
class EntailmentRecipe(Recipe):
    """Natural language inference with BERT, AdamW and a learning rate that falls linearly.

    Attributes:
        final_lr: learning rate at the end as a share of ``lr``.
        language: of the training and the validation text.
        test_languages: the test sets; "accuracy" is that of the first, the others are named after their language.
        length: tokens of a pair; longer pairs are cut, the longer sentence first.
        padding: "max" pads every pair to ``length``, "longest" to the longest pair of its batch. In float32 this
            changes no result; at low precision ranges then see fewer padding tokens.
        checkpoint: name or folder of a pretrained BERT; "" trains a small one from scratch.
        hidden: width of the small BERT; the inner layers are four times as wide.
        layers: encoder layers of the small BERT; ``heads`` the attention heads of each.
        dropout: of the small BERT, on hidden states and attention.
        vocabulary: largest number of word pieces of the small BERT, which are learned from the training text.
        learning_rates: those of which ``lr`` is one, when it is to be chosen on validation data; () for none.
        train_pairs, valid_pairs, test_pairs: how many are used; None means all.
    """

    final_lr: float = 0.1
    language: str = "de"
    test_languages: tuple[str, ...] = ("de",)
    length: int = 128
    padding: str = "max"
    checkpoint: str = ""
    hidden: int = 128
    layers: int = 2
    heads: int = 2
    dropout: float = 0.1
    vocabulary: int = 8_000
    learning_rates: tuple[float, ...] = ()
    train_pairs: int | None = None
    valid_pairs: int | None = None
    test_pairs: int | None = None

    def __post_init__(self) -> None:
        """Check the choices."""
        _choose("padding", self.padding, ("max", "longest"))
        if not self.test_languages:
            raise ValueError("test_languages must name at least one language")


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


RECIPE_CLASSES: dict[str, type[Recipe]] = {
    "image": ImageRecipe,
    "detection": DetectionRecipe,
    "graph": GraphRecipe,
    "language_model": LanguageModelRecipe,
    "entailment": EntailmentRecipe,
}

# --- embedded data: scikit-learn's 1,797 handwritten digits, 8 x 8 pixels -------------------------

DIGITS_MLP = ImageRecipe(
    task="image", dataset="digits", model="mlp6", quantized="cifar",
    steps=600, batch=64, lr=0.03, clip=1.0, q_min=3, n_cycles=4,  # fragile on purpose: 2 bits fail, 3 bits hurt
    size=8, crop=1, train_images=897, valid_images=200, test_images=700, evaluate_every=100, seeds=(0, 1, 2, 3, 4),
)  # fmt: skip
DIGITS_RESNET = replace(  # BatchNorm makes networks robust: here the effect all but vanishes
    DIGITS_MLP, model="resnet8_w8", steps=400, lr=0.05, clip=None, evaluate_every=200, seeds=(0, 1)
)

# --- CIFAR: section 4.2 of the paper --------------------------------------------------------------

CIFAR = ImageRecipe(
    task="image", dataset="cifar10", model="resnet74", quantized="cifar",
    steps=64_000, batch=128, lr=0.1, q_min=3, n_cycles=8,  # paper 4.2
    crop=4, flip=True, valid_images=5_000, evaluate_every=2_000,
)  # fmt: skip
CIFAR_DEMO = replace(  # 16 x 16 pixels, 2 bits: the paper's setting in five seconds
    CIFAR, model="resnet8_w8", steps=450, batch=32, q_min=2, n_cycles=4, size=16, crop=2, train_images=10_000,
    valid_images=1_000, test_images=2_000, evaluate_every=150, seeds=(0, 1, 2),
)  # fmt: skip

# --- ImageNet: section 4.2 ------------------------------------------------------------------------

IMAGENET = ImageRecipe(
    task="image", dataset="imagenet", model="resnet18", quantized="imagenet",
    steps=90 * 5005, batch=256, lr=0.1, q_min=4, n_cycles=8,
    weight_decay=1e-4,  # the paper's text says 1e-5; the settings it cites, and the authors' code, have 1e-4
    size=224, crop="resized", flip=True, valid_images=10_000, evaluate_every=5 * 5005,
)  # fmt: skip

# --- detection: section 4.2 -----------------------------------------------------------------------

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

# --- graphs: section 4.3 --------------------------------------------------------------------------

ARXIV = GraphRecipe(
    task="graph", dataset="ogbn-arxiv", model="gcn", quantized="all",
    steps=1000, batch=0, lr=1e-3, q_min=3, n_cycles=8, weight_decay=0.0,  # paper 4.3; a step is an epoch
    standardize=True, evaluate_every=20,
)  # fmt: skip
PRODUCTS = GraphRecipe(
    task="graph", dataset="ogbn-products", model="sage", quantized="all",
    steps=80 * 193, batch=1024, lr=3e-4, q_min=3, n_cycles=8, weight_decay=1e-4,  # weight decay: authors' code
    layers=2, self_loops=False, evaluate_every=10 * 193,
)  # fmt: skip
# Sized on Facebook page-page: 22,470 nodes show the order of the schedules in a few seconds a run.
GRAPH_DEMO = replace(ARXIV, steps=64, lr=3e-2, q_min=2, n_cycles=4, hidden=32, evaluate_every=8, seeds=(0, 1, 2))
SAGE_DEMO = replace(
    PRODUCTS, steps=120, batch=512, lr=1e-2, q_min=2, n_cycles=4, hidden=32, fanout=10, standardize=True,
    weight_decay=0.0, evaluate_every=40, seeds=(0, 1, 2),
)  # fmt: skip
DIGITS_GCN = replace(GRAPH_DEMO, dataset="digits-graph", steps=100, lr=1e-2, hidden=64, standardize=False)
DIGITS_SAGE = replace(SAGE_DEMO, dataset="digits-graph", steps=100, batch=128, hidden=64, standardize=False)

# --- language: section 4.4 ------------------------------------------------------------------------

PTB = LanguageModelRecipe(
    task="language_model", dataset="ptb", model="lstm", quantized="all",
    steps=40 * 1328, batch=20, lr=20.0, q_min=5, n_cycles=2, weight_decay=0.0, clip=0.25,  # paper 4.4
    evaluate_every=1328,
)  # fmt: skip
# 2,000 words of Penn Treebank, or characters: low precision shows in seconds.
PTB_DEMO = replace(
    PTB, steps=120, q_min=2, embedding=64, hidden=128, dropout=0.0, lr_rule="cosine", vocabulary=2_000,
    train_tokens=100_000, valid_tokens=10_000, test_tokens=12_500, evaluate_every=0, seeds=(0, 1, 2),
)  # fmt: skip
PYDOC = replace(
    PTB_DEMO, dataset="pydoc", steps=160, unit="characters", vocabulary=None, train_tokens=None, valid_tokens=None,
    test_tokens=None,
)  # fmt: skip

# --- natural language inference: section 4.4 ------------------------------------------------------

XNLI = EntailmentRecipe(
    task="entailment", dataset="xnli", model="bert", quantized="all",
    steps=2 * 6136, batch=64, lr=1e-5, q_min=5, n_cycles=2,  # paper 4.4: 2 epochs of 392,702 pairs
    weight_decay=0.0, clip=1.0,  # authors' code
    checkpoint="bert-base-multilingual-cased", learning_rates=(5e-6, 1e-5, 5e-5),
)  # fmt: skip
PAIRS_DEMO = replace(
    XNLI, model="bert_small", steps=150, batch=32, lr=1e-3, q_min=2, n_cycles=4, length=48, padding="longest",
    checkpoint="", dropout=0.0, learning_rates=(), train_pairs=10_000, valid_pairs=1_000, test_pairs=1_000,
)  # fmt: skip
TEMPLATES = replace(
    PAIRS_DEMO, dataset="templates", language="en", test_languages=("en",), length=24, vocabulary=500,
    train_pairs=None, valid_pairs=None, test_pairs=None,
)  # fmt: skip

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

# --- critical learning periods: section 5 ---------------------------------------------------------


@dataclass(frozen=True)
class Deficits:
    """Settings of the critical-period experiments: training at ``q_min`` bits for a while, elsewhere at q_max.

    Attributes:
        changes: fields of the recipe that differ from those of section 4; ``steps`` is the training after a deficit.
        lengths: low steps at the start of training, which make it longer.
        windows: (start, stop) of low steps within a training of ``window_steps``.
        window_steps: see ``windows``.
        lr_after: the milestones of the learning rate count from the end of a deficit at the start, not from step 0.
        unit: steps that count as one in the names of arms, ``suffix`` what is written behind them.
    """

    changes: dict[str, Any]
    lengths: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]
    window_steps: int
    lr_after: bool = False
    unit: int = 1
    suffix: str = ""


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
_AUTHORS_VOC: dict[str, dict[str, Any]] = {
    "": dict(
        steps=120 * 715, batch=8, flip=True, valid_images=0, eval_bits="current", running_start="zero",
        cycle_rule="floor_plus_one", evaluate_every=5 * 715,
    ),
}  # fmt: skip
_AUTHORS_ARXIV: dict[str, dict[str, Any]] = {
    "": dict(
        steps=500, self_loops=False, loss="nll_raw", eval_bits="current", cycle_rule="floor_plus_one", evaluate_every=1
    ),
}
_AUTHORS_PRODUCTS: dict[str, dict[str, Any]] = {
    "": dict(lr=1e-3, q_min=4, eval_bits="current", cycle_rule="floor_plus_one", evaluate_every=5 * 193),
}
_AUTHORS_PTB: dict[str, dict[str, Any]] = {
    "": dict(n_cycles=8, lr_division=4.0, eval_bits="current", running_start="zero", cycle_rule="floor_plus_one"),
}
_AUTHORS_XNLI: dict[str, dict[str, Any]] = {
    "": dict(
        final_lr=0.0, lr=1e-5, learning_rates=(), eval_bits="current", cycle_rule="floor_plus_one",
        running_start="zero",
    ),
}  # fmt: skip
AUTHORS: dict[str, dict[str, dict[str, Any]]] = {
    "ptb": _AUTHORS_PTB,
    "ogbn-arxiv": _AUTHORS_ARXIV,
    "ogbn-products": _AUTHORS_PRODUCTS,
    "cifar10": _AUTHORS_CIFAR,
    "cifar100": _AUTHORS_CIFAR,
    "imagenet": _AUTHORS_IMAGENET,
    "voc2012": _AUTHORS_VOC,
    "xnli": _AUTHORS_XNLI,
}


OWN = {
    "image": "cifar10",
    "detection": "own-pictures",
    "graph": "own-graph",
    "language_model": "ptb",
    "entailment": "own-pairs",
}  # whose recipes the user's own data takes, by task
OWN_FAMILIES = ("own-pictures", "own-graph", "own-pairs")  # what no data set is called
OGB_GRAPHS = ("ogbn-arxiv", "ogbn-products")
VOC_YEARS = ("voc2007", "voc2012")


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
    _choose("scale", scale, SCALES)
    _choose("preset", preset, PRESETS)
    _choose("task", task, tuple(OWN))
    table = RECIPES[scale]
    family = _family(scale, dataset, task)
    models = [key.split("/")[1] for key in table if key.split("/")[0] == family]
    if not models or dataset in OWN_FAMILIES:
        names = sorted({key.split("/")[0] for key in table} - set(OWN_FAMILIES))
        raise ValueError(f"no {scale} recipe for dataset {dataset!r}; choose from {', '.join(names)}, or your own data")
    found = table[f"{family}/{_choose('model', model or models[0], tuple(models))}"]
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


def is_own(dataset: str) -> bool:
    """Whether ``dataset`` names the user's own files rather than a known data set."""
    return "/" in dataset or "\\" in dataset or dataset.endswith(".npz")
