"""RetinaNet: boxes and classes from a feature pyramid in one pass, put together from torchvision's parts.

Shapes: N images of H x W pixels, A anchors over all pyramid levels, K classes.  Paper: section 4.2 (object detection).

>>> model = retinanet("retinanet", classes=20)
>>> sum(p.numel() for p in model.parameters())
20165400
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torchvision
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.retinanet import (
    RetinaNetHead,
    RetinaNetRegressionHead,
)
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from cpt_core.models.resnet import BasicBlock, initialize

PYRAMID_LEVELS = 5  # P3 to P7
ASPECT_RATIOS = (0.5, 1.0, 2.0)
ANCHOR_SCALES = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
BOX_WEIGHTS = (10.0, 10.0, 5.0, 5.0)  # box targets are divided by 0.1, 0.1, 0.2, 0.2
PRIOR_PROBABILITY = 0.01  # what an untrained classifier says of every class


class Outputs(NamedTuple):
    """Class logits (N, A, K), box offsets (N, A, 4), and the pyramid (N, C, h, w) that they come from."""

    logits: Tensor
    offsets: Tensor
    features: list[Tensor]


class FrozenStatisticsBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm whose statistics never change: always in evaluation mode, while scale and shift are trained."""

    def __init__(self, channels: int) -> None:
        """Start in evaluation mode: mean 0 and variance 1, until weights are loaded."""
        super().__init__(channels)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)


class RetinaNet(TorchvisionRetinaNet):
    """torchvision's RetinaNet on batches that are resized, normalised and padded already.

    Differs: anchors are torchvision's (rounded to whole pixels, the first one centred on the corner of the image).
    """

    def forward(self, images: Tensor) -> Outputs:
        """(N, 3, H, W), both sides multiples of 32 -> ``Outputs``."""
        features = list(self.backbone(images).values())
        outputs = self.head(features)
        return Outputs(outputs["cls_logits"], outputs["bbox_regression"], features)


def retinanet(
    name: str, classes: int, *, anchor: int = 4, frozen: bool = True
) -> RetinaNet:
    """Return a RetinaNet: a backbone, a pyramid P3 to P7, nine anchors per place, two heads for all levels.

    Args:
        name: a key of ``BACKBONES``.
        classes: number of classes; there is none for the background.
        anchor: side of a level's smallest square anchor in strides of that level; the paper's is 4 (32 pixels at P3).
        frozen: BatchNorm's statistics never change, as in the paper; needs a pretrained backbone to train well.

    Paper: section 4.2; anchors, box weights and initialisation as in the authors' code.
    """
    build, channels, stride, width = BACKBONES[name]
    body = build(FrozenStatisticsBatchNorm2d if frozen else nn.BatchNorm2d)
    backbone = BackboneWithFPN(
        body,
        {"layer2": "0", "layer3": "1", "layer4": "2"},
        list(channels),
        width,
        extra_blocks=LastLevelP6P7(channels[-1], width),
    )
    sides = tuple(
        tuple(round(anchor * stride * 2**level * scale) for scale in ANCHOR_SCALES)
        for level in range(PYRAMID_LEVELS)
    )
    generator = AnchorGenerator(sides, (ASPECT_RATIOS,) * len(sides))
    count = len(ASPECT_RATIOS) * len(ANCHOR_SCALES)
    head = RetinaNetHead(width, count, classes)
    head.regression_head = RetinaNetRegressionHead(
        width, count
    )  # drawn again: seeds give the weights of stored runs
    model = RetinaNet(
        backbone,
        classes,
        anchor_generator=generator,
        head=head,
        # an anchor is positive from an overlap of 0.5 on, even if that leaves an object without any
        proposal_matcher=Matcher(0.5, 0.4, allow_low_quality_matches=False),
        score_thresh=0.05,
        nms_thresh=0.5,
        detections_per_img=100,
    )
    model.box_coder = head.regression_head.box_coder = BoxCoder(BOX_WEIGHTS)
    initialize(model)
    for output in (head.classification_head.cls_logits, head.regression_head.bbox_reg):
        nn.init.zeros_(output.weight)
    nn.init.constant_(
        head.classification_head.cls_logits.bias,
        -math.log((1 - PRIOR_PROBABILITY) / PRIOR_PROBABILITY),
    )
    return model


def _small_backbone(norm: Callable[..., nn.Module]) -> nn.Module:
    """Return a backbone for small pictures: 16 to 128 channels, one block per stage."""
    stem = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, padding=1, bias=False), norm(16), nn.ReLU(inplace=True)
    )
    stages = {
        f"layer{i + 1}": BasicBlock(c, 2 * c, 2, norm)
        for i, c in enumerate((16, 32, 64), start=1)
    }
    return nn.Sequential(
        OrderedDict(stem=stem, layer1=BasicBlock(16, 16, 1, norm), **stages)
    )


# name -> backbone by its normalisation layer, channels of its last three stages, stride of the first of them (pixels
# between the anchors of P3), channels of the pyramid
BACKBONES: dict[
    str, tuple[Callable[[Any], nn.Module], tuple[int, int, int], int, int]
] = {
    "retinanet": (
        lambda norm: torchvision.models.resnet18(norm_layer=norm),
        (128, 256, 512),
        8,
        256,
    ),
    "retinanet_small": (_small_backbone, (32, 64, 128), 4, 32),
}
