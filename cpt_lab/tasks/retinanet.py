"""RetinaNet: boxes and classes from a feature pyramid in one pass, assembled from torchvision's parts.

``retinanet`` returns a model with one of the ``BACKBONES``.

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
PRIOR_PROBABILITY = (
    0.01  # probability that an untrained classifier gives to every class
)


class Outputs(NamedTuple):
    """Class logits (N, A, K), box offsets (N, A, 4), and the pyramid (N, C, h, w) from which they were computed."""

    logits: Tensor
    offsets: Tensor
    features: list[Tensor]


class FrozenStatisticsBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm with fixed statistics: always in evaluation mode, while its scale and shift are trained."""

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
        """Return class logits, box offsets and features of images (N, 3, H, W) with sides that are multiples of 32."""
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
    spec = BACKBONES[name]
    width = spec.pyramid_channels
    body = spec.build(FrozenStatisticsBatchNorm2d if frozen else nn.BatchNorm2d)
    backbone = BackboneWithFPN(
        body,
        {"layer2": "0", "layer3": "1", "layer4": "2"},
        list(spec.stage_channels),
        width,
        extra_blocks=LastLevelP6P7(spec.stage_channels[-1], width),
    )
    sides = []
    for level in range(PYRAMID_LEVELS):
        stride = spec.stride * 2**level
        sides.append(tuple(round(anchor * stride * scale) for scale in ANCHOR_SCALES))
    generator = AnchorGenerator(tuple(sides), (ASPECT_RATIOS,) * len(sides))
    count = len(ASPECT_RATIOS) * len(ANCHOR_SCALES)
    head = RetinaNetHead(width, count, classes)
    # Drawn a second time, so that seeds give the initial weights of stored runs.
    head.regression_head = RetinaNetRegressionHead(width, count)
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
    """Return a backbone for small images: 16 to 128 channels, one block per stage."""
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


def _resnet18(norm: Callable[..., nn.Module]) -> nn.Module:
    return torchvision.models.resnet18(norm_layer=norm)


class BackboneSpec(NamedTuple):
    """Backbone of a detector.

    Attributes:
        build: returns the backbone for a normalisation layer.
        stage_channels: channels of its last three stages.
        stride: stride of the first of these stages: pixels between the anchors of P3.
        pyramid_channels: channels of the feature pyramid.
    """

    build: Callable[[Any], nn.Module]
    stage_channels: tuple[int, int, int]
    stride: int
    pyramid_channels: int


BACKBONES = {
    "retinanet": BackboneSpec(_resnet18, (128, 256, 512), 8, 256),
    "retinanet_small": BackboneSpec(_small_backbone, (32, 64, 128), 4, 32),
}
