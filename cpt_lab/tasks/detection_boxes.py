"""Losses of RetinaNet, and its detections.  Paper: section 4.2.

Shapes: N images of H x W pixels, A anchors over all pyramid levels.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from cpt_lab.tasks.retinanet import Outputs, RetinaNet

# boxes: float32 (n, 4) as x1, y1, x2, y2 in pixels; labels: int64 (n,)
Target = dict[str, Tensor]
SMOOTH_L1_BETA = 1 / 9


def load_backbone(model: RetinaNet, path: Path) -> None:
    """Load a file with weights of the backbone as torchvision stores them; ValueError if one is missing."""
    stored_weights = torch.load(path, weights_only=True, map_location="cpu")
    body = model.backbone.body
    names = {name for name in body.state_dict() if not name.startswith("fc.")}
    missing = sorted(names - set(stored_weights))
    if missing:
        raise ValueError(
            f"{path} holds no weights of this backbone: there is no {missing[0]}"
        )
    body.load_state_dict({name: stored_weights[name] for name in names}, strict=False)


def image_anchors(model: RetinaNet, images: Tensor, outputs: Outputs) -> list[Tensor]:
    """Return the anchors (A, 4) of every image."""
    sizes = [tuple(images.shape[-2:])] * len(images)
    return model.anchor_generator(ImageList(images, sizes), outputs.features)


def detection_losses(
    model: RetinaNet, images: Tensor, outputs: Outputs, targets: list[Target]
) -> tuple[Tensor, Tensor]:
    """Return the focal loss of the classes and the smooth L1 loss of the boxes, means over the images, each 0-d.

    An image without positive anchors has a box loss of 0.

    Differs: the focal loss is computed from logits, where the authors clamp probabilities to [1e-4, 1 - 1e-4].
    """
    anchors = image_anchors(model, images, outputs)
    matched = [
        _matched_boxes(model, target["boxes"], a)
        for target, a in zip(targets, anchors, strict=True)
    ]
    head_outputs = {"cls_logits": outputs.logits, "bbox_regression": outputs.offsets}
    focal = model.head.classification_head.compute_loss(targets, head_outputs, matched)

    box_losses = []
    for target, offsets, anchor, index in zip(
        targets, outputs.offsets, anchors, matched, strict=True
    ):
        # Indices, as indexing with a mask waits for a GPU at every use.
        (positive,) = torch.where(index >= 0)
        target_offsets = model.box_coder.encode_single(
            target["boxes"][index[positive]], anchor[positive]
        )
        loss = nn.functional.smooth_l1_loss(
            offsets[positive], target_offsets, reduction="sum", beta=SMOOTH_L1_BETA
        )
        box_losses.append(loss / max(1, target_offsets.numel()))
    return focal, torch.stack(box_losses).mean()


def _matched_boxes(model: RetinaNet, boxes: Tensor, anchors: Tensor) -> Tensor:
    """Return the index of the box that every anchor is trained to predict, (A,); negative for none."""
    if not len(boxes):
        return torch.full((len(anchors),), -1, dtype=torch.int64, device=anchors.device)
    return model.proposal_matcher(box_iou(boxes, anchors))


def detections(
    model: RetinaNet, images: Tensor, outputs: Outputs, sizes: Sequence[tuple[int, int]]
) -> list[Target]:
    """Return boxes, labels and scores of every image, the best score first.

    Args:
        model: model whose anchors and thresholds are used.
        images: (N, 3, H, W) as for its ``forward``.
        outputs: outputs of ``forward`` for the images.
        sizes: height and width of every image without its padding; boxes are clipped to it.
    """
    anchors_per_level = [
        f.shape[-2] * f.shape[-1] * model.head.classification_head.num_anchors
        for f in outputs.features
    ]
    head_outputs = {
        "cls_logits": list(outputs.logits.split(anchors_per_level, 1)),
        "bbox_regression": list(outputs.offsets.split(anchors_per_level, 1)),
    }
    anchors = [
        list(a.split(anchors_per_level)) for a in image_anchors(model, images, outputs)
    ]
    return model.postprocess_detections(head_outputs, anchors, list(sizes))
