"""Object detection.  Paper: section 4.2, figure 4.

- Pascal VOC 2012 with RetinaNet on a pretrained ResNet-18: 120 epochs of 1,430 steps of 4 pictures, Adam, q_min 5.
- The ten schedules and static precision, 8 cycles, q_max 6 and 8, three seeds: 66 runs.

The metric is the mean average precision at an overlap of 0.5, as VOC has it since 2010, at the end, at q_max bits.
Training takes all 5,717 pictures: nothing is held out, and the best evaluation is chosen on the test set and called so
("best_test"). Embedded stand-in: scenes of scikit-learn's digits.

Differs: the authors' script prints the last and the best evaluation, at the bits of the step; the paper does not say
    which it reports.
"""

from dataclasses import dataclass, replace
from typing import Any

from cpt_lab.experiments.schema import Changes, Dataset, Experiment, Metric, Recipe


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
        super().__post_init__()
        if not 32 <= self.size < self.max_size:
            raise ValueError(
                f"size must be at least 32 and below max_size {self.max_size}, got {self.size}"
            )

    def decay_fields(self, decay: str) -> dict[str, Any]:
        """Return no fields for "constant", which is the recipe's own rule."""
        return {} if decay == "constant" else super().decay_fields(decay)


# Differs: gradients are clipped to a norm of 0.1, which the authors' script does and the paper's text does not mention.
VOC2012 = DetectionRecipe(
    task="detection",
    dataset="voc2012",
    model="retinanet",
    quantized="all",
    steps=120 * 1430,
    batch=4,
    lr=1e-5,
    q_min=5,
    n_cycles=8,  # paper 4.2: 120 epochs of 5,717 pictures
    weight_decay=0.0,
    clip=0.1,
    pretrained=True,
    evaluate_every=5 * 1430,
)

VOC_DEMO = replace(  # small pictures, from scratch: a few hundred steps on a CPU
    VOC2012,
    steps=240,
    lr=1e-4,
    n_cycles=4,
    pretrained=False,
    size=128,
    anchor=2,
    evaluate_every=0,
    seeds=(0,),
)

SCENES = replace(
    VOC_DEMO,
    dataset="digit-scenes",
    model="retinanet_small",
    steps=200,
    batch=8,
    lr=2e-3,
    q_min=3,
    n_cycles=2,
    size=96,
    anchor=4,
    train_images=400,
    valid_images=50,
    test_images=100,
    seeds=(0, 1),
)

AUTHORS_VOC: Changes = {
    "": dict(
        steps=120 * 715,
        batch=8,
        flip=True,
        eval_bits="current",
        running_start="zero",
        cycle_rule="floor_plus_one",
        evaluate_every=5 * 715,
    ),
}

VOC_SIZES = {"classes": 20, "height": 375, "width": 500}  # of the usual picture

EXPERIMENT = Experiment(
    recipe=DetectionRecipe,
    task="cpt_lab.tasks.detection:DetectionTask",
    artefact="figure_4",
    metrics=(
        Metric("map50", "test mAP at IoU 0.5 (%)", "%", 100.0, worst=lambda _: 0.0),
        Metric("map", "test mAP, COCO (%)", "%", 100.0, worst=lambda _: 0.0),
    ),
    user_data_like="own-pictures",
    card="own-pictures.md",
    needs="boxes in Pascal VOC's layout",
    layouts=tuple(
        f"{place}Annotations {place}JPEGImages {place}ImageSets/Main/train.txt"
        for place in ("", "VOC*/", "VOCdevkit/VOC*/")
    ),
    extra="vision",
    download="cpt_lab.data.detection:download",
    weights=("resnet18",),
    datasets=(
        Dataset(
            "digit-scenes",
            "synthetic scenes of scikit-learn's digits",
            embedded="stand for nothing in the paper",
            recipes={
                "smoke": (
                    replace(
                        SCENES,
                        steps=16,
                        batch=2,
                        size=64,
                        train_images=32,
                        valid_images=0,
                        test_images=8,
                        seeds=(0,),
                    ),
                ),
                "demo": (SCENES,),
            },
            sizes={"classes": 10},
        ),
        Dataset(
            "voc2007",
            "Pascal VOC 2007",
            like="own-pictures",
            sizes=VOC_SIZES,
            folders=("VOCdevkit/VOC2007",),
        ),
        Dataset(
            "voc2012",
            "Pascal VOC 2012",
            recipes={"paper": (VOC2012,)},
            like="own-pictures",
            authors=AUTHORS_VOC,
            sizes=VOC_SIZES,
            folders=("VOCdevkit/VOC2012",),
        ),
        Dataset(
            "own-pictures",
            recipes={
                "smoke": (replace(VOC_DEMO, steps=16, n_cycles=2, batch=2, size=64),),
                "demo": (VOC_DEMO,),
                "paper": (VOC2012,),
            },
        ),
    ),
)
