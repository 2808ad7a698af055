"""Object detection with RetinaNet on Pascal VOC, the user's own images, and scenes of digits.  Paper: section 4.2.

``DetectionTask`` trains and evaluates; ``mean_average_precision`` computes the metrics from detections and objects.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from cpt_extras.optional_libraries import import_optional
from cpt_lab.data.detection import (
    AnnotatedImage,
    backbone_weights,
    load_detection,
    random_detection,
)
from cpt_lab.data.detection_batches import (
    Batch,
    batch_bytes,
    batches,
    evaluation_batches,
)
from cpt_lab.data.loading import load_once, reader_count
from cpt_lab.experiments.detection import DetectionRecipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.tasks import detection_boxes
from cpt_lab.tasks.base import (
    LearningRate,
    Metrics,
    constant,
    make_optimizer,
    sum_batches,
)
from cpt_lab.tasks.detection_boxes import Target
from cpt_lab.tasks.retinanet import Outputs, RetinaNet, retinanet

VOC_IOU = 0.5
COCO_IOUS = tuple(0.5 + 0.05 * i for i in range(10))


class DetectionTask:
    """Adam with a fixed learning rate, focal loss and smooth L1, mean average precision.

    The main metric, "map50", is the VOC metric that the paper's numbers are in; see ``mean_average_precision``.

    Paper: section 4.2.
    Differs: from scratch, BatchNorm uses the statistics of the batch; the paper starts from a pretrained backbone only,
        whose statistics stay frozen. BitOps are those of the images that are trained on (an average over eight
        batches); the authors price 256 images of 224 x 224, which changes totals by a factor, ratios not.
    Differs: images are padded to multiples of 32; the authors pad by a further 32 where they are multiples already.
    """

    fixed_shape = False  # the number of anchors in the loss depends on the data

    def __init__(
        self, spec: RunSpec, device: torch.device, stand_in: bool = False
    ) -> None:
        self.recipe, self.seed, self.device = (
            cast(DetectionRecipe, spec.recipe),
            spec.seed,
            device,
        )
        limits = ("size", "max_size", "train_images", "valid_images", "test_images")
        self.data = (
            random_detection(self.recipe)
            if stand_in
            else load_once(load_detection, self.recipe, *limits)
        )
        self.weights = (
            backbone_weights() if self.recipe.pretrained and not stand_in else None
        )
        in_memory = isinstance(self.data.train[0].image, Tensor)
        self.workers = 0 if in_memory else reader_count(batch_bytes(self.recipe))
        start = (
            "ImageNet-pretrained backbone" if self.recipe.pretrained else "from scratch"
        )
        self.title = f"{self.recipe.model}, {start}, on {self.data.title}"
        # images differ in shape from one batch to the next
        self.cost_batches = 1 if len({a.size for a in self.data.train}) == 1 else 8

    def build_model(self) -> RetinaNet:
        """Build the recipe's RetinaNet."""
        r = self.recipe
        model = retinanet(
            r.model, len(self.data.classes), anchor=r.anchor, frozen=r.pretrained
        )
        if self.weights is not None:
            detection_boxes.load_backbone(model, self.weights)
        return model.to(self.device)

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield training batches from step ``start`` on."""
        return batches(
            self.data.train, self.recipe, self.seed, start, self.workers, self.device
        )

    def inputs(self, batch: Batch) -> tuple[Tensor]:
        """Return the images."""
        return (batch.images,)

    def loss(self, model: nn.Module, batch: Batch, carry: None) -> tuple[Tensor, None]:
        """Return the sum of focal loss and smooth L1."""
        return self._loss(model, model(batch.images), batch), None

    def _loss(self, model: nn.Module, outputs: Outputs, batch: Batch) -> Tensor:
        focal, smooth_l1 = detection_boxes.detection_losses(
            cast(RetinaNet, model), batch.images, outputs, batch.targets
        )
        return focal + smooth_l1

    def evaluate(self, model: nn.Module) -> dict[str, Metrics]:
        """Return the mean average precisions (0..1) and the mean loss of every split that is not empty."""
        metrics = {}
        for name, part in (("valid", self.data.valid), ("test", self.data.test)):
            if part:
                pairs, loss = self.detect(model, part)
                metrics[name] = {**mean_average_precision(pairs), "loss": loss}
        return metrics

    @torch.no_grad()
    def detect(
        self, model: nn.Module, images: Sequence[AnnotatedImage]
    ) -> tuple[list[tuple[Target, AnnotatedImage]], float]:
        """Return every image with the detections of a model in evaluation mode, and the mean loss.

        Detections are boxes (in pixels of the original image), scores and labels. Images are returned in groups of
        similar aspect ratio, not in the order of ``images``.
        """
        pairs = []

        def losses() -> Iterator[tuple[Tensor]]:
            for batch in evaluation_batches(
                images, self.recipe, self.workers, self.device
            ):
                outputs = model(batch.images)
                yield (self._loss(model, outputs, batch).double() * len(batch.images),)
                targets = detection_boxes.detections(
                    cast(RetinaNet, model), batch.images, outputs, batch.sizes
                )
                for target, (height, width), original in zip(
                    targets, batch.sizes, batch.originals, strict=True
                ):
                    scale = torch.tensor(
                        [original.size[1] / width, original.size[0] / height] * 2
                    )
                    on_cpu = {name: t.cpu() for name, t in target.items()}
                    pairs.append(
                        ({**on_cpu, "boxes": on_cpu["boxes"] * scale}, original)
                    )

        (loss,) = sum_batches(losses())
        return pairs, loss / len(images)

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LearningRate]:
        """Return Adam and its fixed learning rate."""
        return make_optimizer(
            torch.optim.Adam, model.parameters(), self.recipe
        ), constant(self.recipe.lr)


def mean_average_precision(pairs: Sequence[tuple[Target, AnnotatedImage]]) -> Metrics:
    """Return the mean over classes of the average precision, by ``torchmetrics``, with COCO's matching of boxes.

    "map50" is VOC's metric since 2010: boxes match from an overlap (IoU) of 0.5 on, and the area under the whole curve
    of precision over recall counts. "map50_11point" is that of VOC 2007: the mean of precision at recall 0, 0.1, ...,
    1. "map" is COCO's: 101 points, and the mean over overlaps of 0.5, 0.55, ..., 0.95. Precision at a recall is the
    best at that recall or a higher one. Classes without an object do not count. The 100 best detections of an image
    count.

    Args:
        pairs: detections (boxes, scores, labels) and annotated objects of every image.

    Raises:
        ValueError: when no image has an object that counts.

    Differs: VOC's own program gives a detection to the object it overlaps most, even if that is taken; COCO's gives it
        to the best that is free. A detection inside a ``difficult`` object is ignored also when it is much smaller.
    """
    counts: Counter[int] = Counter()
    for _, image in pairs:
        counts.update(image.labels[~image.difficult].tolist())
    if not counts:
        raise ValueError(f"there is no object to be found on {len(pairs)} images")
    if not any(len(detections["boxes"]) for detections, _ in pairs):
        return {"map50": 0.0, "map50_11point": 0.0, "map": 0.0}

    # Precision changes only where recall passes k / n for one of the n objects of a class.
    recall_steps = {n: (np.arange(n) + 0.5) / n for n in set(counts.values())}
    eleven_points = np.arange(11) / 10
    recalls = np.unique(np.concatenate([eleven_points, *recall_steps.values()]))
    voc, classes = _precision_table(pairs, [VOC_IOU], recalls)
    coco, _ = _precision_table(pairs, list(COCO_IOUS), np.linspace(0, 1, 101))

    def voc_precision(points: np.ndarray, label: int) -> float:
        return float(
            voc[0, np.searchsorted(recalls, points), classes.index(label)].mean()
        )

    map50 = [voc_precision(recall_steps[n], label) for label, n in counts.items()]
    map50_11point = [voc_precision(eleven_points, label) for label in counts]
    coco_map = [coco[:, :, classes.index(label)].mean() for label in counts]
    return {
        "map50": float(np.mean(map50)),
        "map50_11point": float(np.mean(map50_11point)),
        "map": float(np.mean(coco_map)),
    }


def _precision_table(
    pairs: Sequence[tuple[Target, AnnotatedImage]],
    ious: list[float],
    recalls: np.ndarray,
) -> tuple[np.ndarray, list[int]]:
    """Return precision by (overlap, recall, class), and the labels of the classes in that order."""
    # It would log a table of its own.
    logging.getLogger("faster_coco_eval").setLevel(logging.WARNING)
    metric = import_optional("torchmetrics.detection", "vision").MeanAveragePrecision(
        iou_thresholds=ious,
        rec_thresholds=recalls.tolist(),
        extended_summary=True,
        backend="faster_coco_eval",
    )
    targets = []
    for _, image in pairs:
        arrays = {
            "boxes": image.boxes,
            "labels": image.labels,
            "iscrowd": image.difficult.astype(np.int64),
        }
        targets.append(
            {name: torch.from_numpy(values) for name, values in arrays.items()}
        )
    metric.update([detections for detections, _ in pairs], targets)
    result = metric.compute()
    all_sizes, hundred_best = 0, 2  # indices into the last two dimensions
    precision = result["precision"].numpy()[..., all_sizes, hundred_best]
    return precision, np.atleast_1d(result["classes"]).tolist()
